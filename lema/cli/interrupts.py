"""Ctrl-C ends a command within two seconds, wherever it is.

Python raises `KeyboardInterrupt` in the main thread, between two of its instructions, and what is
being written is then put away. Within a library, or where an import swallows the exception, that
may take long or never come. A command that has not ended when the grace is over is ended as a kill
would end it, which loses nothing that was saved. What comes again within the grace raises nothing
in what is being put away.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lema.backend.signalwatch import SignalWatch

__all__ = ["INTERRUPTED", "ending_on_interrupt"]

INTERRUPTED = 130  # the exit code
GRACE = 1.5  # seconds from Ctrl-C
SHOW_CURSOR = b"\x1b[?25h\n"  # which a bar of progress hides


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """Let the process end at Ctrl-C within a `with` block, which ends in `SystemExit`. A run that
    is stopped by signals sees them itself (`lema.train.stop`)."""
    end = threading.Timer(GRACE, _end)
    end.daemon = True
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    raised = list[int]()

    def raise_once(number: int, _: FrameType | None) -> None:
        raised.append(number)
        if len(raised) == 1:
            raise KeyboardInterrupt

    def seen(number: int) -> None:
        if number == signal.SIGINT and not came.is_set():
            came.set()
            end.start()

    previous_hook = sys.unraisablehook

    def ignore_interrupts(what: "sys.UnraisableHookArgs") -> None:
        if what.exc_type is not KeyboardInterrupt:  # which came where an object was put away
            previous_hook(what)

    sys.unraisablehook = ignore_interrupts
    if before != signal.SIG_IGN:  # as in the background of a shell's script
        signal.signal(signal.SIGINT, raise_once)
    try:
        with SignalWatch(seen):
            yield
    except KeyboardInterrupt:  # no command has begun
        os._exit(INTERRUPTED)
    except SystemExit as ended:
        # what was printed has been flushed, and what was imported takes seconds to be put away
        if came.is_set():
            os._exit(ended.code if isinstance(ended.code, int) else INTERRUPTED)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = previous_hook


def _end() -> None:
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)
    os._exit(INTERRUPTED)
