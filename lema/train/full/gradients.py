"""Gradients of streamed layers on their way to host memory, one layer after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lema.backend import Download
from lema.backend.group import sum_gradients
from lema.engine import StreamedModel
from lema.train.full.masters import Masters

__all__ = ["GradientOffload"]


class GradientOffload:
    """Copies the gradients of one layer at a time to host memory; `places` is where those wait that are kept."""

    def __init__(self, model: StreamedModel, places: Masters) -> None:
        self._backend, self._places = model.backend, places
        self._in_host = model.backend.memory().shared  # a gradient is, where it is formed
        self._passing: Tensor | None = None
        self._downloads: list[Download] = []  # under way

    def begin(
        self, layer: int, found: dict[str, Tensor], *, kept: bool
    ) -> tuple[dict[str, Tensor], Sequence[Download]]:
        """Return where gradients of a layer are in host memory, by name, once the downloads have landed.

        They are `kept` where they have their place, or gone when the next layer comes; the one before has been stepped.
        """
        self.let_go()
        if self._in_host and not kept:
            return found, ()
        targets = self._places.waiting(layer) if kept else self._one_layer(found)
        for name, gradient in found.items():
            self._downloads.append(self._backend.download(gradient.contiguous(), targets[name]))
        return {name: targets[name] for name in found}, tuple(self._downloads)

    def let_go(self) -> None:
        """Let the device have the memory of gradients that leave it, once they have."""
        for one in self._downloads:
            one.release()
        self._downloads = []

    def summed(self, layer: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's gradients, added up over all processes."""
        backend = self._backend
        if backend.replicas.size == 1:
            return found
        parameters = {}
        for name in self._places.by_layer[layer]:
            weight, gradient = self._places.weights[name], found.get(name)
            held = torch.empty_like(weight, device=backend.device) if gradient is None else gradient
            parameters[name] = nn.Parameter(held, requires_grad=False)
            parameters[name].grad = gradient
        sum_gradients(backend.replicas, list(parameters.values()))
        return {name: one.grad for name, one in parameters.items() if one.grad is not None}

    def _one_layer(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return memory for gradients of one layer at a time."""
        if self._passing is None:
            sizes = (sum(self._places.weights[one].nbytes for one in names) for names in self._places.by_layer.values())
            self._passing = self._backend.host_buffer(max(sizes))
        targets, start = {}, 0
        for name, gradient in sorted(found.items(), key=lambda item: -item[1].itemsize):
            piece = self._passing[start : start + gradient.nbytes]
            targets[name], start = piece.view(gradient.dtype).view(gradient.shape), start + gradient.nbytes
        return targets
