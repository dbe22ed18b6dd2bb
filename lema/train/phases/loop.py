"""One phase of a run, as the run loop drives it: its rows, where the run is, its checkpoints and their notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lema.backend.group import first_alone
from lema.data.mixture import Mixture, Source
from lema.engine.head.loss import split_batch
from lema.engine.optim import follow
from lema.train.evaluate import evaluate, passes_of_mixture
from lema.train.events import Position, RunEvents
from lema.train.loop import Drawn, Pending
from lema.train.metrics import NO_SUMS
from lema.train.phases.places import Places
from lema.train.phases.plan import PhasePlan
from lema.train.steps import Steps

__all__ = ["PhaseRun", "mixture_of"]


def mixture_of(
    plan: PhasePlan, index: int, sources: Mapping[str, Source], held_out: Mapping[str, Source] | None = None
) -> Mixture:
    """Return the rows of a phase, `held_out` those to validate on; `ConfigError` where the data sets do not fit it."""
    options: dict[str, Any] = {"stage": index, "held_out": held_out}
    options |= {"fade": plan.fade(index), "starts": plan.starts()[index]}
    return Mixture(plan.phases[index].mixture, sources, plan.seed, plan.max_length, **options)


class PhaseRun:
    """A phase that is being trained; see `lema.train.loop.Stage`. Without `eval_rows` there is no validation."""

    def __init__(
        self,
        places: Places,
        index: int,
        steps: Steps,
        mixture: Mixture,
        eval_rows: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._places, self._index, self._plan = places, index, places.plan
        self._phase, self._boundary = places.plan.phases[index], places.plan.boundaries()[index]
        self.steps, self._mixture, self._eval_rows = steps, mixture, eval_rows
        self.evaluates = eval_rows is not None
        self.data = dict(data or {})
        self.trains: str | None = self._phase.trains
        self._replicas = steps.model.backend.replicas
        self.num_steps = self._plan.steps(index).steps
        self.done = 0
        self.best: dict[str, Any] | None = None
        self.pending: Pending | None = None
        self.unlogged: Sequence[Any] = NO_SUMS
        self.saved: int | None = None
        self.eval_loss: float | None = None

    @cached_property
    def schedule(self) -> LRScheduler:
        """Of the learning rate, as far as the phase has come when it is first asked for."""
        return follow(self.steps.ready(), self._plan.factor(self._index), self._phase.learning_rate, self.done)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of this phase; `AdapterError` where it is damaged, or of another kind of training."""
        about = self.steps.restore(checkpoint)
        self.done, self.eval_loss, self.best = int(about["step"]), about["eval_loss"], about["best"]
        self.pending, self.unlogged, self.saved = about["left"], about["unlogged"], self.done
        if checkpoint != self._places.checkpoint(self._index, self.done):  # of another run: this one has one of its own
            if self.best is not None and self.best["step"] != self.done:
                self.best = None  # that checkpoint stayed behind
            self.save(None, self.pending)
        else:
            self._note()

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps of the phase."""
        step, per_step = self._boundary.first_step + done, self._plan.batch_size * self._plan.max_length
        tokens = self._boundary.first_token + done * per_step
        name, where = self._boundary.name, self._places.checkpoint(self._index, done)
        row = {"phase": name, "stage": self._index, "step": step, "step_in_phase": done, "tokens": tokens}
        return Position(step, None, row, f"step {done} of phase {name}", where)

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""
        count, size, replicas = self._plan.batch_size, self._plan.micro_batch_size, self._replicas
        drawn = self._mixture.rows(step * count, count, replicas.rank, replicas.size, size)
        batch = self._mixture.collated(drawn, replicas.size)
        where = f", rows {', '.join(f'{one.row} of {one.source}' for one in drawn)}"
        return Drawn([] if batch is None else split_batch(batch, size), where, {})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the rows to validate on."""
        assert self._eval_rows is not None, "there is no validation"
        plan = self._plan
        sizes: dict[str, Any] = {"at_once": plan.batch_size, "micro_batch_size": plan.micro_batch_size}
        return evaluate(self.steps.model, passes_of_mixture(self._mixture, self._eval_rows, self._replicas, **sizes))

    def save(self, events: RunEvents | None, pending: Pending | None) -> None:
        """Write a checkpoint of the step just taken and note it; without `events` there is nothing callbacks could
        know.
        """
        base = Path(self.steps.config.model_name_or_path)
        about = {
            "plan": self._plan.numbers(self._index + 1),
            "data": self.data,
            "phase": self._phase.name,
            "kind": self.trains,
            "step": self.done,
            "ended": self.done == self.num_steps and pending is None,
            "left": pending,
            "unlogged": self.unlogged if events is None else events.unlogged,
            "base": str(base.absolute()) if base.exists() else str(base),
            "eval_loss": self.eval_loss,
            "best": self.best,
        }
        directory = self._places.checkpoint(self._index, self.done)
        self.steps.save_checkpoint(directory, about, [] if events is None else [events.save_state])
        self._note()

    def _note(self) -> None:
        """Say which checkpoints are the latest and the best, and forget those that are too old."""

        def note() -> None:
            self._places.note_latest(self._index, self.done)
            self._places.note_best(self._index, self.best)
            self._places.forget_old(self._index, self.done, self.steps.config.save_total_limit)

        first_alone(self._replicas, note)
