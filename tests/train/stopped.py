"""What each process does in `tests/train/test_stop_processes.py`: it is stopped, here and there,
and goes on.

The process that is asked says so alone; all must stop after the same step, with the checkpoint of a
run that nobody stopped, and go on from it as that one did.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from smallrun import adapter_of, same, settings, token_rows
from test_stop import EVAL_ROWS, RUN, assert_same_checkpoint

from lema import LemaModel
from lema.errors import Stopped

DIVIDED = {"device": "neuron", "neuron_runtime": "emulated", "tensor_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"shard_weights": True},
    "divided": DIVIDED,
    "divided-by-tokens": DIVIDED | {"sequence_parallel": True},
}
LEASES = 3 * 15 + 2 * 8  # of three steps, eight layers up and seven down, and of two evaluations


def stopped_in_turn(place: Path, way: str, rows: int = 11) -> None:
    """Run to the end once; then again from the first step, stopped here and there by one of the
    processes.

    Args:
        place: of the model, and of what the runs write.
        way: how the processes share the work.
        rows: to train on, four at a time; of the last batch, not every process has some.
    """
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    data = token_rows(rows)
    changes = {**RUN, **WAYS[way]}
    begun, cut = (
        settings(place / "model", place / f"{name}-{way}-{size}", **changes)
        for name in ("whole", "cut")
    )
    begun = begun.model_copy(update={"save_steps": 1})
    first = LemaModel(begun)  # it holds the group of processes together until the end
    first.initialize_lora()
    asked = 0

    def count() -> None:
        nonlocal asked
        asked += 1

    first.get_trainer().fit(data, EVAL_ROWS, stop=count)
    expected = adapter_of(first.skeleton)
    polls = asked
    every: list[Any] = [None] * size
    dist.all_gather_object(every, polls)
    assert max(every) >= LEASES, "some layers are begun without asking"
    model = LemaModel(cut)
    model.initialize_lora()
    trainer = model.get_trainer()
    for turn in range(6):
        trainer.load_checkpoint(Path(begun.output_dir) / "checkpoint-1")
        left = iter(range(1 + turn * polls // 9, -1, -1))

        def why(mine: bool = turn % size == rank, left: object = left) -> str | None:
            return "a test" if mine and next(left, 1) == 0 else None  # type: ignore[call-overload]

        with pytest.raises(Stopped, match="stopped by a test after step") as stopped:
            trainer.fit(data, EVAL_ROWS, stop=why)
        kept = Path(stopped.value.where)
        dist.all_gather_object(every, kept.name)
        assert set(every) == {kept.name}
        assert_same_checkpoint(kept, Path(begun.output_dir) / kept.name)
    trainer.fit(data, EVAL_ROWS)
    assert same(adapter_of(model.skeleton), expected)
    model.close()
    first.close()
