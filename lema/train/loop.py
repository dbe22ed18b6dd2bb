"""The run loop: one optimizer step after the other, and what is due after each.

It drives `Steps` over a `Stage`: a whole plain run, or one phase of a run of phases. Lines of
metrics, callbacks, evaluation, checkpoints, a disk that is full, a stop amid a step and the
agreement of several processes are here, once.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lema.backend.interrupt import Stop, StopRequested, agreed
from lema.errors import ConfigError, DeadRun, DiskFull, Stopped
from lema.storage.diskspace import unsaved, warn_passed_over
from lema.train.checkpoint.resume import Generators
from lema.train.events import Position, RunEvents
from lema.train.health.signs import DEAD_STEPS, GO_ON, TO_DO
from lema.train.health.watchdog import watched
from lema.train.steps import Steps

__all__ = ["Drawn", "Pending", "RunLoop", "Stage"]

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


class Stage(Protocol):
    """A stretch of steps that train one thing on one kind of rows: a plain run, or one phase of
    a run of phases.
    """

    steps: Steps  # what trains
    num_steps: int  # how many steps the stage has
    # What a phase trains, such as `lora`; None: the stage is a plain run. A phase begins and ends
    # with a line of metrics, and ends with an evaluation and a checkpoint, whatever the intervals
    # say; the checkpoint with the lowest loss is kept besides; and a callback that ends training
    # stops it as a signal does. A plain run does what callbacks ask, as `transformers.Trainer`
    # would, and has epochs.
    trains: str | None
    evaluates: bool  # whether there is anything to evaluate on
    done: int  # steps that were taken or dropped; the loop counts them here
    # `step` and `eval_loss`, or what else `metric_for_best_model` names, of the best evaluation so
    # far, and whether nothing but that (`only`) asked for its checkpoint; None: nothing was
    # evaluated yet. The loop keeps it up.
    best: dict[str, Any] | None
    # after the step just taken; None: nothing was evaluated after it. The loop keeps it up
    eval_loss: float | None
    # what a checkpoint that is resumed says was not done any more; None: nothing
    pending: Pending | None
    carried: Mapping[str, Any]  # what `RunEvents.carried` was when that was written
    saved: int | None  # the last step with an up-to-date checkpoint on disk; None: there is none
    # The last step with a checkpoint of a run that did not look dead, which is kept; None: there is
    # none. The loop keeps it up.
    sound: int | None

    @property
    def schedule(self) -> LRScheduler:
        """The schedule of the learning rate."""

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps of the stage."""

    def draw(self, step: int) -> Drawn:
        """Return the rows of a step, counted from 0."""

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and other measurements on rows that are not trained on."""

    def save(self, events: RunEvents, pending: Pending | None) -> None:
        """Write a checkpoint of the last step, with pending actions; remove old ones.
        `DiskFull`: it does not fit.
        """


class RunLoop:
    """Takes the steps of a stage that are left; `last_eval` is what was measured last. `at_layer`
    is asked before each layer whether to give the step up and stop; `after_step` after a phase's
    step."""

    def __init__(
        self,
        stage: Stage,
        events: RunEvents,
        *,
        at_layer: Stop | None = None,
        after_step: Stop | None = None,
    ) -> None:
        self._stage = stage
        self._events = events
        config = stage.steps.config
        self._is_phase = stage.trains is not None
        (self._metric, self._greater) = config.best_by
        self._keeps_best = self._is_phase or config.load_best_model_at_end
        self._at_layer = at_layer
        self._after = after_step
        self._model = stage.steps.model
        self._backend = self._model.backend
        # to the point of a stop; returns pending actions
        self._go_back: Callable[[], Pending | None] | None = None
        self.last_eval: dict[str, float] = {}

    def run(self) -> None:
        """Take the steps; raise `Stopped`, with a checkpoint of the last step there, where somebody
        who was asked said so, or in a phase a callback; `DiskFull` where there is no space for the
        checkpoint that the stage ends with."""
        stage = self._stage
        log = self._events.state.log_history
        self._report_best()
        last = next((row for row in reversed(log) if "eval_loss" in row), {})
        self.last_eval = {name: number for name, number in last.items() if name.startswith("eval_")}
        with ExitStack() as stack:
            stack.callback(self._model.stream.cancel)  # leases announced for a step that never came
            stack.enter_context(watched(self._model, stage.steps.config))
            self._events.begin(
                stage.steps, stage.schedule, stage.position(stage.done), stage.carried
            )
            if self._is_phase and stage.saved is None:
                self._events.event("phase_begin", trains=stage.trains)
            why: str | None = None
            with (
                nullcontext()
                if self._at_layer is None
                else self._model.interruptible(self._at_layer)
            ):
                try:
                    self._loop()
                except StopRequested as request:  # before a layer
                    why = request.why
            if why is not None:
                raise self._cut_short(why)

    def _cut_short(self, why: str) -> Stopped:
        """Go back to the end of the last step, save that unless it is saved, and return what
        ends the run.
        """
        assert self._go_back is not None, "there is no run to stop"
        stage = self._stage
        pending = self._go_back()
        stopped = self._stopped(why)
        if pending is not None or stage.saved != stage.done:
            try:
                self._save(pending)
            except DiskFull as error:
                raise unsaved(stopped, error) from stopped
            self._events.fire("on_save")
        self._events.end()
        return stopped

    def _remember(self, pending: Pending | None = None) -> None:
        """Note what a stop goes back to: what changes from step to step otherwise than by an
        optimizer's step.
        """
        backend = self._backend
        state = self._events.state  # not `self`, which holds what is made here
        generators = Generators.now(backend)
        fields = dict(vars(state))
        num_logged = len(state.log_history)  # the log is long, and not copied

        def go_back() -> Pending | None:
            generators.put_back(backend)
            vars(state).update(fields)  # in which callbacks may write at any time
            del state.log_history[num_logged:]
            return pending

        self._go_back = go_back

    def _stopped(self, why: str) -> Stopped:
        at = self._stage.position(self._stage.done)
        how = "continue with --resume (resume=True)"
        return Stopped(f"stopped by {why} after {at.name}", where=str(at.checkpoint), how=how)

    def _loop(self) -> None:
        stage = self._stage
        events = self._events
        in_epoch = False
        if stage.steps.config.eval_on_start and stage.done == 0 and not events.state.log_history:
            self._remember()
            self._evaluate(counts=False)
        if (pending := stage.pending) is not None:
            vars(events.control).update(pending["asked"])
            self._after_step(pending["numbers"], pending["after"])
        while stage.done < stage.num_steps and not self._leaves():
            self._remember()
            if not in_epoch and not self._is_phase:
                events.fire("on_epoch_begin")
            in_epoch = True
            events.fire("on_step_begin")
            numbers = self._step()
            events.fire("on_step_end")
            events.agree()
            self._end_if_dead(numbers)
            in_epoch = self._after_step(numbers)

    def _end_if_dead(self, numbers: Mapping[str, Any]) -> None:
        """Raise `DeadRun` after many steps in which nothing was learnt, in all processes alike,
        because all go by the same sums. No checkpoint is written: the last of before is worth more.
        """
        stage = self._stage
        events = self._events
        sign = events.signs.sign
        count = events.signs.steps
        if sign is None or count < DEAD_STEPS or not stage.steps.config.stop_when_dead:
            return
        events.measured(numbers)
        events.event("dead", sign=sign.kind, why=sign.why, dead_steps=count, stopped=True)
        events.end()
        before = None if stage.sound is None else stage.position(stage.sound).checkpoint
        checkpoint_note = (
            "there is no checkpoint of before"
            if before is None
            else f"the checkpoint of before is {before}"
        )
        what = f"nothing was learnt in the last {count} steps: {sign.why}"
        how = TO_DO[sign.kind] + GO_ON
        if before is not None:
            how += f". --resume takes the newest checkpoint: delete those after {before.name} first"
        raise DeadRun(what, where=f"{stage.position(stage.done).name}; {checkpoint_note}", how=how)

    def _leaves(self) -> bool:
        """Whether callbacks have ended a plain run before its last step."""
        return bool(self._events.control.should_training_stop) and not self._is_phase

    def _is_epoch_end(self) -> bool:
        """Whether after this step of a plain run comes what is due after an epoch."""
        stage = self._stage
        return (
            stage.done >= stage.num_steps
            or stage.position(stage.done).is_epoch_end
            or self._leaves()
        )

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step, all its rows in one layer-major pass; return its learning
        rate and norm.
        """
        stage = self._stage
        events = self._events
        rate = float(stage.schedule.get_last_lr()[0])
        drawn = stage.draw(stage.done)
        more = stage.done + 1 < stage.num_steps
        has_following = more and self._model.prefix is not None
        result = stage.steps.accumulate(
            drawn.micro_batches,
            more=more,
            following=stage.draw(stage.done + 1).micro_batches if has_following else None,
            where=drawn.where,
            on_event=events.fire,
        )
        # the schedule of a plain run is of steps that the optimizer took, and its trainer steps it
        if self._is_phase:
            with warnings.catch_warnings():
                # torch warns if the first was not
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
                stage.schedule.step()
        stage.done = stage.done + 1
        stage.eval_loss = None
        events.move(stage.position(stage.done))
        if (why := result.dropped) is None:
            events.counted(result, rate)
        else:
            skipped = stage.steps.skipped_steps
            events.event("skipped", skipped=skipped, why=why.what, at=why.where, **drawn.about)
        return {"learning_rate": rate, "grad_norm": result.grad_norm}

    def _after_step(self, numbers: Mapping[str, Any], after: str = "step") -> bool:
        """Do what is due after a step, and after the epoch if it has ended; return whether it goes
        on. `numbers` are the step's, for its line of metrics; with `after` at `epoch`, what is due
        after it has been done."""
        stage = self._stage
        events = self._events
        if after == "step":
            self._act(numbers, after)
        if after != "epoch":
            if self._is_phase:
                return True
            if events.control.should_epoch_stop:
                what = (
                    "a callback set should_epoch_stop, but the position in the data follows "
                    "only from the step"
                )
                how = "set should_training_stop, or lower num_train_epochs"
                raise ConfigError(what, where=f"step {stage.done}", how=how)
            events.agree()  # because evaluating or saving may have been the last
            if not self._is_epoch_end():
                return True
            events.fire("on_epoch_end")
            events.agree()
        self._act(numbers, "epoch")
        return False

    def _act(self, numbers: Mapping[str, Any], after: str) -> None:
        """Log, evaluate and save, if callbacks have requested it or a phase ends; stop a phase
        on request.
        """
        stage = self._stage
        events = self._events
        is_last = self._is_phase and stage.done == stage.num_steps
        before = stage.best
        if events.control.should_log or is_last:
            events.measured(numbers)
        if stage.evaluates and (events.control.should_evaluate or is_last):
            pending = {"after": after, "asked": events.asked(), "numbers": dict(numbers)}
            self._remember(pending)
            self._evaluate()
        if is_last:
            dead = {} if events.signs.verdict is None else {"dead": events.signs.verdict}
            events.event("phase_end", final_eval_loss=stage.eval_loss, best=stage.best, **dead)
        why = self._why() if self._is_phase else None
        due = bool(is_last or events.control.should_save or why)
        better = stage.best is not before
        if better and stage.best is not None:
            stage.best["only"] = not due
        left: Pending | None = None
        if after == "step" and not self._is_phase and self._is_epoch_end():
            # a run may go on for longer, or with more patience
            not_again = ("should_save", "should_training_stop")
            asked = {
                name: requested
                for name, requested in events.asked().items()
                if name not in not_again
            }
            left = {"after": "saved", "asked": asked, "numbers": dict(numbers)}
        if (due or (better and self._keeps_best)) and self._saves_now(why, before, left):
            events.fire("on_save")
        if why:
            events.end()
            raise self._stopped(why)

    def _evaluate(self, *, counts: bool = True) -> None:
        """Evaluate, and if it `counts` keep the best so far; or `ConfigError`: its metric was
        not measured.
        """
        stage = self._stage
        events = self._events
        metric = self._metric
        self.last_eval = metrics = stage.evaluate()
        stage.eval_loss = metrics["eval_loss"]
        if metric not in metrics:
            what = f"metric_for_best_model: {metric} was not measured"
            raise ConfigError(what, where="evaluation", how=f"there are {', '.join(metrics)}")
        events.log(metrics)
        events.fire("on_evaluate", dict(metrics))
        events.agree()
        value = metrics[metric]
        best = None if stage.best is None else stage.best[metric]
        if counts and (best is None or (value > best if self._greater else value < best)):
            stage.best = {"step": stage.done, metric: value}
        self._report_best()

    def _report_best(self) -> None:
        """Have callbacks know the best evaluation of the stage so far, and after which step of
        the run it was made.
        """
        best = self._stage.best
        state = self._events.state
        state.best_metric = None if best is None else best[self._metric]
        state.best_global_step = None if best is None else self._stage.position(best["step"]).step

    def _why(self) -> str | None:
        """Return why a phase ends after this step, in all processes alike; None: it goes on, or
        the run has ended.
        """
        why = agreed(self._backend.replicas, None if self._after is None else self._after())
        state = self._events.state
        if state.global_step >= state.max_steps:
            return None
        return why or ("a callback" if self._events.control.should_training_stop else None)

    def _saves_now(
        self, why: str | None, best: dict[str, Any] | None, left: Pending | None
    ) -> bool:
        """Write a checkpoint; return whether it is there: on a full disk a run that does not end
        goes on without.
        """
        stage = self._stage
        events = self._events
        try:
            self._save(left)
        except DiskFull as error:
            if why:
                stopped = self._stopped(why)
                raise unsaved(stopped, error) from stopped
            if stage.done >= stage.num_steps or self._leaves():
                raise
            if self._backend.replicas.first:
                warn_passed_over(error, stage.position(stage.done).name)
            events.control.should_save = False  # the next interval asks again
            if self._keeps_best:
                stage.best = best
            return False
        return True

    def _save(self, pending: Pending | None) -> None:
        with self._model.patient("saving a checkpoint"):
            self._stage.save(self._events, pending)
        self._stage.saved = self._stage.done
        if not self._events.signs.steps:
            self._stage.sound = self._stage.done
