"""Extra rows that go through each layer with those that train, under the same lease: they read no more weights.

Such are the rows of a step as the reference of preference losses sees them: the model without its adapters, or with
the adapter that training began with. No gradient is formed of them, and nothing of them is kept but the hidden states
between two layers.
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

__all__ = ["Beside", "StartingAdapter", "beside_of_pass", "settled"]

Batches: TypeAlias = Sequence[Mapping[str, Tensor]]
Calls: TypeAlias = Sequence[Sequence[LayerCall]]


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute without their adapters in a `with` block, in which no gradient is formed. PEFT's own
    `disable_adapter` also says of every adapter that it does not train, by which the engine goes."""
    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    found = [one for module in modules for one in module.modules() if isinstance(one, wrappers)]
    before = [one._disable_adapters for one in found]
    try:
        for one in found:
            one._disable_adapters = True
        yield
    finally:
        for one, was in zip(found, before, strict=True):
            one._disable_adapters = was


def as_reference(start: StartingAdapter | None, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return the context in which modules compute as the reference does: with the adapter that training began with, or
    without any (None)."""
    return adapters_off(modules) if start is None else start.standing_in(modules)


class StartingAdapter:
    """What trains in a model, as it is when this is made: copies on the device that no optimizer knows.

    The copies are parameters in the modules' places for a `with` block, in which no gradient is formed. So everything
    that computes with an adapter, saves it or loads it does the same with this one. `model` has the trained parameters.
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
        places = [
            (part._parameters, name, parameter)
            for module in modules
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None and parameter in self._copies
        ]
        try:
            for parameters, name, parameter in places:
                parameters[name] = self._copies[parameter]
            yield
        finally:
            for parameters, name, parameter in places:
                parameters[name] = parameter


@dataclass(eq=False)
class Group:
    """Some micro-batches on their way through the layers."""

    calls: Calls  # for each layer, the call of each micro-batch
    targets: Sequence[Tensor]  # of each micro-batch, `[rows, sequence]`: whose log-probabilities are wanted, -100 else
    policy: bool  # whether the layers are those that train; otherwise they are the reference's
    hidden: list[Tensor] | None = None  # at the layer that comes next; None: those of `source`, where adapters begin
    source: Group | None = None  # what these rows are the same as up to there; None: the rows that train


@dataclass(eq=False)
class Beside:
    """The extra rows of one pass."""

    engine: Engine  # what visits work with
    start: StartingAdapter | None  # the reference's adapter; None: the reference has none
    reference: Group | None  # the rows that train, as the reference sees them; None: not needed
    mismatched: Sequence[Group]  # of KTO's KL term, of the model and of the reference; none: not needed
    forks: int  # the lowest layer at which the reference makes something else; -1: before the layers
    outside: bool  # whether something outside the layers trains

    @torch.no_grad()
    def through(self, layer: int, lease: Lease, hidden: Sequence[Tensor]) -> None:
        """Take the rows through a layer that is on lease; `hidden` is what the rows that train were given there."""
        groups = [*([] if self.reference is None else [self.reference]), *self.mismatched]
        if layer == self.forks:
            for group in groups:
                if group.hidden is None:
                    group.hidden = list(hidden if group.source is None else group.source.hidden or ())
        engine = self.engine
        if groups and engine.split.state.layers.keeps(layer):
            raise engine.split.state.layers.refusal(layer, "and the rows of a reference would change it")

        def run(group: Group, call: LayerCall, given: Tensor) -> Tensor:
            # Not compiled without adapters, because that would be another graph of each layer.
            compiled = group.policy or self.start is not None
            return engine.split.run_layer(layer, lease.weights, call, given.detach(), compiled=compiled)

        for group in groups:
            if group.hidden is None:
                continue
            with nullcontext() if group.policy else as_reference(self.start, [engine.split.layers[layer]]):
                for index, call in enumerate(group.calls[layer]):
                    engine.stop.poll()
                    made = partial(run, group, call, group.hidden[index])
                    place, state = f"in the forward of layer {layer}", engine.generator_state()
                    group.hidden[index] = engine.retry.run_forward(place, made, state)

    @torch.no_grad()
    def evaluated(self, loss: RowLoss, hidden: Sequence[Tensor]) -> Tensor:
        """Return the loss of a pass without gradients; `hidden` are the last layer's outputs."""
        with self.engine.retry.at("in the head and the loss"):
            logps = [loss.forward(*one, index) for index, one in enumerate(zip(hidden, loss.targets, strict=True))]
        return self.settle(loss, logps, differentiate=False)

    def settle(self, loss: RowLoss, logps: Sequence[Tensor], *, differentiate: bool = True) -> Tensor:
        """Return the loss of a pass, of whose rows that train these are the log-probabilities; the layers are done."""
        reference = None if self.reference is None else self._logps(loss, self.reference)
        mismatched = [self._logps(loss, one) for one in self.mismatched]
        return loss.settle(logps, reference, mismatched, differentiate=differentiate)

    def _logps(self, loss: RowLoss, group: Group) -> list[Tensor]:
        hidden, group.hidden = group.hidden or [], None
        # Looked for only where something outside the layers trains, because else the head has no adapters.
        adapted = [] if group.policy or not self.outside else [self.engine.split.model]
        with as_reference(self.start, adapted), self.engine.retry.at("in the head and the loss"):
            return [loss.forward(state, target) for state, target in zip(hidden, group.targets, strict=True)]


def beside_of_pass(
    model: StreamedModel,
    loss: LossChunks | RowLoss,
    micro_batches: Batches,
    placed: Batches,
    calls: Calls,
    first: Lease | None,
) -> Beside | None:
    """Return the extra rows that go through the layers, before the first layer; None: there are none. The
    micro-batches are in host memory, `placed` on the device, `calls` those of each layer. `first` is the first layer's
    lease, where the prelude needs its weights."""
    objective, split, start = model.objective, model.split, model.reference
    if objective is None or not isinstance(loss, RowLoss):
        return None
    outside = bool(model.trained_outside())
    below = outside and model.starts_below is not False
    forks = -1 if below else model.lowest_trained

    def as_seen(batches: Batches, targets: Sequence[Tensor], calls: Calls, source: Group | None = None) -> Group:
        if not below:
            return Group(calls, targets, policy=False, source=source)
        with as_reference(start, [split.model]):
            hidden, own = model.prelude(batches, first)
        return Group(own, targets, policy=False, hidden=list(split.enter(hidden)))

    rows = [model.padding.of(mismatched_of(batch)) for batch in micro_batches if objective.mismatched]
    others, wanted = model.inputs.place_step(rows, [targets_of(row["labels"]) for row in rows], split.tables)
    reference = as_seen(placed, loss.targets, calls) if objective.reference else None
    if not objective.mismatched:
        return Beside(model.engine, start, reference, (), forks, outside)
    hidden, own = model.prelude(others, first)
    policy = Group(own, wanted, policy=True, hidden=list(split.enter(hidden)))
    mismatched = policy, as_seen(others, wanted, own, policy)
    return Beside(model.engine, start, reference, mismatched, forks, outside)


def settled(
    engine: Engine,
    lease: Lease,
    leaves: Leaves,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    embed_head: EmbedHead,
    beside: Beside,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run all rows through the top layer and the head; return the loss of the pass and, for each micro-batch, the
    gradient of its log-probabilities by the top layer's output, and the generator's state before the top layer."""
    loss, top, retry = embed_head.loss, engine.split.num_layers - 1, engine.retry
    assert isinstance(loss, RowLoss), "the loss is of tokens"
    logps, gradients, states = list[Tensor](), list[Tensor](), list[Tensor]()

    def score(index: int, state: Tensor) -> tuple[Tensor, Tensor]:
        output = engine.split.run_layer(top, {**lease.weights, **leaves}, calls[index], state.detach())
        with retry.at("in the head and the loss"):
            return embed_head.turn(index, output.detach())

    with engine.stream.trace.span("forward", f"layer {top}, head and loss"), torch.no_grad():
        for index, state in enumerate(hidden):
            engine.stop.poll()
            states.append(engine.generator_state())
            run = partial(score, index, state)
            one, gradient = retry.run_forward(f"in the forward of layer {top}", run, states[-1])
            logps.append(one)
            gradients.append(gradient)
        beside.through(top, lease, hidden)
    return beside.settle(loss, logps), gradients, states
