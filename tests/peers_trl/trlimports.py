"""One file of TRL run twice: by TRL's own script, and by LEMA after `lema config import`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import Trainer, TrainerCallback
from yaml import safe_dump

from lema import LemaConfig
from lema.train import train
from lema.train.metrics import read_metrics
from lema_tools.importing.command import translated
from lema_tools.importing.translation import Translation

__all__ = [
    "Steps",
    "imported",
    "run_by_lema",
    "run_by_trl",
    "steps_of",
    "write_file",
    "write_rows",
]

TRAINERS = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer"}


@dataclass
class Steps:
    """The losses and gradient norms of a run's optimizer steps, unrounded."""

    losses: list[float]
    norms: list[float]


def write_rows(directory: Path, rows: list[dict[str, Any]], name: str = "train") -> Path:
    """Write rows as `datasets` and LEMA read them; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return directory


def write_file(file: Path, values: dict[str, Any]) -> Path:
    """Write a file for `trl ... --config`."""
    file.write_text(safe_dump(values), encoding="utf-8")
    return file


def imported(file: Path, kind: str) -> tuple[LemaConfig, Translation]:
    """Return the settings of the file's run, as `lema config import` translates it."""
    _, translation = translated([str(file)], tool="trl", objective=kind)
    known = LemaConfig.defaults()
    settings = {name: value for name, value in translation.settings.items() if name in known}
    return LemaConfig(**settings), translation


def run_by_lema(config: LemaConfig) -> Steps:
    """Run the settings as `lema train` does."""
    train(config)
    return steps_of(config)


def steps_of(config: LemaConfig) -> Steps:
    """Return what a run of LEMA has logged."""
    rows = [row for row in read_metrics(Path(config.output_dir) / "metrics.jsonl") if "loss" in row]
    return Steps([row["loss"] for row in rows], [row["grad_norm"] for row in rows])


def run_by_trl(file: Path, kind: str, *, loss: Callable[..., Any] | None = None) -> Steps:
    """Run a file by TRL's script.

    Args:
        file: the file.
        kind: the name of the script.
        loss: replaces the trainer's `compute_loss`; None: it stays.

    Returns:
        What the trainer computed at each step. Its own log has rounded losses.
    """
    script = import_module(f"trl.scripts.{kind}")
    arguments = ["--config", str(file)]
    parsed = script.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False)
    recorder = Recorder()
    with recorded(TRAINERS[kind], recorder, loss):
        script.main(*parsed)
    return recorder.steps


class Recorder(TrainerCallback):
    """Adds up the losses of a step's batches, and keeps the norm that the trainer logs."""

    def __init__(self) -> None:
        self.steps = Steps([], [])
        self.pending: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.losses.append(float(sum(self.pending[1:], start=self.pending[0])))
        self.pending = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "grad_norm" in logs:
            self.steps.norms.append(logs["grad_norm"])


@contextmanager
def recorded(name: str, recorder: Recorder, loss: Callable[..., Any] | None) -> Iterator[None]:
    """Let TRL's script make trainers that are recorded."""
    original = getattr(trl, name)

    def training_step(self: Trainer, *arguments: Any, **options: Any) -> torch.Tensor:
        value: torch.Tensor = original.training_step(self, *arguments, **options)
        recorder.pending.append(value.detach())
        return value

    def initialize(self: Trainer, *arguments: Any, **options: Any) -> None:
        original.__init__(self, *arguments, **options)
        self.add_callback(recorder)

    changed = {"training_step": training_step, "__init__": initialize}
    if loss is not None:
        changed["compute_loss"] = loss
    setattr(trl, name, type(name, (original,), changed))
    try:
        yield
    finally:
        setattr(trl, name, original)
