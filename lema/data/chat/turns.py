"""Finds where each answer of a rendered chat begins, after the model's input, and ends, with its end token."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lema.data.chat.marks import FIRST, TAG, Marked, Piece, has_marks, last_mark, mark_messages, without_marks
from lema.data.chat.template import Template, in_forms, literals_of
from lema.data.files import Row
from lema.data.forms import num_alike
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Known", "Rendered", "Span", "keep", "render_chat", "signatures_of"]

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

MARK_IT = (
    "mark the assistant's words in the chat template with {% generation %} ... {% endgeneration %}, "
    "or give each answer its own row as prompt + completion"
)
REWRITTEN = "the chat template rewrites earlier messages, so the assistant's words cannot be found"
_MOST_KNOWN = 4096
T = TypeVar("T")
_PLAIN_KEYS = {"role", "content", "reasoning_content", "thinking", "reasoning", "tool_calls", "tool_call_id", "name"}


@dataclass
class Known:
    """What is known of a tokenizer's chat template from chats before, so that it is not rendered again for it. `tails`
    holds what follows the last words of so many messages, with a generation prompt and without. It depends on the roles
    of the messages, on which of a template's own texts occur in them, and on nothing else of their words."""

    specials: re.Pattern[str]  # a special token
    tails: dict[Any, tuple[int, str, str]] = field(default_factory=dict)
    frames: dict[Any, Any] = field(default_factory=dict)  # of chats by their shape: a `lema.data.chat.frame.Frame`

    trains_prompt: bool = False  # whether what a generation prompt gives beyond the beginning of a turn is trained

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, trains_prompt: bool = False) -> "Known":
        """Nothing is known yet but the tokenizer's special tokens."""
        tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokens |= set(tokenizer.all_special_tokens)
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), trains_prompt=trains_prompt)


def keep(found: dict[Any, T], key: Any, value: T) -> None:
    """Cache a result; clear the cache when it is too large, which happens for data of many shapes."""
    if len(found) >= _MOST_KNOWN:
        found.clear()
    found[key] = value


@dataclass
class Rendered:
    """A chat as the template writes it, and where in it the words of each message are."""

    template: Template
    known: Known
    row: Row
    messages: list[dict[str, Any]]
    marked: Marked
    text: str
    places: dict[int, list[int]]  # of the marks that are there
    tail: tuple[int | None, int, str]  # the last mark, how often it is there, and what follows it
    said: list[Span] | None  # what the template itself says is the assistant's; None: it does not say
    ended: set[int] = field(default_factory=set)  # answers whose end token the template leaves out of what it says

    def span(self, number: int) -> Span:
        """The answer that is message `number`, from the end of its generation prompt to the end of its turn.
        `DataError`: the answer, or a tool call in it, is not there, or is not where the template puts it alone."""
        shown = self._shown(number)
        if self.said is None:
            start, end = self._start(number, shown), self._end(number)
        else:
            start, end = self._with_end(number, shown, self._said(number, shown))
        first, last = self._ends(shown)
        others = (places[0] for mark, places in self.places.items() if self._piece(mark).message != number)
        if not start <= first <= last <= end or any(start < place < end for place in others):
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        return start, end

    def ends_in_token(self, end: int) -> bool:
        """Whether a special token ends there, but for what the template marks behind it."""
        words = len(self.text) - len(self.tail[2])
        if self.said is not None:
            return self.known.specials.search(self.text, words, end) is not None
        return any(found.end() == end for found in self.known.specials.finditer(self.text, words))

    def next_token(self) -> str:
        """The special token that would follow the last message if another did; empty: there is none."""
        last = self.messages[-1]
        following = {"role": "tool" if last.get("tool_calls") else "user", "content": "."}
        key = ("next", self.template.text, following["role"], *self._signatures)
        if key not in self.known.tails:
            try:
                tail = last_mark(self.template.render([*self.marked.messages, following], self.row))[2]
            except DataError:
                tail = ""
            closing = len(self.tail[2])
            found = self.known.specials.match(tail, closing) if tail.startswith(self.tail[2]) else None
            keep(self.known.tails, key, (0, found.group() if found else "", ""))
        return self.known.tails[key][1]

    def _piece(self, mark: int) -> Piece:
        return self.marked.pieces[mark // 2]

    def is_whole(self) -> bool:
        """Whether the words and the tool calls of every answer are there."""
        return all(not self._missing(n) for n, one in enumerate(self.messages) if one["role"] == "assistant")

    def _missing(self, number: int) -> str:
        """The parts of an answer that the template leaves out, except its reasoning and words at a tool call."""
        calls = [one for one in self.marked.of[number] if self.marked.pieces[one].part == "call"]
        words = [one for one in self.marked.of[number] if self.marked.pieces[one].part == "content"]
        if any(2 * one not in self.places for one in calls):
            return "the tool call"
        return "the assistant's words" if words and not calls and 2 * words[-1] not in self.places else ""

    def _shown(self, number: int) -> list[int]:
        """The marked pieces of an answer that the template shows; refuses one whose words are not there."""
        at, pieces = f"message {number + 1}", self.marked.pieces
        shown = [one for one in self.marked.of[number] if 2 * one in self.places and 2 * one + 1 in self.places]
        if missing := self._missing(number):
            what = f"the chat template leaves out {missing}, so that something else would be trained on as the answer"
            raise self.row.broken(what, at=at, how="use a chat_template that writes it, or set train: false")
        if not shown:
            how = "remove the message, or set train: false on it"
            raise self.row.broken("the answer is empty, so only its end token would be trained on", at=at, how=how)
        words = {one: self.text[self.places[2 * one][0] : self.places[2 * one + 1][0]] for one in shown}
        if any(pieces[one].part == "content" and words[one] != pieces[one].words for one in shown):
            raise self.row.broken("the chat template changes the assistant's words", at=at, how=MARK_IT)
        return shown

    def hidden(self, number: int) -> bool:
        """Whether something of a message is left out by the template."""
        return any(2 * piece not in self.places for piece in self.marked.of[number])

    def _ends(self, shown: list[int]) -> Span:
        return min(self.places[2 * one][0] for one in shown), max(self.places[2 * one + 1][0] for one in shown)

    def _said(self, number: int, shown: list[int]) -> Span:
        """What the template marks as this answer: the stretches with its words, and those after it without words."""
        assert self.said is not None
        first, last = self._ends(shown)
        others = [places[0] for mark, places in self.places.items() if mark // 2 not in shown]
        until = min((place for place in others if place >= last), default=len(self.text))
        spans = [
            (start, end)
            for start, end in self.said
            if end > first and start < until and not any(start < place < end for place in others)
        ]
        if not spans:
            what = "the chat template marks the assistant's words, but not these"
            raise self.row.broken(what, at=f"message {number + 1}", how="correct the {% generation %} of the template")
        return min(one[0] for one in spans), max(one[1] for one in spans)

    def _with_end(self, number: int, shown: list[int], said: Span) -> Span:
        """What the template marks as an answer, and the token that ends its turn where the marks leave that outside:
        a model that is not trained on it would not stop."""
        _, last = self._ends(shown)
        if self.known.specials.search(self.text, last, said[1]):
            return said
        with suppress(DataError):  # where nothing tells the end of the turn, the marks are all there is
            end = self._end(number)
            between = self.text[said[1] : end]
            if end > said[1] and between.strip() and not self.known.specials.sub("", between).strip():
                self.ended.add(number)
                return said[0], end
        return said

    def _start(self, number: int, shown: list[int]) -> int:
        """The end of the generation prompt in a finished turn, which may lack its last part (opened reasoning)."""
        at = f"message {number + 1}"
        if number == 0:
            raise self.row.broken("the chat begins with the assistant, before anything to answer", at=at, how=MARK_IT)
        _, anchor, closed, prompted = self._tails(number)
        first, lead = self._ends(shown)[0], self.marked.pieces[shown[0]].before
        words = first
        first -= len(lead) if lead and self.text.endswith(lead, 0, first) else 0
        if self.text.startswith(prompted, anchor) and anchor + len(prompted) <= first:
            start = anchor + len(prompted)
            # A template without generation prompts writes who speaks with the words; no model is to learn that. What it
            # writes in front of a tool call or of reasoning is the model's.
            headed = prompted == closed and self.marked.pieces[shown[0]].part == "content"
            return first if headed and self.text[start:first].strip() else start
        given = _common(closed, prompted)
        tags = [tag for tag in TAG.finditer(prompted) if tag.start() > given]
        if not self.known.trains_prompt:
            for tag in reversed(tags):
                place = _after(prompted[: tag.end()], self.text, anchor)
                if place is not None and place <= words:
                    return place  # the prompt gives the model this tag, so it never writes it
        cuts = [tag.start() for tag in tags]
        for cut in reversed(cuts):
            if self.text.startswith(prompted[:cut], anchor) and anchor + cut <= first:
                return anchor + cut
        raise self.row.broken(REWRITTEN, at=at, how=MARK_IT)

    def _end(self, number: int) -> int:
        """The end of the answer's turn, with its end token; the text after that is never generated."""
        if number == len(self.messages) - 1:
            mark, _, closing = self.tail
            last = len(self.text) - len(closing)
        else:
            mark, last, closing, _ = self._tails(number + 1)
        if mark is None or self._piece(mark).message != number:
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        length, token = self._turn(closing)
        if self.text.startswith(closing[:length], last):
            end = last + length
            if token or (found := self.known.specials.match(self.text, end)) is None:
                return end
            return found.end()  # the turn ends where the next one opens: with a token that says so
        # Another token ends a turn that another message follows.
        common = last + len(closing[: length - len(token)])
        found = self.known.specials.match(self.text, common)
        if not token or found is None or not self.text.startswith(closing[: length - len(token)], last):
            raise self.row.broken(REWRITTEN, at=f"message {number + 1}", how=MARK_IT)
        return found.end()

    def _turn(self, closing: str) -> tuple[int, str]:
        """How much of a turn's closing text is generated, and the special tokens at its end; none: all of it is."""
        end = None
        for found in self.known.specials.finditer(closing):
            if end is None or closing[end[1] : found.start()].strip():
                end = (found.start(), found.end())  # what stood before is a part of the words' frame
            elif end[1] == found.start():
                end = (end[0], found.end())
        if end is None or self.known.specials.sub("", closing[end[1] :]).strip():
            return len(closing), ""
        return end[1], closing[end[0] : end[1]]

    def _tails(self, count: int) -> tuple[int | None, int, str, str]:
        """The last mark of the first `count` messages, its place here, and what follows it there: without a generation
        prompt, and with. There may be another text in front of it, and fewer words after it, than here."""
        own = self.marked.of[count - 1]
        end, key = 2 * own[-1] + 1 if own else -1, None
        if end in self.places and self._piece(end).part == "content":
            key = (self.template.text, self.template.tools is None, self._piece(end).after, *self._signatures[:count])
            if (known := self.known.tails.get(key)) is not None and known[0] <= len(self.places[end]):
                return end, self.places[end][known[0] - 1], *known[1:]
        messages = self.marked.messages[:count]
        mark, times, closed = last_mark(self.template.render(messages, self.row))
        with_prompt, _, prompted = last_mark(self.template.render(messages, self.row, prompt=True))
        if with_prompt != mark or (mark is not None and len(self.places.get(mark, ())) < times):
            raise self.row.broken(REWRITTEN, at=f"message {count}", how=MARK_IT)
        plain = all(message.keys() <= _PLAIN_KEYS for message in self.messages[:count])
        if key is not None and mark == end and plain:
            keep(self.known.tails, key, (times, closed, prompted))
        return mark, 0 if mark is None else self.places[mark][times - 1], closed, prompted

    @cached_property
    def _signatures(self) -> list[Any]:
        return signatures_of(self.template, self.messages)


def signatures_of(template: Template, messages: Sequence[dict[str, Any]]) -> list[Any]:
    """What of each message a template can go by: its shape, and which of the template's own texts are in it."""
    found, literals = [], literals_of(template.text)
    for message in messages:
        shape = [(key, type(value), bool(value)) for key, value in message.items()]
        content = str(message.get("content"))
        held = [number for number, one in enumerate(literals) if one in content]
        found.append((message["role"], *shape, *held))
    return found


def _after(prompt: str, text: str, start: int) -> int | None:
    """Return where in a text, from a place on, a prompt ends that it repeats, whatever blanks either has; None: it is
    another text there."""
    at = start
    for one in prompt.split():
        while at < len(text) and text[at].isspace():
            at += 1
        for sign in one:
            while at < len(text) and text[at] != sign and text[at].isspace():
                at += 1
            if at == len(text) or text[at] != sign:
                return None
            at += 1
    return at


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common, counted in whole tags."""
    length = num_alike(one, other)
    cut = next((tag.start() for tag in TAG.finditer(other) if tag.start() < length < tag.end()), length)
    return min(length, cut)


def render_chat(template: Template, known: Known, messages: list[dict[str, Any]], row: Row) -> Rendered:
    """Render a chat in the first form that the template shows in whole, and find the words of its messages.
    `DataError`: the template refuses the chat, or writes another one where words are marked."""
    found = list[Rendered]()
    for rendered in in_forms(messages, lambda form: _render(template, known, form, row)):
        if rendered.is_whole():
            return rendered
        found.append(rendered)
    return found[0]


def _render(template: Template, known: Known, messages: list[dict[str, Any]], row: Row) -> Rendered:
    said = None
    if template.marks_answers:
        text, said = template.render_marked(messages, row)
    else:
        text = template.render(messages, row)
    if has_marks(text):
        what = "a message has characters of the last private plane of Unicode, which LEMA uses as marks"
        raise row.broken(what, how=f"remove the characters from U+{FIRST:X} on")
    try:
        marked = mark_messages(messages)
    except OverflowError as error:
        raise row.broken(f"the chat is too long to mark its words: {error}", how="split the chat") from error
    with_marks = template.render(marked.messages, row)
    again, places = without_marks(with_marks)
    if again != text:
        how = "use a chat_template that writes messages unchanged, or give each answer as prompt + completion"
        raise row.broken("the chat template reads the text of a message and writes something else", how=how)
    return Rendered(template, known, row, messages, marked, text, places, last_mark(with_marks), said)
