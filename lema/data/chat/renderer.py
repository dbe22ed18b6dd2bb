"""The program of the process that renders chat templates; `lema.data.chat.process` starts it, and
may end it.

It imports jinja2 and nothing of LEMA or `transformers`, so that it starts in a tenth of a second.
The environment of a template is that of `transformers`: the source of its two functions comes with
the first message, and is run here. Messages are marshalled by the parent. Answers are lines of
JSON, because a template from outside has run here, and who reads them must be able to take them for
mere data.

A timer with the system's own action bounds the time of a row: it ends the process also within one
call of C, where Python runs no handler. A bound of the address space turns what a template
allocates beyond it into a `MemoryError`. Where the system has no such timer or bound, the parent
looks (`lema.data.chat.budget`).
"""

import contextlib
import contextvars
import datetime
import functools
import json
import marshal
import os
import signal
import struct
import sys
import threading
import time
import typing
from collections.abc import Callable
from typing import Any, BinaryIO

MOST_TEXT = 64 << 20  # characters that a template may write
GRACE = 1.0  # seconds that the parent has to end this process in
MAX_ERROR_CHARS = 10_000  # characters of an error
SLOW = 0.2  # seconds of the processor in which a row that is not rendered ends its batch


class Clock(datetime.datetime):
    """The clock of templates, which shows what the parent said with the row."""

    shown: "Clock"

    @classmethod
    def show(cls, shown: "Clock") -> None:
        """Show this time from now on."""
        cls.shown = shown

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Clock":
        """Return the time that is shown."""
        return cls.shown.replace(tzinfo=tz)


def functions_of(
    sources: list[str],
) -> tuple[Callable[[str], Any], Callable[..., tuple[str, list[tuple[int, int]]]]]:
    """Return what compiles a template and what renders a compiled one, from the source of
    `transformers`.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from packaging import version

    names: dict[str, Any] = {
        "jinja2": jinja2,
        "Extension": jinja2.ext.Extension,
        "ImmutableSandboxedEnvironment": jinja2.sandbox.ImmutableSandboxedEnvironment,
        "ContextVar": contextvars.ContextVar,
        "contextmanager": contextlib.contextmanager,
        "datetime": Clock,
        "is_jinja_available": lambda: True,
        "json": json,
        "no_type_check": typing.no_type_check,
        "version": version,
    }
    for source in sources:
        exec(source, names)
    return functools.lru_cache(maxsize=16)(names["_cached_compile_jinja_template"]), names[
        "_render_with_assistant_indices"
    ]


def answered(work: Callable[[], tuple[str, Any]]) -> tuple[bytes, bool]:
    """Return the answer to a row: its text and the places of the assistant's words in it, or the
    error; and whether it is the last of its batch. A row that fails slowly is, because the others
    would fail as slowly, and the parent tells the first."""
    begin = time.process_time()
    try:
        text, spans = work()
        if len(text) <= MOST_TEXT:
            return _line({"text": text, "places": spans}), False
        answer = {
            "error": "OverflowError",
            "message": f"it writes more than {MOST_TEXT:,} characters",
        }
    except Exception as error:  # noqa: BLE001 - a template may raise anything, and the parent tells it
        answer = {"error": type(error).__name__, "message": str(error)[:MAX_ERROR_CHARS]}
    last = time.process_time() - begin > SLOW
    return _line({**answer, "last": last}), last


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def bound_memory(nbytes: int) -> None:
    """Let the process have so many bytes more of address space than it has, where the system tells
    how many these are (Linux)."""
    try:
        with open("/proc/self/statm", "rb") as counts:  # noqa: PTH123 - pathlib takes a tenth of the start
            pages = int(counts.read().split()[0])
    except FileNotFoundError:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def received(requests: BinaryIO) -> Any:
    """Return the parent's next message; None: it has gone."""
    head = requests.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    content = requests.read(size)
    return marshal.loads(content) if len(content) == size else None


class Deadline:
    """The time of the processor at which this process ends, where no timer ends it and its parent,
    which would, is gone; a thread looks at it."""

    def __init__(self) -> None:
        self.at = float("inf")

    def set_in(self, seconds: float) -> None:
        """Let it be so many seconds of the processor from now."""
        self.at = time.process_time() + seconds

    def put_off(self) -> None:
        """Let there be none."""
        self.at = float("inf")

    def watch(self) -> None:
        """End the process when the time has come."""
        while time.process_time() < self.at:
            time.sleep(0.1)
        os._exit(1)


def main() -> None:
    """Render batches of rows until the parent closes the pipe."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK"):
        # a terminal or a scheduler sends them to all; the parent ends this one
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    timed = hasattr(signal, "setitimer")
    deadline = Deadline()  # on Windows the parent looks at the time
    # and what the parent does with the timer's signal, or with all, is not for this process
    if timed:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    else:
        threading.Thread(target=deadline.watch, daemon=True).start()
    requests = sys.stdin.buffer
    out = sys.stdout.fileno()
    compiled, render = functions_of(received(requests))
    while (batch := received(requests)) is not None:
        seconds, nbytes, templates, rows = batch
        bound_memory(nbytes)
        for number, shown, packed in rows:
            deadline.set_in(seconds + GRACE)
            if timed:
                signal.setitimer(signal.ITIMER_PROF, seconds)
            Clock.show(Clock(*shown))
            answer, last = answered(
                lambda: render(compiled(templates[number]), **marshal.loads(packed))  # noqa: B023 - called at once
            )
            if timed:
                signal.setitimer(signal.ITIMER_PROF, 0)
            deadline.put_off()
            view = memoryview(answer)
            while view:
                view = view[os.write(out, view) :]
            if last:
                break


if __name__ == "__main__":
    sys.path += sys.argv[1:]  # the folders of jinja2 and what it needs; no other is looked through
    with contextlib.suppress(BrokenPipeError):
        main()
