"""A small model after 120 steps of training, for figures.py and lessons.py: its moments in FP32, the activations
that its layers save, and gradients of a batch, all computed with coat.py from a checkpoint of ./train.
"""
import pathlib
import subprocess

import numpy as np

import coat
import moments

ROOT = pathlib.Path(__file__).resolve().parent.parent

def layer_of(weights, l, heads):
    """A layer's weights as coat.py names them; key and value heads that are shared are repeated."""
    def joined(*names):
        return np.concatenate([weights[f"model.layers.{l}.{name}.weight"] for name in names])

    q, k, v = (joined(f"self_attn.{n}_proj") for n in "qkv")
    size = len(q) // heads
    k, v = (x.reshape(-1, size, x.shape[1]).repeat(len(q) // len(x), axis=0).reshape(q.shape) for x in (k, v))
    return size, {"norm1": joined("input_layernorm"), "norm2": joined("post_attention_layernorm"),
                  "qkv": np.concatenate([q, k, v]), "attention_out": joined("self_attn.o_proj"),
                  "gate_up": joined("mlp.gate_proj", "mlp.up_proj"), "down": joined("mlp.down_proj")}

class Run:
    """The run in `folder`; it is trained first, in two minutes, if the folder has no checkpoint."""
    def __init__(self, train=ROOT / "train", folder=ROOT / "build" / "figures", T=256, tokens=1024):
        if not any(folder.glob("step-*")):
            subprocess.run([train, "--device", "cpu", "--recipe", "coat", "--optimizer", "fp32", "--steps", "120",
                            "--eval-every", "0", "--sample-every", "0", "--out", folder], check=True)
        checkpoint = sorted(folder.glob("step-*"))[-1]
        state = moments.tensors(checkpoint / "optimizer.state")
        self.m, self.v = (moments.groups_of(state, moment).ravel() for moment in (".m", ".v"))
        self.weights = moments.tensors(checkpoint / "model.safetensors")
        self.layers = []
        while f"model.layers.{len(self.layers)}.input_layernorm.weight" in self.weights:
            size, layer = layer_of(self.weights, len(self.layers), 4)
            self.layers.append(layer)
        ends = {"embedding": self.weights["model.embed_tokens.weight"], "final_norm": self.weights["model.norm.weight"]}
        text = np.frombuffer((ROOT / "coat.h").read_bytes(), np.uint8)[:tokens + 1]
        # gate and up, the inputs of norms 2, and the gradients of the outputs of layers
        self.gate_up, self.norm_inputs, self.gradients = [], [], []
        forward, backward = coat.layer_forward, coat.layer_backward

        def watched_forward(*arguments):
            x, saved = forward(*arguments)
            self.norm_inputs.append(coat.dequantize_groups(*saved[3]))
            self.gate_up.append(coat.dequantize_groups(*saved[4]))
            return x, saved

        def watched_backward(w, saved, dx, *sizes):
            self.gradients.append(dx)
            return backward(w, saved, dx, *sizes)

        coat.layer_forward, coat.layer_backward = watched_forward, watched_backward
        coat.FP8 = False  # the values before they are quantized
        try:
            coat.loss_and_gradients(ends, self.layers, text[:-1], text[1:], T, size)
        finally:
            coat.layer_forward, coat.layer_backward, coat.FP8 = forward, backward, True
