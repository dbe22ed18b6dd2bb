"""A chat as token ids, with only the assistant's words trained on, or what the settings and the
data say instead.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from lema.compat import encodes_by_itself
from lema.data.chat.contents import Contents
from lema.data.chat.frame import frame_of, shape_of
from lema.data.chat.messages import Chat
from lema.data.chat.pieces import Ids, Learnt, Pieces
from lema.data.chat.template import Ahead, Template, open_template, render_ahead
from lema.data.chat.turns import Rendered, Span, TemplateCache, keep, render_chat
from lema.data.files import Row
from lema.data.forms import Remarks, TrainOn, num_alike
from lema.data.templates.named import end_token
from lema.errors import DataError
from lema.storage.modelfiles import library_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DATED", "Chats", "check_roles", "check_words", "encoded", "to_continue", "tokenizing"]

LONGEST_WORD = 1 << 20  # characters without a space or sign between them
DATED = (
    "the chat template writes the day's date, here {}; a run keeps that of its first start "
    "(template_date)"
)
ENDED = (
    "the chat template's {% generation %} marks leave out the token that ends an answer; LEMA "
    "trains it"
)
NO_TOKEN = (
    "the chat template ends an answer with {!r}, which is no single token of this tokenizer, so a "
    "model cannot stop there; use a template of the model, or add the token"
)
ALL_WORDS = ("all", "all_but_prompts")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class Chats:
    """Chats of one tokenizer: the text that is trained on, properties of its template, and
    warnings.
    """

    tokenizer: "PreTrainedTokenizerBase"
    train_on: TrainOn
    remarks: Remarks
    cache: TemplateCache
    date: str | None = None  # that templates are told for today; None: none of them asks
    # that end a turn, where contents alone are trained on; None: the end-of-sequence token
    eot_tokens: Sequence[str] | None = None
    ahead: Ahead = field(default_factory=dict)  # what was rendered together (`prepare`)

    def prepare(self, chats: Sequence[tuple[Chat, Row]]) -> None:
        """Render chats together, which is faster than one by one; `render` then tells what came
        of each.
        """
        asked = []
        for chat, row in chats:
            with suppress(DataError):  # which `render` raises
                asked.append(
                    (
                        open_template(
                            self.tokenizer, chat.tools, row, self.date, messages=chat.messages
                        ),
                        chat.messages,
                        False,
                    )
                )
        self.ahead.clear()
        self.ahead.update(render_ahead(asked))

    def render(self, chat: Chat, row: Row) -> tuple[str, list[Span]] | None:
        """The rendered chat, with all its special tokens, and the stretches that are trained on;
        None: the data say so of none. `DataError`: no template, it refuses the chat, no assistant
        message, or it does not write an answer."""
        template = self._opened(chat, row)
        end, number = self._end_token
        if end and number is None:
            self.remarks.add(row, NO_TOKEN.format(end))
        trained = self._trained(chat, row)
        if not trained:
            return None
        frames = self.cache.frames
        key = None
        if (shape := shape_of(template, chat.messages)) is not None:
            key = (self.train_on, *trained, shape[0])
            if (frame := frames.get(key)) is not None:
                text = template.render(chat.messages, row)
                if (frame_spans := frame.spans_in(text, shape[1])) is not None:
                    for what in frame.remarks:
                        self.remarks.add(row, what)
                    return text + frame.ending, frame_spans
        rendered = render_chat(template, self.cache, chat.messages, row)
        spans = [rendered.span(number) for number in trained]
        ending = ""
        remarks = _remarks(rendered, chat)
        # What TRL trains on by default is the chat as its template writes it.
        if trained[-1] == len(chat.messages) - 1 and self.train_on != "all_but_prompts":
            spans[-1], ending = _ended(rendered, spans[-1], remarks)
        if rendered.ended:
            remarks.append(ENDED)
        if self.train_on in ALL_WORDS:
            start = self._prompt_end(chat, rendered, row)
            spans = [(start, len(rendered.text) + len(ending))]
        for what in remarks:
            self.remarks.add(row, what)
        words = shape[1] if shape is not None and rendered.messages is chat.messages else None
        if (
            words is not None
            and (frame := frame_of(rendered, words, spans, ending, remarks)) is not None
        ):
            keep(frames, key, frame)
        return rendered.text + ending, spans

    def _opened(self, chat: Chat, row: Row) -> Template:
        """Return the template of a chat that has answers, of roles that are known. `DataError`: it
        has none, or there is no template."""
        if not any(message["role"] == "assistant" for message in chat.messages):
            what = "no message is the assistant's, so there is nothing to train on"
            unknown = [message["role"] for message in chat.messages if message["role"] not in ROLES]
            how = f"map the roles: roles: {{assistant: {unknown[-1]}}}" if unknown else ""
            raise row.broken(what, how=how)
        template = open_template(
            self.tokenizer, chat.tools, row, self.date, self.ahead, chat.messages
        )
        if self.date is not None:
            self.remarks.add(row, DATED.format(self.date))
        check_roles(chat, template, row)
        return template

    def contents(self, chat: Chat, row: Row) -> tuple[list[int], list[int]] | None:
        """Return the token ids and labels of a chat of which the contents of answers alone are
        trained on (`lema.data.chat.contents`). None and `DataError`: as of `render`."""
        template = self._opened(chat, row)
        trained = self._trained(chat, row)
        if not trained:
            return None
        return Contents(template, self.eot_tokens).tokens(chat.messages, trained, row)

    @cached_property
    def _end_token(self) -> tuple[str, int | None]:
        return end_token(self.tokenizer)

    def _prompt_end(self, chat: Chat, rendered: Rendered, row: Row) -> int:
        """Return where in a rendered chat its training begins that has all words but the prompt's:
        where it parts from what the template writes for the prompt alone, ready for an answer.
        """
        length = chat.prompt_length
        if self.train_on == "all" or length is None:
            return 0
        prompt = rendered.template.render(rendered.messages[:length], row, prompt=True)
        return num_alike(prompt, rendered.text)

    def _trained(self, chat: Chat, row: Row) -> list[int]:
        """The messages to train on."""
        for number, flag in enumerate(chat.flags):
            assistant = chat.messages[number]["role"] == "assistant"
            if flag is False and self.train_on in ALL_WORDS:
                what = "the settings train on all words, but this message must not be trained on"
                raise row.broken(
                    what,
                    at=f"message {number + 1}",
                    how="set train_on: assistant, or remove the flag",
                )
            if flag and not assistant and self.train_on not in ALL_WORDS:
                what = "the message asks to be trained on, but it is not the assistant's"
                raise row.broken(
                    what, at=f"message {number + 1}", how="remove the flag, or set train_on: all"
                )
        answers = chat.answers()
        roles = [message["role"] for message in chat.messages]
        if self.train_on == "last":
            return [number for number in answers if "assistant" not in roles[number + 1 :]]
        if self.train_on == "completion" and chat.prompt_length is None:
            return [number for number in answers if "user" not in roles[number + 1 :]]
        return answers


def _remarks(rendered: Rendered, chat: Chat) -> list[str]:
    """The parts that the template leaves out: of answers, of the messages before them, and the
    tools.
    """
    remarks = []
    if chat.tools and "tools" not in rendered.template.text:
        remarks.append("the chat template does not show the tools")
    hidden = [
        message["role"]
        for number, message in enumerate(rendered.messages)
        if rendered.hidden(number)
    ]
    for role in dict.fromkeys(hidden):
        what = (
            "reasoning, or text next to a tool call,"
            if role == "assistant"
            else f"words of the role {role}"
        )
        remarks.append(f"the chat template leaves out {what} in some messages")
    return remarks


def _ended(rendered: Rendered, span: Span, remarks: list[str]) -> tuple[Span, str]:
    """The last answer with its end token, and this token, if the template ends a turn only with
    the next message.
    """
    start, end = span
    if rendered.has_end_token(end):
        return span, ""
    token = rendered.next_token()
    if token and rendered.generation_spans is not None:
        rendered.ended.add(len(rendered.messages) - 1)
    if not token and not rendered.tail[2].strip():
        remarks.append(
            "the chat template does not end an answer with a token at which a model could stop"
        )
    return (start, len(rendered.text) + len(token) if token else end), token


def check_roles(chat: Chat, template: Template, row: Row) -> None:
    """Refuse unknown roles: most templates write any role, and the words of a misspelt one would
    not be trained on.
    """
    for number, message in enumerate(chat.messages, 1):
        role = message["role"]
        if role not in ROLES and role not in template.text:
            how = (
                f"use one of: {', '.join(ROLES)}; or one that the chat template names; or map it: "
                f"roles: {{assistant: {role}}}"
            )
            raise row.broken(f"the role {role!r} is not known", at=f"message {number}", how=how)


def check_words(row: Row, text: str) -> str:
    """Return a text for a tokenizer. `DataError`: it has a "word" so long that it would take
    gigabytes.
    """
    if len(text) > LONGEST_WORD and any(
        len(word[0]) > LONGEST_WORD for word in re.finditer(r"\w+", text)
    ):
        what = f"a word of more than {LONGEST_WORD:,} characters"
        raise row.broken(what, how="take the row out, or put spaces where words end")
    return text


def encoded(
    tokenizer: "PreTrainedTokenizerBase", text: str, row: Row, *, has_special: bool
) -> list[int]:
    """Return the token ids of a text of a row. With `has_special` a text has its special tokens;
    to any other one those are added that stand before a text (`to_continue`)."""
    check_words(row, text)
    with library_errors(tokenizer.name_or_path):
        if not has_special:
            return to_continue(tokenizer, text)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def to_continue(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the token ids of a text that goes on after its last word. What the tokenizer puts in
    front of texts stands there once, also where the text already begins with it. What it puts
    behind them is left out, because a model that has read the end of a text was never trained on
    what comes then."""
    plain, ids = (
        list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        for special in (False, True)
    )
    starts = range(len(ids) - len(plain) + 1) if plain else ()
    start = next((offset for offset in starts if ids[offset : offset + len(plain)] == plain), None)
    if start is not None:
        del ids[start + len(plain) :]
    bos = tokenizer.bos_token_id
    return ids[int(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos) :]


def tokenizing(
    tokenizer: "PreTrainedTokenizerBase",
) -> Callable[[str, Sequence[Span], bool], tuple[Ids, Learnt]]:
    """Return what gives the token ids of a text, and for each token whether it lies in one of the
    text's spans. A text is tokenised as the model will meet it. A token across the start of a span
    lies in it (it holds the first characters to learn); one across the end does not (it holds
    characters which come later). A text that is `whole` has its special tokens; else they are
    added. A tokenizer written in Python knows no characters: it reads texts again."""
    how = (
        partial(_by_prefixes, tokenizer)
        if encodes_by_itself(tokenizer)
        else Pieces(tokenizer).tokenize
    )
    return library_errors(tokenizer.name_or_path)(how)


def _by_prefixes(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[Span], has_special: bool
) -> tuple[Ids, Learnt]:
    """Compare with the tokens of the text up to each border."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=not has_special, verbose=False)["input_ids"])

    ids = encode(text)
    inside = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        first = num_alike(ids, encode(text[:start]))
        inside[first : len(ids) if stop == len(text) else num_alike(ids, encode(text[:stop]))] = (
            True
        )
    return np.array(ids, np.int32), inside
