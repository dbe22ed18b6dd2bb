"""The files of kept tokens, written one part after another, so that a start can continue after a
kill.

A part is what one piece of the data has become. When its tokens, rows and skipped rows are in their
files, a line of `parts.jsonl` says which piece it was, what was counted, and the digest of it all.
Of files that a kill has left, the parts that read back as their lines say are taken up to the first
that does not; what lies behind is cut off.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from lema.data.dataset import ROW, Columns
from lema.data.files import Piece, Row, Where
from lema.data.forms import Remarks

__all__ = ["ABOUT", "PARTS", "ROWS", "SKIPPED", "TOKENS", "Parts", "Pieces"]

ABOUT = "about.json"
ROWS = "rows.bin"
TOKENS = "tokens.bin"
SKIPPED = "skipped.jsonl"
PARTS = "parts.jsonl"
FILES = (TOKENS, ROWS, SKIPPED)

Pieces: TypeAlias = Iterator[tuple[Row, Piece]]
"""Pieces of the data, each with the first row of its file."""


class Parts:
    """The files of an entry while they are written to `folder`, which may hold what a killed start
    has left there. `total`: bytes of the data. `report`: is given the bytes that are done, all of
    them, the seconds left, the tokens."""

    def __init__(
        self, folder: Path, total: int, report: Callable[[int, int, float, int], None]
    ) -> None:
        self._folder = folder
        self._total = total
        self._report = report
        self._remarks = Remarks()
        self._sources = dict[str, int]()
        self._counts = {"dropped": 0, "left_out": 0}
        self._digest = hashlib.sha256()
        self._behind = dict[str, int]()
        self._num_tokens = 0

    def write(
        self, pieces: Pieces, gather: Callable[[Pieces], Iterator[tuple[Where, Columns]]]
    ) -> int:
        """Write the files, and return how many parts were there. `gather`: yields what pieces
        become, in their order.
        """
        with contextlib.ExitStack() as stack:
            # Whatever is written goes to the end of a file that is opened so.
            *files, lines = (
                stack.enter_context((self._folder / name).open("a+b")) for name in (*FILES, PARTS)
            )
            num_parts, left = self._recover(pieces, files, lines)
            began = time.monotonic()
            taken = sum(self._behind.values())
            for where, columns in gather(left):
                about, contents = self._part(where, columns)
                for file, content in zip(files, contents, strict=True):
                    file.write(content)
                    file.flush()  # because a kill loses what the system does not have
                lines.write(
                    json.dumps({"about": about, "sha256": _digest(about, contents)}).encode()
                    + b"\n"
                )
                lines.flush()
                self._count(about, contents[1])
                done = sum(self._behind.values())
                remaining = (time.monotonic() - began) / max(done - taken, 1) * (self._total - done)
                self._report(done, self._total, remaining, self._num_tokens)
        sizes = {name: (self._folder / name).stat().st_size for name in FILES}
        description = {
            "sources": list(self._sources),
            "notes": self._remarks.lines(),
            "rows": self._digest.hexdigest(),
        }
        about = {**self._counts, **description, "sizes": sizes}
        (self._folder / ABOUT).write_text(
            json.dumps({"about": about, "sha256": _digest(about)}), encoding="utf-8", newline="\n"
        )
        return num_parts

    def _recover(
        self, pieces: Pieces, files: Sequence[BinaryIO], lines: BinaryIO
    ) -> tuple[int, Pieces]:
        """Count the parts that are there, and cut off what lies behind them; return their number,
        and the pieces that are left."""
        for file in (*files, lines):
            file.seek(0)
        lengths = [0] * (len(files) + 1)
        num_parts = 0
        next_one = list[tuple[Row, Piece]]()
        for line in lines:
            next_one = list(islice(pieces, 1))
            about, contents = _read(line, files)
            if about is None or [about["piece"]] != [list(piece.where) for _, piece in next_one]:
                break
            self._count(about, contents[1])
            lengths = [
                end + len(part) for end, part in zip(lengths, (*contents, line), strict=True)
            ]
            num_parts = num_parts + 1
            next_one = []
        for file, end in zip((*files, lines), lengths, strict=True):
            file.seek(end)
            file.truncate()
        return num_parts, chain(next_one, pieces)

    def _part(self, where: Where, columns: Columns) -> tuple[dict[str, Any], list[bytes]]:
        """Return the description of a part, and the bytes that it adds to each file."""
        rows = np.frombuffer(columns.rows, dtype=ROW)  # which may be written to, as a bytearray may
        rows["start"] += self._num_tokens
        rows["source"] = self._sources.get(where[0], len(self._sources))
        skipped = "".join(json.dumps(row) + "\n" for row in columns.skipped)
        contents = [columns.tokens.tobytes(), rows.tobytes(), skipped.encode()]
        about = {
            "piece": where,
            "sizes": [len(content) for content in contents],
            "remarks": columns.remarks,
        }
        return about | {name: getattr(columns, name) for name in self._counts}, contents

    def _count(self, about: Mapping[str, Any], rows: bytes) -> None:
        path, _, end = about["piece"]
        self._sources.setdefault(path, len(self._sources))
        self._behind[path] = end
        self._digest.update(rows)
        self._num_tokens += about["sizes"][0] // 4
        for name in self._counts:
            self._counts[name] += about[name]
        for what, (count, first) in about["remarks"].items():
            before, earliest = self._remarks.counts.get(what, (0, first))
            self._remarks.counts[what] = (before + count, earliest)


def _read(line: bytes, files: Sequence[BinaryIO]) -> tuple[dict[str, Any] | None, list[bytes]]:
    """Return a line's description, and its part's bytes in each file; None: the part has changed
    since.
    """
    try:
        written = json.loads(line)
        contents = [
            file.read(size) for file, size in zip(files, written["about"]["sizes"], strict=True)
        ]
        good = written["sha256"] == _digest(written["about"], contents)
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None, []
    return (written["about"] if good else None), contents


def _digest(about: Mapping[str, Any], contents: Sequence[bytes] = ()) -> str:
    digest = hashlib.sha256(json.dumps(about).encode())
    for content in contents:
        digest.update(content)
    return digest.hexdigest()
