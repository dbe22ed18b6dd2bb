"""Which batches of a data set each optimizer step of a plain run takes, and where the run ends."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from lema.backend import Replicas
from lema.config import LemaConfig
from lema.data import Batches

__all__ = ["StepSampler"]


class StepSampler:
    """The optimizer steps of a run over rows with `input_ids` and `labels`, of which each process gets its share.

    Where in the data a step ends follows from its number alone. The last step may take fewer batches than the others.
    """

    def __init__(self, dataset: Any, config: LemaConfig, replicas: Replicas) -> None:
        self.dataset, self._config = dataset, config
        self._batches = Batches(
            dataset,
            config.batch_size,
            config.seed,
            config.shuffle,
            rank=replicas.rank,
            size=replicas.size,
            micro_batch_size=config.micro_batch_size,
            # Where batches come again as they are, micro-batches do as well, because `cache_frozen_prefix` knows them
            # by what is in them, and is to change no number.
            apart=not config.shuffle or config.batch_size == 1,
        )
        self._per_step, self._per_epoch = config.gradient_accumulation_steps, self._batches.steps_per_epoch
        all_epochs = max(1, round(config.num_train_epochs * self._per_epoch))
        self.num_batches = config.max_steps * self._per_step if config.max_steps else all_epochs
        self.num_steps = -(-self.num_batches // self._per_step)

    @property
    def num_epochs(self) -> int:
        """How many epochs the run begins."""
        return -(-self.num_batches // self._per_epoch)

    @property
    def repeats(self) -> bool:
        """Whether any batch comes a second time."""
        return self.num_batches > self._per_epoch

    @cached_property
    def about(self) -> dict[str, Any]:
        """What, with the step, says where in the data a run is."""
        config, fingerprint = self._config, getattr(self.dataset, "fingerprint", None)
        return {
            "rows": len(self.dataset),
            "fingerprint": fingerprint() if callable(fingerprint) else None,
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "shuffle": config.shuffle,
            "seed": config.seed,
        }

    def rows(self, step: int) -> list[int]:
        """Return this process's rows of a step, the first of which is 0, in the order of the epoch."""
        mine = {row for group in self._batches.groups(self._of(step)) for row in group}
        return [row for batch in self._of(step) for row in self._batches.rows(batch) if row in mine]

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return these rows as what is computed at once: put together by length, whatever batch of the step they are
        of, and each micro-batch as wide as its longest row."""
        return self._batches.micro_batches(self._of(step))

    def tokens_of_an_epoch(self) -> int:
        """Return how many tokens this process computes in an epoch, padding included."""
        parts = (part for index in range(self._per_epoch) for part in self._batches.micro_batches([index]))
        return sum(part["input_ids"].numel() for part in parts)

    def _of(self, step: int) -> range:
        return range(step * self._per_step, self._done(step + 1))

    def epoch(self, steps: int) -> float:
        """Return how many epochs, and what part of one, lie behind so many steps."""
        return self._done(steps) / self._per_epoch

    def position(self, steps: int) -> dict[str, int]:
        """Return how many whole epochs, and batches of the next one, lie behind so many steps."""
        epoch, batch = divmod(self._done(steps), self._per_epoch)
        return {"epoch": epoch, "batch": batch}

    def ends_epoch(self, steps: int) -> bool:
        """Whether the last of so many steps took the last batch of an epoch."""
        first = (steps - 1) * self._per_step
        return self._done(steps) // self._per_epoch != first // self._per_epoch

    def _done(self, steps: int) -> int:
        return min(steps * self._per_step, self.num_batches)
