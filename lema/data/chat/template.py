"""A chat template: a program from outside that writes messages as the model has met them.

`transformers` renders it in jinja's sandbox, which keeps it from files, modules and attributes that
lead to them, and bounds `range`. It bounds neither loops within loops nor powers
(https://jinja.palletsprojects.com/en/stable/sandbox says that the caller must), so it is rendered
in a process of its own, with a limit of time and memory.
"""

import json
import marshal
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from lema.data.chat.pictures import has_pictures, parts_of
from lema.data.chat.process import Limits, Refusal, Rendition, Request, rendered
from lema.data.chat.recording import applied
from lema.data.files import Row
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "MAX_SECONDS",
    "Ahead",
    "Template",
    "date_for",
    "in_forms",
    "literals_of",
    "open_template",
]
__all__ += ["render_ahead"]

MAX_SECONDS = 3.0  # of the processor, for one chat; a long one takes thousandths
MAX_BYTES = 512 << 20  # that rendering one chat may allocate
MOST_AHEAD = 1 << 20  # bytes of chats that are sent at once
MAX_NUMBER = 1_000_000  # to be multiplied by, or padded to
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

CLOCK = "strftime_now"  # the function by which templates ask for the time

Messages = list[dict[str, Any]]
Ahead = dict[tuple[int, bool], Rendition | Refusal]
"""Rendered chats, by the identity of the list of messages and whether there is a prompt for
generation behind them.
"""
T = TypeVar("T")


@lru_cache(maxsize=16)
def check_template(template: str) -> str:
    """Name a part of a template that no chat needs and that could take all time or memory; empty:
    there is none. The template is split into words and not compiled, because compiling it computes
    its constants."""
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
    """The texts that a template may look for in a message: its constants, but those that are one
    word, or blank. Words such as `user` are names of roles and keys; they occur in many messages
    and are looked for in none."""
    try:
        words = list(jinja2.Environment(autoescape=True).lex(template))
    except jinja2.TemplateError:
        return ()
    literals = {word[1:-1].replace("\\n", "\n") for _, kind, word in words if kind == "string"}
    return tuple(
        sorted(literal for literal in literals if literal.strip() and not literal.isalpha())
    )


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer, for rows of one kind: with tools, or without.

    Attributes:
        text: the template.
        tokenizer: the tokenizer that has it.
        tools: JSON schemas of tools; None: there are none.
        date: that it is told for today, YYYY-MM-DD; None: today's.
        ahead: what has been rendered already (`render_ahead`).
        in_parts: whether every content is given as a list of parts, because there are images.
    """

    text: str
    tokenizer: "PreTrainedTokenizerBase"
    tools: list[Any] | None
    date: str | None = None
    ahead: Ahead = field(default_factory=dict, compare=False)
    in_parts: bool = False

    @property
    def marks_answers(self) -> bool:
        """Whether the template says by `{% generation %}` which words are the assistant's."""
        return bool(_GENERATION.search(self.text))

    def render(
        self, messages: Messages, row: Row, *, prompt: bool = False, continued: bool = False
    ) -> str:
        """Render messages, with a generation prompt if asked, or so that the last one can be
        `continued`. `DataError`: the template refuses, or takes too long."""
        if not continued and (outcome := self.ahead.pop((id(messages), prompt), None)) is not None:
            return _asked(row, lambda: _taken(outcome), self).text
        return self._rendition(
            messages, row, add_generation_prompt=prompt, continue_final_message=continued
        ).text

    def render_marked(self, messages: Messages, row: Row) -> tuple[str, list[tuple[int, int]]]:
        """Render messages with a template that marks the assistant's words; return also where
        these are.
        """
        outcome = self.ahead.pop((id(messages), False), None)
        rendition = (
            self._rendition(messages, row)
            if outcome is None
            else _asked(row, lambda: _taken(outcome), self)
        )
        return rendition.text, [(start, end) for start, end in rendition.spans if start < end]

    def _rendition(self, messages: Messages, row: Row, **options: bool) -> Rendition:
        written = list[Rendition]()

        def write(template: str, values: dict[str, Any]) -> str:
            (outcome,) = rendered(
                [_request(template, values, self.date)], Limits(MAX_SECONDS, MAX_BYTES)
            )
            written.append(_taken(outcome))
            return written[-1].text

        text = str(
            _asked(row, lambda: applied(lambda: self.apply(messages, **options), write), self)
        )
        return written[0] if written and written[0].text == text else Rendition(text, [])

    def apply(self, messages: Messages, **options: Any) -> object:
        """Apply the template as `transformers` does."""
        return self.tokenizer.apply_chat_template(
            parts_of(messages) if self.in_parts else messages,
            tools=self.tools,
            tokenize=False,
            **options,
        )


def render_ahead(asked: Sequence[tuple[Template, Messages, bool]]) -> Ahead:
    """Render chats together, as many as are not too long, each with a generation prompt or without;
    return what came of them, for the `ahead` of the templates that are asked next. A chat that
    cannot be asked for, or of which the tokenizer makes something else than the template writes, is
    left out: rendering it alone says why."""
    requests = dict[tuple[int, bool], Request]()
    size = 0
    for template, messages, prompt in asked:
        request = _request_of(template, messages, prompt) if size < MOST_AHEAD else None
        if request is not None:
            requests[id(messages), prompt] = request
            size += len(request.values)
    if not requests:
        return {}
    return dict(
        zip(
            requests,
            rendered(list(requests.values()), Limits(MAX_SECONDS, MAX_BYTES)),
            strict=False,
        )
    )


_WRITTEN = "a rendered chat"


def _request_of(template: Template, messages: Messages, prompt: bool) -> Request | None:
    requests = list[Request]()

    def write(text: str, values: dict[str, Any]) -> str:
        requests.append(_request(text, values, template.date))
        return _WRITTEN

    try:
        plain = (
            applied(lambda: template.apply(messages, add_generation_prompt=prompt), write)
            is _WRITTEN
        )
    except Exception:  # noqa: BLE001 - of any kind, and it is raised again where the chat is rendered alone
        return None
    return requests[0] if plain else None


def _request(template: str, values: dict[str, Any], date: str | None) -> Request:
    """Return what to ask the rendering process for, on a date, or now."""
    now = _now() if date is None else datetime.fromisoformat(date)
    clock = (now.year, now.month, now.day, now.hour, now.minute, now.second, now.microsecond)
    return Request(template, clock, marshal.dumps(values))


def _taken(outcome: Rendition | Refusal) -> Rendition:
    if isinstance(outcome, Refusal):
        raise _Refused(outcome)
    return outcome


def _now() -> datetime:
    """Return the time by the clock that `transformers` gives to templates."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    now: datetime = module.datetime.now()
    return now


def date_for(tokenizer: "PreTrainedTokenizerBase", date: str | None) -> str | None:
    """Return the date to tell the tokenizer's chat templates for today, the given one if there is
    one; None: none of them asks for it."""
    return (date or _now().strftime("%Y-%m-%d")) if CLOCK in str(tokenizer.chat_template) else None


def in_forms(messages: Messages, render: Callable[[Messages], T]) -> Iterator[T]:
    """Yield what `render` makes of messages, in one after the other of the forms in which templates
    take them: as they are, with arguments of tool calls as JSON and a text, perhaps an empty one,
    with each call, and in blocks of text. `DataError`: the template takes none of the forms; it is
    what is said of the first."""
    forms = [messages]
    refused = list[DataError]()
    taken = 0
    if any(message.get("tool_calls") for message in messages):
        forms.append([_written(message) for message in messages])
    if any(isinstance(message["content"], str) for message in messages):
        forms.append([_in_blocks(message) for message in messages])
    for form in forms:
        try:
            output = render(form)
        except DataError as error:
            refused.append(error)
            # as it would with each other form
            if isinstance(error.__cause__, _Refused) and error.__cause__.ended:
                break
            continue
        taken += 1
        yield output
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
    ahead: Ahead | None = None,
    messages: Sequence[dict[str, Any]] = (),
) -> Template:
    """Return the tokenizer's template, which is told the `date` for today; None: today's. What it
    has rendered already may be given, `ahead`. It is for all chats that begin with `messages`.
    `DataError`: it has none, or one that could take all time or memory."""
    if not tokenizer.chat_template:
        how = (
            "use the tokenizer of an instruct model, give chat_template: FILE, or use prompt + "
            "completion"
        )
        raise row.broken("the data are chats, and the tokenizer has no chat template", how=how)
    text = tokenizer.chat_template
    if not isinstance(text, str):  # several by name, one of them for tools
        text = _asked(row, lambda: str(tokenizer.get_chat_template(tools=tools)))
    if refused := check_template(text):
        raise row.broken(
            f"{refused}, which no chat template needs",
            how="do not use this template unless you trust it",
        )
    renditions = {} if ahead is None else ahead
    return Template(text, tokenizer, tools, date, renditions, has_pictures(messages))


class _Refused(jinja2.TemplateError):
    """A chat was not rendered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.why)
        self.ended = refusal.ended


def _asked(row: Row, function: Callable[[], T], template: Template | None = None) -> T:
    """Call what renders a chat, or prepares it, which raises anything where the chat is none for
    the template.
    """
    try:
        return function()
    except Exception as error:
        how = "compare the roles and their order with what the model's template expects"
        if template is not None and isinstance(error, _Refused) and error.ended:
            suffix = f" than that of {name}" if (name := template.tokenizer.name_or_path) else ""
            how = f"shorten the chat, or set chat_template to another one{suffix}"
        what = f"the chat template rejects this chat: {str(error) or type(error).__name__}"
        raise row.broken(what, how=how) from error
