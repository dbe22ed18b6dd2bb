"""The steps of one phase, and what is due after each: a line of metrics, validation, a checkpoint, an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema.data.mixture import Mixture
from lema.errors import Stopped
from lema.loss import split_batch
from lema.model import LemaModel
from lema.phasekinds import Adapters, Weights
from lema.phaselog import PhaseLog
from lema.phaseplaces import Places
from lema.replicate import first_alone
from lema.validation import validate

__all__ = ["Underway"]


@dataclass
class Underway:
    """A phase that is being trained.

    Attributes:
        places: where the run's phases are.
        index: of the phase.
        model: what it has opened.
        trains: what trains.
        mixture: its rows.
        eval_rows: rows to validate on; None: there is no validation.
        keep: checkpoints to keep, the newest; None: all.
        done: steps taken.
        eval_loss: of the step just taken, if it was followed by validation.
        best: `step` and `eval_loss` of the lowest so far, and whether its checkpoint is kept `only` for that.
    """

    places: Places
    index: int
    model: LemaModel
    trains: Adapters | Weights
    mixture: Mixture
    eval_rows: int | None
    keep: int | None
    done: int = 0
    eval_loss: float | None = field(default=None, init=False)
    best: dict[str, Any] | None = field(default=None, init=False)

    @property
    def steps(self) -> int:
        """How many the phase has."""
        return self.places.plan.steps(self.index).steps

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of this phase.

        Raises:
            AdapterError: it is damaged, or of another kind of training.
        """
        about = self.trains.load(checkpoint)
        self.done, self.eval_loss, self.best = int(about["step"]), about.get("eval_loss"), about.get("best")
        if checkpoint != self.places.checkpoint(self.index, self.done):  # from elsewhere: the run has one of its own
            if self.best is not None and self.best["step"] != self.done:
                self.best = None  # that checkpoint stayed behind
            self.save()
        else:
            self._note()

    def run(self, log: PhaseLog, schedule: Any, stop: Callable[[], str | None]) -> None:
        """Take the steps that are left.

        Raises:
            Stopped: `stop` or a callback said so; a checkpoint of the last step was written.
        """
        plan, replicas = self.places.plan, self.model.backend.replicas
        boundary, rows, size = plan.boundaries()[self.index], plan.batch_size, plan.micro_batch_size
        for step in range(self.done, self.steps):
            log.fire("on_step_begin")
            batch = self.mixture.batch(step * rows, rows, replicas.rank, replicas.size, size)
            result = self.trains.step([] if batch is None else split_batch(batch, size), log.fire)
            schedule.step()
            self.done, self.eval_loss = step + 1, None
            log.stepped(result.loss, result.trained_tokens, result.tokens)
            ended = self.done == self.steps
            if log.control.should_log or ended:
                log.measured(plan.learning_rate(self.index, step), result.grad_norm)
            better = self._validated(log) if log.control.should_evaluate or ended else False
            if ended:
                log.event("phase_end", final_eval_loss=self.eval_loss, best=self.best)
            why = self._stopped(log, stop)
            due = bool(ended or log.control.should_save or why)
            if better and self.best is not None:
                self.best["only"] = not due
            if better or due:
                self.save()
                log.fire("on_save")
            if why and boundary.first_step + self.done < plan.num_steps:
                log.end()
                raise Stopped(
                    f"stopped by {why} after step {self.done} of phase {boundary.name}",
                    where=str(self.places.checkpoint(self.index, self.done)),
                    how="go on from there with --resume",
                )

    def save(self) -> None:
        """Write a checkpoint of the step just taken, say that it is the latest, and forget those that are too old.

        Raises:
            DiskError: it could not be written.
        """
        plan, phase = self.places.plan, self.places.plan.phases[self.index]
        base = Path(self.model.config.model_name_or_path)
        about = {
            "plan": plan.numbers(self.index + 1),
            "phase": phase.name,
            "kind": phase.trains,
            "step": self.done,
            "ended": self.done == self.steps,
            "base": str(base.absolute()) if base.exists() else str(base),
            "eval_loss": self.eval_loss,
            "best": self.best,
        }
        self.trains.save(self.places.checkpoint(self.index, self.done), about)
        self._note()

    def _note(self) -> None:
        def note() -> None:
            self.places.note_latest(self.index, self.done)
            self.places.note_best(self.index, self.best)
            self.places.forget_old(self.index, self.done, self.keep)

        first_alone(self.model.backend.replicas, note)

    def _validated(self, log: PhaseLog) -> bool:
        """Validate, if there is something to validate on; return whether the loss is the lowest of the phase."""
        if self.eval_rows is None:
            return False
        plan = self.places.plan
        found = validate(
            self.model.adapter,
            self.mixture,
            self.eval_rows,
            at_once=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
        )
        self.eval_loss = found["eval_loss"]
        better = self.best is None or self.eval_loss < self.best["eval_loss"]
        if better:
            self.best = {"step": self.done, "eval_loss": self.eval_loss}
        log.evaluated(found, self.best)
        return better

    def _stopped(self, log: PhaseLog, stop: Callable[[], str | None]) -> str | None:
        """Why the run ends after this step, in all processes alike; None: it goes on."""
        why = next((one for one in self.model.backend.replicas.everyone(stop()) if one), None)
        return why or ("a callback" if log.control.should_training_stop else None)
