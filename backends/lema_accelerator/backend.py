"""The queues of a CUDA device: torch's streams and events."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lema.backend.queues import Event

__all__ = ["TorchQueues"]

# A copy engine finishes each copy that it has begun. So a layer is copied in pieces: activations get in between.
PIECE = 32 << 20


class _TorchEvent:
    """A `torch.cuda.Event` for which a thread sleeps instead of spinning. It records no time, which would be slower."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        with torch.cuda.device(self._device):  # a thread that has chosen no device would start device 0 here
            self.event.synchronize()

    def happened(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self.event.query())


class _TorchQueue:
    """A `torch.cuda.Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return _TorchEvent(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _TorchEvent)
        self._stream.wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dim() == 1 and source.nbytes > PIECE:
                count = PIECE // source.element_size()
                for into, piece in zip(target.split(count), source.split(count), strict=True):
                    into.copy_(piece, non_blocking=True)
            else:
                target.copy_(source, non_blocking=True)

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)


class TorchQueues:
    """Four streams of one device, apart from the one that torch computes on.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.uploads, self.returns, self.downloads, self.gathers = (
            _TorchQueue(torch.cuda.Stream(device)) for _ in range(4)
        )

    @property
    def compute(self) -> _TorchQueue:
        """The stream that is current in the calling thread; in a backward, autograd sets it to the forward's."""
        return _TorchQueue(torch.cuda.current_stream(self._device))
