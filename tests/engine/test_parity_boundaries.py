"""Wherever boundary activations wait, a step has the whole model's numbers; on disk, none grow
with depth.
"""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Outcome, assert_same, draw_b, streamed_model, streamed_step
from smallrun import opened, run_fit, same, settings, token_rows, write_model
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError, DiskError
from lema.stream.ring import DeviceSlot
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]
OutcomeOf = Callable[..., Outcome]

every_tier = pytest.mark.parametrize("tier", ["device", "host", "disk"])


@pytest.mark.slow
@every_tier
@pytest.mark.parametrize(
    ("name", "dropout", "count", "poison"),
    [("llama", 0.0, 4, True), ("llama", 0.0, 4, False), ("gpt2", 0.1, 4, True)],
    ids=["llama", "llama-aliased", "gpt2-dropout"],
)
def test_a_step_is_the_whole_models_wherever_boundaries_wait(
    checkpoint_of: CheckpointOf,
    outcome_of: OutcomeOf,
    tmp_path: Path,
    tier: str,
    name: str,
    dropout: float,
    count: int,
    poison: bool,
) -> None:
    checkpoint = checkpoint_of(name, False, dropout)
    expected = outcome_of(name, False, dropout, count, True)
    options = {
        "gradient_checkpointing": True,
        "lora_dropout": dropout,
        "offload_dir": tmp_path,
        "poison": poison,
    }
    with streamed_model(checkpoint, boundary_activations=tier, **options) as model:
        draw_b(model.lora_manager)
        for _ in range(2):  # the second in the memory of the first
            assert_same(streamed_step(model, micro_batches(count, padding=True)), expected)
        assert model.adapter.activations.arena.tier == tier
        assert model.adapter.activations.arena.memory_bytes > 0
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_leaves_the_same_adapter_wherever_boundaries_wait(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model", num_hidden_layers=4)
    rows = token_rows(16)  # batches of different lengths
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 2,
        "lora_dropout": 0.1,
    }
    adapters = []
    for tier in ("auto", "device", "host", "disk"):
        config = settings(base, tmp_path / tier, boundary_activations=tier, **options)
        adapters.append(run_fit(config, rows, token_rows(3))[1])
    assert all(same(found, adapters[0]) for found in adapters)


class Live(TorchDispatchMode):
    """Finds the largest sum of bytes of tensors alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._sum = 0
        self._alive = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._sum += storage.nbytes() - self._alive.get(storage._cdata, (None, 0))[1]
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._sum > self.peak:  # unless some of it is gone
            self._alive = {
                key: value for key, value in self._alive.items() if not value[0].expired()
            }
            self._sum = sum(nbytes for _, nbytes in self._alive.values())
            self.peak = max(self.peak, self._sum)
        return result


def peak_of_a_step(base: Path, tmp_path: Path, tier: str) -> int:
    ids = torch.randint(1, 300, (4, 120), generator=torch.Generator().manual_seed(0))
    config = settings(
        base, tmp_path, boundary_activations=tier, lora_rank=1, lora_target_modules=["q_proj"]
    )
    # whose slots are buffers, not tensors made in a step
    with closing(LemaModel(config, backend=CpuBackend())) as model:
        model.initialize_lora()
        streamed_step(model, [{"input_ids": ids, "labels": ids}] * 2)
        with Live() as live:
            streamed_step(model, [{"input_ids": ids, "labels": ids}] * 2)
        return live.peak + model.adapter.activations.arena.memory_bytes * (tier != "device")


@pytest.mark.slow
def test_only_on_the_device_do_boundaries_make_a_step_larger_with_depth(tmp_path: Path) -> None:
    shallow = write_model(tmp_path / "shallow", num_hidden_layers=4)
    deep = write_model(tmp_path / "deep", num_hidden_layers=10)
    one = 4 * 120 * 32 * 4  # bytes of a boundary
    grown = {
        tier: peak_of_a_step(deep, tmp_path / "out", tier)
        - peak_of_a_step(shallow, tmp_path / "out", tier)
        for tier in ("device", "disk")
    }
    assert grown["device"] >= 6 * 2 * one
    assert grown["disk"] < one / 4  # adapters have gradients


def test_a_disk_that_is_full_stops_the_step_and_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_model(tmp_path / "model", num_hidden_layers=4)
    batch = micro_batches(2)
    with opened(settings(base, tmp_path, boundary_activations="disk")) as model:
        expected = streamed_step(model, batch)

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(DiskError, match="writing failed for boundary activations"):
                streamed_step(model, batch)
        model.memory.cancel()
        model.skeleton.zero_grad()
        assert_same(streamed_step(model, batch), expected)


def test_without_recomputation_no_boundary_waits_and_a_place_for_them_is_refused(
    checkpoint_of: CheckpointOf,
) -> None:
    with streamed_model(checkpoint_of("llama")) as model:
        streamed_step(model, micro_batches(2))
        assert model.adapter.activations.arena.memory_bytes == 0
    for tier in ("host", "disk"):
        with pytest.raises(ConfigError, match="set gradient_checkpointing: true"):
            LemaConfig("model", boundary_activations=tier, gradient_checkpointing=False)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_graphs_that_wait_for_their_backward_hold_no_slot(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    slots: list[StorageWeakRef] = []
    wait = DeviceSlot.lease

    def noting(place: DeviceSlot) -> Tensor:
        slots.append(StorageWeakRef((slot := wait(place)).untyped_storage()))
        return slot

    monkeypatch.setattr(DeviceSlot, "lease", noting)
    with streamed_model(checkpoint_of("llama"), gradient_checkpointing=recompute) as model:
        loss = model.adapter.loss(micro_batches(2))
        assert len(slots) == NUM_LAYERS
        assert all(slot.expired() for slot in slots)
        loss.backward()
