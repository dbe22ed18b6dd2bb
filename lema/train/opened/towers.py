"""A tower whose layers stream: each is leased as the tower's own forward reaches it.

It runs once for a batch, without a graph, before the layers of the language model. So its layers
need one lease each, and no lease is needed for a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from lema.backend import Backend
from lema.errors import ConfigError
from lema.model.capture import replaced
from lema.model.state.hooks import aside
from lema.model.towers.stacks import NUM_SLOTS
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader

__all__ = ["TowerLayers"]


class TowerLayers:
    """The layers of all towers of one model, which stream from here on.

    Args:
        stacks: the stacks of layers, by name.
        layers: the same as bytes, one stack after the other.
        backend: the device.
        reader: reads the model's files.

    Attributes:
        stream: leases the layers, numbered one stack after the other.
    """

    def __init__(
        self,
        stacks: Mapping[str, nn.ModuleList],
        layers: Sequence[LayerBytes],
        backend: Backend,
        reader: LayerReader,
    ) -> None:
        self.stream = LayerStream(layers, backend, prefetch_depth=NUM_SLOTS - 1, reader=reader)
        first = 0
        for stack in stacks.values():
            numbers = range(first, first + len(stack))
            for layer, number in zip(stack, numbers, strict=True):
                vars(layer)["forward"] = self._leased(layer, number, numbers)
            first = numbers.stop
        self._layers = [*chain.from_iterable(stacks.values())]

    def check_frozen(self) -> None:
        """Refuse, with `ConfigError`, what trains in these layers: its graph would need their
        weights when the lease is over."""
        if any(
            parameter.requires_grad for layer in self._layers for parameter in layer.parameters()
        ):
            what = "something in the layers of a tower trains, and layers of towers stream frozen"
            how = "set towers: device, or name modules of the language model in target_modules"
            raise ConfigError(what, where="towers", how=how)

    def _leased(self, layer: nn.Module, number: int, stack: range) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            self.check_frozen()
            if not self.stream.announced:
                self.stream.announce(range(number, stack.stop))
            with self.stream.lease(number) as lease, replaced({layer: None}), aside([layer]):
                if number == stack.stop - 1:
                    # the next batch begins with them
                    self.stream.announce(stack)
                weights = dict(lease.weights)
                return torch.func.functional_call(layer, weights, args, kwargs, tie_weights=False)

        return run
