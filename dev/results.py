#!/usr/bin/env python3
"""Measures what dev/RESULTS.md says, and renews its tables and figures.

    python3 dev/results.py                   all groups, for a machine with a GPU; about two hours
    python3 dev/results.py bench speed:7b    one group, and of another the runs whose names contain "7b"
    python3 dev/results.py page              measures nothing; only renews the page
    python3 dev/results.py slower            compares build/bench.json, which `make bench` has written, with
                                             the recorded bench: names what is more than 5% slower (exit code 1)
    python3 dev/results.py help              this text, and the groups

Each result goes to dev/results.json when its run ends. If there is an environment variable OUT, a copy of
results.json goes to that folder. A run is skipped if results.json has its result of this commit, so the command
can be stopped and given again. The commit is git's, or the environment variable COAT_COMMIT. Packages are needed
by `peers`, `ranks` and `attention` (PyTorch), `moments` (NumPy) and the text of `convergence` (`tokenizers`).
"""
import concurrent.futures
import contextlib
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import typing

import attention_peers
import corpus
import plot

DEV = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(DEV)
BUILD = "build/evidence"  # logs and checkpoints; all paths are relative to ROOT

# ------------------------------------------------------------------------------------------------------------
# What is run


class Group(typing.NamedTuple):
    about: str
    runs: dict  # name -> flags of ./train, a command that prints its result as JSON, or a function that returns it
    shared: str = ""  # flags of ./train that all runs have
    build: str = ""  # what it needs besides ./train
    gpu: bool = True
    least_gpus: dict = {}  # name -> how many GPUs the run needs, if more than one
    at_once: bool = False  # one run on each GPU: for losses, which do not depend on time
    tests: bool = False  # the last line that a command prints is its result, in place of JSON


BF16 = "--recipe bf16 --optimizer bf16"
LEANEST = "--attention groups --master none --gradients none --clip 0"
QUIET = "--device gpu --sample-every 0 --eval-every 0"
SIZES = {"7b": "--model llama-2-7b --batch 8 --seq 2048",
         "tinyllama": "--model tinyllama-1.1b --batch 16 --seq 2048",
         "gpt2": "--model gpt2 --batch 64 --seq 1024 --accumulate 8",
         "llama-3.1-8b": "--model llama-3.1-8b --batch 4 --seq 2048",
         "qwen3-8b": "--model qwen3-8b --batch 4 --seq 2048"}
STEPS = 3052  # of 64 x 1024 tokens: 0.2 billion; of 16 x 2048: 0.1
LONG, LARGE = (
    f"--device gpu --model {model} --data {corpus.FOLDER}/train.bin,{corpus.FOLDER}/val.bin --batch {batch} "
    f"--seq {seq} --steps {STEPS} --lr {lr} --warmup 300 --eval-every {STEPS // 2} --sample-every 0"
    for model, batch, seq, lr in (("gpt2", 64, 1024, "6e-4"), ("tinyllama-1.1b", 16, 2048, "4e-4")))
GPT2 = f"{BUILD}/convergence-bf16"  # checkpoints that `moments` reads


class RanksRun(typing.NamedTuple):
    """A run on several GPUs, and what the paper's table 7 says of it."""
    gpus: int
    model: str
    way: str  # a recipe of ours, or PyTorch's fsdp or fsdp-float8
    batch: int  # sequences a GPU
    paper_gb: str = ""  # GB a GPU (sequences)
    paper_speed: str = ""  # tokens/s a GPU at the largest batch (sequences)

    def name(self):
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}: {self.model} {self.way}, {self.batch} x 2048"

    def command(self):
        if self.way.startswith("fsdp"):
            return (f"python3 -m torch.distributed.run --standalone --nproc_per_node {self.gpus} "
                    f"dev/peers.py llama-2-{self.model} {self.way} {self.batch}")
        recipe = f" {BF16}" if self.way == "bf16" else ""
        return f"--model llama-2-{self.model} --batch {self.batch} --ranks {self.gpus}{recipe}"


RANKS = {run.name(): run for run in (
    RanksRun(1, "7b", "coat", 1, "79.3 (1)", "5,906 (1)"),
    RanksRun(1, "7b", "coat", 8, "79.3 (1)", "5,906 (1)"),
    RanksRun(1, "7b", "bf16", 8, "out of memory (1)"),
    RanksRun(2, "7b", "coat", 2, "52.8 (2)", "11,351 (4)"),
    RanksRun(2, "7b", "coat", 8, "52.8 (2)", "11,351 (4)"),
    RanksRun(2, "7b", "bf16", 2, "out of memory (2)", "6,130 (1)"),
    RanksRun(2, "7b", "fsdp", 1),
    RanksRun(2, "7b", "fsdp-float8", 1),
    RanksRun(2, "13b", "coat", 4, "73.2 (1)", "2,137 (1)"),
    RanksRun(4, "7b", "coat", 8, "35.6 (2)", "11,257 (4)"),
    RanksRun(4, "7b", "bf16", 8, "55.1 (2)", "7,730 (2)"),
    RanksRun(4, "7b", "fsdp", 3),
    RanksRun(4, "7b", "fsdp-float8", 3),
    RanksRun(4, "13b", "coat", 1, "49.1 (1)", "5,295 (2)"),
    RanksRun(4, "13b", "bf16", 1, "76.1 (1)", "2,345 (1)"))}


def bench(flags):
    """A command that prints what the bench measures, as JSON."""
    return f"build/bench {flags} --json {BUILD}/bench.json >&2 && cat {BUILD}/bench.json"


GROUPS = {
    "tests": Group(
        "every GPU test, and those of kernels again with other random inputs",
        {"all": "dev/gpu.sh gpu", "kernels, seeds 1 to 10": "dev/gpu.sh seeds 1 10",
         "kernels, seeds 11 to 20": "dev/gpu.sh seeds 11 20",
         "several GPUs": "build/tests --test-case='gpu: ranks: *'"},
        build="build/tests", least_gpus={"several GPUs": 2}, tests=True),
    "speed": Group(
        "speed and memory of whole models",
        {**{f"{model} {way}": f"{size} {flags}".strip() for model, size in SIZES.items() for way, flags in
            (("coat", ""), ("bf16", BF16))},
         "7b coat, leanest": f"{SIZES['7b']} {LEANEST}",
         "llama-3.1-8b coat, long": "--model llama-3.1-8b --batch 2 --seq 8192 --accumulate 2",
         "13b coat": "--model llama-2-13b --batch 1 --seq 2048",
         "30b coat, leanest": f"--model llama-30b --batch 1 --seq 2048 {LEANEST}"},
        f"{QUIET} --lr 1e-4 --steps 22 --warmup 22"),
    "peers": Group(
        "./train and PyTorch in turn on the same GPU",
        {"train coat": SIZES["7b"], "train bf16": f"{SIZES['7b']} {BF16}",
         **{f"PyTorch {r}": f"python3 dev/peers.py llama-2-7b {r} 8" for r in ("bf16", "fp8", "torchao")}},
        f"{QUIET} --lr 1e-5 --steps 24 --warmup 5"),
    "ranks": Group(
        "one and several GPUs (table 7); those that the machine has",
        {name: run.command() for name, run in RANKS.items()},
        f"{QUIET} --seq 2048 --lr 1e-4 --steps 10 --warmup 10",
        least_gpus={name: run.gpus for name, run in RANKS.items()}),
    "convergence": Group(
        "GPT-2 on 0.2 billion tokens in every recipe",
        {"bf16": f"--recipe bf16 --out {GPT2}",
         **{r: f"--recipe {r}" for r in ("te", "rowwise", "deepseek", "colossal", "coat")},
         **{f"{r} seed {n}": f"--recipe {r} --seed {n}"
            for n in (2, 3) for r in ("bf16", "te", "coat")}},
        LONG, at_once=True),
    "optimizers": Group(
        "`coat` with the moments of other optimizers on 0.2 billion tokens",
        {f"{optimizer} seed {n}": f"--optimizer {optimizer} --seed {n}"
         for n in (1, 2) for optimizer in ("fp32", "coat")},
        LONG, at_once=True),
    "large": Group(
        "TinyLlama-1.1B on 0.1 billion tokens", {"bf16": "--recipe bf16", "coat": ""}, LARGE, at_once=True),
    "moments": Group(
        "range and quantization error of moments (figure 2, table 1); needs `convergence`",
        {"gpt2": f"python3 dev/moments.py {GPT2}/step-{STEPS:06}"}, gpu=False),
    "memory": Group(
        "saved activations by operator (table 2)", {"memory": lambda: saved_activations()}, gpu=False),
    "bench": Group(
        "every operator of a step",
        {model: bench(f"--model {model}") for model in ("llama-2-7b", "tinyllama-1.1b", "gpt2")},
        build="build/bench"),
    "attention": Group(
        "attention by shape, and PyTorch's",
        {name: f"python3 dev/attention_peers.py '{name}'" for name in attention_peers.ATTENTION},
        build="build/bench"),
    "sizes": Group(
        "FP8 GEMMs against BF16's by size", {"sizes": bench("--only sizes")}, build="build/bench"),
}

# ------------------------------------------------------------------------------------------------------------
# Runs


def shell(command):
    return subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=False)


def ask_gpus(what):
    """A line for each GPU, or for each that the environment variable CUDA_VISIBLE_DEVICES names."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = f"--id={chosen} " if chosen else ""
    return shell(f"nvidia-smi {which}--query-gpu={what} --format=csv,noheader,nounits").stdout.splitlines()


@contextlib.contextmanager
def memory_watch(gpu):
    """Yields a list of one number: the most memory in use on this GPU, or any, in MiB, as the driver says."""
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.3):
            used = ask_gpus("memory.used")
            used = used if gpu is None else used[gpu:gpu + 1]
            most[0] = max([most[0], *(int(mib) for mib in used if mib.isdigit())])
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield most
    ended.set()
    watcher.join()


def tenths(losses):
    """The mean of each tenth of a run; None where no loss was finite."""
    size = max(1, len(losses) // 10)
    parts = [[loss for loss in losses[i:i + size] if loss is not None]
             for i in range(len(losses) % size, len(losses), size)]
    return [round(statistics.mean(part), 5) if part else None for part in parts][-10:]


def saved_activations():
    """What a layer of Llama-2-7B saves, from --plan, in the paper's columns and its unit U, a BF16 tensor of
    the hidden size. The paper counts the output of attention with the linear layer that reads it."""
    columns = {"norm": "norm", "gate": "activation function", "q, k": "attention",
               "attention log": "attention", "attention output": "linear"}
    rows = []
    for name, flags in {"bf16": "bf16", "te": "te", "coat": "coat",
                        "coat, attention in groups": "coat --attention groups"}.items():
        plan = shell(f"./train --plan --device cpu --data dev --model llama-2-7b --recipe {flags}").stdout
        units = {}
        for line in plan.splitlines():
            cells = re.split("  +", line.strip())
            if cells[-1] != "token and layer":
                continue
            tensor, size = cells[0], float(cells[2])  # bytes of a token and layer
            column = next(column for start, column in columns.items() if tensor.startswith(start))
            units[column] = units.get(column, 0) + size / (2 * 4096)
        rows.append({"name": name, "U": dict(sorted(units.items())), "total": sum(units.values())})
    return {"rows": rows}


def run(group, name, gpu=None):
    """The result of one run, on this GPU or on all; RuntimeError with the last line of its errors."""
    flags, log = GROUPS[group].runs[name], f"{BUILD}/{group}-{re.sub('[^a-z0-9.]+', '-', name)}"
    if callable(flags):
        return flags()
    if GROUPS[group].tests:
        ended = shell(flags)
        if ended.returncode:
            raise RuntimeError(ended.stdout + ended.stderr)
        return {"command": flags, "says": ended.stdout.splitlines()[-1]}
    program = not flags.startswith("--")
    out = "" if "--out" in flags else "--out ''"
    command = flags if program else f"./train {GROUPS[group].shared} {flags} {out} --log {log}.jsonl"
    choice = "" if gpu is None else f"CUDA_VISIBLE_DEVICES={ask_gpus('index')[gpu]}"
    with memory_watch(gpu) as most:
        ended = shell(f"rm -rf {log} {log}.jsonl; export OMP_WAIT_POLICY=passive {choice}; {command}")
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
    if program:
        result = json.loads(ended.stdout)
        return {**result, "mib": most[0]} if "ms" in result else result
    with open(os.path.join(ROOT, log + ".jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if line["kind"] == "step"]
    times = [step["ms"] for step in steps[1:] or steps]  # the first step includes start-up costs
    speeds = [step["tokens_per_second"] for step in steps[1:] or steps]
    text = f"{corpus.FOLDER}/train.bin"
    return {"flags": flags, "ms": round(statistics.median(times), 3), "ms_least": round(min(times), 3),
            "ms_most": round(max(times), 3), "tokens_per_second": round(statistics.median(speeds), 3),
            "mib": most[0], "text": os.path.getsize(os.path.join(ROOT, text)) if text in command else 0,
            "train": tenths([step["loss"] for step in steps]),
            "validation": [[line["step"], round(line["loss"], 7)] for line in lines
                           if line["kind"] == "validation"]}


def load():
    with open(os.path.join(DEV, "results.json"), encoding="utf-8") as file:
        return json.load(file)


def save(results):
    """Writes one row a line."""
    groups = []
    for group, rows in results.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        groups.append(f'"{group}": {{\n{lines}}}')
    path = os.path.join(DEV, "results.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(groups) + "\n}\n")
    os.replace(path + ".new", path)
    if "OUT" in os.environ:
        shutil.copy(path, os.environ["OUT"])


def measure(group, part, commit):
    """Runs what this commit does not have yet. Returns whether every run succeeded."""
    names = ask_gpus("name")
    if GROUPS[group].gpu and not names:
        print(f"results.py: {group} needs a GPU, and nvidia-smi finds none; it is left out.", flush=True)
        return False
    made = shell(f"make {GROUPS[group].build} train")
    if made.returncode:
        sys.exit(f"{made.stdout}{made.stderr}results.py: The build failed; the output of make is above.")
    if GROUPS[group].at_once:
        corpus.prepare()
    many = len(names) > 1 and not GROUPS[group].at_once
    where = f"{len(names)} {names[0]}" if many else "".join(names[:1])
    where = where if GROUPS[group].gpu else f"{os.cpu_count()} CPU cores"
    rows = load().get(group, {})
    left = [name for name in GROUPS[group].runs
            if part in name and rows.get(name, {}).get("commit") != commit
            and GROUPS[group].least_gpus.get(name, 1) <= max(1, len(names))]
    gpus = range(len(names)) if GROUPS[group].at_once else [None]
    free, one_saves = queue.SimpleQueue(), threading.Lock()
    for gpu in gpus:
        free.put(gpu)

    def measure_one(name):
        gpu, begun = free.get(), time.monotonic()
        try:
            row = {"commit": commit, "where": where, **run(group, name, gpu)}
            with one_saves:
                results = load()
                results.setdefault(group, {})[name] = row
                save(results)
            print(f"{group}: {name}: done in {time.monotonic() - begun:.0f} s", flush=True)
            return True
        except (RuntimeError, json.JSONDecodeError) as problem:
            print(f"{group}: {name}: FAILED: {problem}", flush=True)
            return False
        finally:
            free.put(gpu)
    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        return all(list(pool.map(measure_one, left)))


# ------------------------------------------------------------------------------------------------------------
# Tables: a head, and rows

CODINGS = ["E4M3", "E4M3 + expansion", "E5M2", "E5M2 + expansion"]
PAPER_TABLE_1 = [[20.10, 18.08, 25.65, 18.16], [15.13, 12.31, 21.96, 12.43],
                 [37.02, 35.96, 40.30, 36.00], [17.79, 15.48, 23.84, 15.57]]
PAPER_GAPS = {"coat": f"{plot.PAPER_GAP:+}", "te": "+0.006"}


def gb(row):
    return f"{row['mib'] * 2**20 / 1e9:.1f}"


def mean_and_error(values):
    """The mean over the seeds, and its standard error."""
    error = f" ({statistics.stdev(values) / len(values) ** 0.5:.4f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.4f}{error}"


def tests_table(rows):
    return ["tests", "command", "summary", "GPU", "commit"], [
        [name, f"`{row['command']}`", row["says"], row["where"], row["commit"]] for name, row in rows.items()]


def speed_table(rows):
    return ["run", "flags", "tokens/s", "ms a step", "GPU memory in use, GB", "commit"], [
        [name, f"`{row['flags']}`", f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.0f}", gb(row),
         row["commit"]]
        for name, row in rows.items()]


def peers_table(rows):
    """Speeds are compared only if they are of one run, on one GPU."""
    base = rows["PyTorch bf16"]
    head = ["program", "tokens/s", "of PyTorch bf16's", "ms a step (range)", "GPU memory in use, GB", "commit"]
    return head, [[name, f"{row['tokens_per_second']:,.0f}",
                   f"{row['tokens_per_second'] / base['tokens_per_second']:.3f}"
                   if row["commit"] == base["commit"] else "",
                   f"{row['ms']:.1f} ({row['ms_least']:.1f} to {row['ms_most']:.1f})", gb(row), row["commit"]]
                  for name, row in rows.items()]


def ranks_table(rows):
    head = ["GPUs: model, recipe, sequences a GPU", "tokens/s", "a GPU", "GB a GPU", "paper: GB (sequences)",
            "paper: tokens/s a GPU (sequences)"]
    return head, [
        [name.replace("fsdp", "PyTorch FSDP2"), f"{row['tokens_per_second']:,.0f}",
         f"{row['tokens_per_second'] / RANKS[name].gpus:,.0f}", gb(row), RANKS[name].paper_gb,
         RANKS[name].paper_speed]
        for name, row in rows.items()]


def convergence_table(rows, first="bf16", published=PAPER_GAPS):
    table = []
    for recipe, pairs in plot.paired(rows, first).items():
        training = [row["train"][-1] - base["train"][-1] for row, base in pairs]
        validation = [row["validation"][-1][1] - base["validation"][-1][1] for row, base in pairs]
        table.append([recipe, mean_and_error(training), mean_and_error(validation),
                      ", ".join(f"{gap:+.4f}" for gap in validation), published.get(recipe, "")])
    return ["run", f"training loss minus `{first}`: mean (standard error)",
            f"validation loss minus `{first}`", "validation, each seed", "paper: training loss"], table


def moments_table(rows):
    table, paper_base = [], PAPER_TABLE_1[0][0]
    for first, published in zip(CODINGS, PAPER_TABLE_1):
        for row in rows.values():
            ours = [1e5 * row["update"][first][second] for second in CODINGS]
            base = 1e5 * row["update"]["E4M3"]["E4M3"]
            table.append([first, *(f"{mse:.2f} (x {mse / base:.2f}; {paper / paper_base:.2f})"
                                   for mse, paper in zip(ours, published))])
    return ["format of m", *(f"v in {second}" for second in CODINGS)], table


def memory_table(rows):
    columns, paper = ("norm", "activation function", "RoPE", "attention", "linear"), plot.PAPER_TABLE_2
    base = paper["paper: BF16"][-1]
    table = [[name, *(f"{u:g}" for u in values), f"{base / values[-1]:.2f}"]
             for name, values in paper.items()]
    table += [[row["name"], *(f"{row['U'].get(column, 0):.2f}" for column in columns),
               f"{row['total']:.2f}", f"{base / row['total']:.2f}"] for row in rows["memory"]["rows"]]
    return ["U = 2BTC bytes", *columns, "total", "paper's BF16 / this"], table


def bench_table(rows):
    table = []
    for measured in plot.bench_of(rows)["runs"]:
        step, found = measured["step"], {kind: [0, 0] for kind in plot.KINDS}
        for o in plot.operators_of_step(measured):
            found[o["group"]][0] += o["count"] * o["seconds"]
            found[o["group"]][1] += o["count"] * (o["floor"] or 0)
        found["whole step"] = [step["seconds"], step["floors"]]
        cells = (f"{1e3 * seconds:.1f} ({seconds / floor:.2f})" for seconds, floor in found.values())
        table.append([f"{measured['model']} {measured['recipe']}", *cells])
    return ["ms a step (time / floor)", *plot.KINDS, "whole step"], table


def sizes_table(rows):
    return ["rows, columns and depth", "BF16, TFLOP/s", "FP8 alone", "x made FP8 each time", "x and w"], [
        [f"{row['side']:,}", f"{2e-12 * row['side']**3 / row['bf16']:,.0f}",
         *(f"{row['bf16'] / row[way]:.2f} times" for way in ("alone", "x", "both"))]
        for row in rows["sizes"]["sizes"]]


ATTENTIONS = {"ours": "ours", "cudnn": "cuDNN", "flash": "FA2", "fa4": "FA4",
              "fa4 deterministic": "FA4, deterministic"}


def attention_table(rows):
    measured = list(rows.values())
    # Forward is the same with and without determinism
    columns = [(part, program) for part in (0, 1) for program in ATTENTIONS
               if program in measured[0] and (part, program) != (0, "fa4 deterministic")]
    table = []
    for row in measured:
        batch, tokens, heads, kv_heads, size = row["shape"]
        of_keys = f" ({kv_heads} of keys)" if kv_heads != heads else ""
        shape = f"{batch} x {tokens:,}, {heads} heads{of_keys} of {size}"
        cells = (row[program][part] if row[program] else None for part, program in columns)
        table.append([shape, *(f"{cell:,.0f}" if cell else "-" for cell in cells)])
    return ["microseconds", *(f"{('forward', 'backward')[part]}: {ATTENTIONS[program]}"
                              for part, program in columns)], table


TABLES = {"tests": tests_table, "speed": speed_table, "peers": peers_table, "ranks": ranks_table,
          "attention": attention_table, "convergence": convergence_table,
          "optimizers": lambda rows: convergence_table(rows, "fp32", {}), "moments": moments_table,
          "large": convergence_table, "memory": memory_table, "bench": bench_table, "sizes": sizes_table}


def renew_page():
    """Renews the figures, and the tables between <!-- NAME --> and <!-- end -->."""
    results = load()
    for group, rows in results.items():
        for name in rows:
            if group not in GROUPS or name not in GROUPS[group].runs:
                sys.exit(f"results.py: results.json has a run that no command makes: {group}: {name}. Take it out; "
                         "if it is to be kept, write it into the text of RESULTS.md, with its commit.")
    for name, svg in plot.figures(results).items():
        with open(os.path.join(DEV, "results", f"{name}.svg"), "w", encoding="utf-8") as file:
            file.write(svg + "\n")
    path = os.path.join(DEV, "RESULTS.md")
    with open(path, encoding="utf-8") as file:
        page = file.read()

    def one(match):
        group = match[1]
        rows, shared = results[group].values(), GROUPS[group].shared
        where, commits = (", ".join(sorted({row[key] for row in rows})) for key in ("where", "commit"))
        head, cells = TABLES[group](results[group])
        lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *cells]]
        flags = f", `./train {shared}` and the flags of the run" if shared else ""
        measured = f"{where}; commit {commits}" if rows else "no run is recorded yet"
        origin = f"`python3 dev/results.py {group}`{flags}; {measured}."
        origin = textwrap.wrap(origin, 110, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"<!-- {group} -->", *origin, "", *lines, "<!-- end -->"])
    page = re.sub(r"<!-- (" + "|".join(TABLES) + r") -->\n.*?<!-- end -->", one, page, flags=re.DOTALL)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


SLOWER = 1.05  # times the recorded time, from which on an operator counts as slower


def times_of(bench):
    """Seconds of every operator and whole step of a bench: (run, operator) -> seconds."""
    times = {}
    for run in bench["runs"]:
        name = " ".join(str(run[key]) for key in ("model", "recipe", "batch", "seq", "accumulate"))
        for operator in run["operators"]:
            times[name, operator["name"]] = operator["seconds"]
        if "step" in run:
            times[name, "whole step"] = run["step"]["seconds"]
    return times


def name_slower(measured, recorded):
    """Prints what takes longer in the first bench than in the second. Returns the exit code: 1 if anything does, or
    if the two cannot be compared."""
    if measured["device"] != recorded["device"]:
        print(f"This is an {measured['device']}, and the recorded bench is of an {recorded['device']}: "
              "measure it here first, with python3 dev/results.py bench at the older commit.")
        return 1
    now, before = times_of(measured), times_of(recorded)
    both = [key for key in now if key in before]
    if not both:
        print("No operator of this bench is in the recorded one: give make bench no other --model or --recipe.")
        return 1
    slower = [key for key in both if now[key] > SLOWER * before[key]]
    for run, operator in slower:
        ours, theirs = now[run, operator], before[run, operator]
        print(f"{run}: {operator}: {1e6 * ours:.1f} us, {100 * (ours / theirs - 1):.1f}% more than "
              f"{1e6 * theirs:.1f} us at {recorded['commit']}")
    for run, operator in now:
        if (run, operator) not in before:
            print(f"{run}: {operator}: is not in the recorded bench")
    print(f"{len(slower)} of {len(both)} are more than {100 * (SLOWER - 1):.0f}% slower.")
    return 1 if slower else 0


def check_speed(path):
    if not os.path.exists(path):
        sys.exit(f"results.py: There is no {path}; \"make bench\" measures this commit and writes it.")
    with open(path, encoding="utf-8") as file:
        measured = json.load(file)
    return name_slower(measured, plot.bench_of(load()["bench"]))


def main():
    if sys.argv[1:] in (["help"], ["--help"], ["-h"]):
        groups = "".join(f"    {name:<12} {group.about}\n" for name, group in GROUPS.items())
        print(f"{__doc__.strip()}\n\nGroups:\n{groups}", end="")
        return
    if sys.argv[1:] == ["slower"]:
        sys.exit(check_speed(os.path.join(ROOT, "build/bench.json")))
    chosen = [argument.partition(":") for argument in sys.argv[1:]] or [(group, "", "") for group in GROUPS]
    for group, _, _ in chosen:
        if group not in [*GROUPS, "page"]:
            sys.exit(f"results.py: There is no group {group}; \"python3 dev/results.py help\" names them.")
    commit = os.environ.get("COAT_COMMIT") or shell("git rev-parse --short HEAD").stdout.strip() or "unknown"
    os.makedirs(os.path.join(ROOT, BUILD), exist_ok=True)
    good = [measure(group, part, commit) for group, _, part in chosen if group != "page"]
    renew_page()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
