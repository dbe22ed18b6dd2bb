"""Answers that are waited for: clients ask for them by name, the learner's thread brings them."""

import asyncio
from collections import OrderedDict, defaultdict
from typing import TypeVar

from lema_tools.learner.store import Result

__all__ = ["Answers", "Recent"]

KEPT = 4096  # answers that are in no file
Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """A dict that forgets what it was told first, when it is told too much."""

    most = 1 << 16

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            self.popitem(last=False)


class Answers:
    """Wakes those who wait for an answer, and keeps answers that are in no file.

    Its methods are called on the event loop, but for `bring`.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._kept: OrderedDict[str, Result] = OrderedDict()
        self._closing = False

    def start(self) -> None:
        """Begin, on the event loop that runs."""
        self._loop = asyncio.get_running_loop()

    def bring(self, name: str, result: Result | None = None) -> None:
        """Wake those who wait for an answer. `result`: the answer, if it is in no file."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._bring, name, result)

    def _bring(self, name: str, result: Result | None) -> None:
        if result is not None:
            self._kept[name] = result
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        for event in self._events.get(name, ()):
            event.set()

    def kept(self, name: str) -> Result | None:
        """Return an answer that is in no file; None: there is none."""
        return self._kept.get(name)

    def close(self) -> None:
        """Wake all who wait: the server ends."""
        self._closing = True
        for events in self._events.values():
            for event in events:
                event.set()

    @property
    def closing(self) -> bool:
        """Whether the server ends."""
        return self._closing

    def expect(self, name: str) -> asyncio.Event:
        """Return what is set when an answer comes; give it back with `forget`."""
        event = asyncio.Event()
        self._events[name].add(event)
        return event

    def forget(self, name: str, event: asyncio.Event) -> None:
        """Wait for an answer no more."""
        self._events[name].discard(event)
        if not self._events[name]:
            del self._events[name]
