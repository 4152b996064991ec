#!/usr/bin/env python3
"""Draws what `make bench` measured (build/bench.json) as one SVG: a bar per operator, a panel per run.

    python3 dev/plot_bench.py build/bench.json [another.json ...] > bench.svg

The length of a bar is the operator's milliseconds a step; the dark part is its floor, the least that this card's measured ceilings allow.
The bar at the top of a panel is the whole step, cut up by kind of work. Only Python's standard library is needed.
"""
import json
import sys

WIDTH, LEFT, RIGHT, ROW, HEAD = 1060, 340, 230, 21, 136
COLORS = {"linear layers": ("#0b6bcb", "#a9cdf2"), "attention": ("#6b4fbb", "#cdc2ec"), "between the products": ("#2e8b57", "#b3dcc3"),
          "embedding, head, loss": ("#b7791f", "#ecd3a4"), "optimizer": ("#d1495b", "#f2bcc4")}
REST = "#cbd5e0"


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def text(x, y, words, size=12, anchor="start", color="#3b4252", weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(words)}</text>'


def bar(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{color}"/>'


def by_group(operators):
    groups = {}
    for o in operators:
        groups.setdefault(o["group"], []).append(o)
    return groups


def whole_step(run, groups, top):
    """The step as one stacked bar with a legend under it."""
    step, x, svg = run["step"]["seconds"], 24.0, []
    scale, label = (WIDTH - 48) / step, 24.0
    parts = [(name, sum(o["count"] * o["seconds"] for o in group), COLORS[name][0]) for name, group in groups.items()]
    named = sum(seconds for _, seconds, _ in parts)
    if step > named:
        parts.append(("the rest", step - named, REST))
    scale *= step / max(step, named)
    for name, seconds, color in parts:
        svg.append(bar(x, top, seconds * scale, 20, color))
        x += seconds * scale
        words = f"{name} {seconds * 1e3:.1f} ms"
        svg += [bar(label, top + 30, 10, 10, color), text(label + 15, top + 39, words, 11)]
        label += 30 + 6.2 * len(words)
    return svg


def operators(groups, top):
    """A row per operator, in the order of the bench."""
    longest = max(o["count"] * o["seconds"] for group in groups.values() for o in group)
    scale, y, svg = (WIDTH - LEFT - RIGHT) / longest, top, []
    for name, group in groups.items():
        dark, light = COLORS[name]
        svg.append(text(24, y + 14, name, 12, "start", dark, "bold"))
        for o in group:
            y += ROW
            total, floor = o["count"] * o["seconds"], o["count"] * (o["floor"] or 0)
            percent = f", {100 * floor / total:.0f}%" if floor else ""
            svg += [text(LEFT - 8, y + 13, o["name"], 11.5, "end"), bar(LEFT, y + 2, total * scale, ROW - 6, light),
                    bar(LEFT, y + 2, min(floor, total) * scale, ROW - 6, dark),
                    text(LEFT + total * scale + 6, y + 13, f"{total * 1e3:.2f} ms{percent}", 11.5),
                    text(WIDTH - 24, y + 13, f'{o["count"]:.4g} x {o["seconds"] * 1e6:.0f} us', 11, "end", "#94a3b8")]
        y += ROW + 6
    return svg, y


def panel(report, run, top):
    groups, step = by_group(run["operators"]), run["step"]
    shape = f'{run["batch"]} x {run["seq"]} tokens' + (f' x {run["accumulate"]} micro-batches' if run["accumulate"] > 1 else "")
    svg = [text(24, top + 28, f'{run["model"]}, {run["recipe"]}, {shape}', 17, "start", "#1a202c", "bold"),
           text(24, top + 46, f'{report["device"]}: {step["seconds"] * 1e3:.1f} ms a step, {step["tokens_per_second"]:,.0f} tokens/s; '
                f'{step["seconds"] / step["floors"]:.2f} x the sum of the floors, '
                f'{step["seconds"] / step["floors_with_products_as_measured"]:.2f} x with matrix products and attention as measured',
                12, "start", "#718096")]
    svg += whole_step(run, groups, top + 60)
    rows, end = operators(groups, top + HEAD - 16)
    return svg + rows, end + 18


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read ({error}); make it with make bench.")


def draw(paths):
    svg, y = [], 0
    for path in paths:
        report = read(path)
        try:
            for run in report["runs"]:
                rows, y = panel(report, run, y)
                svg += rows
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            sys.exit(f"{path} is not what make bench writes ({type(error).__name__}: {error}); make it with make bench.")
    note = ("Bars: milliseconds a step. Dark: the floor, bytes at the rate of a copy or FLOPs at that of a large matrix product, "
            "both measured on this card.")
    svg.append(text(24, y + 4, note, 11.5, "start", "#718096"))
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 22:.0f}" width="{WIDTH}" height="{y + 22:.0f}" '
            'font-family="Helvetica, Arial, sans-serif">', '<rect width="100%" height="100%" fill="#ffffff"/>']
    return "\n".join(head + svg + ["</svg>"])


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__.strip())
    print(draw(sys.argv[1:]))


if __name__ == "__main__":
    main()
