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
import collections
import fractions
import functools
import importlib
import json
import multiprocessing
import os
import re
import time

FILES = "train.bin", "val.bin"
MAGICS = {"H": (20240520, 1), "I": (20240801, 1)}  # (magic, version) by the type code of array
MAX_TOKENS = 2**31 - 1  # the number of tokens in the header is an int32
MAX_VOCABULARY = 2**22  # as in model.h
CHUNK = 1 << 20  # characters that are tokenized at once, to bound the memory of the tokenizer
LINES = 256  # conversations that are sent to a process at once
OPEN_WINDOWS = 64  # that the next conversation may still go into
UNREADABLE = (ValueError, RecursionError)  # JSON that is wrong, nested too deep, or has too long a number


class Wrong(Exception):
    """What is wrong, in a sentence for the user, which main() prints. Processes of a pool raise it, too."""


def package(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Wrong(f"The Python package {name} is missing: install it with 'pip install {name}'.") from None


# ------------------------------------------------------------------------------------------------------------
# Reading text


def files_below(path):
    if not os.path.isdir(path):
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    # Without pipes, and links that lead nowhere; in the order of ./train.
    return sorted(filter(os.path.isfile, found), key=os.fsencode)


def read_text(path, newline=None):
    try:
        with open(path, encoding="utf-8", newline=newline) as f:
            text = f.read()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise Wrong(f"{path} is not UTF-8 text; convert it first.")
    return text


def read_texts(paths):
    """The texts of all files, each text once. In a folder, files that are not text are skipped."""
    texts = {}  # a dict keeps the order
    for path in paths:
        for file in files_below(path):
            try:
                text = read_text(file, newline="")
                if not text:
                    raise Wrong(f"{file} is empty; give text.")
                texts[text] = None
            except Wrong:
                if file == path:
                    raise
    if not texts:
        raise Wrong("There is no text in " + ", ".join(paths) + "; give text files or folders of them.")
    return list(texts)


def divide(texts, part):
    """(training, validation). Of many texts every n-th is held out; of few the end of each, after a line."""
    if len(texts) >= max(2, round(1 / part)):
        return divide_whole(texts, part)
    ends = [int(len(text) * (1 - part)) for text in texts]
    cuts = [text.rfind("\n", 0, end) + 1 or end for text, end in zip(texts, ends)]
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
        folder, name = name, os.path.join(name, "tokenizer.json")
        if not os.path.exists(name):
            raise Wrong(f"--tokenizer {folder} has no tokenizer.json; if transformers opens the folder, "
                        "AutoTokenizer's save_pretrained writes one.")
    try:
        Tokenizer = tokenizers.Tokenizer
        return Tokenizer.from_file(name) if os.path.exists(name) else Tokenizer.from_pretrained(name)
    except Exception as problem:  # the library raises bare Exceptions
        what = f"--tokenizer {name} cannot be loaded ({problem})"
        raise Wrong(f"{what}; give a tokenizer.json, or a name on the hub.") from None


def train_bpe(tokenizers, texts, size):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    if not least <= size <= MAX_VOCABULARY:
        raise Wrong(f"--train-bpe {size} is not supported; give {least} to {MAX_VOCABULARY}.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=["<|endoftext|>"],
        show_progress=False)
    tokenizer.train_from_iterator((chunk for text in texts for chunk in chunks(text)), trainer)
    return tokenizer


# A byte-level BPE (GPT-2, Llama 3) spells each byte as a character. SentencePiece (Llama 2) spells text, but
# with U+2581 for a space, and a byte that is no character as <0xE9>.
def byte_of_character():
    """GPT-2's alphabet: a printable byte of Latin-1 is its own character, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(token, alphabet=byte_of_character()):
    if not set(token) <= alphabet.keys():
        about = "has characters outside GPT-2's alphabet of bytes"
        raise Wrong(f"Token {token!a:.200} {about}; use another tokenizer.")
    return bytes(alphabet[c] for c in token)


def sentencepiece_piece(token):
    single = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes([int(single[1], 16)]) if single else token.replace("\u2581", " ").encode()


def piece_reader(tokenizer):
    """The function that turns a token's text into its bytes: the decoder shows the kind of the tokenizer. The
    decoder itself gives text only, and a token may end within a character."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece_piece
    what = f"decoder ({', '.join(sorted(kinds)) or 'none'})"
    raise Wrong(f"This tokenizer's {what} is not supported; use a tokenizer like GPT-2's or Llama 2's.")


def pieces_of(tokenizer):
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 < size <= MAX_VOCABULARY:
        what = f"token {size - 1}, but ./train supports {MAX_VOCABULARY} tokens" if size else "no tokens"
        raise Wrong(f"This tokenizer has {what}; use another tokenizer.")
    read = piece_reader(tokenizer)
    added = tokenizer.get_added_tokens_decoder()

    def piece(t):
        token = tokenizer.id_to_token(t)
        if t in added:
            return added[t].content.encode()  # plain text
        return read(token) if token is not None else b""

    return [piece(t) for t in range(size)]


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


def in_parallel(work, items, processes, at_once=1):
    """work(item) of every item, in their order, by several processes. Long work shows its progress."""
    global work_of_processes
    work_of_processes = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    end, pause = ("\r", 0.5) if sys.stderr.isatty() else ("\n", 30)
    shown = time.monotonic()
    with multiprocessing.get_context("fork").Pool(max(1, min(processes, len(items)))) as pool:
        for done, result in enumerate(pool.imap(call_work, items, at_once), 1):
            yield result
            if time.monotonic() > shown + pause:
                shown = time.monotonic()
                print(f"{100 * done // len(items):3}% tokenized", end=end, file=sys.stderr, flush=True)


def end_of_text(tokenizer):
    ids = map(tokenizer.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"))
    return next((t for t in ids if t is not None), None)


# ------------------------------------------------------------------------------------------------------------
# Conversations


def read_lines(paths):
    """(file:line, text) of every conversation, each text once; and how many lines repeat another."""
    lines, read = {}, 0
    for path in paths:
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                lines.setdefault(line.strip(), f"{path}:{number}")
                read += 1
    if len(lines) < 2:
        raise Wrong("Give at least two conversations: one is held out for validation.")
    return [(where, line) for line, where in lines.items()], read - len(lines)


def read_config(folder, name):
    """The object in a JSON file of the model's folder; an empty one if there is no such file."""
    path = os.path.join(folder, name)
    try:
        config = json.loads(read_text(path) or "{}") if os.path.exists(path) else {}
    except UNREADABLE as problem:
        raise Wrong(f"{path} is not JSON ({problem}); download the folder again.") from None
    return config if isinstance(config, dict) else {}


def named_tokens(folder):
    """bos_token, eos_token and so on -> their text."""
    config = read_config(folder, "tokenizer_config.json").items()
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in config}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


@functools.lru_cache
def chat_template(folder):
    """The function from messages to text of the model's folder, and its file. There is no strftime_now: then
    templates with a date use a fixed one, so that the same conversations always become the same tokens."""
    path = os.path.join(folder, "chat_template.jinja")
    template = read_text(path) if os.path.exists(path) else ""
    if not template:
        path = os.path.join(folder, "tokenizer_config.json")
        template = read_config(folder, "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise Wrong(f"{path} has no chat_template; give a chat model's folder, or prompt and completion.")
    jinja2, sandbox = package("jinja2"), package("jinja2.sandbox")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    kind = sandbox.ImmutableSandboxedEnvironment  # a template may come from anywhere
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
            raise Wrong(f"the chat template of {path} fails ({problem}); correct one of the two.") from None

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
    said = [str(messages[i].get("content") or "").strip() or messages[i].get("tool_calls") for i in answers]
    if not all(said):
        return "", []
    render, path = chat_template(folder)
    tools = row.get("tools")
    text, spans = render(messages, tools, False), []
    for i in answers:
        before, after = render(messages[:i], tools, True), render(messages[: i + 1], tools, False)
        if not text.startswith(after) or not after.startswith(before):
            raise Wrong(
                f"the chat template of {path} does not write the beginning of a conversation as it writes "
                "the whole, so an answer cannot be found; leave out the system message (Mistral's template "
                "moves it), or give prompt and completion, or another template."
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
    text.encode()  # ValueError if JSON spelled half of a surrogate pair
    chat = row.get("messages") is not None
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
    """[(tokens, mask), ...] of the conversations that can be used; how many are cut, too long, unanswered."""

    def of_line(numbered):
        where, line = numbered
        try:
            return tokens_of_row(tokenizer, json.loads(line), arguments.tokenizer, special, end)
        except UNREADABLE as problem:
            raise Wrong(f"{where} is not JSON ({problem}); give a conversation on each line.") from None
        except Wrong as problem:
            raise Wrong(f"{where}: {problem}") from None

    found, counts, T = [], collections.Counter(), arguments.seq
    for row in in_parallel(of_line, lines, arguments.processes, LINES):
        tokens, mask = row or ([], b"")
        if any(mask[:T]):
            counts["cut"] += len(tokens) > T
            found.append((tokens[:T], mask[:T]))
        else:
            counts["late" if any(mask) else "empty"] += 1
    return found, counts


def pack(conversations, T, padding):
    """(tokens, mask) of windows of T tokens. A conversation goes into the first open window that has room."""
    windows = []  # first fit: the rests of windows that are nearly full serve short conversations
    for tokens, mask in conversations:
        window = next((w for w in windows[-OPEN_WINDOWS:] if len(w[0]) + len(tokens) <= T), None)
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


def write(path, *content):
    try:
        with open(path + ".tmp", "wb") as f:
            f.writelines(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError as problem:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        raise Wrong(f"{path} cannot be written ({problem.strerror}); free some space, or give another --out.")


def write_tokens(path, tokens, size, mask):
    width = "H" if size <= 1 << 16 else "I"
    beside = path[: -len(".bin")] + ".mask"
    # In this order, so that no interruption leaves tokens without their mask, or with that of others.
    for earlier in filter(os.path.exists, (path, beside)):
        os.remove(earlier)
    if mask is not None:
        write(beside, mask)
    # Little-endian, as the machines that ./train runs on.
    header = array.array("i", [*MAGICS[width], len(tokens)] + [0] * 253)
    write(path, header.tobytes(), array.array(width, tokens).tobytes())


def parse_arguments():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("text", nargs="*", help="text files (UTF-8), folders of them, or conversations (*.jsonl)")
    kind = parser.add_mutually_exclusive_group(required=True).add_argument
    kind("--tokenizer", metavar="NAME",
         help="a model's folder, a file tokenizer.json, or a name on Hugging Face's hub")
    kind("--train-bpe", metavar="SIZE", type=int, help="train a byte-level BPE of so many tokens")
    add("--out", metavar="FOLDER", default="tokens", help="where to write (default: %(default)s)")
    add("--hold-out", metavar="PART", type=float, default=0.1,
        help="part for validation (default: %(default)s)")
    add("--seq", metavar="N", type=int, help="tokens of a window of conversations: ./train's --seq")
    add("--processes", metavar="N", type=int, default=os.cpu_count() or 1, help="default: one for each core")
    add("--prompt", metavar="TEXT", help="print its tokens and the vocabulary as JSON (for ./train)")
    arguments = parser.parse_args()
    if not arguments.text and arguments.prompt is None:
        raise Wrong("There is no text; give text files, folders of them, or conversations (*.jsonl).")
    files = [file for path in arguments.text for file in files_below(path)]
    arguments.conversations = [file for file in files if file.endswith(".jsonl")]
    if arguments.conversations:
        about = f"{arguments.conversations[0]} has conversations"
        if len(arguments.conversations) < len(files):
            raise Wrong(f"{about} and the other files are text; give one kind.")
        if arguments.seq is None or arguments.seq < 2:
            raise Wrong(f"{about}: give --seq N, the tokens of a window, as to ./train.")
        if not os.path.isdir(arguments.tokenizer or ""):
            raise Wrong(f"{about}: give --tokenizer FOLDER, the folder of the model.")
    if arguments.prompt is not None and arguments.tokenizer is None:
        raise Wrong("--prompt needs --tokenizer; give both.")
    if not 0.001 <= arguments.hold_out <= 0.999:
        raise Wrong(f"--hold-out {arguments.hold_out} is not between 0.001 and 0.999; give a part like 0.1.")
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
        what = f"{outside} tokens of the text are not the model's"
        raise Wrong(f"{about}, and {what}; give the model's own tokenizer.")
    print(f"{about}; the text uses none of the others.")


def tokenize_texts(tokenizer, arguments, parts, pieces, end):
    """(tokens, no mask) of train.bin and val.bin."""
    for name, texts in zip(FILES, parts):
        tokens = encode(tokenizer, texts, end, arguments.processes)
        if not tokens:
            raise Wrong(f"No text is left for {name}; give more text, or another --hold-out.")
        require_model_has(tokens, arguments, pieces)
        text, decoded = "".join(texts), b"".join(pieces[t] for t in tokens if t != end)
        each = len(text) / max(1, len(tokens))
        print(f"{name}: {len(tokens):,} tokens for {len(text):,} characters, {each:.2f} characters a token")
        # SentencePiece adds a space at the start.
        if decoded.lstrip(b" ") != text.encode().lstrip(b" "):
            print(f"{name}: this tokenizer changes the text; its tokens do not decode to what was read.")
        yield tokens, None


def tokenize_conversations(tokenizer, arguments, pieces, special, end):
    """(tokens, mask) of train.bin and val.bin."""
    named = tokenizer.token_to_id(named_tokens(arguments.tokenizer).get("eos_token", ""))
    end = end if named is None else named
    all_lines, repeated = read_lines(arguments.conversations)
    total = collections.Counter(repeated=repeated)
    for name, lines in zip(FILES, divide_whole(all_lines, arguments.hold_out)):
        found, counts = tokenize_lines(tokenizer, lines, arguments, special, end)
        if not found:
            about = f"None of the {len(lines)} conversations for {name}"
            raise Wrong(f"{about} has an answer within --seq tokens; give others, or a larger --seq.")
        tokens, mask = pack(found, arguments.seq, end or 0)
        require_model_has(tokens, arguments, pieces)
        total += counts
        windows = len(tokens) // arguments.seq
        text, counted = sum(len(c[0]) for c in found) / len(tokens), sum(mask) / len(tokens)
        print(f"{name}: {len(found):,} conversations in {windows:,} windows of {arguments.seq:,} tokens; "
              f"{text:.0%} of the tokens are text, {counted:.0%} count in the loss")
        yield tokens, mask
    for what, about in {
        "repeated": "left out: the same line came before",
        "cut": f"longer than --seq {arguments.seq} and cut after so many tokens",
        "late": f"left out: the first answer comes after --seq {arguments.seq} tokens",
        "empty": "left out: they have no answer, or an empty one",
    }.items():
        if total[what]:
            print(f"{total[what]:,} conversations are {about}.")


def run(arguments):
    tokenizers = package("tokenizers")
    is_text = arguments.prompt is None and not arguments.conversations
    parts = divide(read_texts(arguments.text), arguments.hold_out) if is_text else None
    if arguments.train_bpe is None:
        tokenizer = load_tokenizer(tokenizers, arguments.tokenizer)
    else:
        tokenizer = train_bpe(tokenizers, parts[0], arguments.train_bpe)  # without the validation text
    pieces = pieces_of(tokenizer)
    special = {t for t, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    table = {"format": "coat vocabulary", "version": 1, "size": len(pieces), "special": sorted(special),
             "pieces": [piece.decode("latin-1") for piece in pieces]}
    end = end_of_text(tokenizer)
    if arguments.prompt is not None:
        return print(json.dumps({**table, "prompt": tokenizer.encode(arguments.prompt).ids}))
    # All of it before the first file is replaced: an error leaves the files of earlier data as they are.
    tokenized = list(tokenize_texts(tokenizer, arguments, parts, pieces, end) if is_text else
                     tokenize_conversations(tokenizer, arguments, pieces, special, end))
    for name, (tokens, _) in zip(FILES, tokenized):
        if len(tokens) > MAX_TOKENS:
            raise Wrong(f"{name} would have more than {MAX_TOKENS} tokens; tokenize the text in parts.")
    os.makedirs(arguments.out, exist_ok=True)
    for name, (tokens, mask) in zip(FILES, tokenized):
        write_tokens(os.path.join(arguments.out, name), tokens, len(pieces), mask)
    text = json.dumps(table, ensure_ascii=False, indent=0)
    write(os.path.join(arguments.out, "vocabulary.json"), text.encode())
    if arguments.train_bpe is not None:
        write(os.path.join(arguments.out, "tokenizer.json"), tokenizer.to_str(pretty=True).encode())
    print(f"{len(pieces):,} tokens in the vocabulary. Train with ./train --data {arguments.out}")


def main():
    try:
        run(parse_arguments())
    except Wrong as problem:
        sys.exit(str(problem))
    except OSError as problem:
        if problem.filename is None:  # of a process that cannot be started
            sys.exit(f"The system refuses ({problem.strerror}); check the limits of ulimit -a, or the disk.")
        cure = "check the path and its permissions, or give another"
        sys.exit(f"{problem.filename} cannot be used ({problem.strerror}); {cure}.")


if __name__ == "__main__":
    main()
