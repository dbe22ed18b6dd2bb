"""Batches whose order is a pure function of seed and epoch, so that a run resumes at any step
without replay.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from lema.data.columns import IGNORED
from lema.data.dataset import Rows, grouped_by_length, lengths_of
from lema.data.media.rows import IMAGES, RowMedia
from lema.data.mixing.order import RowOrder, Shuffle, row_order
from lema.errors import DataError

__all__ = ["OF_ROWS", "Batch", "Batches", "collate", "dealt", "split_batch"]

TokenRow = Mapping[str, Sequence[int]]
Numbers = npt.NDArray[np.int64]
# columns with one or several values for each row, not for each token
OF_ROWS = frozenset({"example"})


class Batch(TypedDict):
    """One batch: `input_ids`, `labels` and `attention_mask` are int64 `[batch, sequence]`.
    `attention_mask` is absent when no row is padded. `images` is there if any row of the data has
    some. Packs have `position_ids` instead, 0 where a
    row begins and at padding."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: NotRequired[torch.Tensor]
    position_ids: NotRequired[torch.Tensor]
    images: NotRequired[RowMedia]


def dealt(
    lengths: Sequence[int],
    rank: int = 0,
    size: int = 1,
    at_once: int | None = None,
    batches: int = 1,
    tokens: int | None = None,
    *,
    by_length: bool = True,
) -> list[list[int]]:
    """Return the micro-batches of process `rank` of `size`, as places in the `lengths` of a step's
    rows. Rows are put together by length, the longest first; those of one length stay in order.
    Micro-batches of `at_once` rows are dealt out in turn, whatever the number of processes; the
    last get none where there are too few. None: as many rows as make one for each process and each
    of the `batches` that the rows are. With `tokens` in place of `at_once`, the rows of a
    micro-batch times its longest are so many at most, unless it is one row, and no more than a
    quarter is padding. Without `by_length` all rows stay in order."""
    order = list(range(len(lengths)))
    if by_length:
        order.sort(key=lambda index: -lengths[index])
    if tokens is not None:
        return _within(order, lengths, tokens)[rank::size]
    if at_once is None:
        few, more = divmod(len(order), min(len(order), size * batches))
        starts = list(range(0, more * (few + 1), few + 1)) + list(
            range(more * (few + 1), len(order), few)
        )
    else:
        starts = list(range(0, len(order), at_once))
    return [
        order[first:last] for first, last in zip(starts, [*starts[1:], len(order)], strict=True)
    ][rank::size]


def _within(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut rows, the longest first, into micro-batches of so many tokens, and return the largest
    of these first.
    """
    groups: list[list[int]] = []
    computed = real_tokens = 0
    for index in order:
        computed = computed + (lengths[groups[-1][0]] if groups else 0)
        real_tokens = real_tokens + lengths[index]
        if not groups or computed > tokens or 4 * real_tokens < 3 * computed:
            groups.append([])
            computed = real_tokens = lengths[index]
        groups[-1].append(index)
    return sorted(groups, key=lambda group: -len(group) * lengths[group[0]])


def split_batch(batch: Mapping[str, Any], rows: int | None) -> list[dict[str, torch.Tensor]]:
    """Cut a batch into micro-batches of at most `rows` rows, each as wide as its longest; None: one
    micro-batch. Columns at the end that no row of the micro-batch attends to or learns are left
    out."""
    values: dict[str, Any] = {
        name: value for name, value in batch.items() if isinstance(value, torch.Tensor | RowMedia)
    }
    size = len(values["input_ids"])
    step = rows or size
    parts = [
        {name: value[at : at + step] for name, value in values.items()}
        for at in range(0, size, step)
    ]
    for prefix, part in ((prefix, part) for prefix in ("", "mismatched_") for part in parts):
        if (mask := part.get(f"{prefix}attention_mask")) is None:
            continue
        labels = part.get(f"{prefix}labels")
        used = mask != 0 if labels is None else (mask != 0) | (labels != IGNORED)
        columns = np.flatnonzero(used.any(dim=0).cpu().numpy())
        width = mask.shape[1]
        end = int(columns[-1]) + 1 if columns.size else width
        # By their names as well as their widths, because two kinds of rows may be equally wide.
        for name in [
            name for name in part.keys() - OF_ROWS if name.startswith("mismatched_") == bool(prefix)
        ]:
            tensor = part[name]
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.dim() == 2 and tensor.shape[1] == width:
                part[name] = tensor[:, :end]
    return parts


def collate(
    rows: Sequence[TokenRow],
    pad_token_id: int = 0,
    *,
    untrained: bool = False,
    length: int | None = None,
) -> Batch:
    """Rows side by side, padded on the right to the longest of them, or to `length`; `untrained`:
    none of them need train anything. Padding carries label -100 and attention 0, so which token
    stands there changes nothing. `DataError`: no rows, a row without tokens, labels of another
    length, or no token to train on in the whole batch."""
    lengths = [len(row["input_ids"]) for row in rows]
    if not rows or min(lengths) == 0:
        raise DataError("a batch needs rows, and a row needs tokens", where="collate")
    shape = (len(rows), length or max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    for index, (row, size) in enumerate(zip(rows, lengths, strict=True)):
        if len(row["labels"]) != size:
            raise DataError(
                f"{size} input_ids but {len(row['labels'])} labels",
                where=f"row {index} of the batch",
            )
        input_ids[index, :size] = torch.as_tensor(row["input_ids"], dtype=torch.long)
        labels[index, :size] = torch.as_tensor(row["labels"], dtype=torch.long)
    if not untrained and not bool((labels[:, 1:] != IGNORED).any()):
        how = "every label after the first is -100, so its loss has no tokens"
        raise DataError("a batch has no token to train on", where="collate", how=how)
    batch = Batch(input_ids=input_ids, labels=labels)
    if "position_ids" in rows[0]:
        # No mask, because it would hide which row a token is of. At padding they are 0: each token
        # is a row.
        positions = [
            pad(torch.as_tensor(row["position_ids"]), (0, shape[1] - len(row["labels"])))
            for row in rows
        ]
        batch["position_ids"] = torch.stack(positions)
    elif min(lengths) != shape[1]:
        mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        batch["attention_mask"] = mask.long()
    of_rows: list[Any] = [row.get(IMAGES) for row in rows]
    images = RowMedia.joined(of_rows) if any(of_rows) else None
    if images is not None:
        batch["images"] = images
    return batch


class _RowLengths:
    """How many tokens the rows of a data set have, each of them read once for that.

    Args:
        dataset: the rows.
        multiple: rows count as so many tokens, or a multiple of it.
        every: whether all lengths are needed at once.
    """

    def __init__(self, dataset: Rows, multiple: int, *, every: bool) -> None:
        self._dataset = dataset
        self._multiple = multiple
        # 0: of a row that was not read yet
        self.known: Numbers = np.zeros(len(dataset), dtype=np.int64)
        if every:
            self.known = -(-lengths_of(dataset) // multiple) * multiple
        # rows that were read for their length, and not collated yet
        self._cached_rows: dict[int, TokenRow] = {}

    def of(self, row: int) -> int:
        """Return the tokens of a row, which is read once for them and its batch, because making
        one may take time.
        """
        if not self.known[row]:
            num_tokens = getattr(self._dataset, "num_tokens", None)
            if num_tokens is None:
                self._cached_rows[row] = self._dataset[row]
            tokens = (
                len(self._cached_rows[row]["input_ids"]) if num_tokens is None else num_tokens(row)
            )
            self.known[row] = -(-tokens // self._multiple) * self._multiple
        return int(self.known[row])

    def read(self, groups: Sequence[Sequence[int]]) -> list[list[TokenRow]]:
        """Return the rows of a step, by micro-batch."""
        rows = [
            [
                self._cached_rows[row] if row in self._cached_rows else self._dataset[row]
                for row in group
            ]
            for group in groups
        ]
        self._cached_rows.clear()  # also of those that other processes have
        return rows


@dataclass(frozen=True)
class _Epoch:
    """One pass over the data."""

    number: int
    order: Numbers  # the rows
    starts: Numbers  # where in the order each batch begins, and where the last ends
    token_ends: Numbers | None = None  # the tokens up to each row's end, of batches of tokens


class _Epochs:
    """The order of the rows in each epoch, and where in it each batch begins.

    Args:
        lengths: the tokens of the rows: all of them, if batches are of `tokens` or rows `alike`.
        batch_size: rows of a batch.
        row_order: of the rows in each epoch.
        tokens: of a batch, in place of `batch_size`.
        alike: of so many rows that follow each other the longest are put together; 0: none.
    """

    def __init__(
        self,
        lengths: Numbers,
        batch_size: int,
        row_order: RowOrder,
        tokens: int | None,
        alike: int,
    ) -> None:
        self._lengths = lengths
        self._batch_size = batch_size
        self._row_order = row_order
        self._tokens = tokens
        self._alike = alike
        self._drawn: _Epoch | None = None
        self._before = [0]  # batches before each epoch, as far as it is known

    def before(self, epoch: int) -> int:
        """How many batches come before an epoch."""
        if self._tokens is None:
            return epoch * -(-len(self._lengths) // self._batch_size)
        while len(self._before) <= epoch:
            number = len(self._before) - 1
            self._before.append(self._before[-1] + len(self.of(number).starts) - 1)
        return self._before[epoch]

    def position(self, step: int) -> tuple[int, int]:
        """The epoch of batch `step`, and the batch's number in it, from 0."""
        if step < 0:
            raise IndexError(f"steps count from 0, not {step}")
        if self._tokens is None:
            return divmod(step, self.before(1))
        while self.before(len(self._before) - 1) <= step:
            self.before(len(self._before))
        epoch = bisect_right(self._before, step) - 1
        return epoch, step - self._before[epoch]

    def num_batches(self, epochs: float) -> int:
        """How many batches so many epochs have, one at least."""
        # of rows, all epochs are alike
        full_epochs = int(epochs) if self._tokens is not None else 0
        epoch_batches = self.before(full_epochs + 1) - self.before(full_epochs)
        return max(1, self.before(full_epochs) + round((epochs - full_epochs) * epoch_batches))

    def of(self, number: int) -> _Epoch:
        """Return an epoch; the last one is remembered."""
        if self._drawn is None or self._drawn.number != number:
            self._drawn = self._draw(number)
        return self._drawn

    def _draw(self, number: int) -> _Epoch:
        count = len(self._lengths)
        order = self._row_order(number)
        if self._alike:
            order = grouped_by_length(order, self._lengths, self._alike)
        if self._tokens is None:
            starts = np.append(np.arange(0, count, self._batch_size), count)
            return _Epoch(number, order, starts)
        token_ends = np.cumsum(self._lengths[order])
        return _Epoch(number, order, _starts(token_ends, self._tokens), token_ends)


class Batches:
    """The batches of a run, each reached directly by its step. Steps count from 0 over all epochs.
    Each epoch visits every row once, in an order that it decides with `seed` alone, or in that of
    the data; its last batch is smaller where the rows do not divide evenly. Process `rank` of
    `size` gets its share of each batch: see `dealt`. `DataError`: the data set is empty, or
    `batch_size` is below 1.

    Args:
        dataset: a `TokenDataset`, or any sequence of rows with `input_ids` and `labels`.
        seed: decides the order of the rows, with the number of the epoch.
        shuffle: false: the order of the data. "transformers": the order in which its Trainer draws
            rows (`lema.data.mixing.order`), and each batch stays in that order, whatever its
            lengths.
            "sequential": the same in the order of the data.
        micro_batch_size: rows computed at once; None: a process's whole share of a batch.
        separate_batches: put together rows of one batch only, so that its micro-batches are the
            same in whatever step it is.
        tokens: of a batch, in place of `batch_size`: it takes the next rows until one more would
            pass that, and one at least. Epochs may then be of different numbers of batches.
        micro_batch_tokens: computed at once, in place of `micro_batch_size`: see `dealt`.
        multiple: rows count as so many tokens, or a multiple of it, because they are made that
            long.
        per_step: batches of a step, whose rows are to be about equally long; 0: in any order.
    """

    def __init__(
        self,
        dataset: Rows,
        batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = True,
        pad_token_id: int = 0,
        *,
        rank: int = 0,
        size: int = 1,
        micro_batch_size: int | None = None,
        separate_batches: bool = False,
        tokens: int | None = None,
        micro_batch_tokens: int | None = None,
        multiple: int = 1,
        per_step: int = 0,
    ) -> None:
        if not len(dataset):
            raise DataError("the data set is empty", how="give at least one row")
        if batch_size < 1:
            raise DataError(
                f"a batch cannot have {batch_size} rows", where="batch_size", how="use 1 or more"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.pad_token_id = pad_token_id
        self.rank = rank
        self.size = size
        self.micro_batch_size = micro_batch_size
        self._example_rows = getattr(dataset, "rows_each", 1)
        # what is trained on of examples is a mean over their batch
        self._by_length = isinstance(shuffle, bool)
        self._separate_batches = (
            separate_batches or hasattr(dataset, "batch_of") or not self._by_length
        )
        self._micro_batch_tokens = micro_batch_tokens
        every = tokens is not None or per_step > 0
        self._lengths = _RowLengths(dataset, multiple, every=every)
        lengths = self._lengths.known
        rows = batch_size if tokens is None else tokens // max(1.0, float(lengths.mean()))
        alike = max(1, int(rows)) * per_step
        order = row_order(len(lengths), seed, shuffle)
        self._epochs = _Epochs(lengths, batch_size, order, tokens, alike)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the first pass over the data; in any, unless they are of so many tokens."""
        return self.before(1)

    def before(self, epoch: int) -> int:
        """How many batches come before an epoch."""
        return self._epochs.before(epoch)

    def position(self, step: int) -> tuple[int, int]:
        """The epoch of batch `step`, and the batch's number in it, from 0."""
        return self._epochs.position(step)

    def num_batches(self, epochs: float) -> int:
        """How many batches so many epochs have, one at least."""
        return self._epochs.num_batches(epochs)

    def rows(self, step: int) -> list[int]:
        """The places in the data set of the rows of batch `step`."""
        number, batch = self.position(step)
        epoch = self._epochs.of(number)
        return [int(row) for row in epoch.order[epoch.starts[batch] : epoch.starts[batch + 1]]]

    def tokens_before(self, step: int) -> int:
        """How many tokens batches of so many tokens have, all before batch `step`."""
        number, batch = self.position(step)
        epoch = self._epochs.of(number)
        ends = epoch.token_ends
        assert ends is not None, "batches of rows were asked for their tokens"
        first = epoch.starts[batch]
        return number * int(ends[-1]) + int(ends[first - 1] if first else 0)

    def groups(self, steps: Sequence[int]) -> list[list[int]]:
        """The places in the data set of this process's rows of some batches, by micro-batch: see
        `dealt`.
        """
        if self._separate_batches and len(steps) > 1:
            return [group for step in steps for group in self.groups([step])]
        rows = [row for step in steps for row in self.rows(step)]
        lengths = [self._lengths.of(row) for row in rows] if len(rows) > 1 else [1]
        at_once = (
            None
            if self.micro_batch_size is None
            else max(1, self.micro_batch_size // self._example_rows)
        )
        # At most a batch, because memory is planned for that, however many batches a step has.
        limit = None if at_once is None else min(at_once, self.batch_size)
        micro_batches = dealt(
            lengths,
            self.rank,
            self.size,
            limit,
            len(steps),
            self._micro_batch_tokens,
            by_length=self._by_length,
        )
        return [[rows[index] for index in group] for group in micro_batches]

    def micro_batches(self, steps: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """This process's rows of some batches, as what is computed at once: `groups`, each as wide
        as its longest row. Examples of several rows are cut further where not even one may be
        computed at once."""
        if (batch_of := getattr(self.dataset, "batch_of", None)) is None:
            read = self._lengths.read(self.groups(steps))
            return [{**collate(rows, self.pad_token_id, untrained=True)} for rows in read]  # type: ignore[dict-item] # a TypedDict is a dict
        parts = []
        for number, step in enumerate(steps):
            groups = self.groups([step])
            if rows := [row for group in groups for row in group]:
                share = batch_of(self.rows(step), rows, self.pad_token_id, number, len(steps))
                at_once = len(groups[0]) * self._example_rows
                parts += split_batch(share, min(self.micro_batch_size or at_once, at_once))
        return parts


def _starts(cumulative_tokens: Numbers, tokens: int) -> Numbers:
    """Where batches of next rows begin, which end at these tokens, until one more would pass so
    many; last, the end.
    """
    starts = [0]
    while (first := starts[-1]) < len(cumulative_tokens):
        most = tokens + int(cumulative_tokens[first - 1] if first else 0)
        starts.append(max(first + 1, int(np.searchsorted(cumulative_tokens, most, side="right"))))
    return np.array(starts, dtype=np.int64)
