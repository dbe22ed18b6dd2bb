"""Messages with a mark before and after their words, which shows where a template puts them and
what it leaves out.

Marks are characters that stand for nothing: those at the end of Unicode's last private plane. A
template that asks nothing of the words it writes renders marked messages as it renders them
without, and marks besides. That it does is looked at each time: without its marks the rendering
must be the other one, letter by letter.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from lema.data.chat.pictures import MARKS, kinds_in

__all__ = ["Marked", "Piece", "has_marks", "mark_messages", "without_marks"]

FIRST = 0x108000
LAST = 0x10FFFD
_MARKS = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
# Templates cut messages at tags, such as those around reasoning, and ask whether a message begins
# or ends with one. An image is between words as a tag is.
TAG = re.compile(rf"<[^<>\s][^<>]{{0,40}}>|\[/?[A-Z_]{{2,20}}\]|[{''.join(MARKS.values())}]")
# stretches of one text that are marked; between tags of a long page of HTML there are thousands
_MOST = 16

REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a message between two marks."""

    message: int  # its number, from 0
    part: str  # "content", "reasoning" or "call"
    words: str  # what stands between the marks
    before: str  # what stands in its text before it, such as a tag
    after: str  # what stands in its text after it; the whole of it, should the piece be the last


@dataclass
class Marked:
    """Marked messages, and the pieces in their order: the marks of piece n are 2n and 2n + 1."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    of: list[list[int]] = field(default_factory=list)  # the numbers of the pieces of each message


def mark_messages(messages: list[dict[str, Any]]) -> Marked:
    """Mark the words of each message: its text, its reasoning, and the names of the tools that it
    calls. `OverflowError`: there are more words to mark than marks."""
    marked = Marked()
    for number, message in enumerate(messages):
        changed = dict(message)
        before = len(marked.pieces)
        for key in REASONING:
            if isinstance(message.get(key), str):
                changed[key] = _mark(marked, message[key], number, "reasoning")
        content = message.get("content")
        if isinstance(content, str):
            changed["content"] = _mark(marked, content, number, "content")
        elif content is not None:
            changed["content"] = [
                {**block, "text": _mark(marked, block["text"], number, "content")}
                for block in content
            ]
        if message.get("tool_calls"):
            functions = [(call, call["function"]) for call in message["tool_calls"]]
            changed["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **function,
                        "name": _mark(marked, function["name"], number, "call"),
                    },
                }
                for call, function in functions
            ]
        marked.messages.append(changed)
        marked.of.append(list(range(before, len(marked.pieces))))
    return marked


def _mark(marked: Marked, text: str, message: int, part: str) -> str:
    out = []
    written = 0
    for start, end in _stretches(text):
        number = FIRST + 2 * len(marked.pieces)
        if number >= LAST:
            raise OverflowError(f"it has more than {len(marked.pieces):,} stretches of text")
        words = text[start:end]
        marked.pieces.append(Piece(message, part, words, text[:start].lstrip(), text[end:]))
        out += [text[written:start], chr(number), words, chr(number + 1)]
        written = end
    return "".join([*out, text[written:]])


def _stretches(text: str) -> list[tuple[int, int]]:
    """Where the words between tags begin and end, without blanks around them."""
    spans = []
    at = 0
    borders = (
        [(tag.start(), tag.end()) for tag in TAG.finditer(text)]
        if "<" in text or "[" in text or kinds_in(text)
        else []
    )
    for start, end in [*borders, (len(text), len(text))]:
        words = text[at:start]
        if stripped := words.strip():
            first = at + len(words) - len(words.lstrip())
            spans.append((first, first + len(stripped)))
        at = end
    return spans if len(spans) <= _MOST else [*spans[: _MOST - 1], spans[-1]]


def without_marks(text: str) -> tuple[str, dict[int, list[int]]]:
    """The text without its marks, and the places in it where each mark stood."""
    offsets: dict[int, list[int]] = {}
    parts = []
    at = 0
    length = 0
    for mark in _MARKS.finditer(text):
        parts.append(text[at : mark.start()])
        length += mark.start() - at
        offsets.setdefault(ord(mark.group()) - FIRST, []).append(length)
        at = mark.end()
    return "".join([*parts, text[at:]]), offsets


def has_marks(text: str) -> bool:
    """Whether a text holds characters that are marks."""
    return _MARKS.search(text) is not None


def last_mark(text: str) -> tuple[int | None, int, str]:
    """The last mark of a text, None where it has none; how often it is there; and what follows
    it.
    """
    if not (marks := _MARKS.findall(text)):
        return None, 0, text
    return ord(marks[-1]) - FIRST, marks.count(marks[-1]), text[text.rindex(marks[-1]) + 1 :]
