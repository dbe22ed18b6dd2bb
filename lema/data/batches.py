"""Batches whose order is a pure function of seed and epoch, so that a run resumes at any step without replay."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from lema.data.columns import IGNORED
from lema.data.dataset import shuffled
from lema.errors import DataError

__all__ = ["Batch", "Batches", "collate"]

TokenRow = Mapping[str, Sequence[int]]


class Batch(TypedDict):
    """One batch: `input_ids`, `labels` and `attention_mask` are int64 `[batch, sequence]`.

    `attention_mask` is absent when no row is padded; `rows` are the rows' places in the data set.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: NotRequired[torch.Tensor]
    rows: NotRequired[list[int]]


def share_of(rows: Sequence[int], rank: int, size: int, micro_batch_size: int | None = None) -> list[int]:
    """Return the rows of a batch that process `rank` of `size` works on.

    Rows are dealt out a micro-batch at a time, as evenly as that goes, so that the micro-batches are the same for any
    number of processes; None: a process computes all its rows at once. Where there are fewer micro-batches than
    processes, the last processes get none.
    """
    together = micro_batch_size or 1
    few, more = divmod(-(-len(rows) // together), size)
    first = rank * few + min(rank, more)
    return list(rows[first * together : (first + few + (rank < more)) * together])


def collate(
    rows: Sequence[TokenRow], pad_token_id: int = 0, *, untrained: bool = False, length: int | None = None
) -> Batch:
    """Rows side by side, padded on the right to the longest of them, or to `length`; `untrained`: none of them need
    train anything.

    Padding carries label -100 and attention 0, so which token stands there changes nothing.

    Raises:
        DataError: no rows, a row without tokens, labels of another length, or no token to learn in the whole batch.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    if not rows or min(lengths) == 0:
        raise DataError("a batch needs rows, and a row needs tokens", where="collate")
    shape = (len(rows), length or max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    for place, (row, size) in enumerate(zip(rows, lengths, strict=True)):
        if len(row["labels"]) != size:
            raise DataError(f"{size} input_ids but {len(row['labels'])} labels", where=f"row {place} of the batch")
        input_ids[place, :size] = torch.as_tensor(row["input_ids"], dtype=torch.long)
        labels[place, :size] = torch.as_tensor(row["labels"], dtype=torch.long)
    if not untrained and not bool((labels[:, 1:] != IGNORED).any()):
        how = "every label after the first is -100: its loss would be the mean of nothing"
        raise DataError("a batch has no token to learn", where="collate", how=how)
    if min(lengths) == shape[1]:
        return Batch(input_ids=input_ids, labels=labels)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return Batch(input_ids=input_ids, labels=labels, attention_mask=mask.long())


class Batches:
    """The batches of a run, each reached directly by its step.

    Steps count from 0 over all epochs: step `s` is batch `s % steps_per_epoch` of epoch `s // steps_per_epoch`. Each
    epoch visits every row once; its last batch is smaller where the rows do not divide evenly.

    Args:
        dataset: a `TokenDataset`, or any sequence of rows with `input_ids` and `labels`.
        batch_size: rows per batch.
        seed: decides the order, with the epoch and nothing else.
        shuffle: whether to shuffle at all; if not, every epoch has the order of the data.
        pad_token_id: fills up rows that are shorter than the longest of their batch.
        rank: of this process, which gets only its share of each batch: see `share_of`.
        size: how many processes there are.
        micro_batch_size: as of `share_of`.

    Raises:
        DataError: the data set is empty, or `batch_size` is below 1.
    """

    def __init__(
        self,
        dataset: Sequence[TokenRow],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        pad_token_id: int = 0,
        *,
        rank: int = 0,
        size: int = 1,
        micro_batch_size: int | None = None,
    ) -> None:
        if not len(dataset):
            raise DataError("the data set is empty", how="give at least one row")
        if batch_size < 1:
            raise DataError(f"a batch of {batch_size} rows is none", where="batch_size", how="use 1 or more")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.pad_token_id = pad_token_id
        self.rank, self.size, self.micro_batch_size = rank, size, micro_batch_size
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.dataset) // self.batch_size)

    def rows(self, step: int) -> list[int]:
        """The places in the data set of the rows of batch `step`."""
        if step < 0:
            raise IndexError(f"steps count from 0, not {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return [int(row) for row in self._order_of(epoch)[first : first + self.batch_size]]

    def batch(self, step: int) -> Batch | None:
        """This process's share of batch `step`, the same one whenever it is asked for; None: it has no row of it."""
        whole = rows = self.rows(step)
        each = getattr(self.dataset, "rows_each", 1)
        at_once = None if self.micro_batch_size is None else max(1, self.micro_batch_size // each)
        if self.size > 1 and not (rows := share_of(rows, self.rank, self.size, at_once)):
            return None
        if (batch_of := getattr(self.dataset, "batch_of", None)) is not None:
            made: Batch = batch_of(whole, rows, self.pad_token_id)  # examples, which may be of several rows
            made["rows"] = rows
            return made
        batch = collate([self.dataset[row] for row in rows], self.pad_token_id, untrained=self.size > 1)
        batch["rows"] = rows
        return batch

    def epoch(self, epoch: int = 0) -> Iterator[Batch | None]:
        """All batches of one epoch."""
        first = epoch * self.steps_per_epoch
        return (self.batch(step) for step in range(first, first + self.steps_per_epoch))

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            count = len(self.dataset)
            order = shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count, dtype=np.int64)
            self._order = (epoch, order)
        return self._order[1]
