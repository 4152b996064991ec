#!/usr/bin/env python3
"""Runs the measurements of dev/RESULTS.md. Each result goes to dev/results/GROUP.json when its run ends.

    python3 dev/run.py cpu                        one group of runs; the groups are listed below
    python3 dev/run.py speed --only 7b            only the runs whose names contain "7b"
    python3 dev/run.py convergence --gpus 0,1     two GPUs, each with one run at a time
    python3 dev/run.py h100 --gpus 0+1,2+3 --only '2 GPUs'     two runs at a time, each on two GPUs
    python3 dev/run.py page                       only renews the tables and figures of dev/RESULTS.md

A run that has a result is skipped; --again repeats it. The commit in a result is git's, or the environment
variable COAT_COMMIT. Python's standard library is enough, except for `peers` (PyTorch) and for the text of
the GPT-2 runs (`tokenizers`; dev/corpus.py).
"""
import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import typing

import corpus
import tables

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = "build/evidence"  # logs, checkpoints and programs; all paths are relative to ROOT


# ------------------------------------------------------------------------------------------------------------
# The table of runs

class Job(typing.NamedTuple):
    name: str
    flags: str = ""        # of ./train; "--batch largest" means the largest batch that fits
    chain: str = ""  # jobs of one chain run on the same GPU, one after another, so that their speeds compare
    until: int = 0  # interrupt the run after this step; its learning-rate schedule is that of the whole run
    group_size: tuple = ()  # ("activations" or "moments", size): a ./train built with another group size
    save: str = ""         # folder for the checkpoint
    evaluate: str = ""     # flags of an evaluation of that checkpoint after the run
    program: str = ""      # a command that prints its result as JSON, in place of ./train
    first: str = ""        # flags of a ./train run on the CPU that makes the checkpoint which `program` reads


class Group(typing.NamedTuple):
    about: str
    jobs: list
    shared: str = ""       # flags of ./train that all jobs have
    build: tuple = ("train",)
    gpu: bool = True
    text: str = ""         # part of dev/corpus.py's text that the runs read


NO_MASTER = "--master none --gradients none"
LEAN = f"--attention groups {NO_MASTER}"
BF16, KEPT = "--recipe bf16 --optimizer bf16", "--recompute off"
SEVEN = "--model llama-2-7b --batch 8 --seq 2048 --lr 1e-4"
TINYLLAMA = "--model tinyllama-1.1b --batch 16 --seq 2048 --lr 1e-4"
TABLE_7 = "--seq 2048 --lr 1e-4 --warmup 10 --steps 10 --sample-every 0 --eval-every 0"
SPEED = "--sample-every 0 --eval-every 0 --steps 22 --warmup 22"
GPT2 = "--model gpt2 --batch 64 --seq 1024 --accumulate 8 --lr 1e-4"
TEXT = f"--data {corpus.FOLDER}/train.bin,{corpus.FOLDER}/val.bin"
HEADERS = f"--data {corpus.FOLDER}/headers/train.bin,{corpus.FOLDER}/headers/val.bin"
STEPS = 3052  # of 64 x 1024 tokens: 0.2 billion
PART = STEPS * 2 // 5
SAVED = {"bf16": f"{BUILD}/gpt2-bf16", "coat": f"{BUILD}/gpt2-coat"}  # checkpoints that other groups read
LONG = f"--model gpt2 {TEXT} --batch 64 --seq 1024 --steps {STEPS} --lr 6e-4 --warmup 300"
EVALUATE = f"--recipe bf16 --steps 0 {TEXT} --batch 64 --seq 1024"


def plain(names, flags="--recipe {}"):
    return [Job(name, flags.format(name)) for name in names]


def speed(model, flags):
    """Runs of one model, all on the same GPU."""
    rows = {
        "coat": "", "bf16": BF16, "coat, leanest": LEAN, "coat, fast accumulation": "--gemm-sums fast",
        "coat, recompute off": KEPT, "coat, recompute off, fast accumulation": f"{KEPT} --gemm-sums fast",
        "bf16, recompute off": f"{BF16} {KEPT}"}
    return [Job(f"{model} {name}", f"{flags} {extra}".strip(), model) for name, extra in rows.items()
            if model == "7b" or not ("fast" in name or "leanest" in name)]


def peers(model, batch):
    ours = f"--model {model} --batch {batch} --seq 2048 --warmup 5 --lr 1e-5 --steps 24"
    train = [
        Job(f"{model}: train {r}", f"{ours} --recipe {r} --optimizer {r}", model) for r in ("coat", "bf16")]
    torch = [Job(f"{model}: PyTorch {r}", chain=model, program=f"python3 dev/peers.py {model} {r} {batch}")
             for r in ("bf16", "fp8")]
    return train + torch + [job._replace(name=job.name + ", again") for job in train]


def converge(name, flags):
    evaluate = "" if name.startswith("bf16") else EVALUATE
    return Job(name, flags, save=SAVED.get(name, f"{BUILD}/gpt2-{name.replace(' ', '-')}"), evaluate=evaluate)


# Where coat.h has a group size, and its value there.
GROUP_SIZES = {"activations": ("PER_GROUP{{1, {}}}", 16), "moments": ("MOMENT_GROUP = {}", 128)}


def group_sizes(smallest, **also):
    """Runs with other group sizes; `smallest` has the least size of each kind of group that varies."""
    return [Job(f"{kind} in groups of {size}", "--recipe coat", group_size=(kind, size), **also)
            for kind, least in smallest.items() for size in (8, 16, 32, 64, 128)
            if size >= least and size != GROUP_SIZES[kind][1]]


def models(model, batch):
    ways = {**{r: f"--recipe {r}" for r in ("bf16", "te", "colossal", "rowwise", "deepseek", "coat")},
            "bf16, moments too": BF16, "coat, leanest": f"--recipe coat {LEAN}"}
    return [
        Job(f"{model}: {way}{name}", f"--model {model} {flags} --batch {size} --steps {steps}", model)
        for name, size, steps in (("", batch, 9), (", largest batch", "largest", 5))
        for way, flags in ways.items()]


WAYS = {"coat": "", "bf16": BF16, "colossal": "--recipe colossal --optimizer bf16"}


def ranks(n, *runs):
    """Runs on n GPUs, each as "model way sequences flags"; a way of PyTorch is fsdp or fsdp-float8."""
    jobs = []
    for model, way, batch, *flags in (run.split() for run in runs):
        name = f"{n} GPU{'s' if n > 1 else ''}: {model} {way}, {batch} x 2048"
        name += f", {' '.join(flags).replace('--', '')}" if flags else ""
        if way in WAYS:
            ranks_flag = f"--ranks {n}" if n > 1 else ""
            words = [f"--model llama-{'' if model == '30b' else '2-'}{model} --batch {batch}", ranks_flag,
                     WAYS[way], *flags]
            jobs.append(Job(name, " ".join(word for word in words if word)))
        else:
            torchrun = f"python3 -m torch.distributed.run --standalone --nproc_per_node {n}"
            jobs.append(Job(name, program=f"{torchrun} dev/peers.py llama-2-{model} {way} {batch}"))
    return jobs


def checkpoints(part, sequences=None):
    """A program on two checkpoints: GPT-2 (the BF16 convergence run) and llama-tiny (two minutes of a CPU)"""
    tiny = f"--device cpu --recipe bf16 --optimizer fp32 --sample-every 0 --out {BUILD}/llama-tiny"
    arguments = {"gpt2": f"{SAVED['bf16']}/step-{STEPS:06}", "llama-tiny": f"{BUILD}/llama-tiny/step-000250"}
    return [
        Job(name, program=f"build/evidence_{part} {folder}" + (f" {sequences[name]}" if sequences else ""),
            first=tiny if name == "llama-tiny" else "") for name, folder in arguments.items()]


PARTS = {"optimizer only": "--recipe bf16 --optimizer coat",
         "activations only": "--recipe coat --optimizer fp32",
         "without expansion": "--recipe coat --optimizer fp8"}
FP8LM = Job("optimizer fp8lm", "--recipe bf16 --optimizer fp8lm", until=PART)
SMALL = [*plain(("bf16", "coat")), *(Job(*part) for part in PARTS.items()), FP8LM._replace(until=0),
         *group_sizes({"activations": 8, "moments": 8})]
SHORT_GPT2 = {"bf16": "--recipe bf16", "coat": "", "attention in groups": "--attention groups",
              "no master": "--master none", "no gradients": "--gradients none", "leanest": LEAN,
              "no clipping": "--clip 0", "fast accumulation": "--gemm-sums fast"}
GROUPS = {
    "cpu": Group(
        "every recipe and optimizer on a CPU; 20 minutes on two cores",
        [*plain(("fp32", "bf16", "coat", "te", "colossal", "rowwise", "deepseek")),
         *(Job(f"bf16, moments {o}", f"--recipe bf16 --optimizer {o}")
           for o in ("bf16", "fp8", "coat", "fp8lm"))],
        "--device cpu --sample-every 0", gpu=False),
    "default": Group(
        "the default run of a GPU; one minute", plain(("bf16", "coat")), "--device gpu --sample-every 0"),
    "speed": Group(
        "speed and memory of whole models; 15 minutes",
        [*speed("7b", SEVEN), *speed("tinyllama", TINYLLAMA), *speed("gpt2", GPT2),
         Job("13b coat", "--model llama-2-13b --batch 1 --seq 2048 --lr 1e-4"),
         Job("30b coat, leanest", f"--model llama-30b --batch 1 --seq 2048 --lr 1e-5 {LEAN}")],
        SPEED),
    "saved": Group(
        "coat and coat-saved in turn on the same GPU, twice; four minutes",
        [Job(f"{model} {recipe}{again}", f"{flags}{more}", "saved")
         for model, flags in (("7b", SEVEN), ("gpt2", GPT2)) for again in ("", " again")
         for recipe, more in (("coat", ""), ("coat-saved", " --recipe coat-saved"))], SPEED),
    "peers": Group(
        "./train and PyTorch in turn on the same GPU; six minutes",
        [*peers("llama-2-7b", 8), *peers("tinyllama-1.1b", 16)], "--sample-every 0 --eval-every 0"),
    "ranks": Group(
        "one and two GPUs of 141 GB (table 7); half a minute each; see \"Two H200\" in RESULTS.md",
        [*ranks(1, "7b coat 8", "7b bf16 8"),
         *ranks(2, "7b fsdp 6", "7b coat 8", "7b bf16 8", "7b coat 8 --attention groups",
                "7b fsdp-float8 6")], TABLE_7),
    "h100": Group(
        "one to eight GPUs of 80 GB (table 7); half a minute each; see \"The paper's GPU\" in RESULTS.md",
        [*ranks(1, "7b coat 8", "7b coat 1", f"7b coat 1 {LEAN}", f"7b coat largest {LEAN}",
                f"13b coat 1 {LEAN}", f"13b coat largest {LEAN}", f"7b bf16 1 {NO_MASTER}",
                f"7b bf16 largest {NO_MASTER}"),
         *ranks(2, "7b fsdp 1", "7b coat 8", "7b bf16 2", "13b coat 4", "7b fsdp-float8 1", "7b coat 2",
                "7b coat largest", "13b coat 1", "7b bf16 largest"),
         *ranks(4, "7b fsdp 3", "7b coat 8", "7b bf16 8", "13b coat 1", "13b bf16 1", "7b coat 2",
                "7b coat largest", "13b coat largest", "7b fsdp-float8 3", "7b fsdp 3 again"),
         *ranks(8, "7b fsdp 5", "7b coat 8", "7b bf16 8", "7b colossal 8", "13b coat 4", "13b bf16 4",
                "13b colossal 4", "30b coat 4", "7b coat 2", "13b coat 1", "30b coat 1", "7b coat largest",
                "7b fsdp-float8 5", "7b fsdp 5 again")], TABLE_7),
    "architectures": Group(
        "Llama 3.1 and Qwen2.5: speed and memory; two minutes",
        [Job(f"{model} {way}", f"--model {model} --batch 4 {flags}".strip(), model)
         for model in ("llama-3.1-8b", "qwen2.5-7b") for way, flags in (("coat", ""), ("bf16", BF16))],
        TABLE_7),
    "bench": Group(
        "every operator of a step; three minutes",
        [Job("bench", program="build/bench --json build/bench.json")], build=("build/bench",)),
    "gpt2": Group(
        "GPT-2 on 16 million tokens; each run half a minute",
        [Job(f"{name}{seed}", (flags + seed.replace(" seed", " --seed")).strip())
         for name, flags in SHORT_GPT2.items() for seed in ("", " seed 2", " seed 3")],
        f"--model gpt2 {TEXT} --batch 8 --seq 1024 --steps 2000 --lr 6e-4 --warmup 200 --eval-every 500 "
        "--sample-every 0", text="python"),
    "convergence": Group(
        "GPT-2 on 0.2 billion tokens in every recipe; each run six minutes",
        [*(converge(r, f"--recipe {r}") for r in ("bf16", "coat", "te", "rowwise", "deepseek", "colossal")),
         *(converge(f"bf16 seed {n}", f"--recipe bf16 --seed {n}") for n in (2, 3)),
         *(converge(*part) for part in PARTS.items()), FP8LM,
         *group_sizes({"moments": 32}, until=PART)],  # the kernels have 16 activations in a group
        f"{LONG} --eval-every {STEPS // 20} --sample-every 0", text="python"),
    "seeds": Group(
        "GPT-2 on 0.2 billion tokens, other seeds; each run five minutes",
        [converge(f"{r} seed {n}", f"--recipe {r} --seed {n}")
         for r, numbers in (("bf16", (2, 3, 4, 5)), ("coat", (2, 3)), ("te", (2, 3)),
                            ("coat-saved", (2, 3, 4, 5)))
         for n in numbers],
        f"{LONG} --eval-every {STEPS // 2} --sample-every 0", text="python"),
    "passes": Group(
        "the default run of a GPU over two passes of its text, three seeds; each run 40 seconds",
        [Job(f"{r} seed {n}", f"--recipe {r} --seed {n}")
         for n in (1, 2, 3) for r in ("bf16", "te", "deepseek", "coat")],
        "--device gpu --steps 2000 --eval-every 500 --sample-every 0"),
    "finetune": Group(
        "fine-tuning of two convergence runs; each run one minute",
        [Job(f"{start}, then {recipe}", f"--model {folder}/step-{STEPS:06} --recipe {recipe}")
         for start, folder in SAVED.items() for recipe in ("coat", "bf16")],
        f"{HEADERS} --batch 32 --seq 1024 --steps 400 --lr 1e-4 --warmup 40 --eval-every 100 "
        "--sample-every 0", text="headers"),
    "ablations": Group(
        "parts of COAT and group sizes with llama-tiny on a CPU, three seeds; two hours",
        [job._replace(name=f"{job.name} seed {n}", flags=f"{job.flags} --seed {n}")
         for job in SMALL for n in (1, 2, 3)],
        "--device cpu --sample-every 0 --eval-every 0", gpu=False),
    "moments": Group(
        "dynamic range and quantization error of moments (figure 2, table 1)", checkpoints("moments"),
        build=("train", "build/evidence_moments"), gpu=False),
    "activations": Group(
        "quantization error of activations (figure 4a)",
        checkpoints("activations", {"gpt2": 1, "llama-tiny": 64}),
        build=("train", "build/evidence_activations"), gpu=False),
    "memory": Group(
        "saved activations by operator, computed (table 2)", [Job("memory", program="build/evidence_memory")],
        build=("build/evidence_memory",), gpu=False),
    "timing": Group(
        "time of an amax (figure 4b), GEMMs, saved activations; two minutes",
        [Job("timing", program="build/evidence_timing")], build=("build/evidence_timing",)),
    "layer": Group(
        "time and memory of one layer (table 6); seven minutes",
        [Job(shape, program=f"build/evidence_layer {shape}")
         for shape in ("4096x2048x8", "4096x4096", "4096x2048", "2048x4096", "2048x2048")],
        build=("build/evidence_layer",)),
    "models": Group(
        "whole models, at one batch and at the largest that fits (table 7); nine minutes",
        [*models("llama-2-7b", 8), *models("tinyllama-1.1b", 16)],
        "--seq 2048 --warmup 5 --lr 1e-4 --eval-every 0 --sample-every 0"),
}


# ------------------------------------------------------------------------------------------------------------
# One run

class Failed(Exception):
    """A run without a result; the message says why."""


@functools.lru_cache
def commit():
    if os.environ.get("COAT_COMMIT") or not shutil.which("git"):
        return os.environ.get("COAT_COMMIT") or "unknown"
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          check=False).stdout.strip() or "unknown"


def ask_gpu(what, gpu):
    if gpu is None or not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits",
               f"--id={gpu.replace('+', ',')}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def named_gpus(gpu):
    names = ask_gpu("name", gpu).splitlines()
    return f"{len(names)} {names[0]}" if len(names) > 1 else "".join(names)


@contextlib.contextmanager
def memory_watch(gpu):
    """Yields a list of one number: the most memory in use on a GPU, in MiB, as the driver reports it."""
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.3):
            used = ask_gpu("memory.used", gpu).split()
            most[0] = max(most[0], *(int(one) for one in used if one.isdigit()), 0)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield most
    ended.set()
    watcher.join()


def execute(command, gpu, enough=lambda: False):
    """Runs a command and returns its standard output. When enough() is true, the command gets a Ctrl-C."""
    environment = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu.replace("+", ",")
    interrupted = False
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as child:
        while True:
            try:
                output, errors = child.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if not interrupted and enough():
                    child.send_signal(signal.SIGINT)
                    interrupted = True
    if child.returncode != (128 + signal.SIGINT if interrupted else 0):
        raise Failed((errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
    return output


def train(flags, gpu, log, program="./train", until=0):
    """Runs ./train. Returns the lines of its log: its steps and its validations, up to step `until`."""
    words = flags.split()
    words += [] if "--device" in words else ["--device", "gpu"
                                             ]  # without a GPU the run fails; it does not take the CPU
    words += [] if "--out" in words else ["--out", ""]
    path = os.path.join(ROOT, log)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)

    def lines(kind):
        with open(path, encoding="utf-8") as file:
            whole = [json.loads(line) for line in file if line.endswith("\n")]
        return [line for line in whole if line["kind"] == kind and (not until or line["step"] <= until)]
    execute([program, *words, "--log", log], gpu,
            lambda: until and os.path.exists(path) and len(lines("step")) >= until)
    return lines("step"), lines("validation")


def build_with(kind, size, on_gpu):
    """Builds ./train with another group size, in a copy of the sources; returns its path."""
    constant, usual = GROUP_SIZES[kind]
    copy = os.path.join(ROOT, BUILD, f"train-{kind}-{size}" + ("" if on_gpu else "-cpu"))
    if not os.path.exists(os.path.join(copy, "train")):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", "out*", "dev", "test", ".git",
                                                                  "train"))
        header = os.path.join(copy, "coat.h")
        with open(header, encoding="utf-8") as file:
            source = file.read()
        if source.count(constant.format(usual)) != 1:
            raise Failed(f"coat.h does not contain {constant.format(usual)} exactly once")
        with open(header, "w", encoding="utf-8") as file:
            file.write(source.replace(constant.format(usual), constant.format(size)))
        tell = ["make", "-s", "--eval", "headers: ; @echo $(COAT_HEADERS)",
                "headers"]  # the same text for both builds
        headers = subprocess.run(tell, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        nvcc = [] if on_gpu else ["NVCC="]
        subprocess.run(["make", "-s", "-C", copy, *nvcc, f"COAT_HEADERS={headers}", "train"], check=True)
    return os.path.join(copy, "train")


def with_largest_batch(shared, flags, gpu, log):
    """./train rejects a batch that is too large, before it allocates, and names the largest that fits."""
    if "--batch largest" not in flags:
        return flags
    try:
        train(f"{shared} {flags.replace('--batch largest', '--batch 2048')}", gpu, log)
    except Failed as refusal:
        found = re.search(r"the largest --batch that fits is (\d+)", str(refusal))
        if not found:
            raise
        return flags.replace("--batch largest", f"--batch {found.group(1)}")
    raise Failed("a batch of 2048 fits, so the largest is not known")


def planned_mib(flags):
    """What the plan says that a run needs on its fullest GPU."""
    plan = execute(["./train", *flags.split(), "--plan"], None)
    return float(re.findall(r"^  total +([0-9.]+)$", plan, re.MULTILINE)[-1])


def run_training(group, job, gpu):
    log = f"{BUILD}/{group}-{re.sub('[^a-z0-9.]+', '-', job.name)}.jsonl"
    flags = with_largest_batch(GROUPS[group].shared, job.flags, gpu, log)
    program = build_with(*job.group_size, gpu is not None) if job.group_size else "./train"
    shutil.rmtree(os.path.join(ROOT, job.save), ignore_errors=True) if job.save else None
    out = f" --out {job.save}" if job.save else ""
    with memory_watch(gpu) as most:
        steps, validations = train(f"{GROUPS[group].shared} {flags}{out}", gpu, log, program, job.until)
    timed = steps[1:] or steps  # the first step includes start-up costs
    times = [step["ms"] for step in timed]
    row = {
        "flags": flags, "steps": len(steps), "ms": statistics.median(times), "ms_least": min(times),
        "ms_most": max(times), "tokens_per_second": statistics.median(step["tokens_per_second"]
                                                                      for step in timed), "mib": most[0]
        or None, "train": [None if step["loss"] is None else round(step["loss"], 4) for step in steps],
        "validation": [[line["step"], round(line["loss"], 7)] for line in validations]}
    if "--ranks" in flags:
        row["planned_mib"] = planned_mib(f"{GROUPS[group].shared} {flags}")
    if job.evaluate:
        checkpoint = f"--model {job.save}/step-{STEPS:06}"
        row["evaluated_in_bf16"] = train(f"{checkpoint} {job.evaluate}", gpu,
                                         log + ".evaluation")[1][-1]["loss"]
    if job.save and job.save not in SAVED.values():
        shutil.rmtree(os.path.join(ROOT, job.save))
    return row


def run_program(job, gpu):
    if job.first and not os.path.exists(os.path.join(
            ROOT,
            job.program.split()[1])):  # an interrupted run has no last step
        shutil.rmtree(os.path.join(ROOT, BUILD, "llama-tiny"), ignore_errors=True)
        train(job.first, None, f"{BUILD}/llama-tiny.jsonl")
    words = job.program.split()
    with memory_watch(gpu) as most:
        output = execute(words, gpu)
    if "--json" in words:  # the program writes a table to standard output
        with open(os.path.join(ROOT, words[words.index("--json") + 1]), encoding="utf-8") as file:
            output = file.read()
    measured = json.loads(output)
    if measured.get("refused"):
        raise Failed("; ".join(measured["refused"].values()))
    commands = ([f"./train {job.first}"] if job.first else []) + [job.program]
    return {"commands": commands, **measured, **({"mib": most[0]} if "ms" in measured else {})}


# ------------------------------------------------------------------------------------------------------------
# Groups

WRITING = threading.Lock()


def shared_by(group):
    """What the file of a group says of all its rows."""
    shared, text = GROUPS[group].shared, GROUPS[group].text
    return {**({"shared": shared} if shared else {}), **({"text": corpus.about()[text]} if text else {})}


def keep(group, name, row):
    with WRITING:
        result = {**shared_by(group), **tables.load(group)}
        result["rows"][name] = row
        tables.save(group, result)


def run_group(group, gpus, wanted, again):
    result = tables.load(group)
    if result["rows"] and any(result.get(key, value) != value for key, value in shared_by(group).items()):
        print(f"{group}: FAILED: {tables.path_of(group)} has rows of other flags or text; move it away.")
        return False
    known, chains = {} if again else result["rows"], {}
    for job in GROUPS[group].jobs:
        if wanted(job.name) and job.name not in known:
            chains.setdefault(job.chain or job.name, []).append(job)
    free, failures = queue.Queue(), []
    for gpu in gpus if GROUPS[group].gpu else [None]:
        free.put(gpu)

    def run_chain(jobs):
        gpu = free.get()
        for job in jobs:
            begun = time.monotonic()
            try:
                row = run_program(job, gpu) if job.program else run_training(group, job, gpu)
                where = named_gpus(gpu) or f"{os.cpu_count()} CPU cores"
                keep(group, job.name, {"commit": commit(), "where": where, **row})
                told = f"{row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else "done"
            except Exception as problem:  # the other runs go on
                failures.append(job.name)
                told = f"FAILED: {problem or type(problem).__name__}"
            print(f"{group}: {job.name}: {told} ({time.monotonic() - begun:.0f} s)", flush=True)
        free.put(gpu)
    with concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(run_chain, sorted(chains.values(), key=len, reverse=True)))
    return not failures


def main():
    groups = "\n".join(f"    {name:<12}  {group.about}" for name, group in GROUPS.items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\nGroups:\n{groups}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=[*GROUPS, "page"], metavar="GROUP")
    parser.add_argument("--gpus", default="0", help="indices of the GPUs to use, separated by commas")
    parser.add_argument("--only", default="", help="parts of the names of runs, separated by commas")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a result")
    options = parser.parse_args()
    parts, chosen = [part for part in options.only.split(",")
                     if part], [g for g in options.groups if g != "page"]
    names = [job.name for group in chosen for job in GROUPS[group].jobs]
    for part in parts:
        if not any(part in name for name in names):
            parser.error(f"no run's name contains '{part}'; there are: " + "; ".join(names))
    commit()  # the commit at the start, whatever is committed while runs go on
    targets = list(dict.fromkeys(target for group in chosen for target in GROUPS[group].build))
    if targets and subprocess.run(["make", *targets], cwd=ROOT, stdout=subprocess.DEVNULL,
                                  check=False).returncode:
        sys.exit(f"make {' '.join(targets)} failed; its message is above.")
    os.makedirs(os.path.join(ROOT, BUILD), exist_ok=True)
    if any(GROUPS[group].text for group in chosen):
        corpus.prepare()
    good = [run_group(group, options.gpus.split(","), lambda name: not parts or any(p in name for p in parts),
                      options.again) for group in chosen]
    tables.renew_page()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
