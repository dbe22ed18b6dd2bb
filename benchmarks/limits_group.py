"""Memory cgroups, version 1 or 2, and a child process that lives in one from before its first
instruction.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
_numbers = count()


class NotFit(Exception):
    """The child was killed for lack of memory."""


class TooSlow(Exception):
    """The child did not answer in time."""


class Group:
    """A memory cgroup without swap; `limit` None: it only counts."""

    def __init__(self, directory: Path, version: int, limit: int | None) -> None:
        self.directory = directory
        self._version = version
        if version == 1:
            if limit is not None:
                self._write("memory.limit_in_bytes", limit)
                if (directory / "memory.memsw.limit_in_bytes").exists():
                    self._write("memory.memsw.limit_in_bytes", limit)
            self._write("memory.swappiness", 0)
        else:
            if limit is not None:
                self._write("memory.max", limit)
            if (directory / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)

    def join(self) -> None:
        """Move the calling process into the group."""
        self._write("cgroup.procs", os.getpid())

    def counters(self) -> dict[str, int]:
        """Return the most bytes ever charged, how often the limit was met and killed, and what is
        charged now by kind.

        Not every kernel counts how often a limit of version 1 was met: where `failures` stays 0,
        look at major faults.
        """
        if self._version == 1:
            met = [self.directory / f"memory.{kind}failcnt" for kind in ("", "memsw.")]
            found = {"peak": self._number("memory.max_usage_in_bytes")}
            found["failures"] = sum(int(file.read_text()) for file in met if file.exists())
            found["kills"] = self._fields("memory.oom_control")["oom_kill"]
            kinds = {"total_rss": "anonymous", "total_cache": "file"}
        else:
            events = self._fields("memory.events")
            found = {
                "peak": self._number("memory.peak"),
                "failures": events["max"],
                "kills": events["oom_kill"],
            }
            kinds = {"anon": "anonymous", "file": "file"}
        charged = self._fields("memory.stat")
        return {**found, **{f"charged_{ours}": charged[theirs] for theirs, ours in kinds.items()}}

    def remove(self) -> None:
        """Remove the group, from which every process is gone; the kernel may need a moment to
        see that.
        """
        for _ in range(50):
            with suppress(OSError):
                self.directory.rmdir()
                return
            time.sleep(0.1)
        self.directory.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.directory / name).write_text(str(value))

    def _number(self, name: str) -> int:
        return int((self.directory / name).read_text())

    def _fields(self, name: str) -> dict[str, int]:
        lines = (line.split() for line in (self.directory / name).read_text().splitlines())
        return {name: int(value) for name, value in lines}


@contextmanager
def memory_group(limit: int | None) -> Iterator[Group]:
    """Make a memory cgroup of `limit` bytes for the length of a `with` block.

    Raises:
        OSError: that is not allowed here.
    """
    version, parent = (1, V1) if V1.is_dir() else (2, V2)
    directory = parent / f"lema-benchmark-{os.getpid()}-{next(_numbers)}"
    directory.mkdir()
    try:
        group = Group(directory, version, limit)
    except OSError:
        directory.rmdir()
        raise
    try:
        yield group
    finally:
        group.remove()


class Child:
    """A process that does one step for each line it is sent and answers with a line of JSON."""

    def __init__(self, script: Path, arguments: Sequence[str], group: Group) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=group.join,
        )

    def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until the child has loaded its model.

        Raises:
            NotFit: it was killed first; TooSlow: that took more than `timeout` seconds.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise TooSlow(f"no answer in {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            if code == -9:
                raise NotFit("killed for lack of memory")
            self._errors.seek(0)
            raise SystemExit(f"the child ended with {code}\n{self._errors.read()[-3000:]}")
        row: dict[str, Any] = json.loads(line)
        return row

    def step(self, timeout: float) -> dict[str, Any]:
        """Have the child do one step and return what it measured; raises as `ready` does."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone: `ready` says why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return self.ready(timeout)

    def close(self) -> None:
        """End the child at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()


@contextmanager
def child(
    script: Path, arguments: Sequence[str], limit: int | None
) -> Iterator[tuple[Child, Group]]:
    """Start a child in a cgroup of its own; both end with the `with` block."""
    with memory_group(limit) as group:
        process = Child(script, arguments, group)
        try:
            yield process, group
        finally:
            process.close()
