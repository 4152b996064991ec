#!/usr/bin/env python3
"""Prints the tables of the lessons in WALK.md, computed by coat.py: `python3 dev/lessons.py 5` those of lesson 5.

The lessons follow one group of 16 activations, one group of moments and one product of 4x4 matrices. The tables
of a real run need a checkpoint of a small model, which is trained in two minutes if there is none:

    make train && python3 dev/lessons.py real
"""
import sys

import numpy as np

import coat
import small_run
from coat import E4M3, E5M2, F32

# The numbers of the course.
GROUP = np.array([0.31, -0.52, 0.08, 1.10, -0.24, 0.67, -0.05, 0.43,
                  -0.91, 0.16, 0.02, -0.38, 0.75, -0.13, 24.0, 0.57], F32)  # one token's 16 features; an outlier
TENSOR_AMAX = F32(30000)  # the largest magnitude of the tensor that the group is a part of
MOMENTS = np.array([0.90, 0.31, 0.17, 0.06], F32)  # second moments of one group
X = np.array([[0.5, -1.2, 0.3, 0.8], [1.1, 0.4, -0.7, 0.2], [-0.3, 0.9, 1.6, -0.5], [0.7, -0.1, 0.6, 1.3]], F32)
W = np.array([[0.2, 0.5, -0.4, 0.1], [-0.6, 0.3, 0.7, 0.2], [0.4, -0.2, 0.1, 0.9], [0.3, 0.8, -0.5, -0.1]], F32)
G = np.array([[2e-5, -7e-6, 4e-6, 1e-5], [-3e-6, 9e-6, 5e-5, -2e-6], [8e-6, 1e-6, -4e-4, 6e-6],
              [-1e-5, 3e-6, 7e-6, -9e-6]], F32)


def table(title, head, rows):
    """Prints a table of Markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def number(x):
    return f"{x:.4g}"


def percent(x):
    return f"{100 * x:+.2f}%" if x else "0"


def bits(f, code):
    word = f"{code:08b}"
    return f"{word[0]} {word[1:8 - f.M]} {word[8 - f.M:]}"


def stored(f, x, s):
    """Codes of x / s, and the values that are read back."""
    codes = coat.encode(f, x * (F32(1) / s))
    return codes, coat.decode(f, codes) * s


def snr(x, decoded):
    """Signal to noise in decibels: 6 dB are one bit."""
    return 10 * np.log10(np.sum(np.square(x, dtype=float)) / np.sum(np.square(decoded - x, dtype=float)))


def flushed(x, decoded):
    return 100 * np.mean((x != 0) & (decoded == 0))


# --- The lessons

def formats():
    rows = []
    for f, name in ((E4M3, "E4M3"), (E5M2, "E5M2")):
        for x in (1.1, 1.99, 0.02, 0.001, 500, 60000):
            code = int(coat.encode(f, x))
            value = float(coat.decode(f, code))
            rows.append((name, number(x), bits(f, code), f"0x{code:02X}", number(value), percent(value / x - 1)))
    table("1. Values and their nearest codes", ("format", "x", "bits", "code", "value", "error"), rows)


def scales():
    s_group = coat.bf16(coat.scales_of(E4M3, np.abs(GROUP).max()))
    s_tensor = coat.scales_of(E4M3, TENSOR_AMAX)
    _, one = stored(E4M3, GROUP, s_group)
    _, all_of_it = stored(E4M3, GROUP, s_tensor)
    rows = [(number(x), number(x / s_group), number(a), percent(a / x - 1), number(x / s_tensor), number(b),
             percent(b / x - 1)) for x, a, b in zip(GROUP, one, all_of_it)]
    table(f"2. The group with its own scale {s_group:.4g}, and with the tensor's, {s_tensor:.4g}",
          ("x", "x / s", "read back", "error", "x / s of the tensor", "read back", "error"), rows)
    print(f"\nRMS error relative to the group's RMS: {coat.rms(one - GROUP) / coat.rms(GROUP):.2%}, "
          f"{coat.rms(all_of_it - GROUP) / coat.rms(GROUP):.2%}; without the outlier "
          f"{coat.rms((one - GROUP)[GROUP < 2]) / coat.rms(GROUP[GROUP < 2]):.2%}, "
          f"{coat.rms((all_of_it - GROUP)[GROUP < 2]) / coat.rms(GROUP[GROUP < 2]):.2%}")


def delayed():
    history, rows = [], []
    for step, amax in enumerate((10.0, 11.0, 10.5, 12.0, 48.0, 13.0, 12.5), 1):
        x = np.linspace(-amax, amax, 1001).astype(F32)
        s = coat.scales_of(E4M3, F32(max(history[-3:], default=amax)))
        now = coat.scales_of(E4M3, F32(amax))
        decoded = stored(E4M3, x, s)[1]
        rows.append((step, number(amax), number(s * 448), f"{100 * np.mean(np.abs(x) > 464 * s):.0f}%",
                     f"{snr(x, decoded):.1f} dB", f"{snr(x, stored(E4M3, x, now)[1]):.1f} dB"))
        history.append(amax)
    table("4. Delayed scaling with a history of three steps, and a spike at step 5",
          ("step", "amax", "amax that the scale is made for", "saturated", "SNR, delayed", "SNR, just in time"), rows)


def gemms():
    x8, w8, g8 = coat.gemm_operand(E4M3, X), coat.gemm_operand(E4M3, W), coat.gemm_operand(E5M2, G)
    rows = []
    for name, exact, fp8 in (("fprop: y = x w^T", X @ W.T, x8 @ w8.T), ("dgrad: dx = g w", G @ W, g8 @ w8),
                             ("wgrad: dw = g^T x", G.T @ X, g8.T @ x8)):
        rows.append((name, "; ".join(number(v) for v in exact[0]), "; ".join(number(v) for v in fp8[0]),
                     f"{coat.rms(fp8 - exact) / coat.rms(exact):.2%}"))
    table("5. The three GEMMs of a linear layer, 4 tokens and 4 features: the first row of each result",
          ("GEMM", "in FP32", "with FP8 operands", "RMS error"), rows)
    for name, values, read in (("x", X, x8), ("w", W, w8), ("g", G, g8)):
        print(f"\n{name}:\n{values}\nread back:\n{read}")


def staircase():
    s = coat.scales_of(E4M3, F32(1.1))
    rows = []
    for x in (0.30, 0.31, 0.32, 0.33, 0.34):
        values = stored(E4M3, np.array([x, x + 1e-5], F32), s)[1]
        rows.append((number(x), number(values[0]), number((values[1] - values[0]) / 1e-5), 1))
    table("7. A value, what is stored of it, and the slope of that",
          ("x", "stored", "its slope", "slope that backward uses"), rows)


def expansion():
    one = stored(E4M3, MOMENTS, coat.scales_of(E4M3, MOMENTS.max()))
    codes, largest, k = coat.store_moment(MOMENTS[None], True)
    expanded = coat.load_moment((codes, largest, k))[0]
    rows = [(number(x), number(coat.decode(E4M3, c)), number(a), percent(a / x - 1),
             number(float(448 * (x / largest[0, 0]) ** k[0, 0])), number(coat.decode(E4M3, e)), number(b),
             percent(b / x - 1))
            for x, c, a, e, b in zip(MOMENTS, *one, codes[0], expanded)]
    table(f"9. Four second moments; k = {k[0, 0]:.4g}",
          ("x", "stored", "read back", "error", "expanded", "stored", "read back", "error"), rows)
    rows = []
    for k in (1, 2, 3, 4, 1167 / 256, 5, 6):
        kk = F32(k)
        codes = coat.encode(E4M3, coat.expand(E4M3, MOMENTS, MOMENTS.max(), kk))
        errors = coat.contract(E4M3, coat.decode(E4M3, codes), MOMENTS.max(), kk) / MOMENTS - 1
        rows.append((number(k), *(percent(e) for e in errors)))
    table("9. The errors of the four moments by k", ("k", *(number(x) for x in MOMENTS)), rows)


# --- Tables of a real run

def real(run):
    for title, x in (("the inputs of norms", np.concatenate(run.norm_inputs)), ("gate and up, the activation's input", np.concatenate(run.gate_up))):
        rows = []
        for name, width in (("1x16", 16), ("1x32", 32), ("1x128", 128), ("a tensor", 0)):
            if width and x.shape[1] % width:
                continue
            decoded = coat.dequantize_groups(*coat.quantize_groups(x, width)) if width else coat.gemm_operand(E4M3, x)
            rows.append((name, f"{snr(x, decoded):.1f} dB", f"{flushed(x, decoded):.3f}%",
                         f"{1 + 2 / width:.3f}" if width else "1.000"))
        table(f"3. One scale for: {title}", ("values that share a scale", "SNR", "flushed to zero", "bytes a value"), rows)
    rows = []
    for f, name in ((E5M2, "E5M2"), (E4M3, "E4M3")):
        decoded = [coat.gemm_operand(f, g) for g in run.gradients]
        g, d = np.concatenate(run.gradients), np.concatenate(decoded)
        rows.append((name, f"{snr(g, d):.1f} dB", f"{flushed(g, d):.3f}%"))
    table("5. Gradients of layers' outputs, per-tensor scaling", ("format", "SNR", "flushed to zero"), rows)
    for title, x in (("first moments", run.m), ("second moments", run.v)):
        rows = []
        for size in (32, 128, 512, 8192):
            groups = x[:x.size // size * size].reshape(-1, size)
            groups = groups[np.abs(groups).max(axis=1) > 0]
            moment = coat.store_moment(groups, x is run.v)
            error = coat.load_moment(moment)[groups != 0] / groups[groups != 0] - 1
            codes = coat.encode(E4M3, groups / coat.scales_of(E4M3, np.abs(groups).max(axis=1, keepdims=True)))
            plain = coat.decode(E4M3, codes) * coat.scales_of(E4M3, np.abs(groups).max(axis=1, keepdims=True))
            plain_error = plain[groups != 0] / groups[groups != 0] - 1
            rows.append((size, f"{np.median(moment[2]):.2f}", f"{np.median(np.abs(error)):.2%}",
                         f"{np.median(np.abs(plain_error)):.2%}", f"{1 + 8 / size:.4f}"))
        table(f"9. {title}: groups of", ("values", "median k", "median error", "without expansion", "bytes a value"), rows)


LESSONS = {"1": formats, "2": scales, "3": scales, "4": delayed, "5": gemms, "7": staircase, "9": expansion}

if __name__ == "__main__":
    wanted = sys.argv[1:] or [lesson for lesson in LESSONS if lesson != "3"]
    for lesson in wanted:
        if lesson == "real":
            real(small_run.Run())
        elif lesson in LESSONS:
            LESSONS[lesson]()
        else:
            sys.exit(f"Lesson {lesson} has no tables; choose of {', '.join(LESSONS)}, real.")
