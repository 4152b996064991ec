#!/usr/bin/env python3
"""Talks to a model that ./train has saved, or to any model's folder that transformers opens.

    python3 data/chat.py tuned                                     the newest whole checkpoint of a run
    python3 data/chat.py tuned/step-000900 --temperature 0.7       this one

It needs torch and transformers. If the model has a chat template, what is typed is a question in a
conversation; else the model continues what is typed."""
import argparse
import importlib.util
import json
import os
import re
import sys

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
NEEDED = "The packages torch and transformers of Python are needed"
if MISSING:
    NEEDED += f", and this Python lacks {' and '.join(MISSING)}: install what is missing with 'pip install'"


def fail(sentence):
    sys.exit(f"chat.py: {sentence}")


def first_line(problem):
    return (str(problem).splitlines() or [repr(problem)])[0][:100]


def parse_arguments():
    about = "Talks to a saved model; Ctrl-D ends it."
    parser = argparse.ArgumentParser(description=about, epilog=f"{NEEDED}.")
    add = parser.add_argument
    add("folder", help="the --out folder of a run, a checkpoint in it, or another model's folder")
    add("--tokenizer", metavar="FOLDER", help="for a model without one: the folder of the token files")
    add("--temperature", type=float, default=0.8, help="0: the most probable token (default: %(default)s)")
    add("--new-tokens", type=int, default=256, help="the most tokens of an answer (default: %(default)s)")
    return parser.parse_args()


def is_whole(checkpoint):
    """Whether a checkpoint has what is needed here, and its weights end where their header says. (--resume
    compares hashes of all bytes, too.)"""
    try:
        for name in ("config.json", "trainer.json"):
            with open(os.path.join(checkpoint, name), encoding="utf-8") as f:
                json.load(f)
        path = os.path.join(checkpoint, "model.safetensors")
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return os.path.getsize(path) == 8 + length + max(ends)
    except (OSError, ValueError, KeyError, MemoryError, OverflowError):
        return False


def model_in(folder):
    """The model's folder: this one, or the newest whole checkpoint in the --out folder of a run."""
    if not os.path.isdir(folder):
        fail(f"{folder} is no folder; give the --out folder of a run, a checkpoint, or another model's "
             "folder.")
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    names = [name for name in os.listdir(folder) if re.fullmatch("step-[0-9]+", name)]
    for name in sorted(names, key=lambda name: int(name[5:]), reverse=True):
        checkpoint = os.path.join(folder, name)
        if is_whole(checkpoint):
            print(f"{checkpoint}, the newest whole checkpoint:")
            return checkpoint
        print(f"{checkpoint} is not whole and is skipped.")
    fail(f"{folder} has no config.json and no whole checkpoint; give another folder.")


def open_tokenizer(folder):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # a damaged file can raise anything
        fail(f"{folder} has no tokenizer that can be opened ({first_line(problem)}); give one with "
             "--tokenizer FOLDER. A model of bytes has none.")


def open_model(folder):
    import torch
    from transformers import AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device,
                                                    local_files_only=True)
    except (OSError, ValueError) as problem:
        fail(f"{folder} has no model that can be opened ({first_line(problem)}).")


def main():
    run = parse_arguments()
    if MISSING:
        fail(f"{NEEDED}.")
    folder = model_in(run.folder)
    if run.tokenizer and not os.path.isdir(run.tokenizer):
        fail(f"--tokenizer {run.tokenizer} is no folder.")
    tokenizer = open_tokenizer(run.tokenizer or folder)
    model = open_model(folder)
    from transformers import TextStreamer
    sampling = {"do_sample": False}
    if run.temperature:
        sampling = {"do_sample": True, "temperature": run.temperature}
    messages = []
    while True:
        line = input("> ")
        if tokenizer.chat_template:
            messages.append({"role": "user", "content": line})
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True,
                                                   return_tensors="pt")
        else:
            inputs = tokenizer(line, return_tensors="pt")
        inputs = inputs.to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=run.new_tokens, pad_token_id=tokenizer.eos_token_id,
                                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                                **sampling)
        answer = tokens[0][inputs["input_ids"].shape[1]:]
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        print()
