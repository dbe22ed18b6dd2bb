"""What the doctor says of devices, through the seam: one with memory of its own, and a clock
that a test holds.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from installed import installed
from torch import Tensor

from lema.backend import BackendInfo, Download, Finding, Level, MemoryStats
from lema.stream import speed
from lema_cpu import CpuBackend
from lema_tools.doctor import device
from lema_tools.doctor.device import devices, links

# A device whose copies take seconds that only its own clock knows, longer if memory is not locked.
SLOW = """
from lema_cpu import CpuBackend
from lema.errors import MemoryLimitError

now, opened, closed = [0.0], [], []

class Slow(CpuBackend):
    name = "slow"

    def __init__(self, device="slow", options=None):
        super().__init__("cpu", options, poison=True)
        self.locked = options.page_locked
        opened.append(self.locked)

    def host_buffer(self, nbytes, memory=None):
        if self.locked and REFUSE:
            raise MemoryLimitError("no memory may be locked")
        return super().host_buffer(nbytes, memory)

    def synchronize(self):
        now[0] += 0.25 if self.locked else 0.5

    def close(self):
        closed.append(self.locked)

def clock():
    return now[0]
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "COPY", 1 << 16)
    source = SLOW.replace("REFUSE", "False")
    with installed(
        tmp_path, monkeypatch, "slow", {"slow": "slowdevice:Slow"}, {"slowdevice": source}
    ):
        yield


def found_by_links() -> dict[str, Finding]:
    import slowdevice  # type: ignore[import-not-found] # made by the test

    return {finding.name: finding for finding in links(slowdevice.clock)}


class Timed(CpuBackend):
    """A device on which copy after copy takes as long as a list says."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__(poison=True)
        self.seconds = iter(seconds)
        self.now = 0.0
        self.landed = 0

    def synchronize(self) -> None:
        self.now += next(self.seconds)

    def download(self, source: Tensor, target: Tensor) -> Download:
        self.landed += 1
        assert torch.equal(source, torch.ones_like(source))  # what was uploaded
        return super().download(source, target)


def test_a_speed_is_the_median_of_some_copies_and_the_first_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "ENOUGH", 60.0)  # however busy the machine is
    usual = [0.125, 0.25, 0.25, 0.5, 1.0, 40.0]
    assert len(usual) == 1 + speed.REPEATS
    backend = Timed(usual + [2 * seconds for seconds in usual])
    assert speed.upload_speed(backend, 4096, lambda: backend.now) == 4096 / 0.5
    assert device.download_speed(backend, 4096, lambda: backend.now) == 4096 / 1.0
    assert backend.landed == 1 + speed.REPEATS


def test_a_device_with_memory_of_its_own_is_timed_with_locked_and_pageable_memory(
    slow: None,
) -> None:
    told = found_by_links()
    assert list(told) == ["cpu", "slow page-locked", "slow pageable"]
    for kind, seconds in (("page-locked", 0.25), ("pageable", 0.5)):
        finding = told[f"slow {kind}"]
        assert finding.level is Level.OK
        assert finding.facts == {
            "copied": True,
            "copy_bytes": 1 << 16,
            "upload_bytes_per_second": (1 << 16) / seconds,
            "download_bytes_per_second": (1 << 16) / seconds,
        }


def test_every_backend_that_was_opened_is_closed(slow: None) -> None:
    found_by_links()
    list(devices())
    import slowdevice

    assert slowdevice.closed == slowdevice.opened
    assert {True, False} < set(slowdevice.opened)


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "copied"), [(1 << 14, 1 << 40, 1 << 10), (1 << 40, 1 << 13, 512)]
)
def test_a_copy_is_a_small_part_of_the_memory_on_either_side(
    device_bytes: int, host_bytes: int, copied: int, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import slowdevice

    monkeypatch.setattr(slowdevice.Slow, "memory", lambda _: MemoryStats(0, 0, device_bytes))
    host = type("Memory", (), {"available": host_bytes, "total": host_bytes})()
    monkeypatch.setattr("psutil.virtual_memory", lambda: host)
    assert found_by_links()["slow pageable"].facts["copy_bytes"] == copied


def test_nothing_is_copied_to_a_device_that_computes_in_host_memory(slow: None) -> None:
    finding = found_by_links()["cpu"]
    assert (finding.level, finding.facts) == (Level.OK, {"copied": False})


def test_memory_that_may_not_be_locked_is_a_warning_and_pageable_memory_is_timed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "COPY", 1 << 16)
    source = SLOW.replace("REFUSE", "True")
    with installed(
        tmp_path, monkeypatch, "slow", {"slow": "slowdevice:Slow"}, {"slowdevice": source}
    ):
        told = found_by_links()
    assert told["slow page-locked"].level is Level.WARNING
    assert "no memory may be locked" in told["slow page-locked"].what
    assert told["slow pageable"].level is Level.OK


def test_devices_are_told_with_their_memory_or_why_they_cannot_run(slow: None) -> None:
    told = {finding.name: finding for finding in devices()}
    assert told["cpu"].facts["in_host_memory"] is True
    assert told["slow"].facts["in_host_memory"] is False
    assert told["slow"].facts["available"] is True
    assert isinstance(told["slow"].facts["total_bytes"], int)
    assert told["torch"].level is Level.OK


def test_a_device_that_cannot_run_is_noted_and_none_at_all_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [BackendInfo("some", "some:Backend", "its driver is absent")]
    monkeypatch.setattr("lema.backend.available", lambda: there)
    told = {finding.name: finding for finding in devices()}
    assert (told["some"].level, told["any"].level) == (Level.NOTE, Level.PROBLEM)
    assert "its driver is absent" in told["some"].what


def test_a_torch_that_cannot_be_imported_is_a_problem_and_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (finding,) = devices()
    assert (finding.key, finding.level) == ("devices.torch", Level.PROBLEM)


def test_the_doctor_waits_for_no_other_process_that_torchrun_started(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # and no other variable: joining would be refused
    told = {finding.name: finding for finding in devices()}
    assert told["cpu"].level is Level.OK
    assert "slow pageable" in found_by_links()
    assert os.environ["WORLD_SIZE"] == "2"
