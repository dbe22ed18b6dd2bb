"""Finds where each answer of a rendered chat begins, after the model's input, and ends, with its
end token.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lema.data.chat.marks import (
    FIRST,
    TAG,
    Marked,
    Piece,
    has_marks,
    last_mark,
    mark_messages,
    without_marks,
)
from lema.data.chat.template import Template, in_forms, literals_of
from lema.data.files import Row
from lema.data.forms import num_alike
from lema.data.templates.named import end_token
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Rendered", "Span", "TemplateCache", "keep", "render_chat", "signatures_of"]

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

MARK_IT = (
    "mark the assistant's words in the chat template with {% generation %} ... {% "
    "endgeneration %}, "
    "or give each answer its own row as prompt + completion"
)
REWRITTEN = "the chat template rewrites earlier messages, so the assistant's words cannot be found"
_MAX_CACHED = 4096
T = TypeVar("T")
_PLAIN_KEYS = {
    "role",
    "content",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tool_calls",
    "tool_call_id",
    "name",
}


@dataclass
class TemplateCache:
    """What is known of a tokenizer's chat template from chats before, so that it is not rendered
    again for it. `tails` holds what follows the last words of so many messages, with a generation
    prompt and without. It depends on the roles of the messages, on which of a template's own texts
    occur in them, and on nothing else of their words."""

    specials: re.Pattern[str]  # a special token
    tails: dict[Any, tuple[int, str, str]] = field(default_factory=dict)
    # of chats by their shape: a `lema.data.chat.frame.Frame`
    frames: dict[Any, Any] = field(default_factory=dict)

    # whether what a generation prompt gives beyond the beginning of a turn is trained
    trains_prompt: bool = False

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", *, trains_prompt: bool = False
    ) -> "TemplateCache":
        """Nothing is known yet but the tokenizer's special tokens."""
        tokens = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        tokens |= set(tokenizer.all_special_tokens)
        end, number = end_token(tokenizer)
        tokens |= {end} if number is not None else set()
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        return cls(
            re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
            trains_prompt=trains_prompt,
        )


def keep(cache: dict[Any, T], key: object, value: T) -> None:
    """Cache a result; clear the cache when it is too large, which happens for data of many
    shapes.
    """
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


@dataclass
class Rendered:
    """A chat as the template writes it, and where in it the words of each message are."""

    template: Template
    cache: TemplateCache
    row: Row
    messages: list[dict[str, Any]]
    marked: Marked
    text: str
    offsets: dict[int, list[int]]  # of the marks that are there
    tail: tuple[int | None, int, str]  # the last mark, how often it is there, and what follows it
    # what the template itself says is the assistant's; None: it does not say
    generation_spans: list[Span] | None
    # answers whose end token the template leaves out of what it says
    ended: set[int] = field(default_factory=set)

    def span(self, number: int) -> Span:
        """The answer that is message `number`, from the end of its generation prompt to the end of
        its turn. `DataError`: the answer, or a tool call in it, is not there, or is not where the
        template puts it alone."""
        shown = self._shown(number)
        if self.generation_spans is None:
            start = self._start(number, shown)
            end = self._end(number)
        else:
            start, end = self._with_end(number, shown, self._generation_span(number, shown))
        first, last = self._shown_span(shown)
        other_marks = (
            offsets[0]
            for mark, offsets in self.offsets.items()
            if self._piece(mark).message != number
        )
        if not start <= first <= last <= end or any(start < offset < end for offset in other_marks):
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        return start, end

    def has_end_token(self, end: int) -> bool:
        """Whether a special token ends there, but for what the template marks behind it."""
        words = len(self.text) - len(self.tail[2])
        if self.generation_spans is not None:
            return self.cache.specials.search(self.text, words, end) is not None
        return any(match.end() == end for match in self.cache.specials.finditer(self.text, words))

    def next_token(self) -> str:
        """The special token that would follow the last message if another did; empty: there is
        none.
        """
        last = self.messages[-1]
        following = {"role": "tool" if last.get("tool_calls") else "user", "content": "."}
        about = self.template.text, self.template.in_parts, following["role"]
        key = ("next", *about, *self._signatures)
        if key not in self.cache.tails:
            try:
                tail = last_mark(
                    self.template.render([*self.marked.messages, following], self.row)
                )[2]
            except DataError:
                tail = ""
            closing = len(self.tail[2])
            match = (
                self.cache.specials.match(tail, closing) if tail.startswith(self.tail[2]) else None
            )
            keep(self.cache.tails, key, (0, match.group() if match else "", ""))
        return self.cache.tails[key][1]

    def _piece(self, mark: int) -> Piece:
        return self.marked.pieces[mark // 2]

    def is_whole(self) -> bool:
        """Whether the words and the tool calls of every answer are there."""
        return all(
            not self._missing(n)
            for n, message in enumerate(self.messages)
            if message["role"] == "assistant"
        )

    def _missing(self, number: int) -> str:
        """The parts of an answer that the template leaves out, except its reasoning and words at
        a tool call.
        """
        calls = [
            piece for piece in self.marked.of[number] if self.marked.pieces[piece].part == "call"
        ]
        words = [
            piece for piece in self.marked.of[number] if self.marked.pieces[piece].part == "content"
        ]
        if any(2 * piece not in self.offsets for piece in calls):
            return "the tool call"
        return (
            "the assistant's words"
            if words and not calls and 2 * words[-1] not in self.offsets
            else ""
        )

    def _shown(self, number: int) -> list[int]:
        """The marked pieces of an answer that the template shows; refuses one whose words are
        not there.
        """
        at = f"message {number + 1}"
        pieces = self.marked.pieces
        shown = [
            piece
            for piece in self.marked.of[number]
            if 2 * piece in self.offsets and 2 * piece + 1 in self.offsets
        ]
        if missing := self._missing(number):
            what = (
                f"the chat template leaves out {missing}, so that something else would be "
                "trained on as the answer"
            )
            raise self.row.broken(
                what, at=at, how="use a chat_template that writes it, or set train: false"
            )
        if not shown:
            how = "remove the message, or set train: false on it"
            raise self.row.broken(
                "the answer is empty, so only its end token would be trained on", at=at, how=how
            )
        words = {
            piece: self.text[self.offsets[2 * piece][0] : self.offsets[2 * piece + 1][0]]
            for piece in shown
        }
        if any(
            pieces[piece].part == "content" and words[piece] != pieces[piece].words
            for piece in shown
        ):
            raise self.row.broken(
                "the chat template changes the assistant's words", at=at, how=MARK_IT
            )
        return shown

    def hidden(self, number: int) -> bool:
        """Whether something of a message is left out by the template."""
        return any(2 * piece not in self.offsets for piece in self.marked.of[number])

    def _shown_span(self, shown: list[int]) -> Span:
        return min(self.offsets[2 * piece][0] for piece in shown), max(
            self.offsets[2 * piece + 1][0] for piece in shown
        )

    def _generation_span(self, number: int, shown: list[int]) -> Span:
        """What the template marks as this answer: the stretches with its words, and those after
        it without words.
        """
        assert self.generation_spans is not None
        first, last = self._shown_span(shown)
        other_marks = [
            offsets[0] for mark, offsets in self.offsets.items() if mark // 2 not in shown
        ]
        until = min((offset for offset in other_marks if offset >= last), default=len(self.text))
        spans = [
            (start, end)
            for start, end in self.generation_spans
            if end > first
            and start < until
            and not any(start < offset < end for offset in other_marks)
        ]
        if not spans:
            what = "the chat template marks the assistant's words, but not these"
            raise self.row.broken(
                what, at=f"message {number + 1}", how="correct the {% generation %} of the template"
            )
        return min(span[0] for span in spans), max(span[1] for span in spans)

    def _with_end(self, number: int, shown: list[int], marked_span: Span) -> Span:
        """What the template marks as an answer, and the token that ends its turn where the marks
        leave that outside: a model that is not trained on it would not stop."""
        _, last = self._shown_span(shown)
        if self.cache.specials.search(self.text, last, marked_span[1]):
            return marked_span
        # where nothing tells the end of the turn, the marks are all there is
        with suppress(DataError):
            end = self._end(number)
            between = self.text[marked_span[1] : end]
            if (
                end > marked_span[1]
                and between.strip()
                and not self.cache.specials.sub("", between).strip()
            ):
                self.ended.add(number)
                return marked_span[0], end
        return marked_span

    def _start(self, number: int, shown: list[int]) -> int:
        """The end of the generation prompt in a finished turn, which may lack its last part
        (opened reasoning).
        """
        at = f"message {number + 1}"
        if number == 0:
            raise self.row.broken(
                "the chat begins with the assistant, before anything to answer", at=at, how=MARK_IT
            )
        _, anchor, closed, prompted = self._tails(number)
        first = self._shown_span(shown)[0]
        lead = self.marked.pieces[shown[0]].before
        words = first
        first -= len(lead) if lead and self.text.endswith(lead, 0, first) else 0
        if self.text.startswith(prompted, anchor) and anchor + len(prompted) <= first:
            start = anchor + len(prompted)
            # A template without generation prompts writes who speaks with the words; no model is to
            # learn that. What it writes in front of a tool call or of reasoning is the model's.
            headed = prompted == closed and self.marked.pieces[shown[0]].part == "content"
            return first if headed and self.text[start:first].strip() else start
        common = _common(closed, prompted)
        tags = [tag for tag in TAG.finditer(prompted) if tag.start() > common]
        if not self.cache.trains_prompt:
            for tag in reversed(tags):
                offset = _after(prompted[: tag.end()], self.text, anchor)
                if offset is not None and offset <= words:
                    return offset  # the prompt gives the model this tag, so it never writes it
        cuts = [tag.start() for tag in tags]
        for cut in reversed(cuts):
            if self.text.startswith(prompted[:cut], anchor) and anchor + cut <= first:
                return anchor + cut
        raise self.row.broken(REWRITTEN, at=at, how=MARK_IT)

    def _end(self, number: int) -> int:
        """The end of the answer's turn, with its end token; the text after that is never
        generated.
        """
        if number == len(self.messages) - 1:
            mark, _, closing = self.tail
            last = len(self.text) - len(closing)
        else:
            mark, last, closing, _ = self._tails(number + 1)
        if mark is None or self._piece(mark).message != number:
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        length, token = self._closing_parts(closing)
        if self.text.startswith(closing[:length], last):
            end = last + length
            if token or (match := self.cache.specials.match(self.text, end)) is None:
                return end
            return match.end()  # the turn ends where the next one opens: with a token that says so
        # Another token ends a turn that another message follows.
        common = last + len(closing[: length - len(token)])
        match = self.cache.specials.match(self.text, common)
        if (
            not token
            or match is None
            or not self.text.startswith(closing[: length - len(token)], last)
        ):
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        return match.end()

    def _closing_parts(self, closing: str) -> tuple[int, str]:
        """How much of a turn's closing text is generated, and the special tokens at its end;
        none: all of it is.
        """
        end = None
        for match in self.cache.specials.finditer(closing):
            if end is None or closing[end[1] : match.start()].strip():
                # what stood before is a part of the words' frame
                end = (match.start(), match.end())
            elif end[1] == match.start():
                end = (end[0], match.end())
        if end is None or self.cache.specials.sub("", closing[end[1] :]).strip():
            return len(closing), ""
        return end[1], closing[end[0] : end[1]]

    def _tails(self, count: int) -> tuple[int | None, int, str, str]:
        """The last mark of the first `count` messages, its place here, and what follows it there:
        without a generation prompt, and with. There may be another text in front of it, and fewer
        words after it, than here."""
        pieces = self.marked.of[count - 1]
        end = 2 * pieces[-1] + 1 if pieces else -1
        key = None
        if end in self.offsets and self._piece(end).part == "content":
            key = (
                self.template.text,
                self.template.tools is None,
                self.template.in_parts,
                self._piece(end).after,
                *self._signatures[:count],
            )
            if (cached := self.cache.tails.get(key)) is not None and cached[0] <= len(
                self.offsets[end]
            ):
                return end, self.offsets[end][cached[0] - 1], *cached[1:]
        messages = self.marked.messages[:count]
        mark, times, closed = last_mark(self.template.render(messages, self.row))
        with_prompt, _, prompted = last_mark(self.template.render(messages, self.row, prompt=True))
        if with_prompt != mark or (mark is not None and len(self.offsets.get(mark, ())) < times):
            raise self.row.broken(REWRITTEN, at=f"message {count}", how=MARK_IT)
        plain = all(message.keys() <= _PLAIN_KEYS for message in self.messages[:count])
        if key is not None and mark == end and plain:
            keep(self.cache.tails, key, (times, closed, prompted))
        return mark, 0 if mark is None else self.offsets[mark][times - 1], closed, prompted

    @cached_property
    def _signatures(self) -> list[Any]:
        return signatures_of(self.template, self.messages)


def signatures_of(template: Template, messages: Sequence[dict[str, Any]]) -> list[Any]:
    """What of each message a template can go by: its shape, and which of the template's own
    texts are in it.
    """
    signatures = []
    literals = literals_of(template.text)
    for message in messages:
        shape = [(key, type(value), bool(value)) for key, value in message.items()]
        content = str(message.get("content"))
        present = [number for number, literal in enumerate(literals) if literal in content]
        signatures.append((message["role"], *shape, *present))
    return signatures


def _after(prompt: str, text: str, start: int) -> int | None:
    """Return where in a text, from a place on, a prompt ends that it repeats, whatever blanks
    either has; None: it is another text there."""
    at = start
    for word in prompt.split():
        while at < len(text) and text[at].isspace():
            at += 1
        for sign in word:
            while at < len(text) and text[at] != sign and text[at].isspace():
                at += 1
            if at == len(text) or text[at] != sign:
                return None
            at += 1
    return at


def _common(first: str, second: str) -> int:
    """How many characters two texts begin with in common, counted in whole tags."""
    length = num_alike(first, second)
    cut = next(
        (tag.start() for tag in TAG.finditer(second) if tag.start() < length < tag.end()), length
    )
    return min(length, cut)


def render_chat(
    template: Template, cache: TemplateCache, messages: list[dict[str, Any]], row: Row
) -> Rendered:
    """Render a chat in the first form that the template shows in whole, and find the words of its
    messages. `DataError`: the template refuses the chat, or writes another one where words are
    marked."""
    renderings = list[Rendered]()
    for rendered in in_forms(messages, lambda form: _render(template, cache, form, row)):
        if rendered.is_whole():
            return rendered
        renderings.append(rendered)
    return renderings[0]


def _render(
    template: Template, cache: TemplateCache, messages: list[dict[str, Any]], row: Row
) -> Rendered:
    generation_spans = None
    if template.marks_answers:
        text, generation_spans = template.render_marked(messages, row)
    else:
        text = template.render(messages, row)
    if has_marks(text):
        what = (
            "a message has characters of the last private plane of Unicode, which LEMA uses as "
            "marks"
        )
        raise row.broken(what, how=f"remove the characters from U+{FIRST:X} on")
    try:
        marked = mark_messages(messages)
    except OverflowError as error:
        raise row.broken(
            f"the chat is too long to mark its words: {error}", how="split the chat"
        ) from error
    with_marks = template.render(marked.messages, row)
    again, offsets = without_marks(with_marks)
    if again != text:
        how = (
            "use a chat_template that writes messages unchanged, or give each answer as prompt "
            "+ completion"
        )
        raise row.broken(
            "the chat template reads the text of a message and writes something else", how=how
        )
    return Rendered(
        template,
        cache,
        row,
        messages,
        marked,
        text,
        offsets,
        last_mark(with_marks),
        generation_spans,
    )
