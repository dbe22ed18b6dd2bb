"""One optimizer step as the settings make it: its micro-batches, its bytes, its seconds, and how many make an epoch.

The cost of micro-batches of many rows is extrapolated from those of one row and of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from lema.config import LemaConfig
from lema.data import longest_row, needs_tokenizer, prepare_data
from lema.data.batches import share_of
from lema.engine.padding import padding_of
from lema.plan.blueprint import Blueprint
from lema.plan.cost import Demand, LayerCost
from lema.plan.machine import Machine
from lema.plan.trainable_bytes import TrainedBytes
from lema.plan.workload import HeadWork, LayerWork, MicroBatch, Workload
from lema.storage.modelfiles import load_tokenizer
from lema.stream.placement import LayerBytes

__all__ = [
    "Epoch",
    "StepShape",
    "Timings",
    "by_arithmetic",
    "demand_of",
    "epoch_of",
    "of_rows",
    "step_shape",
    "untimed",
]


@dataclass(frozen=True)
class StepShape:
    """An optimizer step: so many rows, computed a micro-batch at a time."""

    micro_batch: MicroBatch  # rows computed at once
    num_rows: int  # of the step

    @property
    def tokens(self) -> int:
        """Tokens of the step, those that pad rows among them."""
        return self.num_rows * self.micro_batch.length

    @property
    def num_micro_batches(self) -> float:
        """Micro-batches, the last of which may be a part of one."""
        return self.num_rows / self.micro_batch.rows


@dataclass(frozen=True)
class Timings:
    """Seconds of one micro-batch, and of what comes once in a step."""

    forward: tuple[float, ...]  # of each kind of layer
    recompute: tuple[float, ...]  # of running each kind of layer again, as far as the backward needs it
    backward: tuple[float, ...]  # of each kind of layer, without recomputing
    head: float  # head and loss, forward and backward
    expand: tuple[float, ...] = ()  # by kind of layer, once in each lease; empty: nothing is stored quantised
    prelude: float = 0.0  # before the layers
    optimizer: float = 0.0  # once in a step

    def times(self, factor: float) -> Timings:
        """Return the timings of micro-batches that have `factor` times the tokens."""

        def scaled(part: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * one for one in part)

        return Timings(
            scaled(self.forward),
            scaled(self.recompute),
            scaled(self.backward),
            factor * self.head,
            self.expand,
            factor * self.prelude,
            self.optimizer,
        )


def step_shape(config: LemaConfig, positions: int | None, processes: int = 1, parts: int = 1) -> StepShape:
    """Return the step that the settings ask for, every row as long as it may be.

    Args:
        positions: the longest row that the model takes; None: any.
        processes: that share a batch; the step is that of the first, which has most.
        parts: processes that hold one copy of the model together, and may each have a part of every row.

    Raises:
        ConfigError: `max_length` is more than the model's positions.
    """
    share = len(share_of(range(config.batch_size), 0, processes, config.micro_batch_size))
    rows = min(config.micro_batch_size or share, share)
    multiple = padding_of(config, parts, positions).multiple
    length = -(-longest_row(config.max_length, positions) // multiple) * multiple
    return StepShape(MicroBatch(rows, length), share * config.gradient_accumulation_steps)


def by_arithmetic(workload: Workload, layers: Sequence[LayerBytes], machine: Machine, itemsize: int) -> Timings:
    """Return the seconds that operations take at a machine's speed; a layer takes at least what launching it takes.

    Expanding quantised weights takes what reading them in the device's memory takes, and writing them there.

    Args:
        itemsize: bytes of one element of the weights as they are used.
    """
    speed = machine.flops(itemsize)
    firsts = [layers[workload.kinds.index(kind)] for kind in range(len(workload.works))]

    def seconds(flops: int) -> float:
        return max(flops / speed, machine.launch)

    return Timings(
        tuple(seconds(work.forward) for work in workload.works),
        tuple(seconds(work.recompute) for work in workload.works),
        tuple(seconds(work.backward) for work in workload.works),
        workload.head.flops / speed,
        tuple((one.nbytes + one.expanded_bytes) / machine.memory * bool(one.expansions) for one in firsts),
    )


def demand_of(
    layers: Sequence[LayerBytes],
    workload: Workload | None,
    timings: Timings | None,
    shape: StepShape | None,
    *,
    outside_bytes: int,
    adapter_bytes: int,
    lowest: int,
    shared: bool,
    trained: TrainedBytes | None = None,
) -> Demand:
    """Return what one step needs.

    Args:
        workload: of one micro-batch; None: weights alone are counted.
        timings: of one micro-batch; None: unknown.
        shape: of the step, given with `workload`.
        trained: weights of the layers that train themselves; None: none do. What they take of host memory is not in
            the demand yet.
    """
    times = 0.0 if shape is None else shape.num_micro_batches
    costs = []
    for index, layer in enumerate(layers):
        kind = 0 if workload is None else workload.kinds[index]
        spent = (0.0,) * 3 if timings is None else (timings.forward, timings.recompute, timings.backward)
        forward, recompute, backward = (one if isinstance(one, float) else times * one[kind] for one in spent)
        saved = 0 if workload is None else round(times * workload.works[kind].saved_bytes)
        expand = timings.expand[kind] if timings is not None and timings.expand else 0.0
        sizes = (layer.nbytes, layer.read_bytes, layer.nbytes, saved)
        micro = 0 if workload is None else min(saved, workload.works[kind].saved_bytes)
        gradients = 0 if trained is None else trained.layers[index].nbytes
        costs.append(LayerCost(*sizes, expand, forward, recompute, backward, micro, gradients))
    known = Demand(
        tuple(costs),
        lowest=lowest,
        outside_bytes=outside_bytes,
        adapter_bytes=adapter_bytes,
        expanded_bytes=max(layer.expanded_bytes for layer in layers),
        shared=shared,
    )
    return known if workload is None else _with_activations(known, workload, timings, times)


def untimed(demand: Demand) -> Demand:
    """Return a demand of which only the bytes are known."""
    layers = tuple(replace(layer, expand=0.0, forward=0.0, recompute=0.0, backward=0.0) for layer in demand.layers)
    return replace(demand, layers=layers, turn=0.0, rest=0.0)


def _with_activations(known: Demand, workload: Workload, timings: Timings | None, times: float) -> Demand:
    hidden = round(times * workload.hidden_bytes)
    known = replace(known, lowest=0 if workload.starts_below else known.lowest)
    # Beside each boundary waits the generator's state, which other devices have but a few bytes of; beside the hidden
    # state after the top layer, the gradients of its adapters.
    states = len(known.visited_twice) * workload.state_bytes * known.shared
    beside = workload.call_bytes + workload.of(known.top).gradient_bytes + states
    return replace(
        known,
        working_bytes=workload.working_bytes,
        # Hidden states of all micro-batches before a layer and after it; of one, the second is in working_bytes.
        flight_bytes=2 * hidden - min(hidden, workload.hidden_bytes) + round(times * beside),
        boundary_bytes=hidden,
        micro_boundary_bytes=min(hidden, workload.hidden_bytes),
        turn=0.0 if timings is None else times * timings.head,
        rest=0.0 if timings is None else times * timings.prelude + timings.optimizer,
    )


def of_rows(one: Workload, two: Workload, rows: int, rows_at_once: int) -> Workload:
    """Return what a micro-batch of `rows` costs in memory: every part grows evenly with them, but for the head.

    Args:
        rows_at_once: that the head's logits exist for; a micro-batch of more has no more of them.
    """
    return replace(
        one,
        works=tuple(_layer(first, second, rows) for first, second in zip(one.works, two.works, strict=True)),
        head=_head(one.head, two.head, min(rows, rows_at_once)),
        hidden_bytes=_grown(one.hidden_bytes, two.hidden_bytes, rows),
        call_bytes=_grown(one.call_bytes, two.call_bytes, rows),
        prelude_bytes=_grown(one.prelude_bytes, two.prelude_bytes, rows),
    )


def _layer(one: LayerWork, two: LayerWork, rows: int) -> LayerWork:
    return replace(
        one,
        saved_bytes=_grown(one.saved_bytes, two.saved_bytes, rows),
        working_bytes=_grown(one.working_bytes, two.working_bytes, rows),
        forward_bytes=_grown(one.forward_bytes, two.forward_bytes, rows),
    )


def _head(one: HeadWork, two: HeadWork, rows: int) -> HeadWork:
    return replace(one, working_bytes=_grown(one.working_bytes, two.working_bytes, rows))


def _grown(one: int, two: int, rows: int) -> int:
    return one + (rows - 1) * (two - one)


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    rows: int  # of the data
    tokens: int  # of these rows
    steps: int  # optimizer steps
    hours: float  # they take
    cost: float | None  # at the price given; None: none was


def epoch_of(
    config: LemaConfig,
    blueprint: Blueprint,
    shape: StepShape,
    price: float | None,
    step_seconds: Callable[[float], float],
    *,
    trust_remote_code: bool = False,
) -> Epoch | None:
    """Read the training data as training would, and say how long an epoch takes; None: the settings name no data.

    Args:
        step_seconds: given the part of a full step's tokens that a step has, returns its seconds.

    Raises:
        DataError: the data is missing or malformed.
    """
    if not config.train_data:
        return None
    data = prepare_data(
        config.train_data,
        _tokenizer(blueprint, trust_remote_code) if needs_tokenizer(config.train_data) else None,
        max_length=shape.micro_batch.length,
        overlong=config.overlong,
        vocab_size=blueprint.vocabulary or None,
    )
    rows, tokens = data.counts.rows, data.counts.tokens
    steps = math.ceil(rows / shape.num_rows)
    part = tokens / (rows * shape.micro_batch.length)
    hours = steps * step_seconds(part) / 3600
    return Epoch(rows, tokens, steps, hours, None if price is None else price * hours)


def _tokenizer(blueprint: Blueprint, trusted: bool) -> PreTrainedTokenizerBase:
    how = "put the tokenizer's files beside the weights, or leave train_data out of the plan"
    return load_tokenizer(blueprint.directory, trusted=trusted, how=how)
