"""Tokenised rows: token ids in one flat array, four bytes a token, and a table that says what each
row is.

An untrained token is stored as its complement, `~id`, which is negative. A row whose labels are
other tokens than its own, which data that were tokenised beforehand may have, has its labels stored
after its ids.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from lema.data.columns import IGNORED
from lema.data.files import Row
from lema.data.forms import Rows
from lema.data.media.rows import IMAGES, MediaRecord, RowMedia
from lema.data.row_forms import BITS, RowForm
from lema.data.sets.preshuffle import surviving_order
from lema.errors import DataError

__all__ = [
    "CUT_IMAGE",
    "ROW",
    "Columns",
    "Counts",
    "Rows",
    "Skipped",
    "Table",
    "TokenDataset",
    "eval_mask",
    "first_rows",
]

TokenRow = dict[str, list[int]]
Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]
Skipped = dict[str, Any]
"""A row that was cut or dropped: its `file` and `line`, `why`, its `tokens`, and of a cut one
what it lost.
"""

ROW = np.dtype(
    [
        ("start", "<i8"),  # of its first token among all that are stored
        ("line", "<i8"),
        ("length", "<i4"),  # in tokens
        ("trained", "<i4"),  # tokens among them which the loss counts
        ("cut", "<i4"),  # tokens that were cut off its end
        ("cut_trained", "<i4"),  # tokens among them which the loss would have counted
        ("source", "<i4"),  # the number of its file
        # `LABELLED`, and what the reader of the row has to say of it, in the bits below
        (
            "mark",
            "<i4",
        ),
    ]
)
PACKED = struct.Struct("<qqiiiiii")  # the same, for one row
LABELLED = 1 << 16  # the mark of a row whose labels are stored
CUT_IMAGE = "dropped, because the cut would take an image"  # of a row that is too long


@dataclass(frozen=True, slots=True)
class Counts:
    """The contents of a data set, and what was left out of it."""

    rows: int  # rows kept
    truncated: int  # rows among them which were cut to the longest length allowed
    dropped: int  # rows left out, for being too long or for losing all they had to learn when cut
    tokens: int  # tokens kept
    trained_tokens: int  # tokens among them which the loss counts
    left_out: int = 0  # rows that say not to be trained on
    cut_tokens: int = 0  # tokens that truncation cut off the rows kept
    cut_trained: int = 0  # tokens among them which the loss would have counted

    def __str__(self) -> str:
        text = [
            (
                f"{self.rows:,} rows, {self.tokens:,} tokens, {self.trained_tokens:,} of them "
                "trained on"
            )
        ]
        if self.truncated:
            cut = (
                f"{self.cut_tokens:,} tokens cut off, {self.cut_trained:,} of them to be trained on"
            )
            text.append(f"{self.truncated:,} rows truncated ({cut})")
        text += [f"{self.dropped:,} rows dropped"] * bool(self.dropped)
        text += [f"{self.left_out:,} left out because of train: false"] * bool(self.left_out)
        return "; ".join(text)


class Tokens(Protocol):
    """What a slice of gives stored tokens, int32: an array, or a file."""

    def __getitem__(self, where: slice, /) -> npt.NDArray[np.int32]: ...


class Countable(Rows, Protocol):
    """Rows of which the first can be taken without reading any."""

    def first_rows(self, count: int, /) -> Self: ...


class Keeper(Protocol):
    """Keeps a small text in the directory of the tokens, by name."""

    def get(self, name: str) -> str | None: ...

    def put(self, name: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Table:
    """Tokenised rows, in memory or in files."""

    rows: npt.NDArray[Any]  # of dtype `ROW`
    tokens: Tokens
    sources: tuple[str, ...]  # the names of files, by number
    dropped: int = 0
    left_out: int = 0
    notes: tuple[str, ...] = ()  # what a user should know of the data
    skipped: Sequence[Skipped] | Any = ()  # an iterable, which may read a file
    keeper: Keeper | None = None  # None: nothing is kept
    images: Mapping[int, RowMedia] = field(default_factory=dict)  # by the number of the row
    without_images: RowMedia | None = None  # of all other rows, if any row has images


@dataclass(slots=True)
class Columns:
    """Rows while they are being gathered; grows in place, holds no Python object per token."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    rows: bytearray = field(default_factory=bytearray)  # of dtype `ROW`
    sources: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    left_out: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    # as of `lema.data.forms.Remarks`
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    images: dict[int, MediaRecord] = field(default_factory=dict)  # by the number of the row

    def append(
        self,
        row: Row,
        ids: Numbers,
        labels: Numbers,
        cut: Numbers,
        mark: int = 0,
        images: MediaRecord | None = None,
    ) -> None:
        """Take in a tokenised row, lists or arrays; `cut` has the labels of the tokens that were
        cut off its end.
        """
        stored = np.array(ids, dtype=np.int32)
        label_ids = np.asarray(labels, dtype=np.int32)
        learnt = label_ids != IGNORED
        start = len(self.tokens)
        lost = int(np.count_nonzero(np.asarray(cut) != IGNORED))
        if labelled := not np.array_equal(stored[learnt], label_ids[learnt]):
            stored = np.concatenate([stored, label_ids])
        else:
            np.invert(stored, out=stored, where=~learnt)
        self.tokens.frombytes(stored.tobytes())
        if images is not None:
            self.images[len(self.rows) // PACKED.size] = images
        source = self.sources.setdefault(row.source, len(self.sources))
        about = (
            len(ids),
            int(learnt[1:].sum()),
            len(cut),
            lost,
            source,
            mark | row.form | LABELLED * labelled,
        )
        self.rows += PACKED.pack(start, row.line, *about)
        if len(cut):
            self.skip(row, "truncated", len(ids) + len(cut), cut=len(cut), cut_trained=lost)

    def drop(self, row: Row, tokens: int, why: str = "dropped") -> None:
        """Count a row that is left out for its length."""
        self.dropped += 1
        self.skip(row, why, tokens)

    def leave_out(self, row: Row) -> None:
        """Count a row that says not to be trained on."""
        self.left_out += 1
        self.skip(row, "left out because of train: false", 0)

    def skip(self, row: Row, why: str, tokens: int, **more: int) -> None:
        """List a row that is cut or dropped."""
        self.skipped.append(
            {"file": row.source, "line": row.line, "why": why, "tokens": tokens, **more}
        )

    def table(self, notes: tuple[str, ...] = ()) -> Table:
        """The rows that were gathered; nothing more may be appended."""
        tokens = (
            np.frombuffer(self.tokens, dtype=np.int32) if self.tokens else np.empty(0, np.int32)
        )
        rows = np.frombuffer(self.rows, dtype=ROW)
        return Table(
            rows, tokens, tuple(self.sources), self.dropped, self.left_out, notes, self.skipped
        )


class TokenDataset(Sequence[TokenRow]):
    """A sequence of `{"input_ids": list[int], "labels": list[int]}`; labels are -100 where nothing
    is trained. Labels stand on their own token, as `transformers` expects; the loss shifts them.
    The data set has the `rows` of the table in their order, or all. `notes` are for the user, a
    line each; `shares` those it was `mixed` in."""

    def __init__(
        self,
        table: Table,
        rows: npt.NDArray[np.int64] | None = None,
        *,
        part: bool = False,
        notes: tuple[str, ...] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self._table = table
        self._rows = np.arange(len(table.rows)) if rows is None else rows
        self._part = part
        of_table = () if part else table.notes
        self.notes = of_table if notes is None else notes
        self.shares = shares

        def total(name: str) -> int:
            return int(
                (table.rows[name] if rows is None else table.rows[name][rows]).sum(dtype=np.int64)
            )

        cut = table.rows["cut"] if rows is None else table.rows["cut"][rows]
        self.counts = Counts(
            rows=len(self._rows),
            truncated=int(np.count_nonzero(cut)),
            dropped=0 if part else table.dropped,
            tokens=total("length"),
            trained_tokens=total("trained"),
            left_out=0 if part else table.left_out,
            cut_tokens=total("cut"),
            cut_trained=total("cut_trained"),
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
        ids, labels = self._row(index)
        row: dict[str, Any] = {"input_ids": ids.tolist(), "labels": labels.tolist()}
        if (images := self.images(index)) is not None:
            row[IMAGES] = images
        return row

    def __repr__(self) -> str:
        return f"TokenDataset({self.counts})"

    def _row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The ids and labels of a row, int32 `[length]` each."""
        about = self._table.rows[self._rows[index]]
        start = int(about["start"])
        length = int(about["length"])
        labelled = bool(about["mark"] & LABELLED)
        stored = self._table.tokens[start : start + length * (1 + labelled)]
        if labelled:
            return stored[:length], stored[length:]
        learnt = stored >= 0
        return np.where(learnt, stored, ~stored), np.where(learnt, stored, np.int32(IGNORED))

    def images(self, index: int) -> RowMedia | None:
        """The images of row `index`, none in a row without; None: no row of the data has any."""
        return self._table.images.get(int(self._rows[index]), self._table.without_images)

    def image_tokens(self) -> int:
        """How many tokens the images of all rows have."""
        rows = (self.images(index) for index in range(len(self)))
        records = (record for row in rows if row is not None for record in row.records)
        return sum(record.num_tokens for record in records if record is not None)

    @property
    def has_images(self) -> bool:
        """Whether any row of the data has images."""
        return bool(self._table.images)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The length of each row in tokens, int32 `[rows]`; no token is read for it."""
        return cast("npt.NDArray[np.int32]", self._table.rows["length"][self._rows])

    @property
    def trained(self) -> npt.NDArray[np.int32]:
        """How many tokens of each row the loss counts, int32 `[rows]`; no token is read for it."""
        return cast("npt.NDArray[np.int32]", self._table.rows["trained"][self._rows])

    @property
    def marks(self) -> npt.NDArray[np.int32]:
        """What the reader of each row had to say of it, int32 `[rows]`."""
        return cast("npt.NDArray[np.int32]", self._table.rows["mark"][self._rows] & (LABELLED - 1))

    @property
    def forms(self) -> tuple[RowForm, ...]:
        """The forms that the rows were read in, the most frequent first; none of token ids."""
        marks, counts = np.unique(self.marks, return_counts=True)
        bits = {form: counts[(marks & bit) > 0].sum() for form, bit in BITS.items()}
        return tuple(sorted(filter(bits.__getitem__, bits), key=lambda form: -bits[form]))

    def num_tokens(self, index: int) -> int:
        """The length of row `index` in tokens."""
        return int(self._table.rows[self._rows[index]]["length"])

    def is_cut(self, index: int) -> bool:
        """Whether tokens of row `index` were cut off its end."""
        return bool(self._table.rows[self._rows[index]]["cut"])

    def origin(self, index: int) -> str:
        """`file:line` of row `index`."""
        about = self._table.rows[self._rows[index]]
        return f"{self._table.sources[about['source']]}:{about['line']}"

    def num_rows_of(self) -> dict[str, int]:
        """How many rows each file has given."""
        counts = np.bincount(
            self._table.rows["source"][self._rows], minlength=len(self._table.sources)
        )
        return {name: int(count) for name, count in zip(self._table.sources, counts, strict=True)}

    def skipped(self, count: int | None = None) -> Iterator[Skipped]:
        """The rows of the data that were cut, dropped or left out, in their order; the first
        `count` of them.
        """
        return islice(iter(self._table.skipped), count)

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> "TokenDataset":
        """The rows at these places, in this order; shares the tokens with this data set."""
        indices = np.asarray(rows, dtype=np.int64)
        return TokenDataset(self._table, self._rows[indices], part=True, shares=self.shares)

    def first_rows(self, count: int) -> "TokenDataset":
        """The first so many rows, with the notes on all of them."""
        return TokenDataset(
            self._table, self._rows[:count], part=True, notes=self.notes, shares=self.shares
        )

    def mixed(
        self, sets: Mapping[str, str], rates: Mapping[str, float], seed: int
    ) -> "TokenDataset":
        """The rows of several data sets as often as makes up their rates, in an order that the seed
        draws. Each row is there once at least. What a data set lacks for its rate is made up by
        giving all its rows again, and at last some of them. `sets` has the data set of each file,
        `rates` sum to 1. `DataError`: a data set has no rows."""
        names = np.array([sets[source] for source in self._table.sources])[
            self._table.rows["source"][self._rows]
        ]
        rows_by_name = {name: self._rows[names == name] for name in sorted(rates)}
        if empty := [name for name, rows in rows_by_name.items() if not len(rows)]:
            what = f"the data set {empty[0]!r} has no rows"
            how = "give it some, or leave it out"
            raise DataError(what, where="mixture", how=how)
        total = max(
            math.ceil(len(rows) / rates[name] - 1e-9) for name, rows in rows_by_name.items()
        )
        parts = []
        descriptions = []
        for number, (name, rows) in enumerate(rows_by_name.items()):
            num_rows = max(len(rows), round(total * rates[name]))
            repeats, more = divmod(num_rows, len(rows))
            parts += [rows] * repeats + [
                rows[shuffled(len(rows), seed, stream=2**33 + number)[:more]]
            ]
            descriptions.append(f"{name} {num_rows:,} rows, each {num_rows / len(rows):.3g} times")
        order = np.concatenate(parts)
        return TokenDataset(
            self._table,
            order[shuffled(len(order), seed, stream=2**33 - 1)],
            part=self._part,
            notes=(*self.notes, f"an epoch has of {'; of '.join(descriptions)}"),
            shares=dict(rates),
        )

    def preshuffled(self, seed: int) -> "TokenDataset":
        """The same rows in the order of `lema.data.sets.preshuffle`; it counts also the rows
        that were dropped or left out, because axolotl shuffles before it drops any."""
        numbers = {name: number for number, name in enumerate(self._table.sources)}
        missing = [
            (numbers.get(skip["file"], len(numbers)), int(skip["line"]))
            for skip in self._table.skipped
            if skip["why"] != "truncated"
        ]
        table = self._table.rows[self._rows]
        survivors = list(zip(table["source"].tolist(), table["line"].tolist(), strict=True))
        order = surviving_order(survivors, missing, seed)
        return TokenDataset(
            self._table, self._rows[order], part=self._part, notes=self.notes, shares=self.shares
        )

    def split(self, eval_split: float | int, seed: int) -> tuple["TokenDataset", "TokenDataset"]:
        """Rows to train on and rows to evaluate on, drawn by the seed alone; each keeps the order
        of the data. The same seed draws the same rows from the same data, on every machine.
        `eval_split` is a fraction between 0 and 1, or a number of rows. `DataError`: one of the two
        would be empty."""
        chosen = eval_mask(len(self), eval_split, seed)
        train = TokenDataset(self._table, self._rows[~chosen], part=self._part)
        return train, self.select(np.flatnonzero(chosen))

    def fingerprint(self) -> str:
        """A digest of all tokens and labels in order, kept with them: whether a run resumes on
        the same data.
        """
        which = f"fingerprint-{hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()}"
        keeper = self._table.keeper
        if keeper is not None and (stored_digest := keeper.get(which)) is not None:
            return stored_digest
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            ids, labels = self._row(index)
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
            if (images := self.images(index)) is not None:
                digest.update(images.digest)
        if keeper is not None:
            keeper.put(which, digest.hexdigest())
        return digest.hexdigest()


def eval_mask(total: int, eval_split: float | int, seed: int) -> npt.NDArray[np.bool_]:
    """Say of each row whether it is held back to evaluate on (`TokenDataset.split`).
    `DataError`: none is, or all.
    """
    num_eval = eval_split if isinstance(eval_split, int) else round(eval_split * total)
    if not 0 < num_eval < total:
        what = (
            f"leaves {max(total - num_eval, 0)} of {total} rows to train on and "
            f"{max(num_eval, 0)} to evaluate on"
        )
        how = "both need at least one row: choose another split, or set eval_data"
        raise DataError(f"an evaluation split of {eval_split} {what}", where="eval_split", how=how)
    chosen = np.zeros(total, dtype=bool)
    chosen[shuffled(total, seed, stream=2**32)[:num_eval]] = True
    return chosen


def shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(count)` that depends on nothing but `(count, seed, stream)`. NumPy
    promises that bit generators and seed sequences give the same bits in every release, and
    promises no such thing of `Generator.permutation` (NEP 19); so the order is that of raw 64-bit
    draws."""
    keys: Any = np.random.PCG64(np.random.SeedSequence([seed % 2**64, stream])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def lengths_of(rows: Rows) -> npt.NDArray[np.int64]:
    """The tokens of each row, int64 `[rows]`; rows that do not know how many they have are read
    for it.
    """
    if (lengths := getattr(rows, "lengths", None)) is not None:
        return np.asarray(lengths, dtype=np.int64)
    of = getattr(rows, "num_tokens", lambda index: len(rows[index]["input_ids"]))
    return np.fromiter(map(of, range(len(rows))), dtype=np.int64, count=len(rows))


def grouped_by_length(
    order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], per_step: int
) -> npt.NDArray[np.int64]:
    """An order in which the rows of a step, about so many, are about equally long; the longest row
    of all is the first. Rows stay in the part of the order where they were, of up to 50 steps, as
    by `transformers`' function `get_length_grouped_indices`, whose `batch_size` is `per_step`."""
    part = per_step * max(1, min(len(order) // (4 * per_step), 50))
    # stable, so that equals stay in order
    indices = np.lexsort((-lengths[order], np.arange(len(order)) // part))
    longest = int(lengths[order[indices[::part]]].argmax()) * part
    indices[[0, longest]] = indices[[longest, 0]]
    return order[indices]


SomeRows = TypeVar("SomeRows", bound=Countable)


@overload
def first_rows(rows: SomeRows, count: int | None) -> SomeRows: ...
@overload
def first_rows(rows: None, count: int | None) -> None: ...
@overload
def first_rows(rows: Rows, count: int | None) -> Rows: ...
@overload
def first_rows(rows: Rows | None, count: int | None) -> Rows | None: ...
def first_rows(rows: Rows | None, count: int | None) -> Rows | None:
    """Return the first so many rows of a data set, or examples; None: all of them."""
    if rows is None or count is None or len(rows) <= count:
        return rows
    if (first := getattr(rows, "first_rows", None)) is not None:
        selection: Rows = first(count)
    elif (select := getattr(rows, "select", None)) is not None:  # of the library `datasets`
        selection = select(range(count))
    else:
        selection = [rows[index] for index in range(count)]
    return selection
