"""The files of data sets, in the order in which they are read: which rows of each, and how they
are read.
"""

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from lema.config.data.rows import READING
from lema.config.data.sets import BUILDERS, is_data_set, is_files
from lema.data.files import (
    READERS,
    Piece,
    Row,
    accepted,
    grouped,
    kind_of,
    num_rows,
    pieces_of,
    with_first,
)
from lema.data.sets.slices import is_sliced, parse_split
from lema.errors import DataError
from lema.storage.hubdata import HubData, is_hub
from lema.storage.regular import expanded

__all__ = ["DataFile", "Source", "data_files", "find_files", "load_rows", "local_paths"]
__all__ += ["folders_of", "given_files", "names_of", "read_rows", "rows_in", "templates_of"]

Span: TypeAlias = tuple[int, int]
"""The number of the first row, from 0, and of the one after the last."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set, or a stream of the hub.

    Attributes:
        path: the file; of a stream its name.
        label: what its rows name as their source.
        span: which of its rows are read; None: all of them.
        options: the settings of reading that its data set has of its own.
        data_set: the name of its data set; empty: it has none.
        stream: what is read if it is a stream; None: it is a file.
    """

    path: Path
    label: str
    span: Span | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    data_set: str = ""
    stream: HubData | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the file; 0 of a stream, because its end is unknown."""
        return self.path.stat().st_size if self.stream is None and self.path.is_file() else 0

    def pieces(self) -> Iterator[tuple[Row, Piece]]:
        """Read it in pieces, each with the first row; see `lema.data.files.pieces_of`."""
        if self.stream is None:
            yield from pieces_of(self.path, self.label, self.span)
        else:
            yield from with_first(self.path, grouped(self.stream.rows(), self.path, self.label, 0))


Source: TypeAlias = str | Path | DataFile | Mapping[str, Any]
"""Files, a data set of the hub, or a mapping of the settings of a data set."""

Sources: TypeAlias = Source | Iterable[Source] | Mapping[str, Source | Iterable[Source]]
"""Data sets, one after the other, or by name."""


def data_files(sources: Sources, first: int | None = None) -> list[DataFile]:
    """Return the files of data sets in a fixed order. A directory gives the data files directly
    inside it, sorted by name; a glob its matches, sorted.

    Args:
        sources: the data sets, as the setting `train_data` names them.
        first: how many rows are read of each stream; None: all.

    Returns:
        The files. Of a file that several data sets read in different ways, the rows of all but the
        first of these name also the data set as their source.

    Raises:
        DataError: a path does not exist, matches nothing, or is of a kind that cannot be read; a
            data set of the hub cannot be had; a part of a split is written wrongly or is empty.
    """
    files = [file for name, source in _named(sources) for file in _of(source, name, first)]
    return _labelled(files)


def find_files(sources: Sources, first: int | None = None) -> list[Path]:
    """The paths of the files that `data_files` returns."""
    return [file.path for file in data_files(sources, first)]


def _named(sources: Sources, name: str = "") -> Iterator[tuple[str, Source]]:
    """Yield each data set with its name."""
    if isinstance(sources, (str, Path, DataFile)) or is_data_set(sources):
        yield name, sources
    elif isinstance(sources, Mapping):
        for key, source in sources.items():
            yield from _named(source, key)
    else:
        items = list(sources)
        if not items:
            raise DataError(
                "no data files were given", how="set train_data to a file, a directory or a glob"
            )
        for item in items:
            yield from _named(item, name)


def _of(source: Source, name: str, first: int | None) -> list[DataFile]:
    if isinstance(source, DataFile):
        return [replace(source, data_set=source.data_set or name)]
    if isinstance(source, (str, Path)):
        if is_hub(source):
            hub = HubData.parse(str(source))
            return _of_hub(hub, hub.split, {}, name, first)
        return [DataFile(path, str(path), data_set=name) for path in _expand(source)]
    options = {key: source[key] for key in READING if source.get(key) is not None}
    most = source.get("max_samples")
    path = str(source["path"])
    if is_files(path) or (path in BUILDERS and source.get("data_files")):
        files = _of_files(source, options, name)
    else:
        chosen = {key: source[key] for key in ("name", "revision", "data_files") if source.get(key)}
        split = source.get("split") or "train"
        hub = HubData(_label(source), path, split, chosen, bool(source.get("streaming")))
        files = _of_hub(hub, split, options, name, first)
    return files if most is None else _first_rows(files, most)


def _label(source: Mapping[str, Any]) -> str:
    """Return the text that names a data set of the hub in messages."""
    about = "&".join(
        f"{key}={str(source[key]).lower() if key == 'streaming' else source[key]}"
        for key in ("name", "split", "revision", "data_files", "streaming")
        if source.get(key)
    )
    return f"hub:{source['path']}" + f"?{about}" * bool(about)


def _of_files(source: Mapping[str, Any], options: Mapping[str, Any], name: str) -> list[DataFile]:
    """Return the files that LEMA reads itself of a data set given as a mapping."""
    path = str(source["path"])
    chosen = source.get("data_files")
    named = [path] if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    paths = [file for named_path in named for file in _expand(named_path)]
    if path in BUILDERS:
        for file in paths:
            if kind_of(file) not in BUILDERS[path]:
                what = f"path: {path} reads {' and '.join(BUILDERS[path])} files"
                raise DataError(what, where=str(file), how="name the builder of this kind of file")
    files = [DataFile(file, str(file), None, options, name) for file in paths]
    split = source.get("split") or "train"
    parts = parse_split(split, path)
    if unknown := next((part.split for part in parts if part.split != "train"), None):
        what = f"files have one split, train, and there is no {unknown!r}"
        raise DataError(what, where=path, how="leave split out, or write train[:20%]")
    return _parts(split, dict.fromkeys(["train"], files), path) if is_sliced(split) else files


def _of_hub(
    hub: HubData, split: str, options: Mapping[str, Any], name: str, first: int | None
) -> list[DataFile]:
    """Return the files, or the stream, of a data set that the library reads."""
    if hub.streaming:
        if is_sliced(split):
            return _of_sliced_stream(hub, split, options, name, first)
        stream = hub if first is None else hub.part(0, first)
        return [DataFile(Path(stream.label), stream.label, None, options, name, stream)]
    if not is_sliced(split):
        paths = hub.files_of(split)
        return [DataFile(path, str(path), None, options, name) for path in paths]
    names = dict.fromkeys(part.split for part in parse_split(split, hub.label))
    files = {
        part: [DataFile(path, str(path), None, options, name) for path in hub.files_of(part)]
        for part in names
    }
    return _parts(split, files, hub.label)


def _of_sliced_stream(
    hub: HubData, split: str, options: Mapping[str, Any], name: str, first: int | None
) -> list[DataFile]:
    """Return parts of a stream, each of which is a stream."""
    streams = []
    for part in parse_split(split, hub.label):
        if part.percent or (part.start or 0) < 0 or (part.stop or 0) < 0:
            what = f"the number of rows of a stream is unknown, so it has no part {split}"
            how = "write train[:1000], in rows from the first one on, or leave streaming out"
            raise DataError(what, where=hub.label, how=how)
        start = part.start or 0
        count = None if part.stop is None else max(part.stop - start, 0)
        stream = replace(hub, split=part.split).part(start, count)
        streams.append(stream if first is None else stream.part(0, first))
    return [
        DataFile(Path(stream.label), stream.label, None, options, name, stream)
        for stream in streams
    ]


def _parts(split: str, files: Mapping[str, list[DataFile]], where: str) -> list[DataFile]:
    """Return the parts of splits, given the files of each split."""
    counts = {name: [num_rows(file.path) for file in of] for name, of in files.items()}
    selected = []
    for part in parse_split(split, where):
        try:
            start, stop = part.bounds(sum(counts[part.split]))
        except ValueError as error:
            raise DataError(str(error), where=where, how="leave the rounding out") from error
        selected += list(_between(files[part.split], counts[part.split], start, stop))
    if not selected:
        total = ", ".join(f"{name} has {sum(of):,} rows" for name, of in counts.items())
        raise DataError(
            f"the part {split} of the data has no rows: {total}", where=where, how="take more"
        )
    return selected


def _between(files: list[DataFile], counts: list[int], start: int, stop: int) -> Iterator[DataFile]:
    """Yield what files have of the rows from number `start` on, before number `stop`, of all."""
    before = 0
    for file, count in zip(files, counts, strict=True):
        first, last = max(start - before, 0), min(stop - before, count)
        if first < last:
            yield file if (first, last) == (0, count) else replace(file, span=(first, last))
        before += count


def _first_rows(files: list[DataFile], most: int) -> list[DataFile]:
    """Return what files have of the first rows of them all."""
    left = most
    selected = []
    for file in files:
        if left == 0:
            break
        if file.stream is not None:
            stream = file.stream.part(0, left)
            label = stream.label
            selected.append(replace(file, path=Path(label), label=label, stream=stream))
            left -= left if stream.count is None else min(left, stream.count)
            continue
        start, stop = file.span or (0, num_rows(file.path))
        last = min(stop, start + left)
        selected.append(file if last == stop else replace(file, span=(start, last)))
        left -= last - start
    return selected


def _labelled(files: list[DataFile]) -> list[DataFile]:
    """Return files whose labels tell apart the ways in which one of them is read."""
    readings = dict[Path, list[Any]]()
    labelled = []
    for file in files:
        reading = (file.data_set, dict(file.options))
        earlier = readings.setdefault(file.path, [])
        if reading not in earlier:
            earlier.append(reading)
        number = earlier.index(reading) + 1
        label = str(file.path) if file.stream is None else file.stream.label
        label += f" ({file.data_set or 'reading'} {number})" * (number > 1)
        labelled.append(replace(file, label=label))
    return labelled


def names_of(sources: Sources | None) -> list[str]:
    """Return what to call data sets in a list: their own names, or those of their files."""
    if isinstance(sources, Mapping) and not is_data_set(sources):
        return [str(name) for name in sources]
    paths = [
        source["path"] if isinstance(source, Mapping) else source
        for _, source in (_named(sources) if sources else ())
    ]
    return [path.path.name if isinstance(path, DataFile) else Path(path).name for path in paths]


def templates_of(sources: Sources | None) -> set[str]:
    """Return the chat templates that data sets have of their own."""
    return {
        str(source["chat_template"])
        for _, source in _named(sources or {})
        if isinstance(source, Mapping) and source.get("chat_template")
    }


def local_paths(sources: Sources | None) -> list[Path]:
    """Return the files and directories that the settings of data name, globs as what they match,
    without opening any; a data set of the hub is none."""
    if sources is None or sources in ([], {}):
        return []
    paths = []
    for _, source in _named(sources):
        if isinstance(source, DataFile):
            paths.append(source.path)
        elif isinstance(source, Mapping):
            chosen = source.get("data_files") or []
            named = [str(source["path"]), *([chosen] if isinstance(chosen, str) else chosen)]
            paths += [path for named_path in named for path in _matches(named_path)]
        elif not is_hub(source):
            paths += _matches(source)
    return paths


def _matches(source: str | Path) -> list[Path]:
    path = expanded(source)
    if path.exists():
        return [path]
    return [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - Path.glob takes no absolute pattern


def _expand(source: str | Path) -> list[Path]:
    """Return the data files of a path."""
    path = expanded(source)
    if path.is_dir():
        files = sorted(
            p for p in path.iterdir() if kind_of(p) in READERS and not p.name.startswith(".")
        )
        if not files:
            raise DataError(
                "the directory holds no data files",
                where=str(path),
                how=f"it may hold {accepted()}",
            )
        return files
    files = sorted(_matches(source))
    if not files:
        fix = (
            "check the path; it is relative to the shell's; of the hub, give {path: org/name, "
            "split: train}"
        )
        raise DataError("no such data file", where=str(path), how=fix)
    for file in files:
        if kind_of(file) not in READERS:
            what = f"cannot read a {file.suffix or 'nameless'} file"
            raise DataError(what, where=str(file), how=f"give {accepted()}")
    return files


def folders_of(files: Iterable[DataFile] | None) -> dict[str, Path]:
    """Return the folders of files by what their rows name as their source; none of a stream."""
    return {file.label: file.path.parent for file in files or () if file.stream is None}


def given_files(data: object) -> list[DataFile] | None:
    """Return the files that data name; None: they are rows, or name files one by one."""
    items = list(data) if isinstance(data, (list, tuple)) else [data]
    named = (isinstance(item, (str, Path, DataFile)) or is_data_set(item) for item in items)
    return data_files(cast("Sources", data)) if items and all(named) else None


def load_rows(sources: Sources) -> list[Row]:
    """All rows of the files, in memory; see `read_rows`."""
    return list(read_rows(sources))


def read_rows(sources: Sources) -> Iterator[Row]:
    """The rows of the files, one after another, in the order of the files and their lines. Blank
    lines of .jsonl, .csv and .txt files are no rows. A leading UTF-8 byte-order mark is taken off.
    `DataError`: a file is missing, empty, damaged or not UTF-8, or a row is malformed; names file
    and line."""
    yield from rows_in(data_files(sources))


def rows_in(files: Iterable[DataFile]) -> Iterator[Row]:
    """The rows of files that are known already."""
    for file in files:
        for _, piece in file.pieces():
            yield from piece.rows()
