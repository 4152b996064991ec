#!/usr/bin/env python3
"""The evidence behind dev/RESULTS.md: one command for each part. It builds, runs, and renews the page's tables and figures.

    python3 dev/evidence/run.py moments            figure 2 and table 1 of the paper; trains the small model first (two minutes on two cores)
    python3 dev/evidence/run.py activations        figure 4a
    python3 dev/evidence/run.py memory             table 2, computed; no GPU
    python3 dev/evidence/run.py timing             figure 4b, table 2 and matrix products on a GPU; about a minute
    python3 dev/evidence/run.py moments --training gpt2      of another training run (needs a GPU)
    python3 dev/evidence/run.py page               only draws and writes again what dev/results holds

dev/results gets evidence-PART[-TRAINING].json, in which the commands and the commit stand, and a figure of that name. A training run whose
checkpoint lies in build/evidence is not run again. Only Python's standard library is needed (and what dev/runs.py needs for the text of gpt2).
"""
import argparse
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULTS = os.path.join(ROOT, "dev", "results")
sys.path.insert(0, os.path.join(ROOT, "dev"))

import plot  # beside this file
import runs
import tables

TRAININGS = {  # flags of ./train; moments are kept in FP32, and nothing but BF16 rounds what becomes of them
    "llama-tiny": "--device cpu --recipe bf16 --optimizer fp32 --sample-every 0",
    "gpt2": f"--recipe bf16 --optimizer fp32 {runs.GPT2}",
}
BATCH = {"llama-tiny": 64, "gpt2": 4}  # held-out sequences that `activations` takes


def run(command, **options):
    print("$ " + command, flush=True)
    return subprocess.run(command.split(), cwd=ROOT, check=True, text=True, env=dict(os.environ, OMP_WAIT_POLICY="passive"), **options)


def trained(name):
    """The checkpoint of a training run, the command that made it, and the commit that it was made at."""
    folder = f"build/evidence/{name}"
    command = f"./train {TRAININGS[name]} --out {folder} --log {folder}.jsonl"
    done = os.path.join(ROOT, f"{folder}.commit")  # written when the run has ended
    if not os.path.isfile(done):
        run("make train")
        if runs.TEXT in command:
            runs.make_text()
        os.makedirs(os.path.join(ROOT, "build", "evidence"), exist_ok=True)
        run(command)
        with open(done, "w", encoding="utf-8") as file:
            file.write(runs.commit())
    with open(done, encoding="utf-8") as file:
        return folder, command, file.read()


def measure(part, training):
    target, arguments, commands, name, trained_at = f"build/evidence_{part}", "", [], part, None
    if part in ("moments", "activations"):
        folder, command, trained_at = trained(training)
        commands.append(command)
        arguments = f" {folder}" + (f" {BATCH[training]}" if part == "activations" else "")
        name = f"{part}-{training}"
    run(f"make {target}")
    commands.append(f"{target}{arguments}")
    measured = json.loads(run(commands[-1], stdout=subprocess.PIPE).stdout)
    on_cpu = shutil.which("nvidia-smi") is None or "--device cpu" in commands[0] or part == "memory"
    where = measured.get("device") or ("the CPU" if on_cpu else "a GPU (training) and its host's CPU")
    report = {"commands": commands, "commit": runs.commit(), "trained_at": trained_at, "where": where, "training": training if trained_at else None,
              **measured}
    with open(os.path.join(RESULTS, f"evidence-{name}.json"), "w", encoding="utf-8") as file:
        json.dump(report, file)
        file.write("\n")


def page():
    """Every result's figure, and the tables between <!-- NAME --> and <!-- end --> of dev/RESULTS.md."""
    results = {}
    for file in sorted(os.listdir(RESULTS)):
        if file.startswith("evidence-") and file.endswith(".json"):
            with open(os.path.join(RESULTS, file), encoding="utf-8") as opened:
                results[file[len("evidence-"):-len(".json")]] = json.load(opened)
    for name, result in results.items():
        with open(os.path.join(RESULTS, f"evidence-{name}.svg"), "w", encoding="utf-8") as svg:
            svg.write(plot.figure(name, result) + "\n")
    path = os.path.join(ROOT, "dev", "RESULTS.md")
    with open(path, encoding="utf-8") as opened:
        text = tables.fill(opened.read(), results)
    with open(path, "w", encoding="utf-8") as opened:
        opened.write(text)


def main():
    parser = argparse.ArgumentParser(description="The evidence behind dev/RESULTS.md.")
    parser.add_argument("part", choices=["moments", "activations", "memory", "timing", "page"])
    parser.add_argument("--training", choices=list(TRAININGS), default="llama-tiny", help="whose checkpoint moments and activations are of")
    arguments = parser.parse_args()
    if arguments.part != "page":
        measure(arguments.part, arguments.training)
    page()


if __name__ == "__main__":
    main()
