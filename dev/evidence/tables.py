"""The tables of dev/RESULTS.md, from what dev/evidence/run.py measured: the paper's row beside ours. No tables are kept by hand."""
import re

WAYS = ["E4M3", "E4M3 + expansion", "E5M2", "E5M2 + expansion"]
PAPER_TABLE_1 = [[20.10, 18.08, 25.65, 18.16], [15.13, 12.31, 21.96, 12.43], [37.02, 35.96, 40.30, 36.00], [17.79, 15.48, 23.84, 15.57]]
PAPER_TABLE_2 = [("paper: BF16", 4, 8, 2, 3, 5.66, 22.66), ("paper: TE", 2, 8, 2, 3, 3.33, 18.33), ("paper: COAT", 1, 4, 2, 3, 3.33, 13.33)]
PAPER_FIGURE_4B = {(11008, 16384): (1.37, 0.10), (11008, 8192): (0.89, 0.08), (4096, 16384): (0.55, 0.07), (4096, 8192): (0.32, 0.06)}
GRANULARITIES = ["per tensor", "1x16", "1x128", "4x4"]


def table(head, rows):
    lines = [head, ["---"] * len(head)] + rows
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines] + [""]


def origin(result, figure, before=""):
    """What was run, and the figure of it."""
    ran = "; ".join(f"`{command}`" for command in result["commands"])
    trained = f" (trained at {result['trained_at']})" if result["trained_at"] not in (None, result["commit"]) else ""
    return [f"{before}Run on {result['where']}, commit {result['commit']}{trained}: {ran}.", "", f"![{figure}](results/evidence-{figure}.svg)", ""]


def short(x):
    """Three figures of a number, without an exponent."""
    return f"{float(f'{x:.3g}'):,.0f}" if x >= 100 else f"{x:.3g}"


def of_part(results, part):
    return [(name, result) for name, result in results.items() if name == part or name.startswith(part + "-")]


def ranges(results):
    lines = []
    for name, result in of_part(results, "moments"):
        lines += origin(result, name, f"**{result['training']}**, step {result['step']}, {result['elements']:,} elements of matrices. ")
        rows = []
        for moment, title in (("m", "first moment"), ("v", "second moment")):
            r = result[moment]
            before, after = ({at: 10 ** r[kind][at] for at in ("median", "p10", "p90")} for kind in ("log10_range", "log10_range_expanded"))
            spreads = [f"{short(h['median'])} ({short(h['p10'])} to {short(h['p90'])})" for h in (before, after, r["k"])]
            rows.append([title, f"{r['groups']:,}", *spreads,
                         "R below 1,000 to 10,000; k 1 to 3, mean 2" if moment == "m" else "R below 10; k 5 to 15, mean 10, a few at 1.5"])
        lines += table(["median (10% to 90%) of groups of 128", "groups", "range R", "R^k, of E4M3's 2.29e5", "k", "paper"], rows)
    return lines


def moment_errors(results):
    lines = []
    for name, result in of_part(results, "moments"):
        lines += [f"**{result['training']}**, step {result['step']} (the run above).", ""]
        errors = next(e for e in result["errors"] if e["group"] == 128)
        lines += table(["one moment alone, % of its root mean square", *WAYS],
                       [[title, *(f"{100 * errors[m][way]['root_noise_to_signal']:.2f}" for way in WAYS)] for m, title in (("m", "m"), ("v", "v"))])
        base = errors["update"]["E4M3"]["E4M3"]["mean_square_error"]
        rows = []
        for first, published in zip(WAYS, PAPER_TABLE_1):
            ours = [1e5 * errors["update"][first][second]["mean_square_error"] for second in WAYS]
            rows.append([f"{first}: ours, 1e-5", *(f"{mse:.2f} (x {mse / (1e5 * base):.2f})" for mse in ours)])
            rows.append([f"{first}: paper", *(f"{mse:.2f} (x {mse / PAPER_TABLE_1[0][0]:.2f})" for mse in published)])
        lines += table(["mean square error of m / sqrt(v); m down, v across", *WAYS], rows)
        rows = []
        for e in result["errors"]:
            plain, expanded = (e["update"][way][way]["mean_square_error"] for way in WAYS[:2])
            rows.append([e["group"], f"{plain * 1e5:.2f}", f"{expanded * 1e5:.2f}", f"{plain / expanded:.2f}", f"{2 + 2 * 8 / e['group']:.3f}"])
        lines += table(["group size", "m / sqrt(v): both E4M3, 1e-5", "both expanded, 1e-5", "times less", "bytes a parameter, expanded"], rows)
    return lines


def activations(results):
    lines = []
    for name, result in of_part(results, "activations"):
        size = f"{result['sequences']} x {result['tokens_each']} held-out tokens"
        lines += origin(result, name, f"**{result['training']}**, step {result['step']}, {size}. ")
        layers = sorted({0, result["layers"] // 2, result["layers"] - 1})
        exact = result["streams"][0]["loss"]
        rows = [[s["way"], *(f"{100 * s['noise_to_signal'][layer]:.2g}" for layer in layers), f"{s['loss'] - exact:+.5f}"] for s in result["streams"]]
        lines += table(["everything in", *(f"error of the stream after layer {layer + 1}, %" for layer in layers), "loss less FP32's"], rows)
        rows = []
        for tensor in dict.fromkeys(t["tensor"] for t in result["tensors"]):
            cells = []
            for granularity in GRANULARITIES:
                found = [t["noise_to_signal"][granularity] for t in result["tensors"] if t["tensor"] == tensor]
                cells.append(f"{100 * sum(found) / len(found):.4f} ({100 * max(found):.4f})")
            rows.append([tensor, *cells])
        lines += table(["one tensor alone: mean (and worst) layer, %", *GRANULARITIES], rows)
    return lines


def amax_times(results):
    result = results.get("timing", {})
    rows = []
    for r in result.get("amax", []):
        published = PAPER_FIGURE_4B[(r["columns"], r["tokens"])]
        ours = [r["whole_tensor_ms"], r["group_maxima_ms"], r["producer_with_ms"] - r["producer_without_ms"]]
        rows.append([f"{r['columns']} x {r['tokens']}", *(f"{ms:.2f}" for ms in published), f"{published[0] / published[1]:.1f}",
                     *(f"{ms:.4f}" for ms in ours), f"{ours[0] / ours[1]:.1f}", f"{r['producer_without_ms']:.3f}"])
    head = ["shape", "paper: whole tensor, ms", "paper: group scaling", "times less", "ours: whole tensor, ms", "ours: of group maxima",
            "ours: added to the producer", "times less, by group maxima", "the producer without it"]
    return origin(result, "timing") + table(head, rows) if rows else []


def memory(results):
    measured = {(r["name"], r["recompute"]): r["total"] for r in results.get("timing", {}).get("memory", [])}
    result = results.get("memory")
    if not result:
        return []
    published_bf16 = PAPER_TABLE_2[0][-1]
    rows = [[name, *(f"{u:g}" for u in columns), f"{total:g}", "", f"{published_bf16 / total:.2f}", "", ""]
            for name, *columns, total in PAPER_TABLE_2]
    for r in result["rows"]:
        on_card = measured.get((r["name"], r["recompute"]))
        bf16 = next(b["total"] for b in result["rows"] if b["name"] == "bf16" and b["recompute"] == r["recompute"])
        rows.append([r["name"] + (", outputs computed again" if r["recompute"] else ""),
                     *(f"{r['U'].get(column, 0):.2f}" for column in ("norm", "activation function", "RoPE", "attention", "linear")),
                     f"{r['total']:.2f}",
                     f"{on_card:.2f}" if on_card is not None else "not run yet", f"{published_bf16 / r['total']:.2f}", f"{bf16 / r['total']:.2f}",
                     f"{r['bytes'] / 2**20:,.0f}"])
    head = [f"U = 2BTC bytes; a layer of {result['model']}", "norm", "activation function", "RoPE", "attention", "linear", "total", "on the card",
            "times less than the paper's BF16", "times less than our bf16", f"MiB at {result['batch']} x {result['seq']}"]
    return origin(result, "memory") + table(head, rows)


def products(results):
    result = results.get("timing", {})
    rows, plain = [], {}
    sizes = list(dict.fromkeys(r["side"] for r in result.get("products", [])))
    ways = [("product_ms", "product alone"), ("with_x_ms", "with x quantized"), ("with_x_and_w_ms", "with x and w quantized")]
    for r in result.get("products", []):
        for key, title in ways:
            if key in r:
                plain.setdefault(f"{r['scaling']}, {title}" if r["scaling"] != "bf16" else "bf16", {})[r["side"]] = 2e-9 * r["side"] ** 3 / r[key]
    if not plain:
        return []
    for name, rates in plain.items():
        paying = [n for n in sizes if all(rates[m] > plain["bf16"][m] for m in sizes if m >= n)]
        pays = "" if name == "bf16" else f"from {paying[0]}" if paying else "nowhere"
        rows.append([name, *(f"{rates[n]:.0f}" for n in sizes), pays])
    return origin(result, "timing") + table(["TFLOP/s, all three sides", *sizes, "faster than bf16"], rows)


TABLES = {"ranges": (ranges, "moments"), "moment errors": (moment_errors, "moments"), "activations": (activations, "activations"),
          "amax": (amax_times, "timing"), "memory": (memory, "memory"), "products": (products, "timing")}


def fill(text, results):
    """The page with every <!-- NAME --> ... <!-- end --> renewed."""
    def one(match):
        make, part = TABLES[match.group(1)]
        where = " on a machine with a GPU." if part == "timing" else "."
        lines = make(results) or [f"Not run yet: `python3 dev/evidence/run.py {part}`{where}", ""]
        return f"<!-- {match.group(1)} -->\n" + "\n".join(lines) + "<!-- end -->"
    return re.sub(r"<!-- (" + "|".join(TABLES) + r") -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)
