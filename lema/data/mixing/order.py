"""The orders in which the epochs of a run draw the rows of its data.

An order is a function of the number of an epoch, so that a run resumes at any step without replay.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lema.data.dataset import shuffled

__all__ = ["DataOrder", "RowOrder", "SeededOrder", "Shuffle", "TrainerOrder", "row_order"]

Shuffle: TypeAlias = bool | Literal["transformers", "sequential"]
"""What the setting `shuffle` says; a name: batches and steps are Trainer's, too."""


class RowOrder(Protocol):
    """An order of rows for each epoch, in which every row comes once."""

    def __call__(self, epoch: int, /) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, which counts from 0, int64 `[rows]`."""


@dataclass(frozen=True)
class DataOrder:
    """The order of the data, in every epoch."""

    count: int

    def __call__(self, _: int, /) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, int64 `[rows]`."""
        return np.arange(self.count, dtype=np.int64)


@dataclass(frozen=True)
class SeededOrder:
    """LEMA's own random order, which is the same with every release of NumPy and torch."""

    count: int
    seed: int

    def __call__(self, epoch: int, /) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, int64 `[rows]`."""
        return shuffled(self.count, self.seed, epoch)


@dataclass(frozen=True)
class TrainerOrder:
    """The order in which `transformers.Trainer` draws rows.

    Its loader has accelerate's `SeedableRandomSampler`: epoch `e`, counted from 0, is
    `torch.randperm` of a generator with the seed `seed + e`, where `seed` is the trainer's
    `data_seed`, or else its `seed`. A resumed Trainer skips batches of that order.

    Args:
        count: how many rows there are.
        seed: the seed of the first epoch.
    """

    count: int
    seed: int

    def __call__(self, epoch: int, /) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, int64 `[rows]`."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: npt.NDArray[np.int64] = torch.randperm(self.count, generator=generator).numpy()
        return order


def row_order(count: int, seed: int, shuffle: Shuffle) -> RowOrder:
    """Return the order of so many rows that the setting `shuffle` asks for."""
    if shuffle == "transformers":
        return TrainerOrder(count, seed)
    return SeededOrder(count, seed) if shuffle is True else DataOrder(count)
