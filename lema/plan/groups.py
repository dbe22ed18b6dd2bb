"""Experts, as a plan has them: whether groups of them may be leased, what these take, which sizes are tried, and what
is told of a model's experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lema.backend import load
from lema.backend.registry import has_addresses
from lema.errors import ConfigError
from lema.model import Split
from lema.model.capture import replaced
from lema.plan.workload import (
    MicroBatch,
    Workload,
    cost_kinds,
    fake_weights,
    given_of,
    layer_work,
    learn,
    one_of_each,
    without_values,
)

if TYPE_CHECKING:
    from lema.plan.blueprint import Blueprint
    from lema.plan.planner import Planner

__all__ = ["ExpertsTold", "active_experts", "experts_told", "waiting_bytes", "with_groups", "with_waiting"]

SETTING = "experts_per_slot"
# Hidden states of a micro-batch that wait beside what a graph keeps: its input, what experts are given and make, and
# the gradients of these; sums are in fp32.
STATES = 8


def with_groups(planner: Planner) -> Iterator[Planner]:
    """Yield the planner with whole layers, then, where the settings leave it open, with groups of a layer's experts,
    the largest first; or with those that are asked for. `ConfigError`: something else does not go with these."""
    blueprint, asked, work = planner.blueprint, planner.config.experts_per_slot, planner.workload
    cut = blueprint.cut_experts
    if asked is None or (asked == "auto" and planner.config.device_memory is None) or cut is None:
        yield planner
        return
    most, why = _most_experts(blueprint), _why_whole(planner)
    sizes = [asked] if isinstance(asked, int) else [most >> halved for halved in range(1, most.bit_length())]
    if asked == "auto":
        yield planner
    elif why:
        raise ConfigError(f"experts cannot be leased in groups: {why}", where=SETTING, how="set it to null")
    for size in sizes if not why else ():
        try:
            parts = cut(size)
        except ConfigError:
            if asked == "auto":
                return
            raise
        other = replace(planner, blueprint=replace(blueprint, parts=parts, experts=size))
        yield other if work is None else replace(other, workload=with_waiting(other, planner.shape.micro_batch, work))


def _most_experts(blueprint: Blueprint) -> int:
    """Return how many stacked experts a layer has, at most."""
    found = map(blueprint.split.experts_of, range(blueprint.split.num_layers))
    return max((one.count for one in found if one is not None), default=0)


def with_waiting(planner: Planner, batch: MicroBatch, work: Workload) -> Workload:
    """Return what a micro-batch costs, with what waits of it for experts in groups if the planner has some."""
    if planner.blueprint.parts is None:
        return work
    if batch not in (known := planner.blueprint.waiting):
        known[batch] = waiting_bytes(planner.blueprint, batch)
    return replace(work, apart=known[batch])


def _why_whole(planner: Planner) -> str:
    config, blueprint, backend = planner.config, planner.blueprint, planner.backend
    others = {
        "torch_compile compiles whole layers": config.torch_compile,
        "shard_weights gathers whole layers": config.shard_weights,
        "gradient_checkpointing: false keeps the graphs of whole layers": config.gradient_checkpointing is False,
        "activation_offloading keeps the graphs of whole layers": config.offloading_tier is not None
        and config.activation_offloading != "hidden_states",
        f"objective: {config.objective} has rows beside those that train": config.objective != "sft",
        f"a {type(blueprint.model).__name__} has no stacked experts, once in a layer": not _most_experts(blueprint),
        "several processes hold the model together": blueprint.parallel.size > 1,
        "weights of the layers train": blueprint.trained is not None,
        "this device compiles what it runs, for every size of it": backend is not None
        and not has_addresses(backend.device),
    }
    return next((what for what, found in others.items() if found), "")


def waiting_bytes(blueprint: Blueprint, batch: MicroBatch) -> int:
    """Return the most that waits of one micro-batch in the backward of a layer, while its experts are leased in groups:
    what the layer's graph keeps without them, and hidden states. `ModelError`: as `measure`."""
    model, layers = blueprint.model, blueprint.layers
    split, found = Split(model, load("cpu")), 0
    with without_values(model):
        learn(split, layers)
        prelude = split.prelude(batch.inputs(), {})
        given = given_of(split, layers, prelude)
        for index in one_of_each(cost_kinds(split, layers), given):
            if (experts := split.experts_of(index)) is not None:
                with replaced({experts.module: lambda hidden, *_: torch.zeros_like(hidden)}):
                    work = layer_work(split, index, layers[index], prelude.calls[index], given[index : index + 2], ())
                found = max(found, work.saved_bytes + STATES * given[index].nbytes)
    return found


@dataclass(frozen=True)
class ExpertsTold:
    """What a plan tells of the stacked experts of a model. Nothing is known of what routers will choose."""

    layers: int  # that have experts
    count: int  # in the layer that has most
    active: int  # of these each token has so many
    together: int  # leased at once, at most
    reached: float  # in that layer by the tokens of a step, were each chosen as often as every other
    parts: dict[str, int]  # bytes of all layers as they are stored, by part, and those of the adapters of experts

    @property
    def note(self) -> str:
        """Say it in a sentence."""
        return (
            f"experts: each token has {self.active:,} of {self.count:,}, and {self.together:,} are leased together; if "
            f"routers choose all alike, which is assumed, a step reaches {self.reached:,.1f} of them in each layer"
        )


def experts_told(planner: Planner) -> ExpertsTold | None:
    """Return what a plan tells of a model's experts; None: it has none that are stacked, once in a layer, or what it
    computes is not known."""
    blueprint, tokens = planner.blueprint, planner.shape.tokens
    found = {index: one for index in range(len(blueprint.layers)) if (one := blueprint.split.experts_of(index))}
    if not found or planner.workload is None:
        return None
    largest = max(found, key=lambda index: found[index].count)
    count, active = found[largest].count, active_experts(blueprint, largest, planner.shape.micro_batch)
    reached = count * (1 - (1 - active / count) ** tokens)
    parts, adapted = Counter[str](), 0
    for index, layer in enumerate(blueprint.layers):
        stored = [(one.name, one.shape, one.nbytes) for one in layer.tensors]
        for one in layer.expansions:
            stored.append((one.placed.name, one.placed.shape, sum(part.nbytes for part in one.parts.values())))
        experts = found.get(index)
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
        own = [] if experts is None else experts.outer.parameters()
        adapted += sum(one.numel() for one in own if one.requires_grad)
    parts["adapters of experts"] = round(blueprint.adapter_bytes * adapted / max(1, blueprint.adapter_parameters))
    return ExpertsTold(len(found), count, active, blueprint.experts or count, reached, dict(parts))


def active_experts(blueprint: Blueprint, layer: int, batch: MicroBatch) -> int:
    """Return how many of a layer's experts each token has, as its router says on tensors without values."""
    split, seen = Split(blueprint.model, load("cpu")), list[int]()

    def look(hidden: Any, chosen: Any, *_: Any) -> Any:
        seen.append(chosen.shape[-1])
        return torch.zeros_like(hidden)

    with without_values(blueprint.model):
        learn(split, blueprint.layers)
        prelude = split.prelude(batch.inputs(), {})
        given = given_of(split, blueprint.layers, prelude)
        experts = split.experts_of(layer)
        assert experts is not None
        with replaced({experts.module: look}):
            split.run_layer(layer, fake_weights(blueprint.layers[layer]), prelude.calls[layer], given[layer])
    return seen[0]
