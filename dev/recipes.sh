#!/bin/bash
# One run in several recipes from the same seed, and what each costs: the last validation losses against the first recipe's.
#   dev/recipes.sh NAME "RECIPES" [FLAGS of ./train ...]
#   dev/recipes.sh cpu "fp32 bf16 coat" --device cpu          the default run of a machine without a GPU
# Writes the logs and loss-NAME.svg to dev/results.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 recipes=$2
shift 2
results=dev/results
mkdir -p "$results"
logs=()
for recipe in $recipes; do
    log="$results/loss-$name-$recipe.jsonl"
    ./train --recipe "$recipe" --out "" --log "$log" "$@" | tail -n 1 | sed "s/^/$recipe  /"
    logs+=("$log")
done
python3 dev/plot_loss.py "${logs[@]}" > "$results/loss-$name.svg"
python3 - "${logs[@]}" <<'END'
import json, sys
last = {}
for path in sys.argv[1:]:
    lines = [json.loads(line) for line in open(path)]
    last[lines[0]["recipe"]] = [line["loss"] for line in lines if line["kind"] == "validation"][-1]
first = next(iter(last))
for recipe, loss in last.items():
    print(f"{recipe:5s} validation {loss:.4f}, {loss - last[first]:+.4f} against {first}")
END
