#!/bin/bash
# The runs behind the README's figures for one GPU; about eight minutes on an H200. Logs, curves and a summary go to dev/results.
#   dev/gpu_results.sh [default] [gpt2] [7b]        which of them; all if none is named
# The text of gpt2 and 7b is the Python source of the packages that lie beside torch, in tokens of a BPE trained on it.
set -eu
cd "$(dirname "$0")/.."
results=dev/results text=build/python-source
mkdir -p "$results" build
summary="$results/gpu.txt"
wanted=${*:-default gpt2 7b}

tokens() {
    [ -e "$text/train.bin" ] && return
    local packages
    packages=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    # The sources in a fixed order, as far as 80 MB go: a little more than one pass of 2000 steps.
    find "$packages" -name '*.py' -size -200k -print0 | LC_ALL=C sort -z | { xargs -0 cat || true; } | head -c 80000000 |
        iconv -c -f utf-8 -t utf-8 > build/python.txt
    python3 data/tokenize.py --train-bpe 16384 --out "$text" build/python.txt
}

memory_of() {  # runs a command and notes the most memory that the driver reports in use meanwhile
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=500 > build/memory.txt &
    local watch=$!
    "$@" || true
    kill $watch
    echo "$(sort -n build/memory.txt | tail -n 1) MiB in use at most"
}

run() {  # name, recipes, flags
    local name=$1 recipes=$2
    shift 2
    {
        echo "== $name: ./train $*"
        memory_of dev/recipes.sh "$name" "$recipes" --device gpu --sample-every 0 "$@"
        for recipe in $recipes; do
            python3 - "$results/loss-$name-$recipe.jsonl" <<'END'
import json, statistics, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if line["kind"] == "step"]
print(f"{lines[0]['recipe']:5s} {statistics.median(s['tokens_per_second'] for s in steps[1:]):.0f} tok/s (median of {len(steps) - 1} steps), loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}")
END
        done
    } | tee -a "$summary"
}

for which in $wanted; do
    case $which in
        default) run default "bf16 coat" ;;
        gpt2) tokens; run gpt2 "bf16 coat" --model gpt2 --data "$text" --batch 8 --seq 1024 --steps 2000 --lr 6e-4 --warmup 200 --eval-every 500 ;;
        7b) tokens
            for recipe in coat bf16; do  # one by one, so that each has its own peak of memory
                run 7b "$recipe" --model llama-2-7b --data "$text" --batch 8 --seq 2048 --steps 40 --lr 1e-4 --warmup 40 --eval-every 0 --optimizer "$recipe"
            done ;;
        *) echo "$which is not one of default, gpt2, 7b." >&2; exit 1 ;;
    esac
done
