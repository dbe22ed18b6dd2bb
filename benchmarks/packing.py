"""Trained tokens per second of processor time on chats of uneven length: padded to their batch,
cut, and packed.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

Rows are drawn with a median of 60 tokens and a longest of 1,024, of which the second half is
trained. Each arm trains one epoch over all of them. `padded`: every micro-batch has the columns of
its batch, as before they were cut. `cut`: each is as wide as its longest row, and rows are put
together by length. `packed`: `packing: true`, as many packs in a step as hold the tokens of a batch
of rows.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Shape, report, write_model

from lema import LemaConfig, LemaModel
from lema.data import Batches, collate
from lema.train.batch import packed

LONGEST = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument(
        "--micro-batch", type=int, default=4, help="rows computed at once; packs: a fourth of them"
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    rows = drawn(arguments.rows)
    tokens = sum(len(row["input_ids"]) for row in rows)
    packs = max(1, round(arguments.batch * tokens / len(rows) / LONGEST))
    arms = {
        "padded": (arguments.batch, arguments.micro_batch, False),
        "cut": (arguments.batch, arguments.micro_batch, False),
        "packed": (packs, max(1, arguments.micro_batch // 4), True),
    }
    found = []
    with tempfile.TemporaryDirectory() as name:
        shape = Shape(
            arguments.hidden, 11 * arguments.hidden // 4, arguments.layers, 4096, dtype="float32"
        )
        write_model(Path(name), shape)
        for arm, (batch, micro, packing) in arms.items():
            one = epoch(
                Path(name), arm, rows, batch_size=batch, micro_batch_size=micro, packing=packing
            )
            found.append(one)
            one["x padded"] = (
                one["trained tokens per user s"] / found[0]["trained tokens per user s"]
            )
            print(
                {
                    name: round(value, 4) if isinstance(value, float) else value
                    for name, value in one.items()
                }
            )
    report("packing", found, shape)


def drawn(count: int) -> list[dict[str, list[int]]]:
    """Draw rows of a skewed set of chats."""
    draw = torch.Generator().manual_seed(0)
    lengths = (
        torch.randn(count, generator=draw).mul(0.9).exp().mul(60).clamp(8, LONGEST).int().tolist()
    )
    lengths[0] = LONGEST
    made = [torch.randint(1, 4096, (length,), generator=draw).tolist() for length in lengths]
    return [
        {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]}
        for ids in made
    ]


def epoch(model: Path, arm: str, rows: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Train on all rows once, after a step that is not counted; return what was computed and
    what it took.
    """
    config = LemaConfig(
        str(model), device="cpu", gradient_checkpointing=True, save_steps=0, **settings
    )
    opened = LemaModel(config)
    opened.initialize_lora()
    trainer = opened.get_trainer()
    data = packed(rows, opened.adapter, config)
    batches = Batches(
        data, config.batch_size, config.seed, micro_batch_size=config.micro_batch_size
    )
    trainer.accumulate(batches.micro_batches([0])[-1:])
    trained = 0
    positions = 0
    losses = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for step in range(batches.steps_per_epoch):
        parts = batches.micro_batches([step])
        if arm == "padded":
            places = batches.rows(step)
            size = config.micro_batch_size or config.batch_size
            tensors: dict[str, Any] = {**collate([data[place] for place in places])}
            starts = range(0, len(places), size)
            parts = [{name: one[at : at + size] for name, one in tensors.items()} for at in starts]
        result = trainer.accumulate(parts)
        trained += result.trained_tokens
        positions += sum(part["input_ids"].numel() for part in parts)
        losses.append(result.loss * result.trained_tokens)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    opened.close()
    return {
        "arm": arm,
        "steps": batches.steps_per_epoch,
        "positions computed": positions,
        "trained tokens": trained,
        "user s": round(seconds, 1),
        "trained tokens per user s": trained / seconds,
        "mean loss": sum(losses) / trained,
    }


if __name__ == "__main__":
    main()
