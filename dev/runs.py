#!/usr/bin/env python3
"""The runs behind the README's figures: a table of them, and one command for each group.

    python3 dev/runs.py cpu                 every recipe and optimizer without a GPU; about 20 minutes on two cores
    python3 dev/runs.py speed gpt2          on a GPU; several groups one after the other
    python3 dev/runs.py gpt2 --gpus 0,1,2,3 the runs of a group side by side, one a GPU; in `speed`, a model's runs stay on one card, in turn
    python3 dev/runs.py speed --only 13b    the runs whose name has this in it, or one of several by commas

For each group dev/results gets GROUP.md (a row a run: tokens/s, memory, losses), a log GROUP-RUN.jsonl of each and, where runs are to be
compared, loss-GROUP.svg. The text of `gpt2` is Python source in tokens of a BPE trained on it (dev/evidence/corpus.py); the others
read the default text, C++ and CUDA headers byte by byte. The commit that the rows are of is git's, or COAT_COMMIT's. Only Python's standard
library is needed (and `tokenizers` for the text).
"""
import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "dev", "results")
TEXT = "build/evidence/text"

# Groups: (flags that all runs share, the runs whose curves are drawn, [(name, flags)])
LEAN = "--attention groups --master none --gradients none"
SHORT = "--sample-every 0 --eval-every 0 --steps 22 --warmup 22"
SEVEN = "--model llama-2-7b --batch 8 --seq 2048 --lr 1e-4"
TINYLLAMA = "--model tinyllama-1.1b --batch 16 --seq 2048 --lr 1e-4"
EIGHT_GPT2 = "--model gpt2 --batch 64 --seq 1024 --accumulate 8 --lr 1e-4"
BF16, KEPT = "--recipe bf16 --optimizer bf16", "--recompute off"
GPT2 = f"--model gpt2 --data {TEXT}/train.bin,{TEXT}/val.bin --batch 8 --seq 1024 --steps 2000 --lr 6e-4 --warmup 200 --eval-every 500 --sample-every 0"
GROUPS = {
    "cpu": ("--device cpu --sample-every 0", ("fp32", "bf16", "coat"),
            [(r, f"--recipe {r}") for r in ("fp32", "bf16", "coat", "te", "colossal", "rowwise", "deepseek")]
            + [(f"bf16, moments {o}", f"--recipe bf16 --optimizer {o}") for o in ("bf16", "fp8", "coat", "fp8lm")]),
    "default": ("--device gpu --sample-every 0", ("bf16", "coat"), [(r, f"--recipe {r}") for r in ("bf16", "coat")]),
    "speed": (SHORT, (), [
        ("7b coat", SEVEN), ("7b bf16", f"{SEVEN} {BF16}"), ("7b coat, leanest", f"{SEVEN} {LEAN}"),
        ("30b coat, leanest", f"--model llama-30b --batch 1 --seq 2048 --lr 1e-5 {LEAN}"),
        ("tinyllama coat", TINYLLAMA), ("tinyllama bf16", f"{TINYLLAMA} {BF16}"),
        ("gpt2 coat", EIGHT_GPT2), ("gpt2 bf16", f"{EIGHT_GPT2} {BF16}"),
        ("13b coat", "--model llama-2-13b --batch 1 --seq 2048 --lr 1e-4"),
        ("7b coat, fast accumulation", f"{SEVEN} --accumulation fast"),
        ("7b coat, outputs kept", f"{SEVEN} {KEPT}"), ("7b coat, outputs kept, fast accumulation", f"{SEVEN} {KEPT} --accumulation fast"),
        ("7b bf16, outputs kept", f"{SEVEN} {BF16} {KEPT}"),
        ("tinyllama coat, outputs kept", f"{TINYLLAMA} {KEPT}"), ("tinyllama bf16, outputs kept", f"{TINYLLAMA} {BF16} {KEPT}"),
        ("gpt2 coat, outputs kept", f"{EIGHT_GPT2} {KEPT}"), ("gpt2 bf16, outputs kept", f"{EIGHT_GPT2} {BF16} {KEPT}"),
    ]),
    "gpt2": (GPT2, ("bf16", "coat", "leanest"), [
        ("bf16", "--recipe bf16"), ("bf16 seed 2", "--recipe bf16 --seed 2"), ("bf16 seed 3", "--recipe bf16 --seed 3"),
        ("coat", ""), ("coat seed 2", "--seed 2"), ("coat seed 3", "--seed 3"),
        ("attention in groups", "--attention groups"), ("no master", "--master none"), ("no gradients", "--gradients none"),
        ("no gradients seed 2", "--gradients none --seed 2"), ("no clipping", "--clip 0"), ("leanest", LEAN), ("leanest seed 2", LEAN + " --seed 2"),
        ("fast accumulation", "--accumulation fast"), ("fast accumulation seed 2", "--accumulation fast --seed 2"),
    ]),
}


@functools.lru_cache
def commit():
    """What the first call finds: a commit made while runs go on is not theirs."""
    if os.environ.get("COAT_COMMIT") or not shutil.which("git"):
        return os.environ.get("COAT_COMMIT") or "unknown"
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def make_text():
    """The text of the convergence runs too (dev/evidence/corpus.py)."""
    sys.path.insert(0, os.path.join(ROOT, "dev", "evidence"))
    import trainings
    trainings.text()


class MemoryWatch(threading.Thread):
    """While it is open: the most memory that the driver reports in use on one GPU, in MiB; 0 of no GPU (None) or without nvidia-smi."""

    def __init__(self, gpu):
        super().__init__(daemon=True)
        self.command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self.most, self.done = 0, gpu is None or not shutil.which("nvidia-smi")

    def run(self):
        while not self.done:
            said = subprocess.run(self.command, capture_output=True, text=True, check=False).stdout.strip()
            self.most = max(self.most, int(said) if said.isdigit() else 0)
            time.sleep(0.5)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.done = True
        self.join()


def read(log):
    """A run's steps, those that are timed (all but the first, which warms caches), and its validations."""
    with open(log, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if line["kind"] == "step"]
    return steps, steps[1:] or steps, [line for line in lines if line["kind"] == "validation"]


def placed(flags, gpu):
    """The flags, as words, of a run on a GPU: where there is none it ends, and does not take the CPU."""
    return flags.split() + ([] if gpu is None or "--device" in flags.split() else ["--device", "gpu"])


def log_of(group, name):
    return os.path.join(RESULTS, f"{group}-{name.replace(', ', '-').replace(' ', '-')}.jsonl")


def train(group, name, flags, gpu):
    """Runs ./train; a row of the table."""
    log = log_of(group, name)
    new = os.path.join("build", os.path.basename(log))  # takes the old one's place when the run has ended well
    environment = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    command = ["./train", "--out", "", "--log", new] + placed(flags, gpu)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(ROOT, new))
    with MemoryWatch(gpu) as memory:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"name": name, "flags": flags, "failed": ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else f"exit {ended.returncode}"}
    steps, timed, validations = read(os.path.join(ROOT, new))
    shutil.move(os.path.join(ROOT, new), log)
    return {"name": name, "flags": flags, "steps": len(steps), "rate": statistics.median(s["tokens_per_second"] for s in timed),
            "ms": statistics.median(s["ms"] for s in timed), "memory": memory.most,
            "train": (steps[0]["loss"], steps[-1]["loss"]), "validation": (validations[0]["loss"], validations[-1]["loss"])}


def figure(loss, digits):
    return "not a number" if loss is None else f"{loss:.{digits}f}"


def markdown(group, rows):
    shared, timed = GROUPS[group][0], group != "gpt2"  # those may share a card, and are of losses
    lines = [f"`./train {shared}` and what the row says." + (" Medians over the steps but the first." if timed else ""), "",
             "| run | flags | steps |" + (" tokens/s | ms a step | most memory in use, MiB |" if timed else "") + " training loss | validation loss | commit |",
             "|---|---|---|" + ("---|---|---|" if timed else "") + "---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | `{row['flags']}` | |" + (" | | |" if timed else "") + f" {row['failed']} | | {row['commit']} |")
            continue
        memory = f"{row['memory']:,} ({row['memory'] * 2**20 / 1e9:.1f} GB)" if row["memory"] else ""
        speed = f" {row['rate']:,.0f} | {row['ms']:.1f} | {memory} |" if timed else ""
        train, validation = (" -> ".join(figure(loss, digits) for loss in row[key]) for key, digits in (("train", 3), ("validation", 4)))
        lines.append(f"| {row['name']} | `{row['flags']}` | {row['steps']} |{speed} {train} | {validation} | {row['commit']} |")
    return "\n".join(lines) + "\n"


def draw(group):
    """The figure of a group's losses, where all its logs are there: of this call, or of earlier ones."""
    drawn = GROUPS[group][1]
    logs = [log_of(group, name) for name in drawn]
    if not logs or not all(os.path.exists(log) for log in logs):
        return
    drawing = subprocess.run([sys.executable, "dev/plot_loss.py", *(f"{name}={log}" for name, log in zip(drawn, logs))], cwd=ROOT, capture_output=True,
                             text=True, check=True)
    with open(os.path.join(RESULTS, f"loss-{group}.svg"), "w", encoding="utf-8") as svg:
        svg.write(drawing.stdout)


def chosen(only, names):
    """The runs that --only means, a run's name or parts of names by commas; and those parts that are in no name."""
    parts = [only] if only in names else [part.strip() for part in only.split(",") if part.strip()]
    found = {name for name in names if not parts or (name == only if only in names else any(part in name for part in parts))}
    return found, [part for part in parts if not any(part in name for name in names)]


def run_group(group, gpus, wanted):
    shared, _, runs = GROUPS[group]
    free = queue.Queue()
    for gpu in gpus:
        free.put(gpu)

    done, writing = {}, threading.Lock()
    kept, table = os.path.join(RESULTS, f"{group}.json"), os.path.join(RESULTS, f"{group}.md")

    def keep(row):  # after every run: what was measured stays, also by another call of this program, and where it fails now
        rows = {}
        if os.path.exists(kept):
            with open(kept, encoding="utf-8") as file:
                rows = json.load(file)
        if "failed" not in row or "failed" in rows.get(row["name"], row):
            rows[row["name"]] = row
        with open(kept, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
        with open(table, "w", encoding="utf-8") as file:
            file.write(markdown(group, [rows[name] for name, _ in runs if name in rows]))

    chains = {}  # runs that follow each other on one card: where speeds are compared, those of one model, which is the name's first word
    for run in runs:
        if run[0] in wanted:
            chains.setdefault(run[0].split()[0] if group == "speed" else run[0], []).append(run)
    chains = sorted(chains.values(), key=len, reverse=True)

    def chain(linked):
        gpu = free.get()
        try:
            for run in linked:
                one(run, gpu)
        finally:
            free.put(gpu)

    def one(run, gpu):
        row = train(group, run[0], f"{shared} {run[1]}".strip(), None if group == "cpu" else gpu)
        row.update(flags=run[1], commit=commit())
        done[run[0]] = row
        with writing:
            keep(row)
        told = row.get("failed") or f"{row['rate']:,.0f} tok/s, {row['memory']:,} MiB, validation {figure(row['validation'][1], 4)}"
        print(f"{group}: {row['name']}: {told}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(chain, chains))
    draw(group)
    return all("failed" not in row for row in done.values())


def main():
    parser = argparse.ArgumentParser(description="The runs behind the README's figures.")
    parser.add_argument("groups", nargs="+", choices=list(GROUPS))
    parser.add_argument("--gpus", default="0", help="numbers, by commas")
    parser.add_argument("--only", default="", help="parts of runs' names, by commas")
    arguments = parser.parse_args()
    names = list(dict.fromkeys(name for group in arguments.groups for name, _ in GROUPS[group][2]))
    wanted, unknown = chosen(arguments.only, names)
    if unknown:
        parser.error(f"--only {','.join(unknown)} is in no run's name: there are " + "; ".join(names))
    commit()  # before anything is built
    if subprocess.run(["make", "train"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit("make train failed; what it says is above.")
    os.makedirs(RESULTS, exist_ok=True)
    os.makedirs(os.path.join(ROOT, "build"), exist_ok=True)
    good = True
    for group in arguments.groups:
        if TEXT in GROUPS[group][0]:
            make_text()
        good &= run_group(group, arguments.gpus.split(","), wanted)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
