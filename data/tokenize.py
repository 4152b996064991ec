#!/usr/bin/env python3
"""Turns text or conversations into llm.c's token files, with the vocabulary that turns tokens into text.

    python3 data/tokenize.py --tokenizer gpt2 --out tokens book.txt folder-of-texts
    python3 data/tokenize.py --train-bpe 4096 --out tokens book.txt
    python3 data/tokenize.py --tokenizer model-folder --seq 2048 --out tokens conversations.jsonl
    ./train --data tokens

The tokenizer is one of Hugging Face, by its name on the hub, as a model's folder or as a file
tokenizer.json, or a byte-level BPE that is trained on the training part of the text. The folder --out gets
    train.bin, val.bin    256 int32 (magic, version, number of tokens), then the tokens: uint16 (magic
                          20240520) if the vocabulary fits, otherwise uint32 (magic 20240801)
    train.mask, val.mask  for conversations: a byte for each token, 1 if it counts in the loss, otherwise 0
    vocabulary.json       "pieces"[t] has the bytes of token t as code points U+0000 to U+00FF; "" if it has
                          none. "special" lists the tokens that stand for no text
    tokenizer.json        with --train-bpe: the tokenizer, for other programs

A line of a file *.jsonl is a conversation: {"messages": [{"role": "user", "content": "..."}, ...]}, which
the chat template of the model's folder turns into text, or {"prompt": "...", "completion": "..."}. Only what
the assistant says counts in the loss, with the token that ends its turn. Conversations are packed into
windows of --seq tokens (the --seq of ./train). None continues in the next window: the rest of a window is
padding, and a conversation longer than --seq is cut. Attention crosses from one conversation of a window
into the next. So an answer also depends on the unrelated conversations before it, and attention to them
costs time. Where that matters, choose a --seq not much longer than one conversation.
"""
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its tokenize.py would hide the module of the standard library

import argparse
import array
import contextlib
import fractions
import functools
import json
import multiprocessing
import os
import re
import time

MAGICS = {"H": (20240520, 1), "I": (20240801, 1)}  # (magic, version) by the type code of array
MAX_TOKENS = 2**31 - 1  # the number of tokens in the header is an int32
MAX_VOCABULARY = 2**22  # as in coat.h
TABLE_VERSION = 1
CHUNK = 1 << 20  # characters that are tokenized at once, to bound the memory of the tokenizer
LINES = 256  # conversations that a process tokenizes at once
OPEN_WINDOWS = 64  # that the next conversation may still go into


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
    if len(texts) >= max(2, round(1 / part)):
        return divide_whole(texts, part)
    cuts = [text.rfind("\n", 0, int(len(text) * (1 - part))) + 1 or int(len(text) * (1 - part)) for text in texts]
    return [t[:cut] for t, cut in zip(texts, cuts)], [t[cut:] for t, cut in zip(texts, cuts)]


def divide_whole(texts, part):
    every, share = max(2, round(1 / part)), fractions.Fraction(part).limit_denominator(1000)
    # before[i]: how many of the texts before text i are held out
    before = [int((i + (every - 1) // 2) * share) for i in range(len(texts) + 1)]
    held = [later > earlier for earlier, later in zip(before, before[1:])]
    held[-1] |= not any(held)
    return [t for t, out in zip(texts, held) if not out], [t for t, out in zip(texts, held) if out]


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
    if os.path.isdir(name):
        name = os.path.join(name, "tokenizer.json")
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


def encode(tokenizer, texts, end, processes):
    """One stream of tokens, with the end-of-text token before each text, as in llm.c's data."""
    parts = [(number == 0, chunk) for text in texts for number, chunk in enumerate(chunks(text))]

    def tokens_of(part):
        begins, chunk = part
        ids = tokenizer.encode(chunk, add_special_tokens=False).ids
        return array.array("I", [end, *ids] if begins and end is not None else ids)

    tokens = array.array("I")  # 4 bytes a token; a list takes more than 8
    for ids in in_parallel(tokens_of, parts, processes):
        tokens.extend(ids)
    return tokens


work_of_processes = None  # they inherit it: a function within a function cannot be sent to them


def call_work(item):
    return work_of_processes(item)


def in_parallel(work, items, processes):
    """work(item) of every item, in their order. Long work is shared among processes and shows its progress."""
    global work_of_processes
    work_of_processes = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    end, pause = ("\r", 0.5) if sys.stderr.isatty() else ("\n", 30)
    shown = time.monotonic()
    with contextlib.ExitStack() as stack:
        results = map(work, items)
        if processes > 1 and len(items) > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(min(processes, len(items))))
            results = pool.imap(call_work, items)
        for done, result in enumerate(results, 1):
            yield result
            if time.monotonic() > shown + pause:
                shown = time.monotonic()
                print(f"{100 * done // len(items):3}% tokenized", end=end, file=sys.stderr, flush=True)


def end_of_text(tokenizer):
    known = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
    return next((tokenizer.token_to_id(name) for name in known if tokenizer.token_to_id(name) is not None), None)


# ------------------------------------------------------------------------------------------------------------
# Conversations


class Wrong(Exception):
    """What is wrong with a conversation or a template, in a sentence for the user."""


def read_lines(paths):
    """(file:line, text) of every conversation, each text once; and how many lines repeat another."""
    lines, read = {}, 0
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if line.strip():
                        lines.setdefault(line.strip(), f"{path}:{number}")
                        read += 1
        except UnicodeDecodeError:
            sys.exit(f"{path} is not UTF-8 text; convert it first.")
        except OSError as problem:
            sys.exit(f"{path} cannot be read ({problem.strerror}); give another file.")
    if len(lines) < 2:
        sys.exit("Give at least two conversations: one is held out for validation.")
    return [(where, line) for line, where in lines.items()], read - len(lines)


def read_optional(path):
    """The text of a file of the model's folder; empty if there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as problem:
        raise Wrong(f"{path} cannot be read ({problem}); download the folder again.") from None


def read_config(folder, name):
    path = os.path.join(folder, name)
    try:
        config = json.loads(read_optional(path) or "{}")
    except ValueError as problem:
        raise Wrong(f"{path} is not JSON ({problem}); download the folder again.") from None
    return config if isinstance(config, dict) else {}


def named_tokens(folder):
    """bos_token, eos_token and so on -> their text."""
    config = read_config(folder, "tokenizer_config.json").items()
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in config}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


@functools.lru_cache
def chat_template(folder):
    """The function from messages to text that the model's folder has. There is no strftime_now: templates with
    a date have a fixed one for that case, so that the same conversations always become the same tokens."""
    path = os.path.join(folder, "chat_template.jinja")
    template = read_optional(path)
    if not template:
        path = os.path.join(folder, "tokenizer_config.json")
        template = read_config(folder, "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise Wrong(f"{path} has no chat_template; give the folder of a chat model, or prompt and completion.")
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        raise Wrong("The Python package jinja2 is missing: install it with 'pip install jinja2'.") from None

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    kind = jinja2.sandbox.ImmutableSandboxedEnvironment  # a template may come from anywhere
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    try:
        compiled = environment.from_string(template, named_tokens(folder))
    except jinja2.TemplateError as problem:
        raise Wrong(f"the chat template of {path} cannot be read ({problem}); correct it.") from None

    def render(messages, tools, generation):
        try:
            return compiled.render(messages=messages, tools=tools, add_generation_prompt=generation)
        except Exception as problem:  # a template can raise anything
            raise Wrong(f"the chat template of {path} fails ({problem}); correct the one or the other.") from None

    return render, path


def answers_in(row, folder):
    """(text, spans): the text of a conversation, and the parts [begin, end) of it that the assistant says. No
    spans: there is no answer, or one of them is empty."""
    if not isinstance(row, dict):
        raise Wrong("this is not a JSON object; give a conversation on each line.")
    messages = row.get("messages")
    if messages is None:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise Wrong('there is neither "messages" nor the texts "prompt" and "completion"; add them.')
        text = prompt + completion
        return text, [(len(prompt), len(text))] if completion.strip() else []
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise Wrong('"messages" is not a list of objects with "role" and "content"; correct it.')
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not all(str(messages[i].get("content") or "").strip() or messages[i].get("tool_calls") for i in answers):
        return "", []
    render, path = chat_template(folder)
    text, spans = render(messages, row.get("tools"), False), []
    for i in answers:
        before = render(messages[:i], row.get("tools"), True)
        after = render(messages[: i + 1], row.get("tools"), False)
        if not text.startswith(after) or not after.startswith(before):
            raise Wrong(
                f"the chat template of {path} does not write the beginning of a conversation as it writes the "
                "whole, so an answer cannot be found in it; give prompt and completion, or another template."
            )
        spans.append((len(before), len(after)))
    return text, spans


def tokens_of_row(tokenizer, row, folder, special, end):
    """(tokens, mask) of a conversation; None if there is no answer. The text is tokenized as a whole, and a
    token counts if a part of it is in an answer. White space after the special token that ends an answer does
    not count; nor does the first token of a conversation, which nothing precedes."""
    text, spans = answers_in(row, folder)
    if not spans:
        return None
    chat = "messages" in row
    encoding = tokenizer.encode(text, add_special_tokens=not chat)
    tokens, mask = array.array("I", encoding.ids), bytearray(len(encoding.ids))
    for begin, stop in spans:
        inside = [i for i, (first, last) in enumerate(encoding.offsets) if first < stop and last > begin]
        ends = [i for i in inside if tokens[i] in special and not text[encoding.offsets[i][1] : stop].strip()]
        for i in inside:
            mask[i] = not ends or i <= ends[0]
    if not chat and end is not None:
        if not tokens or tokens[-1] != end:
            tokens.append(end), mask.append(0)
        mask[-1] = 1
    mask[:1] = b"\0"
    return tokens, bytes(mask)


def tokenize_lines(tokenizer, lines, arguments, special, end):
    """[(tokens, mask), ...] of the conversations that can be used, and how many are cut, too long, unanswered."""

    def of_lines(part):
        return [of_line(where, line) for where, line in part]

    def of_line(where, line):
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise Wrong(f"{where} is not JSON ({problem}); give a conversation on each line.") from None
        try:
            return tokens_of_row(tokenizer, row, arguments.tokenizer, special, end)
        except Wrong as problem:
            raise Wrong(f"{where}: {problem}") from None

    found, counts, T = [], {"cut": 0, "late": 0, "empty": 0}, arguments.seq
    parts = [lines[i : i + LINES] for i in range(0, len(lines), LINES)]
    for conversation in (c for part in in_parallel(of_lines, parts, arguments.processes) for c in part):
        if conversation is None:
            counts["empty"] += 1
        elif not any(conversation[1][:T]):
            counts["late" if any(conversation[1]) else "empty"] += 1
        else:
            counts["cut"] += len(conversation[0]) > T
            found.append((conversation[0][:T], conversation[1][:T]))
    return found, counts


def pack(conversations, T, padding):
    """(tokens, mask) of windows of T tokens. A conversation goes into the first open window that has room."""
    windows = []
    for tokens, mask in conversations:
        roomy = (w for w in windows[-OPEN_WINDOWS:] if len(w[0]) + len(tokens) <= T)
        window = next(roomy, None)
        if window is None:
            windows.append(window := (array.array("I"), bytearray()))
        window[0].extend(tokens), window[1].extend(mask)
    all_tokens, all_mask = array.array("I"), bytearray()
    for tokens, mask in windows:
        rest = T - len(tokens)
        all_tokens.extend(tokens), all_tokens.extend([padding] * rest)
        all_mask.extend(mask), all_mask.extend(bytes(rest))
    all_tokens.append(padding), all_mask.append(0)  # the target of the last position
    return all_tokens, all_mask


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


def write_tokens(path, tokens, size, mask=None):
    if len(tokens) > MAX_TOKENS:
        sys.exit(f"{path} would have {len(tokens)} tokens, more than {MAX_TOKENS}; tokenize the text in parts.")
    width = "H" if size <= 1 << 16 else "I"
    header, body = array.array("i", [*MAGICS[width], len(tokens)] + [0] * 253), array.array(width, tokens)
    if sys.byteorder == "big":
        header.byteswap(), body.byteswap()
    beside = path[: -len(".bin")] + ".mask"
    if os.path.exists(beside):
        os.remove(beside)  # of other tokens
    write(path, [header.tobytes(), body.tobytes()])
    if mask is not None:
        write(beside, [mask])


def table_of(pieces, special):
    table = {"format": "coat vocabulary", "version": TABLE_VERSION, "size": len(pieces)}
    table["special"] = sorted(special)
    table["pieces"] = [piece.decode("latin-1") for piece in pieces]
    return table


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="text files (UTF-8), folders of them, or conversations (*.jsonl)")
    kind = parser.add_mutually_exclusive_group(required=True)
    about = "a model's folder, a file tokenizer.json, or a name on Hugging Face's hub"
    kind.add_argument("--tokenizer", metavar="NAME", help=about)
    kind.add_argument("--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of so many tokens")
    parser.add_argument("--out", metavar="FOLDER", default="tokens", help="where to write (default: %(default)s)")
    parser.add_argument(
        "--hold-out", metavar="PART", type=float, default=0.1, help="part for validation (default: %(default)s)"
    )
    parser.add_argument("--seq", metavar="N", type=int, help="tokens of a window of conversations: ./train's --seq")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", metavar="N", type=int, default=cores, help="default: one for each core")
    parser.add_argument("--prompt", metavar="TEXT", help="print its tokens and the vocabulary as JSON (for ./train)")
    arguments = parser.parse_args()
    conversations = [path for path in arguments.text if path.endswith(".jsonl")]
    if not arguments.text and arguments.prompt is None:
        sys.exit("There is no text; give text files, folders of them, or conversations (*.jsonl).")
    if conversations and len(conversations) < len(arguments.text):
        sys.exit(f"{conversations[0]} has conversations and the other files are text; give one kind.")
    if conversations and (arguments.seq is None or arguments.seq < 2):
        sys.exit(f"{conversations[0]} has conversations: give --seq N, the tokens of a window, as to ./train.")
    if conversations and not os.path.isdir(arguments.tokenizer or ""):
        sys.exit(f"{conversations[0]} has conversations: give --tokenizer FOLDER, the folder of the model.")
    if arguments.prompt is not None and arguments.tokenizer is None:
        sys.exit("--prompt needs --tokenizer; give both.")
    if not 0 < arguments.hold_out < 1:
        sys.exit(f"--hold-out {arguments.hold_out} is not between 0 and 1; give a part such as 0.1.")
    return arguments


def require_model_has(tokens, arguments, pieces):
    """The model's vocabulary is usually padded, so it may be larger than the tokenizer's, but not smaller."""
    folder = str(arguments.tokenizer)
    size = read_config(folder, "config.json").get("vocab_size") if os.path.isdir(folder) else None
    if not isinstance(size, int) or len(pieces) <= size:
        return
    about = f"{folder}: tokenizer.json has {len(pieces)} tokens, but the model {size} (config.json)"
    outside = sum(token >= size for token in tokens)
    if outside:
        sys.exit(f"{about}, and {outside} tokens of the text are not the model's; give the model's own tokenizer.")
    print(f"{about}; the text uses none of the others.")


def write_texts(tokenizer, arguments, parts, pieces, end):
    make_folder(arguments.out)
    for name, texts in zip(("train", "val"), parts):
        tokens = encode(tokenizer, texts, end, arguments.processes)
        path = os.path.join(arguments.out, name + ".bin")
        require_model_has(tokens, arguments, pieces)
        write_tokens(path, tokens, len(pieces))
        characters, text = sum(map(len, texts)), b"".join(pieces[t] for t in tokens if t != end)
        each = characters / max(1, len(tokens))
        print(f"{path}: {len(tokens):,} tokens for {characters:,} characters, {each:.2f} characters a token")
        if text.lstrip(b" ") != "".join(texts).encode().lstrip(b" "):  # SentencePiece adds a space at the start
            print(f"{path}: this tokenizer changes the text; the tokens do not decode to exactly what was read.")


def write_conversations(tokenizer, arguments, pieces, special, end):
    named = tokenizer.token_to_id(named_tokens(arguments.tokenizer).get("eos_token", ""))
    end = end if named is None else named
    all_lines, repeated = read_lines(arguments.text)
    parts = divide_whole(all_lines, arguments.hold_out)
    packed, total = {}, {"repeated": repeated}
    for name, lines in zip(("train", "val"), parts):
        found, counts = tokenize_lines(tokenizer, lines, arguments, special, end)
        if not found:
            sys.exit(f"None of the {len(lines)} conversations for {name}.bin has an answer within --seq tokens.")
        tokens, mask = packed[name] = pack(found, arguments.seq, end or 0)
        require_model_has(tokens, arguments, pieces)
        total.update({what: total.get(what, 0) + n for what, n in counts.items()})
        used, windows = sum(len(c[0]) for c in found), len(tokens) // arguments.seq
        print(
            f"{name}.bin: {len(found):,} conversations in {windows:,} windows of {arguments.seq:,} tokens; "
            f"{used / len(tokens):.0%} of the tokens are text, {sum(mask) / len(tokens):.0%} count in the loss"
        )
    for what, about in {
        "repeated": "left out: the same line came before",
        "cut": f"longer than --seq {arguments.seq} and cut after so many tokens",
        "late": f"left out: the first answer comes after --seq {arguments.seq} tokens",
        "empty": "left out: they have no answer, or an empty one",
    }.items():
        if total[what]:
            print(f"{total[what]:,} conversations are {about}.")
    make_folder(arguments.out)
    for name, (tokens, mask) in packed.items():
        write_tokens(os.path.join(arguments.out, name + ".bin"), tokens, len(pieces), mask)


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as problem:
        sys.exit(f"--out {path} cannot be created ({problem.strerror}); give another folder.")


def main():
    arguments = parse_arguments()
    try:
        import tokenizers
    except ImportError:
        sys.exit("The Python package tokenizers is missing: install it with 'pip install tokenizers'.")
    try:
        run(tokenizers, arguments)
    except Wrong as problem:
        sys.exit(str(problem))


def run(tokenizers, arguments):
    is_text = arguments.prompt is None and not arguments.text[0].endswith(".jsonl")
    parts = divide(read_texts(arguments.text), arguments.hold_out) if is_text else None
    if arguments.train_bpe is None:
        tokenizer = load_tokenizer(tokenizers, arguments.tokenizer)
    else:
        tokenizer = train_bpe(tokenizers, parts[0], arguments.train_bpe)  # without the validation text
    pieces = pieces_of(tokenizer)
    special = {t for t, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    table, end = table_of(pieces, special), end_of_text(tokenizer)
    if arguments.prompt is not None:
        return print(json.dumps({**table, "prompt": tokenizer.encode(arguments.prompt).ids}))
    if is_text:
        write_texts(tokenizer, arguments, parts, pieces, end)
    else:
        write_conversations(tokenizer, arguments, pieces, special, end)
    text = json.dumps(table, ensure_ascii=False, indent=0)
    write(os.path.join(arguments.out, "vocabulary.json"), [text.encode()])
    if arguments.train_bpe is not None:
        write(os.path.join(arguments.out, "tokenizer.json"), [tokenizer.to_str(pretty=True).encode()])
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {arguments.out}")


if __name__ == "__main__":
    main()
