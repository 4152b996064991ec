#!/usr/bin/env python3
"""Times attention of build/bench, of PyTorch and of FlashAttention-4 in turn. Needs a GPU and PyTorch.

    python3 dev/results.py attention                                  every shape
    python3 dev/attention_peers.py 'llama-2-7b, 8 x 2,048'            one of them

FlashAttention-4 (the package flash-attn-4) is left out where it is not installed.
"""
import importlib.util
import json
import statistics
import subprocess
import sys

ATTENTION = {  # model, batch, tokens, heads, key-value heads, head size
    "llama-2-7b, 8 x 2,048": ("llama-2-7b", 8, 2048, 32, 32, 128),
    "llama-3.1-8b, 4 x 2,048": ("llama-3.1-8b", 4, 2048, 32, 8, 128),
    "llama-3.1-8b, 2 x 8,192": ("llama-3.1-8b", 2, 8192, 32, 8, 128),
    "llama-3.1-8b, 1 x 16,384": ("llama-3.1-8b", 1, 16384, 32, 8, 128),
    "gpt2, 64 x 1,024": ("gpt2", 64, 1024, 12, 12, 64),
    "tinyllama-1.1b, 16 x 2,048": ("tinyllama-1.1b", 16, 2048, 32, 4, 64),
    "llama-3.2-1b, 4 x 8,192": ("llama-3.2-1b", 4, 8192, 32, 8, 64),
    "llama-3.2-1b with 32 key-value heads, 4 x 8,192": ("llama-3.2-1b", 4, 8192, 32, 32, 64),
}
REPEATS, REST = 21, 300  # of a kernel, as in bench.cu; passes over memory before them


def attention_of_bench(model, batch, tokens, kv_heads):
    """Microseconds of our kernels, forward and backward, as build/bench measures them."""
    report = "build/attention.json"
    subprocess.run(["build/bench", "--model", model, "--batch", str(batch), "--seq", str(tokens), "--kv-heads",
                    str(kv_heads), "--only", "attention alone: ", "--json", report], check=True,
                   stdout=subprocess.DEVNULL)
    with open(report, encoding="utf-8") as file:
        operators = json.load(file)["runs"][0]["operators"]
    return [1e6 * operator["seconds"] for operator in operators]


def attention_of_peer(attention, batch, tokens, heads, kv_heads, size):
    """Microseconds of attention(q, k, v), forward and backward, with memory laid out as ours. q, k and v are
    (batch, tokens, heads, size)."""
    import torch

    numbers = (batch, tokens, heads + 2 * kv_heads, size)
    qkv = torch.randn(numbers, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.detach().requires_grad_() for part in qkv.split([heads, kv_heads, kv_heads], 2))
    other = torch.empty(64 << 20, device="cuda")  # 256 MB: a pass over it fills the L2 cache with other data
    largest = torch.empty((), device="cuda")

    def microseconds(run):
        """The median time of run(), measured as our bench does: first light work, because a hot GPU is slower, and
        then all calls without a pause. Python needs time to prepare a call, most of all FlashAttention-4's. So the
        GPU sleeps for 0.1 s at first: from then on Python is ahead, and the GPU never waits for it."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        run()
        torch.cuda._sleep(200_000_000)
        for _ in range(REST):
            torch.amax(other, 0, out=largest)
        run()
        for begin, end in events:
            torch.amax(other, 0, out=largest)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in events)

    out = attention(q, k, v)
    gradient = torch.randn_like(out)
    backward = microseconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    with torch.no_grad():
        return [microseconds(lambda: attention(q, k, v)), backward]


def attention_peers():
    """Name -> attention(q, k, v): PyTorch's two, and FlashAttention-4, where it is installed (flash-attn-4)."""
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def of_torch(backend):
        def attention(q, k, v):
            with sdpa_kernel([backend]):
                grouped = q.shape[2] != k.shape[2]
                of_heads = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(*of_heads, is_causal=True, enable_gqa=grouped)
        return attention

    peers = {"cudnn": of_torch(SDPBackend.CUDNN_ATTENTION), "flash": of_torch(SDPBackend.FLASH_ATTENTION)}
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as missing:
        print(f"FlashAttention-4 is left out: {missing}", file=sys.stderr)
        return peers

    def of_fa4(**options):
        def attention(q, k, v):
            out = flash_attn_func(q, k, v, causal=True, **options)
            return out[0] if isinstance(out, tuple) else out
        return attention
    return {**peers, "fa4": of_fa4(), "fa4 deterministic": of_fa4(deterministic=True)}


def compare_attention(model, *shape):
    import torch

    batch, tokens, _, kv_heads, _ = shape
    row = {"model": model, "shape": shape, "ours": attention_of_bench(model, batch, tokens, kv_heads)}
    for name, attention in attention_peers().items():
        try:
            row[name] = attention_of_peer(attention, *shape)
        except Exception as refused:  # this library has no such kernel
            row[name] = None
            print(f"{name}, {model}: {refused}", file=sys.stderr)
    return {**row, "note": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"}


def fail(sentence):
    sys.exit(f"attention_peers.py: {sentence}")


def main():
    if sys.argv[1:] in (["help"], ["--help"], ["-h"]):
        print(__doc__.strip())
        return
    if len(sys.argv) != 2 or sys.argv[1] not in ATTENTION:
        fail("Which shape of attention? One of these, in quotes: " + "; ".join(ATTENTION) + ".")
    if importlib.util.find_spec("torch") is None:
        fail("PyTorch is missing; install it with \"pip install torch\".")
    print(json.dumps(compare_attention(*ATTENTION[sys.argv[1]])))


if __name__ == "__main__":
    main()
