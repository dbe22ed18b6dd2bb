"""Ctrl-C ends a command within two seconds, wherever it is.

Python raises `KeyboardInterrupt` in the main thread, between two of its instructions, and what is being written is then
put away. Within a library, or where an import swallows the exception, that may take long or never come. A command that
has not ended when the grace is over is ended as a kill would end it, which loses nothing that was saved.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lema.backend.signalwatch import SignalWatch

__all__ = ["INTERRUPTED", "ending_on_interrupt"]

INTERRUPTED = 130  # the exit code
GRACE = 1.5  # seconds from Ctrl-C
SHOW_CURSOR = b"\x1b[?25h\n"  # which a bar of progress hides


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """Let the process end at Ctrl-C, in a `with` block, and after it if it came there. A run that is stopped by signals
    sees them itself (`lema.train.stop`)."""
    end = threading.Timer(GRACE, _end)
    end.daemon = True
    came = threading.Event()

    def seen(number: int) -> None:
        if number == signal.SIGINT and not came.is_set():
            came.set()
            end.start()

    with SignalWatch(seen):
        yield


def _end() -> None:
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), SHOW_CURSOR)
    os._exit(INTERRUPTED)
