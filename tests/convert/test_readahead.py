"""What will be read is asked for in order, never far ahead, and asking changes nothing else."""

import os
import queue
from pathlib import Path

import pytest

from lema.convert import buffers as readahead
from lema.convert.buffers import ReadAhead
from lema.storage.header import TensorRecord

STEP, WINDOW = 10, 40
Asked = queue.SimpleQueue[tuple[str, int, int, int]]
ahead: list[ReadAhead] = []  # what is being tried, where a test looks at how far it may go


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """File, offset and length of every request, and how many bytes were allowed to be asked for by then."""
    requests: Asked = queue.SimpleQueue()

    def watched(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(f"/dev/fd/{descriptor}").resolve().name
        requests.put((name, offset, nbytes, ahead[0]._allowed if ahead else WINDOW))

    monkeypatch.setattr(readahead, "STEP_BYTES", STEP)
    monkeypatch.setattr(readahead, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(readahead.os, "posix_fadvise", watched)
    ahead.clear()
    return requests


def records(directory: Path) -> list[TensorRecord]:
    """Tensors of two files, in an order that is not theirs."""
    for name in "ab":
        (directory / name).write_bytes(bytes(200))
    places = [("a", 100, 95), ("b", 0, 7), ("a", 3, 0), ("a", 0, 30)]
    return [TensorRecord("t", directory / name, offset, nbytes, "U8", (nbytes,)) for name, offset, nbytes in places]


def test_every_byte_is_asked_for_once_in_order_and_never_far_ahead(tmp_path: Path, asked: Asked) -> None:
    tensors = records(tmp_path)
    with ReadAhead(tensors) as reading:
        ahead.append(reading)
        steps = []
        for tensor in tensors:
            reading.advance(tensor.nbytes)
        while sum(nbytes for _, _, nbytes, _ in steps) < sum(tensor.nbytes for tensor in tensors):
            steps.append(asked.get(timeout=30))
    total = 0
    for _, _, nbytes, allowed in steps:
        total += nbytes
        assert nbytes <= STEP and total <= allowed
    covered = [(name, byte) for name, offset, nbytes, _ in steps for byte in range(offset, offset + nbytes)]
    assert covered == [(t.file.name, byte) for t in tensors for byte in range(t.offset, t.offset + t.nbytes)]


def test_it_waits_for_the_reading_and_ends_with_it(tmp_path: Path, asked: Asked) -> None:
    with ReadAhead(records(tmp_path)) as reading:
        first = [asked.get(timeout=30) for _ in range(WINDOW // STEP)]
        reading.advance(STEP)
        fifth = asked.get(timeout=30)
    assert [offset for _, offset, _, _ in (*first, fifth)] == [100, 110, 120, 130, 140]
    assert asked.empty() and not reading._thread.is_alive()


def test_a_file_that_is_gone_is_left_to_the_reader(tmp_path: Path, asked: Asked) -> None:
    tensors = records(tmp_path)
    (tmp_path / "a").unlink()
    with ReadAhead(tensors) as reading:
        reading.advance(1000)
        assert asked.get(timeout=30)[:3] == ("b", 0, 7)
        reading._thread.join(timeout=30)
    assert asked.empty()


def test_no_file_is_left_open(tmp_path: Path, asked: Asked) -> None:
    before = sorted(Path("/dev/fd").iterdir())
    with ReadAhead(records(tmp_path)):
        asked.get(timeout=30)
    assert sorted(Path("/dev/fd").iterdir()) == before


def test_a_system_that_takes_no_requests_is_asked_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(readahead.os, "posix_fadvise")
    with ReadAhead(records(tmp_path)) as reading:
        reading.advance(1)
        assert not reading._thread.is_alive()


def test_an_error_in_the_reading_passes_through(tmp_path: Path, asked: Asked) -> None:
    with pytest.raises(KeyboardInterrupt), ReadAhead(records(tmp_path)) as reading:
        raise KeyboardInterrupt
    assert not reading._thread.is_alive()
