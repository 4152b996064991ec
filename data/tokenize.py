#!/usr/bin/env python3
"""Turns text into llm.c's token files, and writes the table that turns the tokens into text again.

    python3 data/tokenize.py --tokenizer gpt2 --out tokens book.txt folder-of-texts
    python3 data/tokenize.py --train-bpe 4096 --out tokens book.txt
    ./train --data tokens

The tokenizer is a Hugging Face one, by its name on the hub or as a file tokenizer.json, or a byte-level BPE trained on the text
to be held in. Into the folder --out go
    train.bin, val.bin    256 int32 (magic, version, number of tokens), then the tokens: uint16 (magic 20240520) where the
                          vocabulary fits, else uint32 (magic 20240801)
    vocabulary.json       "pieces"[t] is token t as text whose code points U+0000 to U+00FF are its bytes; "" for a token without
    tokenizer.json        with --train-bpe: the tokenizer, for any other program
"""
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: the standard library has a module tokenize of its own

import argparse
import array
import fractions
import json
import os
import re

MAGICS = {"H": (20240520, 1), "I": (20240801, 1)}  # by array's type codes: magic and version
MOST_TOKENS = 2**31 - 1  # the header's count is an int32
MOST_PIECES = 2**22  # a vocabulary that ./train can hold (coat.h, MAX_VOCABULARY)
TABLE_VERSION = 1
CHUNK = 1 << 20  # characters that are tokenized at once: long texts cost a tokenizer much memory


def refuse(sentence):
    sys.exit(sentence)


# ----------------------------------------------------------------------------------------------------------------------
# Text in.


def files_below(path):
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        refuse(f"{path} {'is no file' if os.path.exists(path) else 'does not exist'}; name text files or folders of them.")
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return sorted(filter(os.path.isfile, found), key=os.fsencode)  # a pipe would be waited for, and a link may lead nowhere


def read_texts(paths):
    """The texts of all files, each text once. A file that is named must be text; in a folder others are passed over."""
    texts = {}
    for path in paths:
        for file in files_below(path):
            try:
                with open(file, encoding="utf-8", newline="") as f:
                    text = f.read()
            except UnicodeDecodeError:
                text = "\0"
            except OSError as problem:
                refuse(f"{file} can not be read ({problem.strerror}); check its permissions, or leave it out.")
            if text and "\0" not in text:
                texts[text] = None  # a dict keeps the order
            elif file == path:
                refuse(f"{path} is " + ("not UTF-8 text; convert it first." if text else "empty; name a file with text in it."))
    if not texts:
        refuse("There is no text in " + ", ".join(paths) + "; name text files or folders of them.")
    return list(texts)


def divide(texts, part):
    """A share of many texts is held out, evenly among them, or the end of each of few, cut at the end of a line where there is one."""
    every, share = max(2, round(1 / part)), fractions.Fraction(part).limit_denominator(1000)
    if len(texts) >= every:
        before = [int((i + (every - 1) // 2) * share) for i in range(len(texts) + 1)]  # how many are held out of those before text i
        held = [later > earlier for earlier, later in zip(before, before[1:])]
        return [t for t, out in zip(texts, held) if not out], [t for t, out in zip(texts, held) if out]
    cuts = [text.rfind("\n", 0, int(len(text) * (1 - part))) + 1 or int(len(text) * (1 - part)) for text in texts]
    return [t[:cut] for t, cut in zip(texts, cuts)], [t[cut:] for t, cut in zip(texts, cuts)]


def chunks(text):
    """Cuts at the ends of lines, so that hardly a token differs from those of the whole."""
    at = 0
    while at < len(text):
        end = text.find("\n", at + CHUNK) + 1 or len(text)
        yield text[at:end]
        at = end


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers, and the bytes of their tokens.


def load_tokenizer(tokenizers, name):
    try:
        return tokenizers.Tokenizer.from_file(name) if os.path.exists(name) else tokenizers.Tokenizer.from_pretrained(name)
    except Exception as problem:  # the library raises bare Exceptions
        refuse(f"--tokenizer {name} can not be loaded ({problem}); name a file tokenizer.json, or a model of the hub with a network.")


def train_bpe(tokenizers, texts, size):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 1:
        refuse(f"--train-bpe {size} is too small: the bytes and the end of a text take {len(alphabet) + 1}.")
    if size > MOST_PIECES:
        refuse(f"--train-bpe {size} is too large: ./train holds a vocabulary of up to {MOST_PIECES} tokens.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator((chunk for text in texts for chunk in chunks(text)), trainer)
    return tokenizer


def byte_of_character():
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(token, alphabet=byte_of_character()):
    if not set(token) <= alphabet.keys():
        refuse(f"Token {token!a:.200} has characters that are not in GPT-2's alphabet of bytes; use another tokenizer.")
    return bytes(alphabet[c] for c in token)


def sentencepiece_piece(token):
    single = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes([int(single[1], 16)]) if single else token.replace("\u2581", " ").encode()


def piece_reader(tokenizer):
    """How the tokens of this kind of tokenizer are written, told by its decoder."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece_piece
    known = ", ".join(sorted(kinds)) or "none"
    refuse(f"This tokenizer's tokens have no bytes of their own (decoder: {known}); use a byte-level one, as GPT-2's, or Llama 2's kind.")


def pieces_of(tokenizer):
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if size == 0:
        refuse("This tokenizer has no tokens; use another tokenizer.")
    if size > MOST_PIECES:
        refuse(f"This tokenizer's tokens are numbered up to {size - 1}, but ./train holds {MOST_PIECES} of them; use another tokenizer.")
    read = piece_reader(tokenizer)
    added = {t: token.content.encode() for t, token in tokenizer.get_added_tokens_decoder().items()}  # these are plain text
    tokens = (tokenizer.id_to_token(t) for t in range(size))
    return [added[t] if t in added else read(token) if token is not None else b"" for t, token in enumerate(tokens)]


def encode(tokenizer, texts, end):
    """One stream of tokens, the end-of-text token before each text, as llm.c's data have it."""
    tokens = array.array("I")  # 4 bytes each, where a list has more than 8
    for text in texts:
        tokens.extend([] if end is None else [end])
        for chunk in chunks(text):
            tokens.extend(tokenizer.encode(chunk, add_special_tokens=False).ids)
    return tokens


def end_of_text(tokenizer):
    known = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
    return next((tokenizer.token_to_id(name) for name in known if tokenizer.token_to_id(name) is not None), None)


# ----------------------------------------------------------------------------------------------------------------------
# Files out: under another name until they are whole.


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
        refuse(f"{path} can not be written ({problem.strerror}); free some space, or name another folder with --out.")


def write_tokens(path, tokens, size):
    if len(tokens) > MOST_TOKENS:
        refuse(f"{path} would have {len(tokens)} tokens, but a token file counts to {MOST_TOKENS}; tokenize the text in parts.")
    width = "H" if size <= 1 << 16 else "I"
    header, body = array.array("i", [*MAGICS[width], len(tokens)] + [0] * 253), array.array(width, tokens)
    if sys.byteorder == "big":
        header.byteswap(), body.byteswap()
    write(path, [header.tobytes(), body.tobytes()])


def write_table(path, pieces):
    table = {"format": "coat vocabulary", "version": TABLE_VERSION, "size": len(pieces), "pieces": [p.decode("latin-1") for p in pieces]}
    write(path, [json.dumps(table, ensure_ascii=False, indent=0).encode()])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="text files (UTF-8), or folders of them")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", metavar="NAME_OR_FILE", help="a Hugging Face tokenizer: a name on the hub, or a file tokenizer.json")
    kind.add_argument("--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of so many tokens on the text")
    parser.add_argument("--out", metavar="FOLDER", default="tokens", help="where the files go (default: %(default)s)")
    parser.add_argument("--hold-out", metavar="PART", type=float, default=0.1, help="part of the text for validation (default: %(default)s)")
    arguments = parser.parse_args()
    if not 0 < arguments.hold_out < 1:
        refuse(f"--hold-out {arguments.hold_out} must lie between 0 and 1.")
    return arguments


def main():
    arguments = parse_arguments()
    try:
        import tokenizers
    except ImportError:
        refuse("The Python package tokenizers is missing: install it with 'pip install tokenizers'.")
    train, validation = divide(read_texts(arguments.text), arguments.hold_out)
    if arguments.train_bpe is None:
        tokenizer = load_tokenizer(tokenizers, arguments.tokenizer)
    else:
        tokenizer = train_bpe(tokenizers, train, arguments.train_bpe)  # the text held out stays unseen
    pieces = pieces_of(tokenizer)

    try:
        os.makedirs(arguments.out, exist_ok=True)
    except OSError as problem:
        refuse(f"--out {arguments.out} can not be made ({problem.strerror}); name another folder.")
    end = end_of_text(tokenizer)
    for name, texts in {"train": train, "val": validation}.items():
        tokens, path = encode(tokenizer, texts, end), os.path.join(arguments.out, name + ".bin")
        write_tokens(path, tokens, len(pieces))
        characters, text = sum(map(len, texts)), b"".join(pieces[t] for t in tokens if t != end)
        print(f"{path}: {len(tokens):,} tokens of {characters:,} characters, {characters / max(1, len(tokens)):.2f} each")
        if text.lstrip(b" ") != "".join(texts).encode().lstrip(b" "):  # SentencePiece begins with a space of its own
            print(f"{path}: this tokenizer changes the text; what the tokens say is not letter for letter what was read.")
    write_table(os.path.join(arguments.out, "vocabulary.json"), pieces)
    if arguments.train_bpe is not None:
        write(os.path.join(arguments.out, "tokenizer.json"), [tokenizer.to_str(pretty=True).encode()])
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {arguments.out}")


if __name__ == "__main__":
    main()
