"""A chat template is a program from outside: it runs in a sandbox, and here it is given a bounded time.

`transformers` renders in jinja's sandbox, which keeps a template from files, modules and attributes that lead to them,
and bounds `range`. It does not bound loops within loops, nor powers: https://jinja.palletsprojects.com/en/stable/sandbox
says that the caller must. What a product of texts takes in memory is not bounded here either.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import jinja2

__all__ = ["MAX_SECONDS", "check_template", "limited"]

MAX_SECONDS = 3.0  # for one chat; a long one takes thousandths
MAX_NUMBER = 1_000_000  # to be multiplied by, or padded to


@lru_cache(maxsize=16)
def check_template(template: str) -> str:
    """Say what in a template is never needed to write a chat, and could take all time or memory; empty: nothing.

    Only the words of the template are looked at: constants are computed as soon as it is compiled.
    """
    try:
        for line, kind, word in jinja2.Environment(autoescape=True).lex(template):
            if kind == "operator" and word == "**":
                return f"line {line} of the chat template raises a number to a power"
            if kind in ("integer", "float") and float(word.replace("_", "")) > MAX_NUMBER:
                return f"line {line} of the chat template has the number {word[:20]}"
    except (jinja2.TemplateError, ValueError):
        return ""  # it will not compile either, and that is said by whoever compiles it
    return ""


@contextmanager
def limited() -> Iterator[None]:
    """Let what is inside compute for `MAX_SECONDS` of the processor's time.

    Raises:
        TemplateError: inside, when it goes on for longer.
    """
    alone = threading.current_thread() is threading.main_thread()
    with _by_timer(MAX_SECONDS) if alone else _by_trace(MAX_SECONDS):
        yield


def _too_long(seconds: float) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"it takes more than {seconds:g} seconds")


@contextmanager
def _by_timer(seconds: float) -> Iterator[None]:
    """The timer of the time spent in user mode, which hardly anything else uses; it costs nothing while it runs."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _too_long(seconds)

    handler = signal.signal(signal.SIGVTALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, remaining, interval)
        signal.signal(signal.SIGVTALRM, handler)


@contextmanager
def _by_trace(seconds: float) -> Iterator[None]:
    """Signals reach the main thread alone. In another one the clock is looked at before each line of the template."""
    end = time.thread_time() + seconds

    def line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.thread_time() > end:
            raise _too_long(seconds)
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
