"""SIGTERM at a random instant of a run, evaluation and save included: no optimizer step that was
taken is lost.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import forked
from faults.outcome import Outcome
from faults.shortrun import STEPS, ShortRun, checkpoint_steps, last_lines, short_run

__all__ = ["run"]

FAULT = "SIGTERM at a random instant of a run, in an evaluation and in a save"
REQUIRED = "exit 75, no completed optimizer step lost, and the run that goes on ends the same"
STOPPED = 75
KINDS = ("training", "evaluation", "save", "training")  # what the signal comes into, by case
BEGUN, TAKEN, EVALUATING, SAVING = range(4)  # marks
MARK_OF = {"training": BEGUN, "evaluation": EVALUATING, "save": SAVING}
TRIES = 20  # to hit a run before it ends


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Stop `count` runs."""
    began = time.monotonic()
    draw = random.Random(seed)
    failures = []
    made = short_run()
    options: dict[str, Any] = {
        "eval_data": str(made.place / "eval.jsonl"),
        "eval_steps": 2,
        "save_steps": 3,
    }
    started = time.monotonic()
    straight = made.straight(**options)
    whole = time.monotonic() - started
    for case in range(count):
        kind = KINDS[case % len(KINDS)]
        fault = _case(made, straight, kind, draw, whole, options)
        if fault:
            failures.append(f"case {case}, in {kind}: {fault}")
        if report is not None:
            report(f"SIGTERM {case + 1}/{count}, in {kind}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(
    made: ShortRun,
    straight: Path,
    kind: str,
    draw: random.Random,
    whole: float,
    options: dict[str, Any],
) -> str:
    for _ in range(TRIES):
        made.forget("cut")
        made.marks.clear()
        # A save is the third step's or the last one's, and nothing is left to stop after that.
        times = draw.randint(1, {"training": 1, "evaluation": 2, "save": 1}[kind])
        child = forked.fork(lambda: _marked(made, "cut", options), made.log("cut"))
        while not child.ended() and made.marks[MARK_OF[kind]] < times:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, whole if kind == "training" else 0.02))
        if not child.send(signal.SIGTERM):
            continue
        ended = child.wait()
        taken = made.marks[TAKEN]
        if ended.code == 0 and taken == STEPS:
            continue  # it came after the last step
        kept = max(checkpoint_steps(made.out("cut")), default=-1)
        if ended.code != STOPPED:
            return f"it ended with {ended.code} after step {taken}: {last_lines(ended.said)}"
        if kept != taken:
            return f"{taken} steps were taken, and the newest checkpoint is of step {kept}"
        return made.fault_of("cut", made.child("cut", resume=True, **options), straight)
    return f"the run ended before the signal {TRIES} times"


def _marked(made: ShortRun, name: str, options: dict[str, Any]) -> int:
    """Train, and mark what is under way and how many steps have been taken."""
    from lema.train import LemaTrainer
    from lema.train.loop import RunLoop
    from lema.train.stage import Stage

    marks = made.marks

    def counted(owner: Any, method: str, mark: int) -> None:
        original = getattr(owner, method)

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            marks[mark] += 1
            return original(self, *arguments, **keywords)

        setattr(owner, method, call)

    counted(RunLoop, "_loop", BEGUN)
    counted(Stage, "evaluate", EVALUATING)
    counted(Stage, "save", SAVING)
    step = LemaTrainer._step_or_drop

    def stepped(self: LemaTrainer, *arguments: Any) -> Any:
        dropped = step(self, *arguments)
        marks[TAKEN] = self.global_step
        return dropped

    LemaTrainer._step_or_drop = stepped  # type: ignore[method-assign]
    return made.train(name, **options)
