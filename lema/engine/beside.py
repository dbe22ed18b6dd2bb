"""Rows that go through each layer beside those that train, while it is on lease: they cost no byte of weights.

Such are the rows of a step as the model without its adapters sees them, the reference of preference losses. No gradient
is formed of them, and nothing of them is kept but the hidden states between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

__all__ = ["Beside", "Group", "adapters_off", "beside_of_pass", "settled"]

Turn: TypeAlias = tuple[Tensor, list[Tensor], list[Tensor]]
Batches: TypeAlias = Sequence[Mapping[str, Tensor]]
Calls: TypeAlias = Sequence[Sequence[LayerCall]]


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute without their adapters in a `with` block, in which no gradient is formed.

    PEFT's own `disable_adapter` also says of every adapter that it does not train, by which the engine goes.
    """
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


class Group:
    """Some micro-batches on their way through the layers.

    Args:
        calls: of each layer, the call of each micro-batch.
        targets: of each micro-batch, whose log-probabilities are wanted: `[rows, sequence]`, -100 elsewhere.
        hidden: of each micro-batch, at the layer that comes next; None: those of `source`, where adapters begin.
        source: what these rows are the same as up to there; None: the rows that train.
        adapters: whether the layers have their adapters.
    """

    def __init__(
        self,
        calls: Calls,
        targets: Sequence[Tensor],
        hidden: Sequence[Tensor] | None = None,
        source: Group | None = None,
        *,
        adapters: bool,
    ) -> None:
        self.calls, self.targets, self.source, self.adapters = calls, targets, source, adapters
        self.hidden: list[Tensor] | None = None if hidden is None else list(hidden)


class Beside:
    """The rows that go beside those of one pass.

    Args:
        engine: what visits work with.
        reference: the rows that train, without adapters; None: they are not asked for.
        mismatched: of KTO's KL term, with adapters and without; None: they are not asked for.
        forks: the lowest layer at which a model without adapters makes something else; -1: before the layers.
        outside: whether something outside the layers trains.
    """

    def __init__(
        self,
        engine: Engine,
        reference: Group | None,
        mismatched: tuple[Group, Group] | None,
        forks: int,
        *,
        outside: bool,
    ) -> None:
        self._engine, self._reference, self._mismatched = engine, reference, mismatched
        self._groups = [one for one in (reference, *(mismatched or ())) if one is not None]
        self._forks, self._outside = forks, outside

    @torch.no_grad()
    def through(self, layer: int, lease: Lease, hidden: Sequence[Tensor]) -> None:
        """Take the rows through a layer that is on lease; `hidden` is what the rows that train were given there."""
        if layer == self._forks:
            for group in self._groups:
                if group.hidden is None:
                    group.hidden = list(hidden if group.source is None else group.source.hidden or ())
        engine = self._engine
        for group in self._groups:
            if group.hidden is None:
                continue
            without = nullcontext() if group.adapters else adapters_off([engine.split.layers[layer]])
            with without:
                for index, call in enumerate(group.calls[layer]):
                    engine.stop.poll()
                    for attempt in engine.retry.forwards(engine.generator_state()):
                        with attempt, engine.retry.at(f"in the forward of layer {layer}"):
                            given = group.hidden[index].detach()
                            # Not compiled without adapters, because that would be another graph of each layer.
                            group.hidden[index] = engine.split.run_layer(
                                layer, lease.weights, call, given, compiled=group.adapters
                            )

    @torch.no_grad()
    def evaluated(self, loss: RowLoss, hidden: Sequence[Tensor]) -> Tensor:
        """Return the loss of a pass of which no gradient is wanted; `hidden` are the last layer's outputs."""
        with self._engine.retry.at("in the head and the loss"):
            logps = [loss.forward(state, target) for state, target in zip(hidden, loss.targets, strict=True)]
        return self.settle(loss, logps, differentiate=False)

    def settle(self, loss: RowLoss, logps: Sequence[Tensor], *, differentiate: bool = True) -> Tensor:
        """Return the loss of a pass, of whose rows that train these are the log-probabilities; the layers are done."""
        reference = None if self._reference is None else self._logps(loss, self._reference)
        sides = None if self._mismatched is None else tuple(self._logps(loss, one) for one in self._mismatched)
        mismatched = None if sides is None else (sides[0], sides[1])
        return loss.settle(logps, reference, mismatched, differentiate=differentiate)

    def _logps(self, loss: RowLoss, group: Group) -> list[Tensor]:
        hidden, group.hidden = group.hidden or [], None
        with self._without(group), self._engine.retry.at("in the head and the loss"):
            return [loss.forward(state, target) for state, target in zip(hidden, group.targets, strict=True)]

    def _without(self, group: Group) -> AbstractContextManager[None]:
        """Return the context in which the head has no adapters, if this group is without and it has some."""
        if group.adapters or not self._outside:
            return nullcontext()
        return adapters_off([self._engine.split.model])


def beside_of_pass(
    model: StreamedModel,
    loss: LossChunks | RowLoss,
    micro_batches: Batches,
    placed: Batches,
    calls: Calls,
    first: Lease | None,
) -> Beside | None:
    """Return what goes through the layers beside the rows that train, before the first layer; None: nothing.

    Args:
        model: the streamed model.
        loss: of the pass.
        micro_batches: in host memory; `placed` are they on the device, and `calls` those of each layer.
        first: the first layer's lease, where the prelude needs its weights.
    """
    objective = model.objective
    if objective is None or not isinstance(loss, RowLoss):
        return None
    others = None
    if objective.mismatched:
        rows = [model.padding.of(mismatched_of(batch)) for batch in micro_batches]
        others = model.inputs.place_step(rows, [targets_of(row["labels"]) for row in rows], model.split.tables)
    outside = bool(model.trained_outside())
    below = outside and model.starts_below is not False
    reference = (placed, loss.targets, calls) if objective.reference else None
    prelude = partial(model.prelude, first=first)
    return _beside_of(model.engine, prelude, reference, others, -1 if below else model.lowest_trained, outside=outside)


def _beside_of(
    engine: Engine,
    prelude: Callable[[Batches], tuple[Sequence[Tensor], Calls]],
    trained: tuple[Batches, Sequence[Tensor], Calls] | None,
    mismatched: tuple[Batches, Sequence[Tensor]] | None,
    forks: int,
    *,
    outside: bool,
) -> Beside:
    """Return the rows that go beside those of a pass, as they are before the first layer.

    Args:
        prelude: runs the model up to its layers; returns hidden states and calls.
        trained: the rows that train, with their targets and calls; None: no reference is wanted.
        mismatched: rows of KTO's KL term, with their targets.
        forks, outside: as of `Beside`.
    """

    def without(batches: Batches, targets: Sequence[Tensor], calls: Calls, source: Group | None = None) -> Group:
        if forks >= 0:
            return Group(calls, targets, source=source, adapters=False)
        with adapters_off([engine.split.model]):
            hidden, own = prelude(batches)
        return Group(own, targets, engine.split.enter(hidden), adapters=False)

    reference = None if trained is None else without(*trained)
    if mismatched is None:
        return Beside(engine, reference, None, forks, outside=outside)
    batches, targets = mismatched
    hidden, calls = prelude(batches)
    policy = Group(calls, targets, engine.split.enter(hidden), adapters=True)
    return Beside(engine, reference, (policy, without(batches, targets, calls, policy)), forks, outside=outside)


def settled(
    engine: Engine,
    lease: Lease,
    leaves: Leaves,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    embed_head: EmbedHead,
    beside: Beside,
) -> Turn:
    """Run all rows through the top layer and the head; return the loss of the pass.

    Returns:
        The loss; of each micro-batch, the gradient of its log-probabilities by the top layer's output, and the
        generator's state before the top layer.
    """
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
            for attempt in retry.forwards(states[-1]):
                with attempt, retry.at(f"in the forward of layer {top}"):
                    one, gradient = score(index, state)
            logps.append(one)
            gradients.append(gradient)
        beside.through(top, lease, hidden)
    return beside.settle(loss, logps), gradients, states
