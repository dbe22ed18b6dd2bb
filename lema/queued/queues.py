"""What a device that works through queues must offer for copies to be put in order: queues, and events in them.

Nothing here knows of torch's streams, so that the order can be proven on a machine without such a device: with queues
that take any course which these few words allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Event", "Queue", "Queues"]


class Event(Protocol):
    """A place in a queue: it has happened when everything queued there before it is done."""

    def wait(self) -> None:
        """Block the calling thread, which may be any, until it has happened."""

    def happened(self) -> bool:
        """Say whether it has happened, at once."""


class Queue(Protocol):
    """Work that is done in the order in which it was queued; nothing is said of the order between two queues."""

    def record(self) -> Event:
        """Return an event behind everything queued so far."""

    def wait(self, event: Event) -> None:
        """Let everything queued from now on begin after `event`. The caller goes on at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; both have one shape, dtype and strides. The caller goes on at once."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this queue is `Queues.compute`."""


class Queues(Protocol):
    """The queues of one device."""

    @property
    def compute(self) -> Queue:
        """Where the calling thread's work is queued now."""

    @property
    def uploads(self) -> Queue:
        """Copies of weights to the device."""

    @property
    def returns(self) -> Queue:
        """Copies back to the device of what was downloaded."""

    @property
    def downloads(self) -> Queue:
        """Copies to host memory."""

    @property
    def gathers(self) -> Queue:
        """What the replicas send each other ahead of its use."""
