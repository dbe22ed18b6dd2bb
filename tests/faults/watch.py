"""Cases in forked processes that are watched: none may be killed, take ten seconds or a gibibyte,
or end with exit 1.

A child does one case after the other, and says which it is at; where it dies or hangs, the next
child goes on behind. It does some hundred cases, so that what one leaves in memory is not taken for
what another one takes.
"""

import contextlib
import io
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults import forked
from faults.forked import Child, Marks
from faults.outcome import Outcome
from faults.patience import TooLong, patience
from faults.tinymodel import TinyModel, tiny_model
from lema.cli import exitcodes
from lema.cli.app import app
from lema.cli.arguments import config_of

__all__ = ["Seen", "command", "drawn", "outcome", "refused", "watched"]

Kind = Callable[[TinyModel, Path, Random], str]
"""Makes a case below a directory, opens it, and returns what is wrong."""

SECONDS = 10.0  # of the processor, for a case
# bytes that a case may take: what a template may have, and what the process had besides
GROWTH = 1.25 * 2**30
DEADLY = 5 << 30  # bytes that a child may ask for beside what it has, so that the machine lives
STANDSTILL = 300.0  # seconds of a wall clock, on a machine that does much else
CODES = {0, 2, 3, 4, 5, 6, 75}
MAX_LINES = 20  # of a message
EACH = 250  # cases of a child
AT = 0
ENDED = 1
NUM_CODES = 128  # marks: the case that is done; how many commands ended with each exit code

_ended = list[int]()  # codes of the commands of a case


@dataclass(frozen=True)
class Seen:
    """What was seen of cases.

    Attributes:
        failures: what went wrong, a sentence for each case with which something did.
        codes: how many commands ended with each exit code.
        user: seconds of the processor, but for those of the system.
    """

    failures: tuple[str, ...]
    codes: Mapping[int, int]
    user: float


def watched(
    count: int,
    case: Callable[[int], str],
    place: Path,
    report: Callable[[str], None] | None,
    growth: float | None = GROWTH,
    seconds: float = SECONDS,
) -> Seen:
    """Do `count` cases, each by its number; return what was seen of them.

    Args:
        count: of cases.
        case: does one, and says what is wrong with how it ended; empty: nothing.
        place: for files of the children.
        report: is told of each failure, and every 100 cases.
        growth: bytes that a case may take; None: as many as it asks for, below what the child has.
        seconds: of the processor that a case may take.
    """
    marks = Marks(ENDED + NUM_CODES)
    failures = list[str]()
    start = 0
    before = _user()
    told = place / "failures"
    while start < count:
        marks[AT], stop = start, min(count, start + EACH)
        child = forked.fork(
            lambda: _children(marks, start, stop, case, told, growth, seconds),  # noqa: B023 - it is called at once
            place / "child.log",
        )
        hung = _followed(child, marks, count, report)
        ended = child.wait()
        found = (
            told.read_text(encoding="utf-8", errors="replace").splitlines() if told.exists() else []
        )
        told.unlink(missing_ok=True)
        if marks[AT] < stop:
            found.append(
                f"case {marks[AT]}: "
                f"{hung or f'the process ended with {ended.code}: {ended.said[-300:]}'}"
            )
        for failure in found:
            failures.append(failure)
            if report is not None:
                report(failure)
        start = min(marks[AT] + 1, stop)
    codes = {code: number for code in range(NUM_CODES) if (number := marks[ENDED + code])}
    return Seen(tuple(failures), codes, _user() - before)


def outcome(fault: str, required: str, count: int, seen: Seen, started: float) -> Outcome:
    """Return the row of the table for `count` cases that began at `started`."""
    passed = count - len(seen.failures)
    about = (fault, required, count, passed, seen.failures, time.perf_counter() - started)
    return Outcome(*about, user=seen.user, codes=seen.codes)


def drawn(
    fault: str,
    kinds: Mapping[str, Kind],
    count: int,
    seed: int,
    report: Callable[[str], None] | None,
    required: str,
) -> Outcome:
    """Open `count` cases, each drawn from the seed and its own number, of all kinds in turn."""
    started = time.perf_counter()
    made = tiny_model()
    named = list(kinds.items())

    def case(number: int) -> str:
        name, kind = named[number % len(named)]
        place = made.fresh()
        os.chdir(place)
        wrong = kind(made, place, Random(f"{seed}:{number}"))
        shutil.rmtree(place, ignore_errors=True)
        return wrong and f"{name}, seed {seed}: {wrong}"

    return outcome(fault, required, count, watched(count, case, made.place, report), started)


def _user() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def _children(
    marks: Marks,
    start: int,
    stop: int,
    case: Callable[[int], str],
    told: Path,
    growth: float | None,
    seconds: float,
) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + DEADLY, hard))
    for number in range(start, stop):
        marks[AT] = number
        _ended.clear()
        before = _memory("VmRSS")
        # the highest it had is what it has
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        try:
            with patience(seconds):
                wrong = case(number)
        except TooLong:
            wrong = f"took more than {seconds} s"
        for code in _ended:
            marks[ENDED + code % NUM_CODES] += 1
        if growth is not None and (grown := _memory("VmHWM") - before) > growth:
            wrong = f"{wrong} took {grown >> 20} MiB".strip()
        if wrong:
            with told.open("a", encoding="utf-8", errors="replace") as out:
                out.write(f"case {number}: {' / '.join(wrong.splitlines())}\n")
    marks[AT] = stop
    return 0


def _followed(child: Child, marks: Marks, count: int, report: Callable[[str], None] | None) -> str:
    """Wait for a child; return why it had to be killed, if it had to."""
    at = -1
    since = 0.0
    begun = 0.0
    said = 0
    while not child.ended():
        if marks[AT] != at:
            at = marks[AT]
            since = _seconds(child.pid)
            begun = time.monotonic()
        if report is not None and at - said >= 100:
            said = at
            report(f"{at:,} of {count:,}")
        if _seconds(child.pid) - since > 2 * SECONDS:  # in a library, where no signal is heard
            child.send(signal.SIGKILL)
            return f"took more than {2 * SECONDS} s of the processor in one call"
        if time.monotonic() - begun > STANDSTILL:
            child.send(signal.SIGKILL)
            return f"stood still for {STANDSTILL} s"
        time.sleep(0.02)
    return ""


def _seconds(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    with contextlib.suppress(OSError):
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _memory(name: str, pid: int | None = None) -> int:
    """Bytes of memory that a process has, or had at most."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii", errors="replace")
    found = [line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(found[0]) << 10 if found else 0


def command(
    *words: object, named: Sequence[str] = (), printed: Callable[[str], str] = lambda said: ""
) -> str:
    """Run a command of `lema`; say what is wrong with how it ended, where one of `named` must be in
    what is refused, and what `printed` says of all that was printed."""
    # As Python's own are: what is no character ends a command that prints it, and is escaped in an
    # error.
    out, err = (_Text(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exitcodes.run(app, [str(word) for word in words])
    _ended.append(code)
    return _judged(code, err.said(), named) or printed(out.said() + err.said())


class _Text(io.TextIOWrapper):
    """A stream that is kept in memory."""

    def said(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def refused(config: Path, settings: list[str]) -> bool:
    """Whether settings are refused for what they are, in words or not."""
    try:
        config_of(config, settings)
    except Exception:  # noqa: BLE001 - the command says how
        return True
    return False


def _judged(code: int, said: str, named: Sequence[str]) -> str:
    told = f"error: {said.partition('error: ')[2]}" if code and "error: " in said else said
    if code not in CODES or "LEMA does not know this error" in said or "Traceback" in said:
        return f"exit {code}: {told[:600]}"
    if code and named and not any(name in told for name in named):
        return f"names nothing, exit {code}: {told[:600]}"
    if told.rstrip("\n").count("\n") >= MAX_LINES or len(told) > 10_000:
        return f"a message of {len(told.splitlines())} lines, {len(told)} characters: {told[:600]}"
    return ""
