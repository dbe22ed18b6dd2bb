"""The devices and the disk: what memory and space they have, and how fast bytes come from one to
the other.

Everything about a device is asked through the seam. What only one kind of device has (a driver, a
software kit) is told by that backend's own doctor. The file that LEMA's own reader reads was
written a moment ago, so it is flushed to the disk and dropped from the cache first. It loses its
name before its first byte is written, so nothing is left however this process ends.
"""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from lema.backend import Backend, Fact, Finding, Level
from lema.backend.host.files import drop_cached, read_into
from lema.config.units import human_bytes
from lema.errors import DISTRIBUTION

__all__ = ["devices", "disk", "disk_speeds", "links"]


SECTION = "devices"
LINK = "link"
DISK = "disk"
COPY = 256 << 20  # bytes of one copy
# of the device's memory, and of what is available in the host, no more than one part in so many
PART = 16
DESCRIPTORS = Path("/proc/self/fd")
PAGE = 4096
CHUNK = 16 << 20  # bytes of one write
RUN = 64 << 20  # of one layer, as large ones have
AT_ONCE = 3  # layers being read
LARGEST = 512 << 20  # what is written, at most
SECONDS = 5.0  # and for how long
FREE_PART = 8  # of the free space no more than one part in so many is written
LITTLE = 1 << 30  # bytes; a checkpoint may not fit
IN_MEMORY = ("tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "9p")
Clock = Callable[[], float]


def devices() -> Iterator[Finding]:
    """Tell which backends can run here, and what memory their device has."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs is absent
        what = f"torch cannot be imported: {error}."
        yield Finding(SECTION, "torch", Level.PROBLEM, what, "pip install --force-reinstall torch")
        return
    from lema.backend import available, load

    threads = torch.get_num_threads()
    what = f"torch computes with {threads} threads in host memory."
    yield Finding(SECTION, "torch", Level.OK, what, facts={"threads": threads})
    with _alone():
        backends = available()
        for info in backends:
            facts: dict[str, Fact] = {"available": info.reason is None, "package": info.source}
            if info.reason is not None:
                yield Finding(
                    SECTION,
                    info.name,
                    Level.NOTE,
                    f"{info.name} cannot run here: {info.reason}.",
                    facts=facts,
                )
                continue
            with closing(load(info.name)) as backend:
                memory = backend.memory()
                slow = _slow_types(backend)
            where = "of host memory" if memory.shared else "on its device"
            what = f"{info.name} can run here, with {human_bytes(memory.total)} {where}."
            facts |= {"total_bytes": memory.total, "in_host_memory": memory.shared}
            facts |= {"slow_types": ", ".join(slow)}
            if not slow:
                yield Finding(SECTION, info.name, Level.OK, what, facts=facts)
                continue
            what += (
                f" Products in {' and '.join(slow)} are slow here, so models in these types "
                "compute in float32."
            )
            how = "nothing; compute_dtype in a config says otherwise"
            yield Finding(SECTION, info.name, Level.NOTE, what, how, facts=facts)
    if not any(info.ok for info in backends):
        what = "No device can compute: " + (
            "none of the backends runs here." if backends else "none is installed."
        )
        yield Finding(
            SECTION,
            "any",
            Level.PROBLEM,
            what,
            f"pip install --force-reinstall {DISTRIBUTION} brings one for the CPU",
        )


def _slow_types(backend: Backend) -> list[str]:
    """Return the types in half precision that a device is slow in."""
    import torch

    from lema.backend.registry import fast_dtype
    from lema.config.types import dtype_name

    return [
        dtype_name(dtype)
        for dtype in (torch.bfloat16, torch.float16)
        if fast_dtype(backend, dtype) != dtype
    ]


def links(clock: Clock = time.perf_counter) -> Iterator[Finding]:
    """Tell how fast each device that can run copies from host memory and to it, page-locked and
    pageable.
    """
    from lema.backend import BackendOptions, available, load
    from lema.errors import LemaError
    from lema.stream.speed import upload_speed

    with _alone():
        for name in (info.name for info in available() if info.ok):
            with closing(load(name)) as backend:
                memory = backend.memory()
            if memory.shared:
                what = f"{name} computes in host memory: nothing is copied."
                yield Finding(LINK, name, Level.OK, what, facts={"copied": False})
                continue
            nbytes = max(
                1, min(COPY, memory.total // PART, psutil.virtual_memory().available // PART)
            )
            for locked in (True, False):
                kind = "page-locked" if locked else "pageable"
                try:
                    with closing(load(name, BackendOptions(page_locked=locked))) as backend:
                        up = upload_speed(backend, nbytes, clock)
                        down = download_speed(backend, nbytes, clock)
                except (LemaError, RuntimeError, OSError) as error:
                    level = Level.PROBLEM
                    how = ""
                    if locked:
                        level = Level.WARNING
                        how = "raise the limit of locked memory: ulimit -l unlimited"
                    first_line = str(error).partition("\n")[0] or type(error).__name__
                    what = f"Copying {kind} memory to {name} failed: {first_line}."
                    yield Finding(LINK, f"{name} {kind}", level, what, how)
                    continue
                what = f"{kind.capitalize()} memory is copied to {name} at {human_bytes(up)}/s, "
                what += f"and back at {human_bytes(down)}/s."
                facts: dict[str, Fact] = {"copied": True, "copy_bytes": nbytes}
                facts |= {"upload_bytes_per_second": up, "download_bytes_per_second": down}
                yield Finding(LINK, f"{name} {kind}", Level.OK, what, facts=facts)


def download_speed(backend: Backend, nbytes: int, clock: Clock = time.perf_counter) -> float:
    """Return the bytes per second at which a slot of `nbytes` on the device is copied to a host
    buffer.
    """
    from lema.stream.speed import median_seconds

    buffer = backend.host_buffer(nbytes)
    slots = backend.device_slots(nbytes, 1)
    buffer.fill_(1)
    upload = slots.upload(buffer)
    source = upload.wait()

    def download() -> None:
        copy = backend.download(source, buffer)
        copy.release()
        copy.landed()

    seconds = median_seconds(download, backend, clock)
    upload.release()
    return nbytes / seconds


@contextmanager
def _alone() -> Iterator[None]:
    """Open backends as one process, also where `torchrun` started several: nothing here waits
    for the others.
    """
    number = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if number is not None:
            os.environ["WORLD_SIZE"] = number


def disk(
    directory: Path, *, measure: bool = True, clock: Clock = time.perf_counter
) -> Iterator[Finding]:
    """Tell what the disk that a directory is on has free and how fast it reads, and where the
    hub's cache is.
    """
    yield _space("space", directory, f"{directory.absolute()} has")
    try:
        yield _direct(directory)
        if measure:
            yield _speed(directory, clock)
    except OSError as error:
        what = f"{directory.absolute()} could not be written: {error.strerror or error}."
        how = "give a directory that can be written: lema doctor --directory DIR"
        yield Finding(DISK, "write", Level.WARNING, what, how)
    yield _hub()


def disk_speeds(
    directory: Path, nbytes: int, clock: Clock = time.perf_counter
) -> tuple[int, float, float]:
    """Write at most `nbytes` in some seconds, drop them from the page cache, and read them with
    training's reader. Returns the bytes written, and the bytes per second of writing and of
    reading; or OSError, or ReadError."""
    from lema.backend.hostmemory import anonymous
    from lema.stream.placement import ByteRun, LayerBytes
    from lema.stream.speed import read_speed

    with _nameless(directory) as (descriptor, path):
        began = clock()
        written = _write(descriptor, nbytes, lambda: clock() - began < SECONDS)
        os.fsync(descriptor)
        write = written / max(clock() - began, 1e-9)
        drop_cached(descriptor)
        runs = [
            ByteRun(path, start, min(RUN, written - start), 0) for start in range(0, written, RUN)
        ]
        buffers = [anonymous(RUN) for _ in range(AT_ONCE)]
        for buffer in buffers:
            # its pages are there before the clock runs, as in the second step of a run
            buffer.zero_()
        read = read_speed((LayerBytes((), (run,), (), run.nbytes) for run in runs), buffers, clock)
    return written, write, read


def _speed(directory: Path, clock: Clock) -> Finding:
    free = psutil.disk_usage(str(directory)).free
    nbytes = min(LARGEST, free // FREE_PART) // PAGE * PAGE
    if nbytes == 0:
        return Finding(
            DISK, "read", Level.WARNING, "The disk is too full to measure.", "free some space"
        )
    written, write, read = disk_speeds(directory, nbytes, clock)
    what = (
        f"Layers are read at {human_bytes(read)}/s from a disk that is written at "
        f"{human_bytes(write)}/s."
    )
    facts = {"file_bytes": written, "read_bytes_per_second": read, "write_bytes_per_second": write}
    return Finding(DISK, "read", Level.OK, what, facts=facts)


def _direct(directory: Path) -> Finding:
    with _nameless(directory) as (descriptor, path):
        os.write(descriptor, bytes(PAGE))
        works = hasattr(os, "O_DIRECT") and _reads_directly(path)
    if works:
        return Finding(
            DISK,
            "direct",
            Level.OK,
            "Reads bypass the page cache (O_DIRECT).",
            facts={"works": True},
        )
    what = (
        "Reads go through the page cache: this file system has no O_DIRECT. Each byte is "
        "copied once more."
    )
    how = "put the model on a local disk with ext4 or xfs" if hasattr(os, "O_DIRECT") else ""
    return Finding(DISK, "direct", Level.NOTE, what, how, facts={"works": False})


def _reads_directly(path: Path) -> bool:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:
            read_into(file.fileno(), [memoryview(mmap.mmap(-1, PAGE))], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _space(name: str, directory: Path, what: str) -> Finding:
    status = psutil.disk_usage(str(directory))
    kind = _file_system(directory)
    facts: dict[str, Fact] = {"directory": str(directory.absolute()), "file_system": kind}
    facts |= {"total_bytes": status.total, "free_bytes": status.free}
    where = (
        f"{what} {human_bytes(status.free)} of {human_bytes(status.total)} "
        f"free{f' ({kind})' if kind else ''}"
    )
    level = Level.OK
    note = ""
    how = ""
    if status.free < LITTLE:
        level = Level.WARNING
        note = ": little for checkpoints"
        how = "free some space"
    elif kind in IN_MEMORY:
        level = Level.NOTE
        note = ": memory, and no disk"
        how = "put the model on a disk"
    elif kind in REMOTE:
        level = Level.NOTE
        note = ": a disk of another machine"
        how = "put the model on a local disk"
    return Finding(DISK, name, level, f"{where}{note}.", how, facts=facts)


def _hub() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).expanduser().absolute()
    there = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    finding = _space("hub cache", there, f"The hub's cache {cache} has")
    facts = {
        **finding.facts,
        "directory": str(cache),
        "exists": cache.is_dir(),
        "writable": os.access(there, os.W_OK),
    }
    if not facts["writable"]:
        what = f"The hub's cache {cache} cannot be written."
        how = "set HF_HOME to a directory that can be"
        return Finding(DISK, "hub cache", Level.WARNING, what, how, facts=facts)
    return replace(finding, facts=facts)


@contextmanager
def _nameless(directory: Path) -> Iterator[tuple[int, Path]]:
    """Make a file that no kill leaves behind; yield its descriptor, and a path by which it can
    be opened again.
    """
    descriptor, name = tempfile.mkstemp(prefix=".lema-doctor-", dir=directory)
    try:
        by_number = DESCRIPTORS / str(descriptor)
        if by_number.exists():
            Path(name).unlink()
            yield descriptor, by_number
        else:  # not Linux
            yield descriptor, Path(name)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _write(descriptor: int, nbytes: int, more: Callable[[], bool]) -> int:
    """Write random bytes, no block like another, so that no disk packs them; return how many
    there was time for.
    """
    block = memoryview(os.urandom(min(CHUNK, nbytes)))
    written = 0
    while written < nbytes and (written == 0 or more()):
        start = written // CHUNK * 4099 % len(block)
        parts = [block[start:], block[:start]]
        count = min(len(block), nbytes - written)
        is_full_block = count == len(block) and hasattr(os, "writev")
        done = (
            os.writev(descriptor, parts)
            if is_full_block
            else os.write(descriptor, block[start:][:count] or block[:count])
        )
        if done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += done
    return written // PAGE * PAGE


def _file_system(directory: Path) -> str:
    """Return the kind of file system that a directory is on; empty: it cannot be told."""
    where = directory.resolve()
    mounted = [
        part for part in psutil.disk_partitions(all=True) if where.is_relative_to(part.mountpoint)
    ]
    mounted.reverse()  # of two mounted at one place the later one is seen
    nearest = max(mounted, key=lambda part: len(Path(part.mountpoint).parts), default=None)
    return "" if nearest is None else nearest.fstype
