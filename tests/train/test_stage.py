"""A stage saves what it was given, forgets no checkpoint that is needed, and moves on only when it is on the disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from lema.errors import DiskFull, NonFiniteError
from lema.train.events import Position, RunEvents
from lema.train.health.stepguard import StepGuard
from lema.train.stage import Drawn, Pending, Progress, Stage, StagePolicy
from lema.train.steps import Steps

POLICY = StagePolicy(
    has_epochs=True,
    trains=None,
    completes_last_step=False,
    stops_for_callbacks=False,
    keeps_best=False,
    schedule_counts_dropped=False,
)


@dataclass
class Data:
    """Rows of nothing, which notes what a stage does with its checkpoints."""

    num_steps: int = 4
    evaluates: bool = True
    retained: list[tuple[int, int | None]] = field(default_factory=list)

    def position(self, done: int) -> Position:
        return Position(done, None, {}, f"step {done}", Path(f"checkpoint-{done}"))

    def draw(self, step: int) -> Drawn:
        return Drawn([], f", row {step}", {})

    def evaluate(self) -> dict[str, float]:
        return {"eval_loss": 2.5}

    def saved_state(self, progress: Progress, pending: Pending | None) -> dict[str, Any]:
        return {"step": progress.done, "left": pending}

    def retain(self, progress: Progress, sound: int | None) -> None:
        self.retained.append((progress.done, sound))


@dataclass
class Saving:
    """What trains, as far as a checkpoint needs it."""

    is_full: bool = False
    saved: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)

    def save_checkpoint(self, directory: Path, extra: dict[str, Any], writers: list[Any]) -> None:
        if self.is_full:
            raise DiskFull("no space", where=str(directory))
        self.saved.append((directory.name, extra, len(writers)))


@dataclass
class Events:
    """Events of a run in whose last steps there were so many signs."""

    steps: int = 0

    @property
    def signs(self) -> "Events":
        return self

    @property
    def carried(self) -> dict[str, Any]:
        return {"window": [1.0]}

    def save_state(self, directory: Path) -> None:
        raise AssertionError("only a writer of a checkpoint calls this")


def stage_of(data: Data, steps: Saving, progress: Progress | None = None) -> Stage:
    return Stage(cast(Steps, steps), data, POLICY, progress)


def events_of(steps: int = 0) -> RunEvents:
    return cast(RunEvents, Events(steps))


def test_a_checkpoint_has_the_state_of_the_data_and_of_the_events() -> None:
    data, steps = Data(), Saving()
    stage = stage_of(data, steps)
    stage.progress.count_step()
    stage.save(events_of(), {"after": "step"})
    state = {"step": 1, "left": {"after": "step"}, "window": [1.0]}
    assert steps.saved == [("checkpoint-1", state, 1)]
    assert (stage.progress.saved, stage.progress.sound) == (1, 1)


def test_before_any_event_it_has_what_the_checkpoint_before_carried() -> None:
    data, steps = Data(), Saving()
    stage = stage_of(data, steps, Progress(3, carried={"window": [7.0]}, sound=2))
    stage.save(None, None)
    assert steps.saved == [("checkpoint-3", {"step": 3, "left": None, "window": [7.0]}, 0)]
    assert data.retained == [(3, 2)]


def test_while_a_run_looks_dead_the_checkpoint_of_before_is_kept() -> None:
    data = Data()
    stage = stage_of(data, Saving())
    for signs in (0, 1, 2, 0):
        stage.progress.count_step()
        stage.save(events_of(signs), None)
    assert data.retained == [(1, 1), (2, 1), (3, 1), (4, 4)]
    assert stage.has_taken_all


def test_a_save_that_fails_moves_nothing_on() -> None:
    data, steps = Data(), Saving(is_full=True)
    stage = stage_of(data, steps, Progress(2, saved=1, sound=1))
    with pytest.raises(DiskFull):
        stage.save(events_of(), None)
    assert (stage.progress.saved, stage.progress.sound, data.retained) == (1, 1, [])


def test_the_loss_of_an_evaluation_holds_until_the_next_step() -> None:
    stage = stage_of(Data(), Saving())
    stage.evaluate()
    evaluated = stage.progress.eval_loss
    stage.progress.count_step()
    assert (evaluated, stage.progress.done) == (2.5, 1)
    assert stage.progress.eval_loss is None


class Model:
    """A model of which a guard asks only who may warn."""

    class backend:
        class replicas:
            first = True


def test_a_guard_drops_as_many_steps_as_it_may_and_then_says_so() -> None:
    guard = StepGuard(cast(Any, Model), 1)
    fault = NonFiniteError("the loss is nan", where="step 3", how="lower learning_rate")
    guard.refuse(lambda: fault)
    guard.refuse(lambda: pytest.fail("the step has a fault already"))
    assert guard.fault == fault
    with pytest.warns(UserWarning, match=r"step 3 was dropped, 1 of at most 1: the loss is nan"):
        guard.drop(fault, 3)
    dropped = guard.dropped
    guard.begin_step()
    assert (guard.skipped, dropped) == (1, fault)
    assert guard.dropped is None
    again = NonFiniteError("the loss is inf", where="step 4", how="lower learning_rate")
    with pytest.raises(NonFiniteError) as caught:
        guard.refuse(lambda: again)
    how = "1 steps were dropped before this one (max_skipped_steps); lower learning_rate"
    assert caught.value.how == how
    assert guard.skipped == 1
