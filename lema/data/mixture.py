"""A mixture of data sets whose i-th sample is a pure function of seed, stage and i, so a run
resumes at any step.

The data set of a sample is dealt out, not drawn (`lema.data.mixing.interleave`); its row is the
next one of a shuffled order of the data set, new in each epoch (`lema.data.mixing.permutation`).
Both take constant time and memory.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

from lema.config.problems import nearest
from lema.data.batches import Batch, collate, dealt
from lema.data.dataset import TokenDataset
from lema.data.mixing.interleave import WINDOW, Fade, Interleaving
from lema.data.mixing.permutation import shuffled_row
from lema.data.mixing.sampling import Sampling, Start, Style, check_rates, rates_of
from lema.data.packed import PackedTokens
from lema.errors import ConfigError, DataError

__all__ = ["Draw", "Mixture", "Source"]


class Source(Protocol):
    """Rows of one data set: a `TokenDataset`, `PackedTokens`, or any sequence of rows with
    `input_ids` and `labels`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Draw(NamedTuple):
    """One sample: a row of a data set, in one of its epochs."""

    source: str
    epoch: int
    row: int


class Mixture:
    """The samples of one stage of training, at rates that hold as `Interleaving` says. Each epoch
    of a data set gives every row once, in an order that seed and stage decide.

    `sources` and `eval_sources` are rows by `Sampling.full_name`; others may be among them. A
    sample has `block` tokens, padding counted. `fade` is how the mixture of the stage before goes
    over into this one; `starts` is where the stages before left data sets, by name, for this one to
    go on there. One that is not in it begins in an order of its own. `ConfigError`: the rates make
    no mixture, a data set is unknown, or its style is another than its source's. `DataError`: a
    data set is empty, has a row longer than a block, or is cut into blocks of another length."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        sources: Mapping[str, Source],
        seed: int,
        block: int,
        *,
        stage: int = 0,
        eval_sources: Mapping[str, Source] | None = None,
        pad_token_id: int = 0,
        fade: Fade | None = None,
        starts: Mapping[str, Start] | None = None,
    ) -> None:
        check_rates(samplings)
        self.samplings = tuple(samplings)
        self.seed = seed
        self.block = block
        self.stage = stage
        self.pad_token_id = pad_token_id
        self.fade = fade
        self.starts = dict(starts or {})
        self._sources = _checked_sources(samplings, sources, block)
        if fade is not None:
            self._sources |= _checked_sources(fade.before, sources, block)
        self._eval_sources = (
            None if eval_sources is None else _checked_sources(samplings, eval_sources, block)
        )
        self._interleaving = Interleaving(rates_of(samplings), "turns", seed, stage, fade=fade)
        self._eval_interleaving = Interleaving(rates_of(samplings))

    def sample(self, index: int) -> Draw:
        """Which row the `index`-th sample is."""
        if index < 0:
            raise IndexError(f"samples count from 0, not {index}")
        name, taken = self._interleaving.sample(index)
        start = self.starts.get(name, Start(self.stage, 0))
        rows = len(self._sources[name])
        return Draw(
            name, *shuffled_row(rows, start.taken + taken, "rows", self.seed, start.stage, name)
        )

    def rows(
        self,
        start: int,
        count: int,
        rank: int = 0,
        size: int = 1,
        micro_batch_size: int | None = None,
    ) -> list[Draw]:
        """The rows that one process works on, of the global batch of `count` samples from `start`
        on, one micro-batch after the other. These are put together by length and dealt out as
        `lema.data.batches.dealt` does: they are the same for any number of processes. A row that
        does not know its length is read for it."""
        drawn = [self.sample(index) for index in _span(start, count)]
        return self._share(drawn, self._sources, rank, size, micro_batch_size)

    def collated(self, draws: list[Draw], size: int = 1) -> Batch | None:
        """The tokens of what `rows` gave one of `size` processes, `[rows, block]`; None: it gave no
        row. `DataError`: a row is longer than a block, or holds a token that is not in the
        vocabulary."""
        return self._batch(draws, self._sources, size)

    def validation(
        self, count: int, rank: int = 0, size: int = 1, micro_batch_size: int | None = None
    ) -> Batch | None:
        """The first `count` samples of the rows held out, shared among processes as `rows` does.
        They are the same whatever the seed, the stage and a fade, so losses compare between runs.
        Where a data set holds fewer rows than its rate asks for, its rows come again.
        `ConfigError`: no rows were held out."""
        if self._eval_sources is None:
            what = "there is nothing to validate on: the mixture has no held-out rows"
            raise ConfigError(
                what, where="eval_data", how="give rows for validation, of every data set"
            )
        # not shuffled, so that a small batch has all rates too
        taken = map(self._eval_interleaving.slot, _span(0, count))
        rows = self._eval_sources
        draws = [
            Draw(name, *shuffled_row(len(rows[name]), count, "held out", name))
            for name, count in taken
        ]
        return self._batch(self._share(draws, rows, rank, size, micro_batch_size), rows, size)

    def counts(self, count: int, start: int = 0) -> dict[str, int]:
        """How many of `count` samples from `start` each data set gives, as in `samplings`; then
        those of a fade.
        """
        before = self._interleaving.counts(start)
        after = self._interleaving.counts(start + count)
        return {name: after[name] - before[name] for name in after}

    def fingerprint(self) -> str:
        """A digest of what decides which row is which sample; not of the tokens in the rows."""
        about: dict[str, Any] = {
            "seed": self.seed,
            "stage": self.stage,
            "block": self.block,
            "window": WINDOW,
        }
        about["data"] = self._described(self.samplings)
        if self.fade is not None:
            about["fade"] = [self.fade.samples, self.fade.shape, self._described(self.fade.before)]
        if starts := {
            name: start for name, start in self.starts.items() if start != Start(self.stage, 0)
        }:
            about["starts"] = starts
        return blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()

    def _described(self, samplings: Sequence[Sampling]) -> dict[str, tuple[float, str, int]]:
        return {
            sampling.full_name: (
                sampling.rate,
                sampling.style,
                len(self._sources[sampling.full_name]),
            )
            for sampling in samplings
        }

    def _share(
        self,
        draws: list[Draw],
        sources: Mapping[str, Source],
        rank: int,
        size: int,
        at_once: int | None,
    ) -> list[Draw]:
        lengths = [self._length(sources[draw.source], draw.row) for draw in draws]
        return [draws[index] for group in dealt(lengths, rank, size, at_once) for index in group]

    def _length(self, source: Source, row: int) -> int:
        if isinstance(source, PackedTokens):
            return self.block
        return (
            source.num_tokens(row)
            if isinstance(source, TokenDataset)
            else len(source[row]["input_ids"])
        )

    def _batch(self, draws: list[Draw], sources: Mapping[str, Source], size: int) -> Batch | None:
        if not draws:
            return None
        rows = [sources[draw.source][draw.row] for draw in draws]
        for draw, row in zip(draws, rows, strict=True):
            if len(row["input_ids"]) > self.block:
                raise _too_long(draw.source, f"row {draw.row}", len(row["input_ids"]), self.block)
        return collate(rows, self.pad_token_id, untrained=size > 1, length=self.block)


def _span(start: int, count: int) -> range:
    if start < 0:
        raise IndexError(f"samples count from 0, not {start}")
    if count < 1:
        raise DataError(f"a batch cannot have {count} samples", where="count", how="use 1 or more")
    return range(start, start + count)


def _checked_sources(
    samplings: Sequence[Sampling], sources: Mapping[str, Source], block: int
) -> dict[str, Source]:
    """The source of each data set, checked."""
    checked = {}
    for sampling in samplings:
        name = sampling.full_name
        if name not in sources:
            near = nearest(name, sources) or sorted(sources)[:3]
            how = f"did you mean {' or '.join(near)}?" if near else "give its rows"
            raise ConfigError(f"there is no data set {name!r}", where="train_data", how=how)
        checked[name] = source = sources[name]
        packed = isinstance(source, PackedTokens)
        if packed != (sampling.style is Style.PMD):
            form, fit = ("packed", Style.PMD) if packed else ("rows", Style.PADDED)
            what = (
                f"the data set {name!r} has the style {sampling.style}, and its tokens are {form}"
            )
            raise ConfigError(
                what, where=name, how=f"use style: {fit}, or the other form of the data"
            )
        if not len(source):
            raise DataError(
                f"the data set {name!r} is empty", where=name, how="give at least one row"
            )
        if isinstance(source, PackedTokens) and source.block_size != block:
            what = (
                f"the data set {name!r} is cut into blocks of {source.block_size:,} tokens, "
                f"not of {block:,}"
            )
            raise DataError(
                what, where=str(source.path), how="open it with the block size of the mixture"
            )
        if (
            isinstance(source, TokenDataset)
            and (longer := np.flatnonzero(source.lengths > block)).size
        ):
            row = int(longer[0])
            raise _too_long(name, source.origin(row), source.num_tokens(row), block)
    return checked


def _too_long(name: str, where: str, length: int, block: int) -> DataError:
    what = f"a row of {name!r} has {length:,} tokens, more than a block of {block:,}"
    return DataError(
        what,
        where=where,
        how="use longer blocks, or prepare the data with max_length as long as a block",
    )
