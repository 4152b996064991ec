"""Talks to a model that ./train has saved, or to any folder that transformers opens.

    python3 dev/chat.py tuned/step-000900 --temperature 0.7        needs torch and transformers

With a chat template it keeps the conversation; without one it continues what is typed."""
import argparse
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

parser = argparse.ArgumentParser(description="Talks to a saved model; Ctrl-D ends it.")
parser.add_argument("folder")
parser.add_argument("--tokenizer", help="the folder of tokenize.py --train-bpe; default: the model's")
parser.add_argument("--temperature", type=float, default=0.8, help="0: the most probable token")
parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
run = parser.parse_args()
try:
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer or run.folder)
except (OSError, ValueError):
    raise SystemExit(f"chat.py: {run.folder} is no model with a tokenizer; give a checkpoint, or --tokenizer.")
model = AutoModelForCausalLM.from_pretrained(run.folder, dtype="auto",
                                             device_map="cuda" if torch.cuda.is_available() else None)
sampling = dict(do_sample=True, temperature=run.temperature) if run.temperature else dict(do_sample=False)
messages = []
while True:
    try:
        line = input("> ")
    except (EOFError, KeyboardInterrupt):
        break
    if tokenizer.chat_template:
        messages.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True,
                                               return_tensors="pt").to(model.device)
    else:
        inputs = tokenizer(line, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=run.tokens, pad_token_id=tokenizer.eos_token_id,
                            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                            **sampling)
    answer = tokens[0][inputs["input_ids"].shape[1]:]
    messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
