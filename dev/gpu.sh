#!/bin/bash
# Builds the program and the tests on a machine with a GPU, runs tests, and prints a summary.
#   dev/gpu.sh                      the tests whose names begin with "gpu: "
#   dev/gpu.sh all                  all tests (make test)
#   dev/gpu.sh PATTERN              the tests whose names match, as in doctest's --test-case
#   dev/gpu.sh sanitize [PATTERN]   each kernel test, except the long ones, under compute-sanitizer's
#                                   racecheck, memcheck and initcheck; four tests at a time on each GPU (all,
#                                   or GPUS=0,1). The results go to sanitize.txt, one line each
#   dev/gpu.sh races                racecheck on attention: to be run after every change of its kernels. A
#                                   missing wait seldom changes a value in a normal run; racecheck reports
#                                   it in shared memory, and elsewhere its slower timing may show it
#   dev/gpu.sh seeds [FIRST LAST]   each kernel test, except the long ones, with the random inputs of these
#                                   seeds (1 to 20), eight at a time; COAT_SEED=... repeats one
#   dev/gpu.sh ladders              every rung of every ladder (dev/ladders): a ladder fails if a rung differs
#                                   from the CPU reference
# Logs go to the folder $OUT, or to build/logs. `python3 dev/results.py tests` runs `gpu` and `seeds` and records
# what they say in dev/RESULTS.md.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
logs=${OUT:-build/logs}
mkdir -p "$logs"
export OMP_WAIT_POLICY=passive
summary=()
note() { summary+=("$1"); echo "== $1"; }

if ! command -v nvidia-smi > /dev/null; then
    echo "gpu.sh: This machine has no nvidia-smi: run it on one with a GPU and its driver." >&2
    exit 1
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1
start=$SECONDS
targets='train build/tests'
[ "${1:-}" != ladders ] || targets=ladders
if ! make $targets > "$logs/build.log" 2>&1; then
    tail -n 40 "$logs/build.log"
    echo "gpu.sh: The build failed; the end of $logs/build.log is above." >&2
    exit 1
fi
note "built in $((SECONDS - start)) s"

failed=0
run() {  # name, command...
    local name=$1 log="$logs/$1.log" begun=$SECONDS
    shift
    if "$@" > "$log" 2>&1; then note "$name passed in $((SECONDS - begun)) s: $(tail -n 1 "$log")"; else
        failed=1
        grep -E -A12 'ERROR|error:|WRONG|TEST CASE|Invalid|hazard|Uninitialized' "$log" | head -n 120
        note "$name FAILED in $((SECONDS - begun)) s: $(tail -n 1 "$log")"
    fi
    grep -E 'MESSAGE' "$log" | sed 's/.*MESSAGE: //' | head -n 60
}

# Runs one test under one tool, on the GPU of its slot. A comma separates patterns, so it is replaced by "?".
sanitize_one() {  # slot, logs, tool, test
    local begun=$SECONDS log="$2/$3-${4//[^A-Za-z0-9]/-}.log" gpus
    IFS=, read -ra gpus <<< "$GPUS"
    CUDA_VISIBLE_DEVICES=${gpus[$1 % ${#gpus[@]}]} COAT_QUICK=1 timeout "${SANITIZE_SECONDS:-500}" \
        compute-sanitizer --tool "$3" --error-exitcode 1 build/tests --test-case="${4//,/?}" > "$log" 2>&1 &&
        grep -aq ' 1 passed' "$log" && ! grep -aq 'SUMMARY: [1-9]' "$log"
    echo "$? $3, $((SECONDS - begun)) s, $4: $(tail -n 1 "$log")"
}
sanitize() {  # tools, source files, pattern (in place of these files)
    export -f sanitize_one
    export GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
    local tool test chosen=--source-file=$2 commas=${GPUS//[^,]/}
    [ -z "$3" ] || chosen=--test-case=$3
    build/tests --list-test-cases --no-skip "$chosen" --test-case-exclude='gpu: long *' |
        grep '^gpu: ' > "$logs/names.txt"
    [ -s "$logs/names.txt" ] || { echo "gpu.sh: No kernel test matches $chosen." >&2; exit 1; }
    for tool in $1; do
        while read -r test; do printf '%s\0%s\0%s\0' "$logs" "$tool" "$test"; done < "$logs/names.txt"
    done | xargs -r -0 -n 3 -P $(((${#commas} + 1) * 4)) --process-slot-var=SLOT \
        bash -c 'sanitize_one "$SLOT" "$@"' queue | tee "$logs/sanitize.txt"
    for tool in $1; do
        note "$tool: $(grep -c "^0 $tool" "$logs/sanitize.txt") of $(wc -l < "$logs/names.txt") tests clean"
    done
    failed=$(grep -vc '^0 ' "$logs/sanitize.txt" || true)
}

seeds() {  # first, last
    export logs
    seq "$1" "$2" | xargs -P 8 -I{} bash -c '
        COAT_SEED={} OMP_NUM_THREADS=2 build/tests --source-file="$kernels" --test-case="gpu: *" \
            --test-case-exclude="gpu: long *" > "$logs/seed-{}.log" 2>&1
        echo "$? seed {}, $SECONDS s: $(tail -n 1 "$logs/seed-{}.log")"' | tee "$logs/seeds.txt"
    note "$(grep -c '^0 ' "$logs/seeds.txt") of the seeds $1 to $2 passed"
    failed=$(grep -vc '^0 ' "$logs/seeds.txt" || true)
}

ladders() {
    local ladder
    for ladder in dev/ladders/*.cu; do
        ladder=ladder_$(basename "$ladder" .cu)
        run "$ladder" "build/$ladder"
    done
}

export kernels='*test/coat.cu,*test/*adamw*.cu,*test/gpu/*.cu'
case ${1:-gpu} in
    all) run tests make test ;;
    sanitize) sanitize 'racecheck memcheck initcheck' "$kernels" "${2:-}" ;;
    races) sanitize racecheck '*test/gpu/attention.cu' '' ;;
    seeds) seeds "${2:-1}" "${3:-20}" ;;
    ladders) ladders ;;
    gpu) run gpu build/tests --test-case='gpu: *' ;;
    *) run chosen build/tests --test-case="$1" ;;
esac

printf '%s\n' "" "Summary" "${summary[@]}" | tee "$logs/summary.txt"
exit $((failed > 0))
