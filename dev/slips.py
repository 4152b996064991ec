#!/usr/bin/env python3
"""Breaks the code, one small slip at a time, and says which slips the tests notice.

    python3 dev/slips.py LIST ...                     every slip of these lists; dev/slips.txt is one
    python3 dev/slips.py --tests PATTERNS LIST ...    runs other tests than those that have the file's name

A slip is such as a person who refactors could make. A line of a list is

    program/plan.cpp | s.T > s.config.longest() | s.T > s.config.max_T

a file, a piece of its text that occurs once, and what stands there instead (nothing, to delete it). A line
that begins with # is a comment. Each slip is made in a copy of the tree, in build-slips. There the tests and
./train are built, and those tests run whose source file has the name of the slip's file (SUBJECTS has the
exceptions). A test that hangs notices the slip too. The variables of make work: NVCC= leaves the GPU out.

Noticed on a CPU, at c020afe, 8e6e920 and d039c2c: 267 of 271. In GPU code, on H100s, at fb500a5 and f46a989: 178
of 187 by tests (3 of them only with two GPUs) and 4 by racecheck, earlier.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "build-slips"
SECONDS = 900  # to build one slip, and for its tests
SUBJECTS = {"*reference*,*model*": ["reference"], "*train*": ["flags", "train", "error"],
            "*tokenize*": ["records"], "*data/*,*model_ranks*": ["checkpoint", "model_folder"],
            "*adamw*,*gpu/state*,*model*": ["adamw", "other_optimizers", "state"],
            "*coat*,*gpu/*,*model*,*plan*,*reference*": ["coat"], "*ranks*": ["exchange", "peers"],
            "*test/coat.cu,*gpu/*,*model*": ["tiles", "tensor", "norm", "layers", "gemm", "gradients",
                                             "linear", "other_scaling", "parameters", "report"],
            "*attention*": ["attention", "attention_common", "attention_sm90"],
            "*model*": ["arena", "cuda", "gpu_model"], "*safetensors*,*checkpoint*": ["safetensors"]}


def update_copy():
    """Makes the copy equal to the tree. Files that are equal keep their dates, so that make builds little."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.splitlines()
    for path in (path for path in COPY.rglob("*") if path.is_file()):
        name = str(path.relative_to(COPY))
        if not name.startswith("build/") and name not in (*listed, "train"):
            path.unlink()
    for name in listed:
        source, target = ROOT / name, COPY / name
        if source.exists() and not (target.exists() and source.read_bytes() == target.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def parse(line):
    """(path, old text, new text), or None. The texts may have bars: the longest old text that fits counts."""
    file, *parts = (line + " " if line.endswith(" |") else line).split(" | ")
    for cut in range(len(parts) - 1, 0, -1):
        old = " | ".join(parts[:cut])
        if (COPY / file).is_file() and (COPY / file).read_text().count(old) == 1:
            return COPY / file, old, " | ".join(parts[cut:])
    return None


def run(*command):
    """The exit code and the output of a command in the copy, which has SECONDS, with all that it starts."""
    done = subprocess.run(["timeout", "--signal=KILL", str(SECONDS), *command], cwd=COPY, text=True,
                          errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout


def check(patterns):
    """Builds, and runs the tests: "", "does not build", or the first test that fails."""
    if run("make", "train", "build/tests")[0]:
        return "does not build"
    code, output = run("build/tests", f"--source-file={patterns}", "--abort-after=1")
    if re.search(r"test cases:\s+0 ", output):
        sys.exit(f"No test has a source file like {patterns}; give --tests.")
    failed = re.search(r"TEST CASE:\s*(.*)", output)
    return "" if code == 0 else failed[1] if failed else f"exit code {code}"


def try_slip(line, chosen, sound):
    """What happens to one slip. `sound` has the patterns of tests that pass without any."""
    slip = parse(line)
    if not slip:
        return "not made", "the old text does not occur exactly once"
    path, old, new = slip
    patterns = chosen or next((p for p, files in SUBJECTS.items() if path.stem in files), f"*{path.stem}*")
    if patterns not in sound and (problem := check(patterns)):
        sys.exit(f"Without a slip, the tests {patterns} do not pass: {problem}.")
    sound.add(patterns)
    text = path.read_text()
    path.write_text(text.replace(old, new))
    failure = check(patterns)
    path.write_text(text)
    return "not made" if failure == "does not build" else "noticed" if failure else "NOT NOTICED", failure


def main():
    words, chosen, sound, found = sys.argv[1:], "", set(), {}
    if words[:1] == ["--tests"] and len(words) > 2:
        chosen, words = words[1], words[2:]
    if not words or words[0].startswith("-"):
        sys.exit(__doc__.strip())
    os.environ.update(COAT_QUICK="1", OMP_WAIT_POLICY="passive", COAT_TRAIN=str(COPY / "train"))
    update_copy()
    for line in "\n".join(pathlib.Path(name).read_text() for name in words).splitlines():
        if line and not line.startswith("#"):
            verdict, why = try_slip(line, chosen, sound)
            print(f"{verdict:<15} {line}" + (f"   ({why})" if why else ""), flush=True)
            counts = found.setdefault(line.split(" | ")[0], [0, 0])
            counts[0] += verdict in ("noticed", "NOT NOTICED")
            counts[1] += verdict == "noticed"
    for file, (slips, noticed) in sorted(found.items()):
        print(f"    {file:<40}{slips:>7}{noticed:>10}")


if __name__ == "__main__":
    main()
