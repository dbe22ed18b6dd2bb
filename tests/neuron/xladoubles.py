"""Stand-ins for `torch_xla`: a device that is the CPU, and keeps the order of what is asked of
it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from neurondoubles import RecordedXm
from torch import Tensor

from lema.backend import SlotLayout, Upload
from lema_neuron.runtimes import lazybits, lazydevice

SEED = 101  # that the runtime begins with, whatever torch was seeded with


class FakeXla:
    """`torch_xla` and its modules, as far as they are used.

    Args:
        monkeypatch: puts everything back.
        rank: of this process, as the runtime counts.
        size: how many processes the runtime knows of.

    Attributes:
        log: what was asked for, in order: "upload", "sync", "wait".
        compiled: how many graphs were.
        drawn: states of the CPU's generator, by the seed that stands for each, so that what the CPU
            draws counts; None: the seed is one that was set.
        adds_up: whether collectives do what they say; else nothing, and no word.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> None:
        self.log: list[str] = []
        self.compiled = 0
        self.seed = SEED
        self.adds_up = True
        self.memory: Callable[[], dict[str, int]] = lambda: {
            "bytes_used": 3,
            "bytes_limit": 9,
            "peak_bytes_used": 5,
        }
        self.xm: Any = RecordedXm()
        self.drawn: dict[int, Tensor] | None = None
        self.xm.get_rng_state = self._get_seed
        self.xm.set_rng_state = self._set_seed
        self.xm.wait_device_ops = lambda: self.log.append("wait")
        self.xm.get_memory_info = lambda device: self.memory()
        reduce = self.xm.all_reduce
        self.xm.all_reduce = lambda kind, value, **named: self._reduced(
            reduce(kind, value, **named), value, size
        )
        modules = {
            "torch_xla": SimpleNamespace(device=lambda: torch.device("cpu"), sync=self._sync),
            "torch_xla.core.xla_model": self.xm,
            "torch_xla.debug.metrics": SimpleNamespace(
                counter_value=lambda name: self.compiled or None
            ),
            "torch_xla.runtime": SimpleNamespace(
                world_size=lambda: size, global_ordinal=lambda: rank
            ),
            "torch_xla.distributed.xla_backend": SimpleNamespace(),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(lazybits, "register", lambda: self.log.append("bits"))
        upload = lazydevice.LazySlots.upload

        def logged(
            slots: lazydevice.LazySlots, source: Tensor, layout: SlotLayout | None = None
        ) -> Upload:
            self.log.append("upload")
            return upload(slots, source, layout)

        monkeypatch.setattr(lazydevice.LazySlots, "upload", logged)

    def _sync(self, wait: bool = False) -> None:
        self.log.append("sync")

    def _get_seed(self, device: str) -> int:
        if self.drawn is None:
            return self.seed
        state = torch.get_rng_state()
        seed = zlib.crc32(state.numpy().tobytes())
        self.drawn[seed] = state
        return seed

    def _set_seed(self, seed: int, device: str) -> None:
        assert 0 <= seed < 1 << 64
        self.seed = seed
        # else torch was seeded, and the CPU with it
        if self.drawn is not None and seed in self.drawn:
            torch.set_rng_state(self.drawn[seed])

    def _reduced(self, total: Tensor, value: Tensor, size: int) -> Tensor:
        numbers = size * (size + 1) / 2  # of a start at which each process gives its rank, from 1
        return (
            torch.full_like(value, numbers)
            if self.adds_up and value.numel() == 1
            else value
            if size > 1
            else total
        )
