"""Sees signals as they arrive, also while the main thread is within a library, where Python runs no
handler.

Python runs handlers in the main thread alone, between two of its instructions. A product of large
matrices, a tokenizer or the import of a library may take longer than whoever pressed Ctrl-C waits.
The C part of Python writes each signal that has a handler to a descriptor at once
(`signal.set_wakeup_fd`), and a thread reads it here.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import cache
from typing import Self

__all__ = ["SignalWatch"]


class SignalWatch:
    """Calls `seen` with the number of each signal, in a thread of its own, for the length of a
    `with` block. Only a signal that Python has a handler for is seen. Outside of the main thread
    the block does nothing."""

    def __init__(self, seen: Callable[[int], None]) -> None:
        self._seen = seen
        self._thread: threading.Thread | None = None
        self._before = -1
        self._out: socket.socket | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            _disable_after_fork()
            # because not every system has pipes that never wait
            numbers, self._out = socket.socketpair()
            self._out.setblocking(False)
            self._before = signal.set_wakeup_fd(self._out.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._observe, args=(numbers,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._out is not None:
            signal.set_wakeup_fd(self._before)
            self._out.close()  # which ends the thread
            self._thread.join()

    def _observe(self, numbers: socket.socket) -> None:
        with numbers:
            while received := numbers.recv(64):
                for number in received:
                    self._seen(number)


@cache
def _disable_after_fork() -> None:
    """Let no process that is forked tell its signals to this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
