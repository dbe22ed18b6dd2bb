"""What a run leaves in its `output_dir`, read while it runs or afterwards: measurements, plan,
checkpoints, its state.

Nothing here imports torch, so that a look takes no seconds. Everything is read again or where it
has grown; nothing is written, and no lock is taken.
"""

import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from lema.errors import ConfigError, DataError, printable, unreadable
from lema.storage.regular import open_regular, read_regular
from lema_tools.planfile import MOST, check_plan

__all__ = ["TIMES", "Memory", "MetricsTail", "Run", "amount", "by_step", "read_json", "read_run"]

METRICS = "metrics.jsonl"
PLAN = "plan.json"
LOCK = ".lock"
NON_FINITE = ("NaN", "Infinity", "-Infinity")  # what JSON has no numbers for
LARGEST = 1e100  # numbers beyond are drawn as infinity is
MOST_METRICS = 2**31  # bytes of them
RECENT = 10  # lines of metrics that speed and time left are told by

# Where the seconds of a step go, by the names of metrics.jsonl. The rest is computing, with
# whatever is not measured.
TIMES = {
    "computing": None,
    "waiting for the disk": "seconds_blocked_disk",
    "waiting for the link": "seconds_blocked_upload",
    "waiting for other processes": "seconds_blocked_gather",
    "expanding quantised weights": "seconds_expanding",
    "optimizer": "seconds_optimizer",
}


@dataclass(frozen=True)
class Memory:
    """What the plan spends one memory on, in bytes, and what was measured there."""

    name: str  # "device memory", "host memory", or "memory" where the device computes in the host's
    parts: Mapping[str, int]  # by the names of `MEMORY_PARTS`
    limit: int  # that the settings allow, or that there is; 0: nobody knows
    measured: int | None  # the most of all lines of metrics; None: it is not measured

    @property
    def planned(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Run:
    """What is known of a run at one moment."""

    directory: Path
    rows: Sequence[Mapping[str, Any]]  # the lines of metrics
    about: Mapping[str, Any]  # plan.json; empty: the run has none
    checkpoints: Sequence[Path]  # whole ones, in the order in which they were written
    holder: str  # the process that writes there now; empty: none does

    @cached_property
    def trained(self) -> list[Mapping[str, Any]]:
        """The lines of metrics of training steps."""
        return [row for row in self.rows if "loss" in row and "step" in row]

    @cached_property
    def evaluated(self) -> list[Mapping[str, Any]]:
        """The lines of metrics of evaluations."""
        return [row for row in self.rows if "eval_loss" in row and "step" in row]

    @property
    def step(self) -> int:
        """Optimizer steps of the whole run that were logged."""
        return max((int(row["step"]) for row in self.rows if "step" in row), default=0)

    @cached_property
    def steps(self) -> int | None:
        """How many steps the run has; None: nothing says so."""
        if (num_steps := self.about.get("steps")) is not None:
            return int(num_steps)
        for checkpoint in reversed(self.checkpoints):
            if (
                num_steps := amount(read_json(checkpoint / "trainer_state.json"), "max_steps")
            ) is not None:
                return int(num_steps)
        return None

    @property
    def summary(self) -> Mapping[str, Any]:
        """The last line of a plain run that has ended; else nothing."""
        return next((row for row in reversed(self.rows) if "train_loss" in row), {})

    @property
    def ended(self) -> bool:
        """Whether the run has taken its last step."""
        if self.phases:
            done = self.steps is not None and self.step >= self.steps
            return done and any(row.get("event") == "phase_end" for row in self.rows[-1:])
        return bool(self.summary)

    @cached_property
    def signs(self) -> list[Mapping[str, Any]]:
        """The lines of metrics that say that the run may learn nothing."""
        return [row for row in self.rows if row.get("event") == "dead"]

    @cached_property
    def dead_steps(self) -> int:
        """In how many steps, up to the last, there was a sign that nothing is learnt."""
        last = (row for row in reversed(self.rows) if "loss" in row or row.get("stopped") is True)
        return int(amount(next(last, dict[str, Any]()), "dead_steps") or 0)

    @property
    def state(self) -> str:
        """Say in a word what the run does: `running`, `ended` or `stopped`."""
        return "running" if self.holder else "ended" if self.ended else "stopped"

    @cached_property
    def phases(self) -> list[tuple[str, int]]:
        """The phases that have begun, each with the step after which it did; none of a plain
        run.
        """
        first: dict[str, int] = {}
        for row in self.rows:
            if "phase" in row:
                first.setdefault(str(row["phase"]), int(row["step"]))
        return [(name, step - step * (at == 0)) for at, (name, step) in enumerate(first.items())]

    @cached_property
    def seconds(self) -> list[tuple[int, int, dict[str, float]]]:
        """Of each line of metrics that has seconds: its step, how many steps it is of, and where
        they went.
        """
        step_seconds = []
        before = 0
        for row in self.trained:
            count = max(1, int(row["step"]) - before)
            before = int(row["step"])
            if (total := amount(row, "seconds_passed")) is not None:
                parts = {
                    name: amount(row, key) or 0.0 for name, key in TIMES.items() if key is not None
                }
                step_seconds.append(
                    (before, count, {"computing": max(0.0, total - sum(parts.values())), **parts})
                )
        return step_seconds

    @property
    def seconds_per_step(self) -> float | None:
        """The mean of the latest lines; None: they have no seconds."""
        recent = self.seconds[-RECENT:]
        return (
            sum(sum(parts.values()) for _, _, parts in recent) / sum(n for _, n, _ in recent)
            if recent
            else None
        )

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the latest steps; None: speed or length of the run is not known, or
        it does not run.
        """
        if (
            self.state != "running"
            or self.steps is None
            or (per_step := self.seconds_per_step) is None
        ):
            return None
        return per_step * max(0, self.steps - self.step)

    @property
    def memories(self) -> list[Memory]:
        """What the plan spends memory on, of phases the one that runs or ran last, against what
        was measured.
        """
        plan = self.about.get("plan") or {}
        limits = ("device_memory", "host_memory")
        shared = bool(plan.get("shared"))
        rows = self.trained
        if phases := plan.get("phases"):
            name = self.phases[-1][0] if self.phases else phases[0]["name"]
            phase = next(
                (candidate for candidate in phases if candidate["name"] == name), phases[0]
            )
            parts = phase["memory"]["parts"]
            limit_values = [plan.get(key) for key in limits]
            rows = [row for row in rows if row.get("phase") == name]
        elif parts := plan.get("memory") or {}:
            limit_values = [parts.get("device_limit"), parts.get("host_limit")]
        else:
            return []
        device = parts["device"]
        host = parts["host"]
        most, there = (int(limit or 0) for limit in limit_values)
        measured = max(
            (
                int(memory_used)
                for row in rows
                if (memory_used := amount(row, "memory")) is not None
            ),
            default=None,
        )
        if not shared:
            host_memory = (
                [Memory("host memory", _present(host), there, None)] if any(host.values()) else []
            )
            return [Memory("device memory", _present(device), most, measured), *host_memory]
        # The ring's buffers are the slots; names that both have are added up.
        totals = {name: device.get(name, 0) + host.get(name, 0) for name in (*device, *host)}
        totals["ring"] = max(0, host.get("ring", 0) - device.get("slots", 0))
        return [
            Memory(
                "memory",
                _present({"used": int(self.about.get("used") or 0), **totals}),
                there,
                measured,
            )
        ]

    @property
    def certificates(self) -> list[Path]:
        """The files of `lema prove`, JSON before Markdown of the same name."""
        return sorted(
            {*self.directory.glob("certificate*.json"), *self.directory.glob("certificate*.md")}
        )


def by_step(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return the numbers of that name with their steps, in order; what is no number is left out,
    and one that nobody could draw is infinite."""
    numbers = ((int(row["step"]), _number(row, key)) for row in rows if "step" in row)
    return [(step, value) for step, value in numbers if value is not None]


class MetricsTail:
    """Reads metrics.jsonl where it has grown since the last look, and again where it was cut
    back or replaced.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin()

    def _begin(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._read = 0
        self._last = b""
        self._inode = -1

    def rows(self) -> list[dict[str, Any]]:
        """Return all whole lines that are there now; `DataError` where one is no JSON object,
        `ConfigError` where there is no file."""
        try:
            with open_regular(self._file, inside=True) as stream:
                inode = os.fstat(stream.fileno()).st_ino
                stream.seek(max(0, self._read - len(self._last)))
                if inode != self._inode or stream.read(len(self._last)) != self._last:
                    self._begin()
                    self._inode = inode
                    stream.seek(0)
                self._take(_bounded(stream, self._file))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _no_run(self._file.parent) from error
        except OSError as error:
            what = f"cannot read the metrics: {error.strerror}"
            raise unreadable(self._file, error, DataError, what) from error
        return list(self._rows)

    def _take(self, data: bytes) -> None:
        # what follows is a line that is being written, or was when it was killed
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete.splitlines(keepends=True):
            self._rows.append(_row(line, f"{self._file}:{len(self._rows) + 1}"))
            self._read = self._read + len(line)
            self._last = line


def _bounded(stream: BinaryIO, file: Path) -> bytes:
    data = stream.read(MOST_METRICS + 1)
    if len(data) > MOST_METRICS:
        what = f"{file.name} has more than {MOST_METRICS:,} bytes of metrics"
        raise DataError(what, where=str(file), how="use the file that the run wrote")
    return data


def _row(line: bytes, where: str) -> dict[str, Any]:
    """Read a line of metrics, of which the numbers of steps and the names of phases are sound.
    `DataError`: it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where) from error
    if not isinstance(row, dict):
        raise DataError("a line of metrics is a JSON object", where=where)
    for key in ("step", "stage", "step_in_phase"):
        if key in row and amount(row, key) != (step_number := row[key]):
            raise DataError(
                f"{key} should be a number of steps, not {step_number!r}"[:200], where=where
            )
    if "phase" in row and not ("step" in row and isinstance(row["phase"], str)):
        raise DataError("a phase has a name, and its line a step", where=where)
    return {
        printable(key): float(value) if value in NON_FINITE else _shown(value)
        for key, value in row.items()
    }


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def read_run(directory: Path, tail: MetricsTail | None = None) -> Run:
    """Read a run's directory, its metrics through a `tail` that knows their beginning.
    `ConfigError`: no run is there; `DataError`: its metrics are no JSON."""
    rows = (tail or MetricsTail(directory / METRICS)).rows()
    return Run(
        directory,
        rows,
        check_plan(read_json(directory / PLAN), directory / PLAN),
        list(_checkpoints(directory)),
        _holder(directory),
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; nothing where there is none, or something else is in it."""
    # files beside the metrics are told of as far as they are there
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular(file, inside=True).decode("utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _no_run(directory: Path) -> ConfigError:
    how = "use the output_dir of a run, where `lema train` writes metrics.jsonl"
    if not directory.exists():
        return ConfigError("there is no such directory", where=str(directory), how=how)
    if not directory.is_dir():
        return ConfigError(
            "this is a file, not the directory of a run", where=str(directory), how=how
        )
    above = next(
        (parent for parent in directory.absolute().parents[:2] if (parent / METRICS).is_file()),
        None,
    )
    if above is not None:
        how = f"this belongs to the run in {above}"
    return ConfigError(
        f"this directory has no run: {METRICS} is missing", where=str(directory), how=how
    )


def _checkpoints(directory: Path) -> Iterator[Path]:
    manifests = [
        *directory.glob("checkpoint-*/manifest.json"),
        *directory.glob("*/checkpoint-*/manifest.json"),
    ]
    dated = []
    for manifest in manifests:
        if re.fullmatch(r"checkpoint-\d+", manifest.parent.name):
            with suppress(FileNotFoundError):  # the run deletes old ones meanwhile
                dated.append((manifest.stat().st_mtime, manifest.parent))
    yield from (path for _, path in sorted(dated))


def _holder(directory: Path) -> str:
    """Return which process holds the directory's lock; a lock's file whose process is gone holds
    nothing.
    """
    import psutil  # here, because the command lists its verbs without it

    file = directory / LOCK
    with suppress(OSError, psutil.Error):  # it goes when the run does
        pid, _, host = (
            read_regular(file, inside=True).decode(errors="replace").strip().partition(" ")
        )
        if host != socket.gethostname():  # nobody here can tell whether that process lives
            return printable(f"process {pid} on {host}"[:80]) if pid and host else ""
        if pid.isdigit() and psutil.Process(int(pid)).create_time() <= file.stat().st_mtime + 1:
            return f"process {pid}"
    return ""


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return (
        float(value) if abs(value) < LARGEST or value != value else math.copysign(math.inf, value)
    )


def amount(row: Mapping[str, Any], key: str) -> float | None:
    """Return a number of that name that counts something, or measures seconds or bytes; None:
    there is none.
    """
    value = _number(row, key)
    return value if value is not None and 0 <= value < MOST else None


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    return {printable(name): size for name, size in parts.items() if size}
