"""Tokens kept in files, so that data are tokenised once: later starts, and every resume, open what
the first one wrote.

An entry appears whole or not at all (docs/data.md). Several processes write it, and rows keep the
order of the data. A start that is killed meanwhile leaves its parts, and the next one goes on
behind them (`lema.data.parts`).
"""

import contextlib
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lema.backend.findings import program_versions
from lema.backend.host.filelocks import lock
from lema.backend.host.files import BINARY, open_directory
from lema.backend.host.processors import usable_threads
from lema.config.printing import draws
from lema.config.units import human_bytes, human_duration
from lema.data.dataset import LABELLED, ROW, Columns, Skipped, Table
from lema.data.files import Piece, Row, Where
from lema.data.parts import ABOUT, PARTS, ROWS, SKIPPED, TOKENS, Parts, Pieces
from lema.data.sets.sources import DataFile
from lema.errors import DataError, DiskError, unreadable
from lema.storage.atomic import appearing, discard_unused, replace_file
from lema.storage.directio import read_at
from lema.storage.diskspace import user_cache
from lema.storage.regular import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SMALL", "Gather", "cached", "folder_of", "key_of"]

Gather: TypeAlias = Callable[[Iterable[Row], Row | None], Columns]
"""Tokenises rows, given the first row of their file; None: the rows begin with it."""

VERSION = 1  # of the files, and of how rows become tokens: another number is another key
# bytes of data files below which tokenising again takes no longer than a few seconds
SMALL = 8 << 20
BOUND = 50 * 10**9  # bytes of all entries; those that were used longest ago are removed above it
READ_WHOLE = 1 << 16  # bytes of a data file up to which its content is part of the key
MOST_PROCESSES = 32
LOCKS = 8  # more than a pool of processes has
PROGRAMS = ("transformers", "tokenizers", "jinja2")


def folder_of(setting: bool | str) -> Path | None:
    """Return the folder that the setting `data_cache` means; None: nothing is kept."""
    if setting is True:
        return user_cache("tokens")
    return expanded(setting) if setting else None


def key_of(
    files: Sequence[DataFile],
    tokenizer: "PreTrainedTokenizerBase | None",
    settings: Mapping[str, Any],
) -> str:
    """Return a digest of all that decides the tokens. `DataError`: a file cannot be read.
    `NotImplementedError`: the tokenizer cannot be saved, so nothing says which one it is."""
    programs = program_versions(*PROGRAMS)
    about = {
        "version": VERSION,
        "programs": programs,
        "files": [_identity(file) for file in files],
        **settings,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    if tokenizer is not None:
        with tempfile.TemporaryDirectory(prefix="lema-tokenizer-") as folder:
            tokenizer.save_pretrained(folder)
            for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _identity(file: DataFile) -> list[Any]:
    if file.stream is not None:
        options = file.stream.options.get("data_files")
        return [file.label, file.stream.version(), *([options] if options else [])]
    path = file.path
    try:
        about = path.stat()
        content = (
            hashlib.sha256(path.read_bytes()).hexdigest() if about.st_size <= READ_WHOLE else ""
        )
    except OSError as error:
        raise unreadable(path, error) from error
    identity = [str(path), str(path.resolve()), about.st_size, about.st_mtime_ns, content]
    identity += [] if file.span is None else [list(file.span)]
    return identity + ([] if file.label == str(path) else [file.label])


def cached(files: Sequence[DataFile], key: Callable[[], str], gather: Gather, root: Path) -> Table:
    """Return the rows of files as tokens: those that are kept, or else newly made, and then kept.
    Of several processes that ask for the same at once, one makes them and the others wait.
    `DataError`: as `gather`; or the files have changed while they were read. `DiskError`: the
    tokens could not be written."""
    name = key()
    directory = root / name
    with _alone(directory) as locked:
        opened = _opened(directory)
        if isinstance(opened, Table):
            with contextlib.suppress(OSError):  # another user's
                os.utime(directory)
            return opened
        began = time.monotonic()
        with _part_folder(directory, locked) as part:
            note = _write(part, files, gather)
            if key() != name:
                what = "the data or the tokenizer's files changed while LEMA read them"
                raise DataError(
                    what,
                    where=", ".join(file.label for file in files),
                    how="start again when they no longer change",
                )
        table = _opened(directory)
        if not isinstance(table, Table):
            raise DiskError(
                f"the disk returns other bytes: {table}", where=str(directory), how="check the disk"
            )
    _evict(root, directory)
    note = f"tokenised in {human_duration(time.monotonic() - began)} {note}; kept in {directory}"
    again = (f"kept tokens were damaged ({opened}), so LEMA makes them again",) if opened else ()
    return replace(table, notes=(*again, note, *table.notes))


class Entry:
    """The tokens of an entry, read on request, and the rest of the entry. Reading leaves no page in
    the process, where those of a mapped file would stay until memory is short. The entry is locked
    while this lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "tokens" / TOKENS
        self._descriptor = os.open(self.file, os.O_RDONLY | BINARY)
        weakref.finalize(self, os.close, self._descriptor)
        lock(self._descriptor, shared=True, wait=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, (self.directory,)

    def __getitem__(self, where: slice) -> npt.NDArray[np.int32]:
        content = read_at(
            self._descriptor, self.file, 4 * where.start, 4 * (where.stop - where.start)
        )
        return np.frombuffer(content, dtype="<i4")

    def __iter__(self) -> Iterator[Skipped]:
        """Yield the rows that were cut or dropped."""
        file = self.file.with_name(SKIPPED)
        try:
            with file.open(encoding="utf-8") as lines:
                for record in map(json.loads, lines):
                    yield {
                        **record,
                        "file": record["file"],
                        "line": record["line"],
                        "why": record["why"],
                        "tokens": int(record["tokens"]),
                    }
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            what = "the list of rows that were cut or left out is damaged"
            how = "delete its folder: it is made anew"
            raise DataError(f"{what}: {error}", where=str(file), how=how) from error

    def get(self, name: str) -> str | None:
        """Return a digest that is kept under a name; None: there is none."""
        with contextlib.suppress(OSError, ValueError):
            digest = (self.directory / name).read_text(encoding="ascii")
            return digest if re.fullmatch("[0-9a-f]{32}", digest) else None
        return None

    def put(self, name: str, text: str) -> None:
        """Keep a digest; where it cannot be, it is computed again another time."""
        with contextlib.suppress(DiskError):
            replace_file(self.directory / name, text.encode())


def _opened(directory: Path) -> Table | str:
    """Return the rows of an entry; or what is wrong with it, which is nothing where it is not
    there.
    """
    folder = directory / "tokens"
    if not folder.is_dir():
        return ""
    try:
        written = json.loads((folder / ABOUT).read_bytes())
        about = written["about"]
        if written["sha256"] != hashlib.sha256(json.dumps(about).encode()).hexdigest():
            return f"{ABOUT} has changed since it was written"
        if wrong := [
            name for name, size in about["sizes"].items() if (folder / name).stat().st_size != size
        ]:
            return f"{wrong[0]} has another size"
        with (folder / ROWS).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != about["rows"]:
                return f"{ROWS} has changed since it was written"
        rows = (
            np.memmap(folder / ROWS, dtype=ROW, mode="r")
            if about["sizes"][ROWS]
            else np.empty(0, ROW)
        )
        notes, sources = (tuple(map(str, about[name])) for name in ("notes", "sources"))
        if not _lie_in(rows, about["sizes"][TOKENS] // 4, len(sources)):
            return f"{ROWS} leads out of {TOKENS}"
        counts = int(about["dropped"]), int(about["left_out"])
        if about["sizes"][SKIPPED]:
            notes += (f"rows that were cut or left out are listed in {folder / SKIPPED}",)
        entry = Entry(directory)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        return f"{error.__class__.__name__}: {error}"
    return Table(rows, entry, sources, *counts, notes, entry, entry)


def _lie_in(rows: npt.NDArray[Any], num_tokens: int, num_sources: int) -> bool:
    """Whether each row is a part of so many tokens, and of one of so many sources."""
    for begin in range(0, len(rows), 1 << 20):  # so that memory does not grow with the rows
        chunk = rows[begin : begin + (1 << 20)]
        stored = chunk["length"].astype(np.int64) * np.where(chunk["mark"] & LABELLED, 2, 1)
        inside = (chunk["start"] >= 0) & (stored >= 0) & (chunk["start"] <= num_tokens - stored)
        if not np.all(inside & (chunk["source"] >= 0) & (chunk["source"] < num_sources)):
            return False
    return True


@contextlib.contextmanager
def _part_folder(directory: Path, locked: bool) -> Iterator[Path]:
    """Give a folder to write an entry's files into, which is as a start that was stopped or killed
    has left it. Where nobody can be kept from writing there at the same time it is a new one, which
    goes if it is not completed."""
    if not locked:
        with appearing(directory / "tokens") as part:
            yield part
            (part / PARTS).unlink()
        return
    part = directory / "unfinished"
    try:
        part.mkdir(exist_ok=True)
        with appearing(directory / "tokens", part):
            yield part
        (directory / "tokens" / PARTS).unlink(missing_ok=True)
    except Exception as error:
        # after which the data are as they were, and the disk too
        if not isinstance(error.__cause__, BrokenProcessPool):
            shutil.rmtree(part, ignore_errors=True)
        raise


def _write(folder: Path, files: Sequence[DataFile], gather: Gather) -> str:
    """Write the files of an entry; return a text on the processes, and on parts of an earlier
    start.
    """
    total = sum(file.num_bytes for file in files)
    processes = _num_processes()
    todo = (piece for file in files for piece in file.pieces())
    with _line() as report:
        num_parts = Parts(folder, total, report).write(
            todo, lambda left: _gathered_pieces(left, gather, processes)
        )
    went_on = f", after {num_parts:,} parts that a start before had made" if num_parts else ""
    return f"by {processes} processes{went_on}"


def _num_processes() -> int:
    """Return how many processes tokenise; one, with a warning, where the system has no room for
    what they share; one where processes cannot be forked with all that this one has: Windows
    cannot, and macOS's own libraries forbid it."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return 1
    try:
        _ = [get_context("fork").Lock() for _ in range(LOCKS)]  # which lie in shared memory
    except OSError as error:
        what = (
            f"rows are tokenised in one process, because /dev/shm cannot be used: {error.strerror}"
        )
        warnings.warn(f"{what}; give it a megabyte (docker run --shm-size=1g)", stacklevel=2)
        return 1
    return min(usable_threads(), MOST_PROCESSES)


def _gathered_pieces(
    todo: Pieces, gather: Gather, processes: int
) -> Iterator[tuple[Where, Columns]]:
    """Yield the rows of one piece after another, in the order of the data, and which piece it was.
    What is wrong with a row is raised when all rows before it have been yielded."""
    if processes == 1:
        yield from ((piece.where, gather(piece.rows(), first)) for first, piece in todo)
        return
    waiting = deque[tuple[Where, Future[Columns]]]()
    failed = None
    more = True
    with _pool(gather, processes) as pool:
        while more or waiting:
            while more and len(waiting) < 3 * processes:
                try:
                    first, piece = next(todo)
                except StopIteration:
                    more = False
                except DataError as error:
                    failed = error
                    more = False
                else:
                    waiting.append((piece.where, pool.submit(_gathered, piece, first)))
            if waiting:
                where, future = waiting.popleft()
                yield where, future.result()
    if failed is not None:
        raise failed


_gather: Gather | None = None
"""What a worker does. It has it from the process it was forked from, because a tokenizer is not
sent between them.
"""


def _gathered(piece: Piece, first: Row) -> Columns:
    assert _gather is not None
    return _gather(piece.rows(), first)


@contextlib.contextmanager
def _pool(gather: Gather, processes: int) -> Iterator[ProcessPoolExecutor]:
    """Give workers that end with the `with` block, and with this process, however it ends."""
    global _gather
    _gather = gather
    alive, write_end = os.pipe()
    pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, (alive, write_end))
    try:
        with warnings.catch_warnings():  # threads are there that hold nothing a worker needs
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            # all workers are forked by it, before there are more threads
            pool.submit(os.getpid).result()
        yield pool
    except BrokenProcessPool as error:
        how = (
            "the system probably killed it because memory ran out: free memory, or allow fewer "
            "cores (taskset -c 0)"
        )
        raise DataError(
            "a process that tokenised rows ended unexpectedly", where="train_data", how=how
        ) from error
    except KeyboardInterrupt:
        os.write(write_end, bytes(processes))  # each worker reads one of them and ends
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.close(alive)
        os.close(write_end)
        _gather = None


def _begin(alive: int, write_end: int) -> None:
    """Prepare a worker: Ctrl-C is its parent's, threads of the tokenizer's are not there any
    more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # because a collection would write to every page that is shared with the parent
    os.close(write_end)
    # When the parent has ended, no end of this pipe is open for writing, and reading it returns.
    threading.Thread(target=lambda: (os.read(alive, 1), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def _line() -> Iterator[Callable[[int, int, float, int], None]]:
    """Give what shows how much of the data is tokenised: one line that is drawn again, on a
    terminal alone.
    """
    from rich.console import Console

    shown = draws(Console(stderr=True))

    def report(done: int, total: int, left: float, tokens: int) -> None:
        if shown:
            text = f"{tokens:,} tokens"
            if done:  # it is 0 for a stream, because its end is unknown
                text = f"{human_bytes(done)} of {human_bytes(total)}  {human_duration(left)} left"
            sys.stderr.write(f"\r\x1b[Ktokenising: {text}")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Wait until no other process makes an entry, and have it to oneself in a `with` block; False:
    there are no locks there, and others may make it at the same time."""
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = open_directory(directory)
        except OSError as error:
            how = "set data_cache to a folder that may be written to, or data_cache: false"
            what = f"tokens cannot be kept there: {error.strerror}"
            raise DiskError(what, where=str(directory.parent), how=how) from error
        if descriptor is None:
            yield False
            return
        try:
            locked = lock(descriptor)
            # Another process may have removed it meanwhile; then a third has the lock of a new one
            # of that name.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), directory.stat()):
                    yield locked is not None
                    return
        finally:
            os.close(descriptor)


def _evict(root: Path, current: Path) -> None:
    """Remove the entries that were used longest ago until the others are below the bound; none
    that is in use.
    """
    # what another process removes, or owns, is not ours to touch
    with contextlib.suppress(OSError):
        entries = [entry for entry in root.iterdir() if re.fullmatch("[0-9a-f]{32}", entry.name)]
        sizes = {
            entry: sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            for entry in entries
        }
        used = sum(sizes.values())
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime):
            if used <= BOUND:
                return
            if entry != current and discard_unused(entry, entry / "tokens" / TOKENS):
                used -= sizes[entry]
