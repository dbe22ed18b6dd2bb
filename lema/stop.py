"""Stopping on request: a signal lets the step under way finish, saves a checkpoint, and ends the run."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from transformers import TrainerCallback

from lema.backend import Replicas

__all__ = ["StopOnSignal"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):
    """Asks the loop to save and stop after the step in which SIGINT or SIGTERM came; a second signal ends at once.

    Use it in a `with` block, at whose end the handlers that were there before are back.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.stopped_at: int | None = None  # the step after which the run was cut short
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - transformers' signature
        """Ask for a checkpoint and for the end, where a signal has come."""
        if self.received is not None and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.stopped_at = state.global_step
        return control

    def agreed(self, replicas: Replicas) -> tuple[str, int] | None:
        """Return the signal that ended the run and the step it ended after, whichever process it came to first."""
        came = None if self.received is None or self.stopped_at is None else (self.received.name, self.stopped_at)
        return next((one for one in replicas.everyone(came) if one is not None), None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
