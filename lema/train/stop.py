"""Stop requests: a signal, or a file named `stop`, is noted here and seen by the run before its
next layer.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from lema.backend.host.clibrary import c_function
from lema.backend.signalwatch import SignalWatch
from lema.errors import Stopped

__all__ = ["SIGNALS", "STOP_FILE", "StopOnSignal"]

# Windows has none of a user's own; there Ctrl-Break is one.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGBREAK")
    if hasattr(signal, name)
)
STOP_FILE = "stop"

# A terminal, `timeout` and `torchrun` each send a process the signal that its parent got, too: what
# comes twice within this many seconds has come once.
SAME_SIGNAL = 1.0
POLL_INTERVAL = 1.0  # seconds between two looks at the file: its disk may be far away


class StopOnSignal:
    """Notes that a run is to stop; give `why` to the run as whom to ask. A second signal ends the
    process at once. After its `with` block the handlers are those from before. That a `file` is
    there asks for the end, too; a block that ends so, or in an error that came of it, deletes it,
    or the run that goes on would stop again."""

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.received: signal.Signals | None = None
        self._file = file
        self._clock = clock
        self._next_poll = 0.0
        self._file_exists = False
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._must_exit = False
        self._watch = SignalWatch(self._seen)

    def why(self) -> str | None:
        """Return why the run is to stop; None: it goes on."""
        if self.received is not None:
            return self.received.name
        if (
            self._file is not None
            and not self._file_exists
            and (now := self._clock()) >= self._next_poll
        ):
            self._next_poll = now + POLL_INTERVAL
            self._file_exists = self._file.exists()
        return f"the file {self._file}" if self._file_exists else None

    def __enter__(self) -> Self:
        # elsewhere Python takes no signals
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            hangup = getattr(signal, "SIGHUP", None)
            # the run goes on without its terminal
            if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
                self._before[hangup] = signal.signal(hangup, signal.SIG_IGN)
        self._watch.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watch.__exit__()
        if self._timer is not None:
            # Not cancelled, because what comes again until then would end the process before it has
            # told of its checkpoint: a run that is small has stopped by now.
            self._timer.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        stopped = isinstance(error, Stopped) or (
            error is not None and isinstance(error.__cause__, Stopped)
        )
        if stopped and self._file is not None:
            self._file.unlink(missing_ok=True)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)

    def _seen(self, number: int) -> None:
        """Be ready for a second signal, though the main thread may not have come to the handler
        of the first.
        """
        if number not in SIGNALS:
            return
        if self._must_exit:
            os._exit(128 + number)
        if self._timer is None:
            timer = threading.Timer(SAME_SIGNAL, self._end_at_once)
            timer.daemon = True
            timer.start()
            self._timer = timer

    def _end_at_once(self) -> None:
        """Let a signal from now on end the process, whatever it is in the midst of, because Python
        would call a handler only when the main thread comes out of the library it is in, and lets
        no other thread set what the system does. Where the C library cannot be asked for that, the
        thread that sees signals ends it, once it gets its turn."""
        set_action = c_function("signal")
        self._must_exit = set_action is None
        if set_action is not None:
            for number in SIGNALS:
                set_action(int(number), None)  # SIG_DFL is a null pointer
