#!/usr/bin/env bash
# Profiles one kernel of an op with ncu (Nsight Compute): a row per GPU kernel that it launches, with what limits each.
#
#     make profile OP=layernorm_forward KERNEL=6 [CONFIG=64] [FLAGS="-B 8"]        builds the op, then calls this
#     ./profile.sh BINARY KERNEL [CONFIG [FLAGS ...]]
#     ./profile.sh --ready            whether this machine can profile: exit 1 and one line if it cannot
#     ./profile.sh --help
#
# CONFIG is a block size of ./OP; without it the first one that the kernel lists, which is its default where it has one.
# FLAGS are flags of ./OP: shapes, --seed, --hot. NCU=/path/to/ncu if it is not found. ncu's report stays in REPORT, for `ncu --import`
# and Nsight Compute's window; by default in profile_OP_KERNEL.ncu-rep in the folder for temporary files.
#
# The launches are those of the kernel's check, which is the first thing that ./OP runs. The program runs twice. The
# first run lists its launches. The check's are those after the first bench_checksum_kernel and before the next kernel of
# the harness. The second run takes the counters of these launches only. ncu repeats each launch several times, from a
# cold L2 (with --hot: as it is), and one after the other, so launches that overlap in ./OP do not here. Clocks are those
# of the card, as in `make bench`.
#
# Counters, in % of what the GPU could do during the launch unless said otherwise:
#
#     us         duration
#     SM         throughput of the SMs: the busiest of their pipes and issue slots
#     DRAM, L2   throughput of device memory and of the L2 cache
#     tensor     cycles in which the tensor pipe is active
#     MB         read from and written to DRAM, 1e6 bytes
#     L2 hit     sectors found in L2
#     occupancy  warps on an SM, of the most it can hold; while it has any
#     regs, smem registers per thread; shared memory per block in bytes, with what the system reserves (1,024 on 9.0)
#     conflicts  bank conflicts in shared memory, in cycles, over the GPU
#     stalls     the two largest reasons why warps wait: how many warps wait for it whenever an instruction issues
#
# "bound by" is the first of these that applies. 60% is ncu's own limit between busy and idle.
#
#     memory (DRAM)        DRAM >= 60, no less than SM, and no less than 4/5 of L2, which every byte of DRAM passes
#     L2                   L2 >= 60, and no less than SM
#     compute (tensor)     SM or tensor >= 60, and tensor is at least 4/5 of SM
#     compute (fp32/alu)   SM >= 60; it counts integer, conversions, loads' issue slots, too
#     launch               shorter than 5 us, or fewer blocks than the GPU has SMs
#     latency              the rest: no unit is busy, so there are too few warps in flight, or too few loads per warp, to
#                          hide what `stalls` names
set -u -o pipefail
export LC_ALL=C # ncu writes numbers as the locale does
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*; see $0 --help" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi

ncu=${NCU-}
for path in ncu /usr/local/cuda/bin/ncu /opt/nvidia/nsight-compute/*/ncu; do
    [ -n "$ncu" ] || ncu=$(command -v "$path")
done
command -v "${ncu:-ncu}" >/dev/null ||
    fail "no ${NCU:-ncu}: install Nsight Compute (apt-get install cuda-nsight-compute-13-0), or set NCU=/path/to/ncu"
nvidia-smi -L >/dev/null 2>&1 || fail "no GPU here, or no nvidia-smi: profile where make bench runs"
[ "${1-}" != --ready ] || exit 0

[ $# -ge 2 ] || usage "the binary of an op and a kernel's number are wanted"
binary=$1 kernel=$2 config=${3-}
flags=("${@:4}")
[[ $kernel =~ ^[0-9]+$ ]] || usage "KERNEL is a number of ./$(basename "$binary") --list, not '$kernel'"
[ -x "$binary" ] || fail "$binary is not there: make $(basename "$binary")"
[[ $binary == */* ]] || binary=./$binary
case " ${flags[*]-} " in
*" --check "* | *" --list "* | *" --no-verify "* | *" --csv "* | *" --json "*)
    usage "FLAGS are shapes, --seed, --case or --hot: what is profiled is a launch of the check before the timing" ;;
esac
cache=all
[[ " ${flags[*]-} " != *" --hot "* ]] || cache=none
if [ -n "$config" ]; then
    option=--block-size # or --config, in an op that has that
    "$binary" --help 2>/dev/null | grep -q -e '--config' && option=--config
    flags+=("$option" "$config")
fi

tmp=$(mktemp -d /tmp/llmc_profile_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
# the program's own word on a wrong number or flag
"$binary" "$kernel" --list ${flags[@]+"${flags[@]}"} >"$tmp/list" 2>&1 || usage "$(head -n 1 "$tmp/list" | sed 's/^error: //')"

# ---- awk: the CSV of `ncu --csv --page raw`: a header, units, then a row per launch; other lines begin with == --------

# read_csv() sets rows, and of each launch 1 .. rows: name[i], grid[i], block[i], and value[i, COLUMN] in base units
read -r -d '' csv_functions <<'AWK'
function split_line(line, out,    n, i, c, quoted) { # fields may be quoted, with commas and doubled quotes in them
    n = 1; quoted = 0; out[1] = ""
    for (i = 1; i <= length(line); i++) {
        c = substr(line, i, 1)
        if (c == "\"" && quoted && substr(line, i + 1, 1) == "\"") { out[n] = out[n] c; i++ }
        else if (c == "\"") { quoted = !quoted }
        else if (c == "," && !quoted) { out[++n] = "" }
        else if (c != "\r") { out[n] = out[n] c }
    }
    return n
}
function short(s,    i, c, depth) { # "void f<(int)3>(float *)" -> "f<(int)3>"
    sub(/^void /, "", s)
    for (i = 1; i <= length(s); i++) {
        c = substr(s, i, 1)
        if (c == "<") { depth++ }
        if (c == ">") { depth-- }
        if (c == "(" && depth == 0 && i > 1) { return substr(s, 1, i - 1) }
    }
    return s
}
function factor(unit) { # to nanoseconds and bytes
    sub(/\/.*/, "", unit)
    if (unit ~ /^(us|usecond)$/) { return 1e3 }
    if (unit ~ /^(ms|msecond)$/) { return 1e6 }
    if (unit ~ /^(s|second)$/) { return 1e9 }
    if (unit ~ /^K(byte|B)$/) { return 1e3 }
    if (unit ~ /^M(byte|B)$/) { return 1e6 }
    if (unit ~ /^G(byte|B)$/) { return 1e9 }
    return 1
}
function read_csv(file,    line, fields, n, i, columns, header, units, text) {
    rows = 0
    while ((getline line <file) > 0) {
        if (line !~ /^"?ID"?,/ && !columns) { continue }
        if (line ~ /^==/ || line == "") { continue }
        n = split_line(line, fields)
        if (!columns) { columns = n; for (i = 1; i <= n; i++) { header[i] = fields[i] }; continue }
        if (n != columns) { print "a row of ncu has " n " fields, its header " columns; exit 1 }
        if (fields[1] == "") { for (i = 1; i <= n; i++) { units[i] = fields[i] }; continue }
        rows++
        for (i = 1; i <= n; i++) {
            text = fields[i]
            if (header[i] == "Kernel Name") { name[rows] = short(text) }
            else if (header[i] == "Grid Size") { grid[rows] = text }
            else if (header[i] == "Block Size") { block[rows] = text }
            else {
                gsub(/,/, "", text) # thousands
                if (text ~ /^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$/) { value[rows, header[i]] = text * factor(units[i]) }
            }
        }
    }
    close(file)
}
AWK

# ---- ncu ------------------------------------------------------------------------------------------------------------

# run_ncu METRICS OPTION ...: runs the op under ncu. With $report, ncu writes it, and what it says is read from there. Leaves ncu's output in $tmp/ncu and the op's in $tmp/op. ncu fails on
# a metric that the GPU lacks (wgmma's stalls exist on 9.0 only), so the metrics that it names are left out and it is
# called again.
run_ncu() {
    local metrics=$1 before='' missing rc=0
    while [ -n "$metrics" ] && [ "$metrics" != "$before" ]; do
        before=$metrics rc=0
        "$ncu" --csv --page raw --print-units base --clock-control none --cache-control $cache --metrics "$metrics" \
            --log-file "$tmp/ncu" ${report:+--export "$report" --force-overwrite} "${@:2}" "$binary" "$kernel" --repeats 1 ${flags[@]+"${flags[@]}"} >"$tmp/op" 2>&1 </dev/null ||
            rc=$?
        [ -e "$tmp/ncu" ] || : >"$tmp/ncu"
        [ -z "$report" ] || [ ! -e "$report" ] || "$ncu" --import "$report" --csv --page raw --print-units base >>"$tmp/ncu" 2>&1
        cat "$tmp/ncu" "$tmp/op" >"$tmp/both"
        if grep -q ERR_NVGPUCTRPERM "$tmp/both"; then
            fail "no permission for the GPU's counters (ERR_NVGPUCTRPERM): run as root; or let all users, by 'options" \
                "nvidia NVreg_RestrictProfilingToAdminUsers=0' in /etc/modprobe.d and a reboot; in a container: --cap-add=SYS_ADMIN"
        fi
        missing=$(sed -n -e 's/^==ERROR== Failed to access the following [0-9]* metrics*: //p' \
            -e 's/^==ERROR== Failed to find metric //p' "$tmp/both" | tr ', ' '\n' |
            sed -e 's/^regex:^//' -e 's/[\\(.].*//' -e '/^$/d')
        [ -n "$missing" ] || break
        metrics=$(tr , '\n' <<<"$metrics" | awk -v missing="$missing" '
            BEGIN { n = split(missing, gone, "\n") }
            { stem = $0; sub(/\..*/, "", stem); for (i = 1; i <= n; i++) { if (stem == gone[i]) { next } } print }' | paste -s -d , -)
    done
    grep -q '^"\{0,1\}ID"\{0,1\},' "$tmp/ncu" && return
    for reason in '^error: ' '^FAIL ' '^skip kernel ' '==ERROR==' '==WARNING==' '.'; do
        ! grep -m 1 -e "$reason" "$tmp/both" >"$tmp/reason" || break
    done
    fail "ncu profiled no kernel (status $rc): $(cat "$tmp/reason")"
}

report=
run_ncu launch__grid_size --launch-count 500
if grep -m 1 "^skip kernel $kernel " "$tmp/op" >"$tmp/reason"; then fail "nothing to profile: $(cat "$tmp/reason")"; fi
# prints how many launches there are before the check's, and how many are the check's
awk -v file="$tmp/ncu" "$csv_functions"'
    BEGIN {
        read_csv(file)
        for (i = 1; i <= rows && name[i] !~ /^bench_checksum_/; i++) {}
        for (; i <= rows && name[i] ~ /^bench_checksum_/; i++) {}
        for (first = i; i <= rows && name[i] !~ /^bench_/; i++) {}
        print first - 1, i - first
    }' >"$tmp/window" || fail "$(cat "$tmp/window")"
read -r skip count <"$tmp/window"
[ "$count" -gt 0 ] || fail "kernel $kernel launches nothing that ncu sees; what the program said last: $(tail -n 1 "$tmp/op")"

stalls=barrier,branch_resolving,dispatch_stall,drain,gmma,imc_miss,lg_throttle,long_scoreboard,math_pipe_throttle,membar
stalls+=,mio_throttle,misc,no_instruction,short_scoreboard,sleeping,tex_throttle,wait
metrics=gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes.sum
metrics+=,lts__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct
metrics+=,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread,launch__shared_mem_per_block
metrics+=,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,device__attribute_multiprocessor_count
for stall in ${stalls//,/ }; do metrics+=,smsp__average_warps_issue_stalled_${stall}_per_issue_active.ratio; done
report=${REPORT:-${TMPDIR:-/tmp}/profile_$(basename "$binary")_$kernel.ncu-rep}
rm -f "$report"
run_ncu "$metrics" --launch-skip "$skip" --launch-count "$count"

echo "$(basename "$binary") $kernel${config:+, config $config}${4:+, ${*:4}}, L2 $([ $cache = all ] && echo cold || echo hot), by ncu; its report: $report"
head -n 1 "$tmp/list"
sed -n '2p' "$tmp/op"
awk -v file="$tmp/ncu" -v stalls="$stalls" "$csv_functions"'
    function get(metric) { return (i, metric) in value ? value[i, metric] : -1 }
    function cell(format, x, scale) { return x < 0 ? "-" : sprintf(format, x / scale) }
    function bound(    blocks, sms, parts) {
        if (dram >= 60 && dram >= 0.8 * l2 && dram >= sm) { return "memory (DRAM)" }
        if (l2 >= 60 && l2 >= sm) { return "L2" }
        if ((sm >= 60 || tensor >= 60) && tensor >= 0.8 * sm) { return "compute (tensor)" }
        if (sm >= 60) { return "compute (fp32/alu)" }
        gsub(/[() ]/, "", grid[i])
        split(grid[i], parts, ",")
        blocks = parts[1] * parts[2] * parts[3]
        sms = get("device__attribute_multiprocessor_count")
        if (blocks < sms) { return sprintf("launch (%d of %d SMs have a block)", blocks, sms) }
        if (ns >= 0 && ns < 5000) { return "launch (shorter than 5 us)" }
        if (ns < 0 || sm < 0 || dram < 0 || l2 < 0) { return "unknown: ncu lacks a counter" }
        return "latency (too few warps in flight)"
    }
    BEGIN {
        read_csv(file)
        num_stalls = split(stalls, reason, ",")
        for (i = 1; i <= rows; i++) { printf "launch %d: %s, grid %s, block %s\n", i, name[i], grid[i], block[i] }
        printf "\nlaunch        us    SM  DRAM    L2 tensor        MB L2 hit occupancy  regs    smem  conflicts  %-46s bound by\n", "stalls"
        for (i = 1; i <= rows; i++) {
            ns = get("gpu__time_duration.sum")
            sm = get("sm__throughput.avg.pct_of_peak_sustained_elapsed")
            dram = get("dram__throughput.avg.pct_of_peak_sustained_elapsed")
            l2 = get("lts__throughput.avg.pct_of_peak_sustained_elapsed")
            tensor = get("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
            text = ""
            for (rank = 1; rank <= 2; rank++) {
                most = 0
                for (k = 1; k <= num_stalls; k++) {
                    x = get("smsp__average_warps_issue_stalled_" reason[k] "_per_issue_active.ratio")
                    if (x > most && !((i, k) in taken)) { most = x; at = k }
                }
                if (most == 0) { break }
                taken[i, at] = 1
                text = text (rank > 1 ? ", " : "") sprintf("%s %.2f", reason[at], most)
            }
            printf "%6d %9s %5s %5s %5s %6s %9s %6s %9s %5s %7s %10s  %-46s %s\n", i, cell("%.2f", ns, 1e3),
                cell("%.1f", sm, 1), cell("%.1f", dram, 1), cell("%.1f", l2, 1), cell("%.1f", tensor, 1),
                cell("%.2f", get("dram__bytes.sum"), 1e6), cell("%.1f", get("lts__t_sector_hit_rate.pct"), 1),
                cell("%.1f", get("sm__warps_active.avg.pct_of_peak_sustained_active"), 1),
                cell("%d", get("launch__registers_per_thread"), 1), cell("%d", get("launch__shared_mem_per_block"), 1),
                cell("%d", get("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"), 1), text == "" ? "-" : text, bound()
            if (ns > 0) { sum += ns }
        }
        if (rows > 1) { printf "%6s %9.2f  %d launches, one after the other\n", "sum", sum / 1e3, rows }
    }' || fail "what ncu wrote cannot be read"
