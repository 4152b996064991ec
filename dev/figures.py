#!/usr/bin/env python3
"""Draws the figures of dev/figures from values of a real run and from what `./train --plan` prints, with
matplotlib: `make figures`. If build/figures has no model yet, one is trained first, for two minutes.
"""
import pathlib
import re
import subprocess
import sys

import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch

import coat
import small_run

BLUE, RED, GREEN, GOLD, GREY = "#0b6bcb", "#d1495b", "#2e8b57", "#b7791f", "#8a94a6"
DARK, GROUND = "#4a5568", "#fbfbfd"
# A background of its own keeps a figure legible on dark pages. Text stays text, which keeps files small.
plt.rcParams.update({"figure.facecolor": GROUND, "axes.facecolor": GROUND, "svg.fonttype": "none",
                     "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 9, "svg.hashsalt": "coat",
                     "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
                     "axes.titleweight": "bold", "axes.titlesize": 10, "legend.frameon": False,
                     "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.12,
                     "figure.constrained_layout.w_pad": 0.12})

def box(ax, x, y, w, h, words, edge, face="#ffffff", angle=0, size=8.2):
    ax.add_patch(FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.12",
                                facecolor=face, edgecolor=edge, linewidth=1.3))
    ax.text(x, y, words, ha="center", va="center", color="white" if face == edge else "black", fontsize=size,
            rotation=angle)

def arrow(ax, start, end, words=""):
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": DARK, "shrinkA": 0, "shrinkB": 0})
    ax.text(start[0] + 0.1, (start[1] + end[1]) / 2, words, fontsize=7.8, va="center", color=DARK)

def plan(train, recipe):
    flags = f"--plan --device gpu --model llama-2-7b --data dev --batch 8 --seq 2048 --recipe {recipe}"
    run = subprocess.run([train, *flags.split()], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()

def formats():
    figure, axes = plt.subplots(2, 1, figsize=(9, 2.8), sharex=True)
    for ax, f, name, count in zip(axes, (coat.E4M3, coat.E5M2), ("E4M3", "E5M2"), (127, 124)):
        values = coat.decode(f, np.arange(1, count))
        normal = values >= 2.0 ** (1 - f.bias)
        ax.vlines(values, 0, 1, colors=np.where(normal, BLUE, RED), linewidth=0.9)
        ax.set_xscale("log", base=2)
        ax.set(ylim=(0, 1.6), yticks=[], frame_on=False, xlim=(2.0**-19.5, 2.0**19.5),
               title=f"{name}: {2**f.M} values from each power of two to the next")
        ax.text(f.max, 1.1, f"largest {float(f.max):,.0f}", ha="center", color=BLUE)
        ax.text(f.min, 1.1, f"smallest 2^{int(np.log2(f.min))}, subnormal", ha="center", color=RED)

def expansion(v):
    ranges = np.log(v.max(axis=1) / v.min(axis=1))
    group = np.sort(v[np.argsort(ranges)[len(v) // 2]])[None, :]  # the one with the median range
    stored = coat.store_moment(group, True)
    codes, s = coat.quantize_tensor(coat.E4M3, group)
    ways = (("x / s", codes, coat.decode(coat.E4M3, codes) * s, GREY, 1),
            (f"f(x) / s, k = {stored[2][0, 0]:.2f}", stored[0], coat.load_moment(stored), BLUE, -1))
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.9), width_ratios=(1, 1.2, 1.2))
    axes[0].plot(group[0], color=GREEN, linewidth=2)
    axes[0].set(yscale="log", title="128 second moments", xlabel="sorted")
    for name, code, decoded, color, side in ways:
        error = (decoded / group - 1)[0]
        axes[1].stairs(side * np.bincount(code[0], minlength=128), fill=True, color=color,
                       label=f"{name}: {len(np.unique(code))} codes")
        axes[2].plot(100 * np.abs(error), ".", color=color, markersize=4,
                     label=f"{name}: {100 * coat.rms(error):.1f}% RMS")
    axes[1].set(title="how many have which code", xlabel="E4M3 code", yticks=[], xlim=(0, 127))
    axes[2].set(title="relative error in %", xlabel="sorted")
    for ax in axes[1:]:
        ax.set_ylim(ax.get_ylim()[0], ax.get_ylim()[1] * 1.45)
        ax.legend(loc="upper left", handlelength=1)

def factors(m, v):
    figure, ax = plt.subplots(figsize=(9, 2.6))
    for x, name, color in ((m, "first moments", BLUE), (v, "second moments", RED)):
        k = coat.store_moment(x[x.max(axis=1) > 0], False)[2][:, 0]
        ax.hist(k, np.geomspace(0.75, 16, 80), weights=np.full(len(k), 100 / len(k)), color=color, alpha=0.75,
                histtype="stepfilled", label=f"{name}: median {np.median(k):.1f}")
    ax.set(xscale="log", xlabel="k", ylabel="% of groups", title="k of all groups of a trained model")
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.minorticks_off()
    ax.legend()

def flow(lines):
    """The table of the block, as --plan prints it: forward down, what is saved, backward up."""
    start = next(i for i, line in enumerate(lines) if "saves for backward" in line)
    columns = [lines[start].index(word) for word in ("operator", "reads", "weights", "writes", "saves")]
    rows = [[line[a:b].strip() for a, b in zip(columns, columns[1:] + [None])] for line in lines[start + 1:]]
    at = {row[0]: i for i, row in reversed(list(enumerate(rows)))}
    block = rows[2:at["final norm"]]
    backward = {row[0]: row for row in rows[at["backward"]:at["update"]]}
    top = len(block) - 1
    figure, ax = plt.subplots(figsize=(9.4, 0.68 * len(block) + 0.9))
    ax.set(xlim=(0.3, 13.1), ylim=(-0.8, top + 1.4))
    ax.axis("off")
    for x, words in ((2.4, "forward"), (6.8, "saved for backward"), (10.8, "backward")):
        ax.text(x, top + 1.1, words, ha="center", weight="bold", fontsize=10.5)
    # Before the block comes the end of another, and behind it the beginning.
    for y in range(top + 1, -1, -1):
        before, after = block[top - y], block[(top - y + 1) % len(block)]
        quantized = "" if after[1] in before[3] else f", quantized to {after[1]}"
        arrow(ax, (2.4, y - 0.31), (2.4, y - 0.69), before[3] + quantized)
        arrow(ax, (10.8, y - 0.69), (10.8, y - 0.31), backward.get(after[0], backward["norms"])[3])
    for y, (name, reads, weights, _, saves) in zip(range(top, -1, -1), block):
        linear = weights.startswith("e4m3")
        color = BLUE if linear else GREEN if "1x16" in reads else GREY
        box(ax, 2.4, y, 3.6, 0.62, name, color)
        dgrad = backward["linear layers, dgrad"][1]
        box(ax, 10.8, y, 3.6, 0.62, f"dgrad, wgrad: g {dgrad}" if linear else f"gradient: {name}", color)
        if saves != "-":
            tone = GREEN if "1x16" in saves else DARK
            box(ax, 6.8, y, 3.6, 0.62, saves.replace("; ", "\n"), tone, tone)
            arrow(ax, (4.2, y), (5.0, y))
            arrow(ax, (8.6, y), (9.0, y))

def granularity(x):
    """x (tokens, columns): an activation; its error with one scale, a scale for each row, and 1x16 groups."""
    figure, axes = plt.subplots(2, 4, figsize=(9.4, 4.4), height_ratios=(1.4, 1))
    ways = {"one scale": coat.gemm_operand(coat.E4M3, x),
            "a scale for each row": coat.dequantize_groups(*coat.quantize_groups(x, x.shape[1])),
            "for each 1x16 group": coat.dequantize_groups(*coat.quantize_groups(x))}
    maps = [("log |x|", x, "features", "viridis")] + [
        (name, decoded - x, f"error: {100 * coat.rms(decoded - x) / coat.rms(x):.1f}% RMS", "magma")
        for name, decoded in ways.items()]
    column = np.abs(x).max(axis=0).argmax() // 16 * 16
    first = min(max(column - 16, 0), x.shape[1] - 64)
    for ax, (title, values, below, colors) in zip(axes[0], maps):
        shown = np.log2(np.abs(values[:32, first:first + 64]) / np.abs(x).max() + 2.0**-30)
        low, high = (-12, 0) if values is x else (-17, -5)
        ax.imshow(shown, cmap=colors, aspect="auto", vmin=low, vmax=high, interpolation="none")
        ax.set(title=title, xlabel=below, xticks=[], yticks=[])
    axes[0, 0].set_ylabel("tokens")
    gemms = (("y = x w^T", "x: tokens x in", "w^T: in x out", "in"),
             ("dx = g w", "g: tokens x out", "w: out x in", "out"),
             ("dw = g^T x", "g^T: out x tokens", "x: tokens x in", "tokens"))
    plt.setp(axes[1], xlim=(0, 10), ylim=(0, 6), xticks=[], yticks=[], frame_on=False)
    for ax, (title, left, right, reduced) in zip(axes[1], gemms):
        ax.set_title(title)
        box(ax, 2.4, 2.45, 4.6, 2.9, left, BLUE, "#dbe9fa", size=7)
        box(ax, 8.05, 2.5, 2.9, 4.6, right, BLUE, "#dbe9fa", angle=90, size=7)
        ax.plot([0.1, 4.7], [3.9, 3.9], [6.6, 6.6], [0.2, 4.8], color=RED, linewidth=4)
        ax.text(5, 5.3, f"sum over {reduced}", ha="center", color=RED, fontsize=8)
    axes[1, 3].text(0, 3, "Along red sides: blocks of\n128 or more. 1x16 groups are\nfor norms, activation.")

def memory(plans):
    """What --plan lists, over a step: activations grow in forward, layer by layer; in backward gradients take
    their place."""
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.2), sharey=True)
    for ax, (recipe, lines) in zip(axes, plans.items()):
        rows = (re.match(r"  (\S.*?) {2,}([\d.]+) +[\d.]+ ", line) for line in lines)
        gib = {row[1]: float(row[2]) / 1024 for row in rows if row}

        def part(*words):
            return sum(gib.pop(name) for name in list(gib) if any(word in name for word in words))

        areas = {"weights": part("weights", "remainder") * np.ones(4),
                 "moments": part("moments", "per group") * np.ones(4),
                 "temporary": part("operands", "CUDA") * np.ones(4),
                 "gradients": part("gradients") * np.array([0, 0, 1, 1])}
        areas["saved activations"] = sum(gib.values()) * np.array([0, 1, 0, 0])  # what is left
        ax.stackplot([0, 32, 64, 68], areas.values(), labels=areas, alpha=0.9,
                     colors=[GREY, BLUE, GREEN, GOLD, RED])
        ax.set(title=f"{recipe}: at most {sum(areas.values()).max():.0f} GiB", xlim=(0, 68))
        ax.set_xticks([16, 48, 66], ["forward", "backward", "update"])
    axes[0].set_ylabel("GiB")
    axes[1].legend(*(part[::-1] for part in axes[1].get_legend_handles_labels()), loc="upper left")

def draw(name, function, *values):
    function(*values)
    path = pathlib.Path(__file__).parent / "figures" / f"{name}.svg"
    plt.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close()
    svg = re.sub(r"(\.\d\d)\d+", r"\1", path.read_text())  # hundredths of a point
    path.write_text(svg)
    print(f"{path.name}: {len(svg) / 1000:.0f} kB")

def main(train, run):
    values = small_run.Run(train, run)
    m, v = (x.reshape(-1, 128) for x in (values.m, values.v))
    plans = {recipe: plan(train, recipe) for recipe in ("bf16", "coat")}
    draw("formats", formats)
    draw("expansion", expansion, v[v.min(axis=1) > 0])
    draw("k", factors, m, v)
    draw("flow", flow, plans["coat"])
    draw("granularity", granularity, coat.swiglu(values.gate_up[-1]))
    on_gpu = any("CUDA context" in line for line in plans["coat"])
    draw("memory", memory, plans) if on_gpu else print("memory.svg stays: only a build with nvcc knows it.")

if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
