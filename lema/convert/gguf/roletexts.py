"""The texts that a chat template writes around the words of messages, learnt from what it renders.

Most templates are a table: the text before a message depends on its role and on the role of the
message before it, and the text after the last one asks for an answer. Chats of marks are rendered,
and the texts between the marks are that table. A template that reads more of a chat than this, such
as one that writes the system message into the last question, has no such table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from lema.data.chat.template import CLOCK, Template, in_forms, open_template
from lema.data.files import Row
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ROLES", "START", "Chat", "NoTable", "RoleTexts", "read_role_texts"]

ROLES = ("system", "user", "assistant")
START = ""
"""Stands for the role of what is before the first message."""
MOST_QUESTIONS = 4
# Chats that a template may refuse.
UNUSUAL = (["system"], ["user", "system", "user"], ["user", "assistant", "system", "user"])
# A template that writes other words than these has more than a table.
WORDS = (
    "Two lines\nand  two blanks",
    '{{ .Content }} "quoted" \\ {% if x %} $1',
    "<b>&amp;</b> 'single' \u00e9\u4e2d",
)
PADDED = " padded \n"

Chat: TypeAlias = Sequence[tuple[str, str]]
"""Roles and words of messages."""


class NoTable(Exception):
    """The template has no table of texts; the message says why, as a part of a sentence."""


@dataclass(frozen=True)
class RoleTexts:
    """The texts of a template.

    Attributes:
        before: what stands before the words of a message, by the role of the message before it (or
            `START`) and its role.
        prompt: what asks for an answer, by the role of the last message.
        trims: whether the template leaves out blanks around the words of messages, or of some.
        dated: whether the texts have the date of the day.
    """

    before: Mapping[tuple[str, str], str] = field(default_factory=dict)
    prompt: Mapping[str, str] = field(default_factory=dict)
    trims: bool = False
    dated: bool = False

    @property
    def has_system(self) -> bool:
        """Whether a chat may begin with a system message."""
        return (START, "system") in self.before

    def render(self, chat: Chat) -> str:
        """Return a chat, and what asks for the next answer."""
        text = ""
        last = START
        for role, words in chat:
            text += self.before[last, role] + words
            last = role
        return text + self.prompt[last]


def read_role_texts(tokenizer: PreTrainedTokenizerBase, date: str | None = None) -> RoleTexts:
    """Return the texts of a tokenizer's chat template.

    A text that begins every chat and that the tokenizer adds itself, `<s>` for instance, is left
    out, because llama.cpp adds it as well.

    Args:
        tokenizer: with its template.
        date: YYYY-MM-DD, that the template is told; None: today's.

    Returns:
        The texts. Chats of one to four questions, with a system message and without, are rendered
        from them as the template renders them.

    Raises:
        NoTable: there is no template, or it is no such table.
    """
    if not tokenizer.chat_template:
        raise NoTable("the tokenizer has no chat template")
    try:
        opened = open_template(tokenizer, None, Row({}, "the chat template", 1), date)
        probe = _Probe(opened)
        texts = replace(probe.table(), dated=CLOCK in opened.text)
        texts = probe.checked(texts)
    except DataError as error:
        raise NoTable(error.what) from error
    opening = _added_by(tokenizer)
    before = {
        (last, role): text.removeprefix(opening) if last == START else text
        for (last, role), text in texts.before.items()
    }
    return replace(texts, before=before)


class _Probe:
    """A template that is asked for chats."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def table(self) -> RoleTexts:
        """Return the texts between the marks of chats."""
        texts = RoleTexts()
        for chat in self._usual_chats():
            texts = _joined(texts, self._read(chat))
        for roles in UNUSUAL:
            with suppress(DataError, NoTable):
                texts = _joined(texts, self._read(_marked(roles)))
        return texts

    def checked(self, texts: RoleTexts) -> RoleTexts:
        """Compare texts with what the template makes of other words, and return them with whether
        it trims these. `NoTable`: it writes other words."""
        for chat in self._usual_chats():
            roles = [role for role, _ in chat]
            for shift in range(len(WORDS)):
                self._compare(texts, _filled(roles, WORDS[shift:] + WORDS[:shift]))
        padded = _filled(["user", "assistant", "user"], [PADDED])
        return replace(texts, trims=texts.render(padded) != self._render(padded))

    def _usual_chats(self) -> list[Chat]:
        chats = [
            _marked((["user", "assistant"] * count)[:-1]) for count in range(1, MOST_QUESTIONS + 1)
        ]
        with_system = [_marked(["system", *(role for role, _ in chat)]) for chat in chats]
        try:
            self._render(with_system[0])
        except DataError:  # it has no system message
            return chats
        return chats + with_system

    def _compare(self, texts: RoleTexts, chat: Chat) -> None:
        if texts.render(chat) != self._render(chat):
            raise NoTable("the chat template changes the words of messages")

    def _read(self, chat: Chat) -> RoleTexts:
        """Return the texts of one chat of marks."""
        text = self._render(chat)
        before = dict[tuple[str, str], str]()
        last = START
        for role, mark in chat:
            head, mark_there, text = text.partition(mark)
            if not mark_there or mark in text:
                raise NoTable(f"the chat template does not write each message of a {role} once")
            before = _agreed(before, {(last, role): head})
            last = role
        return RoleTexts(before, {last: text})

    def _render(self, chat: Chat) -> str:
        """Return what the template makes of a chat, in the first form in which it shows every
        message.
        """
        messages: list[dict[str, Any]] = [{"role": role, "content": words} for role, words in chat]
        row = Row({}, "the chat template", 1)
        rendered = ""
        for text in in_forms(messages, lambda form: self._template.render(form, row, prompt=True)):
            rendered = text
            if all(words.strip() in text for _, words in chat):
                break
        return rendered


def _joined(texts: RoleTexts, more: RoleTexts) -> RoleTexts:
    return RoleTexts(_agreed(texts.before, more.before), _agreed(texts.prompt, more.prompt))


def _agreed(texts: Mapping[Any, str], more: Mapping[Any, str]) -> dict[Any, str]:
    for key, text in more.items():
        if texts.get(key, text) != text:
            role = key if isinstance(key, str) else key[1]
            side = "after the last message" if isinstance(key, str) else "before the words"
            what = f"the chat template does not always write the same {side} of a {role}"
            raise NoTable(what)
    return {**texts, **more}


def _marked(roles: Sequence[str]) -> Chat:
    """Return a chat of words that no template writes itself, and none of which is in another."""
    return [(role, f"0Mk{number}Mk0") for number, role in enumerate(roles)]


def _filled(roles: Sequence[str], words: Sequence[str]) -> Chat:
    return [(role, words[number % len(words)]) for number, role in enumerate(roles)]


def _added_by(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the token that the tokenizer puts before every text; empty: none."""
    ids = tokenizer("a")["input_ids"]
    begin = tokenizer.bos_token_id
    adds = begin is not None and len(ids) > 0 and ids[0] == begin
    return str(tokenizer.bos_token) if adds else ""
