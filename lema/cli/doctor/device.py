"""The devices: which installed backends can run here, their memory, and how fast host memory is copied to them.

Everything is asked through the seam. What only one kind of device has (a driver, a software kit) is told by that
backend's own doctor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psutil

from lema.backend import Fact, Finding, Level
from lema.config.units import human_bytes

__all__ = ["devices", "links"]


SECTION, LINK = "devices", "link"
COPY = 256 << 20  # bytes of one copy
PART = 16  # of the device's memory, and of what is available in the host, no more than one part in so many
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
        found = available()
        for one in found:
            facts: dict[str, Fact] = {"available": one.reason is None, "package": one.source}
            if one.reason is not None:
                what = f"{one.name} cannot run here: {one.reason}."
                yield Finding(SECTION, one.name, Level.NOTE, what, facts=facts)
                continue
            with closing(load(one.name)) as backend:
                memory = backend.memory()
            where = "of host memory" if memory.shared else "on its device"
            what = f"{one.name} can run here, with {human_bytes(memory.total)} {where}."
            facts |= {"total_bytes": memory.total, "in_host_memory": memory.shared}
            yield Finding(SECTION, one.name, Level.OK, what, facts=facts)
    if not any(one.ok for one in found):
        what = "No device can be computed on: " + ("none of the backends runs here." if found else "none is installed.")
        yield Finding(SECTION, "any", Level.PROBLEM, what, "pip install --force-reinstall lema brings one for the CPU")


def links(clock: Clock = time.perf_counter) -> Iterator[Finding]:
    """Tell how fast each device that can run copies from host memory and to it, page-locked and pageable."""
    from lema.backend import BackendOptions, available, load
    from lema.errors import LemaError
    from lema.stream.speed import download_speed, upload_speed

    with _alone():
        for name in (one.name for one in available() if one.ok):
            with closing(load(name)) as backend:
                memory = backend.memory()
            if memory.shared:
                what = f"{name} computes in host memory: nothing is copied."
                yield Finding(LINK, name, Level.OK, what, facts={"copied": False})
                continue
            nbytes = max(1, min(COPY, memory.total // PART, psutil.virtual_memory().available // PART))
            for locked in (True, False):
                kind = "page-locked" if locked else "pageable"
                try:
                    with closing(load(name, BackendOptions(page_locked=locked))) as backend:
                        up, down = upload_speed(backend, nbytes, clock), download_speed(backend, nbytes, clock)
                except (LemaError, RuntimeError, OSError) as error:
                    level, how = Level.PROBLEM, ""
                    if locked:
                        level, how = Level.WARNING, "raise the limit of locked memory: ulimit -l unlimited"
                    first_line = str(error).partition("\n")[0] or type(error).__name__
                    what = f"Copying {kind} memory to {name} failed: {first_line}."
                    yield Finding(LINK, f"{name} {kind}", level, what, how)
                    continue
                what = f"{kind.capitalize()} memory is copied to {name} at {human_bytes(up)}/s, "
                what += f"and back at {human_bytes(down)}/s."
                facts: dict[str, Fact] = {"copied": True, "copy_bytes": nbytes}
                facts |= {"upload_bytes_per_second": up, "download_bytes_per_second": down}
                yield Finding(LINK, f"{name} {kind}", Level.OK, what, facts=facts)


@contextmanager
def _alone() -> Iterator[None]:
    """Open backends as one process, also where `torchrun` started several: nothing here waits for the others."""
    number = os.environ.pop("WORLD_SIZE", None)
    try:
        yield
    finally:
        if number is not None:
            os.environ["WORLD_SIZE"] = number
