"""Rows out of data files, each row knowing the file and line it came from."""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TypeAlias, TypeVar

from lema.backend.host.limits import bounded_memory
from lema.errors import DataError, installing, unreadable

__all__ = ["READERS", "Piece", "Row", "Where", "accepted", "kind_of", "num_rows", "pieces_of"]

T = TypeVar("T")
_BLANK = re.compile(r"[ \t\r\n]*")
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_TO_UTF8 = "save the file as UTF-8, for example: iconv -f UTF-16 -t UTF-8 OLD > NEW"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of data and where it stands."""

    values: Mapping[str, Any]  # column name to value
    source: str  # the file's path, or a word for rows which came from memory
    line: int  # 1-based line of a text file on which the row begins; 1-based row of a parquet file
    form: int = 0  # the bit of the form that it was read in (`lema.data.row_forms`); 0: none yet

    @property
    def origin(self) -> str:
        """`file:line`, as an editor opens it."""
        return f"{self.source}:{self.line}"

    def broken(self, what: str, *, at: str = "", how: str = "") -> DataError:
        """The error that names this row; `at` narrows it to a column or message."""
        return DataError(what, where=f"{self.origin}, {at}" if at else self.origin, how=how)


# bytes of a line, characters of a text: a tokenizer takes thirty times as much memory
MAX_ROW = 16 << 20
TOO_LONG = "a row of more than 16 MiB"
SHORTER = "divide it into rows of at most max_length tokens"
MAX_UNPACKED = 1 << 22
ROW_BYTES = 100  # allowed for any packed file; for a row, besides its values
UNPACKS = "the file unpacks to hundreds of times its size"
DISTRUST = "write its rows to a new file if you trust it"
# of what is in a packed file to its size: rows with one prompt of 10 KB reach 130, others 20
MAX_RATIO = 150
PIECE_BYTES = 1 << 19
PIECE_ROWS = 512
PIECE_IMAGES = 1 << 24  # bytes of images in rows, as columnar files have them
NUMBER_BYTES = 32  # of a number in a list of Python, of which a sound has one for each sample

Where: TypeAlias = tuple[str, int, int]
"""A file, the first line of a piece of it, and how many bytes of the file have been read behind
the piece.
"""


def accepted() -> str:
    """Say which files can be read."""
    return (
        f"{', '.join(sorted(READERS))} files, or {' and '.join(_OF_LINES)} with "
        f"{' or '.join(_COMPRESSED)} after it"
    )


def kind_of(path: Path) -> str:
    """Return the ending for a file's contents, without the one for its compression."""
    kind = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if kind in _COMPRESSED and inner in _OF_LINES else kind


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the rows of a file, as they are or as the lines they are yet to be read from."""

    path: Path
    label: str  # what its rows name as their source
    line: int  # the number of the first line
    content: bytes | list[Row]
    end: int  # bytes of the file that have been read up to here

    @property
    def where(self) -> Where:
        """Which piece of the data this is."""
        return self.label, self.line, self.end

    def rows(self) -> Iterator[Row]:
        """Read the rows, if they are not read yet."""
        if isinstance(self.content, list):
            yield from self.content
            return
        lines = _decoded(self.path, io.BytesIO(self.content), self.line)
        for line, values in _OF_LINES[kind_of(self.path)](self.path, lines):
            yield Row(values, self.label, line)

    def num_rows(self) -> int:
        """Count the rows; those of JSON lines are not decoded for it."""
        if isinstance(self.content, list):
            return len(self.content)
        if kind_of(self.path) != ".jsonl":
            return sum(1 for _ in self.rows())
        content = self.content.removeprefix(_UTF8_MARK) if self.line == 1 else self.content
        return sum(1 for line in content.split(b"\n") if line.strip(b" \t\r"))


def num_rows(path: Path) -> int:
    """Count the rows of a file. `DataError`: it cannot be read."""
    if kind_of(path) == ".parquet":
        with _columns_of(path):
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
    if kind_of(path) == ".arrow":
        with _columns_of(path):
            return sum(len(batch) for batch in _batches(path))
    return sum(piece.num_rows() for _, piece in pieces_of(path))


def pieces_of(
    path: Path, label: str = "", span: tuple[int, int] | None = None
) -> Iterator[tuple[Row, Piece]]:
    """Read a file in pieces, each with the first row that is read of the file. Its rows name the
    `label` as their source; without one, the file's path. `span`: the number of the first row, from
    0, and of the one after the last; None: all are read. `DataError`: it cannot be read or is
    empty, its first row is malformed, or another is where rows are not lines."""
    pieces = _pieces(path, label or str(path))
    yield from with_first(path, pieces if span is None else _between(pieces, *span))


def with_first(path: Path, pieces: Iterable[Piece]) -> Iterator[tuple[Row, Piece]]:
    """Yield pieces with the first row of them all. `DataError`: there is no row."""
    first = None
    for piece in pieces:
        first = first or next(piece.rows(), None)
        if first is not None:
            yield first, piece
    if first is None:
        raise DataError(
            "the file holds no rows", where=str(path), how="remove it from the data, or add rows"
        )


def _between(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the rows from number `start` on, before number `stop`."""
    before = 0
    for piece in pieces:
        after = before + piece.num_rows()
        if start <= before and after <= stop:
            yield piece
        elif after > start:
            rows = list(islice(piece.rows(), max(0, start - before), stop - before))
            yield replace(piece, content=rows)
        before = after
        if after >= stop:
            return


def grouped(
    rows: Iterable[tuple[int, dict[str, Any]]], path: Path, label: str, size: int
) -> Iterator[Piece]:
    """Yield rows, each with its number, in pieces of a file of so many bytes: of so many rows, or
    fewer, if they hold images. `DataError`: as raised by `rows`, after those before it have been
    yielded."""
    group: list[Row] = []
    image_bytes = 0
    try:
        for line, values in rows:
            group.append(Row(values, label, line))
            image_bytes += _image_bytes(values)
            if len(group) == PIECE_ROWS or image_bytes > PIECE_IMAGES:
                yield Piece(path, label, group[0].line, group, size)
                group = []
                image_bytes = 0
    except DataError:
        if group:  # because what is wrong with them is to be told first
            yield Piece(path, label, group[0].line, group, size)
        raise
    if group:
        yield Piece(path, label, group[0].line, group, size)


def _image_bytes(values: Mapping[str, Any]) -> int:
    """Return how many bytes of images, videos and sounds a row holds."""
    items = [
        item
        for value in values.values()
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, Mapping)
    ]
    contents = [content for item in items if isinstance(content := item.get("bytes"), bytes)]
    waves = [wave for item in items if isinstance(wave := item.get("array"), list)]
    return sum(map(len, contents)) + NUMBER_BYTES * sum(map(len, waves))


def _pieces(path: Path, label: str) -> Iterator[Piece]:
    if path.exists() and not path.is_file():
        how = "write the data to a file, because LEMA reads them more than once"
        raise DataError(
            "the data are a pipe or a device, not a regular file", where=str(path), how=how
        )
    try:
        if kind_of(path) in _OF_LINES:
            if path.suffix.lower() in _COMPRESSED:
                with path.open("rb") as raw, _expanded(raw, path) as file:
                    blocks = iter(partial(file.read, 1 << 20), b"")
                    _check_unpacked(
                        path, (len(block) + block.count(b"\n") * ROW_BYTES for block in blocks)
                    )
            line = 1
            with path.open("rb") as raw, _expanded(raw, path) as file:
                while content := file.read(PIECE_BYTES):
                    content += file.readline(MAX_ROW)
                    if len(content) > MAX_ROW and not content.endswith(b"\n"):
                        raise _error(TOO_LONG, path, line + content.count(b"\n"), SHORTER)
                    num_lines = content.count(b"\n")
                    yield Piece(path, label, line, content, raw.tell())
                    line += num_lines
            return
        yield from grouped(_OF_FILES[kind_of(path)](path), path, label, path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"not a whole {path.suffix[1:]} file: {error}", where=str(path)) from error


def _check_unpacked(path: Path, sizes: Iterable[int]) -> None:
    """Refuse a file that stands for far more than it has, before a row of it is tokenised: that
    takes most time.
    """
    left = MAX_UNPACKED + MAX_RATIO * path.stat().st_size
    if any((left := left - size) < 0 for size in sizes):
        raise DataError(UNPACKS, where=str(path), how=DISTRUST)


def _arrow(path: Path) -> ModuleType:
    """Return the library that reads columns and expands compressed files. `DataError`: it is not
    installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        what = f"a {path.suffix} file needs the library `pyarrow`"
        how = installing("parquet")
        raise DataError(what, where=str(path), how=how) from error
    return pyarrow


def _expanded(file: BinaryIO, path: Path) -> BinaryIO:
    """A file without its compression."""
    match path.suffix.lower():
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=file))
        case ".zst":
            return io.BufferedReader(_arrow(path).CompressedInputStream(file, "zstd"))
    return file


def _error(what: str, path: Path, line: int, how: str = "") -> DataError:
    return DataError(what, where=f"{path}:{line}", how=how)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        yield from _decoded(path, file, 1)


def _decoded(path: Path, lines: Iterable[bytes], first: int) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line endings; split at newlines only, since JSON and text may
    hold U+2028.
    """
    for number, raw in enumerate(lines, first):
        if number == 1:
            if raw.startswith(_UTF16_MARKS):
                raise _error("the file is UTF-16, not UTF-8", path, 1, _TO_UTF8)
            raw = raw.removeprefix(_UTF8_MARK)
        if b"\0" in raw:
            how = f"the file is damaged, or UTF-16; in that case {_TO_UTF8}"
            raise _error(f"NUL byte in column {raw.index(0) + 1}", path, number, how)
        try:
            yield number, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8"
            raise _error(what, path, number, "save the file as UTF-8") from error


def _decode(text: str, start: int, path: Path, line: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object which begins at `start`, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1 - text.count("\n", 0, start)
        raise _error(f"not JSON: {error.msg} (column {error.colno})", path, at) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a name twice, thousands of digits, thousands of brackets
        raise _error(f"not usable JSON: {error}", path, line) from error
    if not isinstance(value, dict):
        what = f"a row must be a JSON object, not a {type(value).__name__}"
        how = (
            'write each row as {"text": "..."} or the like; a list of rows belongs in a .json file'
        )
        raise _error(what, path, line, how)
    return value, end


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's values by name; of two values under one name neither is taken."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(
            name
            for number, (name, _) in enumerate(pairs)
            if name in {earlier for earlier, _ in pairs[:number]}
        )
        raise ValueError(f"{twice!r} is given twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def _skip_blank(text: str, start: int) -> int:
    return match.end() if (match := _BLANK.match(text, start)) else start


def _jsonl(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in lines:
        text = text.rstrip(" \t\r\n")
        start = _skip_blank(text, 0)
        if start == len(text):
            continue
        value, end = _decode(text, start, path, number)
        if end != len(text):
            raise _error(f"more than one JSON value on a line (column {end + 1})", path, number)
        yield number, value


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """An array of objects, or objects one after another; decoded one by one so that each knows
    its line.
    """
    text = "".join(line for _, line in _lines(path))
    position = _skip_blank(text, 0)
    line = 1
    counted = 0
    array = text.startswith("[", position)
    if array:
        position = _skip_blank(text, position + 1)
    while position < len(text) and not (array and text.startswith("]", position)):
        line = line + text.count("\n", counted, position)
        counted = position
        value, position = _decode(text, position, path, line)
        yield line, value
        position = _skip_blank(text, position)
        if array and text.startswith(",", position):
            position = _skip_blank(text, position + 1)
        elif array:
            break
    if array and not (
        text.startswith("]", position) and _skip_blank(text, position + 1) == len(text)
    ):
        at = 1 + text.count("\n", 0, position)
        what = "the list of rows is incomplete, lacks a comma, or is followed by other text"
        raise _error(what, path, at, "check that the file is complete")


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # The csv module's limit of 128 KiB per field is one setting for the whole process; a long
    # document exceeds it.
    csv.field_size_limit(MAX_ROW)
    reader = csv.reader((text for _, text in _lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            how = "quote cells which hold commas, quotes or newlines"
            raise _error(f"not CSV: {error}", path, line, how) from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header) or "" in header:
                how = "the first line must name each column once"
                raise _error(
                    f"column names are empty or repeated: {', '.join(header)}", path, line, how
                )
        elif len(cells) != len(header):
            how = "quote cells which hold commas; write an empty cell as nothing between commas"
            raise _error(
                f"{len(cells)} cells in a row under {len(header)} columns", path, line, how
            )
        else:
            yield line, dict(zip(header, cells, strict=True))


def _txt(_: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in lines:
        if text.strip():
            yield number, {"text": text.rstrip("\r\n")}


def _batches(path: Path) -> Iterator[Any]:
    """Batches of a parquet file, or of either form of Arrow's: what `datasets` writes is a
    stream.
    """
    import pyarrow.ipc

    if kind_of(path) == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=8)  # because each may hold long texts
        return
    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            opened = pyarrow.ipc.open_file(mapped)
            yield from map(opened.get_batch, range(opened.num_record_batches))
        else:
            mapped.seek(0)
            yield from pyarrow.ipc.open_stream(mapped)


def _within_memory(path: Path, number: int, function: Callable[[], T]) -> T:
    """Call what unpacks columns: a few bytes may stand for any number of long texts."""
    try:
        with bounded_memory():
            return function()
    except MemoryError as error:
        raise _error(UNPACKS, path, number + 1, DISTRUST) from error


@contextmanager
def _columns_of(path: Path) -> Iterator[None]:
    """Name a file whose columns cannot be read. `DataError`: the library is not installed, or the
    file is damaged.
    """
    pyarrow = _arrow(path)
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise _error(f"not a whole {path.suffix[1:]} file: {error}", path, 1) from error


def _columnar(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow = _arrow(path)
    number = 0
    left = MAX_UNPACKED + MAX_RATIO * path.stat().st_size
    try:
        every = iter(
            partial(_within_memory, path, number, partial(next, _batches(path), None)), None
        )
        _check_unpacked(path, (batch.nbytes + ROW_BYTES * len(batch) for batch in every))
        batches = _batches(path)
        while (batch := _within_memory(path, number, lambda: next(batches, None))) is not None:
            left -= batch.nbytes
            # rows at once, of one long text
            most = max(1, min(1024, MAX_ROW * len(batch) // max(1, batch.nbytes)))
            parts = (batch.slice(at, most) for at in range(0, len(batch), most))
            for values in (
                row for part in parts for row in _within_memory(path, number, part.to_pylist)
            ):
                number += 1
                left -= ROW_BYTES + sum(
                    len(cell) for cell in values.values() if isinstance(cell, str)
                )
                if left < 0:
                    raise _error(UNPACKS, path, number, DISTRUST)
                yield number, values
    except (pyarrow.ArrowException, OSError) as error:
        raise _error(f"not a whole {path.suffix[1:]} file: {error}", path, number + 1) from error


_Values = Iterator[tuple[int, dict[str, Any]]]
_OF_LINES: dict[str, Callable[[Path, Iterable[tuple[int, str]]], _Values]] = {
    ".jsonl": _jsonl,
    ".txt": _txt,
}
_OF_FILES: dict[str, Callable[[Path], _Values]] = {".json": _json, ".csv": _csv}
_OF_FILES |= dict.fromkeys((".parquet", ".arrow"), _columnar)
_COMPRESSED = {".gz", ".zst"}
READERS = _OF_LINES.keys() | _OF_FILES.keys()
