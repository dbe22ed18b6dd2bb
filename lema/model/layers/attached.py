"""The decoder layers as they are with the adapters that are attached to them now."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lema.backend import Backend
from lema.model import capture
from lema.model.experts import LayerExperts, layer_experts, multiply_unmerged
from lema.model.layers.compiled import CompiledLayers
from lema.model.layers.tiles import TokenTiles
from lema.model.shared_inputs import SharedInputs, multiply_together
from lema.model.weight_names import LayerNames

__all__ = ["AttachedLayers"]


class AttachedLayers:
    """What is known of layers with their adapters, each learnt at its first use: the names of
    weights, the experts, the inputs that linears share, and the compiled forms. Once adapters
    change another one takes its place.

    Args:
        layers: the decoder layers.
        name: what these are called in the model.
        backend: the device.
        compiled: whether they are compiled.
        fast: whether LoRA linears that read one input multiply together.
        tile_tokens: tokens of which modules that work token by token run at once; None: all.

    Attributes:
        tiles: what runs in tiles of tokens.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        name: str,
        backend: Backend,
        *,
        compiled: bool,
        fast: bool,
        tile_tokens: int | None = None,
    ) -> None:
        self._layers = layers
        self.name = name
        self._backend = backend
        self._to_compile = compiled
        self._fast = fast
        self._names: dict[int, LayerNames] = {}
        self._experts: dict[int, LayerExperts | None] = {}
        self.sharing: dict[int, SharedInputs] = {}
        self._compiled: CompiledLayers | None = None
        self.tiles = TokenTiles(layers, name, backend, tile_tokens)
        for layer in layers:
            capture.without_casts(layer)

    def renewed(self) -> AttachedLayers:
        """Return what takes its place now that adapters were attached or taken off. Those of
        experts multiply apart from here on, wherever the layers are used."""
        renewed = AttachedLayers(
            self._layers,
            self.name,
            self._backend,
            compiled=self._to_compile,
            fast=self._fast,
            tile_tokens=self.tiles.size,
        )
        # because a layer has to compute alike where it is compiled and where it is not
        if not self._to_compile:
            multiply_unmerged(self._layers)
        if self._fast:
            multiply_together(self._layers)
        return renewed

    @property
    def compiled(self) -> CompiledLayers | None:
        """The layers as they are compiled; None: they are not."""
        if self._to_compile and self._compiled is None:
            self._compiled = CompiledLayers(list(self._layers), self.name, self._backend)
        return self._compiled

    def names(self, index: int) -> LayerNames:
        """Return the names that the weights of a layer have now."""
        if index not in self._names:
            self._names[index] = LayerNames(self._layers[index])
        return self._names[index]

    def experts(self, index: int) -> LayerExperts | None:
        """Return the experts of a layer; None: it has none whose weights may be leased in
        groups.
        """
        if index not in self._experts:
            self._experts[index] = layer_experts(self._layers[index])
        return self._experts[index]

    def inputs_shared(
        self, index: int, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Return the context in which linears of a layer that read one input multiply together, if
        they do, for one call of it.
        """
        if not self._fast:
            return nullcontext()
        shared = self.sharing.setdefault(index, SharedInputs())
        return shared.used(self._layers[index], tensors, args, kwargs)
