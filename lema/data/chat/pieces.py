"""Tokens of words that were met before, so that a text is looked up in pieces rather than
tokenised.

Most tokenizers cut a text by a regular expression and tokenise each part separately. Where every
alternative of the expression takes a space as its first character, or in a run of blanks, and
nowhere else, a part begins at each space that follows no blank: whatever stands before it. So the
tokens of a text are those of its pieces between such spaces, one after another, and a piece has the
same tokens in every text. Any other tokenizer is given whole texts.
"""

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

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
# characters of a text that is tokenised whole, because a list of its pieces takes a hundred times
# as much
_LONG = 1 << 20
_LONGEST = 32
_MOST = 1 << 16  # characters of a piece that is kept, and such pieces, of about 200 bytes each

# What expressions are made of: GPT-2's, and those after cl100k_base, o200k_base, Llama 3 and Qwen.
_KIND = r"\\p\{[LMNPS]\w?\}"
_SHORT = r"\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)"
_UNIT = rf"(?:{_KIND}|\[(?:{_KIND})+\]|\[\^\\s(?:{_KIND})*\]|\[\\r\\n/?\])(?:[+*?]|\{{1,3\}})?"
_WORDS = rf"(?: \?|\[\^\\r\\n(?:{_KIND})+\]\?)?(?:{_UNIT})+(?:{_SHORT}\?)?"
_ALTERNATIVE = rf"(?:{_SHORT}|{_WORDS}|\\s\*\[\\r\\n\]\+|\\s\+\(\?!\\S\)|\\s\+)"
_EXPRESSION = re.compile(rf"{_ALTERNATIVE}(?:\|{_ALTERNATIVE})*")


class Pieces(dict[str, bytes]):
    """The pieces of one tokenizer's texts that are known, and their token ids, int32; others are
    made.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        with library_errors(tokenizer.name_or_path):
            # These calls also take away the truncation and padding that a tokenizer's file may ask
            # for.
            around, plain = (
                tokenizer("a", add_special_tokens=special, verbose=False).input_ids
                for special in (True, False)
            )
        self.backend: Any = tokenizer.backend_tokenizer
        self.before = around[: len(around) - len(plain)]  # what is put before each text
        added = tokenizer.added_tokens_decoder.values()
        self.cuts = bool(plain) and self.before + plain == around and _may_cut(self.backend, added)
        self.cuts &= not tokenizer.split_special_tokens
        added_texts = sorted(
            (token.content for token in added if token.content and not token.normalized),
            key=len,
            reverse=True,
        )
        self.added = re.compile(f"({'|'.join(map(re.escape, added_texts)) or '(?!)'})")

    def __missing__(self, piece: str) -> bytes:
        ids = array(
            "i", self.backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        ).tobytes()
        if len(piece) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[piece] = ids
        return ids

    def tokenize(self, text: str, spans: Sequence[Span], has_special: bool) -> tuple[Ids, Learnt]:
        """What `lema.data.chat.tokens.tokenizing` returns does."""
        if not self.cuts or len(text) > _LONG:
            encoding = self.backend.encode(text, add_special_tokens=not has_special)
            ids = np.array(encoding.ids, np.int32)
            last = [end for _, end in encoding.offsets]
            while last and last[-1] == 0:  # put after the text, for no character
                last.pop()
            return ids, _inside(
                len(ids), spans, lambda at: len(last) if at == len(text) else bisect_right(last, at)
            )
        pieces = list[str]()
        for number, part in enumerate(self.added.split(text)):
            pieces += [part] if number % 2 else _PIECE.findall(part)
        parts = [
            array("i", () if has_special else self.before).tobytes(),
            *map(self.__getitem__, pieces),
        ]
        ids = np.frombuffer(b"".join(parts), np.int32)
        offsets = [*accumulate(map(len, pieces))]

        def count(offset: int) -> int:
            which = bisect_right(offsets, offset)
            num_tokens = sum(map(len, parts[: which + 1])) // 4
            if which < len(pieces) and (
                (local := offset - offsets[which] + len(pieces[which])) or not offset
            ):
                encoding = self.backend.encode(pieces[which], add_special_tokens=False)
                num_tokens += bisect_right([end for _, end in encoding.offsets], local)
            return num_tokens

        return ids, _inside(len(ids), spans, count)


def _inside(length: int, spans: Sequence[Span], count: Callable[[int], int]) -> Learnt:
    """Whether each token is in one of the spans; `count` says how many tokens end at a place or
    before.
    """
    inside = np.zeros(length, dtype=bool)
    for start, end in spans:
        inside[count(start) : count(end)] = True
    return inside


def _may_cut(backend: Any, added: Iterable[Any]) -> bool:
    """Whether a part of a text begins at each space that follows no blank."""
    # An added token is looked for before a text is cut, so it must not reach over the border of two
    # pieces.
    across = any(
        token.lstrip or token.rstrip or token.single_word or re.search(r"\S ", token.content)
        for token in added
    )
    try:
        cuts, changes = (
            part and json.loads(part.__getstate__())
            for part in (backend.pre_tokenizer, backend.normalizer)
        )
    except Exception:  # noqa: BLE001 - a part in Python may raise anything through the library
        return False
    *splits, last = (
        (cuts["pretokenizers"] or [None]) if cuts and cuts["type"] == "Sequence" else [cuts]
    )
    across |= bool(
        getattr(backend.model, "dropout", None) or (changes and changes["type"] != "NFC")
    )
    if across or not last or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    plain = all(
        split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        for split in splits
    )
    texts = [split["pattern"].get("Regex", "") for split in splits] if plain else [""]
    blanks = last["use_regex"] or any(text.endswith(r"|\s+") for text in texts)
    return blanks and all(map(_EXPRESSION.fullmatch, texts))
