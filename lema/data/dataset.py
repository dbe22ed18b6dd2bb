"""Tokenised rows in flat arrays, eight bytes a token, each row knowing where it came from."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from lema.data.columns import IGNORED, num_trained
from lema.data.files import Row
from lema.errors import DataError

__all__ = ["Columns", "Counts", "TokenDataset", "first_rows", "held_out"]

TokenRow = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a data set holds, and what was taken away to make it."""

    rows: int  # rows kept
    truncated: int  # rows among them which were cut to the longest length allowed
    dropped: int  # rows left out, for being too long or for losing all they had to learn when cut
    tokens: int  # tokens kept
    trained_tokens: int  # tokens among them which the loss counts
    left_out: int = 0  # rows that say not to be trained on
    cut_tokens: int = 0  # tokens that truncation cut off the rows kept
    cut_trained: int = 0  # tokens among them which the loss would have counted

    def __str__(self) -> str:
        text = [f"{self.rows:,} rows, {self.tokens:,} tokens of which {self.trained_tokens:,} are trained on"]
        if self.truncated:
            cut = f"{self.cut_tokens:,} tokens cut off, {self.cut_trained:,} of them to be trained on"
            text.append(f"{self.truncated:,} rows truncated ({cut})")
        text += [f"{self.dropped:,} rows dropped"] * bool(self.dropped)
        text += [f"{self.left_out:,} left out, as they say"] * bool(self.left_out)
        return "; ".join(text)


@dataclass(slots=True)
class Columns:
    """Rows while they are being gathered; grows in place, holds no Python object per token."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    trained: "array[int]" = field(default_factory=lambda: array("q"))
    cut: "array[int]" = field(default_factory=lambda: array("i"))  # tokens cut off each row
    cut_trained: "array[int]" = field(default_factory=lambda: array("i"))
    source: "array[int]" = field(default_factory=lambda: array("i"))
    line: "array[int]" = field(default_factory=lambda: array("q"))
    sources: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    left_out: int = 0

    def append(self, row: Row, ids: list[int], labels: list[int], cut: list[int]) -> None:
        """Take in one tokenised row; `cut` has the labels of the tokens that were cut off its end."""
        self.ids.extend(ids)
        self.labels.extend(labels)
        self.ends.append(len(self.ids))
        self.trained.append(num_trained(labels))
        self.cut.append(len(cut))
        self.cut_trained.append(len(cut) - cut.count(IGNORED))
        self.source.append(self.sources.setdefault(row.source, len(self.sources)))
        self.line.append(row.line)


class TokenDataset(Sequence[TokenRow]):
    """A sequence of `{"input_ids": list[int], "labels": list[int]}`; labels are -100 where nothing is learnt.

    Labels stand on their own token, as `transformers` expects; the loss shifts them. The data set has the `rows` of the
    columns in their order, or all; `dropped` is the number that was left out, if it is not the columns'. `notes` are
    what a user should know of the data, a line each.
    """

    def __init__(
        self,
        columns: Columns,
        rows: npt.NDArray[np.int64] | None = None,
        dropped: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._columns, self.notes = columns, notes
        self._ids = np.frombuffer(columns.ids, dtype=np.int32) if columns.ids else np.empty(0, np.int32)
        self._labels = np.frombuffer(columns.labels, dtype=np.int32) if columns.labels else np.empty(0, np.int32)
        self._starts = np.concatenate([[0], np.asarray(columns.ends, dtype=np.int64)])
        self._rows = np.arange(len(columns.ends)) if rows is None else rows
        self._names = list(columns.sources)
        picked = self._rows
        self.counts = Counts(
            rows=len(picked),
            truncated=int((np.asarray(columns.cut, dtype=np.int64)[picked] > 0).sum()),
            dropped=columns.dropped if dropped is None else dropped,
            tokens=int(np.diff(self._starts)[picked].sum()),
            trained_tokens=int(np.asarray(columns.trained, dtype=np.int64)[picked].sum()),
            left_out=columns.left_out if dropped is None else 0,
            cut_tokens=int(np.asarray(columns.cut, dtype=np.int64)[picked].sum()),
            cut_trained=int(np.asarray(columns.cut_trained, dtype=np.int64)[picked].sum()),
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._bounds(index)
        return {"input_ids": self._ids[start:end].tolist(), "labels": self._labels[start:end].tolist()}

    def __repr__(self) -> str:
        return f"TokenDataset({self.counts})"

    def _bounds(self, index: int) -> tuple[int, int]:
        row = self._rows[index]
        return int(self._starts[row]), int(self._starts[row + 1])

    def num_tokens(self, index: int) -> int:
        """The length of row `index` in tokens."""
        start, end = self._bounds(index)
        return end - start

    def origin(self, index: int) -> str:
        """`file:line` of row `index`."""
        row = self._rows[index]
        return f"{self._names[self._columns.source[row]]}:{self._columns.line[row]}"

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> "TokenDataset":
        """The rows at these places, in this order; shares the tokens with this data set."""
        return TokenDataset(self._columns, self._rows[np.asarray(rows, dtype=np.int64)], dropped=0)

    def split(self, eval_split: float | int, seed: int) -> tuple["TokenDataset", "TokenDataset"]:
        """Rows to train on and rows to evaluate on, drawn by the seed alone; each keeps the order of the data.

        The same seed draws the same rows from the same data, on every machine. `eval_split` is a fraction between 0 and
        1, or a number of rows.

        Raises:
            DataError: one of the two would be empty.
        """
        chosen = held_out(len(self), eval_split, seed)
        train = TokenDataset(self._columns, self._rows[~chosen], self.counts.dropped, self.notes)
        train.counts = replace(train.counts, left_out=self.counts.left_out)
        return train, self.select(np.flatnonzero(chosen))

    def fingerprint(self) -> str:
        """A digest of all tokens and labels in order: whether a run resumes on the data it began with."""
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            start, end = self._bounds(index)
            digest.update((end - start).to_bytes(8, "little"))
            digest.update(self._ids[start:end].astype("<i4").tobytes())
            digest.update(self._labels[start:end].astype("<i4").tobytes())
        return digest.hexdigest()


def held_out(total: int, eval_split: float | int, seed: int) -> npt.NDArray[np.bool_]:
    """Say of each of `total` rows whether it is held back to evaluate on; see `TokenDataset.split`.

    Raises:
        DataError: none would be, or all.
    """
    wanted = eval_split if isinstance(eval_split, int) else round(eval_split * total)
    if not 0 < wanted < total:
        what = f"leaves {max(total - wanted, 0)} of {total} rows to train on and {max(wanted, 0)} to evaluate on"
        how = "both need a row at least: choose another split, or give eval_data"
        raise DataError(f"an evaluation split of {eval_split} {what}", where="eval_split", how=how)
    chosen = np.zeros(total, dtype=bool)
    chosen[shuffled(total, seed, stream=2**32)[:wanted]] = True
    return chosen


def shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(count)` that depends on nothing but `(count, seed, stream)`.

    NumPy promises that bit generators and seed sequences give the same bits in every release, and promises no such
    thing of `Generator.permutation` (NEP 19); so the order is that of raw 64-bit draws.
    """
    keys: Any = np.random.PCG64(np.random.SeedSequence([seed % 2**64, stream])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def first_rows(rows: Any, count: int | None) -> Any:
    """Return the first so many rows of a data set, or examples; None: all of them."""
    if rows is None or count is None or len(rows) <= count:
        return rows
    if not hasattr(rows, "select"):
        return [rows[index] for index in range(count)]
    found, notes = rows.select(range(count)), getattr(rows, "notes", None)
    if notes:
        found.notes = notes
    return found
