"""The parts of the evidence that train: whole models on one card (table 7), convergence of every recipe, fine-tuning, and ablations. Each is a list
of jobs."""
import array
import json
import os
import re
import shutil
import subprocess
import threading
import typing

import corpus
import jobs
import runs

TEXT = "build/evidence/text"
CARRIED = os.path.join(jobs.ROOT, "build", "evidence-text")  # where a packed text is looked for before one is made


def text():
    """The token files, and what about.json says of them."""
    folder = os.path.join(jobs.ROOT, TEXT)
    if not os.path.isfile(os.path.join(folder, "about.json")):
        packed = os.environ.get("COAT_TEXT", CARRIED)
        jobs.say("unpacking the text" if os.path.isdir(packed) else "making the text; this takes minutes")
        if os.path.isdir(packed):
            corpus.unpack(packed, folder)
        else:
            corpus.make(folder)
    with open(os.path.join(folder, "about.json"), encoding="utf-8") as file:
        return json.load(file)


# ----------------------------------------------------------------------------------------------------------------------
# Convergence: 0.2 billion tokens in steps of 64 x 1024. The data's order is the seed's alone, so that runs of one seed can be compared step by step.

STEPS = 3052
CONVERGENCE = (f"--model gpt2 --data {TEXT}/train.bin,{TEXT}/val.bin --batch 64 --seq 1024 --steps {STEPS} --lr 6e-4 --warmup 300 "
               f"--eval-every {STEPS // 20} --sample-every 0")
PART = STEPS * 2 // 5  # some ablations go on no further: what lies between two runs of one seed and schedule can be told before their end
SIZES = (8, 16, 32, 64, 128)
CONSTANTS = {"activations": ("PER_GROUP{{1, {}}}", 16), "moments": ("MOMENT_GROUP = {}", 128)}  # group sizes: how they stand in coat.h, and for what
SMALLEST_ON_A_GPU = {"activations": 8, "moments": 32}


class Run(typing.NamedTuple):
    name: str
    flags: str
    steps: int
    seconds: int  # on an H200
    group: tuple = None  # of what, and how large, where not as in coat.h


def group_runs(smallest, steps, seconds):
    return [Run(f"{kind} in groups of {size}", "--recipe coat", steps, seconds, (kind, size))
            for kind, (_, usual) in CONSTANTS.items() for size in SIZES if size != usual and size >= smallest[kind]]


RECIPES = [
    Run("bf16", "--recipe bf16", STEPS, 385), Run("coat", "--recipe coat", STEPS, 345),
    Run("bf16 seed 2", "--recipe bf16 --seed 2", STEPS, 385), Run("bf16 seed 3", "--recipe bf16 --seed 3", STEPS, 385),
    Run("te", "--recipe te", STEPS, 330), Run("rowwise", "--recipe rowwise", STEPS, 400),
    Run("deepseek", "--recipe deepseek", STEPS, 415), Run("colossal", "--recipe colossal", STEPS, 330),
    Run("coat seed 2", "--recipe coat --seed 2", STEPS, 345),
]
PARTS = [  # of COAT
    Run("optimizer only", "--recipe bf16 --optimizer coat", STEPS, 385), Run("activations only", "--recipe coat --optimizer fp32", STEPS, 345),
    Run("without expansion", "--recipe coat --optimizer fp8", STEPS, 345), Run("optimizer fp8lm", "--recipe bf16 --optimizer fp8lm", PART, 160),
]
RUNS = [*RECIPES, *PARTS, *group_runs(SMALLEST_ON_A_GPU, PART, 145)]
SAVED = {"bf16": "build/evidence/gpt2-bf16", "coat": "build/evidence/gpt2-coat"}  # runs whose checkpoints are used again


def has_ended(run):
    """A run in the results need not run again, unless its weights were not read in BF16, or its checkpoint is wanted and is not here."""
    row = jobs.load("convergence")["rows"].get(run.name)
    return row is not None and (run.steps < STEPS or run.name.startswith("bf16") or "read_in_bf16" in row)


def checkpoint(folder):
    """That of the last step, or None: an interrupted run leaves an earlier one."""
    last = os.path.join(folder, f"step-{STEPS:06}")
    return last if os.path.isdir(last) else None


# What a recipe learned, apart from what its rounding does to the measurement: every run's weights are read in BF16 too.
READ = f"--recipe bf16 --steps 0 --data {TEXT}/train.bin,{TEXT}/val.bin --batch 64 --seq 1024"


def build_with(group, on_gpu):
    """./train with other groups, made in a copy of its sources; its path."""
    kind, size = group
    constant, usual = CONSTANTS[kind]
    copy = os.path.join(jobs.BUILD, f"train-{kind}-{size}" + ("" if on_gpu else "-cpu"))
    shutil.rmtree(copy, ignore_errors=True)
    os.makedirs(copy)
    for name in ("Makefile", "data", *(file for file in os.listdir(jobs.ROOT) if file.endswith((".h", ".cpp", ".cuh", ".cu")))):
        (shutil.copytree if name == "data" else shutil.copy)(os.path.join(jobs.ROOT, name), os.path.join(copy, name))
    header = os.path.join(copy, "coat.h")
    with open(header, encoding="utf-8") as file:
        before = file.read()
    if before.count(constant.format(usual)) != 1:
        raise jobs.Failed(f"coat.h does not say {constant.format(usual)} once")
    with open(header, "w", encoding="utf-8") as file:
        file.write(before.replace(constant.format(usual), constant.format(size)))
    told = subprocess.run(["make", "-s", "--eval", "headers: ; @echo $(COAT_HEADERS)", "headers"], cwd=jobs.ROOT, capture_output=True, text=True,
                          check=True).stdout.strip()  # without nvcc CUDA's would not be among them, and the text would be another
    subprocess.run(["make", "-s", "-C", copy, *(["-j8"] if on_gpu else ["NVCC="]), f"COAT_HEADERS={told}", "train"], check=True)
    return os.path.join(copy, "train")


def converge(run):
    folder = SAVED.get(run.name, "build/evidence/gpt2-" + run.name.replace(" ", "-"))
    program = os.path.join(jobs.BUILD, "train-{}-{}".format(*run.group), "train") if run.group else "./train"

    def act(gpu, left):
        jobs.need_same("convergence", text=text()["python"], shared=CONVERGENCE, read=READ)

        def keep():
            jobs.keep("convergence", run.name, dict(row, flags=run.flags, group=run.group), text=text()["python"], shared=CONVERGENCE, read=READ)
        if run.steps < STEPS:
            row = jobs.train(f"convergence {run.name}", f"{CONVERGENCE} {run.flags}", gpu, left(), program, run.steps)
            keep()
            return f"stopped after step {run.steps}, {row['tokens_per_second']:,.0f} tok/s"
        shutil.rmtree(os.path.join(jobs.ROOT, folder), ignore_errors=True)  # ./train takes no other run's folder
        row = jobs.train(f"convergence {run.name}", f"{CONVERGENCE} {run.flags} --out {folder}", gpu, left())
        keep()
        if not run.name.startswith("bf16"):
            weights = checkpoint(os.path.join(jobs.ROOT, folder))
            row["read_in_bf16"] = jobs.validate(f"reading {run.name}", f"--model {weights} {READ}", gpu, left())
            keep()
        if run.name not in SAVED:
            shutil.rmtree(os.path.join(jobs.ROOT, folder))
        read = f", read in BF16 {row['read_in_bf16']:.4f}" if "read_in_bf16" in row else ""
        return f"validation {row['validation'][-1][1]:.4f}{read}, {row['tokens_per_second']:,.0f} tok/s"
    return act


def convergence(only, wanted_checkpoints):
    wanted = []
    for run in RUNS:
        saved = run.name in SAVED and checkpoint(os.path.join(jobs.ROOT, SAVED[run.name]))
        if (only and run.name not in only) or (has_ended(run) and (run.name not in wanted_checkpoints or saved)):
            continue
        building = f"./train, {run.name}"
        if run.group:
            wanted.append(jobs.Job(building, 120, lambda gpu, left, group=run.group: build_with(group, True), (), jobs.HOST))
        wanted.append(jobs.Job(run.name, run.seconds, converge(run), {building} if run.group else ()))
    return wanted


# ----------------------------------------------------------------------------------------------------------------------
# Fine-tuning: from the weights that two of those runs ended with, on another text, in both recipes

FINETUNE = (f"--data {TEXT}/headers/train.bin,{TEXT}/headers/val.bin --batch 32 --seq 1024 --steps 400 --lr 1e-4 --warmup 40 --eval-every 100 "
            "--sample-every 0")
FINETUNE_SECONDS = 60


def finetune_one(start, recipe):
    def act(gpu, left):
        jobs.need_same("finetune", text=text()["headers"], shared=FINETUNE)
        weights = checkpoint(os.path.join(jobs.ROOT, SAVED[start]))
        if not weights:
            raise jobs.Failed(f"there is no checkpoint in {SAVED[start]}")
        row = jobs.train(f"finetune {start} {recipe}", f"--model {os.path.relpath(weights, jobs.ROOT)} --recipe {recipe} {FINETUNE}", gpu, left())
        jobs.keep("finetune", f"{start}, then {recipe}", row, text=text()["headers"], shared=FINETUNE)
        return f"validation {row['validation'][0][1]:.4f} -> {row['validation'][-1][1]:.4f}"
    return act


def finetune(running):
    """`running`: names of runs that this call makes first."""
    return [jobs.Job(f"fine-tuning of {start} in {recipe}", FINETUNE_SECONDS, finetune_one(start, recipe), {start} & running)
            for start in SAVED for recipe in ("coat", "bf16") if f"{start}, then {recipe}" not in jobs.load("finetune")["rows"]]


# ----------------------------------------------------------------------------------------------------------------------
# Whole models: every recipe at a batch that all can hold, and at the largest that each can. A model's runs stay on one card, in turn.

MODELS = {"llama-2-7b": (8, 330), "tinyllama-1.1b": (16, 200)}  # the common batch, and the seconds that all of a model's runs want
SEQUENCE = 2048
WAYS = [("bf16", "--recipe bf16"), ("te", "--recipe te"), ("colossal", "--recipe colossal"), ("rowwise", "--recipe rowwise"),
        ("deepseek", "--recipe deepseek"), ("coat", "--recipe coat"), ("bf16, moments too", "--recipe bf16 --optimizer bf16"),
        ("coat, leanest", f"--recipe coat {runs.LEAN}")]
SHORT = f"--seq {SEQUENCE} --warmup 5 --lr 1e-4 --eval-every 0 --sample-every 0"
STEPS_AT_COMMON, STEPS_AT_LARGEST = 9, 5  # the largest batches take seconds a step


def few_held_out(batch):
    """A file with one batch of held-out tokens, since validation is not what is measured."""
    path = os.path.join(jobs.ROOT, TEXT, f"val-{batch}.bin")
    if not os.path.exists(path):  # another run may have it mapped
        with open(os.path.join(jobs.ROOT, TEXT, "val.bin"), "rb") as file:
            header = array.array("i", file.read(corpus.HEADER))
            count = min(header[2], batch * SEQUENCE + 1)
            header[2] = count
            tokens = file.read(2 * count)
        new = f"{path}.{threading.get_ident()}"
        with open(new, "wb") as file:
            file.write(header.tobytes() + tokens)
        os.replace(new, path)
    return os.path.relpath(path, jobs.ROOT)


def short_run(model, way, flags, batch, steps, gpu, left):
    name = f"{model}, {way}, {batch}"
    known = jobs.load("models")["rows"]
    if name in known:
        return known[name]
    data = f"{TEXT}/train.bin,{few_held_out(batch)}"
    row = jobs.train(f"models {name}", f"--model {model} {flags} --batch {batch} --steps {steps} --data {data} {SHORT}", gpu, left())
    row = {"model": model, "way": way, "batch": batch, **{key: row[key] for key in ("flags", "ms", "tokens_per_second", "mib", "train")}}
    jobs.keep("models", name, row)
    jobs.say(f"  {name}: {row['tokens_per_second']:,.0f} tok/s, {row['mib']} MiB")
    return row


def largest_batch(model, flags, gpu, left):
    """./train refuses a batch that is too large and says which is not; it does so before it allocates anything."""
    data = f"{TEXT}/train.bin,{few_held_out(1)}"
    try:
        jobs.on_gpu(["./train", *runs.placed(f"--model {model} {flags} --batch 2048 --data {data} {SHORT}", gpu), "--out", ""], gpu, left())
    except jobs.Failed as refusal:
        found = re.search(r"the largest --batch that fits is (\d+)", str(refusal))
        if found:
            return int(found.group(1))
        raise
    raise jobs.Failed("a batch of 2048 fits, so that the largest is not known")


def model_runs(model, common):
    def act(gpu, left):
        refused = []
        for batch_of, steps in ((lambda *_: common, STEPS_AT_COMMON), (largest_batch, STEPS_AT_LARGEST)):
            for way, flags in WAYS:
                try:
                    short_run(model, way, flags, batch_of(model, flags, gpu, left), steps, gpu, left)
                except jobs.Failed as failure:
                    refused.append(f"{way}: {failure}")
        if refused:
            raise jobs.Failed("; ".join(dict.fromkeys(refused)))
        return "all runs"
    return act


def models():
    return [jobs.Job(model, seconds, model_runs(model, common)) for model, (common, seconds) in MODELS.items()]


# ----------------------------------------------------------------------------------------------------------------------
# Ablations of the small model on a CPU, a few seeds each: those of the convergence runs, and all group sizes

SMALL = "--device cpu --sample-every 0 --eval-every 0"
SEEDS = (1, 2, 3)


def small_runs(run):
    """One for each seed."""
    def act(gpu, left):
        program = build_with(run.group, False) if run.group else "./train"
        for seed in SEEDS:
            key = f"{run.name} seed {seed}"
            if key not in jobs.load("ablations")["rows"]:
                row = jobs.train(f"ablations {key}", f"{SMALL} {run.flags} --seed {seed}", None, left(), program)
                jobs.keep("ablations", key, {"name": run.name, "flags": run.flags, "group": run.group, "seed": seed, "validation": row["validation"]},
                          shared=SMALL, where="the CPU")
        rows = jobs.load("ablations")["rows"]
        return "validation " + ", ".join(f"{rows[f'{run.name} seed {seed}']['validation'][-1][1]:.4f}" for seed in SEEDS)
    return act


def ablations():
    wanted = [run for run in RECIPES if run.name in SAVED] + PARTS + group_runs(dict.fromkeys(CONSTANTS, 0), None, 400)
    rows = jobs.load("ablations")["rows"]
    return [jobs.Job(run.name, 400, small_runs(run), (), jobs.HOST) for run in wanted if any(f"{run.name} seed {seed}" not in rows for seed in SEEDS)]
