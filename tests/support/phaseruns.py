"""What runs of phases are made of: rows that repeat themselves, plans of a few steps, and how
two ends compare.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCABULARY

from lema.train import LemaTrainer
from lema.train.events import RunEvents
from lema.train.full.training import FullTraining
from lema.train.metrics import read_metrics
from lema.train.phases.paths import PhasePaths
from lema.train.phases.plan import PhasePlan
from lema.train.phases.stage import PhaseData

BLOCK = 12
ROWS = 4
STEP = BLOCK * ROWS
# Whatever changes what a run has on disk, but for lines of measurements.
WRITERS: dict[Any, tuple[str, ...]] = {
    FullTraining: ("save_checkpoint",),
    LemaTrainer: ("save_checkpoint",),
    PhaseData: ("leave_model",),
    PhasePaths: ("note_latest", "note_best", "forget_old"),
    RunEvents: ("event",),
}


def rows(seed: int, count: int = 12) -> list[dict[str, list[int]]]:
    """Return rows that repeat themselves, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (3,), generator=generator).repeat(4).tolist()
        found.append({"input_ids": tokens, "labels": tokens})
    return found


SOURCES = {"one": rows(1), "two": rows(2)}
HELD = {"one": rows(3), "two": rows(4)}
HALF = [{"name": "one", "rate": 0.5}, {"name": "two", "rate": 0.5}]
FULL = {
    "trains": "full",
    "tokens": 4 * STEP,
    "mixture": HALF,
    "learning_rate": 3e-3,
    "name": "whole",
}
LORA = {
    "trains": "lora",
    "tokens": 4 * STEP,
    "mixture": HALF,
    "learning_rate": 2e-2,
    "name": "adapters",
}


def plan_of(*given: dict[str, Any], **settings: Any) -> PhasePlan:
    return PhasePlan(
        phases=list(given), batch_size=ROWS, max_length=BLOCK, **{"micro_batch_size": 2, **settings}
    )


def two(steps: int = 2, **settings: Any) -> PhasePlan:
    """Weights, then adapters, of so many steps each."""
    return plan_of({**FULL, "tokens": steps * STEP}, {**LORA, "tokens": steps * STEP}, **settings)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in a directory's files."""
    files = sorted(directory.glob("*.safetensors"))
    assert files
    return {
        f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def assert_same(one: Path, other: Path) -> None:
    mine = weights(one)
    theirs = weights(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def logged(directory: Path, key: str, phase: str | None = None) -> list[Any]:
    """Return what the lines of metrics that count say of something, in order."""
    found = read_metrics(directory / "metrics.jsonl")
    return [row[key] for row in found if key in row and phase in (None, row["phase"])]


class Killed(BaseException):
    """Ends a run where a test says."""


def count_writes(monkeypatch: pytest.MonkeyPatch, after: int | None = None) -> Callable[[], int]:
    """Count what a run writes, and let the `after`-th be its last; return what tells how many it
    was.
    """
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if after is not None and count > after:
                raise Killed
            return function(*arguments, **options)

        return call

    for kind, names in WRITERS.items():
        for name in names:
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    return lambda: count
