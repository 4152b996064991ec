"""The tables of dev/RESULTS.md, made from dev/results/*.json, with the paper's values beside ours."""
import json
import os
import re
import statistics
import textwrap

DEV = os.path.dirname(os.path.abspath(__file__))
RECIPES = ["bf16", "te", "colossal", "rowwise", "deepseek", "coat", "coat-saved"]
MODELS = {
    "gpt2": "GPT-2 124M", "llama-tiny": "llama-tiny", "llama-2-7b": "Llama-2-7B",
    "tinyllama-1.1b": "TinyLlama 1.1B"}

# The paper's values (arXiv 2410.19313)
CODINGS = ["E4M3", "E4M3 + expansion", "E5M2", "E5M2 + expansion"]
PAPER_TABLE_1 = [[20.10, 18.08, 25.65, 18.16], [15.13, 12.31, 21.96, 12.43],
                 [37.02, 35.96, 40.30, 36.00], [17.79, 15.48, 23.84, 15.57]]
PAPER_TABLE_2 = [("paper: BF16", 4, 8, 2, 3, 5.66, 22.66), ("paper: TE", 2, 8, 2, 3, 3.33, 18.33),
                 ("paper: COAT", 1, 4, 2, 3, 3.33, 13.33)]
PAPER_FIGURE_4B = {(11008, 16384): (1.37, 0.10), (11008, 8192): (0.89, 0.08),
                   (4096, 16384): (0.55, 0.07), (4096, 8192): (0.32, 0.06)}
PAPER_TABLE_6 = {  # hidden size, tokens, sequences: forward ms, backward ms, MB
    (2048, 2048, 4): {"bf16": (3.36, 8.47, 1457), "te": (2.96, 5.32, 1210), "coat": (2.88, 5.16, 883)},
    (2048, 4096, 4): {"bf16": (6.88, 17.24, 2914), "te": (5.94, 11.29, 2420), "coat": (5.89, 10.82, 1766)},
    (4096, 2048, 4): {"bf16": (7.77, 18.78, 2914), "te": (6.19, 11.79, 2420), "coat": (5.89, 10.96, 1766)},
    (4096, 4096, 4): {"bf16": (16.37, 38.43, 5828), "te": (12.66, 24.58, 4840), "coat": (12.16, 23.44, 3533)},
    (4096, 2048, 8): {}}
PAPER_TABLE_7 = [["paper, H100 80 GB, 1 x 2048: BF16 and TE", "", "out of memory", "none", "", "", ""],
                 ["paper, H100 80 GB, 1 x 2048: COAT", "5,906", "79.3 GB", 1, "5,906", "169", ""]]
PAPER_RANKS = {  # GPUs, model, recipe: GB a GPU (sequences); tokens/s a GPU at the largest batch (sequences)
    "1 7b coat": ("79.3 (1)", "5,906 (1)"), "1 7b bf16": ("out of memory (1)", ""),
    "2 7b coat": ("52.8 (2)", "11,351 (4)"), "2 7b bf16": ("out of memory (2)", "6,130 (1)"),
    "4 7b coat": ("35.6 (2)", "11,257 (4)"), "4 7b bf16": ("55.1 (2)", "7,730 (2)"),
    "8 7b coat": ("27.0 (2)", "11,241 (8)"), "8 7b bf16": ("41.2 (2)", "8,238 (4)"),
    "2 13b coat": ("73.2 (1)", "2,137 (1)"), "4 13b coat": ("49.1 (1)", "5,295 (2)"),
    "4 13b bf16": ("76.1 (1)", "2,345 (1)"), "8 13b coat": ("32.5 (1)", "5,650 (4)"),
    "8 13b bf16": ("49.4 (1)", "3,907 (2)"), "8 30b coat": ("70.5 (1)", "1,363 (1)")}
PAPER_GAP = {"coat": 0.013, "te": 0.006}  # training loss above BF16, OLMo-1B after 22 billion tokens
PAPER_RANGES = {
    "m": "R below 1,000 to 10,000; k 1 to 3, mean 2", "v": "R below 10; k 5 to 15, mean 10, a few at 1.5"}


# ------------------------------------------------------------------------------------------------------------
# Results: a file has `rows` by the run's name, and what all rows share

def path_of(group):
    return os.path.join(DEV, "results", f"{group}.json")


def load(group):
    try:
        with open(path_of(group), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"rows": {}}


def save(group, result):
    """Writes one row a line, and the file whole."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["rows"].items())
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in result.items()
                   if key != "rows")
    with open(path_of(group) + ".new", "w", encoding="utf-8") as file:
        file.write("{\n" + head + ' "rows": {\n' + rows + "\n }\n}\n")
    os.replace(path_of(group) + ".new", path_of(group))


def table(head, rows):
    return [
        "| " + " | ".join(str(cell) for cell in line) + " |"
        for line in [head, ["---"] * len(head), *rows]] + [""]


def paragraph(text):
    return [*textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False), ""]


def origin(group, result):
    """What was run, where and at which commit."""
    rows = result["rows"].values()
    where, commits = (", ".join(sorted({row[key] for row in rows})) for key in ("where", "commit"))
    shared = f", `./train {result['shared']}` and the flags of the row" if "shared" in result else ""
    return paragraph(f"`python3 dev/run.py {group}`{shared}. Measured on {where}, commit {commits}.")


def cell(text, value, otherwise=""):
    return otherwise if value is None else text.format(value)


def losses(row):
    return row["validation"][-1][1]


def batch_of(row):
    return int(re.search(r"--batch (\d+)", row["flags"]).group(1))


def memory_of(row):
    return f"{row['mib']:,} MiB ({row['mib'] * 2**20 / 1e9:.1f} GB)"


def figures(x):
    """Three significant digits, without an exponent."""
    return f"{float(f'{x:.3g}'):,.0f}" if x >= 100 else f"{x:.3g}"


# ------------------------------------------------------------------------------------------------------------
# Speed and loss

def speed(group="speed"):
    result = load(group)
    rows = [[
        name, f"`{row['flags']}`", f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.0f}",
        memory_of(row), f"{row['train'][0]:.2f} -> {row['train'][-1]:.2f}", row["commit"]]
            for name, row in result["rows"].items()]
    head = ["run", "flags", "tokens/s", "ms a step", "GPU memory in use", "training loss", "commit"]
    return origin(group, result) + table(head, rows)


def saved():
    return speed("saved")


def peers():
    result, rows = load("peers"), []
    for name, row in result["rows"].items():
        model, who = name.split(": ")
        base = result["rows"][f"{model}: PyTorch bf16"]
        rows.append([MODELS[model], who.replace("train", "`./train`") + cell(" ({})", row.get("note")),
                     f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / base['tokens_per_second']:.3f}",
                     f"{row['ms']:.1f} ({row['ms_least']:.1f} to {row['ms_most']:.1f})", f"{row['mib']:,}"])
    head = [
        "model", "program", "tokens/s", "speed / PyTorch bf16", "ms a step (range)", "GPU memory in use, MiB"]
    return origin("peers", result) + table(head, rows)


def bench():
    result, rows = load("bench"), []
    measured = result["rows"]["bench"]
    for run in measured["runs"]:
        groups, step = {}, run["step"]
        for o in run["operators"]:
            seconds, floor = groups.get(o["group"], (0, 0))
            groups[o["group"]] = seconds + o["count"] * o["seconds"], floor + o["count"] * (o["floor"] or 0)
        groups["step minus its operators"] = step["seconds"] - step["operators"], None
        groups["whole step"] = step["seconds"], step["floors"]
        for name, (seconds, floor) in groups.items():
            rows.append([
                MODELS[run["model"]], name, f"{1e3 * seconds:.1f}", f"{100 * seconds / step['seconds']:.0f}%",
                cell("{:.1f}", floor and 1e3 * floor),
                cell("{:.2f}", floor and seconds / floor)])
    runs, slow = measured["runs"], {}  # kernels below 85% of copy bandwidth: their share of it
    for i, run in enumerate(runs):
        for o in run["operators"]:
            if o["ceiling"] == "copy" and o["floor"] < 0.85 * o["seconds"]:
                slow.setdefault(o["name"], [""] * len(runs))[i] = f"{100 * o['floor'] / o['seconds']:.0f}%"
    ceilings = [f"{c['name']} {c['rate'] / 1e12:{'.2f' if c['unit'] == 'B/s' else '.0f'}} T{c['unit']}"
                for c in measured["ceilings"]]
    return origin("bench", result) + paragraph("Ceilings: " + "; ".join(ceilings) + ".") + table(
        ["model", "kind of work", "ms a step", "of the step", "floor, ms", "time / floor"], rows) + table(
            ["kernel below 85% of copy bandwidth", *(MODELS[run["model"]] for run in runs)],
            [[name, *shares] for name, shares in slow.items()])


def cpu():
    result = load("cpu")
    base = losses(result["rows"]["fp32"])
    rows = [[name, f"`{row['flags']}`", f"{losses(row):.4f}", f"{losses(row) - base:+.4f}",
             f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.1f}"] for name, row in result["rows"].items()]
    head = ["run", "flags", "validation loss, nats per byte", "minus `fp32`", "tokens/s", "ms a step"]
    return origin("cpu", result) + table(head, rows)


def default():
    result = load("default")
    rows = [[name, f"{losses(row):.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.1f}"]
            for name, row in result["rows"].items()]
    return origin("default", result) + table(
        ["recipe", "validation loss, nats per byte", "tokens/s", "ms a step"], rows)


def gpt2():
    result = load("gpt2")
    rows = [[name, f"`{row['flags']}`" if row["flags"] else "(defaults)", f"{row['train'][-1]:.3f}",
             f"{losses(row):.4f}", row["commit"]] for name, row in sorted(result["rows"].items())]
    head = ["run", "flags", "last training loss", "validation loss, nats per token", "commit"]
    return origin("gpt2", result) + table(head, rows)


# ------------------------------------------------------------------------------------------------------------
# Convergence

TOKENS_PER_STEP, BLOCK, ABOVE = 65536, 30, 0.03


def same_seed(name):
    """The name of the BF16 run with the seed of this run."""
    return "bf16" + "".join(name.partition(" seed ")[1:])


def in_order(name):
    """Recipes in their order, then ablations; numbers in names by size."""
    recipe = name.split()[0]
    return RECIPES.index(recipe) if recipe in RECIPES else 99, re.sub(r"\d+", lambda n: n[0].zfill(4), name)


def minus_bf16(rows, name, end):
    """Training loss minus that of BF16 with the same seed: mean over the tenth of the run that ends at step
    `end`, and its standard error. Blocks of 30 steps count as independent; single steps are not."""
    base = rows.get(same_seed(name))
    if not base or name.startswith("bf16") or end > len(rows[name]["train"]):
        return ""
    first = end - len(base["train"]) // 10
    pairs = zip(rows[name]["train"][first:end], base["train"][first:end])
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    blocks = [
        statistics.mean(differences[i:i + BLOCK]) for i in range(0,
                                                                 len(differences) - BLOCK + 1, BLOCK)]
    return f"{statistics.mean(differences):+.4f} ({statistics.stdev(blocks) / len(blocks) ** 0.5:.4f})"


def seconds_to(row, target):
    """Time until the validation loss falls to the target, interpolated, at the median time of a step."""
    for (step, loss), (later, lower) in zip(row["validation"], row["validation"][1:]):
        if loss > target >= lower:
            return (step + (later - step) * (loss - target) / (loss - lower)) * row["ms"] / 1000
    return None


def convergence():
    result = load("convergence")
    rows, text = result["rows"], result["text"]
    steps = max(len(row["train"]) for row in rows.values())
    whole = {name: row for name, row in rows.items() if len(row["train"]) == steps}  # ablations may end early
    seeds = [losses(row) for name, row in whole.items() if name.startswith("bf16")]
    mean = statistics.mean(seeds)
    lines = origin("convergence", result)
    lines += paragraph(
        f"The text is {text['text']}: {text['files']:,} files, {text['bytes'] / 1e6:,.0f} MB. "
        f"It has {text['train_tokens'] / 1e6:.1f} million training tokens of a BPE vocabulary of 16,384, "
        f"so a run makes {TOKENS_PER_STEP * steps / text['train_tokens']:.1f} passes, and "
        f"{text['held_out_tokens'] / 1e6:.2f} million held-out tokens.")
    lines += paragraph(f"`bf16` over {len(seeds)} seeds: {min(seeds):.4f} to {max(seeds):.4f}, "
                       f"mean {mean:.4f}, standard deviation {statistics.stdev(seeds):.4f}.")
    cells = []
    for name, row in sorted(whole.items(), key=lambda item: in_order(item[0])):
        base, evaluated = rows.get(same_seed(name)), row.get("evaluated_in_bf16")
        cells.append([
            name, f"`{row['flags']}`", f"{losses(row):.4f}", f"{losses(row) - mean:+.4f}",
            f"{losses(row) - losses(base):+.4f}" if base is not row else "",
            f"{evaluated or losses(row):.4f}",
            minus_bf16(rows, name, steps),
            cell("{:+.3f}", PAPER_GAP.get(name)),
            cell("{:.0f}", seconds_to(row, mean + ABOVE)), f"{row['tokens_per_second']:,.0f}",
            f"{row['mib']:,}", row["commit"]])
    lines += table(["run", "flags", "validation loss", "minus mean of `bf16`", "minus `bf16`, same seed",
                    "evaluated in BF16", "training loss minus `bf16`, same seed, last tenth (standard error)",
                    "paper, 22 billion tokens", f"seconds to validation loss {mean + ABOVE:.3f}", "tokens/s",
                    "GPU memory in use, MiB", "commit"], cells)
    ends = [steps * fifths // 5 for fifths in range(1, 6)]
    cells = []
    for name, row in sorted(rows.items(), key=lambda item: (item[0] not in whole, in_order(item[0]))):
        gaps = [minus_bf16(rows, name, end) for end in ends]
        cells += [[name, f"`{row['flags']}`", *gaps]] if any(gaps) else []
    return lines + table(["training loss minus `bf16`, same seed (standard error)", "flags",
                          *(f"steps {end - steps // 10} to {end}" for end in ends)], cells)


def mean_and_error(differences):
    """The mean over the seeds, and its standard error."""
    if len(differences) < 2:
        return f"{statistics.mean(differences):+.4f}"
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.4f} ({error:.4f})"


def end_of_training(row, part):
    """The mean training loss of the last part of a run: a tenth of it if part is 10."""
    return statistics.mean(row["train"][-(len(row["train"]) // part):])


def paired(pairs, part):
    """A table of differences from BF16, each between two runs that differ only in the recipe. `pairs` has
    (recipe, seed, row, row of bf16); training losses are those of the last part."""
    kinds = {"training loss": lambda row: end_of_training(row, part), "validation loss": losses,
             "validation, evaluated in BF16": lambda row: row.get("evaluated_in_bf16")}
    found = {}
    for recipe, seed, row, base in pairs:
        for kind, loss in kinds.items():
            if loss(row) is not None:
                theirs = losses(base) if "BF16" in kind else loss(base)
                found.setdefault((kind, recipe), {})[seed] = loss(row) - theirs
    seeds = sorted({seed for of in found.values() for seed in of})
    rows = []
    for (kind, recipe), of in sorted(found.items(), key=lambda item: list(kinds).index(item[0][0])):
        rows.append([f"{kind}: {recipe}", *(cell("{:+.4f}", of.get(seed)) for seed in seeds),
                     mean_and_error(list(of.values()))])
    return table(["minus `bf16` of the same seed", *(f"seed {seed}" for seed in seeds),
                  "mean (standard error)"], rows)


def seeds():
    result, pairs = load("seeds"), []
    for group, numbers in (("convergence", (1, )), ("seeds", (2, 3, 4, 5))):
        rows = load(group)["rows"]
        for recipe in ("coat", "te", "coat-saved"):
            for n in numbers:
                row, base = (rows.get(r + (f" seed {n}" if n > 1 else "")) for r in (recipe, "bf16"))
                pairs += [(recipe, n, row, base)] if row and base else []
    text = result["text"]
    lines = origin("seeds", result) + paragraph(
        f"The text of these seeds is {text['text']}: {text['files']:,} files, {text['bytes'] / 1e6:,.0f} MB, "
        f"{text['train_tokens'] / 1e6:.1f} million training tokens.")
    cells = [[name, f"{end_of_training(row, 10):.4f}", f"{losses(row):.4f}",
              cell("{:.4f}", row.get("evaluated_in_bf16")),
              cell("{:+.4f}", row.get("evaluated_in_bf16") and losses(row) - row["evaluated_in_bf16"])]
             for name, row in sorted(result["rows"].items(), key=lambda item: in_order(item[0]))]
    lines += table(["run", "training loss, last tenth", "validation loss", "the same, evaluated in BF16",
                    "cost of evaluating in FP8"], cells)
    return lines + (paired(pairs, 10) if len(pairs) > 2 else [])


def gap():
    """Variants of COAT for a smaller gap, beside the runs of `seeds`."""
    result = load("gap")
    rows = {**load("seeds")["rows"], **result["rows"]}
    variants = ["coat seed 2", "coat-saved seed 2", *(name for name in result["rows"] if name.endswith("seed 2"))]
    tenth, ends = len(rows["bf16 seed 2"]["train"]) // 10, [610, 915, 1220]
    lines = origin("gap", result) + table(
        ["training loss minus `bf16`, same seed (standard error)", "flags",
         *(f"steps {end - tenth} to {end}" for end in ends), "tokens/s"],
        [[name, f"`{rows[name]['flags']}`", *(minus_bf16(rows, name, end) for end in ends),
          f"{rows[name]['tokens_per_second']:,.0f}"] for name in variants])
    to_the_end = ("te", "coat", "coat-saved", "coat-e4m3", "coat-e4m3 exact", "coat-down-e4m3")
    pairs = [(recipe, seed, rows[f"{recipe} seed {seed}"], rows[f"bf16 seed {seed}"])
             for recipe in to_the_end for seed in (2, 3, 4, 5) if f"{recipe} seed {seed}" in rows]
    return lines + paired(pairs, 10)


def passes():
    result = load("passes")
    runs = {tuple(name.split(" seed ")): row for name, row in result["rows"].items()}
    pairs = [(recipe, seed, row, runs["bf16", seed]) for (recipe, seed), row in runs.items()
             if recipe != "bf16"]
    rows = [[recipe, *(f"{value(runs[recipe, seed]):.4f}" for value in
                       (lambda row: end_of_training(row, 20), losses)
                       for seed in sorted({seed for _, seed in runs}))]
            for recipe in dict.fromkeys(recipe for recipe, _ in runs)]
    return origin("passes", result) + table(
        ["", *(f"{kind}, seed {seed}" for kind in ("training", "validation") for seed in (1, 2, 3))],
        rows) + paired(pairs, 20)


def ablations():
    result, losses_of, flags = load("ablations"), {}, {}
    for name, row in result["rows"].items():
        run, seed = name.split(" seed ")
        losses_of.setdefault(run, {})[seed], flags[run] = losses(row), row["flags"].partition(" --seed")[0]
    seeds = sorted({seed for of in losses_of.values() for seed in of})

    def apart(name, base):
        differences = [loss - losses_of[base][seed] for seed, loss in losses_of[name].items()]
        return "" if name == base else mean_and_error(differences)

    rows = [[
        name, f"`{flags[name]}`", *(f"{of[seed]:.4f}" for seed in seeds),
        apart(name, "bf16"),
        apart(name, "coat")] for name, of in losses_of.items()]
    return origin("ablations", result) + table(
        ["validation loss, nats per byte", "flags", *(f"seed {seed}" for seed in seeds),
         "minus `bf16`, same seeds: mean (standard error)", "minus `coat`"], rows)


def finetune():
    result = load("finetune")
    text = result["text"]
    rows = [[
        name, f"{row['validation'][0][1]:.4f}", f"{losses(row):.4f}",
        f"{statistics.mean(row['train'][-40:]):.4f}"] for name, row in result["rows"].items()]
    lines = origin("finetune", result)
    lines += [f"The text is {text['text']}: {text['files']:,} files, {text['bytes'] / 1e6:,.0f} MB, "
              f"{text['train_tokens'] / 1e6:.1f} million tokens of the same vocabulary.", ""]
    return lines + table(["trained in, then fine-tuned in", "validation loss before", "after",
                          "training loss, mean of the last 40 steps"], rows)


# ------------------------------------------------------------------------------------------------------------
# The paper's tables and figures

def ranges():
    result, rows = load("moments"), []
    for name, row in result["rows"].items():
        for moment, title in (("m", "first"), ("v", "second")):
            r = row[moment]
            before, after = ({at: 10 ** r[kind][at] for at in ("median", "p10", "p90")}
                             for kind in ("log10_range", "log10_range_expanded"))
            spreads = [
                f"{figures(h['median'])} ({figures(h['p10'])} to {figures(h['p90'])})"
                for h in (before, after, r["k"])]
            rows.append([MODELS[name], title, f"{r['groups']:,}", *spreads, PAPER_RANGES[moment]])
    return origin("moments", result) + table([
        "model", "moment", "groups of 128", "range R: median (10% to 90%)",
        "R^k; the range of E4M3 is 2.29e5", "k", "paper"], rows)


def moment_errors():
    lines, models = [], load("moments")["rows"]
    by_group = {name: {e["group"]: e for e in row["errors"]} for name, row in models.items()}
    rows = [[
        MODELS[name], moment, *(f"{100 * errors[128][moment][c]['root_noise_to_signal']:.2f}"
                                for c in CODINGS)] for name, errors in by_group.items()
            for moment in ("m", "v")]
    lines += table(["model", "moment: error, % of its RMS", *CODINGS], rows)
    rows = []
    for first, published in zip(CODINGS, PAPER_TABLE_1):
        for name, errors in by_group.items():
            update = errors[128]["update"]
            base = update["E4M3"]["E4M3"]["mean_square_error"]
            ours = [update[first][second]["mean_square_error"] for second in CODINGS]
            rows.append([
                first, f"{MODELS[name]}, 1e-5", *(f"{1e5 * mse:.2f} (x {mse / base:.2f})" for mse in ours)])
        rows.append([
            first, "paper", *(f"{mse:.2f} (x {mse / PAPER_TABLE_1[0][0]:.2f})" for mse in published)])
    lines += table(["format of m", "MSE of m / sqrt(v); format of v:", *CODINGS], rows)
    rows = []
    for size in by_group["gpt2"]:
        rows.append([size, f"{2 + 2 * 8 / size:.3f}"])
        for errors in by_group.values():
            plain, expanded = (errors[size]["update"][c][c]["mean_square_error"] for c in CODINGS[:2])
            rows[-1] += [f"{plain * 1e5:.2f}", f"{expanded * 1e5:.2f}", f"{plain / expanded:.2f}"]
    return lines + table([
        "group size", "bytes per parameter, with expansion",
        *(f"{MODELS[name]}: {what}" for name in by_group
          for what in ("E4M3, 1e-5", "E4M3 + expansion, 1e-5", "ratio"))], rows)


def activations():
    result = load("activations")
    lines = origin("activations", result)
    for name, row in result["rows"].items():
        layers = sorted({0, row["layers"] // 2, row["layers"] - 1})
        exact = row["streams"][0]["loss"]
        rows = [[
            s["way"], *(f"{100 * s['noise_to_signal'][layer]:.2g}"
                        for layer in layers), f"{s['loss'] - exact:+.5f}"] for s in row["streams"]]
        lines += [f"{MODELS[name]}, {row['sequences']} x {row['tokens_each']} held-out tokens:", ""]
        lines += table(["all activations in", *(f"error after layer {layer + 1}, %" for layer in layers),
                        "loss minus FP32"], rows)
        tensors, rows = {}, []
        for t in row["tensors"]:
            tensors.setdefault(t["tensor"], []).append(t["noise_to_signal"])
        for tensor, found in tensors.items():
            of = {g: [100 * errors[g] for errors in found] for g in found[0]}
            rows.append([tensor, *(f"{sum(e) / len(e):.4f} ({max(e):.4f})" for e in of.values())])
        lines += table(["one tensor: mean (and worst) layer, %", *found[0]], rows)
    return lines


def amax():
    result, rows = load("timing"), []
    for r in result["rows"]["timing"]["amax"]:
        published = PAPER_FIGURE_4B[(r["columns"], r["tokens"])]
        ours = [r["whole_tensor_ms"], r["group_maxima_ms"], r["producer_with_ms"] - r["producer_without_ms"]]
        rows.append([
            f"{r['columns']} x {r['tokens']}", *(f"{ms:.2f}" for ms in published),
            f"{published[0] / published[1]:.1f}", *(f"{ms:.4f}" for ms in ours), f"{ours[0] / ours[1]:.1f}",
            f"{r['producer_without_ms']:.3f}"])
    return origin("timing", result) + table(
        ["shape", "paper: whole tensor, ms", "paper: group scaling, ms", "ratio", "ours: whole tensor, ms",
         "ours: from group maxima, ms", "ours: added to the producer, ms", "ratio, group maxima",
         "the producer without it, ms"], rows)


def memory():
    timing, layer, result = load("timing"), load("layer"), load("memory")
    measured = {
        (r["recipe"], True): r["saved_bytes_by_the_driver"] / (2 * r["batch"] * r["seq"] * r["hidden"])
        for r in layer["rows"]["4096x2048x8"]["rows"]}
    measured.update({(r["name"], r["recompute"]): r["total"] for r in timing["rows"]["timing"]["memory"]})
    row = result["rows"]["memory"]
    rows = [[
        name, *(f"{u:g}" for u in columns), f"{total:g}", "", f"{PAPER_TABLE_2[0][-1] / total:.2f}", "", ""]
            for name, *columns, total in PAPER_TABLE_2]
    for r in row["rows"]:
        bf16 = next(b["total"] for b in row["rows"]
                    if b["name"] == "bf16" and b["recompute"] == r["recompute"])
        columns = ("norm", "activation function", "RoPE", "attention", "linear")
        rows.append([
            r["name"] + (", recompute" if r["recompute"] else ""),
            *(f"{r['U'].get(c, 0):.2f}" for c in columns), f"{r['total']:.2f}",
            cell("{:.2f}", measured.get((r["name"], r["recompute"])),
                 "not measured"), f"{PAPER_TABLE_2[0][-1] / r['total']:.2f}", f"{bf16 / r['total']:.2f}",
            f"{r['bytes'] / 2**20:,.0f}"])
    return origin("memory timing layer",
                  {"rows": {**result["rows"], **timing["rows"], **layer["rows"]}}) + table([
                                f"U = 2BTC bytes; a layer of {MODELS[row['model']]}", *columns, "total",
                                "total, measured on the GPU", "paper's BF16 / this", "our bf16 / this",
                                f"MiB at {row['batch']} x {row['seq']}"], rows)


def gemms():
    result, rates = load("timing"), {}
    times = result["rows"]["timing"]["gemms"]
    for r in times:
        for key, what in (("gemm_ms", "GEMM alone"), ("with_x_ms", "and quantizing x"),
                          ("with_x_and_w_ms", "and quantizing x and w")):
            if key in r:
                name = r["scaling"] if r["scaling"] == "bf16" else f"{r['scaling']}: {what}"
                rates.setdefault(name, {})[r["side"]] = 2e-9 * r["side"] ** 3 / r[key]
    sizes, rows = list(rates["bf16"]), []
    for name, rate in rates.items():
        faster = [n for n in sizes if all(rate[m] > rates["bf16"][m] for m in sizes if m >= n)]
        rows.append([name, *(f"{rate[n]:.0f}" for n in sizes), f"from {faster[0]}" if faster else ""])
    return origin("timing", result) + table(["TFLOP/s; M = N = K =", *sizes, "faster than bf16"], rows)


def layer():
    result, rows = load("layer"), []
    found = {(r["hidden"], r["seq"], r["batch"], r["recipe"]): r for row in result["rows"].values()
             for r in row["rows"]}
    for (hidden, seq, batch), paper in PAPER_TABLE_6.items():
        base, theirs = found[hidden, seq, batch, "bf16"], sum(paper["bf16"][:2]) if paper else 0
        for recipe in RECIPES[:-1]:  # without coat-saved
            cells, r = [f"{hidden}, {batch} x {seq}", recipe, "", ""], found[hidden, seq, batch, recipe]
            if recipe in paper:
                forward, backward, cells[3] = paper[recipe]
                both = forward + backward
                cells[2] = f"{forward:.2f} + {backward:.2f} = {both:.2f} (x {theirs / both:.2f})"
            both = r["forward_ms"] + r["backward_ms"]
            times = (base["forward_ms"] + base["backward_ms"]) / both
            rows.append([
                *cells, f"{r['forward_ms']:.2f} + {r['backward_ms']:.2f} = {both:.2f} (x {times:.2f})",
                f"{r['once_a_step_ms']:.2f}",
                f"{r['saved_bytes'] / 1e6:,.0f} (x {base['saved_bytes'] / r['saved_bytes']:.2f})",
                f"{r['saved_bytes_by_the_driver'] / 1e6:,.0f}"])
    return origin("layer", result) + table([
        "hidden size, sequences", "recipe", "paper: forward + backward, ms", "paper: MB",
        "ours: forward + backward, ms", "ours: once a step, ms", "ours: MB, planned",
        "ours: MB, by the driver"], rows)


def models():
    result = load("models")
    lines, rows = origin("models", result), result["rows"]
    for model in ("tinyllama-1.1b", "llama-2-7b"):
        cells = []
        of = {name.split(": ")[1]: row for name, row in rows.items() if name.startswith(model)}
        base, longest = of["bf16"], of["bf16, largest batch"]
        for way, row in of.items():
            if not way.endswith(", largest batch"):
                most = of[way + ", largest batch"]
                speed, there = row["tokens_per_second"], most["tokens_per_second"]
                cells.append([
                    way, f"{speed:,.0f} (x {speed / base['tokens_per_second']:.2f})",
                    memory_of(row),
                    batch_of(most), f"{there:,.0f} (x {there / longest['tokens_per_second']:.2f})",
                    f"{1e6 / there:.2f}", f"{most['mib']:,}"])
        lines += table([
            f"{MODELS[model]}, {batch_of(base)} x 2048 tokens", "tokens/s", "GPU memory in use",
            "largest batch", "tokens/s there", "us per token there", "MiB there"],
                       cells + (PAPER_TABLE_7 if model == "llama-2-7b" else []))
    return lines


def ranks(group="ranks"):
    result = load(group)
    rows, cells = result["rows"], []

    def order(name):  # GPUs, model (7b before 13b), way, sequences
        gpus, model, way = re.match(r"(\d) GPUs?: (\d+)b ([^,]+)", name).groups()
        return int(gpus), int(model), way, batch_of(rows[name]) if "flags" in rows[name] else 0
    for name in sorted(rows, key=order):
        row, (gpus, model, way, sequences) = rows[name], order(name)
        per_gpu = row["tokens_per_second"] / gpus
        one = rows.get(name.replace(f"{gpus} GPUs", "1 GPU"))
        of_one = f"{per_gpu / one['tokens_per_second']:.1%}" if one and gpus > 1 else ""
        ours = "flags" in row
        paper = PAPER_RANKS.get(f"{gpus} {model}b {way}", ("", "")) if ours else ("", "")
        name = name.replace("largest x", f"{sequences} (largest) x")
        name = name.replace("fsdp-float8", "PyTorch FSDP2 float8").replace("fsdp", "PyTorch FSDP2")
        cells.append([name, f"{row['tokens_per_second']:,.0f}", f"{per_gpu:,.0f}", of_one,
                      f"{row['mib'] * 2**20 / 1e9:.1f}",
                      cell("{:.1f}", row.get("planned_mib") and row["planned_mib"] * 2**20 / 1e9), *paper])
    return origin(group, result) + table(
        ["GPUs: model, recipe, sequences per GPU", "tokens/s", "per GPU", "of one GPU's", "GB per GPU",
         "GB by the plan", "paper: GB (sequences)", "paper: tokens/s per GPU (sequences)"], cells)


def h100():
    return ranks("h100")


def architectures():
    result = load("architectures")
    return origin("architectures", result) + table(
        ["model and recipe, 4 x 2048", "tokens/s", "ms a step", "GPU memory in use"],
        [[name, f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.0f}", memory_of(row)]
         for name, row in result["rows"].items()])


TABLES = {
    f.__name__.replace("_", " "): f
    for f in (speed, saved, peers, bench, cpu, default, gpt2, convergence, seeds, gap, passes, ablations, finetune,
              ranges, moment_errors, activations, amax, memory, gemms, layer, models, ranks, h100, architectures)}


def renew_page():
    """Renews the figures, and the tables between <!-- NAME --> and <!-- end --> in dev/RESULTS.md."""
    import plot
    plot.draw_results()
    path = os.path.join(DEV, "RESULTS.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"<!-- (" + "|".join(TABLES) + r") -->\n.*?<!-- end -->",
                  lambda m: "\n".join([f"<!-- {m[1]} -->", *TABLES[m[1]]
                                       (), "<!-- end -->"]), text, flags=re.DOTALL)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
