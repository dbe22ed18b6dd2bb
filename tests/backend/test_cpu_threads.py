"""Threads that compute: as many as a process may keep busy, and asleep while they wait."""

import pytest
import torch

from lema.cli.threads import let_threads_sleep
from lema_cpu import CpuBackend, threads


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch have eight threads; return the list of the numbers that it is told."""
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


@pytest.mark.parametrize(
    ("given", "usable", "told"),
    [
        ({}, 3, [3]),
        ({}, 8, []),
        ({}, 16, []),
        ({"OMP_NUM_THREADS": "8"}, 3, []),
        ({"MKL_NUM_THREADS": "8"}, 3, []),
    ],
)
def test_torch_has_no_more_threads_than_the_process_may_keep_busy(
    given: dict[str, str],
    usable: int,
    told: list[int],
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "usable_threads", lambda: usable)
    threads.limit_threads(given)
    assert counted == told


def test_the_backend_limits_them_when_it_opens(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_threads", lambda: 2)
    CpuBackend().close()
    assert counted == [2]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_threads_sleep_unless_the_environment_says_how_they_wait(name: str) -> None:
    environment: dict[str, str] = {}
    let_threads_sleep(environment)
    assert environment == {"OMP_WAIT_POLICY": "passive"}
    environment = {name: "7"}
    let_threads_sleep(environment)
    assert environment == {name: "7"}
