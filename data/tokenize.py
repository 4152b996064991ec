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
is padding. Attention crosses from one conversation of a window into the next; with --one-per-window each
conversation has a window of its own, and what its tokens see is that conversation alone.
"""
import argparse
import array
import os
import sys
import tempfile

from conversations import DATE_AS_TEXT, NOT_COUNTED, ChatTemplate, tokens_of_record
from records import Report, fail, files_below, has_conversations, read_conversations, read_texts

# All of these but the last are numbers of characters.
PROGRESS = 10 << 20  # for longer texts the progress is shown: they take more than ten seconds
PART = 1 << 18  # a longer text is cut into parts, which the tokenizer gets one by one
BATCH = 1 << 21  # the tokenizer gets so many at a time, and needs up to 190 bytes of memory for each
LONGEST_CONVERSATION = 1 << 19  # a longer conversation is cut, or one with more than any T tokens can have
OPEN_WINDOWS = 64  # so many windows may still get the next conversation
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja",
                   "chat_template.json")


def header(*words):
    """The beginning of llm.c's files: 256 int32."""
    return array.array("i", [*words, *[0] * (256 - len(words))]).tobytes()


def hold_out(items, part):
    """(items to train on, items that are held out): every n-th item is held out. If there are fewer than n
    texts, the end of each text is held out."""
    every = max(2, round(1 / part))
    if len(items) < every and isinstance(items[0], str):
        ends = [int(len(text) * (1 - part)) for text in items]
        return [text[:n] for text, n in zip(items, ends)], [text[n:] for text, n in zip(items, ends)]
    first = min(every // 2, len(items) - 1)
    return [item for i, item in enumerate(items) if i % every != first], items[first::every]


def end_of_part(text, begin):
    """Where a text is cut that is too long for the tokenizer: after the first line end after PART
    characters; if there is none in as many more, before a space; else anywhere. Nearly no token crosses a
    line end or begins before a space."""
    middle = begin + PART
    end = middle + PART
    if end >= len(text):
        return len(text)
    line_end = text.find("\n", middle, end)
    if line_end >= 0:
        return line_end + 1
    space = text.rfind(" ", middle, end)
    return space if space >= 0 else end


def parts_of(texts):
    """(part, whether a text begins with it) of all texts."""
    for text in texts:
        begin = 0
        while begin < len(text):
            end = end_of_part(text, begin)
            yield text[begin:end], begin == 0
            begin = end


def batches_of(parts):
    """Lists of parts with about BATCH characters."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(tokenizer, texts, end):
    """One stream of tokens, with an end-of-text token before each text, as in llm.c. If a text spells a
    special token, this stays text.

    A long text is tokenized in parts. Some tokenizers put a space before what they are given, which is right
    before a text and wrong before its second part. So the later parts are tokenized after a line end, whose
    tokens are then left out."""
    def tokens_of(many):
        found = tokenizer(many, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return found["input_ids"]

    line_end = tokens_of(["\n"])[0]
    tokens = array.array("I")  # 4 bytes a token; a list takes more than 8
    done, size = 0, sum(map(len, texts))
    for batch in batches_of(parts_of(texts)):  # the tokenizer takes a batch on all cores
        found = tokens_of([part if first else "\n" + part for part, first in batch])
        for (part, first), ids in zip(batch, found):
            if first:
                tokens.extend(ids if end is None else [end, *ids])
            elif ids[:len(line_end)] == line_end:
                tokens.extend(ids[len(line_end):])
            else:  # the line end became one token with what follows
                tokens.extend(tokens_of([part])[0])
            done += len(part)
        if size > PROGRESS:
            print(f"\r{done * 100 // size}% of {size:,} characters", end="", file=sys.stderr, flush=True)
    print(end="\n" if size > PROGRESS else "", file=sys.stderr)
    return tokens


def train_bpe(texts, size):
    """A tokenizer with a byte-level BPE of `size` tokens, trained on the texts."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    bpe = tokenizers.ByteLevelBPETokenizer()
    parts = (part for part, _ in parts_of(texts))
    bpe.train_from_iterator(parts, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
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


def tokens_of_conversations(template, files, T, report):
    """The first T tokens of each conversation that has an answer in them. `report` counts the others."""
    # So many characters are enough for T tokens, whatever the tokens are.
    longest = max(LONGEST_CONVERSATION, T * max(map(len, template.tokenizer.get_vocab())))
    found = []
    for record in read_conversations(files, report):
        tokens = tokens_of_record(template, record, longest)
        if all(t & NOT_COUNTED for t in tokens[:T]):
            report.without_answer += 1
        else:
            report.longer += len(tokens) > T
            found.append(tokens[:T])
    return found


def print_conversations(template, T, report):
    """Prints what is not used, or not as the record has it."""
    report.print()
    for remark, times in template.remarks.items():
        print(f"{remark} ({times:,} times).")
    print(f"{report.without_answer:,} conversations have an empty answer, or none within {T} tokens, and are "
          f"left out; {report.longer:,} are cut.")
    print(f"Chat templates that ask for the date are told {DATE_AS_TEXT}, on every day.")


def pack(conversations, T, padding, one_per_window):
    """One stream, in windows of T tokens. A conversation goes into the first open window that has room, or, if
    there is to be one_per_window, into a new one."""
    windows, packed = [], array.array("I")
    for tokens in conversations:
        open_windows = [] if one_per_window else windows[-OPEN_WINDOWS:]
        window = next((w for w in open_windows if len(w) + len(tokens) <= T), None)
        if window is None:
            windows.append(window := array.array("I"))
        window.extend(tokens)
    for window in windows:
        packed.extend([*window, *[padding | NOT_COUNTED] * (T - len(window))])
    return packed + array.array("I", [padding | NOT_COUNTED])  # the target of the last position


def parse_arguments():
    parser = argparse.ArgumentParser(description="Turns text or conversations into token files for ./train.",
                                     epilog="data/records.py lists the forms of records that are known.")
    add = parser.add_argument
    add("text", nargs="+", help="text (UTF-8), folders of it, or records (*.jsonl, *.json, *.parquet)")
    add("--tokenizer", metavar="NAME", help="a model's folder, or a name on Hugging Face's hub")
    add("--train-bpe", metavar="SIZE", type=int, default=0, help="train a byte-level BPE of so many tokens")
    add("--out", metavar="FOLDER", default="tokens", help="where to write (default: %(default)s)")
    add("--hold-out", metavar="PART", type=float, default=0.1, help="for validation (default: %(default)s)")
    add("--seq", metavar="N", type=int, default=0, help="tokens of a window of conversations, as in ./train")
    add("--one-per-window", action="store_true", help="do not put several conversations into a window")
    return parser.parse_args()


def check_arguments(run, files, chats):
    """chats: those of the files that have conversations."""
    if chats and len(chats) < len(files):
        other = next(file for file in files if file not in chats)
        fail(f"{chats[0]} has conversations, and {other} has none; give conversations alone, or texts alone.")
    if chats and (not run.tokenizer or run.seq < 2):
        fail(f"{chats[0]} has conversations; they need --tokenizer and --seq N.")
    if (run.seq or run.one_per_window) and not chats:
        fail("--seq and --one-per-window are for conversations, and the files have none; leave them out.")
    one_way = run.train_bpe == 0 if run.tokenizer else run.train_bpe > 256
    if not one_way or not 0.001 <= run.hold_out <= 0.5:
        fail("text needs either --tokenizer or --train-bpe of 257 tokens or more, and a --hold-out from 0.001 "
             "to 0.5.")


def open_tokenizer(name):
    """The tokenizer of this name; None without a name."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fail("the package transformers of Python is missing: install it with 'pip install transformers'.")
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # a damaged file can raise anything
        fail(f"--tokenizer {name} cannot be opened ({problem!r:.150}); give a model's folder, or a name on "
             "Hugging Face's hub.")
    if type(tokenizer).__name__.startswith("MistralCommon"):
        fail(f"transformers opens --tokenizer {name} with the package mistral-common, which does not tell "
             "where tokens stand. Give a folder with tokenizer.json, or use transformers 5 without that "
             "package.")
    return tokenizer


def tokenizer_files(name, tokenizer):
    """The files from which others open the tokenizer, by their names. They go beside the token files, and
    ./train copies them into its checkpoints."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = name if name and os.path.isdir(name) else temporary
        if folder == temporary:
            tokenizer.save_pretrained(folder)
        paths = [os.path.join(folder, file) for file in TOKENIZER_FILES]
        return {os.path.basename(path): open(path, "rb").read() for path in paths if os.path.isfile(path)}


def replace_files(folder, contents, stale):
    """Writes files, given as lists of bytes by their names, and removes those that are `stale`. Old and new
    files must not stand together: earlier ones stay until all new ones are written."""
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, name) for name in contents]
    try:
        for path, content in zip(paths, contents.values()):
            with open(path + ".new", "wb") as f:
                f.writelines(content)
        for path in filter(os.path.exists, [os.path.join(folder, name) for name in stale] + paths):
            os.remove(path)
        for path in paths:
            os.rename(path + ".new", path)
    finally:
        for path in filter(os.path.exists, [path + ".new" for path in paths]):
            os.remove(path)


def streams_of_texts(run, files, report):
    """(tokenizer, the streams of tokens to train on and held out) of files of text."""
    texts = read_texts(files, report)
    report.print()
    if not texts:
        fail("there is no text; give text files or folders of them.")
    parts = hold_out(texts, run.hold_out)
    tokenizer = open_tokenizer(run.tokenizer) or train_bpe(parts[0], run.train_bpe)
    return tokenizer, [encode(tokenizer, part, tokenizer.eos_token_id) for part in parts]


def streams_of_conversations(run, files, report):
    """(tokenizer, the streams of tokens to train on and held out) of files of conversations."""
    tokenizer = open_tokenizer(run.tokenizer)
    template = ChatTemplate(tokenizer)
    conversations = tokens_of_conversations(template, files, run.seq, report)
    print_conversations(template, run.seq, report)
    if len(conversations) < 2:
        fail("give two conversations or more with answers within --seq.")
    padding = tokenizer.eos_token_id or 0
    parts = hold_out(conversations, run.hold_out)
    return tokenizer, [pack(part, run.seq, padding, run.one_per_window) for part in parts]


def contents_of_files(streams, seq, pieces, end):
    """What train.bin, val.bin and tokenizer.bin contain, by their names. Tokens have 16 bits if all of them
    fit and all count, and else 32. The length of a piece is one byte."""
    wide = seq > 0 or len(pieces) > 1 << 16
    magic, code = (20240801, "I") if wide else (20240520, "H")
    contents = {}
    for name, tokens in zip(("train.bin", "val.bin"), streams):
        contents[name] = [header(magic, 1, len(tokens), seq), array.array(code, tokens).tobytes()]
    short = [piece[:255] for piece in pieces]
    contents["tokenizer.bin"] = [header(20240328, 2, len(pieces), -1 if end is None else end),
                                 *(bytes([len(piece)]) + piece for piece in short)]
    return contents


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    run, report = parse_arguments(), Report()
    files = [file for path in run.text for file in files_below(path, report)]
    chats = [file for file in files if has_conversations(file)]
    check_arguments(run, files, chats)
    if chats:
        tokenizer, streams = streams_of_conversations(run, chats, report)
    else:
        tokenizer, streams = streams_of_texts(run, files, report)
    if max(map(len, streams)) >= 1 << 31:
        fail("a token file holds fewer than 2^31 tokens; give parts of the text, each with its own --out.")
    end = tokenizer.eos_token_id
    if end is None:
        print("The tokenizer has no token that ends a text; texts follow each other without one.")
    pieces = list(pieces_of(tokenizer))
    contents = contents_of_files(streams, run.seq, pieces, end)
    for name, content in tokenizer_files(run.tokenizer, tokenizer).items():
        contents[name] = [content]
    replace_files(run.out, contents, TOKENIZER_FILES)
    for name, tokens in zip(contents, streams):
        counted = sum(token < NOT_COUNTED for token in tokens)
        print(f"{os.path.join(run.out, name)}: {len(tokens):,} tokens, {counted:,} count in the loss")
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {run.out}")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its tokenize.py would hide the module of the standard library
    try:
        main()
    except (OSError, MemoryError, OverflowError) as error:
        fail(f"{str(error) or 'out of memory'}; correct the file names, the numbers, or make room.")
