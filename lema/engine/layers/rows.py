"""Rows on their way through the layers: those of a step, of an evaluation, or of a reference.

Rows that are no step's have no gradient, and nothing of them is kept but the hidden states between
two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from lema.activations.chunks.hostpool import HostPool
from lema.activations.hoststates import HostState, HostStates, on_device
from lema.model.flow import LayerCall

__all__ = ["Calls", "ComputeAs", "Rows"]

Calls: TypeAlias = Sequence[Sequence[LayerCall]]
"""For each layer, the call of each micro-batch."""
ComputeAs: TypeAlias = Callable[[Iterable[nn.Module]], AbstractContextManager[None]]
"""Has modules compute with other adapters than those that train, or without any, in a `with` block.
"""


@dataclass(eq=False)
class Rows:
    """Micro-batches that go through the layers together.

    Args:
        calls: for each layer, the call of each micro-batch.
        hidden: the hidden state of each micro-batch before the layer that comes next, on the
            device or in host memory; None: those of `source`, from where the two differ.
        source: the rows that these are the same as up to there; None: they have none.
        targets: of each micro-batch, `[rows, sequence]`: whose log-probabilities are wanted, -100
            else. Empty: somebody else has them.
        compute_as: has a layer compute as these rows want it; None: with the adapters that train.
        compiled: whether layers may run compiled.
        host: has hidden states wait in host memory between layers; None: they stay on the device.
        pool: for hidden states, of which each layer has only a few chunks on the device; None:
            they are there whole.
    """

    calls: Calls
    hidden: list[Any] | None = None
    source: Rows | None = None
    targets: Sequence[Tensor] = ()
    compute_as: ComputeAs | None = None
    compiled: bool = True
    host: HostStates | None = None
    pool: HostPool | None = None

    def __len__(self) -> int:
        """How many micro-batches they are."""
        return len(self.calls[0])

    def computing(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Return the context in which modules compute as these rows want it."""
        return nullcontext() if self.compute_as is None else self.compute_as(modules)

    @property
    def states(self) -> list[Any]:
        """The hidden states; they are there."""
        assert self.hidden is not None, "these rows have not begun to differ from others"
        return self.hidden

    def state(self, index: int) -> Tensor:
        """Return a micro-batch's hidden state on the device, `[batch, sequence, hidden]`."""
        return on_device(self.states, index)

    def stored(self, index: int, output: Tensor) -> Tensor | HostState:
        """Return a micro-batch's next hidden state as it waits for the layer above."""
        return output if self.host is None else self.host.keep(index, output)

    def synchronize(self, tensors: Iterable[Tensor | None]) -> None:
        """Wait until the host sees hidden states, or gradients of them, that are in the pool."""
        for tensor in tensors:
            if self.pool is not None and tensor is not None:
                self.pool.synchronize(tensor)

    def put(self, states: list[Any]) -> None:
        """Give the rows hidden states."""
        self.hidden = states

    def take(self) -> list[Any]:
        """Hand the hidden states over; these rows have none any more."""
        states = self.states
        self.hidden = None
        return states
