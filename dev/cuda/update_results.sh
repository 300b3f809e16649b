#!/usr/bin/env bash
# Rewrites the tables of dev/cuda/README.md from dev/cuda/results/GPU/*.csv, which `make bench` writes there.
#
#     dev/cuda/update_results.sh
#
# A table is enclosed by `<!-- results: h200 -->` and `<!-- end results: h200 -->`. It has one row per CSV: the fastest
# kernel except the vendor's (number 0), with the clock of its SMs, and with its times in a graph and back to back, if they
# were measured. The optional file results/GPU/pytorch.txt has PyTorch's times at the same shape
# on the same kind of card; each line is OP, milliseconds eager, milliseconds compiled (nan: not measured).
set -u -o pipefail
cd "$(dirname "$0")" || exit 1
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }
[ $# -eq 0 ] || { echo "$0: unknown argument '$1'; usage: $0" >&2; exit 2; }
[ -f README.md ] || die "no dev/cuda/README.md here"

tmp=$(mktemp -d /tmp/llmc_results_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

table() { # GPU
    echo "| op | shape, type | fastest kernel | configuration | ms (p10 to p90) | GB/s | of copy | TFLOP/s | of vendor's rate | x kernel 0 | x kernel 1 | x PyTorch eager | x compiled |"
    echo "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    local csv peer=results/$1/pytorch.txt
    [ -f "$peer" ] || peer=/dev/null
    for csv in results/"$1"/*.csv; do
        [ "${csv##*/}" != tuned.csv ] || continue # of make tune
        # the fields before `what` contain no commas
        awk -F , -v peer="$peer" '
            function cell(format, x, unit) { return (x > 0 && unit > 0) ? sprintf(format, x / unit) : "" }
            function field(name, otherwise) { return (name in at) ? $at[name] : otherwise } # older CSVs have fewer columns
            NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
            { ms = $at["median_ms"] + 0; number = $at["kernel"] + 0 }
            number <= 1 && (!(number in base) || ms < base[number]) { base[number] = ms }
            number > 0 && (best == "" || ms < best) { best = ms; row = $0 }
            END {
                if (row == "") { exit 1 }
                what = row
                for (i = 1; i < at["what"]; i++) { sub(/[^,]*,/, "", what) }
                gsub(/^"|"$/, "", what); gsub(/""/, "\"", what); gsub(/\|/, "\\|", what)
                $0 = row
                gbs = $at["gb_s"]; tflops = $at["tflop_s"]; rate = $at["matrix_tflop_s"]
                reads = field("reads_only", 0) + 0; roof = reads ? $at["read_gb_s"] : $at["copy_gb_s"]
                type = field("matrix_type", $at["dtype"]); type = (type == $at["dtype"]) ? "" : " of " type
                clock = cell(" at %.0f MHz", field("sm_mhz", 0), 1)
                hot = cell("; in a graph %.4f", field("graph_ms", 0), 1) cell("; sustained %.4f", field("sustained_ms", 0), 1)
                # older files have a column block_size, and no names
                size = $at["config" in at ? "config" : "block_size"] + 0
                axis = ("config_name" in at) ? $at["config_name"] : "block size"
                label = ("config_label" in at) ? $at["config_label"] : ""
                config = (size > 0) ? axis " " size (label == "" ? "" : ": " label) : "default"
                printf "| %s | B %d T %d C %d, %s | %d: %s | %s | %.4f (%.4f to %.4f)%s%s |", $at["op"], $at["B"], $at["T"],
                    $at["C"], $at["dtype"], $at["kernel"], what, config, best, $at["p10_ms"], $at["p90_ms"], clock, hot
                printf " %s | %s |", cell("%.0f", gbs, 1), cell("%.1f%%" (reads ? " of read" : ""), 100 * gbs, roof)
                printf " %s | %s |", cell("%.1f", tflops, 1), cell("%.1f%%" type, 100 * tflops, rate)
                printf " %s | %s |", cell("%.2f", base[0], best), cell("%.2f", base[1], best)
                while ((getline line <peer) > 0) {
                    split(line, word, " ")
                    if (word[1] == $at["op"]) { eager = word[2]; compiled = word[3] }
                }
                printf " %s | %s |\n", cell("%.2f", eager + 0, best), cell("%.2f", compiled == "nan" ? 0 : compiled + 0, best)
            }' "$csv" || die "dev/cuda/$csv has no row of a kernel"
    done
}

gpus=$(sed -n 's/^<!-- results: \([a-z0-9_.-]*\) -->$/\1/p' README.md)
[ -n "$gpus" ] || die "dev/cuda/README.md has no line '<!-- results: GPU -->'"
for gpu in $gpus; do
    grep -qx "<!-- end results: $gpu -->" README.md || die "dev/cuda/README.md has no line '<!-- end results: $gpu -->'"
    compgen -G "results/$gpu/*.csv" >/dev/null || die "no dev/cuda/results/$gpu/*.csv: make bench writes them"
    table "$gpu" >"$tmp/$gpu" || exit 1
done
awk -v dir="$tmp" '
    /^<!-- end results: / { inside = 0 }
    !inside { print }
    /^<!-- results: / {
        inside = 1
        while ((getline line <(dir "/" $3)) > 0) { print line }
        close(dir "/" $3)
    }' README.md >"$tmp/new" || die "dev/cuda/README.md could not be rewritten"
cat "$tmp/new" >README.md || die "dev/cuda/README.md could not be written"
