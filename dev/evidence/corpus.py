"""The texts of the convergence and fine-tuning runs: Python source and, to start again on, C and C++ headers, in tokens of one byte-level BPE that
is trained on the Python (data/tokenize.py). They are made once and kept.

    python3 dev/evidence/corpus.py FOLDER [SOURCES ...]     writes FOLDER; without SOURCES from the library and the packages of this Python
    python3 dev/evidence/corpus.py --pack FOLDER TARGET     makes it small enough to be carried to a machine where nothing can be installed
    python3 dev/evidence/corpus.py --unpack TARGET FOLDER   undoes that

FOLDER gets train.bin and val.bin, headers/train.bin and headers/val.bin, and about.json, which says what they are of. Making texts needs
`tokenizers`, unpacking them nothing but Python.
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
VOCABULARY, HELD_OUT, LARGEST_FILE = 16384, 0.02, 200_000  # larger files are tables that a program wrote
PYTHON, HEADERS = (".py",), ("", ".h", ".hpp", ".cuh", ".tcc")  # endings; C++'s own headers have none
PYTHON_BYTES, HEADER_BYTES = 320_000_000, 60_000_000
HEADER_FOLDERS = ["/usr/include", "/usr/local/cuda/include"]
TOKENS = ("train.bin", "val.bin", "headers/train.bin", "headers/val.bin")
HEADER = 1024  # bytes of a token file before its tokens, two bytes each


def sources(roots, endings, room):
    """Files below the roots, in a fixed order, as far as the room goes."""
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                if os.path.splitext(name)[1] not in endings or not os.path.isfile(path) or os.path.islink(path):
                    continue
                if 0 < os.path.getsize(path) <= min(room, LARGEST_FILE):
                    room -= os.path.getsize(path)
                    yield path


def tokenize(files, folder, tokenizer):
    """Every fiftieth file is held out. data/tokenize.py passes over what is no UTF-8, and over a text that it has read before."""
    with tempfile.TemporaryDirectory() as links:
        for number, path in enumerate(files):
            os.symlink(os.path.abspath(path), os.path.join(links, f"{number:06}"))
        subprocess.run([sys.executable, "data/tokenize.py", *tokenizer, "--hold-out", str(HELD_OUT), "--out", folder, links], cwd=ROOT, check=True)
    tokens = [(os.path.getsize(os.path.join(folder, name)) - HEADER) // 2 for name in ("train.bin", "val.bin")]
    return {"files": len(files), "bytes": sum(os.path.getsize(path) for path in files), "train_tokens": tokens[0], "held_out_tokens": tokens[1]}


def make(folder, roots=None, what="Python source of the standard library and the installed packages"):
    paths = sysconfig.get_paths()
    python = list(sources(roots or dict.fromkeys([paths["purelib"], paths["stdlib"]]), PYTHON, PYTHON_BYTES))
    about = {"vocabulary": VOCABULARY, "python": {"text": what, **tokenize(python, folder, ["--train-bpe", str(VOCABULARY)])}}
    headers = list(sources(HEADER_FOLDERS, HEADERS, HEADER_BYTES))
    of_python = ["--tokenizer", os.path.join(folder, "tokenizer.json")]
    about["headers"] = {"text": "C, C++ and CUDA headers", **tokenize(headers, os.path.join(folder, "headers"), of_python)}
    with open(os.path.join(folder, "about.json"), "w", encoding="utf-8") as out:
        json.dump(about, out)


def pack(folder, target):
    """Tokens in LZMA: code repeats itself, so that two bytes a token become less than half a byte."""
    os.makedirs(os.path.join(target, "headers"), exist_ok=True)
    for name in TOKENS:
        with open(os.path.join(folder, name), "rb") as plain, lzma.open(os.path.join(target, name + ".xz"), "wb") as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
    shutil.copy(os.path.join(folder, "about.json"), target)


def unpack(packed_folder, folder):
    os.makedirs(os.path.join(folder, "headers"), exist_ok=True)
    for name in TOKENS:
        with lzma.open(os.path.join(packed_folder, name + ".xz")) as packed, open(os.path.join(folder, name), "wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    shutil.copy(os.path.join(packed_folder, "about.json"), folder)  # last: it says that the others are there


def main():
    words = sys.argv[1:]
    if words[:1] == ["--pack"] and len(words) == 3:
        pack(*words[1:])
    elif words[:1] == ["--unpack"] and len(words) == 3:
        unpack(*words[1:])
    elif words and not words[0].startswith("-"):
        make(os.path.abspath(words[0]), words[1:])
    else:
        sys.exit(__doc__.strip())


if __name__ == "__main__":
    main()
