"""Model A of the course after 120 steps of training on text.txt, for figures.py and lessons.py: its moments in FP32,
the activations that its layers save, and the gradients g of all its linear layers, computed with coat.py from a
checkpoint of ./train.
"""
import pathlib
import subprocess
import sys

import numpy as np

import coat
import moments

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "small_run"
TEXT = ROOT / "dev" / "text.txt"

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
    """The run in `folder`. That of FOLDER is trained first, in two minutes or more, if it has not ended."""
    def __init__(self, train=ROOT / "train", folder=FOLDER, T=256, tokens=1024):
        if folder == FOLDER and not (folder / "step-000120").exists():  # a run that was interrupted goes on
            begin = ["--device", "cpu", "--recipe", "coat", "--optimizer", "fp32", "--steps", "120",
                     "--warmup", "100", "--data", TEXT, "--eval-every", "0", "--sample-every", "0", "--out", folder]
            if not pathlib.Path(train).exists():
                sys.exit(f"The small model is trained by {train}, which is not there. Build it with: make train")
            subprocess.run([train, *(["--resume", folder] if any(folder.glob("step-*")) else begin)], check=True)
        checkpoint = sorted(folder.glob("step-*"))[-1]
        state = moments.tensors(checkpoint / "optimizer.state")
        self.m, self.v = (moments.moment_groups_of(state, moment).ravel() for moment in (".m", ".v"))
        self.weights = moments.tensors(checkpoint / "model.safetensors")
        self.layers = []
        while f"model.layers.{len(self.layers)}.input_layernorm.weight" in self.weights:
            size, layer = layer_of(self.weights, len(self.layers), 4)
            self.layers.append(layer)
        self.weights |= {"embedding": self.weights["model.embed_tokens.weight"],
                         "final_norm": self.weights["model.norm.weight"]}
        text = np.fromfile(TEXT, np.uint8)
        coat.ROUNDING = False
        self.norm_inputs, self.gate_up, _ = self.batch(text[:tokens + 1], T, size)
        _, _, self.gradients = self.batch(text[3000:3001 + tokens], T, size)  # begins in the midst of a line
        coat.ROUNDING = True

    def batch(self, text, T, size):
        """A batch without quantization: the inputs of norms 2, gate and up, and the gradients of the outputs of
        all linear layers, in lists. The gradients are without the first token of a window. It attends to itself
        alone, so the gradient of its query is zero, and rounding makes noise of it."""
        x, saved, gradients = self.weights["embedding"][text[:-1]], [], []
        for layer in self.layers:
            x, of_layer = coat.layer_forward(layer, x, T, size)
            saved.append(of_layer)
        _, dx, _, _ = coat.head_loss_and_gradients(self.weights["final_norm"], self.weights["embedding"], x, text[1:])
        linear_backward = coat.linear_backward

        def listening(x, w, g):
            gradients.append(g.reshape(-1, T, g.shape[1])[:, 1:])
            return linear_backward(x, w, g)

        coat.linear_backward = listening
        for layer, of_layer in zip(self.layers[::-1], saved[::-1]):
            dx, _ = coat.layer_backward(layer, of_layer, dx, T, size)
        coat.linear_backward = linear_backward
        return ([coat.dequantize_groups(*of_layer.norm2_input) for of_layer in saved],
                [coat.dequantize_groups(*of_layer.gate_up) for of_layer in saved], gradients)
