"""Compares ./train with transformers and with torch.optim.AdamW: GPT-2, Llama (with grouped-query attention;
with scaled frequencies of type llama3 and linear; with odd sizes), Mistral and Qwen2, tied and untied.

  python3 dev/against_transformers.py [--device gpu]          needs torch, transformers and safetensors

1. ./train opens a randomly initialized model that transformers saved, in one file or in shards, and computes
   the same loss.
2. After 20 steps, AutoModelForCausalLM and AutoTokenizer open the checkpoint; the loss is the same again.
3. The most probable tokens after a prompt are the same, token for token, in FP32 on the CPU.
4. Five steps of ./train in the fp32 recipe with FP32 moments move every weight as torch.optim.AdamW does.
5. transformers opens a checkpoint of a named model, which has no folder of its own.

Both programs see all windows of one small file, so the order of the windows does not matter. The tolerance
for losses is 0.2%. The weights are the same BF16 values, activations are rounded by 2^-9 at a few dozen
places, and independent errors of the logits average out over the tokens, so the rounding error is far below
0.2%, and the error of a wrong operator far above. The difference of the weights is measured by its root
mean square, in units of the learning rate: a weight whose gradient is nearly zero may move in either
direction, since Adam divides by the gradient's size.

./train draws the tokens of a sample. Here the weight of the final norm is so large that the most probable
token has a probability of 1, so that both programs must choose it."""
import argparse, json, os, re, struct, subprocess, sys, tempfile
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig,
                          MistralConfig, PreTrainedTokenizerFast, Qwen2Config)
from transformers.utils import logging

logging.disable_progress_bar()

B, T, WINDOWS = 4, 64, 8
STEPS, PROMPT = 5, 16
LOSS_BAND, WEIGHT_BAND = 2e-3, 1e-2
SHARDS = "300KB"  # several for each of these models
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=0.5, high_freq_factor=2.0,
              original_max_position_embeddings=16, rope_theta=10000.0)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=10000.0)


def sizes(**changed):
    return dict(dict(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                     initializer_range=0.05, bos_token_id=None, eos_token_id=None,
                     tie_word_embeddings=False), **changed)


CONFIGS = {
    "llama": LlamaConfig(**sizes()),
    "llama, llama3 frequencies, tied": LlamaConfig(**sizes(vocab_size=259, tie_word_embeddings=True,
                                                           rope_parameters=LLAMA3)),
    "llama, linear frequencies": LlamaConfig(**sizes(rope_parameters=LINEAR)),
    "llama, odd sizes": LlamaConfig(**sizes(vocab_size=311, hidden_size=112, intermediate_size=208,
                                            num_attention_heads=7, num_key_value_heads=1, head_dim=48)),
    "mistral, window of --seq": MistralConfig(**sizes(num_key_value_heads=1, sliding_window=T)),
    "qwen2, tied": Qwen2Config(**sizes(vocab_size=259, tie_word_embeddings=True)),
    "qwen2, untied, unused window": Qwen2Config(**sizes(use_sliding_window=True, sliding_window=8,
                                                        max_window_layers=4)),
    "gpt2": GPT2Config(vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=256, bos_token_id=None,
                       eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.05),
}
SHARDED = ("llama, llama3 frequencies, tied", "qwen2, untied, unused window")
ADAMW = ("llama", "qwen2, tied", "gpt2")
NAMED = ("llama-tiny", "gpt2-tiny")


def random_model(name, seed):
    """Also the biases and the weights of norms are random: new ones are 0 and 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.dim() == 1):
            vector += 0.1 * torch.randn_like(vector)
    return model


def old_spelling(folder):
    """config.json as transformers 4 and older published it."""
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    json.dump(config, open(path, "w"))


def save_tokenizer(folder):
    """One of bytes, whose token numbers mean nothing else."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_tokens(path, tokens):
    """An llm.c token file: 256 int32 of header (magic, version, count), then uint16 tokens."""
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def write_data(folder, vocabulary):
    """Text of this file as token files, in which token 17 prints as [17]. Returns --data and the tokens."""
    generator = torch.Generator().manual_seed(1)
    text = open(__file__, "rb").read()
    first = torch.randint(len(text) - WINDOWS * T - 1, (1,), generator=generator).item()
    tokens = list(text[first:first + WINDOWS * T + 1])
    for split in ("train", "val"):
        write_tokens(os.path.join(folder, f"{split}.bin"), tokens)
    json.dump({"format": "coat vocabulary", "version": 1, "size": vocabulary,
               "pieces": [f"[{t}]" for t in range(vocabulary)]},
              open(os.path.join(folder, "vocabulary.json"), "w"))
    return os.path.join(folder, "train.bin") + "," + os.path.join(folder, "val.bin"), tokens


def train(device, folder, *flags, batch=B):
    """Runs ./train; returns the losses of its validations, and what it printed."""
    log = os.path.join(folder, "log.json")
    command = ["./train", "--device", device, "--batch", str(batch), "--seq", str(T), "--log", log,
               "--eval-every", "0", *flags]
    if "--sample-every" not in flags:
        command += ["--sample-every", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in open(log)]
    return [line["loss"] for line in lines if line["kind"] == "validation"], done.stdout


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
    print(f"{what:<64} {ours:12.6f} {theirs:12.6f} {off:9.2e}  {verdict} (band {band:g})", flush=True)
    return off <= band


def same(what, ours, theirs):
    print(f"{what:<64} {'agree' if ours == theirs else f'DIFFER: {ours} and {theirs}'}", flush=True)
    return ours == theirs


def checkpoint_of(out):
    return os.path.join(out, sorted(os.listdir(out))[-1])


def opened(folder, where, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(where)


@torch.no_grad()
def both_directions(name, device, folder, data, tokens, where):
    """A folder of transformers -> ./train, 20 steps -> a folder of ./train -> transformers."""
    theirs, out = os.path.join(folder, "theirs"), os.path.join(folder, "ours")
    model = random_model(name, 1).to(torch.bfloat16)
    model.save_pretrained(theirs, max_shard_size=SHARDS if name in SHARDED else "50GB")
    save_tokenizer(theirs)
    if "linear" in name:
        old_spelling(theirs)
    (before, after), _ = train(device, folder, "--model", theirs, "--data", data, "--recipe", "bf16",
                               "--steps", "20", "--warmup", "0", "--lr", "1e-3", "--out", out)
    good = compare(f"{name}: loss before", before, torch_loss(model.to(where), tokens).item(), LOSS_BAND)
    ours = checkpoint_of(out)
    good &= compare(f"{name}: loss after 20 steps", after, torch_loss(opened(ours, where), tokens).item(),
                    LOSS_BAND)
    text, tokenizer = "Tokens, \u00e9!\n", AutoTokenizer.from_pretrained(ours)
    original = AutoTokenizer.from_pretrained(theirs)
    good &= same(f"{name}: tokenizer", tokenizer.encode(text), original.encode(text))
    good &= same(f"{name}: text through the tokenizer", tokenizer.decode(tokenizer.encode(text)), text)
    def architecture(f):
        config = AutoConfig.from_pretrained(f)
        return config.architectures, getattr(config, "rope_parameters", None), config.model_type
    return good & same(f"{name}: architecture and frequencies", architecture(ours), architecture(theirs))


@torch.no_grad()
def greedy(name, folder, data):
    start = os.path.join(folder, "greedy")
    model = random_model(name, 3)
    prompt = torch.randint(CONFIGS[name].vocab_size, (PROMPT,)).tolist()
    for name_of, weight in model.named_parameters():  # large enough that tokens do not repeat soon
        weight *= 4 if weight.dim() > 1 else 1e5 if "model.norm." in name_of or "ln_f." in name_of else 1
    model.save_pretrained(start)
    _, printed = train("cpu", folder, "--model", start, "--data", data, "--recipe", "fp32", "--steps", "1",
                       "--lr", "0", "--out", "", "--sample-every", "1", "--prompt",
                       "".join(f"[{t}]" for t in prompt))
    ours = [int(t) for t in re.findall(r"\[(\d+)\]", printed[printed.rindex("sample |"):])]
    theirs = prompt
    while len(theirs) < T:
        theirs = theirs + [model(torch.tensor([theirs])).logits[0, -1].argmax().item()]
    return same(f"{name}: {T - PROMPT} most probable tokens, {len(set(theirs[PROMPT:]))} kinds", ours,
                theirs)


def adamw_steps(name, device, folder, data, tokens, where):
    """A few steps with all windows as one batch, in both programs; compares the weights."""
    start, out = os.path.join(folder, "start"), os.path.join(folder, "stepped")
    model = random_model(name, 2)
    model.save_pretrained(start)
    lr, decay = 1e-3, 0.1
    train(device, folder, "--model", start, "--data", data, "--recipe", "fp32", "--optimizer", "fp32",
          "--steps", str(STEPS), "--lr", str(lr), "--warmup", "0", "--schedule", "constant", "--weight-decay",
          str(decay), "--clip", "1", "--out", out, batch=WINDOWS)
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
    what = f"{name}: {STEPS} AdamW steps, {distances.numel()} FP32 masters"
    print(f"{what:<64} rms {rms:.2e}, worst {worst:.2e} learning rates (band {WEIGHT_BAND:g} rms)",
          flush=True)
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
        same[f"model.layers.{l}.self_attn.q_proj.bias"] = f"layers.{l}.qkv.bias"  # its first rows
        same[f"transformer.h.{l}.ln_1.weight"] = f"layers.{l}.norm1.weight"
        same[f"transformer.h.{l}.ln_1.bias"] = f"layers.{l}.norm1.bias"
        same[f"transformer.h.{l}.attn.c_attn.bias"] = f"layers.{l}.qkv.bias"
        for theirs, ours in (("attn.c_attn", "qkv"), ("attn.c_proj", "attention_out"),
                             ("mlp.c_fc", "gate_up"), ("mlp.c_proj", "down")):
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
    print(f"{'':<64} {'./train':>12} {'transformers':>12} {'relative':>9}")
    good = True
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            data, tokens = write_data(folder, config.vocab_size)
            good &= both_directions(name, device, folder, data, tokens, where)
            good &= greedy(name, folder, data)
            if name in ADAMW:
                good &= adamw_steps(name, device, folder, data, tokens, where)
    for name in NAMED:
        with tempfile.TemporaryDirectory() as folder:
            data, tokens = write_data(folder, 256)
            out = os.path.join(folder, "ours")
            losses, _ = train(device, folder, "--model", name, "--data", data, "--recipe", "bf16", "--steps",
                              "20", "--out", out)
            with torch.no_grad():
                theirs = torch_loss(opened(checkpoint_of(out), where), tokens).item()
            good &= compare(f"{name}: loss after 20 steps", losses[-1], theirs, LOSS_BAND)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
