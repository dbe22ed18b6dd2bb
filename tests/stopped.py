"""What each of several processes does in `tests/test_stop_processes.py`, started by `torchrun`: it stops, and goes on.

Arguments: a directory with `model`, and whether the weights are sharded. The process that is asked says so alone; all
must stop after the same step, with the checkpoint of a run that nobody stopped, and go on from it as that one did.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from smallrun import adapter_of, same, settings, token_rows
from test_stop import EVAL_ROWS, RUN, assert_same_checkpoint

from lema import LemaModel
from lema.errors import Stopped

ROWS = token_rows(11)  # three batches: of the last, the second process has but one row


def stopped_in_turn(place: Path, *, sharded: bool) -> None:
    """Run to the end once; then again from the first step, stopped here and there by one of the processes."""
    rank, changes = int(os.environ["RANK"]), {**RUN, "shard_weights": sharded}
    begun, cut = (settings(place / "model", place / f"{name}-{sharded}", **changes) for name in ("whole", "cut"))
    begun = begun.model_copy(update={"save_steps": 1})
    first = LemaModel(begun)  # it holds the group of processes together until the end
    first.initialize_lora()
    asked = 0

    def count() -> None:
        nonlocal asked
        asked += 1

    first.get_trainer().fit(ROWS, EVAL_ROWS, stop=count)
    expected, polls = adapter_of(first.skeleton), asked
    model = LemaModel(cut)
    model.initialize_lora()
    trainer = model.get_trainer()
    for turn in range(6):
        trainer.load_checkpoint(Path(begun.output_dir) / "checkpoint-1")
        left = iter(range(1 + turn * polls // 9, -1, -1))

        def why(mine: bool = turn % 2 == rank, left: object = left) -> str | None:
            return "a test" if mine and next(left, 1) == 0 else None  # type: ignore[call-overload]

        with pytest.raises(Stopped, match="stopped by a test after step") as stopped:
            trainer.fit(ROWS, EVAL_ROWS, stop=why)
        kept = Path(stopped.value.where)
        found: list[str | None] = [None, None]
        dist.all_gather_object(found, kept.name)
        assert found[0] == found[1]
        assert_same_checkpoint(kept, Path(begun.output_dir) / kept.name)
    trainer.fit(ROWS, EVAL_ROWS)
    assert same(adapter_of(model.skeleton), expected)
    model.close()
    first.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    stopped_in_turn(Path(sys.argv[1]), sharded=sys.argv[2] == "sharded")
    sys.stdout.write("as if nobody had stopped it\n")
