"""The objects that every layer of a pass works with, and what watches or changes a pass.

They are made once for a model, and each leased layer, the rows of a reference and the head find
here the model in its parts, the stream of weights and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lema.backend import Backend
from lema.backend.interrupt import NEVER, Interrupt
from lema.engine.head.routers import RouterLoss
from lema.engine.oom import OomRetry
from lema.engine.trained_weights import TrainedWeights
from lema.model import Split
from lema.model.sequence.host_keys import HostKeys
from lema.stream import LayerStream, Lease

__all__ = ["Direction", "Engine", "Observe"]

Direction: TypeAlias = Literal["forward", "backward"]
Observe: TypeAlias = Callable[[int, Sequence[Tensor | None]], None]
"""Is given the number of a layer and the gradients of its inputs."""


class Engine:
    """The objects that every layer works with: the model in its parts, the stream of weights, the
    device.

    Args:
        split: the model in its parts.
        stream: the layers' weights.
        backend: the device.
        trained: the weights of layers that train themselves; None: none does.
        runs_again: whether what comes before experts in groups is run twice in a backward, so that
            no graph waits.
        retry: attempts again what ran out of device memory; None: with general advice.
        host_keys: has keys and values of the layer at work wait in host memory between chunks of a
            sequence; None: they are on the device.

    Attributes:
        anchor: requires grad, so that a pass is differentiated even when the lowest hidden state
            does not.
        retry: attempts again what ran out of device memory.
        trained: the weights of layers that train themselves.
        routers: the loss of routers, which is added to that of a step; None: it is left out.
        stop: asked before each micro-batch whether the run is to stop.
        observe: called in the backward as soon as gradients of hidden states are formed, with the
            number of the layer of whose inputs they are (the number of layers for the top layer's
            outputs) and with them, some of them None.
    """

    def __init__(
        self,
        split: Split,
        stream: LayerStream,
        backend: Backend,
        *,
        trained: TrainedWeights | None = None,
        runs_again: bool = False,
        retry: OomRetry | None = None,
        host_keys: HostKeys | None = None,
    ) -> None:
        self.split = split
        self.stream = stream
        self.backend = backend
        # Copied, not computed, and no scalar: of a lazy device's graphs it is an input from the
        # first on.
        self.anchor = torch.zeros(1).to(backend.device).requires_grad_()
        self.retry = retry or OomRetry(stream, backend, split.state)
        self.trained = trained or TrainedWeights({}, lambda *_: None)
        self.routers: RouterLoss | None = None
        self.runs_again = runs_again
        self.host_keys = host_keys
        self.stop = NEVER
        self.observe: Observe = _unseen
        self._state: Tensor | None = None

    def train_weights(self, trained: TrainedWeights) -> None:
        """Let weights of the layers train themselves, from the next step on."""
        self.trained = trained

    def add_router_loss(self, routers: RouterLoss) -> None:
        """Add the loss of routers to steps, whose rows belong together from then on."""
        self.routers = routers
        self.retry.keep_rows_together()

    @contextmanager
    def stopping(self, interrupt: Interrupt) -> Iterator[None]:
        """Ask an interrupt before each layer and micro-batch in a `with` block."""
        before = self.stop
        self.stop = interrupt
        try:
            with self.stream.calling(interrupt.at_lease):
                yield
        finally:
            self.stop = before

    @contextmanager
    def observing(self, observe: Observe) -> Iterator[None]:
        """Show the gradients of hidden states in a `with` block as soon as they are formed."""
        before = self.observe
        self.observe = observe
        try:
            yield
        finally:
            self.observe = before

    @property
    def observes(self) -> bool:
        """Whether somebody sees the gradients of hidden states."""
        return self.observe is not _unseen

    def generator_state(self) -> Tensor:
        """Return the generator's state, in the tensor returned last time if nothing was drawn
        since. One tensor is enough, because without dropout every layer and micro-batch has the
        same state of kilobytes."""
        state = self.backend.rng_state()
        if self._state is None or not torch.equal(state, self._state):
            self._state = state
        return self._state

    @contextmanager
    def leased(self, layer: int, direction: Direction) -> Iterator[Lease]:
        """Lease a layer for its visit, which is traced; an error of memory in it says where it
        was.
        """
        span = self.stream.trace.span(direction, f"layer {layer}")
        with (
            self.retry.at(f"in the {direction} of layer {layer}"),
            self.stream.lease(layer) as lease,
            span,
        ):
            yield lease
        # a backend may have one
        end_visit: Callable[[], None] = getattr(self.backend, "end_visit", lambda: None)
        end_visit()

    def trains(self, layer: int) -> bool:
        """Whether anything in a layer trains."""
        return self.trained.trains(layer) or bool(self.adapters_of(layer))

    def adapters_of(self, layer: int) -> list[nn.Parameter]:
        """Return the trainable parameters of one layer."""
        return [p for p in self.split.layers[layer].parameters() if p.requires_grad]


def _unseen(layer: int, gradients: Sequence[Tensor | None]) -> None:
    """Nobody sees gradients."""
