#!/usr/bin/env python3
"""Prints the tables of the lessons in WALK.md, computed by coat.py: `python3 dev/lessons.py 5` those of lesson 5.

The lessons follow one group of 16 activations, one moment group and one product of 4x4 matrices. The tables
of a real run need model A. It is trained first, in two minutes or more, unless another run's FOLDER is given:

    make train && python3 dev/lessons.py real [FOLDER]
"""
import json
import pathlib
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("lessons.py needs NumPy: pip install numpy")

import coat
import small_run
from coat import E4M3, E5M2, F32

# The numbers of the course: 16 features of a token, one of which is an outlier; the largest magnitude of the
# tensor that they are a part of; the amax of a tensor in seven steps; four second moments; and the operands of a
# linear layer.
GROUP = np.array([0.31, -0.52, 0.08, 1.10, -0.24, 0.67, -0.05, 0.43,
                  -0.91, 0.16, 0.02, -0.38, 0.75, -0.13, 24.0, 0.57], F32)
SHOWN = [14, 3, 0, 2, 10]  # the values of the group that the tables show
TENSOR_AMAX = F32(30000)
AMAXES = (10.0, 11.0, 10.5, 12.0, 48.0, 13.0, 12.5)
MOMENTS = np.array([0.90, 0.31, 0.17, 0.06], F32)
X = np.array([[0.5, -1.2, 0.3, 0.8], [1.1, 0.4, -0.7, 0.2], [-0.3, 0.9, 1.6, -0.5], [0.7, -0.1, 0.6, 1.3]], F32)
W = np.array([[0.2, 0.5, -0.4, 0.1], [-0.6, 0.3, 0.7, 0.2], [0.4, -0.2, 0.1, 0.9], [0.3, 0.8, -0.5, -0.1]], F32)
G = np.array([[2e-5, -7e-6, 4e-6, 1e-5], [-3e-6, 9e-6, 5e-5, -2e-6], [8e-6, 1e-6, -4e-4, 6e-6],
              [-1e-5, 3e-6, 7e-6, -9e-6]], F32)


def table(head, rows):
    """Prints a table of Markdown."""
    print("\n| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def number(x):
    return f"{x:.4g}" if x else "0"


def percent(x):
    return f"{100 * x:+.2f}%" if x else "0"


def bits(f, code):
    word = f"{code:08b}"
    return f"{word[0]} {word[1:8 - f.M]} {word[8 - f.M:]}, 0x{code:02X}"


def scaled(f, x, s):
    """Codes of x / s, and the values that are read back."""
    codes = coat.encode(f, x * (F32(1) / s))
    return codes, coat.decode(f, codes) * s


def snr(x, decoded):
    """Signal to noise in decibels: 6 dB are one bit."""
    return 10 * np.log10(np.sum(np.square(x, dtype=float)) / np.sum(np.square(decoded - x, dtype=float)))


def relative_error(x, exact):
    return coat.rms(x - exact) / coat.rms(exact)


def flushed(x, decoded):
    return np.mean((x != 0) & (decoded == 0))


# --- The lessons

def formats():
    rows = []
    for x in (1.1, 1.99, 0.02, 0.001, 500):
        row = [number(x)]
        for f in (E4M3, E5M2):
            code = int(coat.encode(f, x))
            value = float(coat.decode(f, code))
            row += [bits(f, code), number(value), percent(value / x - 1)]
        rows.append(row)
    table(("x", "E4M3: bits, code", "value", "error", "E5M2: bits, code", "value", "error"), rows)


def one_scale():
    s = coat.scales_of(E4M3, np.abs(GROUP).max())
    codes, back = scaled(E4M3, GROUP, s)
    rows = [(number(GROUP[i]), number(GROUP[i] / s), number(coat.decode(E4M3, codes[i])), number(back[i]),
             percent(back[i] / GROUP[i] - 1)) for i in SHOWN]
    table(("x", "x / s", "the code's value", "read back", "error"), rows)


def granularity():
    _, of_group = scaled(E4M3, GROUP, coat.bf16(coat.scales_of(E4M3, np.abs(GROUP).max())))
    _, of_tensor = scaled(E4M3, GROUP, coat.scales_of(E4M3, TENSOR_AMAX))
    rows = [(number(x), number(a), percent(a / x - 1), number(b), percent(b / x - 1))
            for x, a, b in zip(GROUP[SHOWN], of_group[SHOWN], of_tensor[SHOWN])]
    x, a, b = (values[SHOWN].sum() for values in (GROUP, of_group, of_tensor))
    rows.append((f"their sum, {number(x)}", number(a), percent(a / x - 1), number(b), percent(b / x - 1)))
    table(("x", "with a scale for the 16 values", "error", "with the tensor's scale", "error"), rows)
    outliers()


def outliers():
    """Three readers of 256 features, of which one is multiplied."""
    random = np.random.default_rng(1)
    x, w, dy = (random.standard_normal((64, 256)).astype(F32) for _ in ("x", "w", "dy"))
    w8, ones, other = coat.gemm_operand(E4M3, w), np.ones(256, F32), np.arange(256) != 39
    small = np.where(other, w, w / F32(100000))  # the weights that the outlier's feature is multiplied by

    def errors(times, in_groups):
        outlier = np.where(other, x, x * F32(times))
        groups = coat.dequantize_groups(*coat.quantize_to_groups(outlier))
        read = groups if in_groups else coat.gemm_operand(E4M3, outlier)

        def of_weight_gradient(a):
            return coat.rms_norm_backward(a, ones, dy)[1][other]

        return (relative_error(read @ w8.T, outlier @ w.T),
                relative_error(read @ coat.gemm_operand(E4M3, small).T, outlier @ small.T),
                coat.rms((read / outlier - 1)[:, other]),
                relative_error(of_weight_gradient(read), of_weight_gradient(outlier)))
    columns = [errors(1, False), errors(100000, False), errors(100000, True)]
    names = ("a GEMM | RMS error of y",
             "a GEMM whose weights for the outlier's feature are 1 / 100,000 as large | RMS error of y",
             "an activation function | relative errors of x, without the outlier",
             "backward of a norm | RMS error of the gradient of its weights, without the outlier's")
    rows = [(name, *(f"{error:.1%}" for error in row)) for name, *row in zip(names, *columns)]
    table(("who reads x", "what is measured", "one scale, no outlier", "one scale, outlier", "1x16, outlier"), rows)


def delayed():
    history, rows = [], []
    for step, amax in enumerate(AMAXES, 1):
        x = np.linspace(-amax, amax, 1001).astype(F32)
        s = coat.scales_of(E4M3, F32(max(history[-3:], default=amax)))
        now = coat.scales_of(E4M3, F32(amax))
        rows.append((step, number(amax), number(s * 448), f"{np.mean(np.abs(x) > 464 * s):.0%}",
                     f"{snr(x, scaled(E4M3, x, s)[1]):.1f} dB", f"{snr(x, scaled(E4M3, x, now)[1]):.1f} dB"))
        history.append(amax)
    table(("step", "amax", "the scale is made for", "saturated", "SNR, delayed", "SNR, just in time"), rows)


def gemms():
    x8, w8, g8 = coat.gemm_operand(E4M3, X), coat.gemm_operand(E4M3, W), coat.gemm_operand(E5M2, G)
    rows = [(name, "; ".join(number(v) for v in exact[0]), "; ".join(number(v) for v in fp8[0]),
             f"{relative_error(fp8, exact):.1%}")
            for name, exact, fp8 in (("y = x w^T", X @ W.T, x8 @ w8.T), ("dx = g w", G @ W, g8 @ w8),
                                     ("dw = g^T x", G.T @ X, g8.T @ x8))]
    table(("GEMM", "first row in FP32", "with FP8 operands", "RMS error"), rows)


def staircase():
    s = coat.scales_of(E4M3, F32(1.1))
    rows = []
    for x in (0.30, 0.31, 0.33, 0.34):
        values = scaled(E4M3, np.array([x, x + 1e-5], F32), s)[1]
        rows.append((number(x), number(values[0]), number((values[1] - values[0]) / 1e-5), 1))
    table(("x", "stored", "slope of the staircase", "slope that backward uses"), rows)


def noise():
    text = np.fromfile(small_run.TEXT, np.uint8)
    gradients, passed, linear_backward = [], [], coat.linear_backward

    def listening(x, w, g):
        dx, dw = linear_backward(x, w, g)
        passed.append((g, dx))
        return dx, dw

    coat.linear_backward = listening
    for coat.ROUNDING, moved in ((True, 0), (False, 0), (False, 12345)):  # the same weights; then other windows
        gradients.append(next(coat.train(np.roll(text, moved), 1, seed=1)).gradients)
    coat.ROUNDING, coat.linear_backward = True, linear_backward
    of_dgrad = []
    for name, ours, exact in zip(("down", "gate_up", "attention_out", "qkv"), passed[:4], passed[4:8]):
        (g8, dx8), (g, dx) = ours, exact
        errors = (relative_error(g8, g), relative_error(coat.gemm_operand(E5M2, g8), g), relative_error(dx8, dx))
        of_dgrad.append((name, *(f"{error:.1%}" for error in errors)))
    table(("linear layer", "error of g as it arrives", "of g in E5M2", "of dx = g w"), of_dgrad)
    table(("gradient of", "noise of FP8", "noise of a batch"),
          [(name, *(f"{noise:.0%}" for noise in both)) for name, both in noises(*gradients).items()])
    averaged(text)


def averaged(text):
    """How large FP8's error is in the mean gradient of 32 batches, as a part of that in one, with the same weights: from
    the smallest to the largest part of all matrices."""
    operand = coat.gemm_operand

    def g_alone(f, x):  # in a pass that quantizes nothing else
        coat.ROUNDING = f is E5M2
        y = operand(f, x)
        coat.ROUNDING = False
        return y

    def gradients(fp8, of_operand=operand):
        coat.ROUNDING, coat.gemm_operand = fp8, of_operand
        found = [next(coat.train(np.roll(text, 1777 * batch), 1, seed=1)).gradients for batch in range(32)]
        coat.ROUNDING, coat.gemm_operand = True, operand
        return {name: np.stack([g[name] for g in found]) for name in found[0] if "norm" not in name}

    exact, rows = gradients(False), []
    for case, ours in (("everything", gradients(True)), ("g alone", gradients(False, g_alone))):
        errors = [ours[name] - exact[name] for name in exact]
        parts = [coat.rms(error.mean(axis=0)) / coat.rms(error) for error in errors]
        rows.append((case, f"{min(parts):.0%} to {max(parts):.0%} of the error"))
    table(("what is in FP8", "remains in the mean of 32 batches"), rows)


def backward(embedding, layers, final_norm, windows, HS):
    """A pass through a model of coat.py with several layers: the gradients of the residual stream, before each layer
    and after the last, and those of the first layer's weights. windows: (sequences, T + 1) characters."""
    x, saved = embedding[windows[:, :-1].ravel()], []
    T = windows.shape[1] - 1
    for w in layers:
        x, of_layer = coat.layer_forward(w, x, T, HS)
        saved.append(of_layer)
    g = [coat.head_loss_and_gradients(final_norm, embedding, x, windows[:, 1:].ravel())[1]]
    for w, of_layer in zip(layers[::-1], saved[::-1]):
        dx, dw = coat.layer_backward(w, of_layer, g[0], T, HS)
        g.insert(0, dx)
    return g, dw


def model_b(layers, random, C=64):
    """The weights of coat.py's model before its first step, but with several layers: what `backward` is given."""
    def matrix(rows):
        return coat.bf16(random.standard_normal((rows, C)).astype(F32) / F32(np.sqrt(C)))

    ones, embedding = np.ones(C, F32), matrix(128)
    return embedding, [{"norm1": ones, "norm2": ones, "qkv": matrix(3 * C), "attention_out": matrix(C),
                        "gate_up": matrix(2 * C), "down": matrix(C)} for _ in range(layers)], ones


def noises(fp8, exact, other):
    """Of each matrix's gradient the noise of FP8, and that of a batch. The difference of two batches has the noise of
    both, which is √2 times that of one."""
    return {name: (relative_error(fp8[name], exact[name]), relative_error(other[name], exact[name]) / np.sqrt(2))
            for name in exact if "norm" not in name}


def errors_of_depth(layers):
    """Of model B with that many layers, the RMS of eight seeds: the error of g, the gradient of the stream, before the
    first layer; and in dw of the first layer's matrices the noise of FP8 and that of a batch."""
    text, found = np.fromfile(small_run.TEXT, np.uint8), []
    for seed in range(1, 9):
        random = np.random.default_rng(seed)
        model, begins = model_b(layers, random), random.integers(0, len(text) - 32, 8)
        passes = []
        for coat.ROUNDING, moved in ((True, 0), (False, 0), (False, 12345)):  # the same weights; then other windows
            rolled = np.roll(text, moved)
            passes.append(backward(*model, np.stack([rolled[i:i + 33] for i in begins]), 16))
        coat.ROUNDING = True
        (g8, dw8), (g, dw), (_, other) = passes
        of_matrices = np.sqrt(np.mean(np.square(list(noises(dw8, dw, other).values())), axis=0))
        found.append((relative_error(g8[0], g[0]), *of_matrices))
    return np.sqrt(np.mean(np.square(found), axis=0))


def depth():
    rows = []
    for layers in (1, 4, 12, 24):
        of_g, of_fp8, of_batch = errors_of_depth(layers)
        rows.append((layers, f"{of_g:.0%}", f"{of_fp8:.0%}", f"{of_batch:.0%}", f"{of_batch / of_fp8:.1f} times"))
    table(("layers", "error of g", "noise of FP8 in dw", "noise of a batch in dw", "FP8 is smaller"), rows)


def expansion():
    codes, plain = scaled(E4M3, MOMENTS, coat.scales_of(E4M3, MOMENTS.max()))
    stored = coat.store_moment(MOMENTS[None])
    largest, k = stored[1][0, 0], stored[2][0, 0]
    rows = [(number(x), number(coat.decode(E4M3, c)), number(a), percent(a / x - 1), number(448 * (x / largest) ** k),
             number(coat.decode(E4M3, e)), number(b), percent(b / x - 1))
            for x, c, a, e, b in zip(MOMENTS, codes, plain, stored[0][0], coat.load_moment(*stored)[0])]
    table(("x", "plain: the code's value", "read back", "error", f"448 (x / max)^{k:.4g}", "the code's value",
           "read back", "error"), rows)
    rows = []
    for k in (1, 2, 4, 1167 / 256, 5):
        codes = coat.encode(E4M3, coat.expand(MOMENTS, MOMENTS.max(), k))
        errors = coat.contract(coat.decode(E4M3, codes), MOMENTS.max(), k) / MOMENTS - 1
        rows.append((number(k), *(percent(e) for e in errors)))
    table(("k", *(number(x) for x in MOMENTS)), rows)


# --- Tables of a real run

def of_widths(norm_inputs, gate_up):
    rows = []
    for name, width in (("1x16", 16), ("1x32", 32), ("1x128", 128), ("the tensor", 0)):
        cells = []
        for x in (norm_inputs, gate_up):
            if width == 0:
                cells.append(f"{snr(x, coat.gemm_operand(E4M3, x)):.1f} dB")
            elif x.shape[1] % width:
                cells.append("-")
            else:
                cells.append(f"{snr(x, coat.dequantize_groups(*coat.quantize_to_groups(x, width))):.1f} dB")
        rows.append((name, *cells, f"{1 + 2 / width:.4f}" if width else "1.0000"))
    table(("one scale for", "inputs of norms: SNR", "gate and up: SNR", "bytes a value"), rows)


def of_gradients(gradients):
    rows = []
    for f, name in ((E5M2, "E5M2"), (E4M3, "E4M3")):
        g = np.concatenate([g.ravel() for g in gradients])
        decoded = np.concatenate([coat.gemm_operand(f, g).ravel() for g in gradients])
        rows.append((name, f"{snr(g, decoded):.1f} dB", f"{flushed(g, decoded):.4%}"))
    table(("format of g", "SNR", "flushed to zero"), rows)


def of_moments(m, v):
    rows = []
    for size in (32, 128, 8192):
        row = [size]
        for x in (m, v):
            moment_groups = x[:x.size // size * size].reshape(-1, size)
            moment_groups = moment_groups[np.abs(moment_groups).max(axis=1) > 0]
            stored, counted = coat.store_moment(moment_groups), moment_groups != 0
            amaxes = np.abs(moment_groups).max(axis=1, keepdims=True)
            _, plain = scaled(E4M3, moment_groups, coat.scales_of(E4M3, amaxes))
            row.append(f"{np.median(stored[2]):.2f}")
            for read in (coat.load_moment(*stored), plain):
                row.append(f"{np.median(np.abs(read[counted] / moment_groups[counted] - 1)):.2%}")
        rows.append(row + [f"{1 + 8 / size:.4f}"])
    table(("values in a moment group", "m: median k", "median error", "without expansion", "v: median k",
           "median error", "without expansion", "bytes a moment"), rows)


def of_first_layer(run):
    """The noise of FP8 and of a batch of 4 x 256 characters in a trained model of four layers."""
    text, passes = np.fromfile(small_run.TEXT, np.uint8), []
    for coat.ROUNDING, begin in ((True, 0), (False, 0), (False, 20000)):
        windows = np.stack([text[i:i + 257] for i in range(begin, begin + 1024, 256)])
        passes.append(backward(run.weights["embedding"], run.layers, run.weights["final_norm"], windows, 32)[1])
    coat.ROUNDING = True
    table(("gradient of, in layer 1 of model A", "noise of FP8", "noise of a batch"),
          [(name, *(f"{noise:.0%}" for noise in both)) for name, both in noises(*passes).items()])


def real(folder):
    run = small_run.Run(folder=folder)
    of_widths(np.concatenate(run.norm_inputs), np.concatenate(run.gate_up))
    of_gradients(run.gradients)
    of_moments(run.m, run.v)
    of_first_layer(run)


def reports():
    """Five reports. How their tensors were made is the answer to lesson 13's question."""
    random = np.random.default_rng(1)
    x = random.standard_normal((64, 256)).astype(F32)
    outlier = np.where(np.arange(256) == 39, x * F32(1e5), x)
    spread = np.copysign(2 ** (-20 * random.random(x.shape)), x).astype(F32)
    rows = []
    for name, kind, f, values, amax in (("A", "norm inputs", E4M3, outlier, np.abs(outlier).max()),
                                        ("B", "gradients", E5M2, x, np.abs(x).max() / 3),
                                        ("C", "gradients", E4M3, spread, np.abs(spread).max()),
                                        ("D", "gradients", E5M2, spread, np.abs(spread).max()),
                                        ("E", "weights", E5M2, x, np.abs(x).max())):
        s = coat.scales_of(f, amax)
        _, read = scaled(f, values, s)
        above = {E4M3: 464, E5M2: 61440}[f]
        rows.append((name, kind, f"{snr(values, read):.1f} dB", f"{np.mean(np.abs(values) > above * s):.1%}",
                     f"{np.mean((values != 0) & (read == 0)):.1%}"))
    table(("report", "of", "SNR", "saturated", "flushed to zero"), rows)


def pairs():
    """Where the runs of GPT-2 ended that results.py measured on a GPU. Nothing is trained here."""
    recorded = json.loads(pathlib.Path(__file__).with_name("results.json").read_text())["convergence"]
    recipes, rows = ("bf16", "te", "coat"), []
    for seed in ("1", "2", "3"):
        runs = [recorded[recipe if seed == "1" else f"{recipe} seed {seed}"] for recipe in recipes]
        ends = [run["train"][-1] for run in runs]
        rows.append((seed, *(f"{end:.4f}" for end in ends), *(f"{end - ends[0]:+.4f}" for end in ends[1:])))
    table(("seed", *(f"`{recipe}`" for recipe in recipes), *(f"`{recipe}` - `bf16`" for recipe in recipes[1:])), rows)


LESSONS = {"1": formats, "2": one_scale, "3": granularity, "4": delayed, "5": gemms, "7": staircase, "noise": noise,
           "depth": depth, "9": expansion, "13": reports, "pairs": pairs}

if __name__ == "__main__":
    wanted, *folder = sys.argv[1:] or ["none"]
    if wanted == "real":
        real(pathlib.Path(*folder) if folder else small_run.FOLDER)
    elif wanted in LESSONS:
        LESSONS[wanted]()
    else:
        sys.exit(f"Which lesson? These have tables: {', '.join(LESSONS)}, and real, those of a small trained model.")
