"""Compares ./train with transformers (Llama with grouped-query attention, GPT-2) and with torch.optim.AdamW.

  python3 dev/against_transformers.py [--device gpu]          needs torch, transformers and safetensors

1. AutoModelForCausalLM.from_pretrained opens a checkpoint of ./train and computes the same loss.
2. ./train opens a randomly initialized model that transformers saved and computes the same loss.
3. Five steps of ./train in the fp32 recipe with FP32 moments move every weight as torch.optim.AdamW does.

Both programs see all windows of one small file, so the order of the windows does not matter. The tolerance
for losses is 0.2%. The weights are the same BF16 values, activations are rounded by 2^-9 at a few dozen
places, and independent errors of the logits average out over the tokens, so the rounding error is far below
0.2%, and the error of a wrong operator far above. The difference of the weights is measured by its root
mean square, in units of the learning rate: a weight whose gradient is nearly zero may move in either
direction, since Adam divides by the gradient's size."""
import argparse, json, os, struct, subprocess, sys, tempfile
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

B, T, WINDOWS, V = 4, 64, 8, 256
STEPS = 5
LOSS_BAND, WEIGHT_BAND = 2e-3, 1e-2

CONFIGS = {
    "llama": (LlamaForCausalLM,
              LlamaConfig(vocab_size=V, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                          num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                          tie_word_embeddings=False)),
    "gpt2": (GPT2LMHeadModel,
             GPT2Config(vocab_size=V, n_embd=128, n_layer=4, n_head=4, n_positions=256, bos_token_id=None,
                        eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
}
NAMED = {"llama": "llama-tiny", "gpt2": "gpt2-tiny"}


def write_tokens(path, tokens):
    """An llm.c token file: 256 int32 of header (magic, version, count), then uint16 tokens."""
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def train(device, folder, *flags, batch=B):
    """Runs ./train and returns the lines of its log."""
    log = os.path.join(folder, "log.json")
    command = ["./train", "--device", device, "--batch", str(batch), "--seq", str(T), "--log", log,
               "--sample-every", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return [json.loads(line) for line in open(log)]


def windows(tokens):
    x = torch.tensor(tokens)
    return (torch.stack([x[i * T:i * T + T] for i in range(WINDOWS)]),
            torch.stack([x[i * T + 1:i * T + T + 1] for i in range(WINDOWS)]))


def torch_loss(model, tokens):
    x, y = windows(tokens)
    logits = model(x.to(model.device)).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().to(model.device))


def compare(what, ours, theirs, band):
    off = abs(ours - theirs) / abs(theirs)
    verdict = "agree" if off <= band else "DIFFER"
    print(f"{what:<58} {ours:12.6f} {theirs:12.6f} {off:9.2e}  {verdict} (band {band:g})", flush=True)
    return off <= band


def checkpoint_of(out):
    return os.path.join(out, sorted(os.listdir(out))[-1])


def adamw_steps(name, device, folder, data, tokens, where):
    """A few steps with all windows as one batch, in both programs; compares the weights."""
    start, out = os.path.join(folder, "start"), os.path.join(folder, "stepped")
    kind, config = CONFIGS[name]
    torch.manual_seed(2)
    model = kind(config).float()
    model.save_pretrained(start)
    lr, decay = 1e-3, 0.1
    train(device, folder, "--model", start, "--data", data, "--recipe", "fp32", "--optimizer", "fp32",
          "--steps", str(STEPS), "--lr", str(lr), "--warmup", "0", "--schedule", "constant", "--weight-decay",
          str(decay), "--clip", "1", "--out", out, "--eval-every", "0", batch=WINDOWS)
    model.to(where)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": decay},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=lr, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch_loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    theirs = model.state_dict()
    distances = torch.cat([((ours.to(theirs[key].device) - theirs[key]) / lr).flatten()
                           for key, ours in masters(checkpoint_of(out)).items()])
    rms, worst = distances.square().mean().sqrt().item(), distances.abs().max().item()
    what = f"{name}: {STEPS} AdamW steps, FP32 masters of {distances.numel()} weights"
    print(f"{what:<58} rms {rms:.2e}, worst {worst:.2e} learning rates (band {WEIGHT_BAND:g} rms)", flush=True)
    return rms <= WEIGHT_BAND


def masters(checkpoint):
    """The FP32 master weights of the tensors that have the same layout in both programs."""
    weights = load_file(os.path.join(checkpoint, "model.safetensors"))
    state = load_file(os.path.join(checkpoint, "optimizer.safetensors"))
    def join(weight, remainder):
        bits = (weight.view(torch.int16).int() << 16) + remainder.int()
        return bits.view(torch.float32)
    same = {}
    for l in range(4):
        same[f"model.layers.{l}.self_attn.o_proj.weight"] = f"layers.{l}.attention_out"
        same[f"model.layers.{l}.mlp.down_proj.weight"] = f"layers.{l}.down"
        same[f"model.layers.{l}.input_layernorm.weight"] = f"layers.{l}.norm1.weight"
        same[f"model.layers.{l}.post_attention_layernorm.weight"] = f"layers.{l}.norm2.weight"
        same[f"transformer.h.{l}.ln_1.weight"] = f"layers.{l}.norm1.weight"
        same[f"transformer.h.{l}.ln_1.bias"] = f"layers.{l}.norm1.bias"
        same[f"transformer.h.{l}.attn.c_attn.bias"] = f"layers.{l}.qkv.bias"
        for theirs, ours in (("attn.c_attn", "qkv"), ("attn.c_proj", "attention_out"), ("mlp.c_fc", "up"),
                             ("mlp.c_proj", "down")):
            same[f"transformer.h.{l}.{theirs}.weight"] = f"layers.{l}.{ours}"
    same["model.embed_tokens.weight"] = same["transformer.wte.weight"] = "embedding"
    same["transformer.wpe.weight"], same["lm_head.weight"] = "positions", "head"
    same["model.norm.weight"] = "final_norm.weight"
    exact = {}
    for theirs, ours in same.items():
        if theirs not in weights or ours + ".remainder" not in state:
            continue
        weight, remainder = weights[theirs], state[ours + ".remainder"]
        if remainder.dim() == 2 and weight.dim() == 1:
            remainder = remainder.view(-1)
        if theirs.startswith("transformer.h.") and weight.dim() == 2:  # Conv1D: (in, out); here: (out, in)
            remainder = remainder.t().contiguous()
        exact[theirs] = join(weight.contiguous(), remainder[:weight.shape[0]].contiguous())
    return exact


def main():
    arguments = argparse.ArgumentParser(description=__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    device = arguments.parse_args().device
    where = "cuda" if device == "gpu" else "cpu"
    print(f"{'':<58} {'./train':>12} {'transformers':>12} {'relative':>9}")
    good = True
    for name, (kind, config) in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            generator = torch.Generator().manual_seed(1)
            text = open(__file__, "rb").read()
            first = torch.randint(len(text) - WINDOWS * T - 1, (1,), generator=generator).item()
            tokens = list(text[first:first + WINDOWS * T + 1])
            for split in ("train", "val"):
                write_tokens(os.path.join(folder, f"{split}.bin"), tokens)
            data = os.path.join(folder, "train.bin") + "," + os.path.join(folder, "val.bin")

            out = os.path.join(folder, "ours")
            lines = train(device, folder, "--model", NAMED[name], "--data", data, "--recipe", "bf16",
                          "--steps", "20", "--out", out, "--eval-every", "0")
            model = AutoModelForCausalLM.from_pretrained(checkpoint_of(out), dtype=torch.bfloat16).to(where)
            ours = [l for l in lines if l["kind"] == "validation"][-1]["loss"]
            good &= compare(f"{name}: checkpoint of ./train opened by transformers", ours,
                            torch_loss(model, tokens).item(), LOSS_BAND)

            theirs = os.path.join(folder, "theirs")
            torch.manual_seed(1)
            model = kind(config).to(torch.bfloat16)
            model.save_pretrained(theirs)
            lines = train(device, folder, "--model", theirs, "--data", data, "--recipe", "bf16", "--steps",
                          "0")
            ours = [l for l in lines if l["kind"] == "validation"][-1]["loss"]
            good &= compare(f"{name}: model of transformers opened by ./train", ours,
                            torch_loss(model.to(where), tokens).item(), LOSS_BAND)

            good &= adamw_steps(name, device, folder, data, tokens, where)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
