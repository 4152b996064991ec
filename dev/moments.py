#!/usr/bin/env python3
"""The dynamic range of a real run's moments, and their error in FP8 (paper, section 4, figure 2 and table 1).

    python3 dev/moments.py CHECKPOINT > moments.json     of a run with --optimizer fp32; needs NumPy

Figure 2, for every moment group of 128: the range R = largest / smallest non-zero magnitude, k of equation 4,
and the range R^k after expansion. Table 1: the error of m / (sqrt(v) + eps), which updates the weight, for every pair
of formats with and without expansion, over all elements but those where it is 0. As in training, a positive
second moment never becomes zero. Last, the same where k leaves out the smallest codes of E4M3.
"""
import functools
import json
import pathlib
import sys

import numpy as np

import coat

CHUNK = 1 << 13  # moment groups at a time


def tensors(path):
    """The tensors of a safetensors file; BF16 as FP32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__" or entry["dtype"] not in ("BF16", "F32"):
            continue
        first, last = entry["data_offsets"]
        raw = data[start + first:start + last]
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16 if entry["dtype"] == "BF16" else raw
        found[name] = np.frombuffer(wide, np.float32).reshape(entry["shape"])
    return found


def moment_groups_of(state, moment):
    """The whole moment groups of 128 of the FP32 moments of all matrices."""
    moments = [x.reshape(-1) for name, x in state.items() if name.endswith(moment) and min(x.shape) > 1]
    return np.concatenate([x[:len(x) // 128 * 128].reshape(-1, 128) for x in moments])


# A coding gives moments x (moment groups, 128) after they were stored: second moments, or first.

def fp8(f, expands, x, second):
    if expands:
        return coat.load_moment(*coat.store_moment(x, f), f)
    s = coat.scales_of(f, np.abs(x).max(axis=1, keepdims=True))
    codes = coat.encode(f, x * (coat.F32(1) / s))
    return coat.decode(f, np.where(second & (x > 0) & (codes == 0), np.uint8(1), codes)) * s


CODINGS = {name + " + expansion" * expands: functools.partial(fp8, f, expands)
           for name, f in (("E4M3", coat.E4M3), ("E5M2", coat.E5M2)) for expands in (False, True)}


def update(m, v):
    return m.astype(float) / (np.sqrt(v.astype(float)) + 1e-8)


def errors(m, v, ways):
    """ways: name of a pair -> the codings of m and of v. Returns name -> mean square error."""
    noise, elements = dict.fromkeys(ways, 0.0), 0
    for first in range(0, len(m), CHUNK):
        part = [x[first:first + CHUNK] for x in (m, v)]
        exact, known = update(*part), {}
        elements += np.count_nonzero(exact)
        for name, pair in ways.items():
            for second, coding in enumerate(pair):
                if (second, coding) not in known:
                    known[second, coding] = coding(part[second], bool(second))
            got = update(*(known[second, coding] for second, coding in enumerate(pair)))
            noise[name] += float(np.sum(np.where(exact == 0, 0, exact - got) ** 2))
    return {name: total / elements for name, total in noise.items()}


def histogram(x, high, bins):
    """Values beyond the range count in the last bin."""
    counts = np.histogram(np.minimum(x, high * (1 - 1e-9)), bins, (0, high))[0]
    p10, median, p90 = (float(p) for p in np.quantile(x, (0.1, 0.5, 0.9), method="lower"))
    return {"low": 0, "width": high / bins, "counts": counts.tolist(), "p10": p10, "median": median, "p90": p90}


def ranges(x):
    x = np.abs(x[x.any(axis=1)])
    largest, smallest = x.max(axis=1), np.where(x == 0, np.inf, x).min(axis=1)
    decades = np.log10(largest.astype(float)) - np.log10(smallest)
    k = coat.expansion_exponent(largest, smallest)
    return {"groups": len(x), "log10_range": histogram(decades, 12, 60),
            "log10_range_expanded": histogram(k * decades, 12, 60), "k": histogram(k, 24, 96)}


def main(checkpoint):
    newest = max([*checkpoint.glob("step-*"), checkpoint])
    state = tensors(newest / "optimizer.state")
    m, v = moment_groups_of(state, ".m"), moment_groups_of(state, ".v")
    pairs = {(a, b): (CODINGS[a], CODINGS[b]) for a in CODINGS for b in CODINGS}
    table, parts = errors(m, v, pairs), {}
    for halvings in (0, 1, 2):
        # k stretches a moment group to FMAX / (FMIN 2^halvings)
        f = coat.E4M3._replace(fmin=coat.E4M3.fmin * 2**halvings)
        parts[halvings] = (functools.partial(fp8, f, True),) * 2
    json.dump({"step": int(newest.name.partition("-")[2]), "elements": m.size, "m": ranges(m), "v": ranges(v),
               "update": {a: {b: table[a, b] for b in CODINGS} for a in CODINGS},
               "parts_of_range": errors(m, v, parts)},
              sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    main(pathlib.Path(sys.argv[1]))
