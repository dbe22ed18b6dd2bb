"""What each process does in `tests/train/test_sharded.py`, started by `torchrun`: steps, and what
they must be.

Arguments: a directory that the test has written, and what to do. A process that finds something
wrong ends with it.
"""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Outcome, assert_same, draw_b, streamed_model, streamed_step
from stream_fakes import share_of
from tiny import ARCHITECTURES, Checkpoint, micro_batches
from torch import Tensor

from lema import LemaModel
from lema.errors import ReadError
from lema.plan.cost import Speeds
from lema.stream.placement import part_bytes
from lema.stream.reader import LayerReader
from lema.stream.schedule import fetched, training_order

CASES: dict[str, dict[str, Any]] = {  # of a model's name: how it is opened
    "llama": {"gradient_checkpointing": True, "prefetch_depth": 1},
    "llama, kept": {
        "gradient_checkpointing": False,
        "spent": {"residents": frozenset({1, 5}), "host_cached": frozenset({0, 2, 8})},
        "poison": False,
    },
    "llama, cast": {
        "gradient_checkpointing": True,
        "dtype": "bfloat16",
        "strategy": "resident",
        "poison": False,
    },
    "llama, head in pieces": {"gradient_checkpointing": True, "head": "stream"},
    "quantised": {"gradient_checkpointing": False, "poison": False},
    "quantised, kept": {"gradient_checkpointing": True, "spent": {"residents": frozenset({0, 7})}},
    "mixtral": {
        "gradient_checkpointing": True,
        "lora_target_modules": ["q_proj"],
        # PEFT sets them in place
        "lora_target_parameters": [
            "experts.down_proj",
            "experts.gate_up_proj",
        ],
        "strategy": "resident",
        "poison": False,
    },
}
SOME = ("llama, kept", "llama, head in pieces", "quantised, kept", "mixtral")
BATCHES = 2


def checkpoints_in(directory: Path) -> dict[str, Checkpoint]:
    """Return the models that the test has written, of which only the streamed one is looked at."""
    found: dict[str, str] = json.loads((directory / "streamed.json").read_text())
    return {
        name: Checkpoint(ARCHITECTURES["llama"], Path(path), Path(path))
        for name, path in found.items()
    }


def take(model: LemaModel) -> tuple[Outcome, list[Tensor]]:
    """Take two steps on the same batches; return the second's outcome, and its logits."""
    draw_b(model.lora_manager)
    streamed_step(model, micro_batches(BATCHES, padding=True))
    logits: list[Tensor] = []
    with torch.no_grad():
        model.adapter.evaluate(micro_batches(BATCHES, padding=True), logits)
    return streamed_step(model, micro_batches(BATCHES, padding=True)), logits


def opened(name: str, checkpoint: Checkpoint, **changes: Any) -> Any:
    return streamed_model(checkpoint, **CASES[name] | changes)


def compare(directory: Path, names: Collection[str]) -> None:
    """Sharded or with shared host memory, every process has the numbers of one alone."""
    checkpoints = checkpoints_in(directory)
    expected = torch.load(directory / "expected.pt", weights_only=False)
    for name in names:
        for sharded in (True, False):
            if not sharded and not {"strategy", "spent"} & CASES[name].keys():
                continue  # nothing is shared
            with opened(name, checkpoints[name.partition(",")[0]], shard_weights=sharded) as model:
                found, logits = take(model)
                assert_same(found, expected[name][0])
                assert all(map(torch.equal, logits, expected[name][1])), name
                assert model.memory.sharded == sharded
                if sharded:
                    _bytes_are_those_of_a_part(model)
                elif model.memory.host_cached:
                    _host_memory_is_shared(model)
    _a_process_without_rows(checkpoints["llama"], expected["llama"])
    _a_read_that_fails_at_the_start(checkpoints["llama"])
    _measuring_differs(checkpoints["llama"], expected["llama"])


def _bytes_are_those_of_a_part(model: LemaModel) -> None:
    """Each process reads, uploads and gathers what the formula says, in a step after others."""
    stream = model.memory
    replicas = model.backend.replicas
    order = training_order(len(stream.layers))
    before = stream.counters
    streamed_step(model, micro_batches(BATCHES, padding=True))
    after = stream.counters
    gathered = fetched(order * 2, 2)[len(fetched(order, 2)) :]
    held = stream.residents
    once = len(fetched(fetched(order, 2), stream.num_slots, stream.residents))
    uploaded = fetched(fetched(order * 2, 2), stream.num_slots, held)[once:]
    on_disk = held | stream.host_cached
    read = fetched(fetched(order * 2, 2), stream.num_slots, on_disk)
    read = read[len(fetched(fetched(order, 2), stream.num_slots, on_disk)) :]
    sizes = [part_bytes(layer.nbytes, replicas.size) for layer in stream.layers]
    packed = not model.backend.memory().shared
    shares = [
        share_of(layer, replicas.rank, replicas.size, packed=packed) for layer in stream.layers
    ]
    assert after.bytes_gathered - before.bytes_gathered == sum(
        (replicas.size - 1) * sizes[one] for one in gathered
    )
    assert after.bytes_uploaded - before.bytes_uploaded == sum(shares[one][1] for one in uploaded)
    assert after.bytes_read - before.bytes_read == sum(shares[one][0].read_bytes for one in read)


def _host_memory_is_shared(model: LemaModel) -> None:
    """The layers are once in memory, in which every process has its proportional share."""
    stream = model.memory
    replicas = model.backend.replicas
    for layer in sorted(stream.host_cached):
        _ = int(stream._host[layer].sum())  # every page of it is looked at
    whole = sum(stream.layers[layer].nbytes for layer in stream.host_cached)
    replicas.exchange(None)
    found = _kilobytes("memfd:lema")
    replicas.exchange(None)  # nobody has gone before all have looked
    assert found["Size"] == found["Rss"] == whole // 1024
    assert found["Pss"] <= found["Rss"] / replicas.size + 1
    # What nobody else reads: its share of those layers, and what is read on the way to leases and
    # outside the layers.
    kept = sum(stream.layers[layer].read_bytes for layer in stream.host_cached)
    all_read = replicas.exchange(stream.counters.bytes_read)
    ring = [
        layer
        for layer in range(len(stream.layers))
        if layer not in stream.residents | stream.host_cached
    ]
    if not ring and not stream.residents:
        outside = model._opened.stored.byte_layout(
            [one for one in model._opened.stored.records if ".layers." not in one]
        ).read_bytes
        assert sum(all_read) == kept + replicas.size * outside


def _kilobytes(mapping: str) -> dict[str, int]:
    """Return what the system says of the process's mappings of that name, in KiB."""
    total: dict[str, int] = {}
    wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if " " in key:  # a new mapping: addresses, rights, ...
            wanted = mapping in line
        elif wanted and rest.endswith("kB"):
            total[key] = total.get(key, 0) + int(rest.split()[0])
    return total


def _a_process_without_rows(checkpoint: Checkpoint, expected: Any) -> None:
    """It leases what the others do, in a step and in an evaluation, and they have the right
    numbers.
    """
    with opened("llama", checkpoint, shard_weights=True) as model:
        if model.backend.replicas.rank == 1:
            model.adapter.join_idle()
            model.adapter.join_idle(training=False)
            model.adapter.join_idle()
        else:
            assert_same(take(model)[0], expected[0])


def _a_read_that_fails_at_the_start(checkpoint: Checkpoint) -> None:
    """Where one process cannot read its share, all say so, and go on."""
    for sharded in (False, True):
        with (
            opened("llama", checkpoint, strategy="resident", shard_weights=sharded) as model,
            pytest.MonkeyPatch.context() as patch,
        ):
            assert model.allocation.host_cached
            if model.backend.replicas.rank == 1:
                patch.setattr(LayerReader, "_read", _fail)
            with pytest.raises(ReadError, match="the disk is gone"):
                _ = model.memory


def _measuring_differs(checkpoint: Checkpoint, expected: Any) -> None:
    """What each process measures is another thing; that all keep the same layers is not."""
    shape = {
        "device_memory": "2MB",
        "max_length": 14,
        "batch_size": 4,
        "micro_batch_size": 2,
        "poison": False,
    }
    speeds = Speeds(1e15 if dist.get_rank() else 1.0)
    for sharded in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lema.plan.measure._speeds", lambda *_: (speeds, {}))
            with opened("llama", checkpoint, shard_weights=sharded, **shape) as model:
                replicas = model.backend.replicas
                told = replicas.exchange((model.allocation.residents, model.allocation.saved))
                assert told == [told[0]] * replicas.size and told[0][0], told
                assert_same(take(model)[0], expected[0])


def _fail(*_: Any) -> None:
    raise ReadError("the disk is gone")


def failing(directory: Path) -> None:
    """In the middle of a step one process cannot read any more."""
    checkpoints = checkpoints_in(directory)
    with opened("llama", checkpoints["llama"], shard_weights=True) as model:
        take(model)
        if model.backend.replicas.rank == 1:
            LayerReader._read = _fail  # type: ignore[method-assign]
        take(model)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # once for all models
    if sys.argv[2] == "failing":
        failing(Path(sys.argv[1]))
    else:
        compare(Path(sys.argv[1]), {"all": CASES, "some": SOME}[sys.argv[2]])
    dist.destroy_process_group()
