"""What the evidence of whole training runs stands on: a queue of jobs over GPUs that keeps every result as it comes, and a run of ./train."""
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time

import runs

ROOT, RESULTS = runs.ROOT, runs.RESULTS
BUILD = os.path.join(ROOT, "build", "evidence")
STARTED = time.monotonic()
HOST = "host"  # the place of a job that needs no GPU


def passed():
    return time.monotonic() - STARTED


def say(words):
    print(f"[{passed():4.0f} s] {words}", flush=True)


class Job:
    """Work for one place. `seconds` is what it is thought to take: it is not begun where less is left, and its runs end when the time does.
    act(gpu, left) says in a few words what came of it, or raises Failed; left() are the seconds that there are still."""

    def __init__(self, name, seconds, act, needs=(), place=None):
        self.name, self.seconds, self.act, self.needs, self.place = name, seconds, act, set(needs), place


class Failed(Exception):
    """A run that gave no result: its own sentence, or why it was ended."""


def work_off(jobs, gpus, seconds):
    """Every GPU, and the host, takes the first job that fits into the time left and whose needs are met. True if none failed or was left."""
    waiting, done, failed, running = list(jobs), set(), set(), set()
    changed = threading.Condition()
    end = time.monotonic() + seconds

    def left():
        return end - time.monotonic()

    def choose(place):
        """A job, or None: whether there may be one later is asked again when another has ended."""
        for job in waiting:
            if (job.place == HOST) == (place == HOST) and job.seconds <= left() and job.needs <= done:
                waiting.remove(job)
                running.add(job.name)
                return job
        return None

    def promised(place):  # a job for this place may still become possible; what another place is about to begin counts too
        ahead = bool(running) or any(job.seconds <= left() and job.needs <= done for job in waiting)
        return ahead and any((job.place == HOST) == (place == HOST) and job.seconds <= left() and
                             job.needs <= done | running | {j.name for j in waiting} for job in waiting)

    def serve(place):
        while True:
            with changed:
                job = choose(place)
                while job is None and promised(place):
                    changed.wait(1)
                    job = choose(place)
            if job is None:
                return
            begun = time.monotonic()
            try:
                said, into = job.act(None if place == HOST else place, left), done
            except Failed as failure:
                said, into = f"FAILED: {failure}", failed
            except Exception as problem:  # a job's own mistake: the others go on, and do not wait for it
                said, into = f"FAILED: {type(problem).__name__}: {problem}", failed
            with changed:
                running.discard(job.name)
                into.add(job.name)
                changed.notify_all()
            say(f"{place if place == HOST else 'GPU ' + place}, {time.monotonic() - begun:.0f} s: {job.name}: {said}")

    threads = [threading.Thread(target=serve, args=(place,)) for place in [*gpus, HOST]]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # the programs that run have it too
        with changed:
            waiting.clear()
            changed.notify_all()
        for thread in threads:
            thread.join()
        raise SystemExit("interrupted; what was measured is kept") from None
    if waiting:
        say("left for another time: " + ", ".join(job.name for job in waiting))
    return not waiting and not failed


# ----------------------------------------------------------------------------------------------------------------------
# Results: dev/results/evidence-PART.json with a row for each name. Another call adds to it, and finds there what need not run again.


def load(part):
    try:
        with open(os.path.join(RESULTS, f"evidence-{part}.json"), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"commands": [f"python3 dev/evidence/run.py {part}"], "trained_at": None, "rows": {}}


def need_same(part, **also):
    """Before a run: what the heading of all rows says has to be true of its row too."""
    report = load(part)
    for key in also.keys() & report.keys() if report["rows"] else ():
        if report[key] != also[key]:
            raise Failed(f"dev/results/evidence-{part}.json holds rows of another {key}; move it away, or bring back what they were run with")


def keep(part, name, row, **also):
    """Adds a row and writes the file whole, one after the other, whichever thread or program does it."""
    os.makedirs(BUILD, exist_ok=True)
    with open(os.path.join(BUILD, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = load(part)
        report["rows"][name] = dict(row, commit=runs.commit())
        report.update({"where": card(), "commit": ", ".join(sorted({r["commit"] for r in report["rows"].values()})), **also})
        write(part, report)


def write(name, report):
    for folder in filter(None, (RESULTS, os.environ.get("OUT"))):  # OUT: where what is left of this machine is gathered
        path = os.path.join(folder, f"evidence-{name}.json")
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(report, file)
            file.write("\n")
        os.replace(path + ".tmp", path)


# ----------------------------------------------------------------------------------------------------------------------
# Programs on one GPU


@functools.lru_cache
def card():
    if not shutil.which("nvidia-smi"):
        return "the CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def on_gpu(command, gpu, seconds, enough=lambda: False):
    """Its standard output. `gpu` None: whatever the program chooses. Once enough() says so it is interrupted, as by Ctrl-C."""
    environment = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    end, interrupted = time.monotonic() + max(1, seconds), False
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while True:
            try:
                said, complained = running.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    running.kill()
                    raise Failed(f"ended after {seconds:.0f} s, when the time was over") from None
                if not interrupted and enough():
                    running.send_signal(signal.SIGINT)
                    interrupted = True
    if running.returncode != (128 + signal.SIGINT if interrupted else 0):
        lines = complained.strip().splitlines() or [f"exit {running.returncode}"]
        raise Failed(lines[-1])
    return said


def logged(name, flags, gpu, seconds, program, until=None):
    """Runs ./train to its end, or interrupts it after step `until`; what its log says (runs.read)."""
    log = os.path.join(BUILD, name.replace(", ", "-").replace(" ", "-").replace("/", "-") + ".jsonl")
    os.makedirs(BUILD, exist_ok=True)
    out = [] if "--out" in flags.split() else ["--out", ""]
    with contextlib.suppress(FileNotFoundError):
        os.remove(log)  # another run's

    def enough():
        if until is None or not os.path.exists(log):
            return False
        with open(log, encoding="utf-8") as file:
            whole = [json.loads(line) for line in file if line.endswith("\n")]
        return sum(line["kind"] == "step" for line in whole) >= until
    on_gpu([program, *runs.placed(flags, gpu), *out, "--log", log], gpu, seconds, enough)
    steps, timed, validations = runs.read(log)
    last = until or len(steps)
    return steps[:last], timed[:last - 1] or steps, [line for line in validations if line["step"] <= last]


def validate(name, flags, gpu, seconds):
    """The validation loss of a run without steps."""
    return logged(name, flags, gpu, seconds, "./train")[2][-1]["loss"]


def train(name, flags, gpu, seconds, program="./train", until=None):
    """A run to its end, or to a step: what its log and the driver say of it."""
    with runs.MemoryWatch(gpu) as memory:
        steps, timed, validations = logged(name, flags, gpu, seconds, program, until)
    return {"flags": flags, "ms": statistics.median(s["ms"] for s in timed),
            "tokens_per_second": statistics.median(s["tokens_per_second"] for s in timed), "mib": memory.most or None,
            "skipped": sum(s["skipped"] for s in steps),
            "train": [None if s["loss"] is None else round(s["loss"], 4) for s in steps],
            "validation": [[line["step"], round(line["loss"], 5)] for line in validations]}
