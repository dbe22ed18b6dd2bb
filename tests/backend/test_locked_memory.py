"""Host memory is locked exactly as far as asked, for as long as a tensor is in it, and a refusal
is said plainly.
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import FakeDriver

from lema.backend import lockedmemory
from lema.backend.hostmemory import HUGE_PAGE, anonymous
from lema.backend.lockedmemory import HostMemory
from lema.errors import MemoryLimitError

PAGE = 4096


def mapped_at(address: int) -> bool:
    """Whether this process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


class WatchfulDriver(FakeDriver):
    """Sees to it that what it unlocks is still there."""

    def unlock(self, address: int) -> None:
        assert mapped_at(address) and mapped_at(address + self.locked[address] - 1)
        super().unlock(address)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 5 * PAGE + 17, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_exactly_what_was_asked_for_is_locked_until_the_last_view_of_it_is_dropped(
    nbytes: int,
) -> None:
    driver = WatchfulDriver()
    buffer = HostMemory(driver).buffer(nbytes)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (nbytes,))
    assert driver.locked == {buffer.data_ptr(): nbytes}
    assert buffer.data_ptr() % PAGE == 0
    buffer.fill_(3)
    views: list[Any] = [buffer[:1].view(torch.int8), buffer.numpy(), memoryview(buffer.numpy())]
    del buffer
    while views:
        assert driver.locked, "memory is unlocked that is still in use"
        views.pop()
    assert not driver.locked


def test_nothing_is_nothing() -> None:
    driver = FakeDriver()
    for page_locked in (True, None, False):
        assert HostMemory(driver, page_locked).buffer(0).shape == (0,)
    assert not driver.locked


def test_memory_that_is_given_is_locked_where_it_is() -> None:
    driver = WatchfulDriver()
    memory = anonymous(3 * PAGE)
    host = HostMemory(driver)
    buffers = [host.buffer(PAGE, memory[:PAGE]), host.buffer(2 * PAGE, memory[PAGE:])]
    buffers[1].fill_(8)
    assert bool((memory[PAGE:] == 8).all())
    assert driver.locked == {memory.data_ptr(): PAGE, memory.data_ptr() + PAGE: 2 * PAGE}
    del buffers[0]
    assert driver.locked == {memory.data_ptr() + PAGE: 2 * PAGE}
    del memory
    assert int(buffers[0][-1]) == 8
    buffers.clear()
    assert not driver.locked


def test_what_cannot_be_locked_is_an_error_where_it_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    host = HostMemory(FakeDriver(limit=2 * PAGE), page_locked=True)
    kept = host.buffer(2 * PAGE)
    with pytest.raises(
        MemoryLimitError, match="4,096 bytes of host memory cannot be page-locked: out of memory"
    ) as e:
        host.buffer(PAGE)
    assert "this process may lock 65,536 bytes" in e.value.what
    assert e.value.where == "page_locked: true"
    assert "ulimit -l" in e.value.how and "page_locked: false" in e.value.how
    del kept
    host.buffer(2 * PAGE)


def test_what_cannot_be_locked_is_pageable_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    driver = FakeDriver(limit=2 * PAGE)
    host = HostMemory(driver)
    with pytest.warns(
        UserWarning, match=r"may lock any number of bytes; copies .* slower; .*ulimit -l"
    ) as caught:
        buffers = [host.buffer(2 * PAGE), host.buffer(PAGE), host.buffer(PAGE)]
    assert len(caught) == 1
    assert len(driver.locked) == 1
    assert [len(buffer) for buffer in buffers] == [2 * PAGE, PAGE, PAGE]
    del buffers[0]
    buffers.append(host.buffer(PAGE))  # there is room again
    assert driver.locked == {buffers[-1].data_ptr(): PAGE}


def test_what_shall_not_be_locked_is_not() -> None:
    driver = FakeDriver()
    assert HostMemory(driver, page_locked=False).buffer(PAGE).shape == (PAGE,)
    assert not driver.locked


class Allocator:
    """torch's allocator of locked memory, for a device that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: str | None = None) -> None:
        self.allocated: list[int] = []
        self.refusal = refusal
        monkeypatch.setattr(lockedmemory, "pinned", self)

    def __call__(self, nbytes: int) -> torch.Tensor:
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        self.allocated.append(nbytes)
        return anonymous(nbytes)


def test_without_a_driver_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    host = HostMemory(None)
    memory = anonymous(PAGE)
    assert host.buffer(PAGE).shape == (PAGE,) and host.buffer(0).shape == (0,)
    assert host.buffer(PAGE, memory) is memory, "it cannot be locked, and need not be"
    assert allocator.allocated == [PAGE]
    assert HostMemory(None, page_locked=False).buffer(PAGE).shape == (PAGE,)
    assert allocator.allocated == [PAGE]
    with pytest.raises(MemoryLimitError, match="only memory that it allocates itself"):
        HostMemory(None, page_locked=True).buffer(PAGE, memory)


def test_what_torch_cannot_allocate_is_pageable_or_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Allocator(monkeypatch, "no room\nand a stack")
    with pytest.warns(UserWarning, match="cannot be page-locked: no room; this process may lock"):
        assert HostMemory(None).buffer(PAGE).shape == (PAGE,)
    with pytest.raises(MemoryLimitError, match="no room"):
        HostMemory(None, page_locked=True).buffer(PAGE)


def test_what_the_driver_has_locked_is_reached_until_it_is_dropped() -> None:
    host = HostMemory(FakeDriver())
    buffer = host.buffer(2 * PAGE)
    other = anonymous(PAGE)
    assert host.reached(buffer[PAGE:].view(torch.int32)) and not host.reached(other)
    del buffer
    assert not host._locked
