"""Masters and moments that host memory does not hold lie in a file, and the training is the
same, bit for bit.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fulltraining import Weights, attention_of_the_last_four, everything, opened
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor

import lema.train.full.masters
import lema.train.full.memory
from lema.backend import Backend
from lema.backend.hostmemory import anonymous
from lema.errors import DiskError, MemoryLimitError
from lema.plan.work.trainable_bytes import trainable_bytes
from lema.train.full.training import FullTraining
from lema_cpu import CpuBackend

STEPS = 3


def mapped_here(directory: Path) -> list[str]:
    """Files under a directory that are mapped into this process's memory, with a name or
    without.
    """
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line
    ]


def trained(training: FullTraining) -> tuple[list[Tensor], Weights, list[float | None]]:
    losses = []
    norms = []
    for _ in range(STEPS):
        losses.append(torch.tensor(training.accumulate(micro_batches(2)).loss))
        norms.append(training.grad_norm)
    state = {
        f"{key}.{name}": one.clone()
        for name, master in training.masters.items()
        for key, one in (("master", master.detach()), *training.optimizer.state[master].items())
    }
    return losses, state, norms


def counts(training: FullTraining) -> dict[int, int]:
    inside = [name for name in training.masters if ".layers." in name]
    found: dict[int, int] = {}
    for name in inside:
        layer = int(name.split(".")[2])
        found[layer] = found.get(layer, 0) + training.masters[name].numel()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "clipped", "selection", "backend"),
    [
        ("float32", None, everything, CpuBackend),
        ("float32", 0.5, everything, lambda: CpuBackend(poison=True)),
        ("bfloat16", None, everything, lambda: CpuBackend(poison=True)),
        ("bfloat16", 0.5, everything, CpuBackend),
        ("float32", 0.5, attention_of_the_last_four, CpuBackend),
        ("bfloat16", None, attention_of_the_last_four, CpuBackend),
    ],
)
def test_a_file_holds_what_the_limit_does_not(
    dtype: str,
    clipped: float | None,
    selection: Callable[[str], bool],
    backend: Callable[[], Backend],
    tmp_path: Path,
    checkpoint_of: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, dtype)
    settings = {"max_grad_norm": clipped, "learning_rate": 1e-3, "offload_dir": str(tmp_path)}
    with opened(checkpoint, selection, backend(), **settings) as (model, training):
        assert (
            training.master_store.memory.mapped_bytes == 0
            and not training.master_store.memory.mapped
        )
        expected = trained(training)
        kind = getattr(torch, dtype)
        layers = {
            layer: trainable_bytes([("", count, kind)]) for layer, count in counts(training).items()
        }
        whole = {layer: one.movable(clipped=clipped is not None) for layer, one in layers.items()}
        in_layers = sum(one.nbytes + whole[layer] for layer, one in layers.items())
        outside = training.master_store.memory.host_bytes - in_layers
        assert (
            0
            <= outside
            <= 12 * sum(m.numel() for n, m in training.masters.items() if ".layers." not in n)
        )
        anyway, _ = training.master_store._limits(model.config)
    order = sorted(whole)
    stay = order[len(order) // 2 :]
    go = order[: len(order) // 2]
    limit = anyway + sum(whole[layer] for layer in stay)

    taken: list[int] = []

    def counted(nbytes: int) -> Tensor:
        taken.append(nbytes)
        return anonymous(nbytes)

    monkeypatch.setattr(lema.train.full.memory, "anonymous", counted)
    with opened(checkpoint, selection, backend(), host_memory=limit, **settings) as (
        model,
        training,
    ):
        assert training.master_store.memory.mapped == set(go)
        assert training.master_store.memory.mapped_bytes == sum(whole[layer] for layer in go)
        assert (
            training.master_store.memory.host_bytes
            == in_layers + outside - training.master_store.memory.mapped_bytes
        )
        streams = sum(model.memory.layers[layer].nbytes for layer in model.memory.host_cached)
        assert sum(taken) + streams <= limit
        before = (
            training.master_store.memory.host_bytes,
            training.master_store.memory.mapped_bytes,
            list(taken),
        )
        assert mapped_here(tmp_path) and not list(tmp_path.iterdir()), "the file has a name"
        found = trained(training)
        assert before == (
            training.master_store.memory.host_bytes,
            training.master_store.memory.mapped_bytes,
            taken,
        ), "a step took more"
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(found[0], expected[0], strict=True)
        )
        assert found[1].keys() == expected[1].keys() and found[2] == expected[2]
        assert not [
            name for name, one in found[1].items() if not torch.equal(one, expected[1][name])
        ]
    del model, training
    gc.collect()
    assert not mapped_here(tmp_path)


def test_a_limit_that_does_not_hold_what_streams_is_refused(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, "bfloat16")
    with opened(checkpoint) as (model, training):
        streams = sum(model.memory.layers[layer].nbytes for layer in model.memory.host_cached)
        anyway, _ = training.master_store._limits(model.config)
    assert streams < anyway
    refused = pytest.raises(MemoryLimitError, match=f"needs {anyway:,} bytes of host memory")
    with refused, opened(checkpoint, host_memory=anyway - 1):
        pass
    with opened(checkpoint, host_memory=anyway) as (_, training):
        assert training.master_store.memory.mapped == set(range(NUM_LAYERS))


def test_free_space_is_looked_at_first(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, "bfloat16")
    with opened(checkpoint) as (model, training):
        anyway, _ = training.master_store._limits(model.config)

    def full(self: object, nbytes: int) -> None:
        raise DiskError(f"{nbytes:,} bytes are needed", where=str(tmp_path))

    monkeypatch.setattr("lema.storage.spillfile.OffloadFile.reserve", full)
    refused = pytest.raises(DiskError, match="bytes are needed")
    with refused, opened(checkpoint, host_memory=anyway, offload_dir=str(tmp_path)):
        pass


@pytest.mark.parametrize("free", [10_000, None])
def test_without_a_limit_it_is_what_is_free(
    free: int | None,
    tmp_path: Path,
    checkpoint_of: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lema.train.full.masters, "memory_left", lambda: free)
    checkpoint = checkpoint_of("llama", False, 0.0, "bfloat16")
    if free is None:
        with opened(checkpoint) as (_, training):
            assert not training.master_store.memory.mapped
    else:
        with pytest.raises(MemoryLimitError), opened(checkpoint, offload_dir=str(tmp_path)):
            pass
