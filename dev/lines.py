#!/usr/bin/env python3
"""Renews the line counts in the README's file tree: run it from the root of the repository.

An indented line of the tree names files: "coat.cu .cuh", "gpu/attention*", "data/", or several of these with
commas between them. The line above a group has its sum.
"""
import re
import subprocess

SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py", ".sh")


def count(names):  # lines of source code in the files; "coat.cu .cuh" is coat.cu and coat.cuh
    patterns = []
    for part in names.split(", "):
        first, *endings = part.split()
        patterns += [first] + [first.rsplit(".", 1)[0] + ending for ending in endings]
    listed = subprocess.run(["git", "ls-files", "--"] + patterns, capture_output=True, text=True, check=True)
    files = listed.stdout.split()
    return sum(len(open(f, encoding="utf-8").readlines()) for f in files if f.endswith(SOURCES))


text = open("README.md", encoding="utf-8").read()
start = text.index("\n", text.index("```", text.index("<!-- tree -->"))) + 1
end = text.index("```", start)
rows = []  # [text, lines]; the text without its number
for line in text[start:end].splitlines():
    line = re.sub(r"\s+[\d,]+$", "", line)
    if line.startswith("  "):
        rows.append([line, count(re.match(r"  (\S.*?)  ", line)[1])])
        group[1] += rows[-1][1]
    else:
        group = [line, 0]
        rows.append(group)
tree = "".join(f"{line:<86}{lines:>7,}\n" for line, lines in rows)
open("README.md", "w", encoding="utf-8").write(text[:start] + tree + text[end:])
print(tree, end="")
