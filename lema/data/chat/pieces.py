"""Tokens of words that were met before, so that a text is looked up in pieces rather than tokenised.

Most tokenizers cut a text by a regular expression and tokenise each part for itself. Where every alternative of the
expression takes a space as its first character, or in a run of blanks, and nowhere else, a part begins at each space
that follows no blank: whatever stands before it. So the tokens of a text are those of its pieces between such spaces,
one after another, and a piece has the same tokens in every text. Of any other tokenizer nothing is looked up.
"""

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lema.data.chat.turns import Span
from lema.storage.modelfiles import library_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Ids", "Learnt", "Pieces"]

Ids: TypeAlias = npt.NDArray[np.int32]
Learnt: TypeAlias = npt.NDArray[np.bool_]
_PIECE = re.compile(r" *[^ ]+(?:(?<=\s) +[^ ]*)*| +")  # up to a space that follows no blank
_LONGEST, _MOST = 32, 1 << 16  # characters of a piece that is kept, and such pieces, of about 200 bytes each

# What expressions are made of: GPT-2's, and those after cl100k_base, o200k_base, Llama 3 and Qwen.
_KIND, _SHORT = r"\\p\{[LMNPS]\w?\}", r"\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)"
_UNIT = rf"(?:{_KIND}|\[(?:{_KIND})+\]|\[\^\\s(?:{_KIND})*\]|\[\\r\\n/?\])(?:[+*?]|\{{1,3\}})?"
_WORDS = rf"(?: \?|\[\^\\r\\n(?:{_KIND})+\]\?)?(?:{_UNIT})+(?:{_SHORT}\?)?"
_ALTERNATIVE = rf"(?:{_SHORT}|{_WORDS}|\\s\*\[\\r\\n\]\+|\\s\+\(\?!\\S\)|\\s\+)"
_EXPRESSION = re.compile(rf"{_ALTERNATIVE}(?:\|{_ALTERNATIVE})*")


class Pieces(dict[str, bytes]):
    """The pieces of one tokenizer's texts that are known, and their token ids, int32; others are made."""

    def __init__(self, backend: Any, added: Iterable[str], before: Sequence[int] | None) -> None:
        self.backend, self.before = backend, before  # tokens that are put before a text; None: some are put after it
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self.added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> Self | None:
        """Nothing is known yet; None: the tokenizer's texts may not be taken in pieces."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(tokenizer)
        if not isinstance(tokenizer, Fast) or (kind.__call__, kind._encode_plus) != (Fast.__call__, Fast._encode_plus):
            return None
        # An added token is looked for before a text is cut, so it must not reach over the border of two pieces.
        added, backend = tokenizer.added_tokens_decoder.values(), tokenizer.backend_tokenizer
        across = any(one.lstrip or one.rstrip or one.single_word or re.search(r"\S ", one.content) for one in added)
        try:
            cuts, changes = (
                one and json.loads(one.__getstate__()) for one in (backend.pre_tokenizer, backend.normalizer)
            )
        except Exception:  # noqa: BLE001 - what the library raises of a part in Python, of which nothing is known
            return None
        varies = getattr(backend.model, "dropout", None) or tokenizer.split_special_tokens
        if across or varies or not _begins_at_spaces(cuts) or (changes and changes["type"] != "NFC"):
            return None
        # These calls also take away the truncation and padding that a tokenizer's file may ask for.
        with library_errors(tokenizer.name_or_path):
            around, plain = (tokenizer("a", add_special_tokens=one, verbose=False).input_ids for one in (True, False))
        before = around[: len(around) - len(plain)]
        own = (one.content for one in added if not one.normalized)
        return cls(backend, own, before if plain and before + plain == around else None)

    def __missing__(self, piece: str) -> bytes:
        (encoding,) = self.backend.encode_batch_fast([piece], add_special_tokens=False)
        found = array("i", encoding.ids).tobytes()
        if len(piece) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[piece] = found
        return found

    def tokenize(self, text: str, spans: Sequence[Span], *, whole: bool) -> tuple[Ids, Learnt]:
        """The token ids of a text, and for each token whether it lies in one of the spans."""
        pieces = list[str]()
        for number, part in enumerate(self.added.split(text)):
            pieces += [part] if number % 2 else _PIECE.findall(part)
        parts = [array("i", () if whole else self.before or ()).tobytes(), *map(self.__getitem__, pieces)]
        ids, ends = np.frombuffer(b"".join(parts), np.int32), [*accumulate(map(len, pieces))]

        def count(place: int) -> int:
            """How many tokens end there or before."""
            which = bisect_right(ends, place)
            found = sum(map(len, parts[: which + 1])) // 4
            if which < len(pieces) and ((local := place - ends[which] + len(pieces[which])) or not place):
                encoding = self.backend.encode(pieces[which], add_special_tokens=False)
                found += bisect_right([end for _, end in encoding.offsets], local)
            return found

        inside = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            inside[count(start) : count(end)] = True
        return ids, inside


def _begins_at_spaces(cuts: Any) -> bool:
    """Whether a part of a text begins at each space that follows no blank."""
    *splits, last = cuts["pretokenizers"] if cuts and cuts["type"] == "Sequence" else [cuts]
    if not last or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    plain = all(one["type"] == "Split" and one["behavior"] == "Isolated" and not one["invert"] for one in splits)
    texts = [one["pattern"].get("Regex", "") for one in splits] if plain else [""]
    blanks = last["use_regex"] or any(text.endswith(r"|\s+") for text in texts)
    return blanks and all(map(_EXPRESSION.fullmatch, texts))
