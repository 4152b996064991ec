"""Turns conversations into tokens, and says which of them the assistant says: those count in the loss.

The text of a conversation is what transformers' apply_chat_template renders. A chat template is a program that
may do anything: it can move the system prompt into the last question, or leave out earlier thoughts. So where
an answer stands cannot be computed from its words. Parts of the conversation, or the conversation with another
answer, are rendered too, and these texts are compared with the whole one (span_of_answer).

The template alone makes control tokens, such as <|im_end|>. Where the words of a message spell one, they stay
words (own_spellings, encode). Control tokens are those that the tokenizer calls special. Other tokens that a
model's maker has added, such as <think>, are part of what the assistant says.
"""
import copy
import datetime
import json
import re

from records import fail, parsed

NOT_COUNTED = 1 << 31  # the bit of a token that is no target, in data/tokens.h
BREAK = "\ue000"  # a character for private use: no token begins or ends with it
DATE, DATE_AS_TEXT = (2024, 7, 26), "26 Jul 2024"  # the one that Llama 3's template has if it is told none


class FixedTime(datetime.datetime):
    """The time that chat templates are told. It does not pass: tokens must not depend on the day."""

    @classmethod
    def now(cls, tz=None):
        return cls(*DATE, tzinfo=tz)

    today = utcnow = now


class FixedDate(datetime.date):
    """The same for dates."""

    @classmethod
    def today(cls):
        return cls(*DATE)


def stop_the_clock():
    """Must be called before transformers is imported, which keeps the class that it finds."""
    datetime.datetime, datetime.date = FixedTime, FixedDate


def shared_begin(a, b):
    """How many characters two texts share at their beginning."""
    shared, most = 0, min(len(a), len(b))
    while shared < most:
        middle = (shared + most + 1) // 2
        if a[shared:middle] == b[shared:middle]:
            shared = middle
        else:
            most = middle - 1
    return shared


def shared_end(a, b):
    """How many characters two texts share at their end."""
    return shared_begin(a[::-1], b[::-1])


def what_follows(text, other):
    """What follows in two texts behind their last difference, without the space at the end."""
    return text[len(text) - shared_end(text, other):].rstrip()


def end_of_longest_tail(tail, text, first, last):
    """Looks in text[first:last] for `tail`, or for as much of its end as occurs there; returns where it ends."""
    found, most = 0, len(tail)  # characters; if n of them occur, fewer do, too
    while found < most:
        middle = (found + most + 1) // 2
        if text.find(tail[-middle:], first, last) >= 0:
            found = middle
        else:
            most = middle - 1
    return text.rfind(tail[-found:], first, last) + found if found else last


def replaced(value, old, new):
    """A value of JSON in whose texts `old` has become `new`."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [replaced(inner, old, new) for inner in value]
    if isinstance(value, dict):
        return {replaced(key, old, new): replaced(inner, old, new) for key, inner in value.items()}
    return value


def functions_called(message):
    """What a message calls: objects with "name" and "arguments"."""
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function


def with_calls_changed(message, change):
    """A copy of a message in which `change` was applied to each function that it calls."""
    message = copy.deepcopy(message)
    for function in functions_called(message):
        change(function)
    return message


def with_objects(message):
    """A message whose calls have objects for arguments in place of text of JSON. Other text stays."""
    def change(function):
        arguments = parsed(function.get("arguments"))
        if isinstance(arguments, dict):
            function["arguments"] = arguments

    return with_calls_changed(message, change)


def with_text_arguments(message):
    """A message whose calls have text of JSON for arguments in place of objects."""
    def change(function):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)

    return with_calls_changed(message, change)


def with_null_content(message):
    """A message whose content is null, as in OpenAI's API, if it calls functions and says nothing."""
    return {"content": None, **message} if message.get("tool_calls") else message


def has_parts(message):
    """Whether the content comes in parts, {"type": "text", "text": "..."} each."""
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)


def with_joined_parts(message):
    """A message whose content is one text."""
    if has_parts(message):
        return {**message, "content": "".join(part["text"] for part in message["content"])}
    return message


def as_it_is(message):
    return message


def forms_of(messages):
    """The same messages in all ways that records have and templates want, first as they are."""
    before = []
    for content in (as_it_is, with_joined_parts):
        for null in (as_it_is, with_null_content):
            for arguments in (as_it_is, with_objects, with_text_arguments):
                form = [arguments(null(content(message))) for message in messages]
                if form not in before:
                    before.append(form)
                    yield form


def change_arguments(function):
    """Arguments get other values of the same types, and an object gets one more."""
    def other(value):
        if isinstance(value, str):
            return value + "1"
        return value + 1 if type(value) in (int, float) else value

    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        function["arguments"] = {**{key: other(value) for key, value in arguments.items()}, "1": "1"}
    elif arguments is not None:
        function["arguments"] = other(arguments)


def change_name(function):
    function["name"] = f"{function.get('name')}1"


def with_other_words(message):
    """A message of the same kind, with other texts and other arguments of its calls. A text is put between two
    digits that differ from its ends: so a comparison finds the first and the last difference at these ends."""
    def other(text):
        ends = text.strip()[0] + text.strip()[-1]
        digit = next(digit for digit in "123" if digit not in ends)
        return digit + text + digit

    words = {key: other(value) for key, value in message.items()
             if isinstance(value, str) and value.strip() and key not in ("role", "name")}
    if has_parts(message):
        words["content"] = [{**part, "text": other(part["text"])} if part["text"].strip() else part
                            for part in message["content"]]
    return with_calls_changed({**message, **words}, change_arguments)


def with_other_names(message):
    """A message that calls functions of other names: what else differs if calls have no arguments?"""
    return with_calls_changed(message, change_name)


def is_empty(message):
    """Whether the assistant says, thinks and calls nothing."""
    keys = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
    message = with_joined_parts(message)
    return not any(str(message.get(key) or "").strip() for key in keys)


def stands_quoted(value, text):
    """Whether a template wrote a value as data: text of JSON within JSON, or a list as Python prints it."""
    quoted = [json.dumps(value, default=str), json.dumps(value, default=str, ensure_ascii=False)]
    if isinstance(value, list):
        quoted.append(str(value))
    return any(data in text for data in quoted)


def shows_words(text, messages):
    """Whether the text has the arguments that are text of JSON, and the parts of contents, as they are."""
    for message in messages:
        arguments = [function.get("arguments") for function in functions_called(message)]
        words = [words for words in arguments if isinstance(words, str)]
        data = list(words)
        if has_parts(message):
            words += [part["text"].strip() for part in message["content"]]
            data.append(message["content"])
        if any(word not in text for word in words) or any(stands_quoted(value, text) for value in data):
            return False
    return True


def encode(tokenizer, text, plain=(), **options):
    """(token, begin, end) of each token of a text: the place in the text where it stands. The places `plain`,
    (begin, end) each, spell control tokens but are words. A character that is put into such a spelling hides it
    from the tokenizer; then the tokens of this character are taken out."""
    cuts = sorted({begin + 1 for begin, end in plain})
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    try:
        found = tokenizer(BREAK.join(parts), add_special_tokens=False, return_offsets_mapping=True,
                          verbose=False, **options)
    except NotImplementedError:
        fail("this tokenizer does not tell where its tokens stand in a text; give one that has tokenizer.json.")
    breaks = [cut + i for i, cut in enumerate(cuts)]  # where they stand
    return [(token, begin - sum(at < begin for at in breaks), end - sum(at < end for at in breaks))
            for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"])
            if not (begin in breaks and end == begin + 1)]


def with_counts(tokens, spans):
    """Tokens, with the bit NOT_COUNTED but where (token, begin, end) and a span overlap. The first token is
    never a target, since nothing precedes it."""
    words = [token if any(begin < last and end > first for first, last in spans) else token | NOT_COUNTED
             for token, begin, end in tokens]
    return [word | NOT_COUNTED for word in words[:1]] + words[1:]


def one_of(tokens):
    """A regular expression that finds how tokens are spelled."""
    spellings = [str(getattr(token, "content", token)) for token in tokens]
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) is found nowhere


class ChatTemplate:
    """A tokenizer, and what is known of its chat template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        self.control = one_of([token for token in added if getattr(token, "special", True)])
        self.added = one_of(added)  # control tokens and others, such as <think>
        self.remarks = {}  # sentences for the user; how often each was noted

    def note(self, remark):
        self.remarks[remark] = self.remarks.get(remark, 0) + 1

    def render(self, messages, tools, prompt=False):
        """The text of messages. With `prompt` it ends where the assistant begins to answer."""
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                  add_generation_prompt=prompt, date_string=DATE_AS_TEXT)

    def marked(self, messages, tools):
        """(text, places): the places that the template marks as the assistant's, with {% generation %}. None if
        it marks nothing, or if this version of transformers does not tell."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
            template = self.tokenizer.get_chat_template(tools=tools)
            if not re.search(r"\{%-?\s*generation\b", template):
                return None
            texts, places = render_jinja_template(
                [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
                add_generation_prompt=False, date_string=DATE_AS_TEXT, **self.tokenizer.special_tokens_map)
            return texts[0], places[0]
        except (ImportError, AttributeError, TypeError):
            return None


class Conversation:
    """The messages of a record, and the text that the chat template makes of them."""

    def __init__(self, template, record):
        self.template, self.tools, self.where = template, record.tools, record.where
        self.weights = [message.get("weight", 1) for message in record.messages]
        self.messages = [{key: value for key, value in message.items() if key != "weight"}
                         for message in record.messages]
        self.text = self.text_of_record()

    def render(self, messages, prompt=False):
        """The text of messages that are not all of the record's, or None if the template rejects them."""
        try:
            return self.template.render(messages, self.tools, prompt) if messages else None
        except Exception:  # a template can raise anything
            return None

    def text_of_record(self):
        """The text of all messages. The same conversation has several forms: arguments of calls are objects or
        text of JSON, a content is missing or null, one text or parts. A template wants one of them. So if it
        rejects the record's form, or does not show its words as they are, self.messages get another one."""
        rendered = []
        for form in forms_of(self.messages):
            try:
                text = self.template.render(form, self.tools)
            except Exception as problem:  # a template can raise anything
                first_problem = problem if form == self.messages else first_problem
                continue
            if shows_words(text, form):
                self.messages = form
                return text
            rendered.append((text, form))
        if not rendered:
            self.reject(first_problem)
        text, self.messages = rendered[0]
        return text

    def reject(self, problem):
        if getattr(self.template.tokenizer, "chat_template", "") is None:
            fail("the tokenizer has no chat template; give the folder of a chat model.")
        fail(f"{self.where}: the chat template fails ({problem}): it does not take such a conversation. "
             "Change the record, or give another chat model.")

    def own_spellings(self):
        """The places in the text, (begin, end) each, where the record itself spells a control token. To find
        them, the template renders the record with a stand-in in place of the spelling. If this makes another
        difference, then the template looks for the spelling, and what it writes for it is its own."""
        words = json.dumps([self.messages, self.tools], ensure_ascii=False, default=str)
        number, places = 0, []
        for spelling in sorted(set(self.template.control.findall(words))):
            while f"standin{number}x" in words:
                number += 1
            messages, tools = replaced([self.messages, self.tools], spelling, f"standin{number}x")
            try:
                pieces = self.template.render(messages, tools).split(f"standin{number}x")
            except Exception:  # a template can raise anything
                continue
            if spelling.join(pieces) == self.text:
                end = 0
                for piece in pieces[:-1]:
                    begin = end + len(piece)
                    end = begin + len(spelling)
                    places.append((begin, end))
        return places

    def span_of_answer(self, i, first):
        """(begin, end) of message i in the text, with the end of its turn. It stands behind `first`, the end of
        the answer before it. None if it is not found.

        Mostly the text begins with the messages before it, up to where the assistant begins to answer, and also
        with the messages up to it: what the second has more is the answer. Some templates write another thing
        in the middle of a conversation than at its end. Then the conversation is rendered with another answer:
        the answer is where the two texts differ."""
        prompt = self.render(self.messages[:i], True)
        whole = self.render(self.messages[:i + 1])
        if prompt and whole and self.text.startswith(prompt) and self.text.startswith(whole.rstrip()):
            return len(prompt), len(whole.rstrip())
        for change in (with_other_words, with_other_names):
            message = change(self.messages[i])
            other = self.render(self.messages[:i] + [message] + self.messages[i + 1:])
            if other not in (None, self.text):
                begin, end = shared_begin(self.text, other), len(self.text) - shared_end(self.text, other)
                return (self.begin_of_answer(i, first, begin, prompt),
                        self.end_of_turn(i, message, end, prompt, whole))
        return None

    def begin_of_answer(self, i, first, last, prompt):
        """Where message i begins: between `first` and `last`, behind what comes before every answer. Of the
        rendering of the messages before it, as much of the end as possible stands there; and then as much as
        possible of the beginning of an answer, such as <|im_start|>assistant."""
        if prompt and self.text.startswith(prompt):
            return len(prompt)
        before = self.render(self.messages[:i])
        if not prompt or not before or not prompt.startswith(before):
            tail = prompt or self.render(self.messages, True)
            return end_of_longest_tail(tail, self.text, first, last) if tail else last
        begin = end_of_longest_tail(before, self.text, first, last)
        opening = prompt[len(before):]
        shared = shared_begin(self.text[begin:last], opening)
        if shared < len(opening):  # other tokens follow, which may begin with the same characters
            ends = [found.end() for found in re.finditer(rf"{self.template.added.pattern}|\s", opening)]
            shared = max([end for end in ends if end <= shared], default=0)
        return begin + shared

    def end_of_turn(self, i, message, end, prompt, whole):
        """Where the turn of message i ends, of which the last difference to the other `message` is at `end`. A
        rendering in which both stand at the end shows what follows an answer."""
        rest = self.text[end:]
        last = self.render(self.messages[:i] + [message])
        if whole is None or last is None:  # such as a call that must not stand without its result
            token = self.template.control.search(rest)
            return end + token.end() if token else end
        turn_end = what_follows(whole, last)
        if rest.startswith(turn_end):
            return end + len(turn_end)
        # Another thing follows where the conversation ends. Does it, if the assistant is to say more?
        before = self.render(self.messages[:i])
        opening = prompt[len(before):] if prompt and before and prompt.startswith(before) else ""
        whole = self.render(self.messages[:i + 1], True)
        last = self.render(self.messages[:i] + [message], True)
        if opening and whole and last and whole.endswith(opening) and last.endswith(opening):
            turn_end = what_follows(whole.removesuffix(opening), last.removesuffix(opening))
            if rest.startswith(turn_end):
                return end + len(turn_end)
        # Control tokens that follow in both places belong to the turn.
        shared = shared_begin(rest, turn_end)
        ends = [token.end() for token in self.template.control.finditer(turn_end) if token.end() <= shared]
        if not ends:
            self.template.note(f"The chat template ends an answer with {turn_end[:20]!r} only where the "
                               "conversation ends; the other answers count without an end")
        return end + max(ends, default=0)

    def answers(self):
        """(begin, end, weight) of each answer in the text."""
        found, first = [], 0
        for i, (message, weight) in enumerate(zip(self.messages, self.weights)):
            if message["role"] != "assistant":
                continue
            span = self.span_of_answer(i, first)
            if span is None or span[0] >= span[1]:
                self.template.note("The chat template does not show all answers; what it does not show does "
                                   "not count")
            else:
                first = span[1]
                found.append((*span, weight))
        return found

    def spans(self):
        """The places in the text of what counts in the loss."""
        marked = self.template.marked(self.messages, self.tools)
        if marked is None or marked[0] != self.text:
            return [(begin, end) for begin, end, weight in self.answers() if weight]
        without = [] if all(self.weights) else [span for span in self.answers() if not span[2]]
        return [(begin, end) for begin, end in marked[1]
                if not any(begin < last and end > first for first, last, _ in without)]

    def tokens(self, longest):
        """The tokens of the first `longest` characters, with the bit NOT_COUNTED where the assistant does not
        speak."""
        plain = [(begin, end) for begin, end in self.own_spellings() if end <= longest]
        return with_counts(encode(self.template.tokenizer, self.text[:longest], plain), self.spans())


def tokens_of_completion(template, record, longest):
    """The tokens of a prompt and a completion that are plain texts. As in TRL there is no chat template: the
    completion counts, with the token that ends a text."""
    tokenizer = template.tokenizer
    text = record.prompt + record.completion.removesuffix(tokenizer.eos_token or "")
    if template.control.search(text):
        template.note("A prompt or completion that is plain text spells control tokens; they stay text. Give "
                      "lists of messages to use the chat template")
    tokens = encode(tokenizer, text[:longest], split_special_tokens=True)
    first = getattr(tokenizer, "bos_token_id", None)  # some models need it at the beginning of a text
    if first is not None and first in tokenizer("", add_special_tokens=True, verbose=False)["input_ids"]:
        tokens = [(first, 0, 0), *tokens]
    if len(text) <= longest and tokenizer.eos_token_id is not None:
        tokens = [*tokens, (tokenizer.eos_token_id, len(text), len(text) + 1)]
    return with_counts(tokens, [(len(record.prompt), len(text) + 1)])


def tokens_of_record(template, record, longest):
    """The tokens of a conversation or of a prompt with its completion, of at most the first `longest`
    characters; none if an answer is empty."""
    if record.messages is None:
        return tokens_of_completion(template, record, longest) if record.completion.strip() else []
    if any(is_empty(message) for message in record.messages if message["role"] == "assistant"):
        return []
    return Conversation(template, record).tokens(longest)
