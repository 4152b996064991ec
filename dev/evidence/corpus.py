"""The text of the convergence runs: Python source in tokens of a byte-level BPE that is trained on it (data/tokenize.py), made once and kept.

    python3 dev/evidence/corpus.py FOLDER [SOURCES ...]     writes FOLDER; without SOURCES the library and the packages of this Python

FOLDER gets train.bin and val.bin, and about.json, which says what the text is. pack() makes it small enough to be carried to a machine where
nothing can be installed, and unpack() undoes that there. Needs `tokenizers` to make a text, nothing to unpack one.
"""
import json
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VOCABULARY, MOST_BYTES, LARGEST_FILE, HELD_OUT = 16384, 320_000_000, 200_000, 0.02  # larger files are tables that a program wrote
TOKENS = ("train.bin", "val.bin")
HEADER = 1024  # bytes of a token file before its tokens, two bytes each


def sources(roots):
    """Python files below the roots, in a fixed order, as far as MOST_BYTES go."""
    room = MOST_BYTES
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                if not name.endswith(".py") or os.path.islink(path) or not 0 < os.path.getsize(path) <= min(room, LARGEST_FILE):
                    continue
                room -= os.path.getsize(path)
                yield path


def make(folder, roots=None, what=None):
    """Every fiftieth file is held out. data/tokenize.py passes over what is no UTF-8, and over a text that it has read before."""
    paths = sysconfig.get_paths()
    roots = roots or list(dict.fromkeys([paths["purelib"], paths["stdlib"]]))
    with tempfile.TemporaryDirectory() as links:
        files = list(sources(roots))
        for number, path in enumerate(files):
            os.symlink(os.path.abspath(path), os.path.join(links, f"{number:06}.py"))
        subprocess.run([sys.executable, "data/tokenize.py", "--train-bpe", str(VOCABULARY), "--hold-out", str(HELD_OUT), "--out", folder, links],
                       cwd=ROOT, check=True)
        size = sum(os.path.getsize(path) for path in files)
    tokens = {name: (os.path.getsize(os.path.join(folder, name)) - HEADER) // 2 for name in TOKENS}
    about = {"text": what or "Python source of the standard library and the installed packages", "files": len(files), "bytes": size,
             "vocabulary": VOCABULARY, "train_tokens": tokens["train.bin"], "held_out_tokens": tokens["val.bin"]}
    with open(os.path.join(folder, "about.json"), "w", encoding="utf-8") as out:
        json.dump(about, out)
    return about


def pack(folder, target):
    """Tokens in LZMA: code repeats itself, so that two bytes a token become about half a byte."""
    os.makedirs(target, exist_ok=True)
    for name in TOKENS:
        with open(os.path.join(folder, name), "rb") as plain, lzma.open(os.path.join(target, name + ".xz"), "wb") as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
    shutil.copy(os.path.join(folder, "about.json"), target)


def unpack(packed_folder, folder):
    os.makedirs(folder, exist_ok=True)
    for name in TOKENS:
        with lzma.open(os.path.join(packed_folder, name + ".xz")) as packed, open(os.path.join(folder, name), "wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    shutil.copy(os.path.join(packed_folder, "about.json"), folder)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    print(make(os.path.abspath(sys.argv[1]), sys.argv[2:]))
