"""torch's streams and events where there is no accelerator: those of `queuefakes.FakeDevice`."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch
from queuefakes import FakeDevice, FakeQueue
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cpu", 0)


class FakeStream:
    """`torch.Stream`. Within it, a copy that need not be waited for is queued; one that must be
    is a mistake.
    """

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.device = DEVICE
        self.device_index = DEVICE.index
        self._mode: QueuedCopies | None = None

    def wait_event(self, event: FakeTorchEvent) -> None:
        self.queue.wait(event.happening)

    def __enter__(self) -> FakeStream:
        assert self._mode is None, "as torch's: a stream is not entered twice"
        self._mode = QueuedCopies(self.queue)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._mode is not None
        self._mode.__exit__(*error)
        self._mode = None


class QueuedCopies(TorchFunctionMode):
    def __init__(self, queue: FakeQueue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.copy_:
            return function(*args, **(kwargs or {}))
        assert kwargs == {"non_blocking": True}, "a copy that the host waits for"
        self._queue.copy(*args)
        return args[0]


class FakeTorchEvent:
    """`torch.Event`, which answers in threads only where its device has been made the current
    one.
    """

    def __init__(self, installed: FakeTorch, device: torch.device, *, blocking: bool) -> None:
        assert device == DEVICE and blocking
        self._installed = installed

    def record(self, stream: FakeStream) -> None:
        self.happening = stream.queue.record()

    def synchronize(self) -> None:
        assert self._installed.current_index == DEVICE.index, "the wrong device is woken up"
        self.happening.wait()

    def query(self) -> bool:
        assert self._installed.current_index == DEVICE.index, "the wrong device is woken up"
        return self.happening.happened()


class FakeTorch:
    """Stands in for what torch says of accelerators, over one fake device after another.

    Args:
        monkeypatch: puts everything back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device: FakeDevice | None = None
        self.current_index: int | None = None
        monkeypatch.setattr(torch, "Stream", self._stream)
        monkeypatch.setattr(
            torch, "Event", lambda *args, **named: FakeTorchEvent(self, *args, **named)
        )
        monkeypatch.setattr(torch.accelerator, "current_stream", self._current_stream)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: DEVICE.index)
        monkeypatch.setattr(torch.accelerator, "device_index", self._device_index)

    def _stream(self, *, device: torch.device) -> FakeStream:
        assert device == DEVICE and self.device is not None
        queue = FakeQueue(self.device, f"stream {len(self.device.queues)}")
        self.device.queues.append(queue)
        self.device._speeds[queue.name] = self.device.chance.choice((1, 1, 20))
        return FakeStream(queue)

    def _current_stream(self, index: int) -> FakeStream:
        assert index == DEVICE.index and self.device is not None
        return FakeStream(self.device.compute)

    def _device_index(self, index: int) -> Any:
        def enter() -> None:
            self.current_index = index

        def leave(
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None:
            self.current_index = None

        return _context(enter, leave)


def _context(enter: Any, leave: Any) -> Any:
    return type(
        "Context",
        (SimpleNamespace,),
        {"__enter__": lambda _: enter(), "__exit__": lambda _, *e: leave(*e)},
    )()
