"""One optimizer step as the settings make it: its micro-batches, its bytes, its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lema.activations.chunks.copies import chunks_on_device
from lema.backend import Exchange
from lema.config import LemaConfig
from lema.config.objective import OBJECTIVES
from lema.data.batches import dealt
from lema.engine.head.objectives import objective_of
from lema.engine.padding import padding_of
from lema.errors import ConfigError
from lema.plan.cost import Demand, LayerCost, RowsInHost
from lema.plan.machine import Machine
from lema.plan.work.trainable_bytes import TrainedBytes
from lema.plan.work.workload import MicroBatch, Workload
from lema.stream.placement import LayerBytes

__all__ = [
    "LayerSeconds",
    "StepShape",
    "Timings",
    "by_arithmetic",
    "demand_of",
    "micro_batch_of",
    "rows_each",
    "step_shape",
    "tokens_at_once",
]


PRODUCTS = 2  # by the head's weight, forward and backward; in pieces the first is formed twice


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
        """Micro-batches; the last may be a part of one."""
        return self.num_rows / self.micro_batch.rows


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch in one layer."""

    forward: float = 0.0
    recompute: float = 0.0  # of running it again, as far as the backward needs it
    backward: float = 0.0  # without that
    expand: float = 0.0  # of expanding weights that are stored quantised, once in each lease
    without_products: float = 0.0  # of running it again if its products by frozen weights are kept

    def times(self, factor: float) -> LayerSeconds:
        """Return the seconds of micro-batches that have `factor` times the tokens."""
        forward, recompute, backward, _, without_products = (
            factor * duration for duration in astuple(self)
        )
        return LayerSeconds(forward, recompute, backward, self.expand, without_products)


@dataclass(frozen=True)
class Timings:
    """Seconds of one micro-batch, and of what comes once in a step."""

    layers: tuple[LayerSeconds, ...]  # one of each kind
    head: float  # head and loss, forward and backward
    prelude: float = 0.0  # before the layers
    optimizer: float = 0.0  # once in a step

    def times(self, factor: float) -> Timings:
        """Return the timings of micro-batches that have `factor` times the tokens."""
        layers = tuple(layer.times(factor) for layer in self.layers)
        return replace(self, layers=layers, head=factor * self.head, prelude=factor * self.prelude)


def step_shape(
    config: LemaConfig, positions: int | None, processes: int = 1, parts: int = 1
) -> StepShape:
    """Return the step that the settings ask for, every row as long as it may be, of the first
    process, which has most.

    `positions` are the longest row that the model takes; None: any. The `parts` are processes that
    hold one copy of the model together, and may each have a part of every row. Raises `ConfigError`
    where `max_length` is more than the model's positions, or than `micro_batch_tokens`.
    """
    length = padding_of(config, parts, positions).longest(config)
    tokens = tokens_at_once(config, length)
    example_rows = rows_each(config)
    at_once = (
        None if config.micro_batch_size is None else max(1, config.micro_batch_size // example_rows)
    )
    share = example_rows * sum(map(len, dealt([1] * config.batch_size, 0, processes, at_once)))
    num_rows = share * config.gradient_accumulation_steps
    if tokens is None:
        return StepShape(
            micro_batch_of(config, min(config.micro_batch_size or share, share), length), num_rows
        )
    rows = -(-tokens // length)
    if config.tokens_per_step is not None:
        step_tokens = tokens if config.tokens_per_step == "auto" else config.tokens_per_step
        # with the padding that a quarter of each may be
        num_rows = -(-4 * step_tokens // (3 * length * processes))
    if processes > 1:
        num_rows += rows  # because micro-batches are dealt out whole
    return StepShape(micro_batch_of(config, min(rows, num_rows), length), num_rows)


def tokens_at_once(config: LemaConfig, length: int) -> int | None:
    """Return the tokens of a micro-batch, at most, those that pad rows among them; None: it is of
    rows, however long. Raises `ConfigError` where a row, which may have so many tokens as `length`,
    has more."""
    tokens = config.micro_batch_tokens
    if tokens is not None and tokens < length:
        what = f"a row may have {length:,} tokens, and a micro-batch {tokens:,}"
        how = f"set it to {length} or more, lower max_length, or leave it out"
        raise ConfigError(what, where="micro_batch_tokens", how=how)
    return length if tokens is None and config.tokens_per_step is not None else tokens


def micro_batch_of(config: LemaConfig, rows: int, length: int) -> MicroBatch:
    """Return a micro-batch of a run: what goes beside its rows is the objective's."""
    objective = objective_of(config)
    at_once: dict[str, Any] = {
        "chunk": config.chunk_tokens,
        "tile": config.tile_tokens,
        "host_keys": config.keys_values == "host",
    }
    if objective is None:
        return MicroBatch(rows, length, packed=bool(config.packing), **at_once)
    more = objective.reference + 2 * objective.mismatched
    return MicroBatch(rows, length, more, settled=True, **at_once)


def rows_each(config: LemaConfig) -> int:
    """Return how many rows each example of a batch has."""
    return 2 if OBJECTIVES[config.objective].examples == "pairs" else 1


def by_arithmetic(
    workload: Workload, layers: Sequence[LayerBytes], machine: Machine, itemsize: int
) -> Timings:
    """Return the seconds that operations take at a machine's speed; a layer takes at least what
    launching it takes. Collectives take the machine's latency each, and the time of their bytes.
    Expanding quantised weights takes what reading them in the device's memory takes, and writing
    them there; an element of them has `itemsize` bytes as it is used."""
    speed = machine.flops(itemsize)
    layer_seconds = []
    for kind, work in enumerate(workload.works):
        first = layers[workload.kinds.index(kind)]
        expand = (first.nbytes + first.expanded_bytes) / machine.memory if first.expansions else 0.0
        flops = (
            work.forward,
            work.recompute,
            work.backward,
            max(0, work.recompute - work.product_flops),
        )
        parts = zip(flops, (*work.exchanges, work.exchanges[1]), strict=True)
        # One after the other, because what follows a collective needs what it brings.
        forward, again, back, without_products = (
            max(operations / speed, work.launches * machine.launch) + machine.exchanging(sent)
            for operations, sent in parts
        )
        layer_seconds.append(LayerSeconds(forward, again, back, expand, without_products))
    # the gradients of all in one collective
    reduced = [workload.of(layer).reduced for layer in range(len(layers))]
    once = Exchange(
        max(exchange.count for exchange in reduced), sum(exchange.nbytes for exchange in reduced)
    )
    head = workload.head.flops / speed + machine.exchanging(workload.head.exchange)
    return Timings(
        tuple(layer_seconds), head, machine.exchanging(workload.entered), machine.exchanging(once)
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
    pieces: Sequence[LayerBytes] = (),
    groups: Mapping[int, Sequence[int]] | None = None,
) -> Demand:
    """Return what one step needs, but for what weights that train themselves take of host memory.

    The `workload` is of one micro-batch, given with the `shape` of the step; None: weights alone
    are counted. The `timings` are of one, too; None: unknown. The `pieces` are of the head's
    weight, where they are leased after the layers. The `groups` are bytes of layers whose experts
    are leased in groups: of what else they have, then of these.
    """
    times = 0.0 if shape is None else shape.num_micro_batches
    costs = []
    for index, layer in enumerate(layers):
        kind = 0 if workload is None else workload.kinds[index]
        spent = LayerSeconds() if timings is None else timings.layers[kind].times(times)
        saved = 0 if workload is None else round(times * workload.works[kind].saved_bytes)
        parts = (groups or {}).get(index, (layer.nbytes,))
        uploaded = sum(parts) if shared or len(parts) > 1 else layer.upload_bytes
        sizes = (sum(parts), layer.read_bytes, uploaded, saved)
        forward = spent.forward * (1 if shape is None else 1 + shape.micro_batch.forward_only)
        seconds = (spent.expand, forward, spent.recompute, spent.backward)
        micro = 0 if workload is None else min(saved, workload.works[kind].saved_bytes)
        gradients = 0 if trained is None else trained.layers[index].nbytes
        products = 0 if workload is None else round(times * workload.works[kind].product_bytes)
        costs.append(
            LayerCost(
                *sizes,
                *seconds,
                micro,
                gradients,
                tuple(parts[1:]),
                products,
                spent.without_products,
            )
        )
    product = 0.0 if timings is None else times * timings.head / PRODUCTS
    costs += _piece_costs(pieces, product, shared=shared)
    demand = Demand(
        tuple(costs),
        lowest=lowest,
        pieces=len(pieces),
        outside_bytes=outside_bytes,
        adapter_bytes=adapter_bytes,
        expanded_bytes=max(layer.expanded_bytes for layer in layers),
        shared=shared,
    )
    if workload is None or shape is None:
        return demand
    return _with_activations(demand, workload, timings, shape)


def _piece_costs(pieces: Sequence[LayerBytes], product: float, *, shared: bool) -> list[LayerCost]:
    """Return what pieces of the head cost, whose products take `product` seconds together."""
    costs = []
    for piece in pieces:
        part = product * piece.nbytes / sum(head_piece.nbytes for head_piece in pieces)
        seconds = (0.0, part, part, part)
        uploaded = piece.nbytes if shared else piece.upload_bytes
        costs.append(LayerCost(piece.nbytes, piece.read_bytes, uploaded, 0, *seconds))
    return costs


def _with_activations(
    demand: Demand, workload: Workload, timings: Timings | None, shape: StepShape
) -> Demand:
    times = shape.num_micro_batches
    batch = shape.micro_batch
    hidden = round(times * workload.hidden_bytes)
    demand = replace(demand, lowest=0 if workload.starts_below else demand.lowest)
    # Beside each boundary waits the generator's state, which other devices have but a few bytes of;
    # beside the hidden state after the top layer, the gradients of its adapters.
    states = len(demand.keeping) * workload.state_bytes * demand.shared
    extra_bytes = workload.call_bytes + states
    head_seconds = 0.0 if timings is None else times * timings.head
    if demand.pieces:
        # the last piece's second product: its other seconds are its own
        head_seconds /= PRODUCTS * demand.pieces
    else:
        extra_bytes += workload.of(demand.top).gradient_bytes
    # rows beside those that train have their part of the head's forward
    head_seconds *= 1 + batch.forward_only / 3
    # in chunks it runs once to form the loss, and again to be differentiated
    if (batch.settled or batch.is_cut) and timings is not None:
        head_seconds += times * timings.layers[workload.kinds[-1]].forward
    in_host = None
    if workload.in_host is not None and not demand.pieces:
        own_bytes = extra_bytes - workload.call_bytes + workload.in_host.call_bytes
        chunk_bytes = workload.in_host.chunk_bytes
        copied = 0 if demand.shared else chunks_on_device(chunk_bytes)
        in_host = RowsInHost(
            workload.in_host.working_bytes(times),
            flight_bytes=round(times * own_bytes) + copied,
            # the input of a layer and its output, of one micro-batch; of others one of both
            host_bytes=hidden + min(hidden, workload.hidden_bytes),
            chunk_bytes=chunk_bytes,
        )
    return replace(
        demand,
        in_host=in_host,
        paged_bytes=workload.paged_bytes,
        working_bytes=workload.in_pieces(times) if demand.pieces else workload.working_bytes(times),
        # Hidden states of all micro-batches before a layer and after it; of one, the second is in
        # working_bytes.
        flight_bytes=(2 + batch.forward_only) * hidden
        - min(hidden, workload.hidden_bytes)
        + round(times * extra_bytes),
        boundary_bytes=hidden,
        micro_boundary_bytes=min(hidden, workload.hidden_bytes),
        head_seconds=head_seconds,
        outside_seconds=0.0 if timings is None else times * timings.prelude + timings.optimizer,
    )
