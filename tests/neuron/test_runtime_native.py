"""The native runtime, on stand-ins for torch's streams and for `torch.neuron`: order of calls,
and of copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakestreams import FakeTorch
from latedevice import LateDevice

import lema_neuron.backend as neuron
from lema.backend import Alone, Backend, BackendOptions
from lema.backend.torchrun import Joined
from lema.errors import BackendUnavailable
from lema.testing.copies import CopyPromises
from lema_neuron.runtimes import native, nativedevice, runtime_named


class FakeNeuron:
    """`torch.neuron`, which keeps what is asked of it."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def current_device(self) -> int:
        self.log.append("touched")
        return 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "memory_allocated": 3,
            "max_memory_allocated": 5,
            "mem_get_info": (4, 9),
            "get_rng_state": "state",
        }

        def call(*given: Any) -> Any:
            self.log.append((name, *given))
            return answers.get(name)

        return call


class TestCopies(CopyPromises):
    """Copies run beside the compute, each as late as can be, and in the order they must have."""

    seed: int | None = None

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.torch = FakeTorch(monkeypatch)
        self.log = list[Any]()
        monkeypatch.setattr(nativedevice, "KIND", "cpu")
        monkeypatch.setattr(torch, "neuron", FakeNeuron(self.log), raising=False)
        monkeypatch.setattr(neuron, "choose_runtime", lambda asked, found: "native")
        monkeypatch.setattr(os, "environ", dict(os.environ))
        yield

    def backend(self) -> Backend:
        self.torch.device = LateDevice(self.seed).queues
        return neuron.NeuronBackend()


class TestCopiesAtAnyMoment(TestCopies):
    seed = 5


def test_processes_are_joined_before_the_device_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[Any]()
    fake = FakeTorch(monkeypatch)
    fake.device = LateDevice(None).queues
    monkeypatch.setattr(nativedevice, "KIND", "cpu")
    monkeypatch.setattr(torch, "neuron", FakeNeuron(log), raising=False)
    monkeypatch.setattr(neuron, "choose_runtime", lambda asked, found: "native")
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def join(carrier: str, parts: int | None, patience: Any) -> Joined:
        log.append(carrier)
        return Joined(Alone(), None, lambda: log.append("left"))

    monkeypatch.setattr(neuron, "join_in_parts", join)
    backend = neuron.NeuronBackend()
    assert log == ["cpu:gloo,neuron:neuron", "touched"]
    device = backend.device
    log[:] = []
    told = backend.memory()
    assert (told.used, told.peak, told.total, told.shared) == (3, 5, 9, False)
    assert backend.rng_state() == "state"
    backend.set_rng_state(torch.zeros(1))
    assert log[-2:] == [("get_rng_state", device), ("set_rng_state", torch.zeros(1), device)]
    backend.end_step()
    log.clear()
    backend.close()
    assert log == [("synchronize",), "left"]


def test_it_is_refused_where_torch_has_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "neuron", raising=False)
    with pytest.raises(BackendUnavailable, match="torch has no device `neuron`"):
        native.RUNTIME.open(BackendOptions())


def test_groups_and_layout_are_its_own() -> None:
    assert runtime_named("native") is native.RUNTIME
    assert (native.RUNTIME.kv_layout, runtime_named("xla").kv_layout) == ("interleave", "tile")
    replicas: Any = SimpleNamespace()
    assert native.RUNTIME.replicas(Joined(replicas, None, lambda: None)) is replicas
