#!/usr/bin/env python3
"""Draws the figures of the course and of a ladder with matplotlib: `make figures`.

    python3 dev/figures.py TRAIN [FOLDER]

Some show a small trained model, which small_run.py trains first. The figures go to FOLDER, which is
build/figures/drawn unless it is given: another machine trains to other values, so the figures in dev/figures change
only when somebody asks for that with dev/figures as FOLDER.
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
import lessons
import plot
import small_run

# The colours, and those in their places on a dark page.
theme = {"ground": "#ffffff", "text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0", "blue": "#0b6bcb", "red": "#c73a4e",
         "green": "#23784a", "gold": "#96600c", "violet": "#5d3a8e", "grey": "#8a94a6", "pale": "#eef3f9"}
DARK = {"ground": "#0d1117", "text": "#e6edf3", "soft": "#9aa4af", "line": "#3a4452", "blue": "#6cb2f7", "red": "#f0808f",
        "green": "#66c48f", "gold": "#e0ab5a", "violet": "#b39df5", "grey": "#7d8794", "pale": "#17202b"}
WHITE = "#fefefe"  # on a map of colours, which a dark page does not change
PAGE = 5.2  # inches. A phone shows a figure 400 pixels wide; letters of 10 points are then 11 pixels high.


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
    _, axes = plt.subplots(2, 1, figsize=(PAGE, 4.2), sharex=True)
    for ax, f, name, last, but in zip(axes, (coat.E4M3, coat.E5M2), ("E4M3", "E5M2"), (127, 124),
                                      ("\n(7 in the highest)", "")):
        values = coat.decode(f, np.arange(1, last))
        normal = values >= 2.0 ** (1 - f.bias)
        ax.vlines(values, 0, 1, colors=np.where(normal, theme["blue"], theme["red"]), linewidth=0.7)
        ax.set_xscale("log", base=2)
        ax.set(ylim=(0, 1.5), yticks=[], xlim=(2.0**-20, 2.0**20),
               title=f"{name}: {last - 1} positive values, {2**f.M} in each power of two{but}")
        ax.spines["left"].set_visible(False)
        ax.set_xticks([2.0**e for e in range(-16, 17, 4)])
        ax.tick_params(labelbottom=True)
        ax.text(f.fmax, 1.1, f"largest: {float(f.fmax):,.0f}", ha="center", color=theme["blue"])
        ax.text(f.fmin, 1.1, f"smallest: $2^{{{int(np.log2(f.fmin))}}}$", ha="center", color=theme["red"])
    axes[1].set_xlabel("value (logarithmic)\nBlue: normal values, equally dense in each power of two\n"
                       "Red: subnormal values, equally spaced")


# --- A scale, and the staircase of rounding

# The 16 values of lesson 2.
GROUP = np.array([0.31, -0.52, 0.08, 1.1, -0.24, 0.67, -0.05, 0.43, -0.91, 0.16, 0.02, -0.38, 0.75, -0.13, 24, 0.57])


def scale():
    """The magnitudes of lesson 2's values before and after they are divided by the scale, and the error of every magnitude."""
    _, (lines, errors) = plt.subplots(2, 1, figsize=(PAGE, 5.6), sharex=True, height_ratios=[3, 2])
    magnitudes = np.abs(GROUP)
    divided = magnitudes / (24 / 448)
    regions = ((2.0**-14, 2.0**-10, theme["red"], "become 0"), (2.0**-10, 2.0**-6, theme["gold"], "subnormal:\nless exact"),
               (2.0**-6, 448, theme["blue"], "normal: error at most 6.25%"))
    for low, high, color, words in regions:
        lines.fill_between([low, high], -0.35, 0, color=color, alpha=0.25, linewidth=0)
        lines.text((low * high)**0.5, -0.175, words, ha="center", va="center", fontsize=7.8 if high == 2.0**-6 else 9)
        errors.axvspan(low, high, color=color, alpha=0.12, linewidth=0)
    for x, y in zip(magnitudes, divided):
        color = theme["green"] if x < 24 else theme["red"]
        lines.plot([x, y], [1, 0], color=color, linewidth=1, marker="o", markersize=4)
    for y in (0, 1):
        lines.axhline(y, color=theme["soft"], linewidth=1)
    lines.text(24, 1.07, "24, the amax", ha="center", color=theme["red"])
    lines.text(0.02, 1.07, "0.02", ha="center", color=theme["green"])
    lines.text(2.0**-13.8, 1.24, "the 16 values: |x|", weight="bold")
    lines.text(2.0**-13.8, 0.55, "divided by\ns = 24 / 448:\nall move alike", color=theme["soft"])
    lines.text(2.0**-13.8, 0.07, "E4M3: |x| / s", weight="bold")
    for at, words, side in ((448, "448\nthe amax", "center"), (2.0**-6, "$2^{-6}$\namax / 28,672", "left"),
                            (2.0**-10, "$2^{-10}$\namax / 458,752", "center")):
        lines.text(at, -0.42, words, ha=side, va="top", fontsize=9.5)
        errors.axvline(at, color=theme["soft"], linewidth=1, linestyle=":")
    lines.set(ylim=(-0.75, 1.35), yticks=[], xscale="log")
    lines.spines[["left", "bottom"]].set_visible(False)
    lines.tick_params(bottom=False, labelbottom=False, which="both")
    x = np.float32(np.geomspace(2.0**-14, 448, 6000))
    error = 100 * np.abs(coat.decode(coat.E4M3, coat.encode(coat.E4M3, x)) / x - 1)
    errors.plot(x, error, color=theme["text"], linewidth=0.9)
    errors.set(xlim=(2.0**-14, 2.0**10), ylim=(0, 108), xlabel="|x| / s (logarithmic)", ylabel="error, %")
    errors.set_title("error of a value that is rounded to E4M3")
    errors.set_xscale("log", base=2)
    exponents = range(-14, 10, 4)
    errors.set_xticks([2.0**e for e in exponents], [f"$2^{{{e}}}$" for e in exponents])
    errors.set_yticks([6.25, 50, 100], ["6.25", "50", "100"])
    errors.minorticks_off()


def landing():
    """Lesson 3: the values of lesson 2 in a tensor that has a 30,000, too. Where each falls with three kinds of scale."""
    magnitudes = np.abs(GROUP).astype(np.float32)
    of_tensor, of_group = np.float32(30000), np.float32(24)
    rows = (("E4M3, one scale for the tensor", coat.E4M3, coat.scales_of(coat.E4M3, of_tensor)),
            ("E5M2, one scale for the tensor", coat.E5M2, coat.scales_of(coat.E5M2, of_tensor)),
            ("E4M3, a scale for these 16 values", coat.E4M3, coat.bf16(coat.scales_of(coat.E4M3, of_group))))
    zero, low, high = 2.0**-7.6, 2.0**-8.2, 2.0**6  # where 0 is drawn, and the ends of the axis
    _, axes = plt.subplots(3, 1, figsize=(PAGE, 6.8), sharex=True)
    for ax, (name, f, s) in zip(axes, rows):
        subnormal, normal = s * f.fmin / 2, s * 2.0 ** (1 - f.bias)  # where the zones begin
        for begin, end, color, words in ((low, subnormal, "red", "becomes 0"), (subnormal, normal, "gold", "subnormal"),
                                         (normal, s * f.fmax, "blue", "normal, up to 30,000" if s * f.fmax > high else "normal")):
            begin, end = max(begin, low), min(end, high)
            if end > 2 * begin:
                ax.text((begin * end)**0.5, -0.27, words, ha="center", va="center", fontsize=9.5, color=theme[color])
            if end > begin:
                ax.axvspan(begin, end, 0, 0.5, color=theme[color], alpha=0.13, linewidth=0)
        codes = s * coat.decode(f, np.arange(1, 124 if f is coat.E5M2 else 127))
        shown = codes[(codes > low * 1.5) & (codes < high)]
        ax.vlines(shown, 0, 0.24, color=theme["soft"], linewidth=0.8)
        stored = coat.decode(f, coat.encode(f, magnitudes / s)) * s
        for x, y in zip(magnitudes, stored):
            color = theme["green" if y else "red"]
            ax.plot([x, y or zero], [1, 0.24], color=color, linewidth=1, marker="o", markersize=4)
        errors = np.abs(stored / magnitudes - 1)
        ax.set_title(f"{name}:\nmean error {errors.mean():.1%}, {np.sum(stored == 0) or 'none'} become 0")
        ax.set(xscale="log", xlim=(low, high), ylim=(-0.5, 1.2), yticks=[])
        ax.spines["left"].set_visible(False)
        if np.any(stored == 0):
            ax.text(zero, 0.04, "0", ha="center", va="center", fontsize=9.5, color=theme["red"])
    ticks = (0.02, 0.1, 0.31, 1.1, 4, 24)
    axes[2].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    for ax in axes:
        ax.minorticks_off()
        ax.tick_params(labelbottom=True)
    axes[2].set_xlabel("|x| (logarithmic). Dots above: the 16 values.\nGrey ticks: the codes, times the scale.\n"
                       "A line goes from a value to the code onto which it falls.")


def staircase():
    """What is stored for x in a tensor with amax 1.1, as in lesson 7: from nearby, and the whole range."""
    _, axes = plt.subplots(1, 2, figsize=(PAGE, 3.4))
    s = np.float32(1.1) / 448
    for ax, low, high in zip(axes, (0.28, 0.0), (0.36, 1.1)):
        x = np.float32(np.linspace(low, high, 4001))
        ax.plot(x, x, color=theme["gold"], linewidth=1.6, label="what backward uses: slope 1")
        ax.plot(x, coat.decode(coat.E4M3, coat.encode(coat.E4M3, x / s)) * s, color=theme["blue"], linewidth=1.6,
                label="what is stored: slope 0")
        ax.set(xlim=(low, high), ylim=(low, high * 1.0001), xlabel="x", aspect="equal")
    points = np.float32([0.3, 0.31, 0.33, 0.34])
    axes[0].plot(points, coat.decode(coat.E4M3, coat.encode(coat.E4M3, points / s)) * s, "o", color=theme["red"], markersize=5,
                 label="the four of the table")
    axes[0].set(title="from nearby: steps", ylabel="stored value")
    axes[1].set_title("from afar: a diagonal")
    axes[0].set_xticks([0.28, 0.32, 0.36])
    axes[0].set_yticks([0.28, 0.3, 0.32, 0.34, 0.36])
    handles, names = axes[0].get_legend_handles_labels()
    plt.gcf().legend(handles, names, loc="outside lower center", ncols=2, handlelength=1.5)


def depth():
    """The noise of FP8 in the gradients of the first layer, and that of a batch, against the number of layers."""
    layers = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24])
    errors = [100 * lessons.errors_of_depth(n)[1:] for n in layers]  # this takes a minute
    _, ax = plt.subplots(figsize=(PAGE, 3.2))
    for noise, color, name in zip(np.transpose(errors), (theme["blue"], theme["soft"]), ("of FP8", "of a batch")):
        ax.plot(layers, noise, "o-", color=color)
        ax.text(24.6, noise[-1], name, va="center", color=color)
    ax.set(xlim=(0, 30), ylim=(0, 105), xlabel="layers of model B", ylabel="% of the gradient",
           title="noise in the gradients of\nthe first layer's matrices")
    ax.set_xticks([1, 4, 8, 12, 16, 24])
    ax.spines["bottom"].set_bounds(0, 24)


# --- Expansion

def expansion(v):
    """A moment group: how many of its values get each code, without and with expansion, and the error of each value."""
    ranges = v.max(axis=1) / v.min(axis=1)
    group = np.sort(v[np.argsort(ranges)[len(v) // 2]])[None, :]  # the one with the median range
    stored = coat.store_moment(group)
    codes, s = coat.quantize_tensor(coat.E4M3, group)
    ways = (("without expansion", codes, coat.decode(coat.E4M3, codes) * s, theme["soft"], "."),
            (f"with expansion, k = {stored.k[0, 0]:.2f}", stored.codes, coat.load_moment(*stored), theme["blue"], "+"))
    _, axes = plt.subplots(3, 1, figsize=(PAGE, 6.4), height_ratios=[1, 1, 1.5])
    for ax, (name, code, decoded, color, marker) in zip(axes, ways):
        error = (decoded / group - 1)[0]
        ax.stairs(np.bincount(code[0], minlength=128), fill=True, color=color)
        ax.set_title(f"{name}: {len(np.unique(code))} codes in use", color=color)
        ax.set(xlim=(0, 127), ylim=(0, 13), ylabel="values")
        ax.set_yticks([0, 5, 10])
        axes[2].plot((group / group.max())[0], 100 * np.abs(error), marker, color=color, markersize=5,
                     label=f"{name}: {100 * coat.rms(error):.1f}% RMS")
    axes[1].set_xlabel("E4M3 code, from 0 to 126")
    axes[1].axvspan(0, 8, color=theme["gold"], alpha=0.25, linewidth=0)
    axes[1].text(8.8, 8.5, "subnormal codes", color=theme["gold"])
    smallest_normal = (group / group.max())[stored.codes >= 8].min()
    axes[2].axvspan(0.01, smallest_normal, color=theme["gold"], alpha=0.25, linewidth=0)
    axes[2].set(title="error of each value", xlabel="value / largest of the moment group", ylabel="error, %",
                xlim=((group.min() / group.max()) * 0.93, 1.06), xscale="log", ylim=(0, 9))
    axes[2].set_xticks([0.0625, 0.125, 0.25, 0.5, 1], ["1/16", "1/8", "1/4", "1/2", "1"])
    axes[2].minorticks_off()
    axes[2].legend(loc="upper right", handlelength=0.5)


# --- The three GEMMs of a linear layer

# (name, what it sums over, result, its operands: (name, sizes, format, the matrix whose rows lie in memory)). Sizes:
# T tokens, I input features, O output features. The first operand is stored as it is drawn, the second transposed.
GEMMS = [("fprop", "input features", "y", ("x", "TI", "E4M3", "x"), ("w$^T$", "IO", "E4M3", "w")),
         ("dgrad", "output features", "dx", ("g", "TO", "E5M2", "g"), ("w", "OI", "E4M3", "w$^T$")),
         ("wgrad", "tokens", "dw", ("g$^T$", "OT", "E5M2", "g$^T$"), ("x", "TI", "E4M3", "x$^T$"))]


def gemms():
    """The operands and the result of each GEMM as rectangles; the dimension that it sums over is marked."""
    length = {"T": 1.75, "I": 1.45, "O": 1.1}
    words = {"T": "tokens", "I": "in", "O": "out"}
    colors = {"E4M3": theme["blue"], "E5M2": theme["red"], "BF16": theme["soft"]}
    _, ax = plt.subplots(figsize=(PAGE, 5.3))
    ax.set(xlim=(0, 9.0), ylim=(-1.55, 8.3), aspect="equal")
    ax.axis("off")

    def matrix(left, middle, name, sizes, format, in_memory=""):
        high, wide = length[sizes[0]], length[sizes[1]]
        bottom = middle - high / 2
        ax.add_patch(plt.Rectangle((left, bottom), wide, high, facecolor=theme["pale"], edgecolor=colors[format], linewidth=1.4))
        ax.text(left + wide / 2, middle + 0.1, name, ha="center", va="center", fontsize=12, weight="bold")
        ax.text(left + wide / 2, middle - 0.25, format, ha="center", va="center", color=colors[format])
        ax.text(left + wide / 2, bottom + high + 0.1, words[sizes[1]], ha="center", va="bottom", fontsize=9.2, color=theme["soft"])
        ax.text(left - 0.1, middle, words[sizes[0]], ha="right", va="center", fontsize=9.2, rotation=90, color=theme["soft"])
        if in_memory:
            ax.text(left + wide / 2, bottom - 0.1, f"stored as {in_memory}", ha="center", va="top", fontsize=9.2,
                    color=theme["soft"])
        return left + wide

    for row, (name, over, result, first, second) in enumerate(GEMMS):
        middle = 7.0 - 2.85 * row
        ax.text(0, middle + 0.16, name, weight="bold", fontsize=11.5, va="center")
        ax.text(0, middle - 0.16, f"sums over\n{over}", va="top", fontsize=9.5, color=theme["gold"])
        left = 2.45
        right = matrix(left, middle, *first)
        ax.plot([left, right], [middle + length[first[1][0]] / 2] * 2, color=theme["gold"], linewidth=4, solid_capstyle="butt")
        ax.text(right + 0.25, middle, "·", ha="center", va="center", fontsize=12)
        left = right + 0.8
        right = matrix(left, middle, *second)
        high = length[second[1][0]] / 2
        ax.plot([left] * 2, [middle - high, middle + high], color=theme["gold"], linewidth=4, solid_capstyle="butt")
        ax.text(right + 0.3, middle, "=", ha="center", va="center", fontsize=12)
        matrix(right + 0.9, middle, result, first[1][0] + second[1][1], "BF16")
    ax.plot([0.05, 0.55], [-0.3, -0.3], color=theme["gold"], linewidth=4, solid_capstyle="butt")
    ax.text(0.7, -0.3, "the dimension that is summed over", va="center", fontsize=9.2)
    ax.text(0, -0.55, "Each operand has one scale. Stored as: the matrix whose rows lie in\n"
            "memory, one after the other. A Hopper GPU adds up only codes that are\n"
            "neighbours there. So these rows run along the sum, as the thick side does.", va="top", fontsize=9.2)


def tails(gradients):
    """How far gradients spread below the largest of their tensor, and what each format does with them there."""
    ratios = np.concatenate([(np.abs(g[g != 0]) / np.abs(g).max()).ravel() for g in gradients])
    _, (counts, zones) = plt.subplots(2, 1, figsize=(PAGE, 5.2), sharex=True, height_ratios=[2, 1.2])
    edges = np.arange(-36, 1)
    share, _ = np.histogram(np.log2(ratios), edges)
    counts.stairs(100 * share / len(ratios), edges, fill=True, color=theme["green"])
    counts.set(yscale="log", xlim=(-41, 0), ylim=(1e-5, 100), ylabel="% of the gradients",
               title="gradients of all linear layers of model A,\nby powers of two")
    counts.set_yticks([1e-4, 1e-2, 1, 100], ["0.0001", "0.01", "1", "100"])
    counts.minorticks_off()
    for y, f, name in ((1, coat.E4M3, "E4M3"), (0, coat.E5M2, "E5M2")):
        normal, zero = np.log2(2.0 ** (1 - f.bias) / float(f.fmax)), np.log2(float(f.fmin) / 2 / float(f.fmax))
        for low, high, color, words in ((-41, zero, "red", "becomes\n0"), (zero, normal, "gold", "sub-\nnormal"),
                                        (normal, 0, "blue", "normal")):
            zones.barh(y, high - low, 0.55, low, color=theme[color], alpha=0.3)
            beside = max(low, -33) if f is coat.E4M3 else low  # E5M2's dotted line crosses E4M3's bar there
            zones.text((beside + high) / 2, y, words, ha="center", va="center", fontsize=8.5)
        lost = np.format_float_positional(100 * np.mean(ratios < 2.0**zero), precision=1, fractional=False)
        for ax, low, high in ((counts, 1e-5, 100), (zones, y - 0.27, 1.6)):
            ax.plot([zero, zero], [low, high], color=theme["text"], linewidth=1, linestyle=":")
        counts.text(zero - 0.3, 60, f"{name}:\n{lost}%\nlie below", ha="right", va="top", fontsize=9.5)
    zones.set(ylim=(-0.4, 1.6), xlabel="|g| / amax of its tensor",
              title="what becomes of a value, by its place on this axis")
    ticks = range(-32, 1, 8)
    zones.set_xticks(ticks, [f"$2^{{{e}}}$" for e in ticks])
    zones.set_yticks([1, 0], ["E4M3", "E5M2"])
    zones.spines["left"].set_visible(False)
    zones.tick_params(left=False, axis="y", labelcolor=theme["text"])


# --- The flow of one layer

def box(ax, x, y, w, h, words, edge, filled=False, dashed=False):
    ax.add_patch(FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.1", linewidth=1.4, zorder=3,
                                linestyle="--" if dashed else "-", edgecolor=edge,
                                facecolor=edge if filled else theme["ground" if dashed else "pale"]))
    ax.text(x, y, words, ha="center", va="center", color=theme["ground"] if filled else theme["text"], fontsize=9.5,
            linespacing=1.15, zorder=4)


def path(ax, *points, color=None, head=True):
    """A line through the points, with an arrow's head at its end."""
    xs, ys = zip(*points)
    ax.plot(xs, ys, color=color or theme["soft"], linewidth=1.2, solid_joinstyle="miter", zorder=0.5)
    if head:
        ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "color": color or theme["soft"], "shrinkA": 0,
                                                            "shrinkB": 0, "linewidth": 1.2})


def note(ax, x, y, words, ha="left", **more):
    ax.text(x, y, words, fontsize=9.2, va="center", ha=ha, **{"color": theme["soft"], **more})


# What a layer does, from above: (operator, its kind, what it hands on, what is saved, what becomes of that)
LAYER = [("norm 1", "norm", "E4M3, one scale", "norm 1's input\nE4M3 1x16: 1.1 C", ""),
         ("q, k, v\nprojection", "linear", "BF16", "", "norm 1's output,\ncomputed again"),
         ("attention,\nwith RoPE", "bf16", "E4M3, one scale", "q, k, v and output\nBF16: 8 C", ""),
         ("attention_out\nprojection", "linear", "", "", "codes of output,\nmade again"),
         ("+", "add", "", "", ""),
         ("norm 2", "norm", "E4M3, one scale", "norm 2's input\nE4M3 1x16: 1.1 C", ""),
         ("gate and up\nprojection", "linear", "", "", "norm 2's output,\ncomputed again"),
         ("SiLU(gate) x up", "norm", "E4M3, one scale", "gate and up\nE4M3 1x16: 6.05 C", ""),
         ("down\nprojection", "linear", "", "", "SiLU(gate) x up,\ncomputed again"),
         ("+", "add", "", "", "")]
GRADIENT = {"linear": "dgrad: g w\nwgrad: g$^T$x", "norm 1": "gradient of\nnorm 1", "norm 2": "gradient of\nnorm 2",
            "bf16": "gradient of\nattention", "SiLU(gate) x up": "gradient of\nSiLU x up"}
FORWARD, SAVED, BACKWARD, STREAM, BACK_STREAM = 3.1, 7.0, 11.0, 0.55, 13.35  # where the columns are
WIDE, TALL, GROUPS = 2.75, 0.56, 1.45  # a box; where the groups of a sum are made


def add(ax, y, x=STREAM):
    """A sum of the residual stream, or of its gradient, and a branch."""
    ax.plot([x], [y], "o", markersize=12, markerfacecolor=theme["ground"], markeredgecolor=theme["gold"], markeredgewidth=1.4,
            zorder=3)
    ax.text(x, y - 0.015, "+", ha="center", va="center", fontsize=11, color=theme["gold"], weight="bold", zorder=4)


def groups(ax, x, y):
    box(ax, x, y, 0.85, 0.26, "1x16", theme["green"], filled=True)


def flow():
    colors = {"linear": theme["blue"], "norm": theme["green"], "bf16": theme["grey"], "add": theme["grey"]}
    _, ax = plt.subplots(figsize=(5.8, 9.7))
    top = len(LAYER) - 1
    ax.set(xlim=(-0.15, 14.1), ylim=(-3.65, top + 1.75))
    ax.axis("off")
    for x, words in ((FORWARD, "forward"), (SAVED, "waits for backward"), (BACKWARD, "backward")):
        ax.text(x, top + 1.5, words, ha="center", weight="bold", fontsize=11.5)
    for x, words in ((STREAM - 0.4, "residual stream (tokens, C): BF16"), (BACK_STREAM + 0.45, "gradient of the residual stream: BF16")):
        ax.text(x, top / 2, words, rotation=90, va="center", ha="center", fontsize=9.5, color=theme["soft"])
    path(ax, (STREAM, top + 1.35), (STREAM, -0.75), color=theme["gold"])
    path(ax, (BACK_STREAM, -0.75), (BACK_STREAM, top + 1.35), color=theme["gold"])
    add(ax, top + 1)
    note(ax, STREAM + 0.35, top + 1.0, "output of the layer before")
    for row, (_, kind, *_) in enumerate(LAYER):
        if kind == "add":
            flow_sum(ax, top - row)
        else:
            flow_operator(ax, row, top - row, colors)
    path(ax, (STREAM + 0.12, -0.02), (GROUPS - 0.43, -0.42), color=theme["green"])
    groups(ax, GROUPS, -0.42)
    note(ax, GROUPS + 0.55, -0.42, "for norm 1 of the next layer")
    flow_legend(ax, colors)


def flow_sum(ax, y):
    """Where a branch is added to the residual stream."""
    path(ax, (FORWARD, y + 1 - TALL / 2), (FORWARD, y + 0.1), (STREAM + 0.18, y + 0.1), color=theme["gold"])
    add(ax, y + 0.1)
    note(ax, (STREAM + FORWARD) / 2 + 0.1, y + 0.26, "is added", "center")
    path(ax, (BACK_STREAM, y + 0.1), (BACKWARD, y + 0.1), (BACKWARD, y + 1 - TALL / 2), color=theme["gold"])
    note(ax, BACK_STREAM - 0.15, y + 0.26, "g: E5M2", "right")


def flow_operator(ax, row, y, colors):
    """An operator of LAYER: its boxes in the forward and the backward pass, and between them what is saved."""
    name, kind, out, saved, again = LAYER[row]
    box(ax, FORWARD, y, WIDE, TALL, name, colors[kind])
    box(ax, BACKWARD, y, WIDE, TALL, GRADIENT.get(name) or GRADIENT[kind], colors[kind])
    made = None  # where the groups are made that are saved
    if name.startswith("norm"):
        made = y + 0.52
        sum_at = y + (1.0 if row == 0 else 1.1)
        path(ax, (STREAM + 0.12, sum_at - 0.12), (GROUPS - 0.43, made), color=theme["green"])
        groups(ax, GROUPS, made)
        path(ax, (GROUPS, made), (FORWARD, made), (FORWARD, y + TALL / 2), color=theme["green"])
        path(ax, (BACKWARD + WIDE / 2, y), (BACK_STREAM - 0.18, y), color=theme["gold"])
        add(ax, y, BACK_STREAM)
    if name.startswith("SiLU"):
        made = y + 0.5
        groups(ax, FORWARD, made)
    if kind == "linear":
        path(ax, (FORWARD - WIDE / 2 - 0.38, y), (FORWARD - WIDE / 2, y))
        note(ax, FORWARD - WIDE / 2 - 0.45, y, "w", "right", color=theme["text"], weight="bold")
        right = BACKWARD + WIDE / 2
        path(ax, (right + 0.24, y + 0.14), (right, y + 0.14))
        note(ax, right + 0.33, y + 0.14, "w", color=theme["text"], weight="bold")
        path(ax, (right, y - 0.14), (right + 0.24, y - 0.14))
        note(ax, right + 0.33, y - 0.14, "dw", color=theme["text"], weight="bold")
    if LAYER[row + 1][1] != "add":
        path(ax, (FORWARD, y - TALL / 2), (FORWARD, y - 1 + TALL / 2))
        note(ax, FORWARD + 0.12, y - 0.5, out)
        path(ax, (BACKWARD, y - 1 + TALL / 2), (BACKWARD, y - TALL / 2))
        note(ax, BACKWARD + 0.12, y - 0.5, "BF16" if LAYER[row + 1][1] == "linear" else "g: E5M2")
    if saved:
        flow_saved(ax, y, saved, made)
    if again:
        box(ax, SAVED, y, 3.4, TALL, again, colors[LAYER[row - 1][1]], dashed=True)
        path(ax, (SAVED + 1.7, y), (BACKWARD - WIDE / 2, y), color=theme["red"])
        note(ax, (SAVED + 1.7 + BACKWARD - WIDE / 2) / 2, y + 0.17, "x", "center", color=theme["red"], weight="bold")


def flow_saved(ax, y, words, made):
    """What an operator saves; made: where its groups are made, or None."""
    color = theme["green"] if made else theme["soft"]
    box(ax, SAVED, y, 3.2, TALL, words, color, filled=True)
    if made:
        path(ax, (FORWARD, made), (SAVED, made), (SAVED, y + TALL / 2), color=color)
    else:
        path(ax, (FORWARD + WIDE / 2, y), (SAVED - 1.6, y))
    path(ax, (SAVED + 1.6, y), (BACKWARD - WIDE / 2, y))
    path(ax, (SAVED, y - TALL / 2), (SAVED, y - 1 + TALL / 2), color=color)


def flow_legend(ax, colors):
    rows = [("linear", "a linear layer: FP8 GEMMs, one scale per tensor"),
            ("norm", "a norm or activation function: reads groups, which are saved, too"),
            ("bf16", "computed in BF16"),
            ("saved", "filled: saved for backward, 16.3 C bytes a token (BF16: 22.8 C)"),
            ("again", "dashed: backward makes it again from the box above, for wgrad (red)")]
    for i, (kind, words) in enumerate(rows):
        y = -1.15 - 0.37 * i
        box(ax, 0.5, y, 0.8, 0.22, "", colors.get(kind, theme["soft"]), filled=kind == "saved", dashed=kind == "again")
        note(ax, 1.1, y, words, color=theme["text"])
    groups(ax, 0.5, -3.0)
    note(ax, 1.1, -3.0, "here groups are made: 16 values with one scale", color=theme["text"])
    add(ax, -3.4, 0.5)
    note(ax, 1.1, -3.4, "a sum in FP32, rounded to BF16 (in forward also to groups)", color=theme["text"])


# --- Where an amax comes from

def amax():
    """A kernel makes a tensor and takes its amax, and a second one makes the codes. Four threads with the values of
    lesson 2 stand for the 32 of a warp."""
    codes, _ = coat.quantize_tensor(coat.E4M3, GROUP[None, :])
    _, ax = plt.subplots(figsize=(5.6, 6.9))
    ax.set(xlim=(0, 13.75), ylim=(-0.1, 15.2))
    ax.axis("off")
    threads, words_at = (1.4, 3.7, 6.0, 8.3), 9.65
    middle = (threads[0] + threads[3]) / 2
    green, blue, gold = (theme[color] for color in ("green", "blue", "gold"))

    for low, high, title, color in ((7.1, 15.1, "A kernel makes the tensor and takes its amax", green),
                                    (0, 4.7, "quantize makes the codes", blue)):
        ax.add_patch(FancyBboxPatch((0.1, low), 13, high - low, boxstyle="round,pad=0,rounding_size=0.2", linewidth=1.2,
                                    edgecolor=color, facecolor="none"))
        ax.text(0.4, high - 0.45, title, weight="bold", fontsize=10.5, va="center", color=color)
    for y, words in ((12.8, "values that it has\nin registers"), (10.95, "largest magnitude\nof each thread"),
                     (9.3, "largest of the warp:\n__reduce_max_sync"), (5.85, "atomicMax: the larger\nstays, in any order"),
                     (3.3, "every thread reads\nthe same scale"), (0.6, "codes of x (1 / s)")):
        note(ax, words_at, y, words)
    note(ax, words_at, 13.85, "4 of the warp's 32")
    for i, (x, values, of_thread) in enumerate(zip(threads, GROUP.reshape(4, 4), codes.reshape(4, 4))):
        note(ax, x, 13.85, f"thread {i}", "center")
        box(ax, x, 12.8, 2.05, 1.3, "{:g}, {:g}\n{:g}, {:g}".format(*values), green)
        path(ax, (x, 12.15), (x, 11.35))
        box(ax, x, 10.95, 2.05, 0.8, f"{np.abs(values).max():g}", green)
        path(ax, (x, 10.55), (x, 9.7))
        path(ax, (x, 2.9), (x, 1.7))
        box(ax, x, 1.05, 2.05, 1.3, "{:02X}, {:02X}\n{:02X}, {:02X}".format(*of_thread), blue)
    box(ax, middle, 9.3, 8.95, 0.8, f"{np.abs(GROUP).max():g}", green)
    path(ax, (threads[0], 8.9), (threads[0], 6.35))
    note(ax, 5.0, 7.8, "other warps:", "right")
    for x, words in ((6.0, "3.5"), (8.3, "8.2")):
        box(ax, x, 7.8, 1.4, 0.8, words, theme["grey"])
        path(ax, (x, 7.4), (x, 6.35))
    box(ax, middle, 5.85, 8.95, 1.0, f"amax, one number in memory:  {np.abs(GROUP).max():g}", gold)
    path(ax, (threads[2], 5.35), (threads[2], 3.7))
    box(ax, middle, 3.3, 8.95, 0.8, "s = amax / 448 = 24 / 448", blue)
    red = theme["red"]
    path(ax, (13.1, 12.8), (13.55, 12.8), (13.55, 2.35), (threads[0] + 0.45, 2.35), color=red, head=False)
    for x in threads:  # each thread reads its own values
        path(ax, (x + 0.45, 2.35), (x + 0.45, 1.7), color=red)
    note(ax, words_at, 1.65, "x: read, or\ncomputed again", color=red)


def residual_add():
    """What residual_add does with a row of the residual stream, while its values are in registers, and what quantize
    computes again. The row has the 16 values of lesson 2 alone; all weights of the norm are 1."""
    shown, weight = [14, 3, 0, 10], np.float32(1)
    row = np.float32(GROUP[None, :])
    decoded = coat.dequantize_groups(*coat.quantize_to_groups(row))
    rstd = 1 / np.sqrt(np.mean(decoded**2) + np.float32(1e-5))
    y = decoded * rstd * weight
    codes, s = coat.quantize_tensor(coat.E4M3, y)
    _, ax = plt.subplots(figsize=(5.9, 7.6))
    ax.set(xlim=(0, 13.2), ylim=(0, 16.4))
    ax.axis("off")
    green, blue, gold, red = (theme[color] for color in ("green", "blue", "gold", "red"))
    for low, high, title, color in ((5.0, 15.5, "residual_add: one pass", green), (0.1, 4.5, "quantize, later", blue)):
        ax.add_patch(FancyBboxPatch((0.1, low), 8.7, high - low, boxstyle="round,pad=0,rounding_size=0.2", linewidth=1.2,
                                    edgecolor=color, facecolor="none"))
        ax.text(0.4, high - 0.4, title, weight="bold", fontsize=10.5, va="center", color=color)
    ax.text(4.5, 16.05, "in registers", ha="center", weight="bold", fontsize=10.5)
    ax.text(11.1, 16.05, "in memory: bytes a value", ha="center", weight="bold", fontsize=10.5)

    def stage(y, words, values, color):
        note(ax, 0.4, y + 0.62, words)
        box(ax, 4.45, y, 8.1, 0.66, "", color)
        for x, value in zip((1.5, 3.5, 5.5, 7.4), values):
            ax.text(x, y, value, ha="center", va="center", fontsize=9.5, zorder=4)

    def memory(y, words, color=gold):
        box(ax, 11.1, y, 3.5, 0.95, words, color, filled=True)

    def numbers(values):
        return [f"{value:.4g}" for value in values[0, shown]]

    stage(13.6, "sum: x + branch, in FP32 (4 values of a row)", numbers(row), green)
    stage(11.2, "made into groups, and decoded again", numbers(decoded), green)
    stage(9.1, "RMS of the decoded row: 1 / RMS", [f"{rstd:.4g}"], green)
    stage(7.3, "norm 2's output y: value (1 / RMS) weight", numbers(y), green)
    stage(5.55, "its largest magnitude (amax: that of all rows)", [f"{np.abs(y).max():.4g}"], green)
    stage(2.7, "norm 2's output y, computed again", numbers(y), blue)
    stage(0.65, f"codes of y (1 / s), s = amax / 448 = {s:.4g}", [f"{code:02X}" for code in codes[0, shown]], blue)
    memory(14.6, "x, branch\nBF16: 2 + 2 bytes")
    path(ax, (9.35, 14.6), (7.9, 14.6), (7.9, 13.93))
    memory(12.7, "residual stream\nBF16: 2 bytes")
    path(ax, (8.1, 13.27), (8.1, 12.7), (9.35, 12.7))
    memory(11.2, "norm 2's input\nE4M3: 1.1 bytes", theme["green"])
    memory(9.1, "mean (0), 1 / RMS\n8 bytes a row")
    memory(5.55, "amax\n4 bytes a tensor")
    memory(0.65, "x of gate and up\nE4M3: 1 byte", theme["blue"])
    for y in (11.2, 9.1, 5.55, 0.65):
        path(ax, (8.5, y), (9.35, y))
    for x, high, low in ((6.5, 13.27, 11.53), (7.9, 10.87, 9.43), (7.9, 8.77, 7.63), (7.9, 6.97, 5.88), (7.9, 2.37, 0.98)):
        path(ax, (x, high), (x, low))
    for y in (11.2, 9.1, 5.55):
        path(ax, (12.85, y), (13.1, y), (13.1, 2.7), color=red, head=False)
    path(ax, (13.1, 2.7), (8.5, 2.7), color=red)
    note(ax, 11.0, 2.95, "is read again", "center", color=red)


# --- Granularity

def granularity(x):
    """x (tokens, features): gate and up of a layer, of which one feature is made an outlier; the relative error of
    each value with one scale, a scale for each token, and 1x16 groups. Tokens are sorted by their outlier."""
    figure, grid = plt.subplots(2, 2, figsize=(6.4, 6.4), sharex=True, sharey=True)
    axes = grid.ravel()
    x = x[:48, 32:96].copy()
    x[:, 39] *= 10000
    x = x[np.argsort(np.abs(x[:, 39]))]
    ways = {"one scale for the tensor": coat.gemm_operand(coat.E4M3, x),
            "one scale for each token": coat.dequantize_groups(*coat.quantize_to_groups(x, x.shape[1])),
            "one scale for each 1x16": coat.dequantize_groups(*coat.quantize_to_groups(x))}
    magnitude = axes[0].imshow(np.log2(np.abs(x) + 2.0**-30), cmap="viridis", aspect="auto", vmin=-12, vmax=12,
                               interpolation="none")
    axes[0].set(title="|x|: feature 39 is an outlier")
    axes[0].annotate("smallest outlier\non top, largest\nat the bottom", (39, 24), (2, 24), color=WHITE, fontsize=9.5, va="center",
                     arrowprops={"arrowstyle": "->", "color": WHITE})
    for ax, (name, decoded) in zip(axes[1:], ways.items()):
        error = np.abs(decoded - x) / np.maximum(np.abs(x), 2.0**-30)
        image = ax.imshow(100 * error, cmap="magma", aspect="auto", vmin=0, vmax=25, interpolation="none")
        lost = (x != 0) & (decoded == 0)
        ax.set(title=f"{name}:\n{np.mean(lost):.0%} become 0")
        if name == "one scale for the tensor":
            ax.set(title=f"{ax.get_title('left')}, all |x| < {np.ceil(100 * np.abs(x[lost]).max()) / 100:.2f}")
    for ax in axes:
        ax.set_xticks(range(0, 65, 16))
    for ax in grid[:, 0]:
        ax.set_ylabel("tokens, sorted by their outlier")
    for ax in grid[1]:
        ax.set_xlabel("feature")
    bar = figure.colorbar(magnitude, ax=grid[:, 0], location="bottom", ticks=[-12, 0, 12], aspect=24)
    bar.ax.set_xticklabels(["$2^{-12}$", "1", "$2^{12}$"])
    bar.set_label("|x| (the first picture)")
    bar = figure.colorbar(image, ax=grid[:, 1], location="bottom", ticks=[0, 6.25, 12.5, 25], aspect=24)
    bar.ax.set_xticklabels(["0", "6%", "12%", "25% or more"])
    bar.set_label("relative error (the others)")


# --- Where a weight is

def weight_bytes():
    """Where the bytes of one weight of a linear layer lie during a step, and who writes and reads them."""
    _, ax = plt.subplots(figsize=(PAGE, 5.1))
    ax.set(xlim=(-3.1, 12.3), ylim=(-2.1, 7.6))
    ax.axis("off")
    green, blue, red, grey, gold = (theme[color] for color in ("green", "blue", "red", "soft", "gold"))
    rows = {"m, E4M3": (6.35, "1.06", green), "v, E4M3": (5.45, "1.06", green), "remainder": (4.4, "2", grey),
            "BF16 weight": (3.5, "2", grey), "codes, E4M3": (1.9, "1", blue), "gradient, BF16": (0.8, "2", red)}
    for begin, end, words in ((0, 4, "forward"), (4, 8.4, "backward"), (8.4, 10, "update")):
        ax.text((begin + end) / 2, 7.25, words, ha="center", weight="bold", fontsize=10.5)
        ax.plot([end, end], [0.35, 7.5], color=theme["line"], linewidth=1)
    ax.plot([0, 0], [0.35, 7.5], color=theme["line"], linewidth=1)
    ax.text(-0.2, 7.25, "bytes", ha="right", weight="bold", fontsize=10.5)

    def bar(name, begin, end, words="", color=None):
        y, _, own = rows[name]
        box(ax, (begin + end) / 2, y, end - begin, 0.62, words, color or own, filled=True)

    for name, (y, size, _) in rows.items():
        note(ax, -3.1, y, name.replace(" ", "\n", 1), color=theme["text"])
        note(ax, -0.2, y, size, "right", color=theme["text"])
    for name, words in zip(rows, ("and max, k (lesson 9)", "and max, k (lesson 9)", "what rounding took from the master",
                                  "the FP32 master, rounded")):
        bar(name, 0, 10)
        ax.text(5, rows[name][0], words, ha="center", va="center", fontsize=9.5, color=theme["ground"], zorder=5)
    bar("codes, E4M3", 1.2, 2.4, "fprop")
    bar("codes, E4M3", 5.6, 6.8, "dgrad")
    bar("gradient, BF16", 6.8, 10)
    for x, words in ((1.35, "is quantized"), (5.75, "again, transposed")):
        path(ax, (x, 3.19), (x, 2.21), color=blue)
        note(ax, x + 0.12, 2.6, words, color=theme["text"])
    note(ax, 6.65, 1.35, "wgrad", "right", color=theme["text"])
    path(ax, (6.9, 1.35), (7.25, 1.35), (7.25, 1.11), color=red)
    ax.add_patch(FancyBboxPatch((11.0, 0.5), 1.15, 6.2, boxstyle="round,pad=0,rounding_size=0.1", linewidth=1.4,
                                edgecolor=gold, facecolor=theme["pale"]))
    ax.text(11.57, 3.6, "adamw", rotation=90, ha="center", va="center", fontsize=10)
    for name, (y, _, _) in rows.items():
        if name == "gradient, BF16":
            path(ax, (10, y), (11.0, y), color=gold)
        elif name != "codes, E4M3":
            path(ax, (10, y + 0.12), (11.0, y + 0.12), color=gold)
            path(ax, (11.0, y - 0.12), (10, y - 0.12), color=gold)
    for i, words in enumerate(("adamw reads the gradient and the upper four, and writes",
                               "these four anew. They are always in memory: 6.1 bytes",
                               "a weight. The others come and go; of codes there are",
                               "never more than those of one matrix.")):
        note(ax, -3.1, -0.35 - 0.5 * i, words, color=theme["text"])


# --- Several GPUs

OWNED, RECEIVED, COMPUTED = 1.0, 0.3, 0.0  # what a half of a matrix is, and how opaque its color is then

def ranks():
    """One matrix of a layer on two GPUs, from update to update."""
    _, ax = plt.subplots(figsize=(PAGE, 7.4))
    ax.set(xlim=(0, 13.2), ylim=(-1.1, 16.7))
    ax.axis("off")
    blue, red, green, gold = (theme[color] for color in ("blue", "red", "green", "gold"))
    left, right, wide, tall = 0.3, 10.1, 2.8, 0.75
    for x, words in ((left, "GPU 0"), (right, "GPU 1")):
        ax.text(x + wide / 2, 16.3, words, ha="center", weight="bold", fontsize=11.5)

    def halves(x, y, upper, lower):
        """A matrix: its half of rank 0 above, that of rank 1 below. Each is (words, color, opacity)."""
        for words, color, opacity, bottom in ((*upper, y), (*lower, y - tall)):
            ax.add_patch(plt.Rectangle((x, bottom), wide, tall, edgecolor=color, linewidth=1.3, linestyle="-" if words else ":",
                                       facecolor=(color, opacity)))
            ax.text(x + wide / 2, bottom + tall / 2, words, ha="center", va="center", fontsize=9.2,
                    color=theme["ground"] if opacity == OWNED else theme["text"])

    def row(y, title, says, halves_left, halves_right):
        ax.text(6.6, y + 1.05, title, ha="center", weight="bold", fontsize=10)
        note(ax, 6.6, y - tall - 0.55, says, "center")
        halves(left, y, *halves_left)
        halves(right, y, *halves_right)

    def travels(y, words, to_right):
        ends = (left + wide, y), (right, y)
        path(ax, *(ends if to_right else ends[::-1]), color=gold)
        note(ax, 6.6, y + 0.22, words, "center", color=theme["text"])

    nothing = ("", theme["grey"], COMPUTED)
    kept = ("master, m, v", green, OWNED)
    row(14.4, "each keeps half of a matrix", "6.1 bytes for each weight of its half:\nmaster 4, moments 2.1", (kept, nothing), (nothing, kept))
    own, got = ("codes", blue, OWNED), ("codes", blue, RECEIVED)
    row(10.9, "forward: codes are gathered", "each GPU receives 1 byte for each weight\nof the other half, and again in backward", (own, got), (got, own))
    travels(10.9 + tall / 2, "E4M3 codes of this half", True)
    travels(10.9 - tall / 2, "E4M3 codes of this half", False)
    gradient = ("gradient", red, COMPUTED)
    row(7.4, "backward: gradients go to the owner", "each GPU receives 2 bytes\nfor each weight of its own half",
        (gradient, gradient), (gradient, gradient))
    travels(7.4 + tall / 2, "BF16 gradient of this half", False)
    travels(7.4 - tall / 2, "BF16 gradient of this half", True)
    added = ("sum of both", red, OWNED)
    row(3.9, "update: the owner adds in FP32 and moves its half", "a few numbers: clipping needs the norm of all gradients,\nand both halves need one scale",
        (added, nothing), (nothing, added))
    path(ax, (left + wide, 3.9), (right, 3.9), color=gold)
    path(ax, (right, 3.9), (left + wide, 3.9), color=gold)
    note(ax, 6.6, 4.12, "sums of squares, amaxes", "center", color=theme["text"])
    for i, (opacity, words) in enumerate(((OWNED, "the half that this GPU owns"), (RECEIVED, "received from the owner"),
                                          (COMPUTED, "computed by this GPU for its own tokens"))):
        ax.add_patch(plt.Rectangle((left, 1.05 - 0.6 * i), 0.7, 0.34, edgecolor=theme["soft"], linewidth=1.3,
                                   facecolor=(theme["soft"], opacity)))
        note(ax, left + 0.95, 1.22 - 0.6 * i, words, color=theme["text"])
    path(ax, (left, -0.58), (left + 0.7, -0.58), color=gold)
    note(ax, left + 0.95, -0.58, "travels", color=theme["text"])


# --- Memory of a step

def plan(train, recipe):
    flags = f"--plan --device gpu --model llama-2-7b --data dev --batch 8 --seq 2048 --recipe {recipe} --optimizer {recipe}"
    run = subprocess.run([train, *flags.split()], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def memory(plans):
    """What --plan lists, over a step: activations grow in forward, layer by layer; in backward gradients take
    their place."""
    _, axes = plt.subplots(1, 2, figsize=(PAGE, 4.8), sharey=True)
    ends = [0, 32, 64, 92]  # of forward, backward and the update; all layers are 32
    for ax, (recipe, lines) in zip(axes, plans.items()):
        rows = (re.match(r"  (\S.*?) {2,}(-?[\d.]+) +-?[\d.]+ ", line) for line in lines)
        gb = {row[1]: float(row[2]) for row in rows if row}

        def part(*words):
            return sum(gb.pop(name) for name in list(gb) if any(word in name for word in words))

        over_activations = gb.pop("gradients stored over activations", 0)  # negative
        areas = {"weights": part("weights", "remainder", "amaxes") * np.ones(4),
                 "moments": part("moments") * np.ones(4),
                 "operands": part("operands", "CUDA", "page tables") * np.ones(4),
                 "gradients": part("gradients") * np.ones(4) + over_activations * np.array([1, 1, 0, 0])}
        areas["saved activations"] = sum(gb.values()) * np.array([0, 1, 0, 0])  # what is left
        ax.stackplot(ends, areas.values(), alpha=0.9, colors=[theme[c] for c in ("grey", "blue", "green", "gold", "red")])
        ax.set(title=f"{recipe}\nat most {sum(areas.values()).max():.0f} GB", xlim=(0, ends[-1]), ylim=(0, 152))
        below = 0
        for name, area in areas.items():
            high = area.max()
            # Activations are named above their peak, gradients during the update, others in their middle.
            x, y, color = {"saved activations": (32, below + high + 9, theme["text"]),
                           "gradients": (77, below + high / 2, theme["ground"])}.get(
                               name, (32, below + high / 2, theme["ground"]))
            if high > 5:
                ax.text(x, y, f"{name}\n{high:.0f} GB", ha="center", va="center", fontsize=9.5, color=color, linespacing=1.1)
            below += area[1]
        for x in ends[1:3]:
            ax.axvline(x, color=theme["line"], linewidth=1, zorder=0)
        ax.set_xticks([16, 48, 78], ["forward", "backward", "update"])
        ax.tick_params(bottom=False)
    axes[1].text(3, 125, "thin green band:\noperands of one\nlayer, and CUDA", fontsize=9.5, color=theme["green"])
    axes[0].set_ylabel("GB")


# --- The ladder quantize_transpose

def cell(ax, x, y, w, h, face, words="", color=None):
    """A rectangle with its upper left corner at (x, y)."""
    ax.add_patch(plt.Rectangle((x, y), w, h, facecolor=face, edgecolor=theme["line"], linewidth=0.6, zorder=2))
    if words:
        ax.text(x + w / 2, y + h / 2, words, ha="center", va="center", fontsize=9, color=color or theme["text"], zorder=4)


def cells(ax, x, y, columns, rows, w, h):
    """Empty cells, as one rectangle with lines."""
    ax.add_patch(plt.Rectangle((x, y), columns * w, rows * h, facecolor=theme["pale"], linewidth=0, zorder=1))
    across, down = np.arange(columns + 1) * w + x, np.arange(rows + 1) * h + y
    points = []
    for at in across:
        points += [(at, down[0]), (at, down[-1]), (np.nan, np.nan)]  # NaN lifts the pen
    for at in down:
        points += [(across[0], at), (across[-1], at), (np.nan, np.nan)]
    ax.plot(*np.transpose(points), color=theme["line"], linewidth=0.6, zorder=1.5)


def label(ax, x, y, words, color):
    """Words on cells."""
    ax.text(x, y, words, fontsize=8.6, va="center", color=color, weight="bold", zorder=5,
            bbox={"facecolor": theme["ground"], "edgecolor": "none", "pad": 1.5})


def grid(ax, wide, high):
    """Axes whose y goes down, as rows do. Nothing lies above 1.2."""
    ax.set(xlim=(0, wide), ylim=(high, 1.2))
    ax.axis("off")


def fed():
    """Codes of one sum of the two backward GEMMs: in the matrix g, and in memory."""
    rows = (("dgrad, dx = g w: sums over out", "g\n(tokens, out)", [(3, i) for i in range(8)], "green", "neighbours: K-major"),
            ("wgrad, dw = g$^T$x: sums over tokens", "g\n(tokens, out)", [(i, 3) for i in range(8)], "red",
             "a whole row apart:\nthe instruction cannot read them"),
            ("wgrad, from transposed codes", "g transposed\n(out, tokens)", [(3, i) for i in range(8)], "green",
             "neighbours: K-major"))
    _, axes = plt.subplots(3, 1, figsize=(PAGE, 5.6))
    for ax, (title, name, chosen, color, verdict) in zip(axes, rows):
        grid(ax, 45, 12.4)
        ax.set_title(title)
        cells(ax, 1.5, 1.6, 8, 8, 1, 1)
        cells(ax, 12, 4.3, 64, 1, 0.5, 1.8)
        for row, col in chosen:
            cell(ax, 1.5 + col, 1.6 + row, 1, 1, theme[color])
            cell(ax, 12 + (8 * row + col) * 0.5, 4.3, 0.5, 1.8, theme[color])
        note(ax, 5.5, 11, name, "center")
        note(ax, 12, 3.2, "in memory, row after row:")
        note(ax, 12, 7.8, verdict, color=theme[color], weight="bold")


def rung5():
    """Rung 5: 8 neighbours of a row come in, and 8 of a column go out, through single bytes of the tile."""
    _, axes = plt.subplots(3, 1, figsize=(PAGE, 7.4), height_ratios=[6.4, 16.4, 6.4])
    dark, red, gold, ground = theme["grey"], theme["red"], theme["gold"], theme["ground"]

    def chunks(ax, title, rows_are, color):
        grid(ax, 78, 7.6)
        ax.set_title(title)
        for row in range(5):
            note(ax, 11.4, 2.1 + row, f"{rows_are} {row}", "right")
            for chunk in range(8):
                thread = 8 * row + chunk
                face = color if thread == 9 else dark if thread < 32 else theme["pale"]
                cell(ax, 12 + 8 * chunk, 1.6 + row, 8, 1, face, str(thread), ground if thread < 32 else None)
        note(ax, 44, 7.1, "...", "center")

    chunks(axes[0], "1. Each thread loads 8 elements of a row of x,\nand stores their codes (cells: threads)", "row", red)
    chunks(axes[2], "3. Each thread stores 8 codes of a row of the result", "column", gold)
    ax = axes[1]
    grid(ax, 78, 17.6)
    ax.set_title("2. In the tile (shared memory) a cell is a byte,\nand four are a word")
    cells(ax, 12, 1.6, 64, 16, 1, 1)
    cell(ax, 12, 1.6, 64, 4, dark)
    cell(ax, 12, 5.6, 4, 12, theme["line"])
    for row in range(16):
        note(ax, 11.4, 2.1 + row, f"row {row}", "right")
    for j in range(8):
        cell(ax, 20 + j, 2.6, 1, 1, red)
        cell(ax, 13, 9.6 + j, 1, 1, gold)
    label(ax, 29.5, 3.1, "thread 9 writes these 8,\nand its warp rows 0 to 3", red)
    label(ax, 17.5, 13.6, "after the barrier it reads these 8,\nand its warp columns 0 to 3", gold)


def rung6():
    """Rung 6: words of four rows go through the tile."""
    _, axes = plt.subplots(4, 1, figsize=(PAGE, 9.6), height_ratios=[4.5, 7.4, 17.6, 5.2])
    dark, red, blue, gold, ground = theme["grey"], theme["red"], theme["blue"], theme["gold"], theme["ground"]

    ax = axes[0]
    grid(ax, 78, 5.7)
    ax.set_title("1. Each thread loads 8 x 8 elements of x,\nand stores their codes (cells: threads)")
    for down in range(3):
        note(ax, 13.4, 2.1 + down, f"rows {8 * down} - {8 * down + 7}", "right")
        for across in range(16):
            thread = 16 * down + across
            face = red if thread == 17 else dark if thread < 32 else theme["pale"]
            cell(ax, 14 + 4 * across, 1.6 + down, 4, 1, face, str(thread), ground if thread < 32 else None)
    note(ax, 46, 5.1, "16 threads for the 128 columns, 16 for the 128 rows", "center")

    ax = axes[1]
    grid(ax, 78, 8.6)
    ax.set_title("2. In its registers thread 17 makes words\nof four rows of a column")
    for row in range(8):
        for col in range(8):
            cell(ax, 14 + 1.6 * col, 1.6 + 0.72 * row, 1.6, 0.72, red if row < 4 else blue)
    note(ax, 13.4, 3.0, "rows 8 - 11", "right")
    note(ax, 13.4, 5.9, "rows 12 - 15", "right")
    note(ax, 20.4, 8.0, "columns 8 - 15", "center")
    ax.annotate("", (38, 4.5), (30, 4.5), arrowprops={"arrowstyle": "-|>", "color": theme["soft"], "linewidth": 1.4})
    for col in range(8):
        for which, color in ((0, red), (1, blue)):
            cell(ax, 41 + 6.4 * which, 1.6 + 0.72 * col, 6.4, 0.72, color)
    note(ax, 44.2, 8.0, "upper", "center", color=red)
    note(ax, 50.6, 8.0, "lower", "center", color=blue)
    note(ax, 54.5, 2.0, "column 8: two words")
    note(ax, 54.5, 6.9, "column 15")

    ax = axes[2]
    grid(ax, 78, 18.8)
    ax.set_title("3. In the tile (shared memory) a cell is a word:\nword w of a column is in bank w")
    note(ax, 13.4, 2.1, "bank", "right")
    cells(ax, 14, 2.8, 32, 16, 2, 0.95)
    cell(ax, 14, 2.8, 8, 16 * 0.95, dark)
    for bank in range(0, 32, 4):
        note(ax, 15 + 2 * bank, 2.1, str(bank), "center")
    for col in range(16):
        note(ax, 13.4, 3.27 + col * 0.95, f"column {col}", "right")
    for col in range(8, 16):
        cell(ax, 18, 2.8 + col * 0.95, 2, 0.95, red)
        cell(ax, 20, 2.8 + col * 0.95, 2, 0.95, blue)
    for word in range(4, 8):
        cell(ax, 14 + 2 * word, 2.8 + 2 * 0.95, 2, 0.95, gold)
    label(ax, 31, 2.8 + 2.5 * 0.95, "after the barrier thread 17\nreads these 4 words", gold)
    label(ax, 23.5, 2.8 + 11.5 * 0.95, "thread 17 writes these 16,\na word with each store", red)
    note(ax, 46, 18.5, "grey: words 0 to 3 of all columns, which its warp writes", "center")

    ax = axes[3]
    grid(ax, 78, 6.4)
    ax.set_title("4. Each thread stores 16 codes of a row\nof the result, four times")
    for row in range(5):
        note(ax, 13.4, 2.05 + row * 0.95, f"column {row}", "right")
        for piece in range(8):
            thread = 8 * row + piece
            face = gold if thread == 17 else dark if thread < 32 else theme["pale"]
            cell(ax, 14 + 8 * piece, 1.6 + row * 0.95, 8, 0.95, face, str(thread), ground if thread < 32 else None)


def rung7():
    """The banks of the upper words that a warp writes at once, in rungs 6 and 7."""
    _, axes = plt.subplots(2, 2, figsize=(PAGE, 4.6), height_ratios=[4, 1], sharex=True)
    colors = (theme["blue"], theme["red"])
    for (ax, bars), swizzled, name in zip(axes.T, (False, True), ("rung 6", "rung 7: swizzled")):
        counts = np.zeros((2, 32), int)
        for across in range(16):
            for down in range(2):
                word = 2 * down
                bank = word ^ 2 * across ^ down if swizzled else word
                counts[down, bank] += 1
                ax.add_patch(plt.Rectangle((bank, across), 1, 1, facecolor=colors[down], linewidth=0))
        for bank in range(0, 33, 4):
            ax.axvline(bank, color=theme["line"], linewidth=0.8, zorder=0)
        ax.set(xlim=(0, 32), ylim=(16, 0), title=name)
        ax.set_yticks(np.arange(0, 16, 3) + 0.5, range(0, 16, 3))
        ax.tick_params(bottom=False, left=False)
        bars.bar(np.arange(32) + 0.5, counts[0], 0.8, color=colors[0])
        bars.bar(np.arange(32) + 0.5, counts[1], 0.8, counts[0], color=colors[1])
        bars.set(ylim=(0, 17), xlabel=f"bank ({'1 clock' if swizzled else '16 clocks'})")
        bars.set_yticks([1 if swizzled else 16])
        bars.set_xticks(np.arange(0, 32, 8) + 0.5, range(0, 32, 8))
    axes[0, 0].set_ylabel("across")
    axes[1, 0].set_ylabel("words")
    axes[0, 0].text(6, 2.4, "written by the\n16 threads of\ndown 0", color=colors[0], fontsize=9.5, va="center")
    axes[0, 0].text(6, 7.4, "of down 1", color=colors[1], fontsize=9.5, va="center")


def draw(folder, name, function, *values):
    style()
    function(*values)
    path = folder / f"{name}.svg"
    plt.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close()
    svg = re.sub(r">[^<]*<|(\.\d\d)\d+", lambda found: found[1] or found[0], path.read_text())  # hundredths of a point
    path.write_text(plot.with_dark_colors(svg, {theme[color]: DARK[color] for color in theme}))
    print(f"{name}: {len(svg) / 1000:.0f} kB")


def main(train, folder):
    folder.mkdir(parents=True, exist_ok=True)
    values = small_run.Run(train)
    v = values.v.reshape(-1, 128)
    draw(folder, "formats", formats)
    draw(folder, "scale", scale)
    draw(folder, "landing", landing)
    draw(folder, "staircase", staircase)
    draw(folder, "depth", depth)
    draw(folder, "expansion", expansion, v[v.min(axis=1) > 0])
    draw(folder, "gemms", gemms)
    draw(folder, "flow", flow)
    draw(folder, "amax", amax)
    draw(folder, "residual_add", residual_add)
    draw(folder, "tails", tails, values.gradients)
    draw(folder, "weight_bytes", weight_bytes)
    draw(folder, "ranks", ranks)
    for function in (fed, rung5, rung6, rung7):
        draw(folder, function.__name__, function)
    draw(folder, "granularity", granularity, values.gate_up[-2])
    plans = {recipe: plan(train, recipe) for recipe in ("bf16", "coat")}
    if any("operands, one layer" in line for line in plans["coat"]):
        draw(folder, "memory", memory, plans)
    else:
        print("memory.svg was not drawn: only a build with nvcc knows it.")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "build/figures/drawn"))
