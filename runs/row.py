"""Some steps with a file of configs/models, and the README's row of them: what scripts for
owners of a GPU share.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from lema import LemaConfig, LemaModel
from lema.config.printing import hush
from lema.config.units import human_bytes
from lema.engine.head.loss import split_batch
from lema_tools.prove import write_model

CONFIGS = Path(__file__).parents[1] / "configs" / "models"
TINY = {
    "max_length": 16,
    "batch_size": 4,
    "device_memory": None,
    "host_memory": None,
    "device": "cpu",
}


def main(name: str, size: int, arguments: Sequence[str] | None = None) -> None:
    """Train a named checkpoint for some steps on random rows, and print its row of the table."""
    hush()
    parser = argparse.ArgumentParser(
        description=f"{name} on {size} GB of device memory: prints the README's row"
    )
    parser.add_argument(
        "--model", help="directory of the checkpoint; else its hub id, which is downloaded"
    )
    parser.add_argument("--device", default="cuda", help="backend, as `lema backends` lists them")
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not timed")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model on the CPU, to see that it runs"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        changes = {
            "device": given.device,
            "output_dir": scratch,
            "train_data": None,
            "save_steps": 0,
        }
        if given.model is not None:
            changes["model_name_or_path"] = given.model
        if given.tiny:
            model = write_model(Path(scratch) / "model", layers=8, hidden=64)
            changes |= {**TINY, "model_name_or_path": str(model)}
        config = LemaConfig.from_yaml(CONFIGS / name / f"{size}GB.yaml", **changes)
        sys.stdout.write(
            _row("a tiny model" if given.tiny else name, size, config, given.steps) + "\n"
        )


def _row(name: str, size: int, config: LemaConfig, steps: int) -> str:
    """Train, and return the row: model, memory, tokens/s, how it went, how and where."""
    losses = list[float]()
    seconds = list[float]()
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        trainer = model.get_trainer()
        words = model.skeleton.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            ids = torch.randint(
                0, words, (config.batch_size, config.max_length or 1024), generator=generator
            )
            began = time.perf_counter()
            batches = split_batch({"input_ids": ids, "labels": ids}, config.micro_batch_size)
            losses.append(trainer.accumulate(batches).loss)
            seconds.append(time.perf_counter() - began)
        peak = model.backend.memory().peak
        device = model.backend.device
    speed = config.batch_size * (config.max_length or 1024) / median(seconds[1:] or seconds)
    went = f"{human_bytes(peak)} at the peak, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    where = (
        f"`runs/{Path(sys.argv[0]).name}`, {device}, torch {torch.__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )
    return f"| {name} | {size} GB | {speed:,.0f} | {went} | {where} |"
