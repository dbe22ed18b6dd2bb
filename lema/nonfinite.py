"""Where NaN or infinity began: the first part of the model whose output, or whose gradient, is not finite.

A gradient goes down through the layers, and what trains in a layer may be finite where the gradient that leaves it is
not. So the gradients of the hidden states are looked at too, between every two layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lema.errors import NonFiniteError
from lema.replicas import Replicas
from lema.split import Split
from lema.streamed import StreamedModel

__all__ = ["HiddenGradients", "first_non_finite_gradient", "non_finite_gradient", "non_finite_loss", "worst"]


class HiddenGradients:
    """The ends of the range of the gradient of each layer's inputs; they stay on the device until asked for."""

    def __init__(self) -> None:
        self._peaks: dict[int, list[Tensor]] = {}

    def look(self, layer: int, gradients: Sequence[Tensor | None]) -> None:
        """Keep what is needed of the gradients of a layer's inputs; the top layer's outputs are one number more."""
        for one in gradients:
            if one is not None:
                self._peaks.setdefault(layer, []).extend(one.detach().aminmax())  # NaN, where there is one

    def highest(self) -> int | None:
        """Return the highest layer of whose inputs a gradient is NaN or infinite; None: all are finite."""
        for layer in sorted(self._peaks, reverse=True):
            if not all(math.isfinite(float(peak)) for peak in self._peaks[layer]):
                return layer
        return None

    def forget(self) -> None:
        """Begin with nothing seen."""
        self._peaks.clear()


def worst(replicas: Replicas, loss: float) -> float:
    """Return a loss that all processes which hold one copy together have formed; one that is not finite, if any has.

    Each of them calls this, so that they see the same.
    """
    return next((one for one in replicas.of_copy(loss) if not math.isfinite(one)), loss)


def non_finite_loss(
    model: StreamedModel, micro_batches: Sequence[Mapping[str, Any]], value: float, where: str
) -> NonFiniteError:
    """Return the error of a loss that is not finite; runs forward once more to name the part at fault."""
    place = model.first_non_finite(micro_batches) or "the loss itself"
    return NonFiniteError(
        f"the loss is {value}",
        where=f"{where}; first non-finite output: {place}",
        how="check the base weights and the data; lower learning_rate, or set max_grad_norm, if it grew before",
    )


def non_finite_gradient(where: str, place: str | None) -> NonFiniteError:
    """Return the error of a norm that is not finite; `place` is where gradients began not to be, None: nowhere."""
    if place is None:
        return NonFiniteError(
            "the gradients are finite, their norm is not; the optimizer was not stepped",
            where=where,
            how="lower learning_rate",
        )
    return NonFiniteError(
        "a gradient is not finite; the optimizer was not stepped",
        where=f"{where}; first non-finite gradient: {place}",
        how="lower learning_rate, set max_grad_norm, or check the base weights of this layer",
    )


def first_non_finite_gradient(model: StreamedModel, run: Callable[[], object]) -> str | None:
    """Call `run`, which goes forward and backward, and name where its gradients begin not to be finite; None: nowhere.

    It is the highest of: the head, if what it hands down is not finite; a layer's parameter that has such a gradient;
    the layer that hands such a one down, whether or not anything in it trains.
    """
    hidden = HiddenGradients()
    with model.seen_by(hidden.look):
        run()
    # Processes that compute a layer together form parts of what it hands down: it is named where any sees it.
    seen = (one for one in model.backend.replicas.of_copy(hidden.highest()) if one is not None)
    return place_of(model.split, max(seen, default=None))


def place_of(split: Split, handed_down: int | None) -> str | None:
    """Name where the gradients of a pass begin not to be finite, given the highest layer that hands such down."""
    reached = -1 if handed_down is None else handed_down
    for layer, name, parameter in _downwards(split):
        if layer < reached:
            break
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    if handed_down is None:
        return None
    return "the head and the loss" if handed_down == split.num_layers else f"{split.layers_name}.{handed_down}"


def _downwards(split: Split) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (layer, name, parameter) of what comes after the layers, of the layers from the top, of the others."""
    named = list(split.model.named_parameters())
    inside = [name.startswith(f"{split.layers_name}.") for name, _ in named]
    above = len(named) - inside[::-1].index(True)
    yield from ((split.num_layers, name, parameter) for name, parameter in named[above:])
    for layer in reversed(range(split.num_layers)):
        for name, parameter in split.layers[layer].named_parameters():
            yield layer, f"{split.layers_name}.{layer}.{name}", parameter
    yield from ((-1, name, parameter) for name, parameter in named[: inside.index(True)])
