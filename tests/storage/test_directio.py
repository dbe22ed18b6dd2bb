"""Every byte given ends at its place in the file, in whole blocks, behind the caller's back, and
no failure is lost.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema.storage import directio as blockfile
from lema.storage.directio import BLOCK, BlockFile

CHUNK = 3 * BLOCK


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockfile, "CHUNK_BYTES", CHUNK)


def content(size: int) -> bytes:
    return bytes((7 * i + i // BLOCK) % 251 for i in range(size))


def write(path: Path, size: int, spans: "list[tuple[int, int]]") -> None:
    """Write `content(size)` to `path`, each span of it in turn."""
    data = content(size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    blocks = BlockFile(descriptor, path, size)
    try:
        for begin, end in spans:
            for view in blocks.views(begin, end - begin):
                view[:] = data[begin : begin + len(view)]
                begin += len(view)
        blocks.finish()
    finally:
        blocks.close()
        os.close(descriptor)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_spans_of_any_length_in_any_order_end_at_their_places(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cuts = data.draw(
        st.lists(st.integers(1, 9 * BLOCK), min_size=1, max_size=8, unique=True).map(sorted)
    )
    spans = data.draw(st.permutations(list(zip([0, *cuts[:-1]], cuts, strict=True))))
    path = tmp_path_factory.mktemp("blocks") / "file"
    write(path, cuts[-1], spans)
    assert path.read_bytes() == content(cuts[-1])


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Descriptor, offset and length of every write."""
    real = os.pwrite
    seen = list[tuple[int, int, int]]()

    def watched(descriptor: int, view: memoryview, offset: int) -> int:
        seen.append((descriptor, offset, len(view)))
        return real(descriptor, view, offset)

    monkeypatch.setattr(blockfile.os, "pwrite", watched)
    return seen


def test_only_whole_blocks_are_written_and_each_once(
    tmp_path: Path, writes: list[tuple[int, int, int]]
) -> None:
    size = 2 * CHUNK + 100
    write(tmp_path / "file", size, [(5000, size), (0, 10), (10, 5000)])
    assert (
        {offset % BLOCK for _, offset, _ in writes}
        == {length % BLOCK for *_, length in writes}
        == {0}
    )
    blocks = [
        start for _, offset, length in writes for start in range(offset, offset + length, BLOCK)
    ]
    assert sorted(blocks) == list(range(0, size, BLOCK))
    assert (tmp_path / "file").stat().st_size == size


def refuse_direct_writes(monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    """Make direct writes fail as they do where a file system has none: when opening, or only
    when writing.
    """
    real_open = os.open
    real_write = os.pwrite
    direct = set[int]()

    def open_plain(path: Any, flags: int, *rest: Any) -> int:
        if not flags & os.O_DIRECT:
            return real_open(path, flags, *rest)
        if not opened:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = real_open(path, flags & ~os.O_DIRECT, *rest)
        direct.add(descriptor)
        return descriptor

    def write_plain(descriptor: int, view: memoryview, offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(descriptor, view, offset)

    monkeypatch.setattr(blockfile.os, "open", open_plain)
    monkeypatch.setattr(blockfile.os, "pwrite", write_plain)


@pytest.mark.parametrize("opened", [False, True])
def test_where_there_are_no_direct_writes_the_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    refuse_direct_writes(monkeypatch, opened)
    write(tmp_path / "file", 2 * CHUNK + 100, [(5000, 2 * CHUNK + 100), (0, 5000)])
    assert (tmp_path / "file").read_bytes() == content(2 * CHUNK + 100)


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        blockfile.os, "pwrite", lambda fd, view, offset: real(fd, view[:BLOCK], offset)
    )
    write(tmp_path / "file", 4 * CHUNK, [(0, 4 * CHUNK)])
    assert (tmp_path / "file").read_bytes() == content(4 * CHUNK)


@pytest.mark.parametrize("when", [0, 4])
def test_a_write_that_fails_is_raised_while_more_is_given_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    real = os.pwrite
    calls = iter(range(1000))

    def failing(*arguments: Any) -> int:
        if next(calls) >= when:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(blockfile.os, "pwrite", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", 20 * CHUNK, [(0, 20 * CHUNK)])


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[int], memoryview] = blockfile._pages
    made: list[int] = []

    def counted(nbytes: int) -> memoryview:
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(blockfile, "_pages", counted)
    write(tmp_path / "file", 50 * CHUNK, [(0, 50 * CHUNK)])
    assert made == [CHUNK] * blockfile.NUM_CHUNKS


def test_a_file_with_bytes_never_given_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="never given"):
        write(tmp_path / "file", 2 * BLOCK, [(0, 10), (20, 2 * BLOCK)])


@pytest.fixture
def descriptors() -> Iterator[None]:
    """See that no file is left open."""
    before = sorted(Path("/dev/fd").iterdir())
    yield
    assert sorted(Path("/dev/fd").iterdir()) == before


@pytest.mark.usefixtures("descriptors")
def test_no_file_is_left_open(tmp_path: Path) -> None:
    write(tmp_path / "file", CHUNK + 1, [(0, CHUNK + 1)])
