#!/usr/bin/env python3
"""Draws loss curves, the bench and the figures of dev/RESULTS.md as SVG. Python's standard library suffices.

    python3 dev/plot.py loss fp32.jsonl coat.jsonl > loss.svg     loss curves, from logs of ./train --log
    python3 dev/plot.py bench build/bench.json > bench.svg        every operator of a step, from make bench
    python3 dev/results.py page                                   renews the figures of dev/RESULTS.md

`loss` draws the loss of each run, and below it the difference to the first run, in which curves that lie
over each other can be told apart. A curve is named after its run's recipe, or as given: NAME=fp32.jsonl.
A log that has several runs gives several curves.
"""
import json
import math
import os
import re
import statistics
import sys

COLORS = ["#0b6bcb", "#d1495b", "#2e8b57", "#b7791f", "#6b4fbb", "#4a5568"]
DARK, TEXT, LIGHT, LINE, REST = "#1a202c", "#3b4252", "#718096", "#e8ecf1", "#cbd5e0"


# ------------------------------------------------------------------------------------------------------------
# SVG

def picture(width, height, parts):
    """The whole SVG file, on a white ground."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
            f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">')
    svg = "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"])
    return with_dark_colors(svg, ON_DARK)


# The colours of a picture on a dark page, by those on a light one.
ON_DARK = {"#ffffff": "#0d1117", DARK: "#f0f6fc", TEXT: "#c9d1d9", LIGHT: "#9aa4af", LINE: "#232a33",
           REST: "#3a4452", "#a0aec0": "#7d8794", "#94a3b8": "#8b949e", "#0b6bcb": "#58a6ff",
           "#d1495b": "#ff7b8c", "#2e8b57": "#4fc486", "#b7791f": "#e0ab5a", "#6b4fbb": "#b39df5",
           "#4a5568": "#aab4c2", "#a9cdf2": "#1d3a5c", "#ffefc2": "#3d341b",
           "#cdc2ec": "#3a3160", "#b3dcc3": "#1d4431", "#ecd3a4": "#4c3a19", "#f2bcc4": "#53252d"}


def with_dark_colors(svg, on_dark):
    """The same picture with a style sheet that changes its colours where the system's theme is dark. A colour stands in
    an attribute (fill="#ffffff") or, as matplotlib writes it, in a style (style="fill: #ffffff")."""
    rules = [f'[{part}="{color}"], [style*="{part}: {color}"] {{ {part}: {on_dark[color]} !important }}'
             for color in sorted(on_dark) for part in ("fill", "stroke") if re.search(f'{part}(="|: ){color}', svg)]
    style = "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>"])
    return re.sub("<svg[^>]*>", lambda tag: f"{tag[0]}\n{style}", svg, count=1)


def text(x, y, words, size=12.0, anchor="start", color=TEXT, weight="normal"):
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
            f'font-weight="{weight}">{words}</text>')


def bar(x, y, width, height, color, opacity=1.0):
    rest = f' fill-opacity="{opacity}"/>' if opacity < 1 else "/>"
    size = f'width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}"{rest}'


def legend(x, y, entries, spacing):
    """A row of coloured squares with their names."""
    parts = []
    for name, color in entries:
        parts.append(bar(x, y - 9, 10, 10, color))
        parts.append(text(x + 14, y, name, 11.5))
        x += spacing
    return parts


def ticks(low, high, count):
    """About `count` round numbers from low to high."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    spacing = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [n * spacing for n in range(first, last + 1)]


def whole_ticks(last, count):
    """About `count` round whole numbers from 0 to last: there is no step 2.5."""
    raw = max(1, last / count)
    power = 10 ** math.floor(math.log10(raw))
    spacing = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(s - raw))
    return range(0, last + 1, spacing)


class Panel:
    """A titled rectangle with axes. x() and y() map data to positions in the picture. Its letters can be
    some points larger than usual."""

    def __init__(self, left, top, width, height, x_range, y_range, title, note="", larger=0):
        self.left, self.top, self.right, self.bottom = left, top, left + width, top + height
        self.x_range, self.y_range, self.larger = x_range, y_range, larger
        self.parts = [text(left, top - 26, title, 14 + larger, "start", DARK, "bold"),
                      text(left, top - 9, note, 11.5 + larger, "start", LIGHT)]

    def x(self, value):
        """Where the value is in the picture, from its left edge."""
        low, high = self.x_range
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value):
        """Where the value is in the picture, from its upper edge."""
        low, high = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def axes(self, x_label, x_ticks, y_ticks):
        """The x axis with its label and ticks (value, words), and a grid line at each tick of y."""
        for value in y_ticks:
            y = self.y(value)
            self.parts += [
                f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>',
                text(self.left - 7, y + 4, f"{value:g}", 11 + self.larger, "end")]
        for value, words in x_ticks:
            self.parts.append(text(self.x(value), self.bottom + 17, words, 11 + self.larger, "middle"))
        self.parts += [
            f'<path d="M{self.left} {self.bottom}H{self.right}" stroke="#a0aec0"/>',
            text((self.left + self.right) / 2, self.bottom + 36, x_label, 12 + self.larger, "middle", LIGHT)]

    def line(self, points, color, width=2.0, dash="", dots=True, opacity=1.0):
        """A line through the points (x, y), and a dot at each of them."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
                          f'stroke-opacity="{opacity}"' + (f' stroke-dasharray="{dash}"/>' if dash else "/>"))
        circle = '<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}" stroke="#ffffff"/>'
        self.parts += [circle.format(self.x(x), self.y(y), color) for x, y in points if dots]

    def names(self, named):
        """Names to the right of the panel, each at the height of its value. They are given as (value, words,
        color), and moved apart where they would overlap."""
        labels = sorted([self.y(value), words, color] for value, words, color in named)
        for above, below in zip(labels, labels[1:]):
            below[0] = max(below[0], above[0] + 15)
        excess = max(0, labels[-1][0] - self.bottom) if labels else 0
        self.parts += [text(self.right + 10, y - excess + 4, words, 11.5, "start", color, "bold")
                       for y, words, color in labels]

    def histogram(self, h, color, opacity):
        """Bars of {"low", "width", "counts"}, in percent of all counts."""
        for i, count in enumerate(h["counts"]):
            low, high = self.x(h["low"] + i * h["width"]), self.x(h["low"] + (i + 1) * h["width"])
            top = self.y(100 * count / sum(h["counts"]))
            if count and low < self.right:
                self.parts.append(bar(low, top, high - low, self.bottom - top, color, opacity))


def named(values):
    """Ticks with their words."""
    return [(value, str(value) if isinstance(value, int) else f"{value:g}") for value in values]


# ------------------------------------------------------------------------------------------------------------
# Loss curves

class Run:
    """A run in a log: the loss of each step of training, and of each validation, by step."""

    def __init__(self, name, started):
        self.name, self.started = name, started
        self.step, self.validation = {}, {}

    def resume_at(self, step):
        """Forgets what came after this step: a resumed run goes through it again."""
        self.step = {s: loss for s, loss in self.step.items() if s <= step}
        self.validation = {s: loss for s, loss in self.validation.items() if s <= step}


def run_of_settings(runs, settings, name):
    """The run that a line of the kind "settings" begins, or the one of `runs` that it continues."""
    trains = settings.get("steps") != 0  # else ./train only evaluated
    started = settings["run_started"] if trains else None
    found = next((run for run in runs if started and run.started == started), None)
    if found:
        found.resume_at(settings["step"])
    return found or Run(name or str(settings["recipe"]), started)


def read_log(argument):
    """The runs in a log of ./train (program/log.h) that have trained. `argument` is PATH or NAME=PATH."""
    name, _, path = ("", "", argument) if os.path.exists(argument) else argument.rpartition("=")
    runs, run = [], None
    try:
        with open(path, encoding="utf-8") as log:
            for number, line in enumerate(log, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                except ValueError:  # a run that was killed, or had a full disk, leaves a part of a line
                    print(f"{path}:{number} is no complete line of a log and is left out.", file=sys.stderr)
                    continue
                kind = fields["kind"]
                if kind == "settings":
                    run = run_of_settings(runs, fields, name)
                    if run not in runs:
                        runs.append(run)
                elif kind in ("step", "validation") and fields["loss"] is not None:  # null: not finite
                    getattr(run, kind)[int(fields["step"])] = float(fields["loss"])
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        sys.exit(f"{path} cannot be read as a log ({error}); make one with ./train --log {path}.")
    runs = [run for run in runs if run.step]
    if not runs:
        sys.exit(f"{path} has no training steps; give the log of a run that trained.")
    return runs


def number_equal_names(runs):
    """Two runs of the recipe coat are named "coat" and "coat 2"."""
    seen = {}
    for run in runs:
        seen[run.name] = count = seen.get(run.name, 0) + 1
        if count > 1:
            run.name = f"{run.name} {count}"


def smoothed(points):
    """The curve (step, value) through the points {step: value}, without most of their noise.

    At each step a straight line is fitted to the points around it, the nearest of which weigh most, and its
    value is taken. A mean would do inside the curve. At the end of a curve that falls, where all points are
    on one side, a mean lies above the curve; a line does not."""
    points = sorted(points.items())
    reach = min(10, 1 + len(points) // 4)  # a point this many places away has no weight
    curve = []
    for i, (step, _) in enumerate(points):
        w = x = y = xx = xy = 0.0  # weighted sums over the points around this one
        for j in range(max(0, i - reach + 1), min(len(points), i + reach)):
            weight = 1 - abs(j - i) / reach
            dx = points[j][0] - step
            w += weight
            x += weight * dx
            y += weight * points[j][1]
            xx += weight * dx * dx
            xy += weight * dx * points[j][1]
        determinant = w * xx - x * x
        curve.append((step, (xx * y - x * xy) / determinant if determinant > 0 else y / w))
    return curve


def differences(values, first):
    """What a curve {step: value} is above another, at the steps that both have."""
    return {step: value - first[step] for step, value in values.items() if step in first}


def loss_panel(runs, last):
    """The loss of each run up to the step `last`."""
    losses = [loss for run in runs for curve in (run.step, run.validation) for loss in curve.values()]
    margin = 0.05 * (max(losses) - min(losses) or 1)
    panel = Panel(72, 62, 600, 370, (0, last), (min(losses) - margin, max(losses) + margin),
                  "Loss, nats per token",
                  "dots: validation; thin lines: training, smoothed over about 10 steps")
    panel.axes("step", named(whole_ticks(last, 6)), ticks(*panel.y_range, 6))
    labels = []
    for run, color in zip(runs, COLORS * len(runs)):
        panel.line(smoothed(run.step), color, 1.2, dots=False, opacity=0.55)
        validation = sorted(run.validation.items())
        panel.line(validation, color)
        end = validation[-1][1] if validation else max(run.step.items())[1]
        labels.append((end, f"{run.name}  {end:.3f}", color))
    panel.names(labels)
    return panel


def difference_panel(runs, last):
    """The losses minus those of the first run. The first tenth of the steps, where losses differ most, does
    not choose the panel's range; what is out of the range is drawn at the panel's edge."""
    first = runs[0]
    curves = []
    for run in runs[1:]:
        training = smoothed(differences(run.step, first.step))
        validation = sorted(differences(run.validation, first.validation).items())
        curves.append((run, training, validation))
    values = [y for _, training, validation in curves for x, y in training + validation if x > last / 10]
    low, high = min([0, *values]), max([0, *values])
    margin = 0.05 * (high - low) or 0.001
    low, high = low - margin, high + margin
    panel = Panel(72, 540, 600, 200, (0, last), (low, high),
                  f"Loss minus that of {first.name}, nats per token",
                  "at the same steps; what is larger than the panel lies at its edge")
    panel.axes("step", named(whole_ticks(last, 6)), ticks(low, high, 5))
    panel.line([(0, 0), (last, 0)], COLORS[0], dots=False)
    labels = []

    def inside(curve):
        return [(x, min(max(y, low), high)) for x, y in curve]
    for (run, training, validation), color in zip(curves, (COLORS * len(runs))[1:]):
        panel.line(inside(training), color, 1.2, dots=False, opacity=0.55)
        panel.line(inside(validation), color)
        ends = [curve[-1] for curve in (validation, training) if curve]
        if ends:  # of the curve that goes further; of the validation if both end together
            y = max(ends, key=lambda point: point[0])[1]
            labels.append((min(max(y, low), high), f"{run.name}  {y:+.4f}", color))
    panel.names(labels)
    return panel


def draw_loss(runs):
    number_equal_names(runs)
    last = max(max(run.step) for run in runs)
    panels = [loss_panel(runs, last)]
    if len(runs) > 1:
        panels.append(difference_panel(runs, last))
    return picture(860, panels[-1].bottom + 48, [part for panel in panels for part in panel.parts])


# ------------------------------------------------------------------------------------------------------------
# The bench: a panel per model, a bar per operator

KINDS = {"linear layers": ("#0b6bcb", "#a9cdf2"), "attention": ("#6b4fbb", "#cdc2ec"),
         "between the GEMMs": ("#2e8b57", "#b3dcc3"), "embedding, head, loss": ("#b7791f", "#ecd3a4"),
         "optimizer": ("#d1495b", "#f2bcc4")}
BENCH_WIDTH, BENCH_LEFT, BENCH_RIGHT, ROW = 1060, 360, 240, 22
MARK = "#ffefc2"
# The operators of the table in lesson 11 of the course.
IN_LESSON_11 = ("up fprop", "attention backward", "residual add", "SiLU x up backward: amax", "AdamW, coat moments")
BENCH_LEGEND = ("A bar is the time of an operator in one step. Its strongly coloured part is the floor: the bytes at the "
                "rate of a copy, or the FLOPs at the rate",
                "of a large GEMM. After it: its time, and the floor in percent of it (above 100%: faster than the "
                "estimate). At the right: how often in a step x the time",
                "of one. Of the optimizer it is billions of weights x the time of a billion.")


def step_bar(top, sums):
    """The whole step as one bar, divided among (name, seconds, color), and a legend below it."""
    parts, x, label = [], 24.0, 24.0
    scale = (BENCH_WIDTH - 48) / sum(seconds for _, seconds, _ in sums)
    for name, seconds, color in sums:
        words = f"{name} {seconds * 1e3:.1f} ms"
        parts += [bar(x, top, seconds * scale, 20, color), bar(label, top + 30, 10, 10, color),
                  text(label + 15, top + 39, words, 12.5)]
        x += seconds * scale
        label += 24 + 6.5 * len(words)
    return parts


def operator_bar(y, scale, operator, dark, light, marked):
    """The time of an operator in a step, light, and over it the floor, dark, with its part of the time."""
    count, floor = operator["count"], operator["count"] * (operator["floor"] or 0)
    total = count * operator["seconds"]
    percent = f", {100 * floor / total:.0f}%" if floor else ""
    each = f"{count:.4g} x {operator['seconds'] * 1e6:.0f} us"
    return [*([bar(12, y - 1, BENCH_WIDTH - 24, ROW, MARK)] if marked else []),
            text(BENCH_LEFT - 8, y + 14, operator["name"], 13, "end", DARK, "bold" if marked else "normal"),
            bar(BENCH_LEFT, y + 2, total * scale, ROW - 6, light),
            bar(BENCH_LEFT, y + 2, min(floor, total) * scale, ROW - 6, dark),
            text(BENCH_LEFT + total * scale + 6, y + 14, f"{total * 1e3:.2f} ms{percent}", 13),
            text(BENCH_WIDTH - 24, y + 14, each, 12.5, "end", LIGHT)]


def operators_of_step(run):
    """Without those that are timed only to be compared with others' (dev/attention_peers.py): a step has none of them."""
    return [o for o in run["operators"] if o["count"] > 0]


def bench_panel(device, run, top, marked):
    """The parts of one model's panel, and where the next panel begins. marked: names of operators."""
    step, groups = run["step"], {}
    for o in operators_of_step(run):
        groups.setdefault(o["group"], []).append(o)
    shape = f"{run['batch']} x {run['seq']} tokens"
    shape += f" x {run['accumulate']} micro-batches" if run["accumulate"] > 1 else ""
    summary = (f"{device}: {step['seconds'] * 1e3:.1f} ms a step, {step['tokens_per_second']:,.0f} "
               f"tokens/s, {step['seconds'] / step['floors']:.2f} times the sum of the floors")
    sums = [(name, sum(o["count"] * o["seconds"] for o in group), KINDS[name][0])
            for name, group in groups.items()]
    sums.append(("the rest", max(0, step["seconds"] - sum(seconds for _, seconds, _ in sums)), REST))
    parts = [text(24, top + 28, f"{run['model']}, {run['recipe']}, {shape}", 17, "start", DARK, "bold"),
             text(24, top + 46, summary, 13, "start", LIGHT), *step_bar(top + 60, sums)]
    longest = max(o["count"] * o["seconds"] for o in operators_of_step(run))
    scale = (BENCH_WIDTH - BENCH_LEFT - BENCH_RIGHT) / longest
    y = top + 120
    for name, group in groups.items():
        dark, light = KINDS[name]
        parts.append(text(24, y + 14, name, 13, "start", dark, "bold"))
        for operator in group:
            y += ROW
            parts += operator_bar(y, scale, operator, dark, light, operator["name"] in marked)
        y += ROW + 6
    return parts, y + 18


def draw_bench(report, marked=()):
    """Every operator of every run of the report, one model below the other."""
    legend = [*BENCH_LEGEND, "Marked: the operators of the table in lesson 11."] if marked else BENCH_LEGEND
    parts, y = [text(24, 26 + 18 * i, words, 13, "start", TEXT) for i, words in enumerate(legend)], 20 + 18 * len(legend)
    for run in report["runs"]:
        rows, y = bench_panel(report["device"], run, y, marked)
        parts += rows
    return picture(BENCH_WIDTH, y, parts)


# ------------------------------------------------------------------------------------------------------------
# The figures of dev/RESULTS.md

# norm, activation function, RoPE, attention, linear, total; arXiv 2410.19313
PAPER_TABLE_2 = {"paper: BF16": (4, 8, 2, 3, 5.66, 22.66), "paper: TE": (2, 8, 2, 3, 3.33, 18.33),
                 "paper: COAT": (1, 4, 2, 3, 3.33, 13.33)}
PAPER_GAP = 0.013  # COAT's training loss above BF16's, OLMo-1B after 22 billion tokens
DRAWN_LOSSES = ("te", "coat")  # the recipes in the figure of losses; the table has all that were measured


def highest_percent(histogram):
    """The highest bar, in percent of all counts."""
    return 100 * max(histogram["counts"]) / sum(histogram["counts"])


def draw_moments(result):
    """The paper's figure 2: ranges of groups before and after expansion, and k."""
    parts = []
    limit = math.log10(448 * 512)  # E4M3's largest magnitude by its smallest
    for column, (moment, title) in enumerate((("m", "First moment"), ("v", "Second moment"))):
        r, left = result[moment], 60 + 440 * column
        before, after, k = r["log10_range"], r["log10_range_expanded"], r["k"]
        top = 1.1 * max(highest_percent(before), highest_percent(after))
        top_k = 1.1 * highest_percent(k)
        panel = Panel(left, 70, 380, 190, (0, 12), (0, top), f"{title}: dynamic range of groups of 128",
                      f"% of {r['groups']:,} groups; GPT-2 124M, step {result['step']}")
        panel.axes("largest / smallest non-zero magnitude", [(x, f"1e{x}") for x in range(0, 13, 2)],
                   ticks(0, top, 4))
        panel.histogram(before, COLORS[5], 0.55)
        panel.histogram(after, COLORS[0], 0.85)
        panel.line([(limit, 0), (limit, top)], COLORS[1], dash="4 3", dots=False)
        lines = {"range R": COLORS[5], "expanded, R^k": COLORS[0], "range of E4M3": COLORS[1]}
        for row, (words, color) in enumerate(lines.items()):
            panel.parts.append(text(panel.left + 12, 84 + 15 * row, words, 11.5, "start", color, "bold"))
        lower = Panel(left, 370, 380, 150, (0, 16), (0, top_k), f"{title}: expansion exponent k",
                      f"median {k['median']:.3g}; 80% lie from {k['p10']:.3g} to {k['p90']:.3g}")
        lower.axes("k", named(range(0, 17, 2)), ticks(0, top_k, 4))
        lower.histogram(k, COLORS[2], 0.85)
        parts += panel.parts + lower.parts
    return picture(920, 575, parts)


def draw_memory(result):
    """The paper's table 2: saved activations by operator."""
    columns = dict(zip(("norm", "activation function", "RoPE", "attention", "linear"),
                       (COLORS[0], COLORS[1], REST, COLORS[4], COLORS[2])))
    rows = [(name, values[:-1], values[-1]) for name, values in PAPER_TABLE_2.items()]
    rows += [(f"ours: {r['name']}", [r["U"].get(c, 0) for c in columns], r["total"])
             for r in result["rows"]]
    title = "Saved activations of a layer, in units of a BF16 tensor of the hidden size"
    parts = [text(24, 30, title, 14, "start", DARK, "bold"), *legend(280, 53, columns.items(), 136)]
    for row, (name, values, total) in enumerate(rows):
        x, y = 280, 70 + 27 * row
        parts.append(text(272, y + 14, name, 11.5, "end", DARK if name.startswith("ours") else LIGHT))
        for color, value in zip(columns.values(), values):
            parts += [bar(x, y, value * 24, 19, color)] if value else []
            x += value * 24
        parts.append(text(x + 6, y + 14, f"{total:.2f}", 11.5, "start", DARK, "bold"))
    return picture(980, 84 + 27 * len(rows), parts)


def paired(rows, first="bf16"):
    """The runs of each recipe, each with the run of `first` that has the same seed, text and so data."""
    found = {}
    for name, row in rows.items():
        recipe, separator, seed = name.partition(" seed ")
        base = rows.get(first + separator + seed)
        if recipe != first and base and base["text"] == row["text"]:
            found.setdefault(recipe, []).append((row, base))
    return found


def spread_panel(left, color, recipe, curves, y_range):
    """Of one recipe: the mean curve of all seeds, in a band from the lowest seed to the highest. curves: for each
    seed the differences of the training losses, one for each tenth of the run."""
    tenth = 20  # million tokens
    mean = [statistics.mean(of) for of in zip(*curves)]
    panel = Panel(left, 94, 250, 250, (0, 10 * tenth), y_range, recipe, larger=1.5)
    panel.axes("million tokens", named(range(0, 10 * tenth + 1, 5 * tenth)), ticks(*y_range, 8))
    panel.line([(x, 0) for x in panel.x_range], DARK, dots=False)
    middle = [tenth * (i + 0.5) for i in range(10)]
    edge = [*zip(middle, map(max, zip(*curves))), *reversed([*zip(middle, map(min, zip(*curves)))])]
    corners = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in edge)
    panel.parts.append(f'<polygon points="{corners}" fill="{color}" fill-opacity="0.25"/>')
    panel.line([*zip(middle, mean)], color)
    words = f"last tenth: {mean[-1]:+.4f}"
    panel.parts.append(text(panel.right, panel.y(y_range[0]) - 20, words, 12.5, "end", color, "bold"))
    return panel


def ends_panel(top, ends):
    """Of each recipe: the differences of the validation losses of all seeds at the end, and their mean.
    ends: {recipe: differences}."""
    lowest, highest = min(0, *map(min, ends.values())), max(map(max, ends.values()))
    panel = Panel(110, top, 440, 34 * len(ends), (lowest - 0.0005, highest + 0.0005), (0, len(ends)),
                  "Validation loss minus bf16, after 200 million tokens", "dots: the three seeds; bar: their mean",
                  larger=1.5)
    panel.axes("nats per token", named(ticks(*panel.x_range, 5)), [])
    panel.line([(0, 0), (0, len(ends))], DARK, dots=False)
    for row, ((recipe, gaps), color) in enumerate(zip(ends.items(), COLORS)):
        y, mean = len(ends) - row - 0.5, statistics.mean(gaps)
        panel.parts.append(text(panel.left - 10, panel.y(y) + 4, recipe, 12.5, "end", color, "bold"))
        panel.line([(min(gaps), y), (max(gaps), y)], color, 1.5, dots=False)
        panel.parts += [bar(panel.x(mean) - 2, panel.y(y) - 10, 4, 20, color)]
        for gap in gaps:
            panel.line([(gap, y)], color)
        panel.parts.append(text(panel.right + 12, panel.y(y) + 4, f"mean {mean:+.4f}", 12.5, "start", color, "bold"))
    return panel


def draw_convergence(rows):
    """Losses of GPT-2 minus those of bf16 with the same seed: a panel for the training losses of each recipe of
    DRAWN_LOSSES, and one for the validation losses of all of them."""
    ends, curves, pairs = {}, {}, paired(rows)
    for recipe in DRAWN_LOSSES:
        of = pairs[recipe]
        ends[recipe] = [row["validation"][-1][1] - base["validation"][-1][1] for row, base in of]
        curves[recipe] = [[a - b for a, b in zip(row["train"], base["train"])] for row, base in of]
    gaps = [gap for of in curves.values() for seed in of for gap in seed]
    y_range = min(0, *gaps) - 0.001, max(gaps) + 0.001
    parts = [text(24, 24, "Training loss minus bf16 with the same seed, nats per token", 14.5, "start", DARK, "bold"),
             text(24, 44, "line: mean of three seeds, each point a tenth of the run; band: from the lowest seed to the "
                  "highest", 12.5, "start", LIGHT)]
    for column, ((recipe, of), color) in enumerate(zip(curves.items(), COLORS)):
        panel = spread_panel(70 + 315 * column, color, recipe, of, y_range)
        if recipe == "coat":
            panel.line([(x, PAPER_GAP) for x in panel.x_range], LIGHT, dash="5 4", dots=False)
            panel.parts.append(text(panel.right, panel.y(PAPER_GAP) - 6, "paper, OLMo-1B", 12.5, "end", LIGHT))
        parts += panel.parts
    lower = ends_panel(460, ends)
    return picture(670, lower.bottom + 50, parts + lower.parts)


def bench_of(rows):
    """The bench as one report: results.json has a row for each model."""
    rows = list(rows.values())
    return {"device": ", ".join(sorted({row["device"] for row in rows})),
            "commit": ", ".join(sorted({row["commit"] for row in rows})),
            "runs": [run for row in rows for run in row["runs"]]}


def figures(results):
    """The figures of dev/RESULTS.md as {name: SVG}, from dev/results.json."""
    bench = bench_of(results["bench"])
    return {"bench": draw_bench(bench), "bench-7b": draw_bench({**bench, "runs": bench["runs"][:1]}, IN_LESSON_11),
            "memory": draw_memory(results["memory"]["memory"]),
            "moments": draw_moments(results["moments"]["gpt2"]),
            "convergence": draw_convergence(results["convergence"])}


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "loss":
        print(draw_loss([run for argument in sys.argv[2:] for run in read_log(argument)]))
    elif len(sys.argv) == 3 and sys.argv[1] == "bench":
        with open(sys.argv[2], encoding="utf-8") as file:
            print(draw_bench(json.load(file)))
    else:
        sys.exit(__doc__.strip())


if __name__ == "__main__":
    main()
