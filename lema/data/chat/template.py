"""A chat template: a program from outside that writes messages as the model has met them.

`transformers` renders it in jinja's sandbox, which keeps it from files, modules and attributes that lead to them, and
bounds `range`. It bounds neither loops within loops nor powers (https://jinja.palletsprojects.com/en/stable/sandbox
says that the caller must), so it is rendered in a process of its own, with a limit of time and memory.
"""

import json
import marshal
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from lema.data.chat.process import Limits, Refusal, Rendition, Request, rendered
from lema.data.chat.recording import Recorded, recorded
from lema.data.files import Row
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_SECONDS", "Template", "date_for", "in_forms", "literals_of", "open_template"]
__all__ += ["render_ahead"]

MAX_SECONDS = 3.0  # of the processor, for one chat; a long one takes thousandths
MAX_BYTES = 512 << 20  # that rendering one chat may allocate
MOST_AHEAD = 1 << 20  # bytes of chats that are sent at once
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
    """The chat template of a tokenizer, for rows of one kind: with tools, or without.

    Attributes:
        text: the template.
        tokenizer: the tokenizer that has it.
        tools: JSON schemas of tools; None: there are none.
        date: that it is told for today, YYYY-MM-DD; None: today's.
        ahead: what has been rendered already, by the identity of the list of messages (`render_ahead`).
    """

    text: str
    tokenizer: "PreTrainedTokenizerBase"
    tools: list[Any] | None
    date: str | None = None
    ahead: dict[int, Rendition | Refusal] = field(default_factory=dict, compare=False)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says by `{% generation %}` which words are the assistant's."""
        return bool(_GENERATION.search(self.text))

    def render(self, messages: Messages, row: Row, *, prompt: bool = False) -> str:
        """Render messages, with a generation prompt if asked. `DataError`: the template refuses, or takes too long."""
        return self._rendition(messages, row, prompt).text

    def render_marked(self, messages: Messages, row: Row) -> tuple[str, list[tuple[int, int]]]:
        """Render messages with a template that marks the assistant's words; return also where these are."""
        rendition = self._rendition(messages, row, prompt=False)
        return rendition.text, [(start, end) for start, end in rendition.places if start < end]

    def _rendition(self, messages: Messages, row: Row, prompt: bool) -> Rendition:
        outcome = None if prompt else self.ahead.pop(id(messages), None)
        if outcome is None:
            asked = self._recorded(messages, row, prompt)
            if asked.template is None:
                return Rendition(str(asked.returned), [])
            [outcome] = rendered([_request(asked, self.date, row)], Limits(MAX_SECONDS, MAX_BYTES))
            if isinstance(outcome, Rendition) and not asked.is_plain:
                again = self._recorded(messages, row, prompt, text=outcome.text)
                outcome = Rendition(str(again.returned), [])
        if isinstance(outcome, Refusal):
            raise self._refused(row, outcome)
        return outcome

    def _recorded(self, messages: Messages, row: Row, prompt: bool, **how: str) -> Recorded:
        given: dict[str, Any] = {"tools": self.tools, "tokenize": False, "add_generation_prompt": prompt}
        return _asked(row, lambda: recorded(lambda: self.tokenizer.apply_chat_template(messages, **given), **how))

    def _refused(self, row: Row, refusal: Refusal) -> DataError:
        if not refusal.ended:
            return _rejected(row, refusal.why, jinja2.TemplateError(refusal.why))
        own = f" than that of {name}" if (name := self.tokenizer.name_or_path) else ""
        how = f"shorten the chat, or set chat_template to another one{own}"
        return _rejected(row, refusal.why, _Ended(refusal.why), how)


def render_ahead(asked: Sequence[tuple[Template, Messages, Row]]) -> dict[int, Rendition | Refusal]:
    """Render chats together, as many as are not too long; return what came of them, by the identity of the list of
    messages. It is for the `ahead` of the templates that ask for it next. A chat that cannot be asked for is left out,
    because rendering it alone says why."""
    requests, size = dict[int, Request](), 0
    for template, messages, row in asked:
        with suppress(DataError):
            chat = template._recorded(messages, row, prompt=False)
            if chat.template is not None and chat.is_plain and size < MOST_AHEAD:
                requests[id(messages)] = _request(chat, template.date, row)
                size += len(requests[id(messages)].values)
    if not requests:
        return {}
    return dict(zip(requests, rendered(list(requests.values()), Limits(MAX_SECONDS, MAX_BYTES)), strict=False))


def _request(asked: Recorded, date: str | None, row: Row) -> Request:
    """Return a request with what was recorded, on a date, or now."""
    now = _now() if date is None else datetime.fromisoformat(date)
    clock = (now.year, now.month, now.day, now.hour, now.minute, now.second, now.microsecond)
    return Request(str(asked.template), clock, _asked(row, lambda: marshal.dumps(asked.values)))


def _now() -> datetime:
    """Return the time by the clock that `transformers` gives to templates."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    now: datetime = module.datetime.now()
    return now


def date_for(tokenizer: "PreTrainedTokenizerBase", date: str | None) -> str | None:
    """Return the date to tell the tokenizer's chat templates for today, the given one if there is one; None: none of
    them asks for it."""
    return (date or _now().strftime("%Y-%m-%d")) if CLOCK in str(tokenizer.chat_template) else None


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
            if isinstance(error.__cause__, _Ended):  # as it would with each other form
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
    tokenizer: "PreTrainedTokenizerBase",
    tools: list[Any] | None,
    row: Row,
    date: str | None = None,
    ahead: dict[int, Rendition | Refusal] | None = None,
) -> Template:
    """Return the tokenizer's template, which is told the `date` for today; None: today's. What it has rendered already
    may be given, `ahead`. `DataError`: it has none, or one that could take all time or memory."""
    if not tokenizer.chat_template:
        how = "use the tokenizer of an instruct model, give chat_template: FILE, or use prompt + completion"
        raise row.broken("the data are chats, and the tokenizer has no chat template", how=how)
    text = tokenizer.chat_template
    if not isinstance(text, str):  # several by name, one of them for tools
        text = _asked(row, lambda: str(tokenizer.get_chat_template(tools=tools)))
    if refused := check_template(text):
        raise row.broken(f"{refused}, which no chat template needs", how="do not use this template unless you trust it")
    return Template(text, tokenizer, tools, date, {} if ahead is None else ahead)


class _Ended(jinja2.TemplateError):
    """A template takes too long, or too much memory."""


def _asked(row: Row, function: Callable[[], T]) -> T:
    """Call what prepares a chat for a template, which raises anything where the chat is none for it."""
    try:
        return function()
    except Exception as error:
        raise _rejected(row, str(error) or type(error).__name__, error) from error


def _rejected(row: Row, why: str, cause: Exception, how: str = "") -> DataError:
    how = how or "compare the roles and their order with what the model's template expects"
    error = row.broken(f"the chat template rejects this chat: {why}", how=how)
    error.__cause__ = cause
    return error
