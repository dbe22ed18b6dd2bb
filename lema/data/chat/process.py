"""The process in which chat templates are compiled and rendered, so that nothing they do outlives
its limits.

A template is a program from outside. jinja's sandbox keeps it from files and modules, but one
expression may compute for hours within a call of C, where no handler of Python runs. Only a process
can be ended then. It is started for the first row that is rendered, without what this process has
imported (`lema.data.chat.renderer`), and ends with this one. Rows go to it in batches. What it
answers is read as data and checked.
"""

from __future__ import annotations

import atexit
import inspect
import json
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import packaging

from lema.compat import template_functions
from lema.data.chat.budget import MEMORY, TIME, Budget, bounds_itself

__all__ = ["Limits", "Refusal", "Rendition", "Request", "rendered"]

PROGRAM = Path(__file__).with_name("renderer.py")
# of the environment; none of it is a secret
INHERITED = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LC_TIME",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TZ",
)
LONGEST_LINE = 512 << 20  # bytes of an answer

Clock = tuple[int, int, int, int, int, int, int]
"""Year, month, day, hour, minute, second and microsecond."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What rendering one row may take."""

    seconds: float  # of the processor's time
    nbytes: int  # of memory, beyond that of the process


@dataclass(frozen=True, slots=True)
class Request:
    """A chat to be rendered, as `transformers` hands it to a compiled template.

    Attributes:
        template: the text of the template.
        clock: the time that the template is told.
        values: what the template gets by name, marshalled.
    """

    template: str
    clock: Clock
    values: bytes


@dataclass(frozen=True, slots=True)
class Rendition:
    """A rendered chat, and the first and last characters of what the template marks as the
    assistant's in it.
    """

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a chat was not rendered.

    Attributes:
        why: in a sentence.
        ended: whether a limit ended the process, as it would with another form of this chat.
        last: whether it took so long that no more of its batch were tried.
    """

    why: str
    ended: bool = False
    last: bool = False


def rendered(requests: Sequence[Request], limits: Limits) -> list[Rendition | Refusal]:
    """Render chats one after the other. A chat that ends the process, or that fails slowly, is the
    last of what is returned, so that there may be fewer than were asked for."""
    renderer = _renderer()
    with renderer.lock:
        try:
            outcomes = renderer.begun().exchange(requests, limits)
        except BaseException:
            renderer.end()  # because answers to this batch would be taken for those to the next
            raise
        if isinstance(last := outcomes[-1], Refusal) and last.ended:
            renderer.end()
        return outcomes


@dataclass
class _Renderer:
    """The process that renders for this one. A process that was forked has none of its own at
    first.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    process: _Process | None = None

    def begun(self) -> _Process:
        """Return the process, which is started if there is none."""
        if self.process is None:
            self.process = _Process()
        return self.process

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


_RENDERERS: dict[int, _Renderer] = {}  # by the number of this process
# what a parent waits for; kept, because of one that goes unwaited for a warning is given
_PARENTS: list[_Process] = []


def _renderer() -> _Renderer:
    """Return what this process has, and close what was its parent's before it was forked."""
    if (renderer := _RENDERERS.get(os.getpid())) is None:
        renderer = _RENDERERS.setdefault(os.getpid(), _Renderer())
        atexit.register(_end_renderer)
        for number in [number for number in _RENDERERS if number != os.getpid()]:
            if (process := _RENDERERS.pop(number).process) is not None:
                process.close()
                _PARENTS.append(process)
    return renderer


def _end_renderer() -> None:
    if (renderer := _RENDERERS.get(os.getpid())) is not None:
        renderer.end()


class _Process:
    """A started process and the pipes to it and from it."""

    def __init__(self) -> None:
        self._code: int | None = None
        self._ended = False
        folders = {
            str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe, packaging)
        }
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        pipe = subprocess.PIPE
        command = [sys.executable, "-I", "-S", str(PROGRAM), *sorted(folders)]
        self._started = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )
        self.pid = self._started.pid
        assert self._started.stdin is not None and self._started.stdout is not None
        self.requests = self._started.stdin
        self.answers = self._started.stdout
        self._send([inspect.getsource(function) for function in template_functions()])

    def exchange(self, requests: Sequence[Request], limits: Limits) -> list[Rendition | Refusal]:
        """Send a batch and return the outcomes, as `rendered` does."""
        templates = list(dict.fromkeys(request.template for request in requests))
        rows = [
            (templates.index(request.template), request.clock, request.values)
            for request in requests
        ]
        self._send((limits.seconds, limits.nbytes, templates, rows))
        outcomes = list[Rendition | Refusal]()
        with Budget(
            self._started, limits.seconds, limits.nbytes, watching=not bounds_itself()
        ) as budget:
            for line in self._lines(len(requests)):
                budget.begin()
                if line is None:
                    outcome: Rendition | Refusal = Refusal(
                        _why(self.end(), limits, budget.exceeded), ended=True
                    )
                else:
                    outcome = _outcome(line, limits)
                outcomes.append(outcome)
                if isinstance(outcome, Refusal) and (outcome.ended or outcome.last):
                    break
        return outcomes

    def _lines(self, count: int) -> Iterator[bytes | None]:
        """Yield so many answers; None: there are no more, or one is longer than any may be."""
        parts = list[bytes]()
        size = 0
        while count:
            parts.append(content := self.answers.read(1 << 16))
            size += len(content)
            if not content or size > LONGEST_LINE:
                yield None
                return
            if b"\n" in content:
                *lines, remainder = b"".join(parts).split(b"\n")
                parts = [remainder]
                size = len(remainder)
                count = count - len(lines)
                yield from lines

    def end(self) -> int | None:
        """End the process at once and return its exit code, negative where a signal ended it;
        None: it is not known.
        """
        if not self._ended:
            self._ended = True
            self.close()
            self._started.kill()
            self._code = self._started.wait()
        return self._code

    def close(self) -> None:
        """Close the pipes; the process ends when nobody has them open."""
        self.requests.close()
        self.answers.close()

    def _send(self, message: Any) -> None:
        content = marshal.dumps(message)
        view = memoryview(struct.pack("<Q", len(content)) + content)
        try:
            while view:
                view = view[self.requests.write(view) :]
        except BrokenPipeError:
            return  # it has ended, which reading its answers tells


def _why(code: int | None, limits: Limits, exceeded: str) -> str:
    if exceeded == MEMORY:
        return f"it allocates more than {limits.nbytes >> 20} MiB"
    if exceeded == TIME or (hasattr(signal, "SIGPROF") and code == -signal.SIGPROF):
        return f"it takes more than {limits.seconds:g} seconds"
    return "it ends the process in which it is rendered" + (
        "" if code is None else f" (exit code {code})"
    )


def _outcome(line: bytes, limits: Limits) -> Rendition | Refusal:
    """Return what an answer says, and a refusal where it is no answer."""
    try:
        answer = json.loads(line.decode("utf-8", "surrogatepass"))
        if "error" in answer:
            if answer["error"] == "MemoryError":
                return Refusal(f"it allocates more than {limits.nbytes >> 20} MiB", ended=True)
            return Refusal(
                str(answer["message"]) or str(answer["error"]), last=answer["last"] is True
            )
        text = answer["text"]
        spans = [(int(start), int(end)) for start, end in answer["places"]]
        if isinstance(text, str) and all(0 <= start <= end <= len(text) for start, end in spans):
            return Rendition(text, spans)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return Refusal("the process in which it is rendered answers something else", ended=True)
