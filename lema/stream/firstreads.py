"""Checksums of the weights as they were first read, by which a file that has changed since is told
from one that was only touched, or exchanged for a copy.

The fingerprint of a model samples a few bytes of each tensor (`lema.storage.verify`), so that it
costs little before a run. Every byte that a run computes with comes by here, so a checksum of it
costs one more look at memory, once; a file is read again only where the system says that it was
written or exchanged.
"""

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

from lema.storage.directio import read_errors

__all__ = ["FirstReads"]

Ranges = tuple[tuple[int, int], ...]  # (offset, bytes) in a file, one after the other
PIECE = 16 << 20  # bytes read at once where contents are compared


class FirstReads:
    """A CRC-32 of each part of a file that was read, made when it was first read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Path, Ranges], int] = {}

    def take(self, file: Path, ranges: Sequence[tuple[int, int]], memory: memoryview) -> None:
        """Remember what these `ranges` of a file, which lie end to end in `memory`, have in them.
        What was read before is not looked at again."""
        key = file, tuple(ranges)
        if key not in self._sums:
            self._sums[key] = zlib.crc32(memory)

    def still_in(self, files: Collection[Path]) -> bool:
        """Whether these files have what was read of them; they are opened anew and read.
        `ReadError`: one cannot be read."""
        parts = [
            (file, ranges, value) for (file, ranges), value in self._sums.items() if file in files
        ]
        return all(_sum_of(file, ranges) == value for file, ranges, value in parts)


def _sum_of(file: Path, ranges: Ranges) -> int | None:
    value = 0
    with (
        read_errors(file, ranges[0][0], sum(nbytes for _, nbytes in ranges)),
        file.open("rb", buffering=0) as stream,
    ):
        for offset, nbytes in ranges:
            stream.seek(offset)
            while nbytes:
                piece = stream.read(min(nbytes, PIECE))
                if not piece:
                    return None  # it is shorter now
                value = zlib.crc32(piece, value)
                nbytes = nbytes - len(piece)
    return value
