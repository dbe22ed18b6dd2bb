"""The rows of a phase: samples of a mixture, or the rows of `train_data` in epochs, as a run
without phases takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lema.backend import Alone
from lema.config import LemaConfig
from lema.data.dataset import Rows, first_rows
from lema.data.mixture import Mixture, Source
from lema.engine import StreamedModel
from lema.engine.head.loss import split_batch
from lema.model.files import ModelFiles, read_data, training_rows
from lema.train.batch import pack_rows
from lema.train.evaluate import evaluate, passes_of_mixture
from lema.train.phases.plan import PhasePlan
from lema.train.plain.stage import PlainData
from lema.train.sampler import StepSampler
from lema.train.stage import Drawn

__all__ = ["ROWS", "EpochRows", "MixtureRows", "PhaseRows", "count_steps", "read_rows"]

ROWS = "train_data"
"""What the rows of phases without a mixture are called among the data sets of a run."""


class PhaseRows(Protocol):
    """Which rows each step of a phase has, and those to validate on."""

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to validate on."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What, with the step, says where in the data a run is, beyond what its plan says."""

    def row(self, done: int) -> dict[str, Any]:
        """Return what a line of metrics says of the data after so many steps."""

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the rows to validate on."""


@dataclass(frozen=True)
class MixtureRows:
    """Samples of a mixture, as many in each step as the plan's `batch_size`."""

    mixture: Mixture
    plan: PhasePlan
    first_token: int  # tokens of the run before the phase
    config: LemaConfig  # settings of the phase
    model: StreamedModel
    eval_rows: int | None = None  # how many rows to validate on; None: there is no validation

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to validate on."""
        return self.eval_rows is not None

    @property
    def about(self) -> Mapping[str, Any]:
        """Nothing: the plan says which row is which sample."""
        return {}

    def row(self, done: int) -> dict[str, Any]:
        """Return the tokens of the run after so many steps."""
        per_step = self.plan.batch_size * self.plan.max_length
        return {"tokens": self.first_token + done * per_step}

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""
        count = self.plan.batch_size
        size = self.config.micro_batch_size
        replicas = self.model.backend.replicas
        drawn = self.mixture.rows(step * count, count, replicas.rank, replicas.size, size)
        batch = self.mixture.collated(drawn, replicas.size)
        where = f", rows {', '.join(f'{sample.row} of {sample.source}' for sample in drawn)}"
        return Drawn([] if batch is None else split_batch(batch, size), where, {})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the rows to validate on."""
        assert self.eval_rows is not None, "there is no validation"
        size = self.config.micro_batch_size
        arguments = (self.mixture, self.eval_rows, self.model.backend.replicas)
        passes = passes_of_mixture(*arguments, at_once=self.plan.batch_size, micro_batch_size=size)
        return evaluate(self.model, passes)


@dataclass(frozen=True)
class EpochRows:
    """The rows of `train_data`, each once in an epoch, in the batches of a run without phases."""

    data: PlainData

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to validate on."""
        return self.data.evaluates

    @property
    def about(self) -> Mapping[str, Any]:
        """What, with the step, says where in the data a run is."""
        return {f"rows: {name}": value for name, value in self.data.sampler.about.items()}

    def row(self, done: int) -> dict[str, Any]:
        """Return the epochs of the phase after so many steps."""
        return {"epoch": self.data.sampler.epoch(done)}

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""
        return self.data.draw(step)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of all rows to validate on."""
        return self.data.evaluate()


def read_rows(config: LemaConfig, files: ModelFiles) -> tuple[Rows, Rows | None]:
    """Return the rows of `train_data`, of several data sets one after the other, and those to
    validate on; None: there are none.

    Args:
        config: the settings of a run of phases.
        files: the model's directory, with its tokenizer.

    Raises:
        DataError: files are missing or malformed.
    """
    rows, eval_rows = training_rows(config, files)
    if config.eval_data:
        eval_rows = read_data(config, files, config.eval_data)
    return rows, first_rows(eval_rows, config.max_eval_samples)


def count_steps(rows: Source, config: LemaConfig, files: ModelFiles) -> int:
    """Return how many optimizer steps a phase of epochs has, as a run without phases would.

    Args:
        rows: the rows to train on.
        config: the settings of the phase.
        files: the model's directory, whose positions limit packs.
    """
    packs = pack_rows(rows, config, files.config.get_text_config())
    return StepSampler(packs, config, Alone()).num_steps
