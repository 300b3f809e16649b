#!/usr/bin/env bash
# Prints a table in Markdown of dev/cuda/results/GPU/*.csv, which `make bench` writes there: a row for each op, with its fastest kernel.
#
#     dev/cuda/results.sh GPU       as in: dev/cuda/results.sh h200
#
# The vendor's kernel (number 0) is only compared with. A row has the clock of the SMs, and the times in a graph and back to back,
# if they were measured. The optional file results/GPU/pytorch.txt has PyTorch's times at the same shape on the same kind of
# GPU. Each of its lines is OP, milliseconds eager, milliseconds compiled (nan: not measured).
set -u -o pipefail
cd "$(dirname "$0")" || exit 1
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }
[ $# -eq 1 ] || { echo "usage: $0 GPU, one of the folders in dev/cuda/results" >&2; exit 2; }
compgen -G "results/$1/*.csv" >/dev/null || die "no dev/cuda/results/$1/*.csv: make bench writes them"

echo "| op | shape, type | fastest kernel | configuration | ms (p10 to p90) | GB/s | of copy | TFLOP/s | of vendor's rate | x kernel 0 | x kernel 1 | x PyTorch eager | x compiled |"
echo "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
peer=results/$1/pytorch.txt
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
