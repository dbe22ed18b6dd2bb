"""Tensors on their way to the device: a buffer is used again only for a later step, and memory
is locked rarely.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lema.backend import DeviceSlots, SlotLayout, Upload
from lema.model.inputs import Inputs
from lema_cpu import CpuBackend


class Watched(CpuBackend):
    """A device with memory of its own, which notes when a copy began that somebody waits for."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.step = 0
        self.buffers: list[int] = []  # bytes of host memory
        self.waits: list[int] = []  # how many steps ago copies began that were waited for

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        self.buffers.append(nbytes)
        return super().host_buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return WatchedSlots(self, super().device_slots(nbytes, count))


class WatchedSlots:
    def __init__(self, backend: Watched, slots: DeviceSlots) -> None:
        self.backend = backend
        self.slots = slots

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        upload = self.slots.upload(source, layout)
        began = self.backend.step
        upload.drained = lambda: self.backend.waits.append(self.backend.step - began)  # type: ignore[method-assign]
        return upload


def take_steps(inputs: Inputs, backend: Watched, sizes: list[list[int]]) -> None:
    for step, rows in enumerate(sizes):
        backend.step = step
        inputs.expect(len(rows))
        for count in rows:
            (placed,) = inputs.to_device([{"rows": torch.arange(count)}])
            assert torch.equal(placed["rows"], torch.arange(count))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17])
def test_in_a_step_no_copy_of_it_is_waited_for(count: int) -> None:
    backend = Watched()
    take_steps(Inputs(backend), backend, [[1000] * count] * 4)
    assert 0 not in backend.waits
    assert len(backend.buffers) == max(2, count)


def test_steps_that_grow_wait_for_none_of_their_copies_either() -> None:
    backend = Watched()
    take_steps(Inputs(backend), backend, [[10] * 2, [10] * 6, [10] * 3, [10] * 9])
    assert 0 not in backend.waits


def test_memory_is_taken_anew_only_where_batches_have_doubled() -> None:
    backend = Watched()
    take_steps(Inputs(backend), backend, [[600 + 10 * step] * 4 for step in range(100)])
    sizes = sorted(set(backend.buffers))
    assert len(sizes) <= 3 and len(backend.buffers) <= 4 * len(sizes)
    assert all(2 * small <= large for small, large in pairwise(sizes))
