#!/usr/bin/env python3
"""Turns text or conversations into llm.c's token files, with its tokenizer file that turns tokens into text.

    python3 data/tokenize.py --tokenizer gpt2 --out tokens book.txt folder-of-texts
    python3 data/tokenize.py --train-bpe 4096 --out tokens book.txt
    python3 data/tokenize.py --tokenizer model-folder --seq 2048 --out tokens conversations.jsonl

The tokenizer is one that transformers opens, by its name on the hub or as a model's folder; or a byte-level
BPE that is trained on the training part of the text. data/tokens.h describes the files that it writes.

Files *.jsonl, *.json and *.parquet have records of texts or of conversations (data/records.py). The
tokenizer's chat template turns a conversation into text. Only what the assistant says counts in the loss,
with the token that ends its turn. Conversations are packed into windows of --seq tokens; the rest of a window
is padding. Attention crosses from one conversation of a window into the next.
"""
import argparse
import array
import itertools
import os
import re
import sys

from records import fail, files_below, has_conversations, read_conversations, read_texts

NOT_COUNTED = 1 << 31
PROGRESS = 10 << 20  # characters from which on it is shown: more than ten seconds
PART = re.compile("(?s:.{262144})[^\n]*\n|(?s:.+)")  # it ends with a line: nearly no token crosses that
OPEN_WINDOWS = 64  # that the next conversation may go into
MARK = "\ue000"  # stands for an answer; no template cuts it off or looks for it


def write(path, header, content):
    with open(path, "wb") as f:
        f.write(array.array("i", header + [0] * (256 - len(header))).tobytes() + content)


def hold_out(items, part):
    """(training, validation): every n-th item is held out, and of few texts the end of each."""
    every = max(2, round(1 / part))
    if len(items) < every and isinstance(items[0], str):
        cut = [int(len(text) * (1 - part)) for text in items]
        return [t[:n] for t, n in zip(items, cut)], [t[n:] for t, n in zip(items, cut)]
    first = min(every // 2, len(items) - 1)
    return [x for i, x in enumerate(items) if i % every != first], items[first::every]


def encode(tokenizer, texts, end):
    """One stream, an end-of-text token before each text, as in llm.c. A special token in a text is text."""
    tokens = array.array("I")  # 4 bytes a token; a list takes more than 8
    done, size = 0, sum(map(len, texts))
    parts = (part for text in texts for part in PART.finditer(text))
    while batch := list(itertools.islice(parts, 64)):  # on all cores, in bounded memory
        found = tokenizer([part[0] for part in batch], add_special_tokens=False, split_special_tokens=True,
                          verbose=False)["input_ids"]
        for part, ids in zip(batch, found):
            tokens.extend(ids if part.start() or end is None else [end, *ids])
            done += len(part[0])
        if size > PROGRESS:
            print(f"\r{done * 100 // size}% of {size:,} characters", end="", file=sys.stderr, flush=True)
    print(end="\n" if size > PROGRESS else "", file=sys.stderr)
    return tokens


def train_bpe(texts, size):
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")


def pieces_of(tokenizer):
    """The bytes of every token. A byte-level BPE (GPT-2, Llama 3) spells each byte as a character: those of
    Latin-1 that print are themselves, the others are U+0100 and up. SentencePiece (Llama 2) spells text, with
    U+2581 for a space, and a byte that is no character as <0xE9>. An added token is plain text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    token_of = {t: token for token, t in tokenizer.get_vocab().items()}
    byte_level = any("\u0120" in token for token in token_of.values())  # a space
    for t in range(1 + max(token_of)):
        token = token_of.get(t, "")
        if t in tokenizer.added_tokens_decoder:
            yield token.encode()
        elif byte_level:
            yield b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in token)
        elif len(token) == 6 and token.startswith("<0x"):
            yield bytes([int(token[3:5], 16)])
        else:
            yield token.replace("\u2581", " ").encode()


def common(a, b):
    """The length of the longest common beginning."""
    return len(os.path.commonprefix([a, b]))


def span_of_answer(render, whole, messages, i, where):
    """Where message i begins and ends in the text of the whole conversation, with the end of its turn. A
    template may write other things in the middle of a conversation than at its end. So the conversation is
    written once more, with a mark in place of the answer: the answer is where the two texts differ. It begins
    after the generation prompt if the text has that. What follows an answer that is last is a turn's end."""
    marked = [*messages[:i], {"role": "assistant", "content": MARK}]
    other, last = render(marked + messages[i + 1:]), render(marked).rstrip()
    begin, end = common(whole, other), len(whole) - common(whole[::-1], other[::-1])
    prompt = render(messages[:i], True) if i else ""
    turn_end = last[last.rfind(MARK) + 1:]
    if begin >= end or MARK not in other or MARK not in last or not whole.startswith(turn_end, end):
        fail(f"{where}: the chat template writes {whole[end:end + 20]!r} after answer {i + 1}, but "
             f"{turn_end[:20]!r} where it is the last, so its end cannot be found; use another template.")
    return len(prompt) if i and whole.startswith(prompt) else begin, end + len(turn_end)


def tokens_of_conversation(tokenizer, messages, tools, where):
    """The tokens, with the bit NOT_COUNTED where the assistant does not speak; none if an answer is empty."""
    def render(messages, generate=False):
        try:  # without the date, Llama 3's template would write today's: other tokens every day
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                 add_generation_prompt=generate, date_string="26 Jul 2024")
        except Exception as problem:  # a template can raise anything
            fail(f"{where}: the chat template fails ({problem}); correct the record, or give a chat model.")
    text, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not str(message.get("content") or "").strip() and not message.get("tool_calls"):
            return []
        if message.get("weight", 1):
            spans.append(span_of_answer(render, text, messages, i, where))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = [t if any(a < end and b > begin for begin, end in spans) else t | NOT_COUNTED
              for t, (a, b) in zip(found["input_ids"], found["offset_mapping"])]
    return [tokens[0] | NOT_COUNTED, *tokens[1:]]  # nothing precedes the first token


def tokens_of_conversations(tokenizer, files, T):
    """The tokens of each conversation, cut after T."""
    found, without, longer = [], 0, 0
    for where, messages, tools in read_conversations(files):
        tokens = tokens_of_conversation(tokenizer, messages, tools, where)
        if all(t & NOT_COUNTED for t in tokens[:T]):
            without += 1
        else:
            longer += len(tokens) > T
            found.append(tokens[:T])
    print(f"{without:,} conversations have no answer within {T} tokens and are left out; {longer:,} are cut.")
    return found if len(found) > 1 else fail("give two conversations or more with answers within --seq.")


def pack(conversations, T, padding):
    """Windows of T tokens. A conversation goes into the first open window that has room."""
    windows, packed = [], array.array("I")
    for tokens in conversations:
        window = next((w for w in windows[-OPEN_WINDOWS:] if len(w) + len(tokens) <= T), None)
        if window is None:
            windows.append(window := array.array("I"))
        window.extend(tokens)
    for window in windows:
        packed.extend([*window, *[padding | NOT_COUNTED] * (T - len(window))])
    return packed + array.array("I", [padding | NOT_COUNTED])  # the target of the last position


def main():
    parser = argparse.ArgumentParser(description="Turns text or conversations into token files for ./train.")
    add = parser.add_argument
    add("text", nargs="+", help="text (UTF-8), folders of it, or records (*.jsonl, *.json, *.parquet)")
    add("--tokenizer", metavar="NAME", help="a model's folder, or a name on Hugging Face's hub")
    add("--train-bpe", metavar="SIZE", type=int, default=0, help="train a byte-level BPE of so many tokens")
    add("--out", metavar="FOLDER", default="tokens", help="where to write (default: %(default)s)")
    add("--hold-out", metavar="PART", type=float, default=0.1, help="for validation (default: %(default)s)")
    add("--seq", metavar="N", type=int, default=0, help="tokens of a window of conversations, as in ./train")
    run = parser.parse_args()
    files = [file for path in run.text for file in files_below(path)]
    for file in (file for file in files if not os.path.isfile(file)):
        fail(f"{file} does not exist, or is no file; give text files or conversations.")
    chats = [file for file in files if has_conversations(file)]
    if chats and (len(chats) < len(files) or not run.tokenizer or run.seq < 2):
        fail(f"{chats[0]} has conversations; give conversations alone, with --tokenizer and --seq N.")
    one_way = run.train_bpe == 0 if run.tokenizer else run.train_bpe > 256
    if not one_way or run.seq and not chats or not 0.001 <= run.hold_out <= 0.5:
        fail("text needs either --tokenizer or --train-bpe of 257 tokens or more, no --seq, and a --hold-out "
             "from 0.001 to 0.5.")
    texts = None if chats else hold_out(read_texts(files), run.hold_out)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fail("the package transformers of Python is missing: install it with 'pip install transformers'.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(run.tokenizer) if run.tokenizer else None
    except Exception as problem:  # a damaged file can raise anything
        fail(f"--tokenizer {run.tokenizer} cannot be opened ({problem!r:.150}); give a model's folder, or a name "
             "on Hugging Face's hub.")
    tokenizer = tokenizer or train_bpe(texts[0], run.train_bpe)
    end = tokenizer.eos_token_id
    parts = texts or hold_out(tokens_of_conversations(tokenizer, chats, run.seq), run.hold_out)
    streams = [pack(p, run.seq, end or 0) if chats else encode(tokenizer, p, end) for p in parts]
    if max(map(len, streams)) >= 1 << 31:
        fail("a token file holds fewer than 2^31 tokens; give parts of the text, each with its own --out.")
    pieces = [piece[:255] for piece in pieces_of(tokenizer)]  # the length is one byte
    width, magic = ("I", 20240801) if chats or len(pieces) > 1 << 16 else ("H", 20240520)
    # Earlier data stay until the new ones are written; old and new files must not stand together.
    os.makedirs(run.out, exist_ok=True)
    paths = [os.path.join(run.out, name) for name in ("train.bin", "val.bin", "tokenizer.bin")]
    try:
        for path, tokens in zip(paths, streams):
            write(path + ".new", [magic, 1, len(tokens), run.seq], array.array(width, tokens).tobytes())
            counted = sum(t < NOT_COUNTED for t in tokens)
            print(f"{path}: {len(tokens):,} tokens, {counted:,} count in the loss")
        write(paths[2] + ".new", [20240328, 2, len(pieces), -1 if end is None else end],
              b"".join(bytes([len(p)]) + p for p in pieces))
        for path in filter(os.path.exists, paths):
            os.remove(path)
        for path in paths:
            os.rename(path + ".new", path)
    finally:
        for path in filter(os.path.exists, (path + ".new" for path in paths)):
            os.remove(path)
    if not run.tokenizer:
        tokenizer.save_pretrained(run.out)
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {run.out}")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its tokenize.py would hide the module of the standard library
    try:
        main()
    except (OSError, MemoryError, OverflowError) as error:
        fail(f"{str(error) or 'out of memory'}; correct the file names, the numbers, or make room.")
