"""What each of two processes does in `tests/train/test_record_processes.py`: it trains, and the first is killed."""

import os
import signal
from pathlib import Path

from faults.diskseam import DiskSeam
from killed import of_the_run
from phaseruns import FULL, HELD, LORA, SOURCES, STEP, plan_of
from smallrun import settings, token_rows

from lema import LemaModel
from lema.train.phases.run import run_phases

WAYS = {
    "plain": {"num_train_epochs": 2.0, "save_steps": 1, "logging_steps": 2},
    "phases": {"save_steps": 2, "eval_steps": 1, "max_grad_norm": 1.0},
}


def trained(model: Path, out: Path, way: str, at: int) -> None:
    """Train, and go on where there is a checkpoint; at change number `at` of the disk the process that makes it is
    killed, unless that is below 0."""
    config, seen = settings(model, out, lora_dropout=0.1, **WAYS[way]), 0  # type: ignore[arg-type]

    def look(kind: str, path: Path, done: float) -> None:
        nonlocal seen
        seen += of_the_run(kind, path)
        if seen > at >= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    resume = any(out.rglob("checkpoint-*"))
    if os.environ["RANK"] == "0":  # it makes all of them
        out.mkdir(parents=True, exist_ok=True)
        DiskSeam(out, look).install()
    if way == "plain":
        opened = LemaModel(config)
        opened.initialize_lora()
        opened.get_trainer().fit(token_rows(8), token_rows(3, seed=2), resume=resume)
        opened.close()
    else:
        plan = plan_of({**FULL, "tokens": 2 * STEP}, {**LORA, "tokens": 2 * STEP})
        run_phases(config, plan, SOURCES, held_out=HELD, resume=resume)
