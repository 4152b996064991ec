"""Tokens a second and memory of ./train beside PyTorch's on the same card in the same hour: writes dev/results/peers.md.

    make train && python3 dev/peers.py                    # Llama-2-7B and TinyLlama, about six minutes on an H200
    python3 dev/peers.py tinyllama-1.1b --out tiny.md     # one of them
    python3 dev/peers.py --gpus 0,1                       # side by side, each model on a card of its own

What a user would write instead of this program: a Llama with torch.compile, attention through F.scaled_dot_product_attention and fused AdamW on
BF16 parameters with BF16 states (there is no FP32 master, and no gradient is clipped, both of which ./train does). `fp8` swaps the linear layers of
the blocks for torch._scaled_mm with per-tensor scales made just in time: E4M3 forward with fast accumulation, E5M2 gradients, exact sums. Each
contestant is a process of its own, and ./train runs before and after PyTorch, so that a card that drifts shows. All learn random tokens, which is
as good as text for speed.
"""
import argparse
import array
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time

SHAPES = {  # layers, hidden size, heads, heads of keys and values, feed-forward, batch
    "llama-2-7b": (32, 4096, 32, 32, 11008, 8),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632, 16),
}
VOCABULARY, SEQUENCE = 32000, 2048
WARM_UP = 4  # steps that are not counted
ROOT = pathlib.Path(__file__).resolve().parent.parent


def torch_steps(model, recipe, steps):
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    layers, hidden, heads, kv_heads, feed_forward, batch = SHAPES[model]
    size = hidden // heads

    def quantize(x, format):
        largest = torch.finfo(format).max
        scale = x.abs().amax().float().clamp(min=1e-12) / largest
        return (x.float() / scale).clamp(-largest, largest).to(format), scale

    class Product(torch.autograd.Function):  # y = x w^T
        @staticmethod
        def forward(context, x, w):
            context.save_for_backward(x, w)
            (x8, x_scale), (w8, w_scale) = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
            return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

        @staticmethod
        def backward(context, g):  # Hopper's FP8 product contracts contiguous numbers: hence the transposed copies
            x, w = context.saved_tensors
            (x8, x_scale), (w8, w_scale) = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
            g8, g_scale = quantize(g, torch.float8_e5m2)
            dx = torch._scaled_mm(g8, w8.t().contiguous().t(), scale_a=g_scale, scale_b=w_scale, out_dtype=torch.bfloat16)
            dw = torch._scaled_mm(g8.t().contiguous(), x8.t().contiguous().t(), scale_a=g_scale, scale_b=x_scale, out_dtype=torch.bfloat16)
            return dx, dw

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x):
            if recipe == "bf16":
                return F.linear(x, self.weight)
            return Product.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)

    angles = torch.outer(torch.arange(SEQUENCE), 10000.0 ** (-torch.arange(0, size, 2) / size)).cuda()
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
            self.qkv, self.out = Linear(hidden, (heads + 2 * kv_heads) * size), Linear(hidden, hidden)
            self.up, self.down = Linear(hidden, 2 * feed_forward), Linear(feed_forward, hidden)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).view(batch, SEQUENCE, -1, size).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=kv_heads != heads)
            x = x + self.out(y.transpose(1, 2).reshape(batch, SEQUENCE, hidden))
            gate, up = self.up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

        def forward(self, x, targets):
            return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY).float(), targets.reshape(-1))

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        embedding, head = nn.Embedding(VOCABULARY, hidden), Head()
        blocks = nn.ModuleList(Block() for _ in range(layers))
    network = nn.ModuleList([embedding, blocks, head])
    for w in network.parameters():
        if w.dim() > 1:
            nn.init.normal_(w, std=0.02)
    for part in [*blocks, head]:  # one compiled block, which all layers share
        part.compile()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(VOCABULARY, (batch, SEQUENCE + 1), device="cuda")
    milliseconds = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        for _ in range(WARM_UP + steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            x = embedding(tokens[:, :-1])
            for block in blocks:
                x = block(x)
            head(x, tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            milliseconds.append(1e3 * (time.perf_counter() - begin))
        q = torch.empty(batch, heads, SEQUENCE, size, device="cuda", requires_grad=True)
        k = q[:, :kv_heads].detach().requires_grad_()
        backend = SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=kv_heads != heads)).name
    print(json.dumps({"ms": milliseconds, "note": f"torch {torch.__version__}, {backend}"}))


def train_steps(model, recipe, steps):
    folder = ROOT / "build/peers"
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(1)
    for name, count in (("train", 1 << 20), ("val", 40000)):  # llm.c's token files; few tokens to validate on
        tokens = array.array("H", dice.choices(range(VOCABULARY), k=count))
        (folder / f"{name}.bin").write_bytes(array.array("i", [20240520, 1, count] + 253 * [0]).tobytes() + tokens.tobytes())
    log = folder / f"{model}.jsonl"
    command = [ROOT / "train", "--device", "gpu", "--model", model, "--recipe", recipe, "--optimizer", recipe, "--data", folder, "--log", log,
               "--batch", SHAPES[model][-1], "--seq", SEQUENCE, "--steps", WARM_UP + steps, "--lr", "1e-5", "--eval-every", 0,
               "--sample-every", 0, "--out", ""]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    print(json.dumps({"ms": [line["ms"] for line in lines if line["kind"] == "step"], "note": ""}))


def query_card(what, gpu):
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def contestant(kind, model, recipe, steps, gpu):
    print(f"{model}: {kind} {recipe} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, model, "--steps", str(steps), "--only", kind, recipe]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, CUDA_VISIBLE_DEVICES=gpu))
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.2):
            most[0] = max(most[0], int(query_card("memory.used", gpu)))  # MiB, of all that runs there

    watcher = threading.Thread(target=watch)
    watcher.start()
    said = child.communicate()[0]
    ended.set()
    watcher.join()
    if child.returncode:
        sys.exit(f"peers.py: {kind} {recipe} on {model} failed.")
    result = json.loads(said.splitlines()[-1])
    times = result["ms"][WARM_UP:]
    return {"ms": statistics.median(times), "least": min(times), "most": max(times), "memory": most[0], "note": result["note"]}


def compare(model, gpu, steps, tell):
    """Ours, PyTorch's, ours again. After each of them the rows of the table that there are go to tell()."""
    runs = [("./train", "coat"), ("./train", "bf16"), ("PyTorch", "bf16"), ("PyTorch", "fp8"), ("./train", "coat"), ("./train", "bf16")]
    batch, results = SHAPES[model][-1], []
    for kind, recipe in runs:
        results.append((kind, recipe, contestant(kind, model, recipe, steps, gpu)))
        base, rows = next((r["ms"] for k, p, r in results if (k, p) == ("PyTorch", "bf16")), None), []
        for k, p, r in results:
            who = f"{k} {p}" + (f" ({r['note']})" if r["note"] else "")
            times = f"{base / r['ms']:.3f} | {r['ms']:.1f} ({r['least']:.1f}, {r['most']:.1f})" if base else f" | {r['ms']:.1f}"
            rows.append(f"| {model}, {batch} x {SEQUENCE} | {who} | {batch * SEQUENCE / r['ms'] * 1e3:,.0f} | {times} | {r['memory']:,} |")
        tell(model, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SHAPES), metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=20, help="that are counted")
    parser.add_argument("--gpus", default="0", help="numbers, by commas: one for each model, or one for all in turn")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dev/results/peers.md")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "RECIPE"), help="one contestant, for this program itself")
    options = parser.parse_args()
    kinds = {"./train": train_steps, "PyTorch": torch_steps}
    if options.only:
        return kinds[options.only[0]](options.models[0], options.only[1], options.steps)

    for model in options.models:
        if model not in SHAPES:
            parser.error(f"{model} is not known; there are " + ", ".join(SHAPES))
    if not shutil.which("nvidia-smi"):
        sys.exit("peers.py measures a GPU, and there is no nvidia-smi.")
    gpus = options.gpus.split(",")
    if len(gpus) not in (1, len(options.models)):
        sys.exit(f"--gpus wants one number, or one for each of the {len(options.models)} models.")
    card = query_card("name,driver_version", gpus[0])
    lines = [f"`python3 dev/peers.py` on {card} (driver), a model's runs one after the other on one card; median of {options.steps} steps after",
             f"{WARM_UP}. Memory is the most that the driver saw in use. PyTorch is compiled, with fused AdamW on BF16 parameters and states: no FP32",
             "master, no clipping. Its FP8 is per tensor, just in time. Random tokens.", "",
             "| model, tokens a step | | tokens/s | against PyTorch bf16 | ms a step (least, most) | memory, MiB |", "|---|---|---|---|---|---|"]
    rows, writing = {}, threading.Lock()

    partial = options.out.with_suffix(".part.md")

    def tell(model, of_model):
        with writing:
            rows[model] = of_model
            partial.write_text("\n".join(lines + [row for name in options.models for row in rows.get(name, [])]) + "\n")

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        for done in [pool.submit(compare, model, gpus[i % len(gpus)], options.steps, tell) for i, model in enumerate(options.models)]:
            done.result()
    print(partial.read_text())
    if set(options.models) == set(SHAPES) or options.out != parser.get_default("out"):
        partial.replace(options.out)  # the table of all models is replaced by one of all


if __name__ == "__main__":
    main()
