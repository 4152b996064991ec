#!/usr/bin/env python3
"""Times training steps of a Llama in PyTorch, for comparison with ./train. Needs a GPU and PyTorch.

    python3 dev/run.py peers                       ./train and this program in turn: dev/results/peers.json
    python3 dev/peers.py llama-2-7b fp8 8          one of its runs: model, recipe (bf16 or fp8), batch

The model is what a user of PyTorch would write: compiled blocks, scaled_dot_product_attention, fused AdamW on
BF16 weights with BF16 states. Unlike ./train it has no FP32 master weights and does not clip gradients. `fp8`
computes the linear layers of the blocks with torch._scaled_mm and just-in-time per-tensor scaling: E4M3 and
fast accumulation in the forward pass, E5M2 gradients and exact accumulation in the backward pass. Tokens are
random.
"""
import json
import statistics
import sys
import time

SHAPES = {  # layers, hidden size, heads, key-value heads, feed-forward size
    "llama-2-7b": (32, 4096, 32, 32, 11008),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632),
}
VOCABULARY, T = 32000, 2048
WARM_UP, STEPS = 4, 20


def measure(model, recipe, batch):
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    layers, C, heads, kv_heads, feed_forward = SHAPES[model]
    size = C // heads

    def quantize(x, format):
        largest = torch.finfo(format).max
        scale = x.abs().amax().float().clamp(min=1e-12) / largest
        return (x.float() / scale).clamp(-largest, largest).to(format), scale

    class Fp8Linear(torch.autograd.Function):  # y = x w^T
        @staticmethod
        def forward(context, x, w):
            context.save_for_backward(x, w)
            (x8, x_scale), (w8, w_scale) = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
            return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16,
                                    use_fast_accum=True)

        @staticmethod
        def backward(context,
                     g):  # Hopper's FP8 GEMM reduces over contiguous elements, hence the transposed copies
            x, w = context.saved_tensors
            (x8, x_scale), (w8, w_scale) = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
            g8, g_scale = quantize(g, torch.float8_e5m2)
            dx = torch._scaled_mm(g8, w8.t().contiguous().t(), scale_a=g_scale, scale_b=w_scale,
                                  out_dtype=torch.bfloat16)
            dw = torch._scaled_mm(g8.t().contiguous(),
                                  x8.t().contiguous().t(), scale_a=g_scale, scale_b=x_scale,
                                  out_dtype=torch.bfloat16)
            return dx, dw

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x):
            if recipe == "bf16":
                return F.linear(x, self.weight)
            return Fp8Linear.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)

    angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, size, 2) / size)).cuda()
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(C), nn.RMSNorm(C)
            self.qkv, self.out = Linear(C, (heads + 2 * kv_heads) * size), Linear(C, C)
            self.gate_up, self.down = Linear(C, 2 * feed_forward), Linear(feed_forward, C)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).view(batch, T, -1, size).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True,
                                               enable_gqa=kv_heads != heads)
            x = x + self.out(y.transpose(1, 2).reshape(batch, T, C))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.RMSNorm(C), nn.Linear(C, VOCABULARY, bias=False)

        def forward(self, x, targets):
            return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY).float(), targets.reshape(-1))

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        embedding, head = nn.Embedding(VOCABULARY, C), Head()
        blocks = nn.ModuleList(Block() for _ in range(layers))
    network = nn.ModuleList([embedding, blocks, head])
    for w in network.parameters():
        if w.dim() > 1:
            nn.init.normal_(w, std=0.02)
    for part in [*blocks, head]:  # the layers share one compiled block
        part.compile()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(VOCABULARY, (batch, T + 1), device="cuda")
    times = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        for _ in range(WARM_UP + STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            x = embedding(tokens[:, :-1])
            for block in blocks:
                x = block(x)
            head(x, tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        q = torch.empty(batch, heads, T, size, device="cuda", requires_grad=True)
        k = q[:, :kv_heads].detach().requires_grad_()
        chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=kv_heads != heads)
    times = times[WARM_UP:]
    return {"ms": statistics.median(times), "ms_least": min(times), "ms_most": max(times),
            "tokens_per_second": 1e3 * batch * T / statistics.median(times),
            "note": f"torch {torch.__version__}, {SDPBackend(chosen).name}"}


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in SHAPES or sys.argv[2] not in ("bf16", "fp8"):
        sys.exit(__doc__.strip())
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))


if __name__ == "__main__":
    main()
