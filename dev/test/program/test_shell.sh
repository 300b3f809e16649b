#!/usr/bin/env bash
# No shell script has a finding of shellcheck, such as an unquoted variable, a misspelt name or an unchecked `cd`. .shellcheckrc
# lists the codes that are disabled, and why.
. "$(dirname "$0")/../test.sh"
unset SHELLCHECK_OPTS

# Prints the paths of the shell scripts in this folder and below: *.sh, and files whose shebang names a shell, such as
# .ci/run. Untracked files count, ignored files do not.
scripts() {
    local file first
    git ls-files --cached --others --exclude-standard >"$tmp/files" 2>/dev/null || skip "needs git"
    while IFS= read -r file; do
        [ -f "$file" ] || continue # deleted but not committed
        first=
        [[ $file == *.sh ]] || IFS= LC_ALL=C read -r -n 80 first <"$file" || true
        if [[ $file == *.sh || $first =~ ^#!.*[/\ ](ba|da)?sh(\ |$) ]]; then echo "$file"; fi
    done <"$tmp/files"
}

# check FILE ...: prints the findings in these scripts; fails if it has any
check() {
    command -v shellcheck >/dev/null || skip "needs shellcheck"
    printf '%s\0' "$@" | xargs -0 -n 8 -P "$(getconf _NPROCESSORS_ONLN)" shellcheck -x -f gcc
}

test_findings() {
    wants_more
    local files
    scripts >"$tmp/scripts"
    mapfile -t files <"$tmp/scripts"
    [ ${#files[@]} -ge 50 ] || fail "only ${#files[@]} scripts found"
    check "${files[@]}" || fail "shellcheck has findings"
}

test_every_script_is_found() {
    mkdir -p "$tmp/tree/.ci"
    cd "$tmp/tree"
    git init -q . 2>/dev/null || skip "needs git"
    echo ignored.sh >.gitignore
    echo 'echo sourced' | tee sourced.sh >ignored.sh
    echo '#!/usr/bin/env bash' | tee .ci/run >tool
    echo '#!/bin/sh -e' >"two words"
    echo '#!/usr/bin/env python3' >python
    printf '\177ELF\0#!/bin/sh\n' >binary
    echo 'run it with #!/bin/sh' >text
    : >empty
    git add .ci tool
    scripts >"$tmp/out"
    want "the scripts" "$(sort "$tmp/out" | tr '\n' ' ')" ".ci/run sourced.sh tool two words "
}

# Each line has a code and a script with that finding. Like all tests, the script sources a file with shared variables.
test_bad_scripts_are_refused() {
    local code bad
    mkdir -p "$tmp/bad"
    cp .shellcheckrc "$tmp/bad/"
    cd "$tmp/bad"
    echo 'shared=1' >shared.sh
    while read -r code bad; do
        printf '#!/usr/bin/env bash\n. "$(dirname "$0")/shared.sh"\necho "$shared"\n%s\n' "$bad" >bad.sh
        check bad.sh >out && fail "not refused: $bad"
        contains "[$code]" out
    done <<'END'
SC2086 rm -r $1
SC2154 echo "$shard"
SC2034 unused=1
SC2164 cd "$1"; rm -f -- *.o
SC2046 rm $(cat list)
SC1073 if true; then
SC1091 . "$(dirname "$0")/missing.sh"
END
    printf '#!/usr/bin/env bash\n. "$(dirname "$0")/shared.sh"\necho "$shared"\n' >good.sh
    check good.sh || fail "a good script is refused"
}

tests=(findings every_script_is_found bad_scripts_are_refused)
run_tests_once "$@"
