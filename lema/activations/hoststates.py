"""Hidden states that wait in host memory between two layers, in a pass that forms no gradients.

They leave behind the compute that makes them, and come back behind that, so the host waits for
nothing. Each micro-batch has one buffer, which the next layer's output overwrites: it leaves only
after what was computed with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lema.activations.boundaries import view_like
from lema.backend import Carrier, Download, Upload

__all__ = ["HostState", "HostStates", "on_device"]

NUM_LEAVING = 2  # states that are held on the device until their copy has ended


class HostState:
    """One hidden state in host memory, or on its way there or back."""

    def __init__(self, carrier: Carrier, memory: Tensor, like: Tensor) -> None:
        self._carrier = carrier
        self._memory = memory
        self._like = like
        self._upload: Upload | None = None

    def expect(self) -> None:
        """Begin to copy it back, because it is wanted soon."""
        if self._upload is None:
            self._upload = self._carrier.device_slots(len(self._memory), 1).upload(self._memory)

    def back(self) -> Tensor:
        """Return it on the device; the memory there is the caller's."""
        self.expect()
        assert self._upload is not None
        upload = self._upload
        self._upload = None
        return view_like(upload.wait(), self._like)


class HostStates:
    """Page-locked buffers for one hidden state of each micro-batch, which the next pass uses
    again.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._buffers: list[Tensor] = []
        self._leaving: deque[Download] = deque()

    def keep(self, number: int, state: Tensor) -> HostState:
        """Copy the hidden state of micro-batch `number` to host memory, over the one before; the
        caller goes on.
        """
        like = torch.empty_like(state, device="meta", requires_grad=False)
        memory = self._buffer(number, like.nbytes)[: like.nbytes]
        target = view_like(memory, like)
        source = state.detach()
        if source.stride() != target.stride():
            source = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=state.device
            ).copy_(source)
        # not at once, because compute need not wait for the copy then
        if len(self._leaving) == NUM_LEAVING:
            self._leaving.popleft().release()
        self._leaving.append(self._carrier.download(source, target))
        return HostState(self._carrier, memory, like)

    def end_forward(self) -> None:
        """Hold no state on the device any more: the pass is over."""
        while self._leaving:
            self._leaving.popleft().release()

    def _buffer(self, number: int, nbytes: int) -> Tensor:
        assert number <= len(self._buffers), "micro-batches come in their order"
        if number == len(self._buffers):
            self._buffers.append(self._carrier.host_buffer(0))
        if len(self._buffers[number]) < nbytes:
            # As large as the largest: locking memory takes long, and batches change in length.
            self._buffers[number] = self._carrier.host_buffer(max(nbytes, *map(len, self._buffers)))
        return self._buffers[number]


def on_device(states: Sequence[Tensor | HostState], number: int) -> Tensor:
    """Return one of the states on the device; the next one begins to come back."""
    for state in states[number : number + 2]:
        if isinstance(state, HostState):
            state.expect()
    state = states[number]
    return state.back() if isinstance(state, HostState) else state
