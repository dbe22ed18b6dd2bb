"""Rows out of .jsonl, .json, .csv, .parquet and .txt files, each row knowing the file and line it came from.

Files whose rows are lines are read in pieces of whole lines, which other processes can make rows of.
"""

import csv
import glob
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from lema.errors import DataError

__all__ = [
    "Piece",
    "Row",
    "find_files",
    "flag_of",
    "list_of",
    "load_rows",
    "num_alike",
    "pieces_of",
    "read_rows",
    "text_of",
]

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

    @property
    def origin(self) -> str:
        """`file:line`, as an editor opens it."""
        return f"{self.source}:{self.line}"

    def broken(self, what: str, *, at: str = "", how: str = "") -> DataError:
        """The error that names this row; `at` narrows it to a column or message."""
        return DataError(what, where=f"{self.origin}, {at}" if at else self.origin, how=how)


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The data files that files, directories and globs stand for, in a fixed order.

    A directory gives the data files directly inside it, sorted by name; a glob its matches, sorted. Of data sets by
    name, these are the files of all of them.

    Raises:
        DataError: a path does not exist, matches nothing, or is of a kind which cannot be read.
    """
    if isinstance(paths, Mapping):
        return [file for files in paths.values() for file in find_files(files)]
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise DataError("no data files were given", how="set train_data to a file, a directory or a glob")
    return [file for path in given for file in _expand(Path(path).expanduser())]


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix.lower() in _READERS and not p.name.startswith("."))
        if not found:
            raise DataError("the directory holds no data files", where=str(path), how=f"it may hold {_accepted()}")
        return found
    matches = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207 (absolute globs)
    if not matches:
        raise DataError("no such data file", where=str(path), how="check the path; it is relative to the shell's")
    found = [Path(match) for match in sorted(matches)]
    for file in found:
        if file.suffix.lower() not in _READERS:
            what = f"cannot read a {file.suffix or 'nameless'} file"
            raise DataError(what, where=str(file), how=f"give {_accepted()}")
    return found


def _accepted() -> str:
    return ", ".join(sorted(_READERS)) + " files"


def load_rows(paths: str | Path | Iterable[str | Path]) -> list[Row]:
    """All rows of the files, in memory; see `read_rows`."""
    return list(read_rows(paths))


def read_rows(paths: str | Path | Iterable[str | Path]) -> Iterator[Row]:
    """The rows of the files, one after another, in the order of the files and their lines.

    Blank lines of .jsonl, .csv and .txt files are no rows. A leading UTF-8 byte-order mark is taken off.

    Raises:
        DataError: a file is missing, empty, damaged or not UTF-8, or a row is malformed; names file and line.
    """
    for path in find_files(paths):
        empty = True
        for piece in pieces_of(path):
            for row in piece.rows():
                empty = False
                yield row
        if empty:
            raise DataError("the file holds no rows", where=str(path), how="take it out of the data, or fill it")


PIECE_BYTES, PIECE_ROWS = 1 << 19, 512


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the rows of a file, as they are or as the lines they are yet to be read from."""

    path: Path
    line: int  # the number of the first line
    content: bytes | list[Row]
    end: int  # bytes of the file that have been read up to here

    def rows(self) -> Iterator[Row]:
        """Read the rows.

        Raises:
            DataError: one is malformed.
        """
        if isinstance(self.content, list):
            yield from self.content
            return
        lines = _decoded(self.path, io.BytesIO(self.content), self.line)
        for line, values in _OF_LINES[self.path.suffix.lower()](self.path, lines):
            yield Row(values, str(self.path), line)


def pieces_of(path: Path) -> Iterator[Piece]:
    """Read a file in pieces.

    Raises:
        DataError: the file cannot be read, or, where its rows are not lines, one of them is malformed.
    """
    if path.exists() and not path.is_file():
        how = "write what comes out of it to a file; the data are read more than once"
        raise DataError("the data are no regular file but a pipe, a device or the like", where=str(path), how=how)
    try:
        if path.suffix.lower() in _OF_LINES:
            line, end = 1, 0
            with path.open("rb") as file:
                while content := file.read(PIECE_BYTES):
                    content += file.readline()
                    end += len(content)
                    yield Piece(path, line, content, end)
                    line += content.count(b"\n")
            return
        size, read = path.stat().st_size, _OF_FILES[path.suffix.lower()](path)
        rows: list[Row] = []
        try:
            for line, values in read:
                rows.append(Row(values, str(path), line))
                if len(rows) == PIECE_ROWS:
                    yield Piece(path, rows[0].line, rows, size)
                    rows = []
        except DataError:
            if rows:  # because what is wrong with them is to be told first
                yield Piece(path, rows[0].line, rows, size)
            raise
        if rows:
            yield Piece(path, rows[0].line, rows, size)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path)) from error


def _error(what: str, path: Path, line: int, how: str = "") -> DataError:
    return DataError(what, where=f"{path}:{line}", how=how)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        yield from _decoded(path, file, 1)


def _decoded(path: Path, lines: Iterable[bytes], first: int) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line endings; split at newlines only, since JSON and text may hold U+2028."""
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
    except (ValueError, RecursionError) as error:  # a name twice, thousands of digits, thousands of brackets
        raise _error(f"not usable JSON: {error}", path, line) from error
    if not isinstance(value, dict):
        what = f"a row must be a JSON object, not a {type(value).__name__}"
        how = 'write each row as {"text": "..."} or the like; a list of rows belongs in a .json file'
        raise _error(what, path, line, how)
    return value, end


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's values by name; of two values under one name neither is taken."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in {one for one, _ in pairs[:number]})
        raise ValueError(f"{twice!r} is given twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def _skip_blank(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    return match.end() if match else start


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
    """An array of objects, or objects one after another; decoded one by one so that each knows its line."""
    text = "".join(line for _, line in _lines(path))
    position, line, counted = _skip_blank(text, 0), 1, 0
    array = text.startswith("[", position)
    if array:
        position = _skip_blank(text, position + 1)
    while position < len(text) and not (array and text.startswith("]", position)):
        line, counted = line + text.count("\n", counted, position), position
        value, position = _decode(text, position, path, line)
        yield line, value
        position = _skip_blank(text, position)
        if array and text.startswith(",", position):
            position = _skip_blank(text, position + 1)
        elif array:
            break
    if array and not (text.startswith("]", position) and _skip_blank(text, position + 1) == len(text)):
        at = 1 + text.count("\n", 0, position)
        what = "the list of rows is cut off, lacks a comma, or is followed by something"
        raise _error(what, path, at, "check that the file is complete")


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # The csv module's limit of 128 KiB per field is one setting for the whole process; a long document exceeds it.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    reader = csv.reader((text for _, text in _lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise _error(
                f"not CSV: {error}", path, line, "quote cells which hold commas, quotes or newlines"
            ) from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header) or "" in header:
                how = "the first line names the columns, each once"
                raise _error(f"column names are empty or repeated: {', '.join(header)}", path, line, how)
        elif len(cells) != len(header):
            how = "quote cells which hold commas; write an empty cell as nothing between commas"
            raise _error(f"{len(cells)} cells in a row under {len(header)} columns", path, line, how)
        else:
            yield line, dict(zip(header, cells, strict=True))


def _txt(_: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in lines:
        if text.strip():
            yield number, {"text": text.rstrip("\r\n")}


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (pyarrow.ArrowException, OSError) as error:
        raise _error(f"not a whole parquet file: {error}", path, number + 1) from error


_Values = Iterator[tuple[int, dict[str, Any]]]
_OF_LINES: dict[str, Callable[[Path, Iterable[tuple[int, str]]], _Values]] = {".jsonl": _jsonl, ".txt": _txt}
_OF_FILES: dict[str, Callable[[Path], _Values]] = {".json": _json, ".csv": _csv, ".parquet": _parquet}
_READERS = _OF_LINES.keys() | _OF_FILES.keys()


_YES_OR_NO = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def list_of(row: Row, column: str) -> list[Any]:
    """A list; or one written as JSON in a string, which is the only way a .csv can hold one."""
    value = row.values[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.broken(f"'{column}' should be a list, and the text there is not JSON: {error}") from error
    elif hasattr(value, "tolist"):  # arrays and tensors, in rows from memory
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise row.broken(f"'{column}' should be a list, not {type(value).__name__}")
    if not value:
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return list(value)


def text_of(row: Row, value: Any, name: str, at: str = "") -> str:
    """A text that any tokenizer takes."""
    if not isinstance(value, str):
        raise row.broken(f"{name} should be text, not {type(value).__name__}", at=at)
    if "\0" in value:
        raise row.broken(f"{name} holds a NUL character", at=at, how="remove it; the text is probably damaged")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{name} holds half a surrogate pair, which is no character"
            how = "the text was cut inside a character; repair or remove the row"
            raise row.broken(what, at=at, how=how) from error
    return value


def flag_of(row: Row, value: Any, name: str, at: str = "") -> bool:
    """Whether to train, as `train: false` or `weight: 0` say; a weight between the two is refused."""
    known = value.lower() if isinstance(value, str) else value
    if not isinstance(known, (bool, int, float, str)) or known not in _YES_OR_NO:
        what = f"{name} says what to train on and should be true or false, 1 or 0, not {value!r}"
        raise row.broken(what, at=at, how="answers have no weights in between; or rename it, if it means another thing")
    return _YES_OR_NO[known]


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
