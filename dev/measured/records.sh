#!/usr/bin/env bash
# Writes the tables of dev/measured/README.md from records.csv and from dev/cuda/results/GPU/*.csv.
#
#     dev/measured/records.sh             rewrites the tables
#     dev/measured/records.sh --check     changes nothing; exits 1 if README.md differs from what would be written
#     dev/measured/records.sh --chart     prints the CSV of training.svg, which dev/cuda/plot --speed draws
#
# A line of records.csv is what one program measured in one run. Append new lines at the end: dates ascend, and of two runs on
# one date the later line is the newer. The columns, none of which contains a comma:
#
#     date, run      the programs of one run have the same label, and ratios are only taken within a run
#     commit         the commit whose documents first had the figure; empty if unknown
#     card, group    the machine; the table
#     model, quantity, B, T     what is measured. With card and group, they are the key of a row in the table
#     program, values, unit     repetitions are separated by spaces. The table has their median, or their mean if there is no unit
#     command        what was run
#     idea           for the board: what made this step faster than the one before
#
# A table follows a mark in README.md, and ends with the last line that begins with `|`:
#
#     <!-- records: GROUP -->            the newest run of each key, the newest run first
#     <!-- records: GROUP, plain -->     the same without ratios and tokens per second
#     <!-- board -->                     the lines that have an idea
#     <!-- kernels: GPU -->              the fastest kernel of each op in dev/cuda/results/GPU
set -u -o pipefail
cd "$(dirname "$0")" || exit 1
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }
mode=${1---write}
if [ $# -gt 1 ] || ! [[ $mode =~ ^--(write|check|chart)$ ]]; then
    echo "$0: unknown argument '$*'; usage: $0 [--check | --chart]" >&2
    exit 2
fi
results=../cuda/results
tmp=$(mktemp -d /tmp/llmc_records_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

# Prints the table of kernels: for each CSV of results/GPU, its fastest kernel except the vendor's library, which is kernel 0.
# The optional file pytorch.txt holds PyTorch's times: OP, milliseconds eager, milliseconds compiled (nan: not measured).
kernels() { # GPU
    local csv peer=$results/$1/pytorch.txt
    [ -f "$peer" ] || peer=/dev/null
    compgen -G "$results/$1/*.csv" >/dev/null || die "no dev/cuda/results/$1/*.csv: make bench writes them"
    echo "|op|B x T x C|kernel|ms|of bandwidth|TFLOP/s|of matmul|x library|x kernel 1|x PyTorch eager|x compiled|"
    echo "|---|---|---|---|---|---|---|---|---|---|---|"
    for csv in "$results/$1"/*.csv; do
        [ "${csv##*/}" != tuned.csv ] || continue # of make tune
        awk -F , -v peer="$peer" '
            function cell(format, x, unit) { return (x > 0 && unit > 0) ? sprintf(format, x / unit) : "" }
            function field(name, otherwise) { return (name in at) ? $at[name] : otherwise } # older CSVs have fewer columns
            NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
            { ms = $at["median_ms"] + 0; number = $at["kernel"] + 0 }
            number <= 1 && (!(number in base) || ms < base[number]) { base[number] = ms }
            number > 0 && (best == "" || ms < best) { best = ms; row = $0 }
            END {
                if (row == "") { exit 1 }
                $0 = row
                reads = field("reads_only", 0) + 0
                while ((getline line <peer) > 0) {
                    split(line, word, " ")
                    if (word[1] == $at["op"]) { eager = word[2]; compiled = word[3] }
                }
                printf "|%s|%dx%dx%d|%d|%.4f|", $at["op"], $at["B"], $at["T"], $at["C"], $at["kernel"], best
                printf "%s|", cell("%.0f%%", 100 * $at["gb_s"], reads ? $at["read_gb_s"] : $at["copy_gb_s"])
                printf "%s|", cell("%.0f", $at["tflop_s"] < 10 ? 0 : $at["tflop_s"], 1)
                printf "%s|", cell("%.0f%%", 100 * $at["tflop_s"], $at["matrix_tflop_s"])
                printf "%s|%s|%s|%s|\n", cell("%.2f", base[0], best), cell("%.2f", base[1], best), cell("%.2f", eager + 0, best),
                    cell("%.2f", compiled == "nan" ? 0 : compiled + 0, best)
            }' "$csv" || die "$csv has no row of a kernel"
    done
}

# Prints the table of GROUP, or with the names `board` and `chart` these two, from records.csv.
table() { # GROUP [plain]
    awk -F , -v wanted="$1" -v plain="${2-}" '
        function stop(what) { print "error: records.csv, line " NR ": " what >"/dev/stderr"; bad = 1; exit 1 }
        # Returns the median of the repetitions, or their mean if they have no unit, with as many decimals as they have.
        function value(values, unit,    v, n, i, j, t, sum, decimals) {
            n = split(values, v, " ")
            if (n == 1) { return values }
            for (i = 1; i <= n; i++) {
                sum += v[i]
                t = index(v[i], ".") ? length(v[i]) - index(v[i], ".") : 0
                if (t > decimals) { decimals = t }
                for (j = i; j > 1 && v[j - 1] + 0 > v[j] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
            }
            t = unit == "" ? sum / n : (v[int((n + 1) / 2)] + v[int(n / 2) + 1]) / 2
            return sprintf("%." (decimals + 0) "f", t + 1e-9)
        }
        # Sets f[], the fields of a line, and key. Returns the value.
        function read_line(nr) {
            split(line[nr], f, FS)
            key = f[4] FS f[6] FS f[7] FS f[8] FS f[9]
            return value(f[11], f[12])
        }
        function is_newest(nr) { if (!(nr in line)) { return 0 } read_line(nr); return newest[f[5], key] == f[2] }
        # Returns tokens per second: of a training step in ms, or of B sequences that get a token each in us.
        function tokens(x, unit, b, t) {
            x = unit == "us" ? b / x * 1000 : unit == "ms" && t ? b * t / x : 0
            return x && b ? sprintf(x < 100 ? "%.1fk" : "%.0fk", x) : ""
        }
        # Returns how many times as fast the first program is.
        function ratio(x, first, unit) {
            return plain != "" || unit == "" || unit == "%" ? "" : sprintf(" (%.2f)", unit ~ /.\/s$/ ? first / x : x / first)
        }
        function join(a, b) { return a (a != "" && b != "" ? ", " : "") b }
        NR == 1 { next }
        NF != 14 { stop(NF " fields, not 14") }
        $1 !~ /^20[0-9][0-9]-[0-9][0-9]-[0-9][0-9]$/ || $1 < last { stop("date " $1 " after " last) }
        $11 !~ /^[0-9]/ { stop("value " $11) }
        { last = $1 }
        wanted != "board" && wanted != "chart" && $5 != wanted { next }
        {
            line[NR] = $0
            read_line(NR)
            if (newest[f[5], key] != f[2]) { newest[f[5], key] = f[2]; first_line[f[5], key] = NR }
            at[f[5], key, f[2], f[10]] = NR
            found = 1
        }
        function print_board(    nr, x, commit, text, peer) {
            print "|date|commit|ms|tokens/s|x llm.c|idea|"
            print "|---|---|---|---|---|---|"
            for (nr = NR; nr > 1; nr--) {
                x = read_line(nr)
                if (f[14] == "") { continue }
                text = f[14] "|"
                gsub(/;/, ",", text)
                printf "|%s|%s|%s|%s|", f[1], f[3], x, tokens(x, f[12], f[8], f[9])
                peer = at[f[5], key, f[2], "llm.c with cuDNN"]
                print (peer ? sprintf("%.2f", read_line(peer) / x) : "") "|" text
            }
        }
        # Prints the keys whose newest run includes PyTorch.
        function print_chart(    nr, i, n, program, about, batch) {
            print "group,program,ours,median_ms,tokens,about"
            n = split("train_gpt2cu,llm.c with cuDNN,PyTorch 2.11", program, ",")
            for (nr = 2; nr <= NR; nr++) {
                read_line(nr)
                if (f[5] != "training" || first_line[f[5], key] != nr || !((f[5], key, f[2], program[n]) in at)) { continue }
                batch = f[8] * f[9]
                about = "one NVIDIA " f[4] ", " f[1] ", bf16, T = " f[9] "; llm.c with -r 0, PyTorch with torch.compile"
                for (i = 1; i <= n; i++) {
                    printf "\"GPT-2 %s, %d,%03d tokens per step\",%s,", f[6], int(batch / 1000), batch % 1000, program[i]
                    printf "%d,%s,%d,\"%s\"\n", i == 1, read_line(at["training", key, f[2], program[i]]), batch, about
                }
            }
        }
        # Prints a row for each key, with the programs of its newest run side by side.
        function print_table(    nr, n, i, j, x, text, unit, mixed, num_programs, program, order, rank, runs, run, first) {
            for (nr = NR; nr > 1; nr--) { # the newest run first
                if (is_newest(nr) && !(f[2] in rank)) { rank[f[2]] = ++runs; run[runs] = f[2] }
            }
            for (i = 1; i <= runs; i++) {
                for (nr = 2; nr <= NR; nr++) {
                    if (!is_newest(nr) || f[2] != run[i]) { continue }
                    if (first_line[f[5], key] == nr) { order[++n] = nr }
                    if (n == 1) { card = f[4]; date = f[1] }
                    if (card != f[4]) { cards = 1 } # several of them
                    if (date != f[1]) { dates = 1 }
                    if (f[8] != "") { with_B = 1 }
                    if (f[9] != "" && f[9] != 1024) { with_T = 1 }
                    if (!(f[10] in column)) {
                        column[f[10]] = ++num_programs
                        program[num_programs] = f[10]
                        unit[num_programs] = f[12]
                    }
                    j = column[f[10]]
                    if (unit[j] != f[12]) { mixed[j] = 1 }
                    if (j == 1 && plain == "" && tokens(1, f[12], f[8], f[9]) != "") { with_tokens = 1 }
                }
            }
            text = join(cards ? "" : card, dates ? "" : date)
            text = "|" (text == "" ? "what" : text) "|" (with_B ? "B|" : "") (with_T ? "T|" : "")
            for (j = 1; j <= num_programs; j++) {
                text = text program[j] ((j in mixed) || unit[j] == "" || unit[j] == "%" ? "" : ", " unit[j]) "|"
                if (j == 1 && with_tokens) { text = text "tokens/s|" }
            }
            text = text (cards ? "machine|" : "") (dates ? "date|" : "")
            gsub(/;/, ",", text)
            print text
            gsub(/[^|]+/, "---", text)
            print text
            for (i = 1; i <= n; i++) {
                read_line(order[i])
                text = "|" join(f[6], f[7]) "|" (with_B ? f[8] "|" : "") (with_T ? f[9] "|" : "")
                for (j = 1; j <= num_programs; j++) {
                    nr = at[wanted, key, newest[wanted, key], program[j]]
                    x = nr ? read_line(nr) : ""
                    if (j == 1) { first = x; first_unit = f[12] }
                    text = text x (nr && f[12] == "%" ? "%" : nr && (j in mixed) && f[12] != "" ? " " f[12] : "")
                    if (nr && j > 1 && first != "" && f[12] == first_unit) { text = text ratio(x, first, f[12]) }
                    text = text "|"
                    if (j == 1 && with_tokens) { text = text (nr ? tokens(x, f[12], f[8], f[9]) : "") "|" }
                }
                text = text (cards ? f[4] "|" : "") (dates ? f[1] "|" : "")
                gsub(/;/, ",", text)
                print text
            }
        }
        END {
            if (bad) { exit 1 }
            if (!found) { print "error: records.csv has no group " wanted >"/dev/stderr"; exit 1 }
            if (wanted == "board") { print_board() } else if (wanted == "chart") { print_chart() } else { print_table() }
        }' records.csv
}

if [ "$mode" = --chart ]; then
    table chart
    exit
fi
skip=
while IFS= read -r text; do
    [[ $text == '|'* ]] || skip=
    [ -n "$skip" ] || printf '%s\n' "$text"
    if [[ $text =~ ^'<!-- '(records|board|kernels)(': '([^,]*))?(', '(plain))?' -->'$ ]]; then
        skip=yes
        case ${BASH_REMATCH[1]} in
        board) table board ;;
        kernels) kernels "${BASH_REMATCH[3]}" ;;
        records) table "${BASH_REMATCH[3]}" "${BASH_REMATCH[5]}" ;;
        esac || exit 1
    fi
done <README.md >"$tmp/new" || exit 1
cmp -s "$tmp/new" README.md && exit
if [ "$mode" = --check ]; then
    diff README.md "$tmp/new" >&2
    die "dev/measured/README.md is stale: dev/measured/records.sh writes it"
fi
cat "$tmp/new" >README.md || die "dev/measured/README.md could not be written"
