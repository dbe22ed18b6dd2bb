"""Extra rows that go through each layer with those that train, under the same lease: they read no
more weights.

Such are the rows of a step as the reference of preference losses sees them: the model without its
adapters, or with the adapter that training began with. No gradient is formed of them, and nothing
of them is kept but the hidden states between two layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lema.engine.engine import Engine
from lema.engine.head.loss import LossChunks, targets_of
from lema.engine.head.rows import RowLoss, mismatched_of
from lema.engine.layers.layer import Layer
from lema.engine.layers.rows import Calls, Rows
from lema.engine.step_inputs import StepInputs
from lema.model.flow import LayerCall
from lema.model.layers.adapters import computing_with
from lema.stream import Lease

__all__ = ["ReferenceRows", "StartingAdapter", "reference_rows_of"]

Batches: TypeAlias = Sequence[Mapping[str, Tensor]]


def as_reference(
    start: StartingAdapter | None, modules: Iterable[nn.Module]
) -> AbstractContextManager[None]:
    """Return the context in which modules compute as the reference does: with the adapter that
    training began with, or without any (None)."""
    return computing_with(None, modules) if start is None else start.standing_in(modules)


class StartingAdapter:
    """What trains in a model, as it is when this is made: copies on the device that no optimizer
    knows.

    The copies are parameters in the modules' places for a `with` block, in which no gradient is
    formed. So everything that computes with an adapter, saves it or loads it does the same with
    this one. `model` has the trained parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                copy = nn.Parameter(parameter.detach().clone())
                vars(copy).update(vars(parameter))  # such as how it lies over processes
                self._copies[parameter] = copy

    def values(self) -> list[Tensor]:
        """Return the copies, in the order of the model's parameters."""
        return list(self._copies.values())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the copies take."""
        return sum(copy.nbytes for copy in self._copies.values())

    @contextmanager
    def standing_in(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Have modules, and those in them, compute with the copies in a `with` block."""
        entries = [
            (part._parameters, name, parameter)
            for module in modules
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None and parameter in self._copies
        ]
        try:
            for parameters, name, parameter in entries:
                parameters[name] = self._copies[parameter]
            yield
        finally:
            for parameters, name, parameter in entries:
                parameters[name] = parameter


@dataclass(eq=False)
class ReferenceRows:
    """The extra rows of one pass.

    Args:
        engine: the objects that every layer works with.
        start: the reference's adapter; None: the reference has none.
        reference: the rows that train, as the reference sees them; None: not needed.
        mismatched: those of KTO's KL term, of the model and of the reference; none: not needed.
        first_difference: the lowest layer at which the reference makes something else; -1: before
            the layers.
        outside: whether something outside the layers trains.
    """

    engine: Engine
    start: StartingAdapter | None
    reference: Rows | None
    mismatched: Sequence[Rows]
    first_difference: int
    outside: bool

    @property
    def all(self) -> list[Rows]:
        """All of them."""
        return [*([] if self.reference is None else [self.reference]), *self.mismatched]

    def begin(self, number: int, hidden: Sequence[Tensor]) -> None:
        """Note that the rows that train come to a layer, with these hidden states: from a certain
        one on the others differ from them.
        """
        if number == self.first_difference:
            for rows in self.all:
                if rows.hidden is None:
                    rows.put(list(hidden if rows.source is None else rows.source.states))

    def run(self, layer: Layer[Any], lease: Lease) -> None:
        """Take the rows through a layer that is on lease, and through which those that train have
        gone, from where they differ on.
        """
        rows_of_all = self.all
        layers = self.engine.split.state.layers
        if rows_of_all and layers.keeps(layer.number):
            raise layers.refusal(layer.number, "and the rows of a reference would change it")
        for rows in rows_of_all:
            if rows.hidden is not None:
                layer.run(lease, rows)

    @torch.no_grad()
    def evaluated(self, loss: RowLoss, hidden: Sequence[Tensor]) -> Tensor:
        """Return the loss of a pass without gradients; `hidden` are the last layer's outputs."""
        with self.engine.retry.at("in the head and the loss"):
            logps = [
                loss.forward(*pair, index)
                for index, pair in enumerate(zip(hidden, loss.targets, strict=True))
            ]
        return self.finish(loss, logps, differentiate=False)

    def finish(
        self, loss: RowLoss, logps: Sequence[Tensor], *, differentiate: bool = True
    ) -> Tensor:
        """Return the loss of a pass, of whose rows that train these are the log-probabilities;
        the layers are done.
        """
        reference = None if self.reference is None else self._logps(loss, self.reference)
        mismatched = [self._logps(loss, rows) for rows in self.mismatched]
        return loss.finish(logps, reference, mismatched, differentiate=differentiate)

    def _logps(self, loss: RowLoss, rows: Rows) -> list[Tensor]:
        hidden = rows.take()
        # Looked for only where something outside the layers trains, because else the head has no
        # adapters.
        adapted = [self.engine.split.model] if self.outside else []
        with rows.computing(adapted), self.engine.retry.at("in the head and the loss"):
            return [
                loss.forward(state, target)
                for state, target in zip(hidden, rows.targets, strict=True)
            ]


class PassModel(Protocol):
    """What the rows of a reference ask of the model that they go through."""

    engine: Engine
    step_inputs: StepInputs
    reference: StartingAdapter | None
    starts_below: bool | None

    @property
    def lowest_trained(self) -> int:
        """The lowest layer that gradients reach."""

    def trained_outside(self) -> list[nn.Parameter]:
        """Return the trainable parameters outside the decoder layers."""

    def prelude(
        self, micro_batches: Batches, first: Lease | None
    ) -> tuple[tuple[Any, ...], list[list[LayerCall]]]:
        """Return the hidden states before the layers, and per layer the call of each batch."""


def reference_rows_of(
    model: PassModel,
    loss: LossChunks | RowLoss,
    micro_batches: Batches,
    device_batches: Batches,
    calls: Calls,
    first: Lease | None,
) -> ReferenceRows | None:
    """Return the extra rows that go through the layers, before the first layer; None: there are
    none. The micro-batches are in host memory, `device_batches` on the device, `calls` those of
    each layer. `first` is the first layer's lease, where the prelude needs its weights."""
    objective = model.step_inputs.objective
    split = model.engine.split
    start = model.reference
    if objective is None or not isinstance(loss, RowLoss):
        return None
    outside = bool(model.trained_outside())
    below = outside and model.starts_below is not False
    first_difference = -1 if below else model.lowest_trained

    compute_as = partial(as_reference, start)
    # Not compiled without adapters, because that would be another graph of each layer.
    compiled = start is not None

    def as_seen(
        batches: Batches, targets: Sequence[Tensor], calls: Calls, source: Rows | None = None
    ) -> Rows:
        hidden = None
        if below:
            with as_reference(start, [split.model]):
                states, calls = model.prelude(batches, first)
            hidden = list(split.enter(states))
        return Rows(calls, hidden, source, targets, compute_as, compiled)

    rows = [
        model.step_inputs.padding.of(mismatched_of(batch))
        for batch in micro_batches
        if objective.mismatched
    ]
    mismatched_batches, mismatched_targets = model.step_inputs.inputs.step_to_device(
        rows, [targets_of(row["labels"]) for row in rows], split.tables
    )
    reference = as_seen(device_batches, loss.targets, calls) if objective.reference else None
    if not objective.mismatched:
        return ReferenceRows(model.engine, start, reference, (), first_difference, outside)
    hidden, mismatched_calls = model.prelude(mismatched_batches, first)
    policy = Rows(mismatched_calls, list(split.enter(hidden)), targets=mismatched_targets)
    mismatched = policy, as_seen(mismatched_batches, mismatched_targets, mismatched_calls, policy)
    return ReferenceRows(model.engine, start, reference, mismatched, first_difference, outside)
