"""Compares ./train with transformers and with torch.optim.AdamW: GPT-2, Llama (with grouped-query attention;
with scaled frequencies of type llama3; with odd sizes), Mistral, Qwen2 and Qwen3, tied and untied.

  python3 dev/against_transformers.py [--device gpu]          needs torch, transformers and safetensors

1. ./train opens a randomly initialized model that transformers saved, in one file or in shards, and computes
   the same loss.
2. After 20 steps, AutoModelForCausalLM and AutoTokenizer open the checkpoint; the loss is the same again.
3. The most probable tokens after a prompt are the same, token for token, in FP32 on the CPU.
4. In the fp32 recipe with FP32 moments, ./train has the loss to 1e-6, before and after ten steps that move
   every weight as torch.optim.AdamW does.

Both programs see all windows of one small file, so the order of the windows does not matter. The tolerance
for other losses is 0.2%: rounding to BF16 at a few dozen places makes an error far below it, and a wrong operator
one far above. The difference of weights is a root mean square in units of the learning rate, since Adam moves
a weight whose gradient is nearly zero in either direction."""
import json, math, os, re, struct, subprocess, sys, tempfile
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig,
                          MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config)
from transformers.utils import logging

logging.disable_progress_bar()

B, T, WINDOWS, PROMPT = 4, 64, 8, 16  # ./train's samples begin with 16 tokens
STEPS = 10
LOSS_BAND, FP32_BAND, WEIGHT_BAND = 2e-3, 1e-6, 1e-2
SHARDS = "300KB"  # several for each of these models
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=0.5, high_freq_factor=2.0,
              original_max_position_embeddings=16, rope_theta=10000.0)


def sizes(**changed):
    return dict(dict(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                     initializer_range=0.05, bos_token_id=None, eos_token_id=None,
                     tie_word_embeddings=False), **changed)


CONFIGS = {
    "llama": LlamaConfig(**sizes()),
    "llama, llama3 frequencies, tied": LlamaConfig(**sizes(vocab_size=259, tie_word_embeddings=True,
                                                           rope_parameters=LLAMA3)),
    "llama, older spelling": LlamaConfig(**sizes(rope_parameters=LLAMA3)),
    "llama, odd sizes": LlamaConfig(**sizes(vocab_size=311, hidden_size=112, intermediate_size=208,
                                            num_attention_heads=7, num_key_value_heads=1, head_dim=48)),
    "mistral, window of --seq": MistralConfig(**sizes(num_key_value_heads=1, sliding_window=T)),
    "qwen2, tied": Qwen2Config(**sizes(vocab_size=259, tie_word_embeddings=True)),
    "qwen2, untied, unused window": Qwen2Config(**sizes(use_sliding_window=False, sliding_window=8,
                                                        max_window_layers=4)),
    "qwen3": Qwen3Config(**sizes(head_dim=48)),
    "qwen3, tied": Qwen3Config(**sizes(vocab_size=259, head_dim=16, tie_word_embeddings=True)),
    "gpt2": GPT2Config(vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=256, bos_token_id=None,
                       eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.05),
}
SHARDED = ("llama, llama3 frequencies, tied", "qwen2, untied, unused window", "qwen3")
ADAMW = ("llama", "qwen2, tied", "qwen3", "gpt2")
# Names of transformers -> ours, where both programs have the same layout.
IN_LAYER = {"self_attn.o_proj.weight": "attention_out", "mlp.down_proj.weight": "down",
            "input_layernorm.weight": "norm1.weight", "post_attention_layernorm.weight": "norm2.weight",
            "self_attn.q_proj.bias": "qkv.bias", "self_attn.q_norm.weight": "qk_norm.weight",  # its first rows
            "ln_1.weight": "norm1.weight", "ln_1.bias": "norm1.bias", "attn.c_attn.weight": "qkv",
            "attn.c_attn.bias": "qkv.bias", "attn.c_proj.weight": "attention_out",
            "mlp.c_fc.weight": "gate_up", "mlp.c_proj.weight": "down"}
OUTSIDE = {"model.embed_tokens.weight": "embedding", "transformer.wte.weight": "embedding",
           "transformer.wpe.weight": "positions", "lm_head.weight": "head",
           "model.norm.weight": "final_norm.weight"}


def random_model(name, seed):
    """A model whose biases and norms are random, too: transformers begins with 0 and 1."""
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
    """A tokenizer with a token for each byte. Which number a byte has does not matter here."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_data(folder, vocabulary):
    """Text of this file as llm.c token files: 256 int32 (magic, version, count), then uint16 tokens. Returns
    --data and the tokens."""
    tokens = list(open(__file__, "rb").read()[1000:1000 + WINDOWS * T + 1])
    for split in ("train", "val"):
        with open(os.path.join(folder, f"{split}.bin"), "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
            f.write(struct.pack(f"<{len(tokens)}H", *tokens))
    with open(os.path.join(folder, "tokenizer.bin"), "wb") as f:  # llm.c's: the length of each piece, its bytes
        f.write(struct.pack("<256i", 20240328, 1, vocabulary, *[0] * 253))
        f.write(b"".join(bytes([len(piece)]) + piece for piece in (b"[%d]" % t for t in range(vocabulary))))
    return os.path.join(folder, "train.bin") + "," + os.path.join(folder, "val.bin"), tokens


def train(device, folder, *flags, batch=B):
    """Runs ./train; returns the losses of its validations, and the tokens of its last sample."""
    log = os.path.join(folder, "log.json")
    if os.path.exists(log):  # ./train appends
        os.remove(log)
    command = ["./train", "--device", device, "--batch", str(batch), "--seq", str(T), "--log", log,
               "--eval-every", "0", *([] if "--sample-every" in flags else ["--sample-every", "0"]), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in open(log)]
    samples = [line["tokens"] for line in lines if line["kind"] == "sample"]
    return [line["loss"] for line in lines if line["kind"] == "validation"], samples[-1] if samples else []


def torch_loss(model, tokens):
    x = torch.tensor(tokens, device=model.device)
    logits = model(x[:-1].view(WINDOWS, T)).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[1:])


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


@torch.no_grad()
def both_directions(name, device, folder, data, tokens, where):
    """A folder of transformers -> ./train, 20 steps -> a folder of ./train -> transformers."""
    theirs, out = os.path.join(folder, "theirs"), os.path.join(folder, "ours")
    model = random_model(name, 1).to(torch.bfloat16)
    model.save_pretrained(theirs, max_shard_size=SHARDS if name in SHARDED else "50GB")
    save_tokenizer(theirs)
    if "older" in name:
        old_spelling(theirs)
    (before, after), _ = train(device, folder, "--model", theirs, "--data", data, "--recipe", "bf16",
                               "--steps", "20", "--warmup", "0", "--lr", "1e-3", "--out", out)
    good = compare(f"{name}: loss before", before, torch_loss(model.to(where), tokens).item(), LOSS_BAND)
    ours = checkpoint_of(out)
    saved = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16).to(where)
    good &= compare(f"{name}: loss after 20 steps", after, torch_loss(saved, tokens).item(), LOSS_BAND)

    def known(folder):  # what the folder says beside the weights
        config, text = AutoConfig.from_pretrained(folder), "Tokens, \u00e9!\n"
        return (config.architectures, config.model_type, getattr(config, "rope_parameters", None),
                AutoTokenizer.from_pretrained(folder).encode(text))
    return good & same(f"{name}: architecture, frequencies, tokenizer", known(ours), known(theirs))


@torch.no_grad()
def greedy(name, folder, data, tokens):
    """./train draws the tokens of a sample, which continues the beginning of the held-out text. Here the
    weight of the final norm is so large that the most probable token has a probability of 1."""
    start = os.path.join(folder, "greedy")
    model = random_model(name, 3)
    for name_of, weight in model.named_parameters():  # large enough that tokens do not repeat soon
        weight *= 4 if weight.dim() > 1 else 1e5 if "model.norm." in name_of or "ln_f." in name_of else 1
    model.save_pretrained(start)
    _, ours = train("cpu", folder, "--model", start, "--data", data, "--recipe", "fp32", "--steps", "1",
                    "--lr", "0", "--out", "", "--sample-every", "1")
    theirs = tokens[:PROMPT]
    while len(theirs) < T:
        theirs = theirs + [model(torch.tensor([theirs])).logits[0, -1].argmax().item()]
    return same(f"{name}: {T - PROMPT} most probable tokens, {len(set(theirs[PROMPT:]))} kinds", ours, theirs)


def adamw_steps(name, device, folder, data, tokens, where):
    """A few steps with all windows as one batch, in both programs; compares the weights."""
    start, out = os.path.join(folder, "start"), os.path.join(folder, "stepped")
    model = random_model(name, 2)
    model.save_pretrained(start)
    lr, decay = 1e-3, 0.1
    (before, after), _ = train(device, folder, "--model", start, "--data", data, "--recipe", "fp32",
                               "--optimizer", "fp32", "--steps", str(STEPS), "--lr", str(lr), "--warmup", "0",
                               "--weight-decay", str(decay), "--clip", "1", "--out", out, batch=WINDOWS)
    model.to(where)
    good = compare(f"{name}: loss before, in FP32", before, torch_loss(model, tokens).item(), FP32_BAND)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    # From the peak to a tenth of it. The last of so few steps is at 99% of the cosine (program/train_step.cpp).
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * 0.99 * step / (STEPS - 1))))
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch_loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cosine.step()
    good &= compare(f"{name}: loss after {STEPS} steps, in FP32", after, torch_loss(model, tokens).item(),
                    FP32_BAND)
    theirs = model.state_dict()
    distances = torch.cat([((ours.to(theirs[key].device) - theirs[key]) / lr).flatten()
                           for key, ours in masters(checkpoint_of(out)).items()])
    rms, worst = distances.square().mean().sqrt().item(), distances.abs().max().item()
    what = f"{name}: {STEPS} AdamW steps, {distances.numel()} FP32 masters"
    print(f"{what:<64} rms {rms:.2e}, worst {worst:.2e} learning rates (band {WEIGHT_BAND:g} rms)",
          flush=True)
    return good and rms <= WEIGHT_BAND


def masters(checkpoint):
    """The FP32 master weights of the tensors that have the same layout in both programs."""
    state, exact = load_file(os.path.join(checkpoint, "optimizer.state")), {}
    for name, weight in load_file(os.path.join(checkpoint, "model.safetensors")).items():
        layer = re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", name)
        ours = f"layers.{layer[1]}.{IN_LAYER.get(layer[2])}" if layer else OUTSIDE.get(name)
        remainder = state.get(f"{ours}.remainder")
        if remainder is None:
            continue
        remainder = remainder.view(-1) if weight.dim() == 1 else remainder
        if layer and "transformer" in name and weight.dim() == 2:  # Conv1D: (in, out); here: (out, in)
            remainder = remainder.t().contiguous()
        bits = (weight.contiguous().view(torch.int16).int() << 16) + remainder[:weight.shape[0]].int()
        exact[name] = bits.view(torch.float32)
    return exact


def main():
    if sys.argv[1:] not in ([], ["--device", "cpu"], ["--device", "gpu"]):
        sys.exit(__doc__.strip())
    device, where = ("gpu", "cuda") if sys.argv[2:] == ["gpu"] else ("cpu", "cpu")
    print(f"{'':<64} {'./train':>12} {'transformers':>12} {'relative':>9}")
    good = True
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            data, tokens = write_data(folder, config.vocab_size)
            good &= both_directions(name, device, folder, data, tokens, where)
            good &= greedy(name, folder, data, tokens)
            if name in ADAMW:
                good &= adamw_steps(name, device, folder, data, tokens, where)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
