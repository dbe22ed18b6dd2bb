"""Where NaN or infinity began: the first part of the model whose output, or the layer whose gradient, is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lema.errors import NonFiniteError
from lema.split import Split
from lema.streamed import StreamedModel

__all__ = ["non_finite_gradient", "non_finite_loss"]


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


def non_finite_gradient(split: Split, where: str) -> NonFiniteError:
    """Return the error of a gradient that is not finite, naming the highest part that has one: gradients flow down."""
    for name, parameter in _downwards(split):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return NonFiniteError(
                "a gradient is not finite; the optimizer was not stepped",
                where=f"{where}, {name}",
                how="lower learning_rate, set max_grad_norm, or check the base weights of this layer",
            )
    return NonFiniteError(
        "the gradients are finite, their norm is not; the optimizer was not stepped",
        where=where,
        how="lower learning_rate",
    )


def _downwards(split: Split) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the model has after its layers, then the layers' from the top, then the others."""
    named = list(split.model.named_parameters())
    inside = [name.startswith(f"{split.layers_name}.") for name, _ in named]
    above = len(named) - inside[::-1].index(True)
    yield from named[above:]
    for layer in reversed(range(split.num_layers)):
        for name, parameter in split.layers[layer].named_parameters():
            yield f"{split.layers_name}.{layer}.{name}", parameter
    yield from named[: inside.index(True)]
