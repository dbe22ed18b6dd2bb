"""Experts, as a plan has them: what waits where groups of them are leased, and what is told of a
model's experts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lema.backend import load
from lema.engine.layers.experts import waiting_bytes
from lema.model import Split
from lema.model.capture import replaced
from lema.model.experts import most_pairs
from lema.model.outer_weights import ExpertParts
from lema.plan.blueprint import Blueprint
from lema.plan.work.meter import Tally, without_values
from lema.plan.work.workload import (
    MicroBatch,
    Workload,
    cost_kinds,
    fake_weights,
    given_of,
    layer_work,
    learn,
    one_of_each,
)
from lema.stream.schedule import ExpertGroup

__all__ = [
    "ExpertSummary",
    "Waiting",
    "active_experts",
    "expert_summary",
    "waiting_of",
    "with_waiting",
]


LEARNING = 512  # tokens of a row, by which a router says how many experts a token has


@dataclass(frozen=True)
class Waiting:
    """One micro-batch in a layer whose experts are leased in groups, in bytes."""

    saved: int  # by the graph of what is no expert, which waits where it is not run again
    states: int  # of hidden states and the like, which wait in any case
    group: int  # alive at once, while a group of experts works on it
    layer: int  # alive at once, while what is no expert is run and differentiated
    graph: int  # of that its graph, which is among what is `saved`
    head: int  # alive while the head is computed, if it is the top layer

    def waiting(self, *, runs_again: bool) -> int:
        """Return what waits while other micro-batches are worked on."""
        return self.states + (0 if runs_again else self.saved)

    def working(self, *, runs_again: bool) -> int:
        """Return what is alive at once besides what waits, while it is worked on."""
        return max(self.group, self.layer - (0 if runs_again else self.graph))


def with_waiting(drawn: Blueprint, batch: MicroBatch, work: Workload) -> Workload:
    """Return what a micro-batch costs, with what waits of it for experts in groups if the
    blueprint has some.
    """
    if drawn.parts is None:
        return work
    if (key := (batch, drawn.experts)) not in drawn.waiting:
        drawn.waiting[key] = _waiting_in_chunks(drawn, batch)
    waiting_by_kind: dict[int, Waiting] = drawn.waiting[key]
    works = list(work.works)
    in_chunks = batch.chunk is not None and batch.length > batch.chunk
    for kind, waiting in waiting_by_kind.items():
        working_bytes = waiting.working(runs_again=drawn.runs_again)
        if in_chunks:
            # with the experts, which are not run there, and so a little more than it takes
            working_bytes = max(waiting.group, works[kind].working_bytes)
        works[kind] = replace(
            works[kind],
            working_bytes=working_bytes,
            forward_bytes=waiting.head,
            waiting_bytes=waiting.waiting(runs_again=drawn.runs_again),
        )
    # experts in groups have whole hidden states on the device
    return replace(work, works=tuple(works), in_host=None)


def _waiting_in_chunks(drawn: Blueprint, batch: MicroBatch) -> dict[int, Waiting]:
    """Return what `waiting_of` does, of chunks, if the micro-batch goes through layers in several:
    all wait while a group of experts works on one, and no graph does.
    """
    if batch.chunk is None or batch.length <= batch.chunk:
        return waiting_of(drawn, batch)
    of_one = waiting_of(drawn, replace(batch, length=batch.chunk, chunk=None))
    count = math.ceil(batch.length / batch.chunk)
    return {
        kind: replace(
            waiting,
            saved=0,
            # with a copy of the layer's input, and what the layer adds to its experts' result
            states=2 * count * waiting.states,
            head=count * waiting.head,
        )
        for kind, waiting in of_one.items()
    }


def waiting_of(blueprint: Blueprint, batch: MicroBatch) -> dict[int, Waiting]:
    """Return what a micro-batch takes in each kind of layer whose experts are leased in groups, by
    the numbers of `cost_kinds`. `ModelError`: as `measure`."""
    model = blueprint.model
    layers = blueprint.layers
    parts = blueprint.parts
    assert parts is not None
    split = Split(model, load("cpu"), cast=blueprint.cast)
    waiting_by_kind = dict[int, Waiting]()
    with without_values(model):
        learn(split, layers)
        prelude = split.prelude(batch.inputs(), {})
        states = given_of(split, layers, prelude)
        kinds = cost_kinds(split, layers)
        for index in one_of_each(kinds, states):
            if (experts := split.experts_of(index)) is None or index not in parts.groups:
                continue
            call = prelude.calls[index]
            entered = states[index].detach().requires_grad_()
            weights = fake_weights(layers[index])
            saved = dict[int, Tensor]()  # which live, or another has their place

            def note(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
                saved[tensor.untyped_storage()._cdata] = tensor.detach()
                return tensor

            with torch.enable_grad():
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    half = split.suspended(
                        index, partial(split.run_layer, index, weights, call, entered)
                    )
                with half.looking() as observed:
                    half.resume(torch.zeros_like(half.expert_inputs[0]).requires_grad_().clone())
            with replaced({experts.module: lambda hidden, *_: torch.zeros_like(hidden)}):
                work = layer_work(split, index, layers[index], call, states[index : index + 2], ())
            expert_inputs = [tensor.detach() for tensor in half.expert_inputs]
            waits = waiting_bytes(states[index], expert_inputs, reads_values=bool(observed))
            # What the steps behind the experts compute with waits with the graph, which need not
            # save it.
            operand_bytes = {
                operand.untyped_storage()._cdata: operand.untyped_storage().nbytes()
                for operand in half.operands()
            }
            saved_bytes = work.saved_bytes + sum(
                nbytes for storage, nbytes in operand_bytes.items() if storage not in saved
            )
            group = _group_bytes(split, index, parts, call.autocast, expert_inputs)
            # of what is computed of the experts' result, before the head
            head_bytes = 4 * expert_inputs[0].nbytes
            waiting_by_kind[kinds[index]] = Waiting(
                saved_bytes, waits, group, work.working_bytes, work.saved_bytes, head_bytes
            )
    return waiting_by_kind


def _group_bytes(
    split: Split,
    index: int,
    parts: ExpertParts,
    autocast: torch.dtype | None,
    expert_inputs: Sequence[Tensor],
) -> int:
    """Return the most that is alive at once while a group of a layer's experts is run and
    differentiated for a micro-batch, with as many pairs as it runs at once."""
    first, end, stored = parts.groups[index][0]
    hidden, chosen, factors = expert_inputs
    all_experts = split.experts_of(index)
    weights = split.renamed(index, fake_weights(stored))
    assert all_experts is not None
    pairs = most_pairs(len(chosen), chosen.shape[1], end - first, all_experts.count)
    with Tally(split.parallel) as tally:
        tally.leave_out([*weights.values(), *split.layers[index].parameters()])
        with all_experts.narrowed(weights, ExpertGroup(0, first, end)) as experts:
            states = hidden.new_empty(pairs, hidden.shape[1]).requires_grad_()
            pair_factors = factors.new_empty(pairs, 1).requires_grad_()
            gradient = states.detach().clone()
            sums = dict[nn.Parameter, Tensor]()
            leaves = [leaf for factor in experts.factors for leaf, _ in factor.sums(sums)]
            with torch.enable_grad(), split.autocast(autocast):
                output = experts.run((states, chosen.new_zeros(pairs, 1), pair_factors))
            formed = torch.autograd.grad(
                output, [states, pair_factors, *leaves], gradient, allow_unused=True
            )
            formed[0].to(torch.promote_types(hidden.dtype, torch.float32), copy=True)
    peak: int = tally.peak
    return peak


@dataclass(frozen=True)
class ExpertSummary:
    """What a plan tells of the stacked experts of a model. Nothing is known of what routers will
    choose.
    """

    layers: int  # that have experts
    count: int  # in the layer that has most
    active: int  # of these each token has so many
    together: int  # leased at once, at most
    reached: (
        float  # in that layer by the tokens of a step, were each chosen as often as every other
    )
    # bytes of all layers as they are stored, by part, and those of the adapters of experts
    parts: dict[str, int]

    @property
    def note(self) -> str:
        """Say it in a sentence."""
        return (
            f"experts: each token has {self.active:,} of {self.count:,}, and "
            f"{self.together:,} are leased together; if "
            "routers choose all alike, which is assumed, a step reaches "
            f"{self.reached:,.1f} of them in each layer"
        )


def expert_summary(
    blueprint: Blueprint, batch: MicroBatch, num_tokens: int
) -> ExpertSummary | None:
    """Return what a plan tells of a model's experts; None: it has none that are stacked, once in a
    layer. A micro-batch is `batch`, and a step has `num_tokens`."""
    experts_by_layer = {
        index: layer_experts
        for index in range(len(blueprint.layers))
        if (layer_experts := blueprint.split.experts_of(index))
    }
    if not experts_by_layer:
        return None
    largest = max(experts_by_layer, key=lambda index: experts_by_layer[index].count)
    count = experts_by_layer[largest].count
    active = active_experts(blueprint, largest, batch)
    reached = count * (1 - (1 - active / count) ** num_tokens)
    parts = Counter[str]()
    adapted = 0
    for index, layer in enumerate(blueprint.layers):
        stored = [(tensor.name, tensor.shape, tensor.nbytes) for tensor in layer.tensors]
        for expansion in layer.expansions:
            stored.append(
                (
                    expansion.target.name,
                    expansion.target.shape,
                    sum(part.nbytes for part in expansion.parts.values()),
                )
            )
        experts = experts_by_layer.get(index)
        block = "" if experts is None else experts.weights[0].rpartition(".")[0].rpartition(".")[0]
        for name, shape, nbytes in stored:
            if experts is None:
                part = "layers without experts"
            elif name in experts.weights:
                part = "experts"
            elif not name.startswith(f"{block}.") or not block:
                part = "attention and norms"
            else:
                part = "routers" if shape[0] == experts.count else "shared experts"
            parts[part] += nbytes
        if experts is not None:
            adapted += sum(
                parameter.numel()
                for parameter in experts.outer.parameters()
                if parameter.requires_grad
            )
    parts["adapters of experts"] = round(
        blueprint.adapter_bytes * adapted / max(1, blueprint.adapter_parameters)
    )
    return ExpertSummary(
        len(experts_by_layer), count, active, blueprint.experts or count, reached, dict(parts)
    )


def active_experts(blueprint: Blueprint, layer: int, batch: MicroBatch) -> int:
    """Return how many of a layer's experts each token has, as its router says on tensors without
    values.
    """
    split = Split(blueprint.model, load("cpu"), cast=blueprint.cast)
    batch = replace(batch, length=min(batch.length, LEARNING))  # as many as of any row
    seen = list[int]()

    def observe(hidden: Any, chosen: Any, *_: Any) -> Any:
        seen.append(chosen.shape[-1])
        return torch.zeros_like(hidden)

    with without_values(blueprint.model):
        learn(split, blueprint.layers)
        prelude = split.prelude(batch.inputs(), {})
        layer_inputs = given_of(split, blueprint.layers, prelude)
        experts = split.experts_of(layer)
        assert experts is not None
        with replaced({experts.module: observe}):
            split.run_layer(
                layer,
                fake_weights(blueprint.layers[layer]),
                prelude.calls[layer],
                layer_inputs[layer],
            )
    return seen[0]
