"""A stage: a stretch of steps that train one thing on one kind of rows.

A plain run is a run of one stage, and a run of phases has one per phase. The loop drives a `Stage`
of either. What differs is in two frozen records, which the stage is given: a `StagePolicy` says
how it answers callbacks and how it ends, and `StageData` which rows it has, how its steps are
called and where its checkpoints lie. How far it is, is its `Progress`, and nobody else's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lema.train.events import Position, RunEvents
from lema.train.steps import Steps

__all__ = ["Drawn", "Pending", "Progress", "Stage", "StageData", "StagePolicy"]

Pending = Mapping[str, Any]
"""What is still to be done after the last step, because a stop came while it was evaluated or its
epoch goes on to be evaluated after the checkpoint, as JSON types.

`after`: `step`, or `saved` where what is due after the step has been done, and `epoch` where
callbacks know that the epoch has ended; `asked`: what callbacks had asked for; `numbers`: of the
step, for its line of metrics.
"""


@dataclass(frozen=True)
class Drawn:
    """The rows of a step: this process's share; `where` they are, for an error; `about` them,
    for a line of metrics.
    """

    micro_batches: Sequence[Mapping[str, Tensor]]
    where: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class StagePolicy:
    """How a stage answers callbacks, and how it begins and ends."""

    # Callbacks know of its epochs, and what is due at the end of one follows what is due after its
    # last step, as in `transformers.Trainer`.
    has_epochs: bool
    # What it trains, such as `lora`, which a line of metrics tells where it begins, and another one
    # where it has ended; None: there are no such lines.
    trains: str | None
    # Its last step is logged, evaluated and saved, whatever the intervals say.
    completes_last_step: bool
    # A callback that ends training stops the run, as a signal does, with a checkpoint to go on
    # from; else the stage ends there, as `transformers.Trainer` would.
    stops_for_callbacks: bool
    # The checkpoint of each evaluation that is the best so far is written, whatever the intervals
    # say.
    keeps_best: bool
    # The schedule of the learning rate moves on with a step that was dropped, too, and the loop
    # moves it; else it is one of steps that the optimizer took, and what trains moves it.
    schedule_counts_dropped: bool


class Progress:
    """How far a stage is.

    Args:
        done: steps that were taken or dropped.
        best: of the best evaluation `step` and `eval_loss`, or what else `metric_for_best_model`
            names, and `only`: whether nothing but that asked for its checkpoint.
        eval_loss: measured after the last step; None: nothing was.
        pending: what a checkpoint that is resumed says was not done any more; None: nothing.
        carried: what `RunEvents.carried` was when that was written.
        saved: the last step with an up-to-date checkpoint on disk; None: there is none.
        sound: the last step with a checkpoint of a run that did not look dead, which is kept; None:
            there is none.
        past: what callbacks knew of the run (`log_history`, `stateful_callbacks`).
    """

    def __init__(
        self,
        done: int = 0,
        *,
        best: Mapping[str, Any] | None = None,
        eval_loss: float | None = None,
        pending: Pending | None = None,
        carried: Mapping[str, Any] | None = None,
        saved: int | None = None,
        sound: int | None = None,
        past: Mapping[str, Any] | None = None,
    ) -> None:
        self.done = done
        self.best = best
        self.eval_loss = eval_loss
        self.pending = pending
        self.carried = carried or {}
        self.saved = saved
        self.sound = sound
        self.past = past or {}

    def count_step(self) -> None:
        """Count a step that was taken or dropped, after which nothing was evaluated yet."""
        self.done += 1
        self.eval_loss = None

    def count_evaluation(self, loss: float) -> None:
        """Note the loss of an evaluation after the last step."""
        self.eval_loss = loss

    def set_best(self, best: Mapping[str, Any] | None) -> None:
        """Note the best evaluation so far; None: there is none."""
        self.best = best

    def count_checkpoint(self, *, is_sound: bool) -> None:
        """Note that the last step is saved, of a run that does not look dead if `is_sound`."""
        self.saved = self.done
        if is_sound:
            self.sound = self.done


class StageData(Protocol):
    """The rows of a stage, the names of its steps, and what of it is on disk."""

    @property
    def num_steps(self) -> int:
        """How many steps the stage has."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps of the stage."""

    def begin_epoch(self, done: int) -> None:
        """Note that after so many steps the rows begin anew, or go on within an epoch."""

    def draw(self, step: int) -> Drawn:
        """Return the rows of a step, counted from 0."""

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and other measurements on rows that are not trained on."""

    def saved_state(self, progress: Progress, pending: Pending | None) -> dict[str, Any]:
        """Return what a checkpoint keeps of the stage, as JSON types, with what is `pending`."""

    def retain(self, progress: Progress, sound: int | None) -> None:
        """Note that the checkpoint of the last step is there, and remove old ones, but for the best
        and that of the `sound` step. All processes call this."""


class Stage:
    """A stage, as the loop drives it.

    Args:
        steps: what trains.
        data: its rows, and where its checkpoints lie.
        policy: how it answers callbacks, and how it ends.
        progress: how far it is; None: it begins.
    """

    def __init__(
        self,
        steps: Steps,
        data: StageData,
        policy: StagePolicy,
        progress: Progress | None = None,
    ) -> None:
        self.steps = steps
        self.data = data
        self.policy = policy
        self.progress = progress or Progress()

    @property
    def num_steps(self) -> int:
        """How many steps the stage has."""
        return self.data.num_steps

    @property
    def has_taken_all(self) -> bool:
        """Whether its last step was taken."""
        return self.progress.done >= self.num_steps

    @property
    def position(self) -> Position:
        """Where the run is after the last step."""
        return self.data.position(self.progress.done)

    @property
    def sound_checkpoint(self) -> Position | None:
        """Where the last checkpoint is of a run that did not look dead; None: there is none."""
        sound = self.progress.sound
        return None if sound is None else self.data.position(sound)

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and other measurements on rows that are not trained on."""
        metrics = self.data.evaluate()
        self.progress.count_evaluation(metrics["eval_loss"])
        return metrics

    def save(self, events: RunEvents | None, pending: Pending | None) -> None:
        """Write a checkpoint of the last step, and remove old ones.

        Args:
            events: whose state is saved with it; None: callbacks know nothing yet.
            pending: what is still to be done after the step; None: nothing.

        Raises:
            DiskFull: it does not fit.
        """
        progress = self.progress
        carried = progress.carried if events is None else events.carried
        state = {**self.data.saved_state(progress, pending), **carried}
        writers = [] if events is None else [events.save_state]
        self.steps.save_checkpoint(self.position.checkpoint, state, writers)
        is_sound = events is not None and not events.signs.steps
        self.data.retain(progress, progress.done if is_sound else progress.sound)
        progress.count_checkpoint(is_sound=is_sound)
