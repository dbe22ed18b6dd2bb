"""Which batches of a data set each optimizer step of a plain run takes, and where the run ends."""

from functools import cached_property
from math import ceil
from typing import Any

from torch import Tensor

from lema.backend import Replicas
from lema.backend.group import share_of
from lema.config import LemaConfig
from lema.data import Batches
from lema.data.dataset import Rows
from lema.engine.padding import Padding
from lema.errors import ConfigError
from lema.plan.work.step import tokens_at_once

__all__ = ["StepSampler", "batches_of"]


class StepSampler:
    """The optimizer steps of a run over rows with `input_ids` and `labels`, of which each process
    gets its share. Where in the data a step ends follows from its number alone. The last step may
    take fewer batches than the others; with batches as Trainer has them that of each epoch may."""

    def __init__(
        self, dataset: Rows, config: LemaConfig, replicas: Replicas, padding: Padding | None = None
    ) -> None:
        self.dataset = dataset
        self._config = config
        self._per_step = config.gradient_accumulation_steps
        self._seed = config.seed if config.data_seed is None else config.data_seed
        rank, size = share_of(replicas, config.context_parallel_size or 1)
        self._batches = batches_of(
            dataset,
            config,
            padding,
            seed=self._seed,
            shuffle=config.shuffle,
            rank=rank,
            size=size,
            # Where batches come again as they are, micro-batches do as well, because
            # `cache_frozen_prefix` knows them by what is in them, and is to change no number.
            separate_batches=not config.shuffle or config.batch_size == 1,
            per_step=self._per_step * config.group_by_length,
        )
        self.is_trainers = not isinstance(config.shuffle, bool)
        """Whether batches and steps are those of `transformers.Trainer`."""
        steps = config.max_steps
        epochs = config.num_train_epochs
        if steps is None and config.count_steps_by == "rows":
            steps = ceil(epochs * len(dataset) / (config.batch_size * self._per_step))
        elif steps is None and self.is_trainers:
            steps = ceil(epochs * self._steps_per_epoch)
        self.num_batches = (
            self._batches_before(steps) if steps else self._batches.num_batches(epochs)
        )
        self.num_steps = steps or -(-self.num_batches // self._per_step)

    @property
    def _steps_per_epoch(self) -> int:
        """How many steps an epoch has where steps end with epochs."""
        return -(-self._batches.before(1) // self._per_step)

    def _batches_before(self, step: int) -> int:
        """Return how many batches steps have that come before a step."""
        if not self.is_trainers:
            return step * self._per_step
        epoch, step_of_epoch = divmod(step, self._steps_per_epoch)
        of_epoch = min(step_of_epoch * self._per_step, self._batches.before(1))
        return self._batches.before(epoch) + of_epoch

    @property
    def num_epochs(self) -> int:
        """How many epochs the run begins."""
        return self._batches.position(self.num_batches - 1)[0] + 1

    @property
    def repeats(self) -> bool:
        """Whether any batch comes a second time."""
        return self.num_batches > self._batches.before(1)

    @cached_property
    def about(self) -> dict[str, Any]:
        """What, with the step, says where in the data a run is."""
        config = self._config
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return {
            "rows": len(self.dataset),
            "fingerprint": fingerprint() if callable(fingerprint) else None,
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "tokens_per_step": config.tokens_per_step,
            "group_by_length": config.group_by_length,
            "shuffle": config.shuffle,
            "seed": self._seed,
        }

    def rows(self, step: int) -> list[int]:
        """Return this process's rows of a step (steps count from 0), in the order of the epoch."""
        mine = {row for group in self._batches.groups(self._of(step)) for row in group}
        return [row for batch in self._of(step) for row in self._batches.rows(batch) if row in mine]

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return these rows as what is computed at once: put together by length, whatever batch of
        the step they are of, and each micro-batch as wide as its longest row."""
        return self._batches.micro_batches(self._of(step))

    def tokens_of_an_epoch(self) -> int:
        """Return how many tokens this process computes in an epoch, padding included."""
        parts = (
            part
            for index in range(self._batches.before(1))
            for part in self._batches.micro_batches([index])
        )
        return sum(part["input_ids"].numel() for part in parts)

    def _of(self, step: int) -> range:
        return range(self._done(step), self._done(step + 1))

    def epoch(self, steps: int) -> float:
        """Return how many epochs, and what part of one, lie behind so many steps."""
        epoch, batch = self._batches.position(self._done(steps))
        return epoch + batch / (self._batches.before(epoch + 1) - self._batches.before(epoch))

    def row(self, steps: int) -> dict[str, float]:
        """Return what a line of metrics begins with after so many steps."""
        metrics = {"step": steps, "epoch": self.epoch(steps)}
        if self._config.tokens_per_step is not None:
            metrics["tokens"] = self._batches.tokens_before(self._done(steps))
        return metrics

    def position(self, steps: int) -> dict[str, int]:
        """Return how many whole epochs, and batches of the next one, lie behind so many steps."""
        epoch, batch = self._batches.position(self._done(steps))
        return {"epoch": epoch, "batch": batch}

    def is_epoch_end(self, steps: int) -> bool:
        """Whether the last of so many steps took the last batch of an epoch."""
        return self.position(steps)["epoch"] != self.position(max(steps - 1, 0))["epoch"]

    def _done(self, steps: int) -> int:
        return min(self._batches_before(steps), self.num_batches)


def batches_of(
    dataset: Rows, config: LemaConfig, padding: Padding | None = None, **options: Any
) -> Batches:
    """Return the batches of a data set as the settings have them, where the model's rows are padded
    so; `options` are those of `Batches`. Raises `ConfigError` where `tokens_per_step` is no number
    yet, or as `tokens_at_once`."""
    if config.tokens_per_step == "auto":
        how = "use the trainer of LemaModel.get_trainer, or set a number"
        raise ConfigError(
            "tokens_per_step: auto needs the plan of a run", where="tokens_per_step", how=how
        )
    padding = padding or Padding()
    if at_once := tokens_at_once(config, padding.longest(config)):
        options |= {
            "tokens": config.tokens_per_step,
            "micro_batch_tokens": at_once,
            "multiple": padding.multiple,
        }
    return Batches(dataset, config.batch_size, micro_batch_size=config.micro_batch_size, **options)
