#!/usr/bin/env bash
# Makes shards of natural text from the documentation packages of Debian 12. See --help. With the packages of 2026-11-25
# (linux-doc-6.1 6.1.192-2), the shards have these SHA-256 checksums:
#
#     6fded8ecd5d93a5a3b91a03107866ca6d0f4eef7df2016ba353e220dcdfc510b  docs_train_000000.bin
#     49ac2be1d95f7c5424e71d21ef90e21802f8f88966fbeafc6106e930340b814b  docs_val_000000.bin
set -eu -o pipefail
export LC_ALL=C # bytes, not characters

packages="anarchism apache2-doc bind9-doc borgbackup-doc buildbot-doc c++-annotations-html clang-16-doc cmake-doc debian-faq
    debian-handbook debian-policy debian-reference-en developers-reference docutils-doc exim4-doc-html ffmpeg-doc
    gap-doc git-doc gradle-doc harden-doc installation-guide-amd64 jargon-text libreoffice-help-en-us linux-doc-6.1
    llvm-16-doc manpages manpages-dev maxima-doc nim-doc nodejs-doc nova-doc octave-doc perl-doc postfix-doc
    postgresql-doc-15 python-celery-doc python-cryptography-doc python-django-doc python-flask-doc python-ipython-doc
    python-pytest-doc python-scrapy-doc python-sqlalchemy-doc python-tornado-doc python3.11-doc r-doc-html
    slurm-wlm-doc sphinx-doc sqlite3-doc swi-prolog-doc swift-doc vim-doc zsh-doc"

usage() {
    cat <<'HELP'
usage: dev/measured/debian_docs.sh [DIRECTORY [TOKENIZER]]

Makes DIRECTORY/shards/docs_train_000000.bin (28,000,000 tokens at most) and docs_val_000000.bin (1,000,000 tokens of other files)
from the documentation packages of Debian 12, and DIRECTORY/packages.txt: version, bytes and share of each package in the text.
The same versions give the same shards. It needs Debian 12 with current package lists (apt-get update) and 2 GB of disk.

  DIRECTORY    working directory (default: data/debian_docs); packages that are in it are not downloaded again
  TOKENIZER    directory with GPT-2's vocabulary (default: data/gpt2)
  --help, -h   this text

Environment:
  TOKENIZE     the program (default: dev/data/tokenize)
HELP
}
case ${1-} in
-h | --help) usage; exit 0 ;;
-*) echo "$0: unknown flag '$1'; see --help" >&2; exit 2 ;;
esac
[ $# -le 2 ] || { echo "$0: too many arguments; see --help" >&2; exit 2; }
tokenizer=$(realpath -m "${2:-data/gpt2}")
tokenize=$(realpath -m "${TOKENIZE:-dev/data/tokenize}")
[ -d "$tokenizer" ] || { echo "$0: no directory $tokenizer: scripts/download.sh gets GPT-2's vocabulary" >&2; exit 1; }
[ -x "$tokenize" ] || { echo "$0: no program $tokenize: make dev/data/tokenize" >&2; exit 1; }
mkdir -p "${1:-data/debian_docs}/debs"
cd "${1:-data/debian_docs}"

# ---- packages: download, unpack to root/PACKAGE ----
missing=
for package in $packages; do
    compgen -G "debs/${package}_*.deb" >/dev/null || missing+=" $package"
done
# shellcheck disable=SC2086 # one word for each package
[ -z "$missing" ] || (cd debs && apt-get download $missing)
rm -rf root
mkdir root
for package in $packages; do
    for deb in "debs/${package}"_*.deb; do
        echo "$package $(dpkg-deb -f "$deb" Version)"
        dpkg-deb -x "$deb" "root/$package"
    done
done >versions.txt
find root -type f -name '*.gz' -exec gzip -df {} +

# ---- files: each content once, in the order of its checksum, which mixes the packages ----
find root -regextype posix-extended -type f -regex '.*\.(html?|txt|rst|md|pod)|root/manpages.*/man/man[1-8]/.*' \
    ! -regex '.*/(_sources|_static|_modules|javadoc|groovydoc|translations)/.*' \
    ! -iregex '.*/[^/]*(genindex|modindex|bookindex|theindex|changelog|search|jargon\.html)[^/]*' \
    ! -regex '.*/(ca|cs|da|de|el|es|fr|id|it|ja|ko|nl|pt|pt-br|ro|ru|sv|tr|vi|zh_CN|zh-cn)/.*' \
    ! -regex '.*/([a-df-z][a-z]|e[a-mo-z])-[A-Z]{2}/.*' -print0 |
    xargs -0 md5sum | sort | uniq -w 32 >files.txt

# ---- text: each document a line of JSON. About one in 26, by its checksum, is for validation ----
rm -f val.jsonl train.jsonl
awk '
    BEGIN {
        n = split("quot 34 amp 38 apos 39 lt 60 gt 62 nbsp 32 copy 169 laquo 171 reg 174 deg 176 plusmn 177 middot 183 raquo 187 " \
            "times 215 auml 228 eacute 233 ouml 246 uuml 252 ndash 8211 mdash 8212 lsquo 8216 rsquo 8217 ldquo 8220 rdquo 8221 " \
            "bull 8226 hellip 8230 trade 8482 larr 8592 rarr 8594 le 8804 ge 8805 " \
            "para 182 rArr 8658 sol 47 euro 8364", word, " ")
        for (i = 1; i < n; i += 2) { code[word[i]] = word[i + 1] }
        skipped = "^(script|noscript|style|head|nav|header|footer|svg|form|select|button)$"
        marked = "(class|id|role) *= *[\"\047]?(headerlink|sphinxsidebar|related|nav|toc|side|foot|header|breadcrumb|index|menu|" \
            "linenos|contents|copyright|search|banner|contentinfo)"
        block = "^/?(p|div|h[1-6]|pre|table|ul|ol|dl|section|article|blockquote|body|hr|main)$"
    }
    function number(digits,    value, i) { # "8211" or "x2013"
        if (digits !~ /^[xX]/) { return digits + 0 }
        for (i = 2; i <= length(digits); i++) { value = value * 16 + index("123456789abcdef", tolower(substr(digits, i, 1))) }
        return value
    }
    function utf8(c) {
        if (c < 128) { return c < 32 ? " " : sprintf("%c", c) }
        if (c < 2048) { return sprintf("%c%c", 192 + int(c / 64), 128 + c % 64) }
        if (c < 65536) { return sprintf("%c%c%c", 224 + int(c / 4096), 128 + int(c / 64) % 64, 128 + c % 64) }
        return sprintf("%c%c%c%c", 240 + int(c / 262144), 128 + int(c / 4096) % 64, 128 + int(c / 64) % 64, 128 + c % 64)
    }
    function decode(text,    out, name) { # entities
        while (match(text, /&#?[a-zA-Z0-9]+;/)) {
            name = substr(text, RSTART + 1, RLENGTH - 2)
            out = out substr(text, 1, RSTART - 1)
            text = substr(text, RSTART + RLENGTH)
            out = out (name ~ /^#/ ? utf8(number(substr(name, 2))) : name in code ? utf8(code[name]) : "&" name ";")
        }
        return out text
    }
    function flush() { # ends a paragraph
        if (kind == "html") { paragraph = decode(paragraph) }
        gsub(/\302\240/, " ", paragraph)                                                 # no-break space
        gsub(/\302\266|\302\255|\357\202\301|\357\273\277|\342\200\213/, "", paragraph) # pilcrow, soft hyphen, anchor, marks
        gsub(/[\001-\010\013-\037\177]/, "", paragraph)
        gsub(/[ \t]+\n/, "\n", paragraph)
        gsub(/\n\n\n+/, "\n\n", paragraph)
        sub(/^([ \t]*\n)+/, "", paragraph)
        sub(/[ \t\n]+$/, "", paragraph)
        if (paragraph ~ /[a-zA-Z0-9]/ && !(length(paragraph) > 200 && seen[paragraph]++)) {
            articles += gsub(/ the /, "&", paragraph)
            document[++count] = paragraph
            bytes += length(paragraph) + 2
        }
        paragraph = ""
    }
    function html_part(    tag, name, end) { # $0: a tag without its "<", and the text up to the next tag
        if (comment || /^!--/) {
            end = index($0, "-->")
            comment = !end
            if (comment) { return }
            end += 2
        } else {
            end = index($0, ">")
            tag = tolower(substr($0, 1, end - 1))
            name = tag
            sub(/[ \t\r\n].*/, "", name)
            sub(/\/$/, "", name)
        }
        if (skip != "") { # inside an element that is left out
            depth += (name == skip) - (name == "/" skip)
            if (depth > 0 && !(skip == "head" && name == "body")) { return }
            skip = ""
        } else if (tag !~ /\/$/ && (name ~ skipped || name ~ /^(div|ul|ol|table|a|aside|section|dl|span)$/ && tag ~ marked)) {
            skip = name
            depth = 1
            return
        }
        if (name ~ /^\/?pre$/) { verbatim = name == "pre" }
        if (name ~ block) { flush() }
        else if (name ~ /^(li|tr|dt|dd|br)$/) { paragraph = paragraph "\n" }
        else if (name ~ /^t[dh]$/ && paragraph !~ /(^|[ \n])$/) { paragraph = paragraph " " }
        $0 = substr($0, end + 1)
        if (!verbatim) {
            gsub(/[ \t\r\n]+/, " ")
            if (paragraph ~ /(^|[ \n])$/) { sub(/^ /, "") }
        }
        paragraph = paragraph $0
    }
    function text_line(    request, letter, text) {
        sub(/\r$/, "")
        if (kind == "man") { # roughly: the text of headings and fonts stays, other requests go
            request = substr($1, 2, /^[.\047]/ ? 2 : 0)
            if (request ~ /^(S[HS]|[TIH]P|PP?|LP|sp|nf|fi|E[XE])$/) { flush() }
            if (/^[.\047]/) {
                if (request !~ /^(S[HSBM]|[BIR][BIR]?|MR)$/) { return }
                sub(/^[^ ]+ */, "")
                gsub(/"/, ""); gsub(/ \(/, "("); gsub(/ ,/, ","); gsub(/ \./, ".")
            }
            gsub(/\\f(\(..|\[[A-Z]*\]|.)|\\[&|^%:\/,)c]|\\s[-+]?[0-9]|\\".*/, "")
            gsub(/\\\([ac]q/, "\047"); gsub(/\\\([lr]q/, "\""); gsub(/\\\(em/, "--"); gsub(/\\(-|\(en)/, "-"); gsub(/\\[ ~0]/, " ")
            gsub(/\\e/, "\\")
        }
        if (kind == "pod") {
            if (/^=(over|back|cut|pod|encoding|begin|end|for)/) { return }
            sub(/^=[a-z]+[0-9]* */, "")
            while (match($0, /[BCEFILSXZ]<[^<>]*>/)) { # B<bold>, L<text|link>, E<gt>, X<index entry>
                letter = substr($0, RSTART, 1)
                text = substr($0, RSTART + 2, RLENGTH - 3)
                if (letter == "L") { sub(/\|.*/, "", text) }
                if (letter == "E") { text = "&" text ";" }
                if (letter ~ /[XZ]/) { text = "" }
                $0 = substr($0, 1, RSTART - 1) text substr($0, RSTART + RLENGTH)
            }
            $0 = decode($0)
        }
        if (/^[ \t]*$/) { flush() } else { paragraph = paragraph $0 "\n" }
        if (request ~ /^S[HS]$/) { flush() }
    }
    { # files.txt: checksum, path
        sum = $1
        path = substr($0, 35)
        split(path, part, "/")
        kind = path ~ /\/man\/man/ ? "man" : path ~ /\.html?$/ ? "html" : path ~ /\.pod$/ ? "pod" : "text"
        title = path
        sub(/.*\//, part[2] "/", title)
        sub(/\.[a-z]+$/, "", title)
        if (NR == FNR && kind == "html") { has_html[title] }
        if (NR == FNR || kind == "text" && title in has_html) { next } # the text is probably the source of the page
        paragraph = skip = ""
        comment = verbatim = depth = count = bytes = articles = 0
        RS = kind == "html" ? "<" : "\n"
        while ((getline <path) > 0) {
            if (kind == "html") { html_part() } else { text_line() }
        }
        close(path)
        RS = "\n"
        flush()
        if (bytes < 300 || articles * 500 < bytes) { next } # tables, indexes, other languages
        out = sum ~ /^0[0-9]/ ? "val.jsonl" : "train.jsonl"
        printf "{\"text\": \"" >out
        for (i = 1; i <= count; i++) {
            text = document[i]
            gsub(/\\/, "&&", text); gsub(/"/, "\\\\&", text); gsub(/\n/, "\\n", text); gsub(/\t/, "\\t", text)
            printf "%s\\n\\n", text >out
        }
        print "\"}" >out
        total += bytes
        share[part[2]] += bytes
    }
    END { for (p in share) { printf "%s %d %.1f%%\n", p, share[p], 100 * share[p] / total } }
' files.txt files.txt | sort >shares.txt
sort versions.txt | join - shares.txt | sort -k 3,3nr | column -t | tee packages.txt

# ---- tokens ----
rm -rf shards tokens
mkdir shards tokens
for set in val train; do
    iconv -c -f UTF-8 -t UTF-8 $set.jsonl >$set.utf8.jsonl || [ $? = 1 ] # 1: bytes that are not UTF-8 were left out
    limit=-s; count=28000000
    [ $set = train ] || { limit=-v; count=1000000; }
    "$tokenize" -i $set.utf8.jsonl -t "$tokenizer" $limit $count -o tokens/$set
    mv tokens/${set}_${set}_000000.bin shards/docs_${set}_000000.bin # what is over the limit stays in tokens/
done
ls -l shards
