#!/bin/bash
# Builds the program and the tests on a machine with a GPU, runs the GPU's tests and ends with a short summary.
#   dev/gpu.sh              the tests whose names begin with "gpu: "
#   dev/gpu.sh all          every test (make test)
#   dev/gpu.sh 'PATTERN'    the tests whose names match, as doctest's --test-case takes it
#   dev/gpu.sh sanitize     the kernels' tests, but for the long ones, under compute-sanitizer: racecheck, memcheck, initcheck; a PATTERN may follow
# Logs go to $OUT where it is set, else to build/logs.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${OUT:-build/logs}
mkdir -p "$logs"
export OMP_WAIT_POLICY=passive
summary=() jobs=() place=0
note() { summary+=("$1"); echo "== $1"; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1
start=$SECONDS
if ! make -j16 train build/tests > "$logs/build.log" 2>&1; then
    tail -n 40 "$logs/build.log"
    echo "== the build failed; $logs/build.log"
    exit 1
fi
note "built in $((SECONDS - start)) s"

failed=0
run() {  # name, command...
    local name=$1 log="$logs/$1.log" begun=$SECONDS
    shift
    if "$@" > "$log" 2>&1; then note "$name passed in $((SECONDS - begun)) s: $(tail -n 1 "$log")"; else
        failed=1
        grep -E -A12 'ERROR|error:|TEST CASE|Invalid|hazard|Uninitialized' "$log" | head -n 120
        note "$name FAILED in $((SECONDS - begun)) s: $(tail -n 1 "$log")"
    fi
    grep -E 'MESSAGE' "$log" | sed 's/.*MESSAGE: //' | head -n 60
}

case ${1:-gpu} in
    all) run tests make test ;;
    sanitize)
        chosen=${2:+--test-case=$2}
        gpus=$(nvidia-smi --list-gpus | wc -l)
        for tool in racecheck memcheck initcheck; do  # side by side, on GPUs of their own where there are so many
            export CUDA_VISIBLE_DEVICES=$((place++ % gpus))
            (run "$tool" env COAT_QUICK=1 timeout "${SANITIZE_SECONDS:-500}" compute-sanitizer --tool "$tool" --error-exitcode 1 build/tests \
                "${chosen:---source-file=*test_coat_gpu*,*test_attention_gpu*}" --test-case-exclude='gpu: long *'
             printf '%s\n' "${summary[@]: -1}" > "$logs/$tool.note"
             exit $failed) &
            jobs+=($!)
        done
        for job in "${jobs[@]}"; do wait "$job" || failed=1; done
        for tool in racecheck memcheck initcheck; do summary+=("$(cat "$logs/$tool.note")"); done ;;
    gpu) run gpu build/tests --test-case='gpu: *' ;;
    *) run chosen build/tests --test-case="$1" ;;
esac

printf '%s\n' "" "Summary" "${summary[@]}" | tee "$logs/summary.txt"
exit $failed
