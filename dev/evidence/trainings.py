"""The parts of the evidence that train: whole models on one card (table 7), convergence of every recipe, fine-tuning, and ablations. Each is a list
of jobs."""
import array
import glob
import json
import os
import re
import shutil
import subprocess
import tempfile

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
PART = STEPS * 2 // 5  # ablations go on no further: what lies between two runs of one seed and schedule can be told long before their end
RUNS = [  # most wanted first: name, flags, steps, and seconds on an H200
    ("bf16", "--recipe bf16", STEPS, 385), ("coat", "--recipe coat", STEPS, 345),
    ("bf16 seed 2", "--recipe bf16 --seed 2", STEPS, 385), ("bf16 seed 3", "--recipe bf16 --seed 3", STEPS, 385),
    ("te", "--recipe te", STEPS, 365), ("rowwise", "--recipe rowwise", STEPS, 390),
    ("deepseek", "--recipe deepseek", STEPS, 410), ("colossal", "--recipe colossal", STEPS, 360),
    ("optimizer only", "--recipe bf16 --optimizer coat", PART, 160), ("without expansion", "--recipe coat --optimizer fp8", PART, 145),
    ("activations only", "--recipe coat --optimizer fp32", PART, 150), ("optimizer fp8lm", "--recipe bf16 --optimizer fp8lm", PART, 160),
    ("coat seed 2", "--recipe coat --seed 2", STEPS, 345),
]
SAVED = {"bf16": "build/evidence/gpt2-bf16", "coat": "build/evidence/gpt2-coat"}  # runs whose checkpoints are used again


def has_ended(name):
    """A run in the results need not run again, unless its checkpoint is wanted and is not here."""
    return name in jobs.load("convergence")["rows"]


def checkpoint(folder):
    """The newest checkpoint in a folder, or None."""
    return max(glob.glob(os.path.join(folder, "step-*")), default=None)


# What a recipe learned, apart from what its rounding does to the measurement: every run's weights are read in BF16 too.
READ = f"--recipe bf16 --steps 0 --data {TEXT}/train.bin,{TEXT}/val.bin --batch 64 --seq 1024"


def converge(name, flags, steps):
    folder = SAVED.get(name, "build/evidence/gpt2-" + name.replace(" ", "-"))

    def act(gpu, left):
        if steps < STEPS:
            row = jobs.train(f"convergence {name}", f"{CONVERGENCE} {flags}", gpu, left(), until=steps)
            jobs.keep("convergence", name, dict(row, flags=flags))
            return f"stopped after step {steps}, {row['tokens_per_second']:,.0f} tok/s"
        shutil.rmtree(os.path.join(jobs.ROOT, folder), ignore_errors=True)  # ./train takes no other run's folder
        row = jobs.train(f"convergence {name}", f"{CONVERGENCE} {flags} --out {folder}", gpu, left())
        jobs.keep("convergence", name, dict(row, flags=flags), text=text()["python"], shared=CONVERGENCE, read=READ)
        if not name.startswith("bf16"):
            row["read_in_bf16"] = jobs.validate(f"reading {name}", f"--model {checkpoint(os.path.join(jobs.ROOT, folder))} {READ}", gpu, left())
            jobs.keep("convergence", name, dict(row, flags=flags))
        if name not in SAVED:
            shutil.rmtree(os.path.join(jobs.ROOT, folder))
        read = f", read in BF16 {row['read_in_bf16']:.4f}" if "read_in_bf16" in row else ""
        return f"validation {row['validation'][-1][1]:.4f}{read}, {row['tokens_per_second']:,.0f} tok/s"
    return act


def convergence(only, wanted_checkpoints):
    wanted = []
    for name, flags, steps, seconds in RUNS:
        saved = name in SAVED and checkpoint(os.path.join(jobs.ROOT, SAVED[name]))
        if (not only or name in only) and (not has_ended(name) or (name in wanted_checkpoints and not saved)):
            wanted.append(jobs.Job(name, seconds, converge(name, flags, steps)))
    return wanted


# ----------------------------------------------------------------------------------------------------------------------
# Fine-tuning: from the weights that two of those runs ended with, on another text, in both recipes

FINETUNE = (f"--data {TEXT}/headers/train.bin,{TEXT}/headers/val.bin --batch 32 --seq 1024 --steps 400 --lr 1e-4 --warmup 40 --eval-every 100 "
            "--sample-every 0")
FINETUNE_SECONDS = 60


def finetune_one(start, recipe):
    def act(gpu, left):
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
    with open(os.path.join(jobs.ROOT, TEXT, "val.bin"), "rb") as file:
        header = array.array("i", file.read(corpus.HEADER))
        count = min(header[2], batch * SEQUENCE + 1)
        header[2] = count
        tokens = file.read(2 * count)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens)
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
        jobs.on_gpu(["./train", *f"--model {model} {flags} --batch 4096 --data {data} {SHORT}".split(), "--out", ""], gpu, left())
    except jobs.Failed as refusal:
        found = re.search(r"the largest --batch that fits is (\d+)", str(refusal))
        if found:
            return int(found.group(1))
        raise
    raise jobs.Failed("a batch of 4096 fits, so that the largest is not known")


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
# Ablations of the small model on a CPU, a few seeds each: those of the convergence runs, and group sizes. Group sizes are constants of coat.h, changed
# in a copy of the program; the GPU's kernels know no others.

SMALL = "--device cpu --sample-every 0 --eval-every 0"
SEEDS = (1, 2, 3)
SIZES = (8, 16, 32, 64, 128)
CONSTANTS = {"activations": ("PER_GROUP{{1, {}}}", 16), "moments": ("MOMENT_GROUP = {}", 128)}  # how they stand there, and for what


def grouped(kind, size, copy):
    """A copy of ./train with other groups."""
    constant, usual = CONSTANTS[kind]
    for name in ("Makefile", "data", *(file for file in os.listdir(jobs.ROOT) if file.endswith((".h", ".cpp")))):
        (shutil.copytree if name == "data" else shutil.copy)(os.path.join(jobs.ROOT, name), os.path.join(copy, name))
    header = os.path.join(copy, "coat.h")
    with open(header, encoding="utf-8") as file:
        before = file.read()
    if before.count(constant.format(usual)) != 1:
        raise jobs.Failed(f"coat.h does not say {constant.format(usual)} once")
    with open(header, "w", encoding="utf-8") as file:
        file.write(before.replace(constant.format(usual), constant.format(size)))
    subprocess.run(["make", "-s", "-C", copy, "NVCC=", "train"], check=True)
    return os.path.join(copy, "train")


def small_runs(name, flags, group=None):
    """A run for each seed. `group`: of what, and how large."""
    def act(gpu, left):
        with tempfile.TemporaryDirectory() as copy:
            program = grouped(*group, copy) if group else "./train"
            for seed in SEEDS:
                key = f"{name} seed {seed}"
                if key not in jobs.load("ablations")["rows"]:
                    row = jobs.train(f"ablations {key}", f"{SMALL} {flags} --seed {seed}", None, left(), program)
                    jobs.keep("ablations", key, {"name": name, "flags": flags, "group": group, "seed": seed, "validation": row["validation"]},
                              shared=SMALL, where="the CPU")
        rows = jobs.load("ablations")["rows"]
        return "validation " + ", ".join(f"{rows[f'{name} seed {seed}']['validation'][-1][1]:.4f}" for seed in SEEDS)
    return act


def ablations():
    wanted = [(name, flags, None) for name, flags, steps, _ in RUNS if name in SAVED or steps < STEPS]
    wanted += [(f"{kind} in groups of {size}", "--recipe coat", (kind, size)) for kind, (_, usual) in CONSTANTS.items() for size in SIZES if size != usual]
    rows = jobs.load("ablations")["rows"]
    return [jobs.Job(name, 400, small_runs(name, flags, group), (), jobs.HOST) for name, flags, group in wanted
            if any(f"{name} seed {seed}" not in rows for seed in SEEDS)]
