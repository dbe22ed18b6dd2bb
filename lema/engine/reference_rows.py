"""Extra rows that go through each layer with those that train, under the same lease: they read no
more weights.

Such are the rows of a step as the reference of preference losses sees them: the model without its
adapters, or with the adapter that training began with. No gradient is formed of them, and nothing
of them is kept but the hidden states between two layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from lema.engine.head.gradients import EmbedHead
from lema.engine.head.loss import LossChunks, targets_of
from lema.engine.head.rows import RowLoss, mismatched_of
from lema.engine.trained_weights import Leaves
from lema.model.flow import LayerCall
from lema.stream import Lease

if TYPE_CHECKING:
    from lema.engine.streamed import StreamedModel
    from lema.engine.visit import Engine

__all__ = ["ReferenceRows", "StartingAdapter", "reference_rows_of", "top_row_loss"]

Batches: TypeAlias = Sequence[Mapping[str, Tensor]]
Calls: TypeAlias = Sequence[Sequence[LayerCall]]


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute without their adapters in a `with` block, in which no gradient is
    formed. PEFT's own `disable_adapter` also says of every adapter that it does not train, by which
    the engine goes."""
    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    wrapped = [
        submodule
        for module in modules
        for submodule in module.modules()
        if isinstance(submodule, wrappers)
    ]
    before = [wrapper._disable_adapters for wrapper in wrapped]
    try:
        for wrapper in wrapped:
            wrapper._disable_adapters = True
        yield
    finally:
        for wrapper, was in zip(wrapped, before, strict=True):
            wrapper._disable_adapters = was


def as_reference(
    start: StartingAdapter | None, modules: Iterable[nn.Module]
) -> AbstractContextManager[None]:
    """Return the context in which modules compute as the reference does: with the adapter that
    training began with, or without any (None)."""
    return adapters_off(modules) if start is None else start.standing_in(modules)


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
class Group:
    """Some micro-batches on their way through the layers."""

    calls: Calls  # for each layer, the call of each micro-batch
    # of each micro-batch, `[rows, sequence]`: whose log-probabilities are wanted, -100 else
    targets: Sequence[Tensor]
    policy: bool  # whether the layers are those that train; otherwise they are the reference's
    # at the layer that comes next; None: those of `source`, where adapters begin
    hidden: list[Tensor] | None = None
    # what these rows are the same as up to there; None: the rows that train
    source: Group | None = None


@dataclass(eq=False)
class ReferenceRows:
    """The extra rows of one pass."""

    engine: Engine  # what visits work with
    start: StartingAdapter | None  # the reference's adapter; None: the reference has none
    reference: Group | None  # the rows that train, as the reference sees them; None: not needed
    # of KTO's KL term, of the model and of the reference; none: not needed
    mismatched: Sequence[Group]
    first_difference: (
        int  # the lowest layer at which the reference makes something else; -1: before the layers
    )
    outside: bool  # whether something outside the layers trains

    @torch.no_grad()
    def through(self, layer: int, lease: Lease, hidden: Sequence[Tensor]) -> None:
        """Take the rows through a layer that is on lease; `hidden` is what the rows that train
        were given there.
        """
        groups = [*([] if self.reference is None else [self.reference]), *self.mismatched]
        if layer == self.first_difference:
            for group in groups:
                if group.hidden is None:
                    group.hidden = list(
                        hidden if group.source is None else group.source.hidden or ()
                    )
        engine = self.engine
        if groups and engine.split.state.layers.keeps(layer):
            raise engine.split.state.layers.refusal(
                layer, "and the rows of a reference would change it"
            )

        def run(group: Group, call: LayerCall, hidden_state: Tensor) -> Tensor:
            # Not compiled without adapters, because that would be another graph of each layer.
            compiled = group.policy or self.start is not None
            return engine.split.run_layer(
                layer, lease.weights, call, hidden_state.detach(), compiled=compiled
            )

        for group in groups:
            if group.hidden is None:
                continue
            with (
                nullcontext()
                if group.policy
                else as_reference(self.start, [engine.split.layers[layer]])
            ):
                for index, call in enumerate(group.calls[layer]):
                    engine.stop.poll()
                    forward = partial(run, group, call, group.hidden[index])
                    location = f"in the forward of layer {layer}"
                    state = engine.generator_state()
                    group.hidden[index] = engine.retry.run_forward(location, forward, state)

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
        mismatched = [self._logps(loss, group) for group in self.mismatched]
        return loss.finish(logps, reference, mismatched, differentiate=differentiate)

    def _logps(self, loss: RowLoss, group: Group) -> list[Tensor]:
        hidden = group.hidden or []
        group.hidden = None
        # Looked for only where something outside the layers trains, because else the head has no
        # adapters.
        adapted = [] if group.policy or not self.outside else [self.engine.split.model]
        with as_reference(self.start, adapted), self.engine.retry.at("in the head and the loss"):
            return [
                loss.forward(state, target)
                for state, target in zip(hidden, group.targets, strict=True)
            ]


def reference_rows_of(
    model: StreamedModel,
    loss: LossChunks | RowLoss,
    micro_batches: Batches,
    device_batches: Batches,
    calls: Calls,
    first: Lease | None,
) -> ReferenceRows | None:
    """Return the extra rows that go through the layers, before the first layer; None: there are
    none. The micro-batches are in host memory, `device_batches` on the device, `calls` those of
    each layer. `first` is the first layer's lease, where the prelude needs its weights."""
    objective = model.objective
    split = model.split
    start = model.reference
    if objective is None or not isinstance(loss, RowLoss):
        return None
    outside = bool(model.trained_outside())
    below = outside and model.starts_below is not False
    first_difference = -1 if below else model.lowest_trained

    def as_seen(
        batches: Batches, targets: Sequence[Tensor], calls: Calls, source: Group | None = None
    ) -> Group:
        if not below:
            return Group(calls, targets, policy=False, source=source)
        with as_reference(start, [split.model]):
            hidden, prelude_calls = model.prelude(batches, first)
        return Group(prelude_calls, targets, policy=False, hidden=list(split.enter(hidden)))

    rows = [
        model.padding.of(mismatched_of(batch)) for batch in micro_batches if objective.mismatched
    ]
    mismatched_batches, mismatched_targets = model.inputs.step_to_device(
        rows, [targets_of(row["labels"]) for row in rows], split.tables
    )
    reference = as_seen(device_batches, loss.targets, calls) if objective.reference else None
    if not objective.mismatched:
        return ReferenceRows(model.engine, start, reference, (), first_difference, outside)
    hidden, mismatched_calls = model.prelude(mismatched_batches, first)
    policy = Group(
        mismatched_calls, mismatched_targets, policy=True, hidden=list(split.enter(hidden))
    )
    mismatched = policy, as_seen(mismatched_batches, mismatched_targets, mismatched_calls, policy)
    return ReferenceRows(model.engine, start, reference, mismatched, first_difference, outside)


def top_row_loss(
    engine: Engine,
    lease: Lease,
    leaves: Leaves,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    embed_head: EmbedHead,
    reference_rows: ReferenceRows,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run all rows through the top layer and the head; return the loss of the pass and, for each
    micro-batch, the gradient of its log-probabilities by the top layer's output, and the
    generator's state before the top layer."""
    loss = embed_head.loss
    top = engine.split.num_layers - 1
    retry = engine.retry
    assert isinstance(loss, RowLoss), "the loss is of tokens"
    logps = list[Tensor]()
    gradients = list[Tensor]()
    states = list[Tensor]()

    def score(index: int, state: Tensor) -> tuple[Tensor, Tensor]:
        output = engine.split.run_layer(
            top, {**lease.weights, **leaves}, calls[index], state.detach()
        )
        with retry.at("in the head and the loss"):
            return embed_head.loss_and_grad(index, output.detach())

    with engine.stream.trace.span("forward", f"layer {top}, head and loss"), torch.no_grad():
        for index, state in enumerate(hidden):
            engine.stop.poll()
            states.append(engine.generator_state())
            run = partial(score, index, state)
            row_logps, gradient = retry.run_forward(
                f"in the forward of layer {top}", run, states[-1]
            )
            logps.append(row_logps)
            gradients.append(gradient)
        reference_rows.through(top, lease, hidden)
    return reference_rows.finish(loss, logps), gradients, states
