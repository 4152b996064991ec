#!/usr/bin/env python3
"""Turns text into llm.c's token files, with the vocabulary that turns tokens into text again.

    python3 data/tokenize.py --tokenizer gpt2 --out tokens book.txt folder-of-texts
    python3 data/tokenize.py --train-bpe 4096 --out tokens book.txt
    ./train --data tokens

The tokenizer is one of Hugging Face, by its name on the hub or as a file tokenizer.json, or a byte-level BPE
that is trained on the training part of the text. The folder --out gets
    train.bin, val.bin    256 int32 (magic, version, number of tokens), then the tokens: uint16 (magic 20240520)
                          if the vocabulary fits, otherwise uint32 (magic 20240801)
    vocabulary.json       "pieces"[t] has the bytes of token t as code points U+0000 to U+00FF; "" if it has none
    tokenizer.json        with --train-bpe: the tokenizer, for other programs
"""
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its tokenize.py would hide the module of the standard library

import argparse
import array
import fractions
import json
import os
import re

MAGICS = {"H": (20240520, 1), "I": (20240801, 1)}  # (magic, version) by the type code of array
MAX_TOKENS = 2**31 - 1  # the number of tokens in the header is an int32
MAX_VOCABULARY = 2**22  # as in coat.h
TABLE_VERSION = 1
CHUNK = 1 << 20  # characters that are tokenized at once, to bound the memory of the tokenizer


# ------------------------------------------------------------------------------------------------------------
# Reading text


def files_below(path):
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        what = "is not a file" if os.path.exists(path) else "does not exist"
        sys.exit(f"{path} {what}; give text files or folders of them.")
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return sorted(filter(os.path.isfile, found), key=os.fsencode)  # without pipes, and links that lead nowhere


def read_texts(paths):
    """The texts of all files, each text once. In a folder, files that are not text are skipped."""
    texts = {}
    for path in paths:
        for file in files_below(path):
            try:
                with open(file, encoding="utf-8", newline="") as f:
                    text = f.read()
            except UnicodeDecodeError:
                text = "\0"
            except OSError as problem:
                sys.exit(f"{file} cannot be read ({problem.strerror}); check its permissions, or leave it out.")
            if text and "\0" not in text:
                texts[text] = None  # a dict keeps the order
            elif file == path:
                sys.exit(f"{path} is " + ("not UTF-8 text; convert it first." if text else "empty; give text."))
    if not texts:
        sys.exit("There is no text in " + ", ".join(paths) + "; give text files or folders of them.")
    return list(texts)


def divide(texts, part):
    """(training, validation). Of many texts every n-th is held out; of few the end of each, after a line break."""
    every, share = max(2, round(1 / part)), fractions.Fraction(part).limit_denominator(1000)
    if len(texts) >= every:
        # before[i]: how many of the texts before text i are held out
        before = [int((i + (every - 1) // 2) * share) for i in range(len(texts) + 1)]
        held = [later > earlier for earlier, later in zip(before, before[1:])]
        return [t for t, out in zip(texts, held) if not out], [t for t, out in zip(texts, held) if out]
    cuts = [text.rfind("\n", 0, int(len(text) * (1 - part))) + 1 or int(len(text) * (1 - part)) for text in texts]
    return [t[:cut] for t, cut in zip(texts, cuts)], [t[cut:] for t, cut in zip(texts, cuts)]


def chunks(text):
    """Cuts at line breaks, where nearly no token crosses the cut."""
    at = 0
    while at < len(text):
        end = text.find("\n", at + CHUNK) + 1 or len(text)
        yield text[at:end]
        at = end


# ------------------------------------------------------------------------------------------------------------
# Tokenizers, and the bytes of their tokens


def load_tokenizer(tokenizers, name):
    try:
        Tokenizer = tokenizers.Tokenizer
        return Tokenizer.from_file(name) if os.path.exists(name) else Tokenizer.from_pretrained(name)
    except Exception as problem:  # the library raises bare Exceptions
        sys.exit(f"--tokenizer {name} cannot be loaded ({problem}); give a tokenizer.json, or a name on the hub.")


def train_bpe(tokenizers, texts, size):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 1:
        sys.exit(f"--train-bpe {size} is too small; give at least {len(alphabet) + 1}.")
    if size > MAX_VOCABULARY:
        sys.exit(f"--train-bpe {size} is too large; give at most {MAX_VOCABULARY}, which ./train supports.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator((chunk for text in texts for chunk in chunks(text)), trainer)
    return tokenizer


def byte_of_character():
    """GPT-2's alphabet: a printable byte of Latin-1 is its own character, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(token, alphabet=byte_of_character()):
    if not set(token) <= alphabet.keys():
        sys.exit(f"Token {token!a:.200} has characters outside GPT-2's alphabet of bytes; use another tokenizer.")
    return bytes(alphabet[c] for c in token)


def sentencepiece_piece(token):
    single = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes([int(single[1], 16)]) if single else token.replace("\u2581", " ").encode()


def piece_reader(tokenizer):
    """The function that turns a token's text into its bytes: the decoder shows the kind of the tokenizer."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece_piece
    known = ", ".join(sorted(kinds)) or "none"
    sys.exit(f"This tokenizer's decoder ({known}) is not supported; use a tokenizer like GPT-2's or Llama 2's.")


def pieces_of(tokenizer):
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if size == 0:
        sys.exit("This tokenizer has no tokens; use another tokenizer.")
    if size > MAX_VOCABULARY:
        sys.exit(f"This tokenizer has token {size - 1}, but ./train supports {MAX_VOCABULARY} tokens; use another.")
    read = piece_reader(tokenizer)
    added = {t: token.content.encode() for t, token in tokenizer.get_added_tokens_decoder().items()}  # plain text
    tokens = (tokenizer.id_to_token(t) for t in range(size))
    return [added[t] if t in added else read(token) if token is not None else b"" for t, token in enumerate(tokens)]


def encode(tokenizer, texts, end):
    """One stream of tokens, with the end-of-text token before each text, as in llm.c's data."""
    tokens = array.array("I")  # 4 bytes a token; a list takes more than 8
    for text in texts:
        tokens.extend([] if end is None else [end])
        for chunk in chunks(text):
            tokens.extend(tokenizer.encode(chunk, add_special_tokens=False).ids)
    return tokens


def end_of_text(tokenizer):
    known = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
    return next((tokenizer.token_to_id(name) for name in known if tokenizer.token_to_id(name) is not None), None)


# ------------------------------------------------------------------------------------------------------------
# Writing files: to another name first, so that no half-written file stays


def write(path, content):
    try:
        with open(path + ".tmp", "wb") as f:
            for part in content:
                f.write(part)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError as problem:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        sys.exit(f"{path} cannot be written ({problem.strerror}); free some space, or give another --out.")


def write_tokens(path, tokens, size):
    if len(tokens) > MAX_TOKENS:
        sys.exit(f"{path} would have {len(tokens)} tokens, more than {MAX_TOKENS}; tokenize the text in parts.")
    width = "H" if size <= 1 << 16 else "I"
    header, body = array.array("i", [*MAGICS[width], len(tokens)] + [0] * 253), array.array(width, tokens)
    if sys.byteorder == "big":
        header.byteswap(), body.byteswap()
    write(path, [header.tobytes(), body.tobytes()])


def write_table(path, pieces):
    table = {"format": "coat vocabulary", "version": TABLE_VERSION, "size": len(pieces)}
    table["pieces"] = [piece.decode("latin-1") for piece in pieces]
    write(path, [json.dumps(table, ensure_ascii=False, indent=0).encode()])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="text files (UTF-8), or folders of them")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", metavar="NAME", help="a name on Hugging Face's hub, or a file tokenizer.json")
    kind.add_argument("--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of so many tokens")
    parser.add_argument("--out", metavar="FOLDER", default="tokens", help="where to write (default: %(default)s)")
    parser.add_argument(
        "--hold-out", metavar="PART", type=float, default=0.1, help="part for validation (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if not 0 < arguments.hold_out < 1:
        sys.exit(f"--hold-out {arguments.hold_out} is not between 0 and 1; give a part such as 0.1.")
    return arguments


def main():
    arguments = parse_arguments()
    try:
        import tokenizers
    except ImportError:
        sys.exit("The Python package tokenizers is missing: install it with 'pip install tokenizers'.")
    train, validation = divide(read_texts(arguments.text), arguments.hold_out)
    if arguments.train_bpe is None:
        tokenizer = load_tokenizer(tokenizers, arguments.tokenizer)
    else:
        tokenizer = train_bpe(tokenizers, train, arguments.train_bpe)  # without the validation text
    pieces = pieces_of(tokenizer)

    try:
        os.makedirs(arguments.out, exist_ok=True)
    except OSError as problem:
        sys.exit(f"--out {arguments.out} cannot be created ({problem.strerror}); give another folder.")
    end = end_of_text(tokenizer)
    for name, texts in {"train": train, "val": validation}.items():
        tokens, path = encode(tokenizer, texts, end), os.path.join(arguments.out, name + ".bin")
        write_tokens(path, tokens, len(pieces))
        characters, text = sum(map(len, texts)), b"".join(pieces[t] for t in tokens if t != end)
        each = characters / max(1, len(tokens))
        print(f"{path}: {len(tokens):,} tokens for {characters:,} characters, {each:.2f} characters a token")
        if text.lstrip(b" ") != "".join(texts).encode().lstrip(b" "):  # SentencePiece adds a space at the start
            print(f"{path}: this tokenizer changes the text; the tokens do not decode to exactly what was read.")
    write_table(os.path.join(arguments.out, "vocabulary.json"), pieces)
    if arguments.train_bpe is not None:
        write(os.path.join(arguments.out, "tokenizer.json"), [tokenizer.to_str(pretty=True).encode()])
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {arguments.out}")


if __name__ == "__main__":
    main()
