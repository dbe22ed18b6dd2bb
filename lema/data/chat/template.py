"""A chat template: a program from outside that writes messages as the model has met them.

`transformers` renders it in jinja's sandbox, which keeps it from files, modules and attributes that lead to them, and
bounds `range`. It bounds neither loops within loops nor powers (https://jinja.palletsprojects.com/en/stable/sandbox
says that the caller must), so rendering has a limit of time and memory here.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jinja2

from lema.backend import timelimit
from lema.data.files import Row
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_SECONDS", "Template", "date_for", "guarded", "in_forms", "literals_of", "open_template"]

MAX_SECONDS = 3.0  # for one chat; a long one takes thousandths
MAX_NUMBER = 1_000_000  # to be multiplied by, or padded to
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

CLOCK = "strftime_now"  # the function by which templates ask for the time

Messages = list[dict[str, Any]]
T = TypeVar("T")


@lru_cache(maxsize=16)
def check_template(template: str) -> str:
    """Name a part of a template that no chat needs and that could take all time or memory; empty: there is none. The
    template is split into words and not compiled, because compiling it computes its constants."""
    try:
        for line, kind, word in jinja2.Environment(autoescape=True).lex(template):
            if kind == "operator" and word == "**":
                return f"line {line} of the chat template raises a number to a power"
            if kind in ("integer", "float") and float(word.replace("_", "")) > MAX_NUMBER:
                return f"line {line} of the chat template has the number {word[:20]}"
    except (jinja2.TemplateError, ValueError):
        return ""  # it will not compile either, and rendering it says so
    return ""


@lru_cache(maxsize=16)
def literals_of(template: str) -> tuple[str, ...]:
    """The texts that a template may look for in a message: its constants, but those that are one word, or blank. Words
    such as `user` are names of roles and keys; they occur in many messages and are looked for in none."""
    try:
        words = list(jinja2.Environment(autoescape=True).lex(template))
    except jinja2.TemplateError:
        return ()
    found = {word[1:-1].replace("\\n", "\n") for _, kind, word in words if kind == "string"}
    return tuple(sorted(one for one in found if one.strip() and not one.isalpha()))


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer, for rows of one kind: with tools, or without."""

    text: str
    tokenizer: "PreTrainedTokenizerBase"
    tools: list[Any] | None
    date: str | None = None  # that it is told for today, YYYY-MM-DD; None: today's

    @property
    def marks_answers(self) -> bool:
        """Whether the template says by `{% generation %}` which words are the assistant's."""
        return bool(_GENERATION.search(self.text))

    def render(self, messages: Messages, row: Row, *, prompt: bool = False) -> str:
        """Render messages, with a generation prompt if asked. `DataError`: the template refuses, or takes too long."""
        how: dict[str, Any] = {"tools": self.tools, "tokenize": False, "add_generation_prompt": prompt}
        with told_date(self.date):
            return str(guarded(row, lambda: self.tokenizer.apply_chat_template(messages, **how)))

    def render_marked(self, messages: Messages, row: Row) -> tuple[str, list[tuple[int, int]]]:
        """Render messages with a template that marks the assistant's words; return also where these are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        how: dict[str, Any] = dict(self.tokenizer.special_tokens_map, tools=self.tools, chat_template=self.text)

        with told_date(self.date):
            texts, places = guarded(
                row, lambda: render_jinja_template([present], return_assistant_tokens_mask=True, **how)
            )
        return str(texts[0]), [(int(start), int(end)) for start, end in places[0] if start < end]


@contextmanager
def told_date(date: str | None) -> Iterator[None]:
    """Let the clock that `transformers` gives to templates show a date, YYYY-MM-DD, within a `with` block; None: today.
    It is the clock of its module, because what is handed to a rendering may be data alone."""
    from transformers.utils import chat_template_utils

    if date is None:
        yield
        return
    day = datetime.fromisoformat(date)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    module: Any = chat_template_utils
    own = module.datetime
    module.datetime = Clock
    try:
        yield
    finally:
        module.datetime = own


def _today() -> str:
    """Return the date, YYYY-MM-DD, by the clock that `transformers` gives to templates."""
    from transformers.utils.chat_template_utils import render_jinja_template

    made: Any = render_jinja_template([[]], chat_template="{{ " + CLOCK + "('%Y-%m-%d') }}")
    return str(made[0][0])


def date_for(tokenizer: "PreTrainedTokenizerBase", date: str | None) -> str | None:
    """Return the date to tell the tokenizer's chat templates for today, the given one if there is one; None: none of
    them asks for it."""
    return (date or _today()) if CLOCK in str(tokenizer.chat_template) else None


def in_forms(messages: Messages, render: Callable[[Messages], T]) -> Iterator[T]:
    """Yield what `render` makes of messages, in one after the other of the forms in which templates take them: as they
    are, with arguments of tool calls as JSON and a text, perhaps an empty one, with each call, and in blocks of text.
    `DataError`: the template takes none of the forms; it is what is said of the first."""
    forms, refused, taken = [messages], list[DataError](), 0
    if any(message.get("tool_calls") for message in messages):
        forms.append([_written(message) for message in messages])
    if any(isinstance(message["content"], str) for message in messages):
        forms.append([_in_blocks(message) for message in messages])
    for form in forms:
        try:
            made = render(form)
        except DataError as error:
            refused.append(error)
            if isinstance(error.__cause__, _TooSlow):  # as it would with each other form
                break
            continue
        taken += 1
        yield made
    if not taken:
        raise refused[0]


def _in_blocks(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message["content"], list):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"] or ""}]}


def _written(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message["content"] or "", "tool_calls": calls}


def open_template(
    tokenizer: "PreTrainedTokenizerBase", tools: list[Any] | None, row: Row, date: str | None = None
) -> Template:
    """Return the tokenizer's template, which is told the `date` for today; None: today's. `DataError`: it has none, or
    one that could take all time or memory."""
    if not tokenizer.chat_template:
        how = "use the tokenizer of an instruct model, give chat_template: FILE, or use prompt + completion"
        raise row.broken("the data are chats, and the tokenizer has no chat template", how=how)
    text = tokenizer.chat_template
    if not isinstance(text, str):  # several by name, one of them for tools
        text = guarded(row, lambda: str(tokenizer.get_chat_template(tools=tools)))
    if refused := check_template(text):
        raise row.broken(f"{refused}, which no chat template needs", how="do not use this template unless you trust it")
    return Template(text, tokenizer, tools, date)


class _TooSlow(jinja2.TemplateError):
    """A template takes too long."""


def guarded(row: Row, function: Callable[[], Any]) -> Any:
    """Call what runs a template, a program from outside that may raise anything, for `MAX_SECONDS` of computing."""
    slow = _TooSlow(f"it takes more than {MAX_SECONDS:g} seconds")
    try:
        with timelimit.limited(MAX_SECONDS, lambda: slow, file="<template>"):
            return function()
    except Exception as error:
        said = "it allocates more than 768 MiB" if isinstance(error, MemoryError) else str(error)
        what = f"the chat template rejects this chat: {said or type(error).__name__}"
        how = "compare the roles and their order with what the model's template expects"
        raise row.broken(what, how=how) from error
