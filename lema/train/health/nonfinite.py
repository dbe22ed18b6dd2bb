"""Where NaN or infinity began in a step.

A gradient goes down through the layers, and the gradient of what trains in a layer may be finite
where the one that leaves the layer is not. So the gradients of the hidden states between the layers
are looked at too. `lema.train.health.stepguard` runs a bad step again for that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lema.backend import Replicas
from lema.engine import StreamedModel
from lema.errors import NonFiniteError
from lema.model import Split

Plain = TypeVar("Plain")


class HiddenGradients:
    """The ends of the range of the gradient of each layer's inputs; they stay on the device
    until asked for.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, list[Tensor]] = {}

    def observe(self, layer: int, gradients: Sequence[Tensor | None]) -> None:
        """Keep what is needed of the gradients of a layer's inputs; the top layer's outputs are
        one number more.
        """
        for gradient in gradients:
            if gradient is not None:
                # NaN, where there is one
                self._peaks.setdefault(layer, []).extend(gradient.detach().aminmax())

    def highest(self) -> int | None:
        """Return the highest layer of whose inputs a gradient is NaN or infinite; None: all are
        finite.
        """
        for layer in sorted(self._peaks, reverse=True):
            if not all(math.isfinite(float(peak)) for peak in self._peaks[layer]):
                return layer
        return None


def worst(replicas: Replicas, loss: float) -> float:
    """Return a loss that all processes of a copy, which call this, have formed; one that is not
    finite, if any.
    """
    return next(
        (rank_loss for rank_loss in replicas.of_copy(loss) if not math.isfinite(rank_loss)), loss
    )


def of_row(model: StreamedModel, value: Plain) -> list[Plain]:
    """Return the plain data of all processes that divide rows with this one, each of which calls
    this.
    """
    division = model.division
    return [value] if division is None else division.group.exchange(value)


def non_finite_loss(
    model: StreamedModel, micro_batches: Sequence[Mapping[str, Any]], value: float, where: str
) -> NonFiniteError:
    """Return the error of a loss that is not finite; runs forward once more to name the part at
    fault.
    """
    origin = first_non_finite(model, micro_batches) or "the loss itself"
    for name, parameter in model.split.model.named_parameters():
        if (
            parameter.requires_grad
            and not parameter.is_meta
            and not bool(parameter.isfinite().all())
        ):
            how = "lower learning_rate or raise adam_epsilon, and resume from the last checkpoint"
            return NonFiniteError(
                f"{name}, which trains, has become NaN or infinite", where=where, how=how
            )
    what = f"the loss is {value}"
    how = (
        "check the base weights and the data; if the loss grew before, lower learning_rate or "
        "set max_grad_norm"
    )
    return NonFiniteError(what, where=f"{where}; first non-finite output: {origin}", how=how)


@torch.no_grad()
def first_non_finite(
    model: StreamedModel, micro_batches: Sequence[Mapping[str, Any]]
) -> str | None:
    """Run forward once more and name the first part whose output is not finite; None: all are."""
    split = model.split
    backend = model.backend
    names = [
        "the embeddings",
        *(f"{split.layers_name}.{i}" for i in range(split.num_layers)),
        "the head",
    ]
    first: int | None = None
    for index, hidden in enumerate(model.hidden_states(micro_batches)):
        if first is None and not all(bool(state.isfinite().all()) for state in hidden):
            first = index
            # else others go through all layers too
            if not model.meets and backend.parallel.size == 1:
                break
    if (first := _lowest(model, first)) is None:
        if model.head is None:
            finite = all(bool(split.head(state).isfinite().all()) for state in hidden)
        else:
            finite = model.head.finite(model.stream.lease, hidden)
        first = _lowest(model, None if finite else len(names) - 1)
    return None if first is None else names[first]


def _lowest(model: StreamedModel, index: int | None) -> int | None:
    everywhere = model.backend.replicas.of_copy(index)
    if model.division is not None:
        # each has looked at its part of the rows
        everywhere = of_row(model, index)
    return min(
        (part_index for part_index in everywhere if part_index is not None),
        default=None,
    )


def first_non_finite_gradient(model: StreamedModel, run: Callable[[], object]) -> str | None:
    """Call `run`, which goes forward and backward, and name where its gradients begin not to be
    finite; None: nowhere. It is the highest of: the head, if what it hands down is not finite; a
    layer's parameter that has such a gradient; the layer that hands such a one down, whether or not
    anything in it trains."""
    hidden = HiddenGradients()
    with model.engine.observing(hidden.observe):
        run()
    # Processes that compute a layer together form parts of its gradient: the layer is named if any
    # sees NaN.
    seen = (
        layer for layer in model.backend.replicas.of_copy(hidden.highest()) if layer is not None
    )
    split = model.split
    handed_down = max(seen, default=None)
    reached = -1 if handed_down is None else handed_down
    for layer, name, parameter in _downwards(split):
        if layer < reached:
            break
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None if handed_down is None else _handing_down(split, handed_down)


def _handing_down(split: Split, layer: int) -> str:
    return "the head and the loss" if layer == split.num_layers else f"{split.layers_name}.{layer}"


def where_began(split: Split, name: str, handed_down: int | None) -> str:
    """Return where gradients begin not to be finite: at the weight `name`, or in the layer that
    `handed_down` some.
    """
    layer = next(
        number for number, parameter_name, _ in _downwards(split) if parameter_name == name
    )
    return (
        name if handed_down is None or handed_down <= layer else _handing_down(split, handed_down)
    )


def _downwards(split: Split) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (layer, name, parameter): first those after the layers, then layers from the top,
    then the others.
    """
    named = list(split.model.named_parameters())
    inside = [name.startswith(f"{split.layers_name}.") for name, _ in named]
    above = len(named) - inside[::-1].index(True)
    yield from ((split.num_layers, name, parameter) for name, parameter in named[above:])
    for layer in reversed(range(split.num_layers)):
        for name, parameter in split.layers[layer].named_parameters():
            yield layer, f"{split.layers_name}.{layer}.{name}", parameter
    yield from ((-1, name, parameter) for name, parameter in named[: inside.index(True)])
