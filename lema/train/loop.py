"""The run loop: one optimizer step after the other, and what is due after each.

It drives a `Stage`: a whole plain run, or one phase of a run of phases. Lines of metrics,
callbacks, evaluation, checkpoints, a disk that is full, a stop amid a step and the agreement of
several processes are here, once.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lema.backend import Replicas
from lema.backend.interrupt import Stop, StopRequested, agreed
from lema.engine import StreamedModel
from lema.errors import ConfigError, DeadRun, DiskFull, Stopped
from lema.storage.diskspace import unsaved, warn_passed_over
from lema.train.checkpoint.resume import Generators
from lema.train.events import RunEvents
from lema.train.health.signs import DEAD_STEPS, GO_ON, TO_DO
from lema.train.health.watchdog import watched
from lema.train.stage import Pending, Progress, Stage, StagePolicy

__all__ = ["RunLoop"]


class RunLoop:
    """Takes the steps of a stage that are left.

    Args:
        stage: what is trained, and how far it is.
        schedule: of the learning rate, at the stage's step.
        events: lines of metrics and callbacks.
        at_layer: is asked before each layer whether to give the step up and stop; None: nobody is.
        after_step: is asked after each step of a stage that callbacks stop.

    Attributes:
        last_eval: what was measured last.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: LRScheduler,
        events: RunEvents,
        *,
        at_layer: Stop | None = None,
        after_step: Stop | None = None,
    ) -> None:
        self._stage = stage
        self._schedule = schedule
        self._events = events
        self._at_layer = at_layer
        self._after = after_step
        # to the point of a stop; returns pending actions
        self._go_back: Callable[[], Pending | None] | None = None
        self.last_eval: dict[str, float] = {}

    @property
    def _progress(self) -> Progress:
        return self._stage.progress

    @property
    def _policy(self) -> StagePolicy:
        return self._stage.policy

    @property
    def _model(self) -> StreamedModel:
        return self._stage.steps.model

    @property
    def _replicas(self) -> Replicas:
        return self._model.backend.replicas

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
            carried = self._progress.carried
            self._events.begin(stage.steps, self._schedule, stage.position, carried)
            if self._policy.trains is not None and self._progress.saved is None:
                self._events.event("phase_begin", trains=self._policy.trains)
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
        pending = self._go_back()
        stopped = self._stopped(why)
        if pending is not None or self._progress.saved != self._progress.done:
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
        backend = self._model.backend
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
        at = self._stage.position
        how = "continue with --resume (resume=True)"
        return Stopped(f"stopped by {why} after {at.name}", where=str(at.checkpoint), how=how)

    def _loop(self) -> None:
        stage = self._stage
        progress = self._progress
        events = self._events
        in_epoch = False
        begins = progress.done == 0 and not events.state.log_history
        if stage.steps.config.eval_on_start and begins:
            self._remember()
            self._evaluate(counts=False)
        if (pending := progress.pending) is not None:
            vars(events.control).update(pending["asked"])
            self._after_step(pending["numbers"], pending["after"])
        while not stage.has_taken_all and not self._leaves():
            self._remember()
            if not in_epoch and self._policy.has_epochs:
                events.fire("on_epoch_begin")
                stage.data.begin_epoch(progress.done)
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
        events.log_steps(numbers)
        events.event("dead", sign=sign.kind, why=sign.why, dead_steps=count, stopped=True)
        events.end()
        before = None if (at := stage.sound_checkpoint) is None else at.checkpoint
        checkpoint_note = (
            "there is no checkpoint of before"
            if before is None
            else f"the checkpoint of before is {before}"
        )
        what = f"nothing was learnt in the last {count} steps: {sign.why}"
        how = TO_DO[sign.kind] + GO_ON
        if before is not None:
            how += f". --resume takes the newest checkpoint: delete those after {before.name} first"
        raise DeadRun(what, where=f"{stage.position.name}; {checkpoint_note}", how=how)

    def _leaves(self) -> bool:
        """Whether callbacks have ended the stage before its last step."""
        ended = bool(self._events.control.should_training_stop)
        return ended and not self._policy.stops_for_callbacks

    def _is_epoch_end(self) -> bool:
        """Whether after this step comes what is due after an epoch."""
        stage = self._stage
        return stage.has_taken_all or stage.position.is_epoch_end or self._leaves()

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step, all its rows in one layer-major pass; return its learning
        rate and norm.
        """
        stage = self._stage
        events = self._events
        rate = float(self._schedule.get_last_lr()[0])
        step = self._progress.done
        drawn = stage.data.draw(step)
        more = step + 1 < stage.num_steps
        has_following = more and self._model.prefix is not None
        result = stage.steps.accumulate(
            drawn.micro_batches,
            more=more,
            following=stage.data.draw(step + 1).micro_batches if has_following else None,
            where=drawn.where,
            on_event=events.fire,
        )
        if self._policy.schedule_counts_dropped:
            with warnings.catch_warnings():
                # torch warns if the first was not
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
                self._schedule.step()
        self._progress.count_step()
        events.move(stage.position)
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
        events = self._events
        if after == "step":
            self._act(numbers, after)
        if after != "epoch":
            if not self._policy.has_epochs:
                return True
            if events.control.should_epoch_stop:
                what = (
                    "a callback set should_epoch_stop, but the position in the data follows "
                    "only from the step"
                )
                how = "set should_training_stop, or lower num_train_epochs"
                raise ConfigError(what, where=f"step {self._progress.done}", how=how)
            events.agree()  # because evaluating or saving may have been the last
            if not self._is_epoch_end():
                return True
            events.fire("on_epoch_end")
            events.agree()
        self._act(numbers, "epoch")
        return False

    def _act(self, numbers: Mapping[str, Any], after: str) -> None:
        """Log, evaluate and save, if callbacks have requested it or the stage completes its last
        step; stop on request.
        """
        stage = self._stage
        progress = self._progress
        policy = self._policy
        events = self._events
        is_last = policy.completes_last_step and stage.has_taken_all
        before = progress.best
        if events.control.should_log or is_last:
            events.log_steps(numbers)
        if stage.data.evaluates and (events.control.should_evaluate or is_last):
            pending = {"after": after, "asked": events.asked(), "numbers": dict(numbers)}
            self._remember(pending)
            self._evaluate()
        if is_last and policy.trains is not None:
            dead = {} if events.signs.verdict is None else {"dead": events.signs.verdict}
            loss = progress.eval_loss
            events.event("phase_end", final_eval_loss=loss, best=progress.best, **dead)
        why = self._why() if policy.stops_for_callbacks else None
        due = bool(is_last or events.control.should_save or why)
        better = progress.best is not before
        if better and progress.best is not None:
            progress.set_best({**progress.best, "only": not due})
        left: Pending | None = None
        if after == "step" and policy.has_epochs and self._is_epoch_end():
            # a run may go on for longer, or with more patience
            not_again = ("should_save", "should_training_stop")
            asked = {
                name: requested
                for name, requested in events.asked().items()
                if name not in not_again
            }
            left = {"after": "saved", "asked": asked, "numbers": dict(numbers)}
        if (due or (better and policy.keeps_best)) and self._saves_now(why, before, left):
            events.fire("on_save")
        if why:
            events.end()
            raise self._stopped(why)

    def _evaluate(self, *, counts: bool = True) -> None:
        """Evaluate, and if it `counts` keep the best so far; or `ConfigError`: its metric was
        not measured.
        """
        stage = self._stage
        progress = self._progress
        events = self._events
        metric, is_greater_better = stage.steps.config.best_by
        self.last_eval = metrics = stage.evaluate()
        if metric not in metrics:
            what = f"metric_for_best_model: {metric} was not measured"
            raise ConfigError(what, where="evaluation", how=f"there are {', '.join(metrics)}")
        events.log(metrics)
        events.fire("on_evaluate", dict(metrics))
        events.agree()
        value = metrics[metric]
        best = None if progress.best is None else progress.best[metric]
        if counts and (best is None or (value > best if is_greater_better else value < best)):
            progress.set_best({"step": progress.done, metric: value})
        self._report_best()

    def _report_best(self) -> None:
        """Have callbacks know the best evaluation of the stage so far, and after which step of
        the run it was made.
        """
        best = self._progress.best
        state = self._events.state
        metric, _ = self._stage.steps.config.best_by
        at = None if best is None else self._stage.data.position(best["step"])
        state.best_metric = None if best is None else best[metric]
        state.best_global_step = None if at is None else at.step

    def _why(self) -> str | None:
        """Return why the run stops after this step, in all processes alike; None: it goes on, or
        it has ended.
        """
        why = agreed(self._replicas, None if self._after is None else self._after())
        state = self._events.state
        if state.global_step >= state.max_steps:
            return None
        return why or ("a callback" if self._events.control.should_training_stop else None)

    def _saves_now(
        self, why: str | None, best: Mapping[str, Any] | None, left: Pending | None
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
            if stage.has_taken_all or self._leaves():
                raise
            if self._replicas.first:
                warn_passed_over(error, stage.position.name)
            events.control.should_save = False  # the next interval asks again
            if self._policy.keeps_best:
                self._progress.set_best(best)
            return False
        return True

    def _save(self, pending: Pending | None) -> None:
        with self._model.patient("saving a checkpoint"):
            self._stage.save(self._events, pending)
