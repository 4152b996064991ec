#!/usr/bin/env python3
"""Times training steps of a Llama in PyTorch, for comparison with ./train. Needs a GPU and PyTorch.

    python3 dev/results.py peers                   ./train and this program in turn
    python3 dev/peers.py llama-2-7b fp8 8          one of its runs: model, recipe (bf16 or fp8), batch
    python3 dev/peers.py llama-2-7b torchao 8      the same with torchao's FP8 linear layers, if it is installed
    torchrun --nproc_per_node 2 dev/peers.py llama-2-7b fsdp 6      several GPUs, with FSDP2

The model is what a user of PyTorch would write: compiled blocks, scaled_dot_product_attention, fused AdamW on
BF16 weights with BF16 states, no master weights, no clipping. `fp8` computes the linear layers of blocks with
torch._scaled_mm and just-in-time per-tensor scaling: E4M3 and fast accumulation in the forward pass, E5M2
gradients and exact accumulation in the backward pass. `torchao` has the layers of the package torchao in its
tensorwise recipe, which computes the same. Tokens are random.

`fsdp` shards the same model with FSDP2: FP32 master weights and moments, BF16 computation, gradients summed
in FP32. `fsdp-float8` has torchao's float8 linear layers, tensorwise, whose weights are gathered in FP8.
"""
import importlib.util
import json
import os
import statistics
import sys
import time

SHAPES = {  # layers, hidden size, heads, key-value heads, feed-forward size
    "llama-2-7b": (32, 4096, 32, 32, 11008),
    "llama-2-13b": (40, 5120, 40, 40, 13824),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632),
}
VOCABULARY, T = 32000, 2048
RECIPES = ("bf16", "fp8", "torchao", "fsdp", "fsdp-float8")
WARM_UP, STEPS = 4, 20


def linear_layer(fp8):
    """The class of linear layers: nn.Linear without a bias, or, with fp8, one whose GEMMs read FP8 operands."""
    import torch
    from torch import nn

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
        def backward(context, g):  # Hopper's GEMMs reduce over contiguous elements: hence the transposes
            x, w = context.saved_tensors
            (x8, x_scale), (w8, w_scale) = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
            g8, g_scale = quantize(g, torch.float8_e5m2)
            dx = torch._scaled_mm(g8, w8.t().contiguous().t(), scale_a=g_scale, scale_b=w_scale,
                                  out_dtype=torch.bfloat16)
            dw = torch._scaled_mm(g8.t().contiguous(), x8.t().contiguous().t(), scale_a=g_scale,
                                  scale_b=x_scale, out_dtype=torch.bfloat16)
            return dx, dw

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x):
            if not fp8:
                return nn.functional.linear(x, self.weight)
            return Fp8Linear.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
    return Linear


def llama(model, batch, fp8):
    """The class of a Llama of this shape, for micro-batches of (batch, T) tokens."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, C, heads, kv_heads, feed_forward = SHAPES[model]
    size = C // heads
    Linear = linear_layer(fp8)
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

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, C)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(C), nn.Linear(C, VOCABULARY, bias=False)

        def loss(self, x, targets):
            return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY).float(), targets.reshape(-1))

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.loss(x, targets)
    return Llama


def network_of(model, recipe, batch):
    """The model on the GPU with random weights; with a recipe `fsdp...` this rank's part of it."""
    import torch
    from torch import nn

    sharded = recipe.startswith("fsdp")
    Llama = llama(model, batch, recipe == "fp8")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if sharded else torch.bfloat16)
    with torch.device("meta" if sharded else "cuda"):
        network = Llama()
    if recipe in ("torchao", "fsdp-float8"):
        from torchao import float8
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=sharded)
        float8.convert_to_float8_training(network.blocks, config=config)
    for block in network.blocks:  # the layers share one compiled block
        block.compile()
    if sharded:
        from torch.distributed import init_process_group
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        init_process_group("nccl")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in [*network.blocks, network]:
            fully_shard(part, mp_policy=policy)
        network.to_empty(device="cuda")
    else:
        network.loss = torch.compile(network.loss)
    with torch.no_grad():
        for w in network.parameters():
            nn.init.normal_(w, std=0.02) if w.dim() > 1 else w.fill_(1)
    return network


def step_times(network, recipe, batch):
    """Milliseconds of STEPS steps after WARM_UP others."""
    import torch

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(VOCABULARY, (batch, T + 1), device="cuda")
    times = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        network(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if recipe == "fsdp-float8":
            from torchao import float8
            float8.precompute_float8_dynamic_scale_for_fsdp(network)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[WARM_UP:]


def measure(model, recipe, batch):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    network = network_of(model, recipe, batch)
    _, C, heads, kv_heads, _ = SHAPES[model]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        times = step_times(network, recipe, batch)
        q = torch.empty(batch, heads, T, C // heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = q[:, :kv_heads].detach().requires_grad_()
        chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=kv_heads != heads)
    if recipe.startswith("fsdp"):
        torch.distributed.destroy_process_group()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {"ms": statistics.median(times), "ms_least": min(times), "ms_most": max(times),
            "tokens_per_second": 1e3 * ranks * batch * T / statistics.median(times),
            "note": f"torch {torch.__version__}, {SDPBackend(chosen).name}"}


def fail(sentence):
    sys.exit(f"peers.py: {sentence}")


def parse_arguments():
    """(model, recipe, batch)"""
    if sys.argv[1:] in (["help"], ["--help"], ["-h"]):
        print(__doc__.strip())
        sys.exit()
    words = sys.argv[1:]
    if len(words) != 3 or words[0] not in SHAPES or words[1] not in RECIPES or not words[2].isdigit():
        fail(f"It needs a model ({', '.join(SHAPES)}), a recipe ({', '.join(RECIPES)}) and a batch.")
    if importlib.util.find_spec("torch") is None:
        fail("PyTorch is missing; install it with \"pip install torch\".")
    return words[0], words[1], int(words[2])


def main():
    measured = measure(*parse_arguments())
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
