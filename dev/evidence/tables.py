"""The tables of dev/RESULTS.md, from what dev/evidence/run.py measured: the paper's row beside ours. No tables are kept by hand."""
import re
import statistics

WAYS = ["E4M3", "E4M3 + expansion", "E5M2", "E5M2 + expansion"]
PAPER_TABLE_1 = [[20.10, 18.08, 25.65, 18.16], [15.13, 12.31, 21.96, 12.43], [37.02, 35.96, 40.30, 36.00], [17.79, 15.48, 23.84, 15.57]]
PAPER_TABLE_2 = [("paper: BF16", 4, 8, 2, 3, 5.66, 22.66), ("paper: TE", 2, 8, 2, 3, 3.33, 18.33), ("paper: COAT", 1, 4, 2, 3, 3.33, 13.33)]
PAPER_FIGURE_4B = {(11008, 16384): (1.37, 0.10), (11008, 8192): (0.89, 0.08), (4096, 16384): (0.55, 0.07), (4096, 8192): (0.32, 0.06)}
PAPER_TABLE_6 = {  # hidden size and tokens: forward ms, backward ms, MB
    (2048, 2048): {"bf16": (3.36, 8.47, 1457), "te": (2.96, 5.32, 1210), "coat": (2.88, 5.16, 883)},
    (2048, 4096): {"bf16": (6.88, 17.24, 2914), "te": (5.94, 11.29, 2420), "coat": (5.89, 10.82, 1766)},
    (4096, 2048): {"bf16": (7.77, 18.78, 2914), "te": (6.19, 11.79, 2420), "coat": (5.89, 10.96, 1766)},
    (4096, 4096): {"bf16": (16.37, 38.43, 5828), "te": (12.66, 24.58, 4840), "coat": (12.16, 23.44, 3533)}}
LAYERS = [((*shape, 4), paper) for shape, paper in PAPER_TABLE_6.items()] + [((4096, 2048, 8), {})]  # with sequences; the last is the peers' shape
PAPER_GAP = {"coat": 0.013, "te": 0.006}  # nats of training loss above BF16, OLMo-1B after 22 billion tokens
RECIPES = ["bf16", "te", "colossal", "rowwise", "deepseek", "coat"]
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
    measured = {(r["recipe"], True): r["saved_bytes_by_the_driver"] / (2 * r["batch"] * r["seq"] * r["hidden"])
                for r in results.get("layer", {"rows": {}})["rows"].values() if (r["hidden"], r["seq"], r["batch"]) == (4096, 2048, 8)}
    measured.update({(r["name"], r["recompute"]): r["total"] for r in results.get("timing", {}).get("memory", [])})
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
    others = [results[part] for part in ("timing", "layer") if part in results]
    lines = origin(result, "memory")
    if others:
        lines += ["On the card: " + "; ".join(f"`{r['commands'][0]}` on {r['where']}, commit {r['commit']}" for r in others) + ".", ""]
    return lines + table(head, rows)


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


def layer(results):
    result = results.get("layer")
    if not result:
        return []
    found = {(r["hidden"], r["seq"], r["batch"], r["recipe"]): r for r in result["rows"].values()}
    rows = []
    for (hidden, seq, batch), paper in LAYERS:
        base, theirs = found.get((hidden, seq, batch, "bf16")), sum(paper["bf16"][:2]) if paper else 0
        for recipe in RECIPES:
            cells = [f"{hidden}, {batch} x {seq}", recipe]
            if recipe in paper:
                forward, backward, mb = paper[recipe]
                cells += [f"{forward:.2f} + {backward:.2f} = {forward + backward:.2f} (x {theirs / (forward + backward):.2f})", mb]
            else:
                cells += ["", ""]
            r = found.get((hidden, seq, batch, recipe))
            if not r:
                rows.append([*cells, "not run yet", *[""] * 3])
                continue
            both = r["forward_ms"] + r["backward_ms"]
            times = f" (x {(base['forward_ms'] + base['backward_ms']) / both:.2f})" if base else ""
            less = f" (x {base['saved_bytes'] / r['saved_bytes']:.2f})" if base else ""
            rows.append([*cells, f"{r['forward_ms']:.2f} + {r['backward_ms']:.2f} = {both:.2f}{times}", f"{r['once_a_step_ms']:.2f}",
                         f"{r['saved_bytes'] / 1e6:,.0f}{less}", f"{r['saved_bytes_by_the_driver'] / 1e6:,.0f}"])
    head = ["hidden size, sequences", "recipe", "paper: forward + backward, ms", "paper: MB", "ours: forward + backward, ms", "ours: once a step, ms",
            "ours: MB by the plan", "by the driver"]
    return origin(result, "layer") + table(head, rows)


def models(results):
    result = results.get("models")
    if not result:
        return []
    found = list(result["rows"].values())
    lines = origin(result, "models")
    for model in sorted({r["model"] for r in found}, key=lambda name: next(r["batch"] for r in found if r["model"] == name), reverse=True):
        ways = list(dict.fromkeys(r["way"] for r in found if r["model"] == model))
        batches = {way: sorted(r["batch"] for r in found if r["model"] == model and r["way"] == way) for way in ways}
        common = statistics.mode(batch for of_way in batches.values() for batch in of_way)
        of = {(r["way"], r["batch"]): r for r in found if r["model"] == model}
        slowest, longest = of.get(("bf16", common)), of.get(("bf16", max(batches.get("bf16", [0]))))
        rows = []
        for way in ways:
            at, most = of.get((way, common)), of[way, batches[way][-1]]
            cells = [way]
            if at:
                faster = f" (x {at['tokens_per_second'] / slowest['tokens_per_second']:.2f})" if slowest else ""
                cells += [f"{at['tokens_per_second']:,.0f}{faster}", f"{at['mib']:,} ({at['mib'] * 2**20 / 1e9:.1f} GB)"]
            else:
                cells += ["not run yet", ""]
            if most["batch"] != common:
                faster = f" (x {most['tokens_per_second'] / longest['tokens_per_second']:.2f})" if longest else ""
                cells += [most["batch"], f"{most['tokens_per_second']:,.0f}{faster}", f"{1e6 / most['tokens_per_second']:.2f}", f"{most['mib']:,}"]
            else:
                cells += ["not run yet", "", "", ""]
            rows.append(cells)
        if model == "llama-2-7b":
            rows += [["paper, an H100 of 80 GB: BF16 and TE, 1 x 2048", "", "out of memory", "none", "", "", ""],
                     ["paper, an H100 of 80 GB: COAT, 1 x 2048", "5,906", "79.3 GB", 1, "5,906", f"{1e6 / 5906:.0f}", ""]]
        lines += table([f"{model}, {common} x 2048 tokens", "tokens/s", "most memory in use, MiB", "largest batch", "tokens/s there", "us a token",
                        "memory, MiB"], rows)
    return lines


def losses(row):
    return row["validation"][-1][1]


def seeds_of_bf16(rows):
    return [losses(row) for name, row in rows.items() if name.split()[0] == "bf16"]


def same_seed(name):
    """The name of BF16's run of a run's seed."""
    return "bf16" + "".join(name.partition(" seed ")[1:])


def place(name):
    """Recipes in their order, then ablations; numbers in names by their size."""
    return RECIPES.index(name.split()[0]) if name.split()[0] in RECIPES else len(RECIPES), re.sub(r"\d+", lambda n: n[0].zfill(4), name)


BLOCK = 30  # steps whose mean is taken for independent of the next ones', as those of single steps are not


def gap(rows, name, end):
    """Mean difference of training losses from BF16's of the same seed, over the tenth of its steps that ends with `end`; and its standard error."""
    base = rows.get(same_seed(name))
    if not base or name.startswith("bf16") or end > len(rows[name]["train"]):
        return None
    first = end - len(base["train"]) // 10
    pairs = zip(rows[name]["train"][first:end], base["train"][first:end])
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    blocks = [statistics.mean(differences[i:i + BLOCK]) for i in range(0, len(differences) - BLOCK + 1, BLOCK)]
    return statistics.mean(differences), statistics.stdev(blocks) / len(blocks) ** 0.5


ABOVE = 0.03  # nats above the mean of BF16's last losses, which every recipe worth its name reaches before its last step


def seconds_to(row, target):
    """Until the validation loss, straight between two of its points, falls to the target; at the run's median step."""
    for (step, loss), (later, lower) in zip(row["validation"], row["validation"][1:]):
        if loss > target >= lower:
            return (step + (later - step) * (loss - target) / (loss - lower)) * row["ms"] / 1000
    return None


def convergence(results):
    result = results.get("convergence")
    if not result:
        return []
    rows = result["rows"]
    text = result["text"]
    steps = max(len(row["train"]) for row in rows.values())
    whole = {name: row for name, row in rows.items() if len(row["train"]) == steps}  # ablations are stopped earlier
    tokens = 65536 * steps
    lines = [f"{text['text']}: {text['files']:,} files of {text['bytes'] / 1e6:,.0f} MB, {text['train_tokens'] / 1e6:.1f} million tokens of a BPE of "
             f"16,384 to train on, so that {tokens / 1e6:,.0f} million are {tokens / text['train_tokens']:.1f} passes, and "
             f"{text['held_out_tokens'] / 1e6:.2f} million held out. `./train {result['shared']}` and what the row says"
             + (f", then `./train --model CHECKPOINT {result['read']}`" if "read" in result else "") + ".", ""]
    lines += origin(result, "convergence")
    seeds = seeds_of_bf16(whole)
    mean = statistics.mean(seeds) if seeds else None
    if len(seeds) > 1:
        lines += [f"`bf16` over {len(seeds)} seeds: {min(seeds):.4f} to {max(seeds):.4f}, mean {mean:.4f}, standard deviation "
                  f"{statistics.stdev(seeds):.4f}.", ""]
    target = mean + ABOVE if seeds else None
    cells = []
    for name, row in sorted(whole.items(), key=lambda item: place(item[0])):
        apart, reached = gap(rows, name, steps), seconds_to(row, target) if target else None
        base = rows.get(same_seed(name))
        read = losses(row) if name.startswith("bf16") else row.get("read_in_bf16")
        published = PAPER_GAP.get(name)
        cells.append([name, f"`{row['flags']}`", f"{losses(row):.4f}", f"{losses(row) - mean:+.4f}" if mean else "",
                      f"{losses(row) - losses(base):+.4f}" if base and base is not row else "",
                      f"{read:.4f}" if read else "not run yet",
                      f"{apart[0]:+.4f} ({apart[1]:.4f})" if apart else "", f"{published:+.3f}" if published else "",
                      f"{reached:.0f}" if reached else "not reached", f"{row['tokens_per_second']:,.0f}", f"{row['mib']:,}" if row["mib"] else "",
                      row["commit"]])
    head = ["run", "flags", "validation loss", "less the mean of `bf16`", "less `bf16`, same seed", "its weights read in BF16",
            "training loss less that of `bf16`, same seed, mean of the last tenth (its standard error)", "paper, 22 billion tokens",
            f"seconds to a validation loss of {target:.3f}" if target else "seconds", "tokens/s", "most memory in use, MiB", "commit"]
    lines += table(head, cells)
    ends = [steps * fifths // 5 for fifths in range(1, 6)]
    cells = []
    for name, row in sorted(rows.items(), key=lambda item: (item[0] not in whole, place(item[0]))):
        gaps = [gap(rows, name, end) for end in ends]
        if any(gaps):
            cells.append([name, f"`{row['flags']}`", *(f"{at[0]:+.4f} ({at[1]:.4f})" if at else "" for at in gaps)])
    head = ["training loss less that of `bf16`, same seed, mean (standard error)", "flags", *(f"steps {end - steps // 10} to {end}" for end in ends)]
    return lines + (table(head, cells) if cells else [])


def finetune(results):
    result = results.get("finetune")
    if not result:
        return []
    text = result["text"]
    lines = [f"{text['text']}: {text['files']:,} files of {text['bytes'] / 1e6:,.0f} MB, {text['train_tokens'] / 1e6:.1f} million tokens of the same "
             f"vocabulary. `./train --model CHECKPOINT --recipe RECIPE {result['shared']}`.", ""]
    lines += origin(result, "finetune")
    rows = [[name, f"{row['validation'][0][1]:.4f}", f"{row['validation'][-1][1]:.4f}",
             f"{statistics.mean(loss for loss in row['train'][-40:] if loss is not None):.4f}"]
            for name, row in result["rows"].items()]
    return lines + table(["trained in, then fine-tuned in", "validation loss before", "after", "training loss, mean of the last 40 steps"], rows)


def ablations(results):
    result = results.get("ablations")
    if not result:
        return []
    losses_of = {}  # by name, then by seed
    for row in result["rows"].values():
        losses_of.setdefault(row["name"], {})[row["seed"]] = losses(row)
    seeds = sorted({seed for of in losses_of.values() for seed in of})

    def apart(name, base):
        """Mean difference of the seeds that both have run, and its standard error."""
        differences = [loss - losses_of[base][seed] for seed, loss in losses_of[name].items() if seed in losses_of.get(base, {})]
        if len(differences) < 2:
            return ""
        return f"{statistics.mean(differences):+.4f} ({statistics.stdev(differences) / len(differences) ** 0.5:.4f})"
    cells = []
    for name, of in losses_of.items():
        flags = next(row["flags"] for row in result["rows"].values() if row["name"] == name)
        cells.append([name, f"`{flags}`", *(f"{of[seed]:.4f}" if seed in of else "not run yet" for seed in seeds),
                      "" if name == "bf16" else apart(name, "bf16"), "" if name == "coat" else apart(name, "coat")])
    head = ["validation loss, nats a byte", "flags", *(f"seed {seed}" for seed in seeds), "less `bf16`, same seeds: mean (its standard error)",
            "less `coat`"]
    return [f"`./train {result['shared']}`, the flags of the row, and seeds. Run on {result['where']}, commit {result['commit']}: "
            f"`{result['commands'][0]}`.", "", *table(head, cells)]


TABLES = {"ranges": (ranges, "moments"), "moment errors": (moment_errors, "moments"), "activations": (activations, "activations"),
          "amax": (amax_times, "timing"), "memory": (memory, "memory"), "products": (products, "timing"), "layer": (layer, "layer"),
          "models": (models, "models"), "convergence": (convergence, "convergence"), "finetune": (finetune, "finetune"),
          "ablations": (ablations, "ablations")}
ON_A_GPU = {"timing", "layer", "models", "convergence", "finetune"}


def fill(text, results):
    """The page with every <!-- NAME --> ... <!-- end --> renewed."""
    def one(match):
        make, part = TABLES[match.group(1)]
        where = " on a machine with a GPU." if part in ON_A_GPU else "."
        lines = make(results) or [f"Not run yet: `python3 dev/evidence/run.py {part}`{where}", ""]
        return f"<!-- {match.group(1)} -->\n" + "\n".join(lines) + "<!-- end -->"
    return re.sub(r"<!-- (" + "|".join(TABLES) + r") -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)
