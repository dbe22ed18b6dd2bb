"""Memory that the processes of a machine share is one memory, by the system's call or by a
temporary file, and leaves none behind."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from lema.backend.torchrun import ProcessGroup

SIZE = 4096 + 3


class OneMachine(ProcessGroup):
    """One of two processes of a machine, as threads, which tell each other values through a
    list.
    """

    def __init__(self, rank: int, told: Callable[[int, Any], list[Any]]) -> None:
        super().__init__(rank, 2, rank, 2, None)
        self._told = told

    def exchange(self, value: Any) -> list[Any]:
        return self._told(self.rank, value)


def two_maps(nbytes: int) -> list[Tensor]:
    """Return what two processes of a machine get when both ask for memory that they share."""
    values = [None, None]
    barrier = Barrier(2, timeout=60)

    def told(rank: int, value: Any) -> list[Any]:
        values[rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: OneMachine(rank, told).shared_memory(nbytes), range(2)))


def assert_one_memory(first: Tensor, second: Tensor) -> None:
    assert first.shape == second.shape == (SIZE,) and first.data_ptr() != second.data_ptr()
    assert not first.any()
    first[0], second[SIZE - 1] = 7, 9
    assert (int(second[0]), int(first[SIZE - 1])) == (7, 9)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_has_no_file_where_the_system_has_a_call_for_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: pytest.fail("a temporary file was made"))
    assert_one_memory(*two_maps(SIZE))


def test_without_that_call_it_is_a_file_whose_name_goes_once_both_have_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = list[str]()
    make = tempfile.mkstemp

    def noted(**options: Any) -> tuple[int, str]:
        descriptor, name = make(**options)
        made.append(name)
        return descriptor, name

    monkeypatch.setattr(tempfile, "mkstemp", noted)
    first, second = two_maps(SIZE)
    assert [Path(name).parent for name in made] == [temporary]
    assert list(temporary.iterdir()) == []
    assert_one_memory(first, second)


def test_where_an_open_file_keeps_its_name_the_memory_is_shared_all_the_same(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(
            13, "The process cannot access the file because it is being used", str(path)
        )

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    maps = two_maps(SIZE)
    monkeypatch.undo()
    assert len(list(temporary.iterdir())) == 1
    assert_one_memory(*maps)
