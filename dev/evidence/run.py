#!/usr/bin/env python3
"""The evidence behind dev/RESULTS.md: one command for each part. It builds, runs, and renews the page's tables and figures.

    python3 dev/evidence/run.py moments            figure 2 and table 1 of the paper; trains the small model first (two minutes on two cores)
    python3 dev/evidence/run.py activations        figure 4a
    python3 dev/evidence/run.py memory             table 2, computed; no GPU
    python3 dev/evidence/run.py timing             figure 4b, table 2 and matrix products on a GPU; about two minutes
    python3 dev/evidence/run.py layer              table 6: one layer; about seven minutes
    python3 dev/evidence/run.py models             table 7: whole models, every recipe; about nine minutes
    python3 dev/evidence/run.py convergence        GPT-2 124M on 0.2 billion tokens, twelve runs of six minutes and seven of two and a half
    python3 dev/evidence/run.py finetune           from the weights of two of those runs, on another text; four minutes
    python3 dev/evidence/run.py ablations          of the small model, group sizes too, on a CPU; an hour on two cores
    python3 dev/evidence/run.py moments activations --training gpt2      of the bf16 run of `convergence`
    python3 dev/evidence/run.py page               only draws and writes again what dev/results holds

Several parts are worked off together, on all GPUs that --gpus names, for no longer than --seconds; what was not done is named, and is what the same
command does next. With --only, parts of `convergence`:

    python3 dev/evidence/run.py convergence finetune layer --gpus 0,1,2,3 --seconds 560 --only bf16,coat,te,rowwise

dev/results gets evidence-PART[-TRAINING].json, in which the commands and the commit stand, and a figure of that name; the folder $OUT gets the former
too, as soon as there is something new. A run of `convergence` whose row is in the results is not run again, unless its checkpoint is wanted and is not
in build/evidence; nor is the small model's. Only Python's standard library is needed (and `tokenizers` to make the text of the GPT-2 runs, unless
COAT_TEXT names a folder where it lies packed).
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

import jobs  # beside this file, as are the next three
import plot
import tables
import trainings
import runs

TINY = "--device cpu --recipe bf16 --optimizer fp32 --sample-every 0"  # moments are kept in FP32, and nothing but BF16 rounds what becomes of them
HELD_OUT = {"llama-tiny": 64, "gpt2": 1}  # sequences that `activations` takes
PROGRAMS = {"moments": ["train", "build/evidence_moments"], "activations": ["train", "build/evidence_activations"],
            "memory": ["build/evidence_memory"], "timing": ["build/evidence_timing"], "layer": ["build/evidence_layer"], "models": ["train"],
            "convergence": ["train"], "finetune": ["train"], "ablations": ["train"], "page": []}
# Hidden size, tokens of a sequence, sequences if not four; and seconds
SHAPES = {"4096x2048x8": 125, "4096x4096": 125, "4096x2048": 75, "2048x4096": 50, "2048x2048": 40}


def train_tiny():
    """The small model's checkpoint, the command that made it, and the commit that it was made at."""
    folder = "build/evidence/llama-tiny"
    command = f"./train {TINY} --out {folder} --log {folder}.jsonl"
    done = os.path.join(ROOT, f"{folder}.commit")  # written when the run has ended
    if not os.path.isfile(done):
        os.makedirs(jobs.BUILD, exist_ok=True)
        shutil.rmtree(os.path.join(ROOT, folder), ignore_errors=True)  # an interrupted run's, which ./train would not take
        jobs.on_gpu(command.split(), None, 3600)
        with open(done, "w", encoding="utf-8") as file:
            file.write(runs.commit())
    with open(done, encoding="utf-8") as file:
        return folder, command, file.read()


def trained(training):
    if training == "llama-tiny":
        return train_tiny()
    row = jobs.load("convergence")["rows"].get("bf16")
    if not row:
        raise jobs.Failed("its training run has not ended")
    return trainings.SAVED["bf16"], f"./train {trainings.CONVERGENCE} {row['flags']}", row["commit"]


def measure(part, training, gpu, left):
    """A program that prints its result as JSON, on a checkpoint or on none."""
    program, arguments, commands, name, trained_at = f"build/evidence_{part}", [], [], part, None
    if part in ("moments", "activations"):
        folder, command, trained_at = trained(training)
        commands.append(command)
        arguments = [folder] + ([str(HELD_OUT[training])] if part == "activations" else [])
        name = f"{part}-{training}"
    commands.append(" ".join([program, *arguments]))
    measured = json.loads(jobs.on_gpu([program, *arguments], gpu, left()))
    where = measured.get("device") or ("the CPU" if part == "memory" or training == "llama-tiny" else f"{jobs.card()} (training) and its host's CPU")
    jobs.write(name, {"commands": commands, "commit": runs.commit(), "trained_at": trained_at, "where": where,
                      "training": training if trained_at else None, **measured})
    return "measured"


def layer(shape):
    def act(gpu, left):
        measured = json.loads(jobs.on_gpu(["build/evidence_layer", shape], gpu, left()))
        for row in measured["rows"]:
            jobs.keep("layer", f"{row['recipe']} {shape}", row)
        if measured["refused"]:
            raise jobs.Failed("; ".join(measured["refused"].values()))
        return "every recipe"
    return act


def jobs_of(part, options):
    gpt2 = options.training == "gpt2"
    running = {"bf16", "coat"} if "convergence" in options.parts else set()  # what fine-tuning and the checkpoint's evidence wait for
    if options.only:
        running &= set(options.only.split(","))
    running -= {run.name for run in trainings.RUNS if run.name in running and trainings.has_ended(run)
                and trainings.checkpoint(os.path.join(ROOT, trainings.SAVED[run.name]))}
    if part in ("moments", "activations"):
        act = lambda gpu, left: measure(part, options.training, gpu, left)
        return [jobs.Job(part, 60 if gpt2 else 10, act, {"bf16"} & running if gpt2 else (), jobs.HOST)]
    if part == "memory":
        return [jobs.Job(part, 1, lambda gpu, left: measure(part, None, gpu, left), (), jobs.HOST)]
    if part == "timing":
        return [jobs.Job(part, 120, lambda gpu, left: measure(part, None, gpu, left))]
    if part == "layer":
        return [jobs.Job(f"layer {shape}", seconds, layer(shape)) for shape, seconds in SHAPES.items()]
    if part == "models":
        return trainings.models()
    if part == "convergence":
        again = set(trainings.SAVED) if "finetune" in options.parts and trainings.finetune(set()) else {"bf16"} if gpt2 else set()
        return trainings.convergence(set(filter(None, options.only.split(","))), again)
    if part == "ablations":
        return trainings.ablations()
    return trainings.finetune(running) if part == "finetune" else []


def page():
    """Every result's figure, and the tables between <!-- NAME --> and <!-- end --> of dev/RESULTS.md."""
    results = {}
    for file in sorted(os.listdir(RESULTS)):
        if file.startswith("evidence-") and file.endswith(".json"):
            with open(os.path.join(RESULTS, file), encoding="utf-8") as opened:
                results[file[len("evidence-"):-len(".json")]] = json.load(opened)
    for name, result in results.items():
        if name == "ablations":
            continue  # a table says it all
        with open(os.path.join(RESULTS, f"evidence-{name}.svg"), "w", encoding="utf-8") as svg:
            svg.write(plot.figure(name, result) + "\n")
    path = os.path.join(ROOT, "dev", "RESULTS.md")
    with open(path, encoding="utf-8") as opened:
        text = tables.fill(opened.read(), results)
    with open(path, "w", encoding="utf-8") as opened:
        opened.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PROGRAMS), metavar="PART", help=", ".join(PROGRAMS))
    parser.add_argument("--training", choices=list(HELD_OUT), default="llama-tiny", help="whose checkpoint moments and activations are of")
    parser.add_argument("--gpus", default="0", help="numbers, by commas")
    parser.add_argument("--seconds", type=float, default=1e6, help="for all of it, building included")
    parser.add_argument("--only", default="", help="names of convergence runs, by commas")
    options = parser.parse_args()
    unknown = set(filter(None, options.only.split(","))) - {run.name for run in trainings.RUNS}
    if options.only and "convergence" not in options.parts:
        parser.error("--only chooses among the runs of convergence")
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: there are " + ", ".join(run.name for run in trainings.RUNS))
    runs.commit()  # before anything is built
    targets = list(dict.fromkeys(target for part in options.parts for target in PROGRAMS[part]))
    if targets:
        jobs.say("building " + " ".join(targets))
        if subprocess.run(["make", *targets], cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode:
            sys.exit("make " + " ".join(targets) + " failed; what it says is above.")
    if {"models", "convergence", "finetune"} & set(options.parts):
        trainings.text()
    wanted = [job for part in options.parts for job in jobs_of(part, options)]
    jobs.say(f"{len(wanted)} jobs")
    good = jobs.work_off(wanted, options.gpus.split(","), options.seconds - jobs.passed())
    page()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
