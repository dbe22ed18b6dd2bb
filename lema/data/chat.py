"""A chat rendered by the tokenizer's own template and tokenised, with only the assistant's words trained on.

The template is a program from outside. `transformers` renders it in jinja's sandbox, which keeps it from files, modules
and attributes that lead to them, and bounds `range`. It bounds neither loops within loops nor powers
(https://jinja.palletsprojects.com/en/stable/sandbox says that the caller must), so rendering has a time limit here. The
memory of a product of texts is not bounded.
"""

import re
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2

from lema.config import timelimit
from lema.data.columns import Chat
from lema.data.files import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_SECONDS", "Span", "check_template", "limited", "tokenize_chat", "tokenize_prompt", "tokenize_spans"]

MAX_SECONDS = 3.0  # for one chat; a long one takes thousandths
MAX_NUMBER = 1_000_000  # to be multiplied by, or padded to


@lru_cache(maxsize=16)
def check_template(template: str) -> str:
    """Name a part of a template that no chat needs and that could take all time or memory; empty: there is none.

    The template is split into words and not compiled, because compiling it computes its constants.
    """
    try:
        for line, kind, word in jinja2.Environment(autoescape=True).lex(template):
            if kind == "operator" and word == "**":
                return f"line {line} of the chat template raises a number to a power"
            if kind in ("integer", "float") and float(word.replace("_", "")) > MAX_NUMBER:
                return f"line {line} of the chat template has the number {word[:20]}"
    except (jinja2.TemplateError, ValueError):
        return ""  # it will not compile either, and rendering it says so
    return ""


def limited() -> AbstractContextManager[None]:
    """Raise `TemplateError` in a `with` block that computes for more than `MAX_SECONDS` of the processor's time."""
    error = jinja2.TemplateError(f"it takes more than {MAX_SECONDS:g} seconds")
    return timelimit.limited(MAX_SECONDS, lambda: error, file="<template>")


Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


def tokenize_spans(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """The token ids of the text, and for each whether it lies in one of the spans.

    The text is tokenised as a whole, as the model will meet it. A token across the start of a span lies in it (it
    holds the first characters to learn); one across the end does not (it holds characters which come later).
    """
    if not tokenizer.is_fast:
        return _by_prefixes(text, spans, tokenizer, add_special_tokens)
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    inside = [any(start < end <= stop for start, stop in spans) for _, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), inside


def _by_prefixes(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """Tokenizers written in Python do not know characters: compare with the tokens of the text up to each border."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    ids = encode(text)
    inside = [False] * len(ids)
    for start, stop in spans:
        first = _common(ids, encode(text[:start]))
        last = len(ids) if stop == len(text) else _common(ids, encode(text[:stop]))
        inside[first:last] = [True] * (last - first)
    return ids, inside


def _common(ids: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))


_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ROLES = ("system", "developer", "user", "assistant", "tool")

_MARK_IT = (
    "mark the assistant's words in the chat template with {% generation %} ... {% endgeneration %}, "
    "or give each answer its own row as prompt + completion"
)


def tokenize_chat(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> tuple[list[int], list[bool]]:
    """The token ids of the rendered chat, and which of them are learnt.

    A template with `{% generation %}` says itself which words are the assistant's. For any other, what an assistant
    message adds to the rendering of the messages before it is learnt: from the end of the generation prompt to the
    end of the message, its end-of-turn token included. The template writes all special tokens; none are added.

    Raises:
        DataError: no template, the template refuses the chat, no assistant message, or the rendering of a chat does
            not begin with the rendering of its beginning, so that the assistant's words cannot be found.
    """
    _check_template_exists(tokenizer, row)
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise row.broken("no message is the assistant's, so there is nothing to learn")
    template = _checked_template(chat, tokenizer, row)
    if chat.prompt_length is None and tokenizer.is_fast and _GENERATION.search(template):
        return _marked(chat, tokenizer, row)
    text = _render(chat.messages, chat, tokenizer, row)
    return tokenize_spans(text, _spans(text, chat, tokenizer, row), tokenizer, add_special_tokens=False)


def tokenize_prompt(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> list[int]:
    """The token ids of a chat as far as the assistant's turn, which the template begins.

    Raises:
        DataError: no template, the template refuses the chat, or the last message is the assistant's.
    """
    _check_template_exists(tokenizer, row)
    if chat.messages[-1]["role"] == "assistant":
        how = "end with the user's; of a chat to learn from, take the answer out"
        raise row.broken("the last message is the assistant's, so there is nothing to answer", how=how)
    _checked_template(chat, tokenizer, row)
    text = _render(chat.messages, chat, tokenizer, row, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check_template_exists(tokenizer: "PreTrainedTokenizerBase", row: Row) -> None:
    if not tokenizer.chat_template:
        how = "use the tokenizer of an instruct model, put a chat_template.jinja beside it, or use prompt + completion"
        raise row.broken("the data are chats, and the tokenizer has no chat template", how=how)


def _checked_template(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> str:
    """Return the template, once it and the roles of the chat are such as it is run with."""
    template = str(_call(row, tokenizer.get_chat_template, tools=chat.tools))
    if refused := check_template(template):
        raise row.broken(f"{refused}, which no chat needs", how="do not use this template unless you trust it")
    _check_roles(chat, template, row)
    return template


def _check_roles(chat: Chat, template: str, row: Row) -> None:
    """Refuse unknown roles: most templates write any role, and the words of a misspelt one would not be learnt."""
    for number, message in enumerate(chat.messages, 1):
        role = message["role"]
        if role not in ROLES and role not in template:
            how = f"use one of: {', '.join(ROLES)}; or one that the chat template names"
            raise row.broken(f"the role {role!r} is not known", at=f"message {number}", how=how)


def _call(row: Row, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that runs the template, a program from outside, which may raise anything."""
    try:
        with limited():
            return function(*args, **kwargs)
    except Exception as error:
        what = f"the chat template does not take this chat: {str(error) or type(error).__name__}"
        how = "compare the roles and their order with what the model's template expects"
        raise row.broken(what, how=how) from error


def _render(
    messages: list[dict[str, Any]], chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row, **kw: Any
) -> str:
    return str(_call(row, tokenizer.apply_chat_template, messages, tools=chat.tools, tokenize=False, **kw))


def _marked(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> tuple[list[int], list[bool]]:
    encoded = _call(
        row,
        tokenizer.apply_chat_template,
        chat.messages,
        tools=chat.tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return list(encoded["input_ids"]), [bool(learnt) for learnt in encoded["assistant_masks"]]


def _spans(text: str, chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> list[Span]:
    """The characters to learn: those of each assistant message, or all after the prompt's messages."""
    count = len(chat.messages)
    if chat.prompt_length is not None:
        turns = [(chat.prompt_length, count)]
    else:
        turns = [(i, i + 1) for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if turns[0][0] == 0:
        raise row.broken("the chat begins with the assistant, before anything to answer", at="message 1", how=_MARK_IT)
    closing = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spans = []
    for first, last in turns:
        before = _render(chat.messages[:first], chat, tokenizer, row, add_generation_prompt=True)
        after = text if last == count else _render(chat.messages[:last], chat, tokenizer, row)
        if not (after.startswith(before) and text.startswith(after)):
            what = "the chat template rewrites earlier messages, so the assistant's words cannot be told from the rest"
            raise row.broken(what, at=f"message {first + 1}", how=_MARK_IT)
        # The newline a template writes after the end-of-turn token is never generated.
        words = after.rstrip()
        spans.append((len(before), len(words) if words.endswith(closing) else len(after)))
    return spans
