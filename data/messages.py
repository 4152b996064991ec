"""Messages of a conversation in other forms, and with other words.

A message is an object: {"role": "assistant", "content": "...", "tool_calls": [{"function": {"name": "...",
"arguments": {...}}}]}. The functions here return a changed copy, and leave the message as it is.
"""
import copy
import json

from records import parsed


def functions_called(message):
    """What a message calls: objects with "name" and "arguments"."""
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function


def with_calls_changed(message, change):
    """The message after `change` was applied to each function that it calls."""
    message = copy.deepcopy(message)
    for function in functions_called(message):
        change(function)
    return message


def has_parts(message):
    """Whether the content comes in parts, {"type": "text", "text": "..."} each."""
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)


def is_empty(message):
    """Whether the assistant says, thinks and calls nothing."""
    keys = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
    message = with_joined_parts(message)
    return not any(str(message.get(key) or "").strip() for key in keys)


# The forms of a message. --------------------------------------------------------------------------


def as_it_is(message):
    return message


def with_joined_parts(message):
    """The content is one text."""
    if not has_parts(message):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def with_null_content(message):
    """The content is null, not missing, if the message calls functions and says nothing."""
    return {"content": None, **message} if message.get("tool_calls") else message


def with_objects(message):
    """Arguments of calls are objects, not text of JSON. Text that is no object stays."""
    def change(function):
        arguments = parsed(function.get("arguments"))
        if isinstance(arguments, dict):
            function["arguments"] = arguments

    return with_calls_changed(message, change)


def with_text_arguments(message):
    """Arguments of calls are text of JSON, not objects."""
    def change(function):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)

    return with_calls_changed(message, change)


def forms_of(messages):
    """The same messages in all forms, each once; first as they are."""
    before = []
    for content in (as_it_is, with_joined_parts):
        for missing in (as_it_is, with_null_content):
            for arguments in (as_it_is, with_objects, with_text_arguments):
                form = [arguments(missing(content(message))) for message in messages]
                if form not in before:
                    before.append(form)
                    yield form


def stands_as_data(value, text):
    """Whether a text has a value as data: text of JSON in quotation marks, or a list as Python prints it."""
    forms = [json.dumps(value, default=str), json.dumps(value, default=str, ensure_ascii=False)]
    if isinstance(value, list):
        forms.append(str(value))
    return any(form in text for form in forms)


def are_shown(messages, text):
    """Whether a text has the arguments that are text of JSON, and the parts of contents, as they are."""
    for message in messages:
        arguments = [function.get("arguments") for function in functions_called(message)]
        words = [value for value in arguments if isinstance(value, str)]
        values = list(words)
        if has_parts(message):
            words += [part["text"].strip() for part in message["content"]]
            values.append(message["content"])
        if any(word not in text for word in words) or any(stands_as_data(value, text) for value in values):
            return False
    return True


# Messages with other words. ------------------------------------------------------------------------------


def replaced(value, old, new):
    """A value of JSON in whose texts `old` has become `new`."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [replaced(inner, old, new) for inner in value]
    if isinstance(value, dict):
        return {replaced(key, old, new): replaced(inner, old, new) for key, inner in value.items()}
    return value


def between_digits(text):
    """The text between two equal digits: "1text1". The digit is neither the first nor the last character of
    the text. So the first difference to the text is at its first character, and the last at its last one."""
    if not text.strip():
        return text
    ends = text.strip()[0] + text.strip()[-1]
    digit = next(digit for digit in "123" if digit not in ends)
    return digit + text + digit


def other_value(value):
    """Another value of the same type; of other types than text and numbers the same."""
    if isinstance(value, str):
        return value + "1"
    return value + 1 if type(value) in (int, float) else value


def with_other_words(message):
    """All texts and arguments are others. An object of arguments has one more."""
    def change(function):
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            others = {key: other_value(value) for key, value in arguments.items()}
            function["arguments"] = {**others, "1": "1"}
        elif arguments is not None:
            function["arguments"] = other_value(arguments)

    words = {key: between_digits(value) for key, value in message.items()
             if isinstance(value, str) and key not in ("role", "name")}
    if has_parts(message):
        words["content"] = [{**part, "text": between_digits(part["text"])} for part in message["content"]]
    return with_calls_changed({**message, **words}, change)


def with_other_names(message):
    """The functions that are called have other names: for templates that show no more of a call."""
    def change(function):
        function["name"] = f"{function.get('name')}1"

    return with_calls_changed(message, change)
