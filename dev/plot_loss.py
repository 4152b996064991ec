#!/usr/bin/env python3
"""Draws the loss curves of runs from their logs (./train --log FILE) as one SVG.

    python3 dev/plot_loss.py fp32.jsonl coat.jsonl > loss.svg

A thin line is the training loss of each step, smoothed; dots joined by a thick line are the validation loss. Each run is named at its
end by its recipe, or as NAME=FILE says. Only Python's standard library is needed.
"""
import json
import math
import os
import sys

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 54, 52
CURVES = {"step": "train", "validation": "validation"}  # a log's line, and the curve that it is a point of
COLORS = ["#0b6bcb", "#d1495b", "#2e8b57", "#b7791f", "#6b4fbb", "#4a5568"]


def read(argument):
    """One run: {"name", "train": {step: loss}, "validation": {step: loss}}. A step that a resumed run did again counts once."""
    parts = argument.split("=")  # names and paths may have some of their own: the longest path that exists is meant
    cut = next((i for i in range(len(parts)) if os.path.exists("=".join(parts[i:]))), len(parts) - 1)
    name, path = "=".join(parts[:cut]), "=".join(parts[cut:])
    run = {"name": name, "train": {}, "validation": {}}
    try:
        with open(path, encoding="utf-8") as log:
            for line in (json.loads(line) for line in log if line.strip()):
                if line["kind"] == "settings":
                    run["name"] = name or str(line["recipe"])
                    for curve in CURVES.values():  # a resumed run begins again at its checkpoint
                        run[curve] = {step: loss for step, loss in run[curve].items() if step <= line["step"]}
                if line["kind"] in CURVES and line["loss"] is not None:  # a loss that is no number is null
                    run[CURVES[line["kind"]]][int(line["step"])] = float(line["loss"])
    except OSError as error:
        sys.exit(f"{path} cannot be read ({error.strerror}); make it with ./train --log {path}.")
    except (KeyError, TypeError, ValueError):
        sys.exit(f"{path} is not a log of ./train in JSON lines; make one with ./train --log {path}.")
    if max(run["train"], default=0) < 1:
        sys.exit(f"{path} has no steps after 0; give the log of a run that trained.")
    return run


def smoothed(points):
    """Exponential mean over about 10 steps, without its bias at the start."""
    keep, mean, weight, out = 0.9, 0.0, 0.0, []
    for step, loss in sorted(points.items()):
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        out.append((step, mean / weight))
    return out


def ticks(low, high, count):
    """Round numbers in [low, high], about count of them."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    spacing = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / spacing - 1e-9)
    return [n * spacing for n in range(first, math.floor(high / spacing + 1e-9) + 1)]


def spread(labels, gap, bottom):
    """Moves labels (y, ...) apart so that they stay readable, and all of them up if the last would leave the picture."""
    if not labels:
        return []
    labels = sorted(labels)
    for i in range(1, len(labels)):
        labels[i][0] = max(labels[i][0], labels[i - 1][0] + gap)
    excess = max(0, labels[-1][0] - bottom)
    return [[label[0] - excess] + label[1:] for label in labels]


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def draw(runs):
    losses = [loss for run in runs for curve in ("train", "validation") for loss in run[curve].values()]
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    last = max(max(run["train"]) for run in runs)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def line(points, color, width, opacity):
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return (f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" '
                f'stroke-linejoin="round" stroke-linecap="round"/>')

    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#3b4252">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
           f'<text x="{LEFT}" y="26" font-size="17" font-weight="bold" fill="#1a202c">Loss, nats per token</text>',
           f'<text x="{LEFT}" y="44" font-size="12" fill="#718096">dots: validation; thin: training, smoothed over about 10 steps</text>']
    for loss in ticks(low, high, 6):
        svg.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#e8ecf1"/>')
        svg.append(f'<text x="{LEFT - 10}" y="{y(loss) + 4.5:.1f}" text-anchor="end">{loss:g}</text>')
    for step in ticks(0, last, 6):
        svg.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step:g}</text>')
    svg.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" stroke="#a0aec0"/>')
    svg.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>')

    labels = []
    for run, color in zip(runs, COLORS * len(runs)):
        svg.append(line(smoothed(run["train"]), color, 1.2, 0.55))
        validation = sorted(run["validation"].items())
        svg.append(line(validation, color, 2.2, 1))
        svg += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3.4" fill="{color}" stroke="#ffffff"/>' for step, loss in validation]
        step, loss = validation[-1] if validation else max(run["train"].items())
        labels.append([y(loss), f'{escape(run["name"])}  {loss:.3f}', color, x(step)])
    for at, text, color, end in spread(labels, 18, HEIGHT - BOTTOM - 10):
        svg.append(f'<text x="{end + 12:.1f}" y="{at + 4.5:.1f}" font-weight="bold" fill="{color}">{text}</text>')
    return "\n".join(svg + ["</svg>"])


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__.strip())
    print(draw([read(argument) for argument in sys.argv[1:]]))


if __name__ == "__main__":
    main()
