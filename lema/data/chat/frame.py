"""What a template writes around the words of chats of one shape, so that a chat of a known shape is
rendered once.

The first chat of a shape is looked at in full (`lema.data.chat.turns`), and the text around its
words is kept. A later one is rendered, and must be the same text around its own words, letter by
letter: so their places are known, and every check that the first chat passed holds for it too. A
chat that is anything else is looked at in full itself.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lema.data.chat.marks import TAG, has_marks
from lema.data.chat.pictures import kinds_in
from lema.data.chat.template import Template
from lema.data.chat.turns import Rendered, Span, signatures_of

__all__ = ["Frame", "frame_of", "shape_of"]


@dataclass(frozen=True, slots=True)
class Frame:
    """The texts around words; the words of message `order[n]` stand after text n, and the last
    text ends the chat.
    """

    texts: tuple[str, ...]
    order: tuple[int, ...]
    # of trained text: the text it begins in, where in it, and its end
    spans: tuple[tuple[int, int, int, int], ...]
    ending: str  # what is put after the rendered chat
    remarks: tuple[str, ...]  # what is to be said of chats of this shape

    def spans_in(self, text: str, words: Sequence[str]) -> list[Span] | None:
        """Where in a rendered chat the trained stretches are; None: it is another text around
        these words.
        """
        parts = []
        starts = []
        at = 0
        for before, number in zip(self.texts, self.order, strict=False):
            starts.append(at)
            at += len(before) + len(words[number])
            parts += [before, words[number]]
        if "".join([*parts, self.texts[-1]]) != text:
            return None
        starts.append(at)
        return [
            (starts[first] + start, starts[last] + end) for first, start, last, end in self.spans
        ]


def shape_of(
    template: Template, messages: Sequence[dict[str, Any]]
) -> tuple[Hashable, list[str]] | None:
    """Return what of a chat a template can go by, and the words of its messages, without the blanks
    around them. None is of a chat that has more than a role and one stretch of words in each
    message."""
    words = []
    around = []
    for message in messages:
        text = message["content"]
        if len(message) != 2 or not isinstance(text, str) or not (inner := text.strip()):
            return None
        if template.in_parts or kinds_in(text):
            return None
        if ("<" in text or "[" in text) and TAG.search(text):
            return None
        if not text.isascii() and has_marks(text):
            return None
        words.append(inner)
        around.append(
            None
            if inner == text
            else (text[: text.index(inner)], text[text.index(inner) + len(inner) :])
        )
    tools = template.tools and repr(template.tools)
    return (template.text, tools, *around, *signatures_of(template, messages)), words


def frame_of(
    rendered: Rendered,
    words: Sequence[str],
    spans: Sequence[Span],
    ending: str,
    remarks: Sequence[str],
) -> Frame | None:
    """Return what stands around the words of a chat that was looked at; None: its words are not
    there as they are.
    """
    text = rendered.text
    word_spans = list[tuple[int, int, int]]()
    for number, word in enumerate(words):
        firsts, lasts = (rendered.offsets.get(2 * number + side, ()) for side in (0, 1))
        word_spans += [(first, last, number) for first, last in zip(firsts, lasts, strict=False)]
        if len(firsts) != len(lasts) or any(
            text[first:last] != word for first, last, _ in word_spans[-len(firsts) :]
        ):
            return None
    word_spans.sort()
    starts = [0, *(last for _, last, _ in word_spans)]
    stops = [*(first for first, _, _ in word_spans), len(text)]
    if any(start > end for start, end in zip(starts, stops, strict=True)):
        return None
    borders = list[tuple[int, int]]()
    for offset in (offset for span in spans for offset in span):
        which = bisect_right(starts, offset) - 1
        if offset > stops[which] + len(ending) * (which == len(word_spans)):
            return None  # because it is within words, which are of another length in another chat
        borders.append((which, offset - starts[which]))
    texts = tuple(text[start:end] for start, end in zip(starts, stops, strict=True))
    learnt = tuple((*first, *last) for first, last in zip(borders[::2], borders[1::2], strict=True))
    return Frame(
        texts, tuple(number for _, _, number in word_spans), learnt, ending, tuple(remarks)
    )
