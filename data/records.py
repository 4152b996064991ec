"""Reads what people bring to data/tokenize.py: text files, and records of texts or of conversations.

A file is text if it is UTF-8 and has no NUL byte. A byte order mark at its beginning is not part of the text.

A record is an object of a file *.jsonl or *.json (one a line, or an array), or a row of a file *.parquet. Its
keys, the columns, say what it is:

    {"text": "..."}                                                  a text
    {"messages": [{"role": "user", "content": "..."}, ...]}          a conversation, as in OpenAI's API
    {"conversations": [{"from": "human", "value": "..."}, ...]}      the same, as in ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}          the same, as in Alpaca
    {"prompt": [messages], "completion": [messages]}                 the same, as in TRL
    {"prompt": "...", "completion": "..."}                           a text whose end counts, as in TRL

Beside a conversation "system" (or "system_prompt") is a system message, "history" has earlier turns as pairs
[question, answer], and "tools" has the JSON schemas of the functions that the assistant can call. A message
with "weight": 0 does not count in the loss, nor does what the assistant says in a "prompt". Messages, tool
calls and tools may also be text of JSON. Columns that are not used are named.

A key whose value is null is left out, at any depth: a row of parquet has the keys of all rows, and those that
it does not have itself are null. Elements of lists stay.
"""
import codecs
import json
import os
import sys
import typing

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function": "tool",
         "observation": "tool", "function_call": "assistant"}
RECORDS = (".jsonl", ".json", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
NAMED = 10  # so many files that are left out are named; the others are counted


def fail(sentence):
    sys.exit(f"tokenize.py: {sentence}")


class Record(typing.NamedTuple):
    """A text; or a conversation: messages in OpenAI's form; or a prompt with its completion, both texts."""
    where: str  # the file and the line or row, for errors
    text: str | None = None
    messages: list | None = None
    tools: list | None = None  # beside messages
    prompt: str | None = None
    completion: str | None = None

    def is_text(self):
        return self.text is not None

    def content(self):
        """What makes two records copies of each other."""
        return repr(self[1:])


class Report:
    """What is not used of the data. It is printed, so that nothing disappears without a word."""

    def __init__(self):
        self.files = []  # (path, reason)
        self.columns = {}  # name: where it was found first
        self.copies = 0  # texts or conversations that occurred before
        self.without_answer = 0  # conversations without an answer among the tokens of a window
        self.longer = 0  # conversations that are cut at the end of a window

    def print(self):
        for path, reason in self.files[:NAMED]:
            print(f"left out: {path} {reason}")
        if len(self.files) > NAMED:
            print(f"left out: {len(self.files) - NAMED:,} more files")
        if self.columns:
            name, where = next(iter(self.columns.items()))
            print(f"columns that are not used: {', '.join(self.columns)} ({name} stands in {where})")
        if self.copies:
            print(f"left out: {self.copies:,} copies of texts or conversations that stand there before")


def holds_model(folder):
    """Whether a folder has the weights of a model, or their index. data/data_files.cpp has the same rule."""
    return any(name.startswith("model") and ".safetensors" in name for name in os.listdir(folder))


def files_below(path, report):
    """The files in a folder, in the order of ./train; or the file itself. Hidden files, models and
    checkpoints are no data. Links to files are followed, links to folders are not: they could lead in a
    circle."""
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            fail(f"{path} does not exist, or is no file; give text files or conversations.")
        if path.endswith(COMPRESSED):
            fail(f"{path} is compressed; unpack it, and give what is in it.")
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        inner = [os.path.join(folder, name) for name in folders if not name.startswith(".")]
        linked = [path for path in inner if os.path.islink(path)]
        models = [path for path in inner if path not in linked and holds_model(path)]
        report.files += [(path, "is a link to a folder; give that folder, too") for path in linked]
        report.files += [(path, "is a model or a checkpoint") for path in models]
        folders[:] = [os.path.basename(path) for path in inner if path not in linked + models]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    kept = []
    for file in sorted(found, key=os.fsencode):
        if not os.path.isfile(file):
            report.files.append((file, "is no file, or a link that leads nowhere"))
        elif file.endswith(COMPRESSED):
            report.files.append((file, "is compressed; unpack it"))
        else:
            kept.append(file)
    return kept


def has_records(file):
    return file.endswith(RECORDS)


def text_of_file(file, report):
    """The text; "", with the reason in `report`, if the file is no text."""
    with open(file, "rb") as f:
        content = f.read()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        reason = "is UTF-16; convert it to UTF-8, say with 'iconv -f UTF-16 -t UTF-8'"
    elif b"\0" in content:
        reason = "has a NUL byte, and is no text; if it is UTF-16, convert it to UTF-8"
    else:
        try:
            return content.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as problem:
            reason = f"is not UTF-8 from byte {problem.start} on; convert it to UTF-8 if it is text"
    report.files.append((file, reason))
    return ""


def parse(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        fail(f"{where} is not JSON ({problem}); correct it, or give plain text the ending .txt.")


def parsed(value):
    """What text of JSON says; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def rows_of_parquet(file):
    """(where it stands, value) of all rows."""
    try:
        import pyarrow.parquet
    except ImportError:
        fail(f"{file} needs the package pyarrow of Python: install it with 'pip install pyarrow'.")
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except pyarrow.ArrowException as problem:
        fail(f"{file} cannot be read as parquet ({problem}); download it again.")


def rows_of_json(file):
    """(where it stands, value) of all elements of an array, or of all lines."""
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
        fail(f"{file} is not UTF-8 ({problem}); convert it, say with 'iconv -t UTF-8'.")


def without_nulls(value):
    """The value without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def has_text(value):
    """Whether a column has text that a model could read."""
    if isinstance(value, dict):
        return any(map(has_text, value.values()))
    if isinstance(value, list):
        return any(map(has_text, value))
    return isinstance(value, str) and value.strip() != ""


def checked(text, where):
    """The text. It is an error if it is something else, or has half of a surrogate pair."""
    try:
        text.encode()
        return text
    except (AttributeError, UnicodeEncodeError):
        fail(f"{where} has something else where text belongs ({str(text)[:20]!a}); correct the record.")


def openai_message(message):
    """A message of ShareGPT in OpenAI's form; any other as it is."""
    if not isinstance(message, dict) or not isinstance(message.get("from"), str) or "value" not in message:
        return message
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"], **others}


def is_messages(value):
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def messages_of(row):
    """(messages, the columns that have them) of a record; (None, []) if it has no conversation."""
    for column in ("messages", "conversations"):
        messages = parsed(row.get(column))
        if isinstance(messages, list):
            return [openai_message(message) for message in messages], [column]
    prompt, completion = parsed(row.get("prompt")), parsed(row.get("completion"))
    if is_messages(prompt) and is_messages(completion):
        before = [{**openai_message(message), "weight": 0} for message in prompt]
        return before + [openai_message(message) for message in completion], ["prompt", "completion"]
    if "instruction" in row and "output" in row:
        parts = [part for part in (row["instruction"], row.get("input")) if part]
        question = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else parts
        return [{"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]}], ["instruction", "input", "output"]
    return None, []


def history_of(row, where):
    """The turns of the column "history" as messages."""
    messages, turns = [], parsed(row.get("history") or [])
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, list) and len(turn) == 2:
            messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn)]
        elif isinstance(turn, dict):
            messages.append(openai_message(turn))
        else:
            fail(f'{where} has a "history" that is no list of pairs [question, answer]; correct the record.')
    return messages


def with_other_columns(messages, row, where):
    """(messages, columns that were used): the messages with the system prompt and the history that stand in
    columns of their own. A system message among the messages counts more than the column."""
    history = history_of(row, where)
    if messages[0]["role"] == "system":
        return [messages[0], *history, *messages[1:]], ["history", "tools"]
    system = row.get("system") or row.get("system_prompt")
    first = [{"role": "system", "content": system}] if system else []
    used = "system" if row.get("system") else "system_prompt"
    return first + history + messages, ["history", "tools", used]


def checked_message(message, where):
    """The message. Its content must be text or have parts that are text; what a function returns may be any
    value of JSON. Tool calls may be text of JSON."""
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        for part in content:
            checked(part["text"], where)
    elif message["role"] != "tool":
        checked(content, where)
    if message.get("weight", 1) not in (0, 1):
        fail(f"{where} has the weight {message['weight']!r}; it must be 0 or 1.")
    if "tool_calls" not in message:
        return message
    calls = parsed(message["tool_calls"])
    if not isinstance(calls, list):
        fail(f'{where} has "tool_calls" that are no list; correct the record.')
    return {**message, "tool_calls": calls}


def tools_of(row, where):
    """The JSON schemas of a record; None if there are none. They may be text of JSON, each or all of them."""
    tools = parsed(row.get("tools") or None)
    if isinstance(tools, dict):
        tools = [tools]
    if tools is None:
        return None
    if not isinstance(tools, list):
        fail(f'{where} has "tools" that are no list of JSON schemas; correct the record.')
    return [parsed(tool) for tool in tools]


def record_of(row, where):
    """(record, the columns that were used)."""
    found = f"found: {', '.join(row)}" if isinstance(row, dict) else "it is no object"
    row = row if isinstance(row, dict) else {}
    messages, columns = messages_of(row)
    if messages is None and "prompt" in row and "completion" in row:
        prompt, completion = checked(row["prompt"] or "", where), checked(row["completion"] or "", where)
        return Record(where, prompt=prompt, completion=completion), ["prompt", "completion"]
    if messages is None and "text" in row:
        return Record(where, text=checked(row["text"] or "", where)), ["text"]
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        fail(f'{where} is no record that is known ({found}); it needs "text", or "messages" with "role" and '
             '"content", or "conversations" with "from" and "value", or "instruction" and "output", or '
             '"prompt" and "completion". Correct it, or leave the file out.')
    messages, others = with_other_columns(messages, row, where)
    messages = [checked_message(message, where) for message in without_nulls(messages)]
    return Record(where, messages=messages, tools=without_nulls(tools_of(row, where))), columns + others


def read(file, report):
    """The records of a file."""
    for where, row in rows_of_parquet(file) if file.endswith(".parquet") else rows_of_json(file):
        record, used = record_of(row, where)
        for column, value in row.items():
            if column not in used and has_text(value):
                report.columns.setdefault(column, where)
        yield record


def has_conversations(file):
    """Whether the first record of a file is a conversation, or a prompt with its completion, and not a text.
    The other records must be of the same kind."""
    return has_records(file) and next((not record.is_text() for record in read(file, Report())), False)


def read_conversations(files, report):
    """The records of conversations, and of prompts with completions, each once."""
    seen = set()
    for file in files:
        for record in read(file, report):
            if record.is_text():
                fail(f"{record.where} is a text among conversations; tokenize the two apart.")
            if record.content() in seen:
                report.copies += 1
            else:
                seen.add(record.content())
                yield record


def read_texts(files, report):
    """Each text once: a copy of a text that is trained on would make validation easier than it is."""
    texts = {}  # a dict keeps the order
    for file in files:
        if not has_records(file):
            found = [text_of_file(file, report)]
        else:
            found = []
            for record in read(file, report):
                if not record.is_text():
                    fail(f"{record.where} is a conversation among texts; tokenize the two apart.")
                found.append(record.text)
        for text in filter(None, found):
            report.copies += text in texts
            texts[text] = None
    return list(texts)
