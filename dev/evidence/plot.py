"""The figures of dev/RESULTS.md, in the hand of dev/plot_loss.py and dev/plot_bench.py (whose colors, ticks and text they use)."""
import math

from plot_bench import REST, bar, text
from plot_loss import COLORS, spread, ticks
from tables import GRANULARITIES, LAYERS, PAPER_FIGURE_4B, PAPER_GAP, PAPER_TABLE_2, RECIPES, place, seeds_of_bf16

DARK, LIGHT = "#1a202c", "#718096"


def picture(width, height, parts):
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">')
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"])


class Panel:
    """A titled rectangle with axes. x and y map data to the picture; an axis is (low, high), or of logarithms where log says so."""

    def __init__(self, left, top, width, height, x_range, y_range, title, note="", log_x=False, log_y=False):
        self.left, self.top, self.right, self.bottom = left, top, left + width, top + height
        self.x_range, self.y_range, self.log_x, self.log_y = x_range, y_range, log_x, log_y
        self.parts = [text(left, top - 26, title, 14, "start", DARK, "bold"), text(left, top - 9, note, 11.5, "start", LIGHT)]

    @staticmethod
    def share(value, limits, log):
        low, high, value = (math.log10(v) for v in (*limits, value)) if log else (*limits, value)
        return (value - low) / (high - low)

    def x(self, value):
        return self.left + (self.right - self.left) * self.share(value, self.x_range, self.log_x)

    def y(self, value):
        return self.bottom - (self.bottom - self.top) * self.share(value, self.y_range, self.log_y)

    def axes(self, x_label, x_ticks, y_ticks):
        for value in y_ticks:
            y = self.y(value)
            self.parts.append(f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e8ecf1"/>')
            self.parts.append(text(self.left - 7, y + 4, f"{value:g}", 11, "end"))
        for value, words in x_ticks:
            self.parts.append(text(self.x(value), self.bottom + 17, words, 11, "middle"))
        self.parts.append(f'<line x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}" stroke="#a0aec0"/>')
        self.parts.append(text((self.left + self.right) / 2, self.bottom + 36, x_label, 12, "middle", LIGHT))

    def line(self, points, color, dash=""):
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>')
        if not dash:
            self.parts += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{color}" stroke="#ffffff"/>' for x, y in points]

    def names(self, named):
        """Names at the ends of lines: (value, words, color)."""
        labels = spread([[self.y(value), words, color] for value, words, color in named], 15, self.bottom)
        self.parts += [text(self.right + 10, y + 4, words, 11.5, "start", color, "bold") for y, words, color in labels]

    def histogram(self, h, color, opacity):
        total, step = sum(h["counts"]), h["width"]
        for i, count in enumerate(h["counts"]):
            low, high = self.x(h["low"] + i * step), self.x(h["low"] + (i + 1) * step)
            if count and low < self.right:
                top = self.y(100 * count / total)
                self.parts.append(f'<rect x="{low:.1f}" y="{top:.1f}" width="{high - low:.2f}" height="{self.bottom - top:.1f}" fill="{color}" '
                                  f'fill-opacity="{opacity}"/>')


def highest(*histograms):
    return 100 * max(max(h["counts"]) / sum(h["counts"]) for h in histograms)


def moments(result):
    parts = []
    for column, (moment, title) in enumerate((("m", "First moment"), ("v", "Second moment"))):
        r, left = result[moment], 60 + 440 * column
        before, after = r["log10_range"], r["log10_range_expanded"]
        top = 1.1 * highest(before, after)
        note = f"% of {r['groups']:,} groups; {result['training']}, step {result['step']}"
        panel = Panel(left, 70, 380, 190, (0, 12), (0, top), f"{title}: dynamic range of groups of 128", note)
        panel.axes("largest / smallest non-zero magnitude", [(x, f"1e{x}") for x in range(0, 13, 2)], ticks(0, top, 4))
        panel.histogram(before, COLORS[5], 0.55)
        panel.histogram(after, COLORS[0], 0.85)
        limit = math.log10(448 * 512)
        panel.line([(limit, 0), (limit, top)], COLORS[1], "4 3")
        for row, (words, color) in enumerate((("as they are", COLORS[5]), ("expanded, R^k", COLORS[0]), ("what E4M3 can hold", COLORS[1]))):
            panel.parts.append(text(panel.left + 12, 84 + 15 * row, words, 11.5, "start", color, "bold"))
        k, high = r["k"], 1.1 * highest(r["k"])
        note = f"median {k['median']:g}; 80% lie in {k['p10']:g} to {k['p90']:g}"
        lower = Panel(left, 370, 380, 150, (0, 16), (0, high), f"{title}: expansion factor k", note)
        lower.axes("k", [(x, f"{x}") for x in range(0, 17, 2)], ticks(0, high, 4))
        lower.histogram(k, COLORS[2], 0.85)
        parts += panel.parts + lower.parts
    return picture(920, 575, parts)


def activations(result):
    colors = dict(zip(["linear layers only, per tensor", "per tensor", "1x16", "1x128", "4x4"], COLORS))
    streams = [s for s in result["streams"] if s["way"] not in ("FP32", "BF16")]  # both are beneath the others' lines
    high = 110 * max(v for s in streams for v in s["noise_to_signal"])
    panel = Panel(66, 70, 380, 330, (1, max(2, result["layers"])), (0, high), "Error of the residual stream after each layer",
                  f"% of its power, against FP32; {result['training']}, step {result['step']}")
    every = max(1, result["layers"] // 8)
    panel.axes("layer", [(n, str(n)) for n in range(1, result["layers"] + 1, every)], ticks(0, high, 6))
    for s in streams:
        panel.line([(i + 1, 100 * v) for i, v in enumerate(s["noise_to_signal"])], colors.get(s["way"], COLORS[5]))
    panel.names([(100 * s["noise_to_signal"][-1], s["way"], colors.get(s["way"], COLORS[5])) for s in streams])

    tensors = list(dict.fromkeys(t["tensor"] for t in result["tensors"]))
    means = {(t, g): 100 * sum(r["noise_to_signal"][g] for r in result["tensors"] if r["tensor"] == t) / result["layers"]
             for t in tensors for g in GRANULARITIES}
    right = Panel(810, 70, 330, 330, (0, 1.05 * max(means.values())), (0, len(tensors)), "Each tensor alone, mean of layers",
                  "quantization noise, % of its power")
    right.axes("", [(v, f"{v:g}") for v in ticks(0, right.x_range[1], 5)], [])
    for row, tensor in enumerate(tensors):
        top = right.top + 330 / len(tensors) * row + 5
        right.parts.append(text(right.left - 8, top + 24, tensor, 11.5, "end"))
        right.parts += [bar(right.left, top + 9 * i, right.x(means[tensor, g]) - right.left, 8, colors[g])
                        for i, g in enumerate(GRANULARITIES)]
    for i, g in enumerate(GRANULARITIES):
        right.parts += [bar(right.left + 90 * i, 428, 10, 10, colors[g]), text(right.left + 90 * i + 14, 437, g, 11.5)]
    return picture(1170, 460, panel.parts + right.parts)


def memory(result):
    columns = [("norm", COLORS[0]), ("activation function", COLORS[1]), ("RoPE", REST), ("attention", COLORS[4]), ("linear", COLORS[2])]
    rows = [(name, values[:-1], values[-1]) for name, *values in PAPER_TABLE_2]
    rows += [("ours: " + r["name"] + (", outputs computed again" if r["recompute"] else ""), [r["U"].get(c, 0) for c, _ in columns], r["total"])
             for r in result["rows"]]
    scale, left, parts = 24.0, 400, [text(24, 30, "Saved activations of a layer, in U (a BF16 tensor of the hidden size)", 14, "start", DARK, "bold")]
    for i, (name, color) in enumerate(columns):
        parts += [bar(left + 136 * i, 44, 10, 10, color), text(left + 136 * i + 14, 53, name, 11.5)]
    for row, (name, values, total) in enumerate(rows):
        x, y = left, 70 + 27 * row
        parts.append(text(left - 8, y + 14, name, 11.5, "end", DARK if name.startswith("ours") else LIGHT))
        for (_, color), value in zip(columns, values):
            if value:
                parts.append(bar(x, y, value * scale, 19, color))
            x += value * scale
        parts.append(text(x + 6, y + 14, f"{total:.2f}", 11.5, "start", DARK, "bold"))
    return picture(1000, 84 + 27 * len(rows), parts)


def timing(result):
    series, parts = {}, []
    for r in result.get("products", []):
        for key, words in (("product_ms", ""), ("with_x_ms", ", x quantized"), ("with_x_and_w_ms", ", x and w quantized")):
            if key in r:
                series.setdefault((r["scaling"], words), []).append((r["side"], 2e-9 * r["side"] ** 3 / r[key]))
    if series:
        top = 1.08 * max(rate for points in series.values() for _, rate in points)
        sides = [side for side, _ in next(iter(series.values()))]
        panel = Panel(70, 70, 480, 360, (sides[0], sides[-1]), (0, top), "Matrix products, TFLOP/s",
                      f"all three sides alike; {result['device']}", log_x=True)
        panel.axes("side", [(n, str(n)) for n in sides if n & (n - 1) == 0], ticks(0, top, 7))
        colors = dict(zip(dict.fromkeys(r["scaling"] for r in result["products"]), COLORS))  # one for each scaling; dashes for what is quantized
        dashes = {"": "", ", x quantized": "7 3", ", x and w quantized": "2 3"}
        for (scaling, words), points in series.items():
            panel.line(points, colors[scaling], dashes[words])
        parts += panel.parts
        for row, (scaling, color) in enumerate(colors.items()):  # the lines' ends lie too close together to be named there
            parts += [bar(590, 120 + 24 * row, 22, 4, color), text(622, 126 + 24 * row, scaling, 12, "start", color, "bold")]
        for row, (words, dash) in enumerate(dashes.items()):
            y = 150 + 24 * (len(colors) + row)
            parts += [f'<line x1="590" x2="612" y1="{y}" y2="{y}" stroke="{DARK}" stroke-width="2" stroke-dasharray="{dash}"/>',
                      text(622, y + 4, words.removeprefix(", ") or "the product alone", 12)]
    rows = [(f"{r['columns']} x {r['tokens']}",
             [*PAPER_FIGURE_4B[(r["columns"], r["tokens"])], r["whole_tensor_ms"], r["group_maxima_ms"],
              max(0, r["producer_with_ms"] - r["producer_without_ms"])]) for r in result.get("amax", [])]
    names = ["paper: whole tensor", "paper: group scaling", "ours: whole tensor", "ours: of group maxima", "ours: left by the producer"]
    parts.append(text(70, 500, "Time of a tensor's amax, ms", 14, "start", DARK, "bold"))
    scale = 620 / max((max(values) for _, values in rows), default=1)
    for i, (name, color) in enumerate(zip(names, COLORS[5:] + COLORS)):
        parts += [bar(70 + 170 * i, 512, 10, 10, color), text(84 + 170 * i, 521, name, 11.5)]
    for row, (shape, values) in enumerate(rows):
        parts.append(text(150, 573 + 76 * row, shape, 11.5, "end"))
        for i, (value, color) in enumerate(zip(values, COLORS[5:] + COLORS)):
            y = 536 + 76 * row + 13 * i
            parts += [bar(158, y, value * scale, 11, color), text(164 + value * scale, y + 9.5, f"{value:.3f}", 10.5)]
    return picture(930, 550 + 76 * len(rows), parts)


def bars(title, legend, rows, unit):
    """Stacked bars: rows of (words, [values], whether they are ours), one color a value."""
    left, top = 400, 70
    most = max(sum(values) for _, values, _ in rows)
    parts = [text(24, 30, title, 14, "start", DARK, "bold")]
    for i, (name, color) in enumerate(legend):
        parts += [bar(left + 170 * i, 44, 10, 10, color), text(left + 170 * i + 14, 53, name, 11.5)]
    for row, (words, values, ours) in enumerate(rows):
        x, y = left, top + 21 * row
        parts.append(text(left - 8, y + 12, words, 11.5, "end", DARK if ours else LIGHT))
        for (_, color), value in zip(legend, values):
            parts.append(bar(x, y, 420 * value / most, 15, color if ours else REST))
            x += 420 * value / most + 1
        parts.append(text(x + 6, y + 12, f"{sum(values):,.{2 if most < 1000 else 0}f} {unit}", 11.5, "start", DARK if ours else LIGHT, "bold"))
    return picture(980, top + 14 + 21 * len(rows), parts)


def layer(result):
    rows = []
    for (hidden, seq, batch), paper in LAYERS:
        rows += [(f"paper: {recipe}, hidden size {hidden}, {batch} x {seq}", list(values[:2]), False) for recipe, values in paper.items()]
        found = [r for r in result["rows"].values() if (r["hidden"], r["seq"], r["batch"]) == (hidden, seq, batch)]
        found.sort(key=lambda r: RECIPES.index(r["recipe"]))
        rows += [(f"ours: {r['recipe']}, hidden size {hidden}, {batch} x {seq}", [r["forward_ms"], r["backward_ms"]], True) for r in found]
    return bars("One layer, ms", [("forward", COLORS[0]), ("backward", COLORS[1])], rows, "ms")


def models(result):
    """For each model a bar a recipe, of tokens/s, in pairs: the batch that all can hold, and the largest that each can."""
    parts, names = [], sorted({r["model"] for r in result["rows"].values()})
    for column, model in enumerate(names):
        left, rows = 170 + 650 * column, [r for r in result["rows"].values() if r["model"] == model]
        ways, most = list(dict.fromkeys(r["way"] for r in rows)), max(r["tokens_per_second"] for r in rows)
        parts += [text(left - 130, 30, f"{model}, tokens/s", 14, "start", DARK, "bold"),
                  text(left - 130, 48, "dark: the same batch for all; light: the largest that fits; sequences of 2048 tokens", 11.5, "start", LIGHT)]
        for row, way in enumerate(ways):
            pair = sorted((r for r in rows if r["way"] == way), key=lambda r: r["batch"])
            parts.append(text(left - 8, 85 + 44 * row, way, 11.5, "end", DARK))
            for i, (r, color) in enumerate(zip(pair, (COLORS[0], "#a9cdf2"))):
                y, width = 66 + 44 * row + 18 * i, 270 * r["tokens_per_second"] / most
                told = f"{r['tokens_per_second']:,.0f}, batch {r['batch']}, {r['mib'] * 2**20 / 1e9:.0f} GB"
                parts += [bar(left, y, width, 15, color), text(left + width + 6, y + 12, told, 11, "start", DARK)]
    return picture(40 + 650 * len(names), 76 + 44 * max(len({r["way"] for r in result["rows"].values()}), 1), parts)


TOKENS = 65536e-6  # millions a step of the convergence runs


def means(values, width):
    """(middle, mean) of neighbours, `width` at a time; what was skipped is left out."""
    for first in range(0, len(values) - width + 1, width):
        some = [v for v in values[first:first + width] if v is not None]
        if some:
            yield first + width / 2, sum(some) / len(some)


def last_losses(panel, rows, colors):
    """A recipe's last validation loss as it is read in training (full) and in BF16 (hollow), beside the band of BF16's seeds."""
    seeds = seeds_of_bf16(rows)
    panel.parts += [bar(panel.x(min(seeds)), panel.top, panel.x(max(seeds)) - panel.x(min(seeds)), panel.bottom - panel.top, "#e2e8f0"),
                    text(panel.x(min(seeds)), panel.bottom - 8, f" bf16, {len(seeds)} seeds", 11, "start", LIGHT)]
    panel.axes("nats a token", [(x, f"{x:g}") for x in ticks(*panel.x_range, 5)], [])
    for row, (name, color) in enumerate(colors.items()):
        y, losses = panel.top + 34 + 48 * row, [rows[name]["validation"][-1][1], rows[name].get("read_in_bf16")]
        panel.parts.append(text(panel.left + 6, y - 9, name, 11.5, "start", color, "bold"))
        panel.parts += [f'<circle cx="{panel.x(loss):.1f}" cy="{y}" r="5.5" fill="{fill}" stroke="{color}" stroke-width="2"/>'
                        for loss, fill in zip(losses, (color, "#ffffff")) if loss is not None]


def gaps(rows, colors, left, top, width, steps, title, note, dashed=None):
    """A panel of runs' training losses less that of bf16, from one step to another; `dashed`: a value to hold them against."""
    (first, last), base, length = steps, rows["bf16"]["train"], max(1, len(rows["bf16"]["train"]) // 40)
    lines = {}
    for name in colors:
        pairs = list(zip(rows[name]["train"], base))[:last] if name in rows else []
        points = means([None if None in pair else pair[0] - pair[1] for pair in pairs], length)
        lines[name] = [(step * TOKENS, gap) for step, gap in points if step >= first]
    lines = {name: points for name, points in lines.items() if points}
    values = [gap for points in lines.values() for _, gap in points] + [0, dashed or 0]
    low, high, x_range = min(values) - 0.001, max(values) + 0.001, (first * TOKENS, last * TOKENS)
    panel = Panel(left, top, width, 350, x_range, (low, high), title, f"means of {length} steps, from {first * TOKENS:.0f} million tokens on{note}")
    panel.axes("million tokens", [(x, f"{x:g}") for x in ticks(*x_range, 5)], ticks(low, high, 7))
    if dashed:
        panel.line([(x, dashed) for x in x_range], LIGHT, "5 4")
    panel.line([(x, 0) for x in x_range], DARK, "1 0")
    for name, points in lines.items():
        panel.line(points, colors[name])
    panel.names([(points[-1][1], name, colors[name]) for name, points in lines.items()])
    return panel.parts


def convergence(result):
    rows = result["rows"]
    steps = max(len(row["train"]) for row in rows.values())
    whole = {name: row for name, row in rows.items() if len(row["train"]) == steps}
    shown = {name: whole[name] for name in RECIPES if name in whole} or whole  # seeds and ablations are in the table
    colors = dict(zip(shown, COLORS * len(shown)))
    late = [loss for row in shown.values() for step, loss in row["validation"] if step >= steps // 5]
    low, high, last = min(late) - 0.02, max(late) + 0.02, steps * TOKENS
    left = Panel(56, 70, 300, 350, (last / 5, last), (low, high), "Validation loss, nats a token",
                 "GPT-2 124M; every recipe, from a fifth of the run on")
    left.axes("million tokens", [(x, f"{x:g}") for x in ticks(last / 5, last, 5)], ticks(low, high, 7))
    for name, row in shown.items():
        left.line([(step * TOKENS, loss) for step, loss in row["validation"] if step >= steps // 5], colors[name])
    parts, base = left.parts, rows.get("bf16")
    ends = [loss for row in whole.values() for loss in (row["validation"][-1][1], row.get("read_in_bf16")) if loss is not None]
    if base:
        middle = Panel(420, 70, 300, 350, (min(ends) - 0.002, max(ends) + 0.002), (0, 1), "Where it ends",
                       "full: as trained; hollow: the same weights read in BF16")
        last_losses(middle, whole, colors)
        parts += middle.parts
        late, paper = (steps / 3, steps), PAPER_GAP["coat"]
        parts += gaps(rows, {name: color for name, color in colors.items() if name != "bf16"}, 800, 70, 400, late,
                      "Training loss less that of bf16, same seed and data", f"; dashes: the paper's {paper:+.3f} for COAT", paper)
        of_coat = ("te", "activations only", "optimizer only", "without expansion", "coat")
        parts += gaps(rows, dict(zip(of_coat, COLORS[1:])), 56, 550, 460, late, "The same of COAT's parts", "; te: FP8 in linear layers alone")
        groups = sorted((name for name in rows if " in groups of " in name), key=place)
        last = max((len(rows[name]["train"]) for name in groups), default=steps)
        parts += gaps(rows, {"coat": DARK, **dict(zip(groups, [*COLORS[:5], LIGHT] * len(groups)))}, 740, 550, 350, (last / 10, last),
                      "The same of other group sizes", "; coat: activations in 16, moments in 128")
    return picture(1330, 960, parts)


def finetune(result):
    rows = result["rows"]
    points = [point for row in rows.values() for point in row["validation"]]
    low, high, last = min(loss for _, loss in points) - 0.05, max(loss for _, loss in points) + 0.05, max(step for step, _ in points)
    panel = Panel(66, 70, 400, 330, (0, last), (low, high), "Fine-tuning: validation loss, nats a token", "trained in one recipe, then in another")
    panel.axes("step", [(x, f"{x:g}") for x in ticks(0, last, 5)], ticks(low, high, 6))
    colors = dict(zip(rows, COLORS))
    for name, row in rows.items():
        panel.line(row["validation"], colors[name])
    panel.names([(row["validation"][-1][1], f"{name} {row['validation'][-1][1]:.3f}", colors[name]) for name, row in rows.items()])
    base = dict(rows.get("bf16, then bf16", {"validation": []})["validation"])
    gaps = {name: [(step, loss - base[step]) for step, loss in row["validation"] if step in base] for name, row in rows.items()}
    if not base:
        return picture(680, 460, panel.parts)
    values = [gap for points in gaps.values() for _, gap in points]
    low, high = min(values) - 0.001, max(values) + 0.001
    right = Panel(740, 70, 400, 330, (0, last), (low, high), "The same, less that of bf16, then bf16",
                  "step 0: before fine-tuning, read in the second recipe")
    right.axes("step", [(x, f"{x:g}") for x in ticks(0, last, 5)], ticks(low, high, 6))
    for name, points in gaps.items():
        right.line(points, colors[name])
    right.names([(points[-1][1], name, colors[name]) for name, points in gaps.items()])
    return picture(1310, 460, panel.parts + right.parts)


def figure(name, result):
    return {"moments": moments, "activations": activations, "memory": memory, "timing": timing, "layer": layer, "models": models,
            "convergence": convergence, "finetune": finetune}[name.split("-")[0]](result)
