"""Turns conversations into tokens, and says which of them the assistant says: those count in the loss.

The text of a conversation is what transformers' apply_chat_template renders. A chat template is a program: it
may move the system prompt into the last question, or leave out earlier thoughts. So where an answer stands
cannot be computed from its words. It is found by comparing the text with other renderings: of a part of the
conversation, or with another answer (Conversation.span_of_answer).

The template alone makes control tokens, such as <|im_end|>. Where the words of a message spell one, they stay
words (Conversation.own_spellings, encode). Control tokens are those that the tokenizer calls special. Other
tokens that a model's maker has added, such as <think>, are part of what the assistant says.
"""
import contextlib
import datetime
import json
import re
import sys
from bisect import bisect_left

from messages import are_shown, forms_of, is_empty, replaced, with_other_names, with_other_words
from records import fail

NOT_COUNTED = 1 << 31  # the bit of a token that is no target; data/tokens.h
BREAK = "\ue000"  # a character for private use; no token begins or ends with it
DATE, DATE_AS_TEXT = (2024, 7, 26), "26 Jul 2024"  # Llama 3's template uses this date if it is told none


class FixedTime(datetime.datetime):
    """The time that chat templates are told. It does not pass: tokens must not depend on the day."""

    @classmethod
    def now(cls, tz=None):
        return cls(*DATE, tzinfo=tz)


def modules_with_clock():
    """Where a chat template may find the time: Python's datetime, and the modules of transformers that have its
    class by name, of which one answers strftime_now()."""
    of_transformers = [module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"]
    by_name = [module for module in of_transformers
               if getattr(module, "__dict__", {}).get("datetime") is datetime.datetime]
    return [datetime, *by_name]


@contextlib.contextmanager
def stopped_clock(modules):
    """While a template is rendered, the time is FixedTime. At no other time: pandas, which transformers may
    import, crashes when it is imported while datetime is another class."""
    real = datetime.datetime
    for module in modules:
        module.datetime = FixedTime
    try:
        yield
    finally:
        for module in modules:
            module.datetime = real


# Comparing texts. ----------------------------------------------------------------------------------------


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
    """What follows in a text after its last difference to another one, without white space at the end."""
    return text[len(text) - shared_end(text, other):].rstrip()


def end_of_longest_tail(tail, text, first, last):
    """Where `tail`, or the longest end of it that is in text[first:last], ends there; `last` if none is."""
    found, most = 0, len(tail)  # characters: if n of them are there, fewer are, too
    while found < most:
        middle = (found + most + 1) // 2
        if text.find(tail[-middle:], first, last) >= 0:
            found = middle
        else:
            most = middle - 1
    return text.rfind(tail[-found:], first, last) + found if found else last


# Tokens of a text. ---------------------------------------------------------------------------------------


def one_of(tokens):
    """A regular expression that finds how added tokens are spelled."""
    spellings = [str(getattr(token, "content", token)) for token in tokens]
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) is found nowhere


def encode(tokenizer, text, words=(), **options):
    """(token, begin, end) of each token of a text: it stands in text[begin:end]. At the places `words`,
    (begin, end) each, the text spells control tokens that are words. There a character is put into the
    spelling, which hides it from the tokenizer; then the tokens of this character are taken out."""
    cuts = sorted({begin + 1 for begin, end in words})
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    try:
        found = tokenizer(BREAK.join(parts), add_special_tokens=False, return_offsets_mapping=True,
                          verbose=False, **options)
    except NotImplementedError:
        fail("this tokenizer does not tell where tokens stand in a text; give one that has tokenizer.json.")
    breaks = [cut + i for i, cut in enumerate(cuts)]  # where the character stands
    return [(token, begin - bisect_left(breaks, begin), end - bisect_left(breaks, end))
            for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"])
            if not (end == begin + 1 and begin in breaks)]


def with_counts(tokens, spans):
    """Tokens with the bit NOT_COUNTED, but for those (token, begin, end) that a span, (begin, end), overlaps.
    The first token is never a target, since nothing precedes it."""
    words = [token if any(begin < last and end > first for first, last in spans) else token | NOT_COUNTED
             for token, begin, end in tokens]
    return [word | NOT_COUNTED for word in words[:1]] + words[1:]


class ChatTemplate:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.clocks = modules_with_clock()
        added = list(tokenizer.added_tokens_decoder.values())
        self.control = one_of([token for token in added if getattr(token, "special", True)])
        self.added = one_of(added)  # control tokens and others, such as <think>
        self.remarks = {}  # sentences for the user, and how often there was a reason for them

    def note(self, remark):
        self.remarks[remark] = self.remarks.get(remark, 0) + 1

    def render(self, messages, tools, prompt=False):
        """The text of messages. With `prompt` it ends where the assistant begins to answer."""
        with stopped_clock(self.clocks):
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                      add_generation_prompt=prompt, date_string=DATE_AS_TEXT)

    def marked(self, messages, tools):
        """(text, spans): the places that the template marks as the assistant's with {% generation %}. None if
        it marks nothing, or if this version of transformers does not tell."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
            template = self.tokenizer.get_chat_template(tools=tools)
            if not re.search(r"\{%-?\s*generation\b", template):
                return None
            with stopped_clock(self.clocks):
                texts, spans = render_jinja_template(
                    [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
                    add_generation_prompt=False, date_string=DATE_AS_TEXT, **self.tokenizer.special_tokens_map)
            return texts[0], spans[0]
        except (ImportError, AttributeError, TypeError):
            return None


class Conversation:
    """The messages of a record, and the text that the chat template makes of them."""

    def __init__(self, template, record):
        self.template, self.tools, self.where = template, record.tools, record.where
        self.weights = [message.get("weight", 1) for message in record.messages]
        messages = [{key: value for key, value in message.items() if key != "weight"}
                    for message in record.messages]
        self.text, self.messages = self.text_and_form(messages)

    def text_and_form(self, messages):
        """(the text of all messages, the form of the messages that gives it). They have several forms:
        arguments of calls are objects or text of JSON, a content is null or missing, one text or parts. A
        template wants one of them. So another form than the record's is taken if the template rejects that,
        or does not show words as they are."""
        rendered, first_problem = [], None
        for form in forms_of(messages):
            try:
                text = self.template.render(form, self.tools)
            except Exception as problem:  # a template can raise anything
                first_problem = first_problem or problem
                continue
            if are_shown(form, text):
                return text, form
            rendered.append((text, form))
        if not rendered:
            self.reject(first_problem)
        return rendered[0]

    def reject(self, problem):
        if getattr(self.template.tokenizer, "chat_template", "") is None:
            fail("the tokenizer has no chat template; give the folder of a chat model.")
        fail(f"{self.where}: the chat template fails ({problem}): it does not take such a conversation. "
             "Change the record, or give another chat model.")

    def render(self, messages, prompt=False):
        """The text of messages other than the record's, or None if the template does not take them."""
        try:
            return self.template.render(messages, self.tools, prompt) if messages else None
        except Exception:  # a template can raise anything
            return None

    def own_spellings(self):
        """The places in the text, (begin, end) each, where the record itself spells a control token. To find
        them, the record is rendered with a stand-in for the spelling. If this makes another difference to the
        text, then the template looks for the spelling, and what it writes for it is the template's."""
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
            if spelling.join(pieces) != self.text:
                continue
            end = 0
            for piece in pieces[:-1]:
                begin = end + len(piece)
                end = begin + len(spelling)
                places.append((begin, end))
        return places

    def span_of_answer(self, i, first):
        """(begin, end) of message i in the text, with the end of its turn; None if it is not found. `first`
        is where the answer before it ends.

        Mostly the text begins with the rendering of the messages before, up to where the assistant begins to
        answer, and also with the rendering of the messages up to this one. The part of the second rendering
        that is not in the first is the answer. But some templates write other things in the middle of a
        conversation than at its end. Then the conversation is rendered once more with other words in this
        message: the answer is where the two texts differ."""
        prompt = self.render(self.messages[:i], True)
        whole = self.render(self.messages[:i + 1])
        if prompt and whole and self.text.startswith(prompt) and self.text.startswith(whole.rstrip()):
            return len(prompt), len(whole.rstrip())
        for change in (with_other_words, with_other_names):
            message = change(self.messages[i])
            other = self.render(self.messages[:i] + [message] + self.messages[i + 1:])
            if other not in (None, self.text):
                first_difference = shared_begin(self.text, other)
                last_difference = len(self.text) - shared_end(self.text, other)
                return (self.begin_of_answer(i, first, first_difference, prompt),
                        self.end_of_turn(i, message, last_difference, prompt, whole))
        return None

    def begin_of_answer(self, i, first, last, prompt):
        """Where message i begins, between `first` and `last`. Before it stands the end of the rendering of
        the messages before, as much of it as is there. Then comes what opens an answer, as much of it as is
        there, such as <|im_start|>assistant."""
        if prompt and self.text.startswith(prompt):
            return len(prompt)
        before = self.render(self.messages[:i])
        if not prompt or not before or not prompt.startswith(before):
            tail = prompt or self.render(self.messages, True)
            return end_of_longest_tail(tail, self.text, first, last) if tail else last
        begin = end_of_longest_tail(before, self.text, first, last)
        opening = prompt[len(before):]
        shared = shared_begin(self.text[begin:last], opening)
        if shared < len(opening):  # the next token may begin with the same characters: <think>, <tool_call>
            ends = [found.end() for found in re.finditer(rf"{self.template.added.pattern}|\s", opening)]
            shared = max([end for end in ends if end <= shared], default=0)
        return begin + shared

    def end_of_turn(self, i, message, end, prompt, whole):
        """Where the turn of message i ends, whose last difference to the other `message` is at `end`. If both
        are rendered as the last one, what follows this difference is the end of a turn."""
        rest = self.text[end:]
        last = self.render(self.messages[:i] + [message])
        if whole is None or last is None:  # such as a call that must not stand without its result
            token = self.template.control.search(rest)
            return end + token.end() if token else end
        turn_end = what_follows(whole, last)
        if rest.startswith(turn_end):
            return end + len(turn_end)
        return self.end_in_the_middle(i, message, end, prompt, turn_end)

    def end_in_the_middle(self, i, message, end, prompt, turn_end):
        """Where the turn of message i ends if the template ends a turn with something else than `turn_end`
        where the conversation goes on."""
        rest = self.text[end:]
        before = self.render(self.messages[:i])
        opening = prompt[len(before):] if prompt and before and prompt.startswith(before) else ""
        whole = self.render(self.messages[:i + 1], True)  # as if the assistant were to say more
        last = self.render(self.messages[:i] + [message], True)
        if opening and whole and last and whole.endswith(opening) and last.endswith(opening):
            turn_end_before_more = what_follows(whole.removesuffix(opening), last.removesuffix(opening))
            if rest.startswith(turn_end_before_more):
                return end + len(turn_end_before_more)
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
        """The places in the text, (begin, end) each, that count in the loss."""
        marked = self.template.marked(self.messages, self.tools)
        if marked is None or marked[0] != self.text:
            return [(begin, end) for begin, end, weight in self.answers() if weight]
        without = [] if all(self.weights) else [answer for answer in self.answers() if not answer[2]]
        return [(begin, end) for begin, end in marked[1]
                if not any(begin < last and end > first for first, last, _ in without)]

    def tokens(self, longest):
        """The tokens of the first `longest` characters, with the bit NOT_COUNTED where they do not count."""
        words = [(begin, end) for begin, end in self.own_spellings() if end <= longest]
        return with_counts(encode(self.template.tokenizer, self.text[:longest], words), self.spans())


def tokens_of_completion(template, record, longest):
    """The tokens of a prompt and a completion that are texts. As in TRL they have no chat template; the
    completion counts, with the token that ends a text."""
    tokenizer = template.tokenizer
    text = record.prompt + record.completion.removesuffix(tokenizer.eos_token or "")
    if template.control.search(text):
        template.note("A prompt or completion that is a text spells control tokens; they stay text. Lists of "
                      "messages have a chat template")
    tokens = encode(tokenizer, text[:longest], split_special_tokens=True)
    first = getattr(tokenizer, "bos_token_id", None)  # with which some models begin every text
    if first is not None and first in tokenizer("", add_special_tokens=True, verbose=False)["input_ids"]:
        tokens = [(first, 0, 0), *tokens]
    if len(text) <= longest and tokenizer.eos_token_id is not None:
        tokens = [*tokens, (tokenizer.eos_token_id, len(text), len(text) + 1)]
    return with_counts(tokens, [(len(record.prompt), len(text) + 1)])


def tokens_of_record(template, record, longest):
    """The tokens of a conversation, or of a prompt with its completion: of at most the first `longest`
    characters. None at all if an answer is empty."""
    if record.messages is None:
        return tokens_of_completion(template, record, longest) if record.completion.strip() else []
    if any(is_empty(message) for message in record.messages if message["role"] == "assistant"):
        return []
    return Conversation(template, record).tokens(longest)
