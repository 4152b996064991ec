"""Reads what people bring to data/tokenize.py: text files, and records of texts or of conversations.

A record is an object of a file *.jsonl or *.json (one a line, or an array), or a row of a file *.parquet. Its
keys say what it is:

    {"text": "..."}                                                      a text
    {"messages": [{"role": "user", "content": "..."}, ...]}              a conversation, as in OpenAI's API
    {"conversations": [{"from": "human", "value": "..."}, ...]}          the same, as in ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}              the same, as in Alpaca

A message with "weight": 0 does not count in the loss. "tools" stand beside "messages".
"""
import json
import os
import sys

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function": "tool",
         "observation": "tool", "function_call": "assistant"}


def fail(sentence):
    sys.exit(f"tokenize.py: {sentence}")


def files_below(path):
    """The files in a folder that are not hidden, nor in a checkpoint, in the order of ./train; or the file."""
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and
                      not os.path.exists(os.path.join(folder, name, "model.safetensors"))]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return sorted(filter(os.path.exists, found), key=os.fsencode) if os.path.isdir(path) else [path]


def has_records(file):
    return os.path.splitext(file)[1] in (".jsonl", ".json", ".parquet")


def parse(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        fail(f"{where} is not JSON ({problem}); correct it, or give plain text the ending .txt.")


def objects(file):
    """(where it stands, value) of all records of a file."""
    if file.endswith(".parquet"):
        try:
            import pyarrow.parquet
        except ImportError:
            fail(f"{file} needs the package pyarrow of Python: install it with 'pip install pyarrow'.")
        try:
            number = 0
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
                for row in batch.to_pylist():
                    yield f"{file}, row {(number := number + 1)}", row
        except pyarrow.ArrowException as problem:
            fail(f"{file} cannot be read as parquet ({problem}); download it again.")
        return
    try:
        with open(file, encoding="utf-8-sig") as f:  # without a byte order mark
            start = f.read(1024).lstrip()
            f.seek(0)
            if file.endswith(".json") and start.startswith("["):
                for i, value in enumerate(parse(f.read(), file), 1):
                    yield f"{file}, record {i}", value
            else:
                for i, line in enumerate(f, 1):
                    if line.strip("\ufeff \t\r\n"):
                        yield f"{file}:{i}", parse(line, f"{file}:{i}")
    except UnicodeDecodeError as problem:
        fail(f"{file} is not UTF-8 ({problem}); convert it.")


def messages_of(row):
    """The messages of a record in OpenAI's form, or None if it has no conversation."""
    if isinstance(row.get("messages"), list):
        return row["messages"]
    if isinstance(row.get("conversations"), list):
        return [{**m, "role": ROLES.get(m["from"], m["from"]), "content": m["value"]}
                if isinstance(m, dict) and isinstance(m.get("from"), str) and "value" in m else m
                for m in row["conversations"]]
    if "instruction" in row and "output" in row:
        parts = [part for part in (row["instruction"], row.get("input")) if part]
        question = "\n\n".join(parts) if {*map(type, parts)} <= {str} else parts
        return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return None


def checked(text, where):
    try:
        text.encode()  # half of a surrogate pair fails, too
        return text
    except (AttributeError, UnicodeEncodeError):
        fail(f"{where} has something else where text belongs ({str(text)[:20]!a}); correct the record.")


def plain(message, where):
    """In OpenAI's form content may come in parts, and arguments of tool calls are text of JSON, which a template
    would quote once more."""
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = message["content"] = "".join(checked(part["text"], where) for part in content)
    checked(content, where)
    if message.get("weight", 1) not in (0, 1):
        fail(f"{where} has the weight {message['weight']!r}; it must be 0 or 1.")
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function.get("arguments"), str):
            function["arguments"] = parse(function["arguments"], f"{where}, the arguments of a tool call,")
    return message


def read(file):
    """(where, text, messages, tools) of each record; text or messages is None. A row of parquet has all
    columns, empty ones too: what is null is left out."""
    for where, row in objects(file):
        found = f"found: {', '.join(row)}" if isinstance(row, dict) else "it is no object"
        if not isinstance(row, dict):
            row = {}
        messages = messages_of(row)
        if messages is None and isinstance(row.get("text"), str):
            yield where, checked(row["text"], where), None, None
            continue
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            fail(f'{where} is no record that is known ({found}); it needs "text", or "messages" with "role" '
                 'and "content", or "conversations" with "from" and "value", or "instruction" and "output".')
        messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
        yield where, None, [plain(m, where) for m in messages], row.get("tools")


def has_conversations(file):
    """What the first record of a file is; the others must be the same."""
    return has_records(file) and next((messages is not None for _, _, messages, _ in read(file)), False)


def read_conversations(files):
    """(where, messages, tools), each conversation once."""
    seen = set()
    for where, _, messages, tools in (record for file in files for record in read(file)):
        if messages is None:
            fail(f"{where} is a text among conversations; tokenize the two apart.")
        if (key := repr((messages, tools))) not in seen:
            seen.add(key)
            yield where, messages, tools


def read_texts(files):
    """Each text once: a copy of a text that is trained on would make validation easier than it is."""
    texts = {}  # a dict keeps the order
    for file in files:
        if has_records(file):
            for where, text, messages, _ in read(file):
                texts[text if messages is None else fail(f"{where} is a conversation among texts; tokenize "
                                                         "the two apart.")] = None
            continue
        try:
            texts[open(file, encoding="utf-8", newline="").read().removeprefix("\ufeff")] = None
        except UnicodeDecodeError:
            print(f"{file} is not UTF-8 text and is skipped.")
    return [text for text in texts if text] or fail("there is no text; give text files or folders of them.")
