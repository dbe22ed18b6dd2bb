"""A device that computes in host memory: nothing is copied to it, and the numbers are the CPU's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fulltraining
import pytest
import torch
from seconddevice import SecondDevice
from seconddevice.backend import SecondBackend
from seconddevice.steps import WITHIN, by_turns, opened, take
from tiny import Checkpoint, micro_batches
from torch.nn.attention import SDPBackend, sdpa_kernel

from lema.backend.hostmemory import anonymous
from lema.backend.torchstreams import _Queue
from lema_accelerator import AcceleratorBackend

CheckpointOf = Callable[..., Checkpoint]
NBYTES = 1 << 20

MEMORY: dict[str, dict[str, Any]] = {
    "layers stream": {},
    "four slots ahead": {"prefetch_depth": 4},
    "layers in host memory": {"strategy": "resident"},
    "boundaries on the disk": {"boundary_activations": "disk"},
    "embeddings on the disk": {"embeddings": "disk"},
    "the head is leased": {"head": "stream"},
    "activations are kept": {"gradient_checkpointing": False},
    "activations are offloaded to the disk": {
        "gradient_checkpointing": False,
        "activation_offloading": "disk",
    },
    "memory as the plan has it": {"device_memory": "auto"},
}


@pytest.fixture(autouse=True)
def _no_driver(second: SecondDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reaches all memory, and so has nothing that locks it."""
    monkeypatch.delattr(torch.second, "cudart")


def test_torch_is_asked_whether_the_device_has_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(AcceleratorBackend("second")) as backend:
        assert not backend.memory().shared
    for name in ("is_integrated", "integrated"):
        properties = SimpleNamespace(**{name: True})
        monkeypatch.setattr(
            torch.second, "get_device_properties", lambda _, is_=properties: is_, raising=False
        )
        with closing(AcceleratorBackend("second")) as backend:
            assert backend.memory().shared


def test_a_host_buffer_is_the_slot(second: SecondDevice) -> None:
    with closing(SecondBackend(unified=True)) as backend:
        used = second.used
        buffer = backend.host_buffer(NBYTES)
        assert not buffer.is_pinned()
        buffer.fill_(3)
        upload = backend.device_slots(NBYTES, 1).upload(buffer[4096:])
        slot = upload.wait()
        assert slot.device == backend.device and slot.data_ptr() == buffer.data_ptr() + 4096
        assert second.used == used, "memory was taken for a copy"
        del buffer, upload
        gc.collect()
        assert bool((slot == 3).all()), "the memory went before the last tensor in it"


def test_memory_that_the_device_does_not_reach_is_copied() -> None:
    with closing(SecondBackend(unified=True)) as backend:
        source = anonymous(NBYTES).fill_(5)
        slot = backend.device_slots(NBYTES, 1).upload(source).wait()
        assert slot.data_ptr() != source.data_ptr() and bool((slot == 5).all())


def test_where_torch_does_not_take_host_memory_it_is_locked_and_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise RuntimeError("the pointer is not of this device")

    monkeypatch.setattr("lema_accelerator.backend.relabelled", refuse)
    with closing(SecondBackend(unified=True)) as backend:
        assert not backend.memory().shared and backend.host_buffer(NBYTES).is_pinned()


@pytest.mark.parametrize(("name", "seed"), by_turns(MEMORY))
def test_a_step_is_the_cpus_and_copies_no_weights(
    checkpoint_of: CheckpointOf,
    second: SecondDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    seed: int | None,
) -> None:
    copied: list[int] = []
    copy = _Queue.copy

    def counted(queue: _Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(0 if target.device.type == "cpu" else source.nbytes)
        copy(queue, target, source)

    monkeypatch.setattr(_Queue, "copy", counted)
    settings = {"offload_dir": str(tmp_path), **MEMORY[name]}
    model = checkpoint_of("llama").streamed
    batches = micro_batches(4, padding=True)
    taken = []
    with second.course(seed), sdpa_kernel(SDPBackend.MATH):
        for backend in (SecondBackend(unified=True), None):
            with opened(model, "second" if backend else "cpu", backend, **settings) as streamed:
                take(streamed, batches)
                taken.append(take(streamed, batches))
    assert taken[0].distance(taken[1]) < WITHIN
    assert not sum(copied)


def test_all_weights_train(checkpoint_of: CheckpointOf) -> None:
    """Masters are in host memory; weights outside the layers, and gradients, are tensors of the
    device there.
    """
    # a smooth update
    config = fulltraining.config_of(checkpoint_of("llama"), adam_epsilon=1.0, learning_rate=1.0)
    with sdpa_kernel(SDPBackend.MATH):
        ends = [
            fulltraining.streamed(config, fulltraining.everything, 2, backend, steps=3)
            for backend in (SecondBackend(unified=True), None)
        ]
    assert torch.allclose(torch.stack(ends[0][0]).cpu(), torch.stack(ends[1][0]), rtol=1e-5)
    for name, weight in ends[1][1].items():
        assert (
            float(
                torch.linalg.vector_norm(ends[0][1][name].cpu() - weight)
                / torch.linalg.vector_norm(weight)
            )
            < 1e-5
        )
