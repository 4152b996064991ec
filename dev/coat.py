#!/usr/bin/env python3
"""COAT (arXiv 2410.19313) in one page of NumPy: FP8 training, to be read from top to bottom.

    python3 dev/coat.py        shows what FP8 changes in a layer, and trains a small model in FP32 and in COAT

COAT trains language models with three kinds of values in 8 bits (FP8): the operands of matrix products
(GEMMs), the activations that are saved for the backward pass, and AdamW's two moments. Each section needs
only those before it. test/dev/arithmetic.cpp compares all of it with reference.cpp.
"""
import pathlib
import numpy as np

F32 = np.float32
FP8 = True  # False leaves every value in FP32, so that COAT can be compared with it

# --- 1. Formats. FP8 has a sign, an exponent and a mantissa of M bits:
#      value = 2^(exponent - bias) (1 + mantissa / 2^M)      if exponent > 0
#      value = 2^(1 - bias) mantissa / 2^M                   if exponent = 0: a subnormal
# E4M3 (M = 3) is for weights, activations and moments; E5M2 (M = 2) has more range, for gradients.
class Format:
    def __init__(self, mantissa, bias, largest):
        self.M, self.bias, self.max = mantissa, bias, F32(largest)
        self.min = F32(2.0 ** (1 - bias - mantissa))  # the smallest subnormal

E4M3, E5M2 = Format(3, 7, 448), Format(2, 15, 57344)

def decode(f, code):
    """The values of codes. E4M3 has no infinity; only the code above the largest value is NaN."""
    code = np.asarray(code, np.uint8)
    exponent, mantissa = (code & 0x7F) >> f.M, code & (1 << f.M) - 1
    significand = np.where(exponent > 0, 2**f.M + mantissa, mantissa)
    value = np.ldexp(significand.astype(F32), np.maximum(exponent, 1).astype(int) - f.bias - f.M)
    value = np.where(value > f.max, np.nan if f is E4M3 else np.where(mantissa, np.nan, np.inf), value)
    return np.where(code & 0x80, -value, value).astype(F32)

def encode(f, x):
    """The nearest codes; a tie goes to the even one, and values beyond the largest become the largest."""
    x = np.asarray(x, F32)
    magnitude = np.minimum(np.abs(x), f.max)
    e = np.frexp(np.maximum(magnitude, F32(2) ** (1 - f.bias)))[1] - 1  # in [2^e, 2^(e+1)), or subnormal
    steps = np.rint(np.ldexp(magnitude, f.M - e))                   # codes there are 2^(e - M) apart
    # The steps of a normal value begin with a binary 1, which adds one to the exponent, e + bias - 1.
    code = np.nan_to_num(steps).astype(int) + (e + f.bias - 1 << f.M)
    return (np.where(np.isnan(x), 0x7F, code) | np.signbit(x) * 0x80).astype(np.uint8)

def bf16(x):
    """FP32 rounded to BF16, which is its upper half: round the lower half away, ties to even."""
    if not FP8:
        return x
    bits = np.atleast_1d(np.asarray(x, F32)).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(F32)
    return np.where(np.isfinite(x), rounded.reshape(np.shape(x)), x).astype(F32)

# --- 2. Quantizers. A block of values shares a scale s = amax / FMAX, so that x / s fits the format. For GEMM
# operands the block is the whole tensor: the GEMM multiplies codes, and its result with s once. Norms and
# activation functions decode every value they read, so their inputs can have a scale for each 1x16 group.

def scales_of(f, amax):
    s = np.maximum(amax.astype(F32) / f.max, F32(2.0**-126))        # so that 1 / s is finite
    return np.where(amax == 0, F32(1), s)

def quantize_tensor(f, x):
    """x -> codes and one FP32 scale."""
    s = scales_of(f, np.max(np.abs(x)))
    return encode(f, x * (F32(1) / s)), s

def quantize_groups(x, width=16):
    """x (rows, cols) -> E4M3 codes, and BF16 scales (rows, cols / width).

    The scale is rounded first and then divided by, so that decoding uses the scale of encoding."""
    if not FP8:
        return x, None
    groups = x.reshape(len(x), -1, width)
    s = bf16(scales_of(E4M3, np.max(np.abs(groups), axis=2)))
    return encode(E4M3, groups * (F32(1) / s)[..., None]).reshape(x.shape), s

def dequantize_groups(codes, s):
    if s is None:
        return codes
    return (decode(E4M3, codes).reshape(*s.shape, -1) * s[..., None]).reshape(codes.shape)

def gemm_operand(f, x):
    """x as a GEMM with per-tensor scales reads it."""
    if not FP8:
        return x
    codes, s = quantize_tensor(f, x)
    return decode(f, codes) * s

# --- 3. Optimizer. E4M3 spans a factor of 448 / 2^-9 = 229,376, but a group of 128 moments spans far less and
# would use a part of the codes. Dynamic range expansion stretches the group before it is quantized:
#      expand:    y = sign(x) FMAX (|x| / max)^k        k = log(FMAX / FMIN) / log(max / min)    (equation 4)
#      contract:  x = sign(y) max (|y| / FMAX)^(1 / k)
# A group stores its codes, max and k. k is a multiple of 1/256, from 1/16 to 64.

def log2(x):
    """The base-2 logarithm; -126 - 23 for zero, whose results are not used."""
    return np.log2(np.maximum(np.asarray(x, float), 2.0**-149)).astype(F32)

def expansion_factor(f, largest, smallest):
    log_range, log_ratio = log2(f.max) - log2(f.min), log2(largest) - log2(smallest)
    with np.errstate(divide="ignore"):
        k = np.rint(256 * log_range / log_ratio) / 256
    return np.where(log_ratio * 64 > log_range, np.maximum(k, 1 / 16), 64).astype(F32)

def expand(f, x, largest, k):
    y = f.max * np.exp2((k * (log2(np.abs(x)) - log2(largest))).astype(float)).astype(F32)
    return np.where(x == 0, F32(0), np.copysign(y, x))

def contract(f, y, largest, k):
    root = np.exp2(((log2(np.abs(y)) - log2(f.max)) / (2 * k)).astype(float)).astype(F32)
    x = np.maximum(largest * root * root, F32(2.0**-149))           # twice: root^2 alone may underflow
    return np.where((y == 0) | (largest == 0), F32(0), np.copysign(x, y)).astype(F32)

def store_moment(x, keep_positive, f=E4M3):
    """A moment (groups, 128) -> codes, max and k of each group.

    keep_positive is for second moments: a positive value that became 0 would make the next update huge."""
    if not FP8:
        return x, None, None
    magnitude = np.abs(x)
    largest = magnitude.max(axis=1, keepdims=True)
    smallest = np.where(x == 0, F32(np.inf), magnitude).min(axis=1, keepdims=True)
    k = np.where(largest > 0, expansion_factor(f, largest, smallest), F32(1))
    codes = encode(f, expand(f, x, largest, k))
    return np.where(keep_positive & (x > 0) & (codes == 0), np.uint8(1), codes), largest, k

def load_moment(moment, f=E4M3):
    codes, largest, k = moment
    if k is None:
        return codes
    return contract(f, decode(f, codes), largest, k)

def adamw(w, g, m_stored, v_stored, step, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1):
    """One step of FP32 weights (groups, 128) with FP8 moments. The weight uses the moments before they are
    quantized again."""
    b1, b2 = F32(beta1), F32(beta2)
    m = b1 * load_moment(m_stored) + (1 - b1) * g
    v = b2 * load_moment(v_stored) + (1 - b2) * (g * g)
    root = np.sqrt(v) / F32(np.sqrt(1 - float(b2) ** step))
    update = m / F32(1 - float(b1) ** step) / (root + F32(eps))
    w = w - F32(lr) * (update + F32(decay) * w)
    return w, store_moment(m, False), store_moment(v, True)

# --- 4. Operators: values are FP32. x (tokens, C), weights (out, in).

def rms_norm(x, weight, eps=F32(1e-5)):
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight

def rms_norm_backward(x, weight, dy, eps=F32(1e-5)):
    rstd = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    normal, d = x * rstd, dy * weight
    return (d - normal * np.mean(d * normal, axis=1, keepdims=True)) * rstd, np.sum(dy * normal, axis=0)

def swiglu(gate_up):
    gate, up = np.split(gate_up, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up

def swiglu_backward(gate_up, dact):
    gate, up = np.split(gate_up, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dact * up * s * (1 + gate * (1 - s)), dact * gate * s], axis=1)

def rope(qkv, T, HS, sign=1):
    """RoPE: pair i of a query or key head is rotated at position t by the angle t theta^(-2 i / HS)."""
    heads = qkv.reshape(-1, T, 3, qkv.shape[1] // (3 * HS), HS)
    angle = np.arange(T)[:, None, None, None] * 10000.0 ** (-2 * np.arange(HS // 2) / HS)
    cos, sin = np.cos(angle).astype(F32), (sign * np.sin(angle)).astype(F32)
    a, b = np.split(heads, 2, axis=4)
    rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=4)
    rotated[:, :, 2] = heads[:, :, 2]                               # values are not rotated
    return rotated.reshape(qkv.shape)

def attention(qkv, T, HS, out=None, dout=None):
    """Causal attention; with its output and the gradient of that, the gradient of qkv."""
    q, k, v = np.split(qkv.reshape(-1, T, qkv.shape[1] // HS, HS).swapaxes(1, 2), 3, axis=1)
    scores = q @ k.swapaxes(2, 3) / F32(np.sqrt(HS))
    scores = np.where(np.tri(T, dtype=bool), scores, F32(-np.inf))
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    if dout is None:
        return (p @ v).swapaxes(1, 2).reshape(len(qkv), -1)
    out, dout = (y.reshape(-1, T, y.shape[1] // HS, HS).swapaxes(1, 2) for y in (out, dout))
    ds = p * (dout @ v.swapaxes(2, 3) - np.sum(dout * out, axis=3, keepdims=True)) / F32(np.sqrt(HS))
    gradients = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    return np.concatenate(gradients, axis=1).swapaxes(1, 2).reshape(qkv.shape)

# --- 5. Flow: one Llama layer. A linear layer quantizes both operands of its three GEMMs per tensor. Norms
# and the activation function read what was saved in groups, in both passes. Everything else is BF16. Outputs
# of norms and of the activation function are not saved: backward computes them again.
#
# Rounding is a staircase: its derivative is zero almost everywhere. Backward treats it as the identity, of
# derivative one (a straight-through estimate), and takes all other derivatives at the rounded values that
# forward used. So the gradient is close to that of the loss, but not equal to it.

def linear(x, w):
    return bf16(gemm_operand(E4M3, x) @ gemm_operand(E4M3, w).T)    # fprop: y = x w^T

def linear_backward(x, w, g):
    g8 = gemm_operand(E5M2, g)
    dx = bf16(g8 @ gemm_operand(E4M3, w))                           # dgrad: dx = g w
    return dx, bf16(g8.T @ gemm_operand(E4M3, x))                   # wgrad: dw = g^T x

def layer_forward(w, x, T, HS):
    """The residual stream x (tokens, C) -> the stream after the layer in FP32, and what is saved."""
    norm1_input = quantize_groups(x)
    qkv = linear(rms_norm(dequantize_groups(*norm1_input), w["norm1"]), w["qkv"])
    qkv = bf16(rope(qkv, T, HS))
    heads = bf16(attention(qkv, T, HS))
    residual2 = bf16(x) + linear(heads, w["attention_out"])
    norm2_input = quantize_groups(residual2)
    gate_up = quantize_groups(linear(rms_norm(dequantize_groups(*norm2_input), w["norm2"]), w["gate_up"]))
    out = bf16(residual2) + linear(swiglu(dequantize_groups(*gate_up)), w["down"])
    return out, (norm1_input, qkv, heads, norm2_input, gate_up)

def layer_backward(w, saved, dx, T, HS):
    """The gradient dx of the stream after the layer -> before the layer, and the gradients of the weights."""
    norm1_input, qkv, heads, norm2_input, gate_up = saved
    x1, x2, gate_up = (dequantize_groups(*s) for s in (norm1_input, norm2_input, gate_up))
    d = {}
    dact, d["down"] = linear_backward(swiglu(gate_up), w["down"], dx)
    dnorm2, d["gate_up"] = linear_backward(rms_norm(x2, w["norm2"]), w["gate_up"],
                                           swiglu_backward(gate_up, dact))
    dbranch, d["norm2"] = rms_norm_backward(x2, w["norm2"], dnorm2)
    dx = bf16(dx + dbranch)
    dheads, d["attention_out"] = linear_backward(heads, w["attention_out"], dx)
    dqkv = bf16(rope(bf16(attention(qkv, T, HS, heads, dheads)), T, HS, -1))
    dnorm1, d["qkv"] = linear_backward(rms_norm(x1, w["norm1"]), w["qkv"], dqkv)
    dbranch, d["norm1"] = rms_norm_backward(x1, w["norm1"], dnorm1)
    return bf16(dx + dbranch), d

# --- 6. A whole model: an embedding, layers, a final norm, and a head that is the embedding transposed.

def loss_and_gradients(ends, layers, tokens, targets, T, HS):
    """Mean cross entropy in nats; the gradients of `ends` (embedding and final norm) and of each layer."""
    x, saved, dlayers = ends["embedding"][tokens], [], []
    for w in layers:
        x, kept = layer_forward(w, x, T, HS)
        saved.append(kept)
    y = rms_norm(x, ends["final_norm"])
    logits = y @ ends["embedding"].T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    correct = np.arange(len(targets)), targets
    loss = -np.mean(np.log(p[correct]))
    p[correct] -= 1
    dlogits = p / F32(len(targets))                                 # the gradient of the mean loss
    dx, dfinal = rms_norm_backward(x, ends["final_norm"], dlogits @ ends["embedding"])
    for w, kept in zip(layers[::-1], saved[::-1]):
        dx, dlayer = layer_backward(w, kept, dx, T, HS)
        dlayers.insert(0, dlayer)
    dembedding = dlogits.T @ y
    np.add.at(dembedding, tokens, dx)
    return loss, {"embedding": dembedding, "final_norm": dfinal}, dlayers

def in_groups(x):
    """A tensor as rows of 128 values for the optimizer; zeros fill the last row."""
    return np.append(x.ravel(), np.zeros(-x.size % 128, F32)).reshape(-1, 128)

def train(text, steps, seed=1, C=64, T=32, B=8, lr=4e-3):
    """Trains a model of one layer on ASCII bytes, and yields the loss of each step."""
    random = np.random.default_rng(seed)
    shapes = {"qkv": (3 * C, C), "attention_out": (C, C), "gate_up": (2 * C, C), "down": (C, C)}
    layer = {name: random.standard_normal(s).astype(F32) * F32(0.06) for name, s in shapes.items()}
    layer |= {"norm1": np.ones(C, F32), "norm2": np.ones(C, F32)}
    ends = {"embedding": random.standard_normal((128, C)).astype(F32) / 8, "final_norm": np.ones(C, F32)}
    nothing = {name: in_groups(0 * w) for name, w in (ends | layer).items()}
    m, v = ({name: store_moment(zero, False) for name, zero in nothing.items()} for _ in "mv")
    for step in range(1, steps + 1):
        windows = np.stack([text[i:i + T + 1] for i in random.integers(0, len(text) - T, B)])
        loss, dends, (dlayer,) = loss_and_gradients(ends, [layer], windows[:, :-1].ravel(),
                                                    windows[:, 1:].ravel(), T, C // 4)
        for weights, gradients in ((ends, dends), (layer, dlayer)):
            for name, w in weights.items():
                new, m[name], v[name] = adamw(in_groups(w), in_groups(gradients[name]), m[name], v[name],
                                              step, lr * min(1, step / 20))
                weights[name] = new.ravel()[:w.size].reshape(w.shape)
        yield loss

def rms(x):
    return np.sqrt(np.mean(np.square(x, dtype=float)))

def in_fp32_and_coat(run):
    """What run() returns without and with FP8."""
    global FP8
    results = []
    for FP8 in (False, True):
        results.append(run())
    return results

if __name__ == "__main__":
    random = np.random.default_rng(0)
    w = {name: random.standard_normal((rows, 64)).astype(F32) / 8 for name, rows in
         (("qkv", 192), ("attention_out", 64), ("gate_up", 128), ("down", 64))}
    w["norm1"] = w["norm2"] = np.ones(64, F32)
    x, g = (random.standard_normal((32, 64)).astype(F32) for _ in "xg")
    def layer():
        y, saved = layer_forward(w, x, T=32, HS=16)
        dx, d = layer_backward(w, saved, g, T=32, HS=16)
        return {"output": y, "dx": dx} | {"d" + name: gradient for name, gradient in d.items()}
    exact, coat = in_fp32_and_coat(layer)
    print("One layer in COAT, relative error against FP32:")
    for name in exact:
        print(f"  {name:14} {100 * rms(coat[name] - exact[name]) / rms(exact[name]):5.1f}%")
    text = np.frombuffer((pathlib.Path(__file__).parent.parent / "coat.h").read_bytes(), np.uint8) & 127
    print("A model of one layer learns the text of coat.h. Mean loss of 20 steps, in nats; the last column has other")
    print("first weights and batches, and shows what is chance:\n  step   FP32   COAT   FP32, other seed")
    exact, coat = in_fp32_and_coat(lambda: list(train(text, 200)))
    FP8 = False
    other = list(train(text, 200, seed=2))
    for step in range(20, 201, 20):
        print(f"  {step:4}", *(f"{np.mean(losses[step - 20:step]):6.3f}" for losses in (exact, coat, other)))
