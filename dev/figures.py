#!/usr/bin/env python3
"""Draws the figures of the course, each for a light and for a dark page, with matplotlib: `make figures`.

    python3 dev/figures.py TRAIN RUN [FOLDER]

RUN is the folder of a small trained model (small_run.py trains it if it is empty). The figures go to FOLDER, which
is build/figures/drawn unless it is given: another machine trains to other values, so the figures in dev/figures
change only when somebody asks for that with dev/figures as FOLDER.
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

LIGHT = {"ground": "#ffffff", "text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0", "blue": "#0b6bcb", "red": "#c73a4e",
         "green": "#23784a", "gold": "#96600c", "grey": "#8a94a6", "pale": "#eef3f9", "map": "viridis"}
DARK = {"ground": "#0d1117", "text": "#e6edf3", "soft": "#9aa4af", "line": "#3a4452", "blue": "#6cb2f7", "red": "#f0808f",
        "green": "#66c48f", "gold": "#e0ab5a", "grey": "#7d8794", "pale": "#17202b", "map": "viridis"}
theme = LIGHT


def style():
    text, ground = theme["text"], theme["ground"]
    plt.rcParams.update({
        "figure.facecolor": ground, "axes.facecolor": ground, "text.color": text, "axes.labelcolor": text,
        "axes.edgecolor": theme["soft"], "xtick.color": theme["soft"], "ytick.color": theme["soft"], "axes.titlecolor": text,
        "svg.fonttype": "none", "svg.hashsalt": "coat", "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titleweight": "bold",
        "axes.titlesize": 10.5, "legend.frameon": False, "figure.constrained_layout.use": True,
        "figure.constrained_layout.h_pad": 0.12, "figure.constrained_layout.w_pad": 0.12})


# --- Formats

def formats():
    _, axes = plt.subplots(2, 1, figsize=(6.4, 3.8), sharex=True)
    for ax, f, name, last in zip(axes, (coat.E4M3, coat.E5M2), ("E4M3", "E5M2"), (127, 124)):
        values = coat.decode(f, np.arange(1, last))
        normal = values >= 2.0 ** (1 - f.bias)
        ax.vlines(values, 0, 1, colors=np.where(normal, theme["blue"], theme["red"]), linewidth=0.7)
        ax.set_xscale("log", base=2)
        ax.set(ylim=(0, 1.5), yticks=[], xlim=(2.0**-18.5, 2.0**18.5),
               title=f"{name}: {last - 1} positive values, {2**f.M} in each power of two")
        ax.spines["left"].set_visible(False)
        ax.set_xticks([2.0**e for e in range(-16, 17, 4)])
        ax.tick_params(labelbottom=True)
        ax.text(f.max, 1.1, f"largest: {float(f.max):,.0f}", ha="center", color=theme["blue"])
        ax.text(f.min, 1.1, f"smallest: $2^{{{int(np.log2(f.min))}}}$", ha="center", color=theme["red"])
    axes[1].set_xlabel("value (logarithmic). Blue: normal values, equally dense in each power of two.\n"
                       "Red: subnormal values, equally spaced.")


# --- Expansion

def expansion(v):
    ranges = np.log(v.max(axis=1) / v.min(axis=1))
    group = np.sort(v[np.argsort(ranges)[len(v) // 2]])[None, :]  # the one with the median range
    stored = coat.store_moment(group, True)
    codes, s = coat.quantize_tensor(coat.E4M3, group)
    ways = (("without expansion", codes, coat.decode(coat.E4M3, codes) * s, theme["grey"], 1),
            (f"expanded, k = {stored[2][0, 0]:.2f}", stored[0], coat.load_moment(*stored), theme["blue"], -1))
    _, grid = plt.subplot_mosaic([["values", "errors"], ["codes", "codes"]], figsize=(6.4, 5.4))
    axes = [grid[name] for name in ("values", "codes", "errors")]
    axes[0].plot(group[0], color=theme["green"], linewidth=2)
    axes[0].set(yscale="log", title="128 second moments v", xlabel="sorted by size", ylabel="value")
    for name, code, decoded, color, side in ways:
        error = (decoded / group - 1)[0]
        axes[1].stairs(side * np.bincount(code[0], minlength=128), fill=True, color=color,
                       label=f"{name}: {len(np.unique(code))} codes in use")
        axes[2].plot(100 * np.abs(error), ".", color=color, markersize=5, label=f"{name}:\n{100 * coat.rms(error):.1f}% RMS")
    axes[1].axhline(0, color=theme["soft"], linewidth=0.8)
    axes[1].set(title="their codes", xlabel="E4M3 code, 0 to 126", ylabel="values that have it:\nup plain, down expanded", xlim=(0, 127))
    axes[1].set_yticks([-10, 0, 10], ["10", "0", "10"])
    axes[2].set(title="error of each value", xlabel="sorted by size", ylabel="relative error, %")
    axes[2].set_yticks([0, 2, 4, 6])
    for ax in axes[1:]:
        ax.set_ylim(ax.get_ylim()[0], ax.get_ylim()[1] * 1.6)
        ax.legend(loc="upper left", handlelength=1)


def factors(m, v):
    _, ax = plt.subplots(figsize=(6.4, 3.2))
    for x, name, color in ((m, "first moments", theme["blue"]), (v, "second moments", theme["red"])):
        k = coat.store_moment(x[np.abs(x).max(axis=1) > 0], False)[2][:, 0]
        ax.hist(k, np.geomspace(0.75, 16, 80), weights=np.full(len(k), 100 / len(k)), color=color, alpha=0.75,
                histtype="stepfilled", label=f"{name}: median {np.median(k):.1f}")
    ax.set(xscale="log", xlabel="k = log 229,376 / log(largest / smallest magnitude of the group)", ylabel="% of groups",
           title="k of all groups of a small model (k = 1 stretches nothing)")
    ax.annotate("v of the\ndown matrices", (2.5, 2.9), (2.9, 4.3), color=theme["text"], fontsize=9,
                arrowprops={"arrowstyle": "-", "color": theme["soft"]})
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.minorticks_off()
    ax.legend()


# --- The flow of one layer

def box(ax, x, y, w, h, words, edge, filled=False, size=9.2):
    ax.add_patch(FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.1", linewidth=1.4,
                                facecolor=edge if filled else theme["pale"], edgecolor=edge))
    ax.text(x, y, words, ha="center", va="center", color=theme["ground"] if filled else theme["text"], fontsize=size)


def arrow(ax, start, end, words="", color=None, side=0.1, style="-|>"):
    ax.annotate("", end, start, arrowprops={"arrowstyle": style, "color": color or theme["soft"], "shrinkA": 0, "shrinkB": 0,
                                            "linewidth": 1.2})
    if words:
        ax.text(start[0] + side, (start[1] + end[1]) / 2, words, fontsize=9, va="center", color=theme["soft"])


# (operator, kind, what it hands on, what is saved and its bytes per token in C, what backward computes again)
LAYER = [("norm 1", "norm", "E4M3, one scale", "norm 1's input: E4M3 1x16", "1.1 C", "norm 1's output"),
         ("q, k, v projection", "linear", "BF16", "", "", ""),
         ("attention, with RoPE", "bf16", "E4M3, one scale", "q, k, v, output: BF16", "8 C", ""),
         ("output projection", "linear", "BF16", "", "", ""),
         ("+", "add", "BF16", "", "", ""),
         ("norm 2", "norm", "E4M3, one scale", "norm 2's input: E4M3 1x16", "1.1 C", "norm 2's output"),
         ("gate and up projection", "linear", "E4M3 1x16", "", "", ""),
         ("SiLU(gate) x up", "norm", "E4M3, one scale", "gate and up: E4M3 1x16", "6.1 C", "its output"),
         ("down projection", "linear", "BF16", "", "", ""),
         ("+", "add", "BF16", "", "", "")]


def flow():
    colors = {"linear": theme["blue"], "norm": theme["green"], "bf16": theme["grey"], "add": theme["grey"]}
    _, ax = plt.subplots(figsize=(8.2, 9.4))
    top = len(LAYER) - 1
    ax.set(xlim=(-0.6, 15.4), ylim=(-2.4, top + 1.6))
    ax.axis("off")
    forward, saved, backward, stream, back_stream = 3.3, 8.0, 12.2, 0.4, 14.9
    for x, words in ((forward, "forward"), (saved, "saved for backward"), (backward, "backward")):
        ax.text(x, top + 1.3, words, ha="center", weight="bold", fontsize=12)
    ax.text(stream - 0.35, top / 2, "residual stream (tokens, C): BF16", rotation=90, va="center", ha="center", fontsize=9.5,
            color=theme["soft"])
    ax.text(back_stream + 0.3, top / 2, "gradient of the residual stream: BF16", rotation=90, va="center", ha="center", fontsize=9.5,
            color=theme["soft"])
    arrow(ax, (stream, top + 0.8), (stream, -0.8), color=theme["gold"])
    arrow(ax, (back_stream, -0.8), (back_stream, top + 0.8), color=theme["gold"])
    for row, (name, kind, out, what, size, again) in enumerate(LAYER):
        y = top - row
        color = colors[kind]
        if kind == "add":
            arrow(ax, (forward, y + 0.72), (forward, y), color=theme["soft"], style="-")
            arrow(ax, (forward, y), (stream + 0.02, y), "", theme["gold"])
            ax.text((forward + stream) / 2, y + 0.16, "added to the stream", ha="center", fontsize=8.6, color=theme["soft"])
            arrow(ax, (back_stream, y), (backward, y), "", theme["gold"])
            arrow(ax, (backward, y), (backward, y + 0.72), "")
            ax.text((backward + back_stream) / 2, y + 0.16, "g: E5M2", ha="center", fontsize=9, color=theme["soft"])
            continue
        box(ax, forward, y, 3.6, 0.56, name, color)
        words = {"linear": "dgrad and wgrad", "norm": f"gradient of {name}", "bf16": "gradient of attention"}[kind]
        box(ax, backward, y, 3.6, 0.56, words, color)
        if name.startswith("norm"):
            arrow(ax, (stream, y), (forward - 1.8, y), "", theme["gold"])
            arrow(ax, (backward + 1.8, y), (back_stream, y), "", theme["gold"])
        if LAYER[row + 1][1] != "add":
            arrow(ax, (forward, y - 0.28), (forward, y - 0.72), out)
            handed = {"linear": "BF16", "norm": "E5M2, one scale", "bf16": "E5M2, one scale"}[kind]
            handed = "BF16" if LAYER[row + 1][1] == "linear" else "E5M2, one scale"
            arrow(ax, (backward, y - 0.72), (backward, y - 0.28), handed)
        if what:
            box(ax, saved, y, 4.1, 0.56, f"{what}\n{size} bytes a token", theme["green"] if "1x16" in what else theme["grey"], True, 9)
            arrow(ax, (forward + 1.8, y), (saved - 2.05, y))
            arrow(ax, (saved + 2.05, y), (backward - 1.8, y))
        if again:
            ax.text(saved, y - 0.45 if what else y, f"computed again: {again}", ha="center", va="center", fontsize=9, style="italic",
                    color=theme["soft"])
    notes = [("linear", "a linear layer: FP8 GEMMs, one scale per tensor"),
             ("norm", "a norm or activation: reads groups of 16 values that share a scale (1x16)"),
             ("bf16", "computed in BF16")]
    for i, (kind, words) in enumerate(notes):
        box(ax, 0.5, -1.25 - 0.42 * i, 0.5, 0.26, "", colors[kind])
        ax.text(0.95, -1.25 - 0.42 * i, words, va="center", fontsize=9.5)
    ax.text(15.2, -1.25, "saved: 16.3 C bytes a token\n(BF16: 22.8 C)", ha="right", va="center", fontsize=10, weight="bold")


# --- Granularity

def granularity(x):
    """x (tokens, features): gate and up of a layer, of which one feature is made an outlier; the relative error of
    each value with one scale, a scale for each token, and 1x16 groups."""
    figure, grid = plt.subplots(2, 2, figsize=(6.4, 6.4), sharex=True, sharey=True)
    axes = grid.ravel()
    x = x[:48, 32:96].copy()
    x[:, 39] *= 10000
    ways = {"one scale in all": coat.gemm_operand(coat.E4M3, x),
            "one for a token": coat.dequantize_groups(*coat.quantize_groups(x, x.shape[1])),
            "one for 1x16": coat.dequantize_groups(*coat.quantize_groups(x))}
    magnitude = axes[0].imshow(np.log2(np.abs(x) + 2.0**-30), cmap=theme["map"], aspect="auto", vmin=-12, vmax=12,
                               interpolation="none")
    axes[0].set(title="|x|: feature 39 is an outlier")
    for ax, (name, decoded) in zip(axes[1:], ways.items()):
        error = np.abs(decoded - x) / np.maximum(np.abs(x), 2.0**-30)
        image = ax.imshow(100 * error, cmap="magma", aspect="auto", vmin=0, vmax=25, interpolation="none")
        ax.set(title=f"{name}: {np.mean((x != 0) & (decoded == 0)):.0%} become 0")
    for ax in axes:
        ax.set_xticks(range(0, 65, 16))
    for ax in grid[:, 0]:
        ax.set_ylabel("token")
    for ax in grid[1]:
        ax.set_xlabel("feature")
    bar = figure.colorbar(magnitude, ax=grid[:, 0], location="bottom", ticks=[-12, 0, 12], aspect=24)
    bar.ax.set_xticklabels(["$2^{-12}$", "1", "$2^{12}$"])
    bar.set_label("|x| (the first picture)")
    bar = figure.colorbar(image, ax=grid[:, 1], location="bottom", ticks=[0, 6.25, 12.5, 25], aspect=24)
    bar.ax.set_xticklabels(["0", "6%", "12%", "25% or more"])
    bar.set_label("relative error (the others)")


# --- Memory of a step

def plan(train, recipe):
    flags = f"--plan --device gpu --model llama-2-7b --data dev --batch 8 --seq 2048 --recipe {recipe}"
    run = subprocess.run([train, *flags.split()], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def memory(plans):
    """What --plan lists, over a step: activations grow in forward, layer by layer; in backward gradients take
    their place."""
    _, axes = plt.subplots(1, 2, figsize=(6.6, 3.6), sharey=True)
    for ax, (recipe, lines) in zip(axes, plans.items()):
        rows = (re.match(r"  (\S.*?) {2,}(-?[\d.]+) +[\d.]+ ", line) for line in lines)
        gb = {row[1]: float(row[2]) for row in rows if row}

        def part(*words):
            return sum(gb.pop(name) for name in list(gb) if any(word in name for word in words))

        gb.pop("gradients stored over activations", 0)
        areas = {"weights": part("weights", "remainder", "amaxes") * np.ones(4),
                 "moments": part("moments", "scales per") * np.ones(4),
                 "temporary": part("operands", "CUDA", "page tables") * np.ones(4),
                 "gradients": part("gradients") * np.array([0, 0, 1, 1])}
        areas["saved activations"] = sum(gb.values()) * np.array([0, 1, 0, 0])  # what is left
        ax.stackplot([0, 32, 64, 68], areas.values(), labels=areas, alpha=0.9,
                     colors=[theme[c] for c in ("grey", "blue", "green", "gold", "red")])
        ax.set(title=f"{recipe}: at most {sum(areas.values()).max():.0f} GB", xlim=(0, 68))
        ax.set_xticks([16, 46, 66], ["forward", "backward", "update"])
    axes[0].set_ylabel("GB")
    axes[1].legend(*(part[::-1] for part in axes[1].get_legend_handles_labels()), loc="upper left")


def draw(folder, name, function, *values):
    global theme
    for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
        style()
        function(*values)
        path = folder / f"{name}{suffix}.svg"
        plt.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close()
        svg = re.sub(r"(\.\d\d)\d+", r"\1", path.read_text())  # hundredths of a point
        path.write_text(svg)
    print(f"{name}: {len(svg) / 1000:.0f} kB")


def main(train, run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    values = small_run.Run(train, run)
    m, v = (x.reshape(-1, 128) for x in (values.m, values.v))
    draw(folder, "formats", formats)
    draw(folder, "expansion", expansion, v[v.min(axis=1) > 0])
    draw(folder, "k", factors, m, v)
    draw(folder, "flow", flow)
    draw(folder, "granularity", granularity, values.gate_up[-2])
    plans = {recipe: plan(train, recipe) for recipe in ("bf16", "coat")}
    if any("operands, one layer" in line for line in plans["coat"]):
        draw(folder, "memory", memory, plans)
    else:
        print("memory.svg was not drawn: only a build with nvcc knows it.")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else "build/figures/drawn"))
