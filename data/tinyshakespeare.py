#!/usr/bin/env python3
"""Downloads tiny Shakespeare, 1.1 MB of plays in one text file, and verifies its checksum.

    python3 data/tinyshakespeare.py            # writes tinyshakespeare.txt here
    ./train --data tinyshakespeare.txt --prompt ROMEO:
"""
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its tokenize.py would hide the module of the standard library

import argparse
import hashlib
import http.client
import os
import urllib.request

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
BYTES = 1115394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def is_right(text):
    return len(text) == BYTES and hashlib.sha256(text).hexdigest() == SHA256


def download():
    try:
        with urllib.request.urlopen(URL, timeout=30) as answer:
            text = answer.read(BYTES + 1)
    except (OSError, http.client.HTTPException) as problem:
        what = f"cannot be reached ({getattr(problem, 'reason', problem)})"
        sys.exit(f"{URL} {what}; copy that file here, or run ./train without --data.")
    if not is_right(text):
        sys.exit(f"{URL} sent another text ({len(text)} bytes, or another checksum); try again later.")
    return text


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    default = "tinyshakespeare.txt"
    parser.add_argument("file", nargs="?", default=default, help="where to write it (default: %(default)s)")
    path = parser.parse_args().file
    try:
        if os.path.exists(path):
            with open(path, "rb") as f:
                if is_right(f.read(BYTES + 1)):
                    return print(f"{path} exists and has the right checksum.")
        text = download()
        with open(path + ".tmp", "wb") as f:  # to another name first, so that no half-written file stays
            f.write(text)
        os.replace(path + ".tmp", path)
    except OSError as problem:
        if os.path.isfile(path + ".tmp"):
            os.remove(path + ".tmp")
        sys.exit(f"{path} cannot be read or written ({problem.strerror}); free space, or give another file.")
    print(f"{path}: {BYTES:,} bytes, checksum verified. Train with ./train --data {path} --prompt ROMEO:")


if __name__ == "__main__":
    main()
