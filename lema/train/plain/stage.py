"""The one stage of a plain run: its policy, its rows, and where it writes."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from lema.backend import Replicas
from lema.backend.group import check_alike, first_alone
from lema.config import LemaConfig
from lema.data.dataset import Rows, first_rows
from lema.data.sets.sources import names_of
from lema.engine import StreamedModel
from lema.errors import ConfigError
from lema.train.batch import check_images, packed
from lema.train.checkpoint.format import PREFIX, checkpoints, forget_old_checkpoints
from lema.train.checkpoint.resume import Reporter
from lema.train.evaluate import evaluate, passes_of_rows
from lema.train.events import Position
from lema.train.metrics import METRICS_NAME
from lema.train.sampler import StepSampler
from lema.train.stage import Drawn, Pending, Progress, StagePolicy
from lema.train.steps import Steps

__all__ = ["PlainData", "PlainPaths", "plain_data", "plain_policy"]


@dataclass(frozen=True)
class PlainPaths:
    """Where a plain run writes."""

    directory: Path
    keep: int | None  # how many checkpoints stay; None: all

    @classmethod
    def of(cls, config: LemaConfig) -> Self:
        """Return where a run with these settings writes."""
        return cls(Path(config.output_dir), config.save_total_limit)

    @property
    def metrics(self) -> Path:
        """The file with its lines of metrics."""
        return self.directory / METRICS_NAME

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step."""
        return self.directory / f"{PREFIX}{step}"

    def saved(self) -> list[Path]:
        """Return the checkpoints that are there, the oldest first."""
        return checkpoints(self.directory)

    def forget_old(self, newest: Path, spared: Collection[int] = ()) -> None:
        """Delete checkpoints up to the `newest`, but for the last `keep` and those of the steps
        that are `spared`; or raise `DiskError`."""
        paths = [self.checkpoint(step) for step in spared]
        forget_old_checkpoints(self.directory, newest, self.keep, paths)


def plain_policy(config: LemaConfig) -> StagePolicy:
    """Return how the stage of a plain run goes: as in `transformers.Trainer`."""
    return StagePolicy(
        has_epochs=True,
        trains=None,
        completes_last_step=False,
        stops_for_callbacks=False,
        keeps_best=config.load_best_model_at_end,
        schedule_counts_dropped=False,
    )


@dataclass(frozen=True)
class PlainData:
    """The rows of a plain run; see `lema.train.stage.StageData`."""

    config: LemaConfig
    model: StreamedModel
    sampler: StepSampler
    eval_rows: Rows | None  # None: there is nothing to evaluate on

    @property
    def num_steps(self) -> int:
        """How many steps the run has."""
        return self.sampler.num_steps

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_rows is not None

    @property
    def paths(self) -> PlainPaths:
        """Where the run writes."""
        return PlainPaths.of(self.config)

    @property
    def replicas(self) -> Replicas:
        """The processes that share each batch."""
        return self.model.backend.replicas

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps."""
        epoch = self.sampler.epoch(done)
        is_epoch_end = self.sampler.is_epoch_end(done)
        where = self.paths.checkpoint(done)
        return Position(done, epoch, self.sampler.row(done), f"step {done}", where, is_epoch_end)

    def best_checkpoint(self, progress: Progress) -> Path | None:
        """Return where the checkpoint of the best evaluation is, or would be; None: nothing was
        evaluated.
        """
        return None if progress.best is None else self.paths.checkpoint(progress.best["step"])

    def begin_epoch(self, done: int) -> None:
        """Take the number from torch's generator that Trainer's loader takes for each epoch, as the
        seed of its workers, where rows are drawn as Trainer draws them: so dropout and noise are
        those of Trainer, too, where each step has one micro-batch.
        """
        if self.sampler.is_trainers and self.sampler.position(done)["batch"] == 0:
            torch.empty((), dtype=torch.int64).random_()

    def draw(self, step: int) -> Drawn:
        """Return the rows of a step, counted from 0."""
        rows = self.sampler.rows(step)
        return Drawn(self.sampler.micro_batches(step), f", rows {rows} of the data", {"rows": rows})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the data set to evaluate on."""
        assert self.eval_rows is not None, "a run without such rows evaluates nothing"
        passes = passes_of_rows(self.eval_rows, self.config, self.replicas, self.model.padding)
        return evaluate(self.model, passes)

    def saved_state(self, progress: Progress, pending: Pending | None) -> dict[str, Any]:
        """Return what a checkpoint keeps: the position in the data, and what is `pending`."""
        position = self.sampler.position(progress.done)
        return {"data": self.sampler.about, "position": position, "left": pending}

    def retain(self, progress: Progress, sound: int | None) -> None:
        """Delete checkpoints that are too old, but for the best and that of the `sound` step."""
        spared = [] if sound is None else [sound]
        if progress.best is not None:
            spared.append(progress.best["step"])
        newest = self.paths.checkpoint(progress.done)
        first_alone(self.replicas, partial(self.paths.forget_old, newest, spared))

    def summary(self) -> dict[str, str]:
        """Return what the card of the adapter says of the data."""
        summary = {}
        for name, source, rows in (
            ("training", self.config.train_data, self.sampler.dataset),
            ("evaluation", self.config.eval_data, self.eval_rows),
        ):
            if rows is not None:
                names = names_of(source)
                files = f"{', '.join(names)}: " if names else ""
                summary[name] = f"{files}{getattr(rows, 'counts', None) or f'{len(rows):,} rows'}"
        return summary


def plain_data(
    steps: Steps,
    dataset: Rows,
    eval_dataset: Rows | None = None,
    report: Reporter = lambda _: None,
) -> PlainData:
    """Return the rows of a run, all processes alike.

    Args:
        steps: what trains, with the settings of the run.
        dataset: the rows to train on.
        eval_dataset: the rows to evaluate on; None: there are none.
        report: is called with lines about the rows.

    Raises:
        ConfigError: the settings mix other data sets, or processes differ.
    """
    config = steps.config
    replicas = steps.model.backend.replicas
    if config.mixture is not None and getattr(dataset, "shares", None) != config.mixture:
        what = "it gives shares to the data sets in train_data, but fit got other rows"
        how = "call fit(config.train_data), or remove mixture"
        raise ConfigError(what, where="mixture", how=how)
    check_images(dataset, config)
    if eval_dataset is not None:
        check_images(eval_dataset, config)
    rows = packed(first_rows(dataset, config.max_train_samples), steps.model, config, report)
    sampler = StepSampler(rows, config, replicas, steps.model.padding)
    if config.tokens_per_step is not None:
        report(f"steps of {config.tokens_per_step:,} tokens at most: {sampler.num_steps:,}")
    eval_rows: Rows | None = None
    if eval_dataset is not None:
        first = first_rows(eval_dataset, config.max_eval_samples)
        eval_rows = packed(first, steps.model, config, checked=True)
    if replicas.num_processes > 1:
        data = {f"data: {name}": fingerprint for name, fingerprint in sampler.about.items()}
        check_alike(replicas, config.to_dict() | data)
    return PlainData(config, steps.model, sampler, eval_rows)
