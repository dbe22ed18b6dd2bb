"""Rows joined into packs, and whether a model keeps the rows of a pack apart, asked of it before it
trains on them.

`transformers` keeps attention within the rows of a pack by their `position_ids`. What else carries
something from token to token goes on over their ends: states of recurrent layers, short
convolutions, positions that are counted and not taken from `position_ids`. No name of a model or
layer says so for certain, and an implementation of attention may see packs only where a micro-batch
has one. So a few rows are run once packed and once alone, with the layers and the attention that
the run has. That costs one pass over the weights, half of what a step reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lema.config import LemaConfig
from lema.data.columns import IGNORED
from lema.data.dataset import Rows, lengths_of, shuffled
from lema.data.media.rows import IMAGES, RowMedia
from lema.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lema.engine.streamed import StreamedModel

__all__ = ["Packs", "check_packing", "packs_of", "tried_rows"]

NUM_TOKENS = (5, 3, 6, 4)  # of the rows that are tried
FIRST = 2  # tokens of each row that are compared: those that see least of their own row
NOISE = 3  # times what rounding does to the first row of a pack, which has nothing before it
MOST_LOOKED_AT = 16  # rows with images, of which short ones are tried
AT_ONCE = 1000  # rows that TRL joins at once: those of a batch of `datasets`' map
FLOOR = {True: 0.01, False: 1e-4}  # relative to the logits; whether numbers have 16 bits


@torch.no_grad()
def check_packing(model: StreamedModel, rows: Sequence[Mapping[str, Any]], at_once: int) -> None:
    """Make sure that `rows` of the data, one at least, come out of a pack as they come out alone,
    with the adapters that the model has; all processes call this alike. The beginnings of rows of
    text are tried, and rows with images as they are. A micro-batch may have `at_once` packs.
    `ConfigError`: they do not, so the model does not train on packs."""
    how = "set packing: false: LEMA sorts rows by length, so there is little padding"
    if not model.shifts_labels:
        what = (
            "this model trains on a token's own label, but the first token of a row in a pack "
            "has none"
        )
        raise ConfigError(what, where="packing", how=how)
    tried = [_Tried.of(rows[n % len(rows)], size) for n, size in enumerate(NUM_TOKENS)]
    packs = [tried, tried[::-1]][: max(1, min(2, at_once))]
    module = model.split.model
    was_training = module.training
    module.eval()
    try:
        logits: list[Tensor] = []
        model.evaluate([_pack(packs), *(row.alone for pack in packs for row in pack)], logits)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        what = "this model takes no position_ids, which mark the rows of a pack"
        raise ConfigError(what, where="packing", how=how) from error
    finally:
        module.train(was_training)
    # whatever micro-batches memory allowed
    row_logits = [row.float() for batch in logits for row in batch]
    packed = row_logits[: len(packs)]
    alone = iter(row_logits[len(packs) :])
    noise = list[float]()
    differences = list[float]()
    for pack, pack_logits in zip(packs, packed, strict=True):
        row_bounds = list(accumulate(len(row.ids) for row in pack))
        for number, (row, end) in enumerate(zip(pack, row_bounds, strict=True)):
            differs = _relative_distances(pack_logits[end - len(row.ids) : end], next(alone))
            # after an image each token shows whether its positions are those of the row
            count = FIRST if row.images is None else len(row.ids)
            (differences if number else noise).extend(differs[:count])
    typical = sorted(differences)[len(differences) // 2]
    if not typical <= max(FLOOR[torch.finfo(model.split.cast).bits < 32], NOISE * max(noise)):
        what = (
            "rows of a pack influence each other in this model: their logits differ by "
            f"{typical:.1%} from those "
        )
        what += (
            "of the same rows alone, as something beside attention goes on from one row to the next"
        )
        if at_once > 1:
            how += (
                "; or try micro_batch_size: 1, because some kinds of attention handle one pack "
                "at a time"
            )
        raise ConfigError(what, where="packing", how=how)


def tried_rows(rows: Rows) -> list[Mapping[str, Any]]:
    """Return the rows of a data set with which `check_packing` tries a model: the first, and short
    ones that have images, if any have."""
    first = [rows[number] for number in range(min(len(rows), len(NUM_TOKENS)))]
    if not getattr(rows, "has_images", False):
        return first
    candidates = (rows[number] for number in range(len(rows)))
    with_images = [*islice((row for row in candidates if row[IMAGES].num_images), MOST_LOOKED_AT)]
    short = sorted(with_images, key=lambda row: len(row["input_ids"]))
    without = [row for row in first if not row[IMAGES].num_images]
    return [*short[: len(NUM_TOKENS) - 1], *without][: len(NUM_TOKENS)]


@dataclass(frozen=True)
class _Tried:
    """A row that is tried in a pack and alone.

    Args:
        ids: its tokens, or the first of them.
        images: its images; None: no row of the data has any.
    """

    ids: Tensor
    images: RowMedia | None

    @classmethod
    def of(cls, row: Mapping[str, Any], size: int) -> _Tried:
        """Return the first tokens of a row, or all if it has images."""
        images: RowMedia | None = row.get(IMAGES)
        uncut = images is not None and images.num_images > 0
        return cls(torch.tensor(list(row["input_ids"])[: None if uncut else size]), images)

    @property
    def alone(self) -> dict[str, Any]:
        """The row as a micro-batch."""
        batch = {"input_ids": self.ids[None], "labels": self.ids[None]}
        return batch if self.images is None else {**batch, IMAGES: self.images}


def _pack(packs: Sequence[Sequence[_Tried]]) -> dict[str, Any]:
    ids = torch.stack([torch.cat([row.ids for row in pack]) for pack in packs])
    positions = torch.stack(
        [torch.cat([torch.arange(len(row.ids)) for row in pack]) for pack in packs]
    )
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    in_packs = [
        None if of_rows is None else of_rows.in_a_pack([len(row.ids) for row in pack])
        for pack in packs
        for of_rows in [RowMedia.joined([row.images for row in pack])]
    ]
    images = RowMedia.joined(in_packs)
    return batch if images is None else {**batch, IMAGES: images}


def _relative_distances(logits: Tensor, reference: Tensor) -> list[float]:
    """Return how far the logits of each token `[tokens, vocabulary]` are from others, relative
    to their length.
    """
    return [
        float(distance)
        for distance in (logits - reference).norm(dim=-1) / reference.norm(dim=-1).clamp(min=1e-30)
    ]


class Packs(Sequence[dict[str, list[int]]]):
    """Rows of a data set, joined into packs of at most `length` tokens: rows with `position_ids`
    besides.

    These start again with each row of a pack; by that `transformers` keeps attention within the
    rows. No label stands where a row begins, because the token before it is another row's; no loss
    is formed there in a row alone, either. Whole rows are joined by best fit, the longest first.
    Lengths and seed decide which, in every epoch alike.

    `rows`: the data set. `length`: of a pack, at most. `seed`: draws the order of rows that are
    equally long. `wrapped`: lay all rows end to end, in an order that the seed draws, and cut at
    every `length` tokens. What is cut off begins the next pack as a row of its own. A pack in which
    nothing is trained, such as a part of a long prompt, is left out. `in_order`: join whole rows of
    each thousand, of which equally long ones stay in the order of the data, as TRL's strategy
    `bfd` does. `DataError`: a row is longer than a pack, and not `wrapped`; or no pack is left."""

    def __init__(
        self, rows: Rows, length: int, seed: int, *, wrapped: bool = False, in_order: bool = False
    ) -> None:
        self._rows = rows
        self._about = (length, "bfd") if in_order else (length, seed, wrapped)
        lengths = lengths_of(rows)
        if not wrapped and len(rows) and lengths.max() > length:
            longest = int(lengths.argmax())
            what = (
                f"row {longest} has {lengths[longest]:,} tokens, more than the {length:,} of a pack"
            )
            raise DataError(
                what,
                where="packing",
                how="raise max_length, shorten the row, or set packing: wrapped",
            )
        order = np.arange(len(rows), dtype=np.int64)
        if not in_order:
            order = shuffled(len(rows), seed, stream=2**32 + 1)
        pieces_of = _fitted_in_order if in_order else _cut_through if wrapped else _fitted
        row_indices, starts, stops, packs = pieces_of(lengths[order], length)
        self._row_indices = order[row_indices]
        self._starts = starts
        self._stops = stops
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(packs))]).astype(np.int64)
        self._sizes = np.bincount(packs, weights=stops - starts).astype(np.int64)
        left_out = self._keep_trained(lengths) if wrapped else 0
        full = self._sizes.sum() / max(1, len(self) * length)
        line = (
            f"packed: {len(rows):,} rows in {len(self):,} packs of at most {length:,} tokens, "
            f"{full:.0%} filled"
        )
        self.notes: tuple[str, ...] = (line,)
        if left_out:
            self.notes += (
                f"packed: {left_out:,} further packs have no token to train on and are left out",
            )

    def _keep_trained(self, lengths: npt.NDArray[np.int64]) -> int:
        """Leave out packs in which nothing is trained; return how many. `lengths` are those of the
        rows. A pack that holds all of a row, or two tokens of one that is trained as a whole, is
        not read for it."""
        trained = getattr(self._rows, "trained", np.zeros(len(lengths), dtype=np.int64))[
            self._row_indices
        ]
        sizes = self._stops - self._starts
        of_rows = lengths[self._row_indices]
        sure = (trained > 0) & ((sizes == of_rows) | ((trained == of_rows - 1) & (sizes > 1)))
        packs = np.repeat(np.arange(len(self)), np.diff(self._bounds))
        has_trained = np.bincount(packs, weights=sure, minlength=len(self)) > 0
        retained = np.array(
            [bool(has_trained[number]) or self._trains(number) for number in range(len(self))],
            dtype=bool,
        )
        if not retained.any():
            what = "no pack has a token to train on"
            raise DataError(
                what, where="packing", how="raise max_length, or remove rows that are mostly prompt"
            )
        pieces = retained[packs]
        self._row_indices = self._row_indices[pieces]
        self._starts = self._starts[pieces]
        self._stops = self._stops[pieces]
        counts = np.diff(self._bounds)[retained]
        self._bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._sizes = self._sizes[retained]
        return int((~retained).sum())

    def _trains(self, pack: int) -> bool:
        return any(label != IGNORED for label in self[pack]["labels"])

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        pack: dict[str, Any] = {"input_ids": [], "labels": [], "position_ids": []}
        images = list[RowMedia | None]()
        lengths = list[int]()
        for piece in range(self._bounds[index], self._bounds[index + 1]):
            row = self._rows[int(self._row_indices[piece])]
            part = slice(self._starts[piece], self._stops[piece])
            pack["input_ids"] += row["input_ids"][part]
            pack["labels"] += [IGNORED, *row["labels"][part][1:]]
            pack["position_ids"] += range(self._stops[piece] - self._starts[piece])
            images.append(row.get(IMAGES))
            lengths.append(int(self._stops[piece] - self._starts[piece]))
        if (of_rows := RowMedia.joined(images)) is not None:
            pack[IMAGES] = of_rows.in_a_pack(lengths)
        return pack

    def num_tokens(self, index: int) -> int:
        """The length of a pack in tokens."""
        return int(self._sizes[index])

    def fingerprint(self) -> str | None:
        """A digest of all rows and of how they are joined; None: the data set has none."""
        of_rows = getattr(self._rows, "fingerprint", None)
        return None if of_rows is None else f"{of_rows()} packed {self._about}"


def packs_of(rows: Rows, length: int, config: LemaConfig) -> Packs:
    """Return packs of so many tokens as the setting `packing` asks for."""
    wrapped = config.packing == "wrapped"
    return Packs(rows, length, config.seed, wrapped=wrapped, in_order=config.packing == "bfd")


Pieces = tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]
]
"""For parts of rows, in the order of their packs: the row, where the part begins and ends in it,
and the pack.
"""


def _fitted_in_order(lengths: npt.NDArray[np.int64], capacity: int) -> Pieces:
    """Put whole rows of each thousand into packs, by best-fit decreasing."""
    parts = list[Pieces]()
    num_packs = 0
    for start in range(0, len(lengths), AT_ONCE):
        part = lengths[start : start + AT_ONCE]
        row_indices, starts, stops, packs = _fitted(part, capacity, oldest=True)
        parts.append((row_indices + start, starts, stops, packs + num_packs))
        num_packs += int(packs.max()) + 1
    row_indices, starts, stops, packs = map(np.concatenate, zip(*parts, strict=True))
    return row_indices, starts, stops, packs


def _fitted(lengths: npt.NDArray[np.int64], capacity: int, *, oldest: bool = False) -> Pieces:
    """Put whole rows into packs by best-fit decreasing (Johnson, 1974): each where the least is
    left over. Of packs with the same space the newest takes it, or the `oldest`.
    """
    order = np.argsort(-lengths, kind="stable")
    packs = np.empty(len(lengths), dtype=np.int64)
    count = 0
    free: dict[int, list[int]] = {}  # packs by the tokens that still fit
    # bit n is set where there is a pack for n more tokens, so that the best is found by a shift
    sizes = 0
    for row in order.tolist():
        length = int(lengths[row])
        if fit := sizes >> length:
            space = length + (fit & -fit).bit_length() - 1
            pack = free[space].pop(0 if oldest else -1)
            if not free[space]:
                sizes ^= 1 << space
        else:
            space = capacity
            pack = count
            count = count + 1
        packs[row] = pack
        if remaining := space - length:
            free.setdefault(remaining, []).append(pack)
            sizes |= 1 << remaining
    # In order, the longest row of a pack is its first; else rows of a pack have the data's order.
    first = order if oldest else np.arange(len(lengths), dtype=np.int64)
    row_indices = first[np.argsort(packs[first], kind="stable")].astype(np.int64)
    return (
        row_indices,
        np.zeros(len(row_indices), dtype=np.int64),
        lengths[row_indices],
        packs[row_indices],
    )


def _cut_through(lengths: npt.NDArray[np.int64], capacity: int) -> Pieces:
    """Cut rows that lie end to end at every multiple of `capacity` tokens."""
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cuts = np.union1d(begins, np.arange(0, begins[-1], capacity))
    row_indices = np.searchsorted(begins, cuts[:-1], side="right") - 1
    return (
        row_indices,
        cuts[:-1] - begins[row_indices],
        cuts[1:] - begins[row_indices],
        cuts[:-1] // capacity,
    )
