"""A run stopped at each of its twenty steps, with and without dropout, split batches, accumulation,
either strategy.

Every other one is stopped in the midst of a pass, which is dropped, and the others in the
optimizer's step, which is finished first.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import forked
from faults.outcome import Outcome
from faults.shortrun import ShortRun, checkpoint_steps, last_lines, short_run

__all__ = ["run"]

FAULT = (
    "stopped at each of 20 steps x dropout 0/0.1 x micro-batches 1/4 x accumulation 1/2, "
    "streamed or resident"
)
REQUIRED = "exit 75, then bitwise the same loss curve and adapter"
STEPS = 20
# dropout, rows in a micro-batch, accumulation
WAYS = tuple(itertools.product((0.0, 0.1), (None, 1), (1, 2)))
STOPPED = 75


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Stop `count` of the 160 runs, in an order that the seed draws."""
    every = [(way, step) for way in range(len(WAYS)) for step in range(1, STEPS + 1)]
    random.Random(seed).shuffle(every)
    chosen = every[:count]
    began = time.monotonic()
    failures = []
    made = short_run()
    count = len(chosen)
    for number, (way, step) in enumerate(chosen):
        options = _options(way, "streaming" if (way + step) % 2 else "resident")
        fault = _case(made, made.straight(**options), step, options, in_pass=step % 2 == 0)
        told = (
            f"step {step}, dropout {WAYS[way][0]}, micro-batches of {WAYS[way][1] or 'all'} "
            "rows, accumulation "
        )
        told += f"{WAYS[way][2]}, {options['strategy']}"
        if fault:
            failures.append(f"{told}: {fault}")
        if report is not None:
            report(f"stop {number + 1}/{count}, {told}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _options(way: int, strategy: str) -> dict[str, Any]:
    dropout, rows, accumulation = WAYS[way]
    return {
        "max_steps": STEPS,
        "save_steps": 0,
        "lora_dropout": dropout,
        "batch_size": 4,
        "micro_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "strategy": strategy,
    }


def _case(
    made: ShortRun, straight: Path, step: int, options: dict[str, Any], *, in_pass: bool
) -> str:
    made.forget("cut")
    ended = forked.run(lambda: _stopped(made, step, options, in_pass=in_pass), made.log("cut"))
    done = step - 1 if in_pass else step
    if done == STEPS:  # nothing is left to stop
        return made.fault_of("cut", ended, straight)
    if ended.code != STOPPED:
        return f"it ended with {ended.code}: {last_lines(ended.said)}"
    if checkpoint_steps(made.out("cut")) != [done]:
        return (
            f"stopped after step {done}, and the checkpoints are of "
            f"{checkpoint_steps(made.out('cut'))}"
        )
    return made.fault_of("cut", made.child("cut", resume=True, **options), straight)


def _stopped(made: ShortRun, step: int, options: dict[str, Any], *, in_pass: bool) -> int:
    from lema.train import LemaTrainer

    method = "accumulate" if in_pass else "_step_or_drop"
    original = getattr(LemaTrainer, method)

    def call(self: LemaTrainer, *arguments: Any, **keywords: Any) -> Any:
        if self.global_step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments, **keywords)

    setattr(LemaTrainer, method, call)
    return made.train("cut", **options)
