"""Runs as they lie on disk: a plain one, one of phases, and one that was killed at its first
checkpoint.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import TEXTS, config_writer, lema, write_rows
from smallrun import write_model

from lema.train.trainer import LemaTrainer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tools") / "model")


def trained(model: Path, place: Path, *words: str, **changes: Any) -> Path:
    """Train as the settings say; return the output directory."""
    place.mkdir()
    held = str(write_rows(place / "held.jsonl", TEXTS[:2]))
    settings = {
        "max_steps": 6,
        "save_steps": 3,
        "eval_steps": 3,
        "eval_data": held,
        "logging_steps": 1,
    }
    assert lema("train", config_writer(model, place)(**{**settings, **changes}), *words) == 0
    return place / "out"


@pytest.fixture(scope="session")
def plain_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain") / "run"
    return trained(
        tiny_model, place, "--trace", str(place / "out" / "trace.json"), device_memory="1GB"
    )


@pytest.fixture(scope="session")
def phase_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("phases")
    rows = str(write_rows(place / "rows.jsonl", TEXTS))
    step: dict[str, Any] = {"tokens": 2 * 2 * 16, "mixture": {"one": 1.0}}
    settings: dict[str, Any] = {
        "model_name_or_path": str(tiny_model),
        "output_dir": str(place / "out"),
        "device": "cpu",
        "train_data": {"one": rows},
        "eval_data": {"one": rows},
        "eval_rows": 2,
        "batch_size": 2,
        "max_length": 16,
        "logging_steps": 1,
        "save_steps": 2,
        "phases": [
            {"name": "whole", "trains": "full", "learning_rate": 1e-3, **step},
            {"name": "adapters", "trains": "lora", "learning_rate": 1e-2, **step},
        ],
    }
    file = place / "phases.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    assert lema("train", file) == 0
    return place / "out"


@pytest.fixture(scope="session")
def killed_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose process was killed while it saved: its lock's file is still there, and so is a
    line cut short.
    """
    place = tmp_path_factory.mktemp("killed") / "run"
    if (child := os.fork()) == 0:
        # the threads of this process's parallel regions are not there in the child
        torch.set_num_threads(1)
        LemaTrainer.save_checkpoint = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        trained(tiny_model, place)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with (place / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.')
    return place / "out"
