"""Measures this machine in seconds: reading the model's own file, copying to the device, computing
layers.

One layer of each kind is timed, visited as training visits it. Weights are read only to time that,
unchecked.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lema.activations.stepstore import BoundaryArena
from lema.backend import Backend, Parallel
from lema.backend.hostmemory import memory_available
from lema.backend.interrupt import autograd_in_this_thread
from lema.backend.registry import workspace_memory
from lema.config import LemaConfig
from lema.engine.engine import Engine
from lema.engine.head.loss import CHUNK_TOKENS, LossChunks
from lema.engine.layers.layer_pass import LayerPass, layers_of
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.optim import make_optimizer
from lema.engine.trained_weights import TrainedWeights
from lema.model import Split
from lema.model.capture import replaced_tensors, tensors_in
from lema.model.flow import LayerCall
from lema.model.skeleton import main_dtype
from lema.model.state.snapshot import rehearsed
from lema.plan.blueprint import Blueprint
from lema.plan.cost import Overhead, Speeds
from lema.plan.machine import Machine
from lema.plan.work.step import LayerSeconds, StepShape, Timings, by_arithmetic
from lema.plan.work.workload import MicroBatch, Workload, calls_of
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes, SlotTensor
from lema.stream.speed import ENOUGH, REPEATS, Clock, median_seconds, read_speed, upload_speed

__all__ = ["calibrate", "estimate", "layer_seconds", "probe", "process_bytes"]


AT_ONCE = 3  # layers being read
# bytes of a layer that keeps the disk busy by itself: no memory is taken for more of them
ALONE = 256 << 20
NUM_VARIANTS = 3  # in which a layer is timed, which share the time of one measurement
PERIOD = 1 << 16  # elements drawn; larger tensors repeat them


def layer_seconds(
    split: Split,
    layers: Sequence[LayerBytes],
    index: int,
    call: LayerCall,
    hidden: Tensor,
    backend: Backend,
    clock: Clock = time.perf_counter,
    trained: Collection[str] = (),
    loaded_layers: Mapping[int, Tensor] = {},
) -> LayerSeconds:
    """Time one micro-batch in a layer, by the engine's own visits: leased, kept, recomputed and
    differentiated. The layer is read, unless it is one of the `loaded_layers`. Its `call` is of
    tensors without values; gradients of weights that train themselves are dropped."""
    call = call.mapped(lambda value: with_values(value, backend))
    layer_input = hidden.detach().requires_grad_()
    with (
        closing(
            LayerStream(
                layers, backend, prefetch_depth=0, host_cached={index}, loaded_layers=loaded_layers
            )
        ) as stream,
        closing(BoundaryArena(backend)) as arena,
        autograd_in_this_thread(),
    ):
        weights = TrainedWeights({index: trained}, lambda *_: None)
        engine = Engine(split, stream, backend, trained=weights)
        layers_here = [layers_of(engine)[index]]
        calls = [[call]] * split.num_layers

        def visits(*, recompute: bool, products: bool = False) -> Iterator[None]:
            boundaries = arena.step([layer_input], [index]) if recompute else None
            saving = Saving(boundaries, products=[index] if products else ())
            rows = Rows(calls, [layer_input])
            (output,) = LayerPass(
                engine, layers_here, rows, lowest=index, saving=saving
            ).hidden_states()
            yield
            torch.autograd.backward(output, torch.ones_like(output))
            yield

        forward, again = _phases(lambda: visits(recompute=True), backend, clock)
        _, backward = _phases(lambda: visits(recompute=False), backend, clock, cold=0)
        _, without_products = _phases(
            lambda: visits(recompute=True, products=True), backend, clock, cold=0
        )

        def lease() -> None:
            with stream.lease(index):
                pass

        expand = median_seconds(lease, backend, clock) if layers[index].expansions else 0.0
    for parameter in split.layers[index].parameters():
        parameter.grad = None
    seconds = (
        forward - expand,
        again - backward,
        backward - expand,
        expand,
        without_products - backward,
    )
    return LayerSeconds(*(max(0.0, duration) for duration in seconds))


def with_values(value: Any, backend: Backend) -> Any:
    """Give tensors without values memory on the device: masks let everything through."""
    if isinstance(value, Tensor):
        make = torch.zeros if value.dtype == torch.long else torch.ones
        real = make(value.shape, dtype=value.dtype, device=backend.device)
        return made_up(real) if value.is_floating_point() else real
    if isinstance(value, dict):
        return {key: with_values(item, backend) for key, item in value.items()}
    if isinstance(value, tuple | list) and any(True for _ in tensors_in(value)):
        return type(value)(with_values(item, backend) for item in value)
    return value


def _phases(
    visit: Callable[[], Iterator[None]], backend: Backend, clock: Clock, cold: int = 1
) -> tuple[float, float]:
    """Return the seconds of the two parts of a visit: medians, but for the first, `cold` visits."""
    measured: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(measured) <= cold or (
        len(measured) < cold + REPEATS and time.perf_counter() - began < ENOUGH / NUM_VARIANTS
    ):
        moments = [clock()]
        for _ in visit():
            backend.synchronize()
            moments.append(clock())
        measured.append((moments[1] - moments[0], moments[2] - moments[1]))
    first, second = zip(*measured[cold:], strict=True)
    return statistics.median(first), statistics.median(second)


def made_up(tensor: Tensor) -> Tensor:
    """Fill a tensor with small numbers: zeros, subnormals and overflows compute at another
    speed.
    """
    if tensor.is_floating_point():
        few = torch.randn(min(PERIOD, tensor.numel())).mul_(0.02)
        flat = tensor.detach().view(-1)
        for start in range(0, flat.numel(), PERIOD):
            part = flat[start : start + PERIOD]
            part.copy_(few[: part.numel()])
    elif not tensor.is_meta:
        tensor.detach().zero_()
    return tensor


ENOUGH_TOKENS = 512  # to time a layer with
# of a layer, or of a group of its experts, as far as handing them to the device takes time
OPERATIONS = 100
COPIED = 1 << 24  # elements, to see how fast memory is
# what lies outside the layers is made up only if it takes less than this part of free memory
FREE_PART = 4


def probe(
    blueprint: Blueprint,
    workload: Workload,
    config: LemaConfig,
    shape: StepShape,
    backend: Backend,
    clock: Clock = time.perf_counter,
) -> tuple[Machine, Timings]:
    """Measure this machine with one micro-batch of a run; the clock times computing alone, not
    reading and copying.
    """
    layers = blueprint.layers
    batch = shape.micro_batch
    dtype = main_dtype(blueprint.model)
    speeds, loaded_layers = _speeds(layers, backend)
    rate = _matmul(max(layers, key=lambda layer: layer.nbytes), batch.tokens, dtype, backend)
    split, firsts, layer_times, hidden = _one_of_each(
        blueprint.split,
        blueprint.parallel,
        layers,
        batch,
        backend,
        clock,
        blueprint.names,
        blank=True,
        loaded_layers=loaded_layers,
    )
    outside_bytes = blueprint.outside_bytes + (
        blueprint.head.nbytes if blueprint.head.module else 0
    )
    outer_seconds = workload.head.flops / rate, 0.0  # where they are too large to be made up
    if outside_bytes <= memory_available() / FREE_PART:
        outer_seconds = _outer_seconds(
            blueprint, split, config, batch, with_values(hidden, backend), backend, clock
        )
    timings = Timings(
        layer_times, *outer_seconds, _optimizer(blueprint, split, config, firsts, backend, clock)
    )
    half, single = (rate, math.nan) if dtype.itemsize < 4 else (math.nan, rate)
    total = backend.memory().total
    host = psutil.virtual_memory().total
    overhead = Overhead(*workspace_memory(backend))
    return Machine(backend.name, total, host, speeds, half, single, overhead=overhead), timings


def calibrate(
    blueprint: Blueprint, workload: Workload, shape: StepShape, backend: Backend
) -> tuple[Speeds, Timings]:
    """Measure what decides where memory is best spent, with a model that is about to train and is
    left as it is. A few rows of a micro-batch are timed, because all of them may take minutes, and
    memory that is not there."""
    model = blueprint.model
    layers = blueprint.layers
    batch = shape.micro_batch
    few = replace(batch, rows=min(batch.rows, math.ceil(ENOUGH_TOKENS / batch.length)))
    state = backend.rng_state()
    training = model.training
    with torch.random.fork_rng(devices=[]), rehearsed(model.modules()):
        speeds, loaded_layers = _speeds(layers, backend)
        _, _, layer_times, _ = _one_of_each(
            blueprint.split,
            backend.parallel,
            layers,
            few,
            backend,
            time.perf_counter,
            loaded_layers=loaded_layers,
        )
        layer_times = tuple(layer.times(batch.rows / few.rows) for layer in layer_times)
    model.train(training)
    backend.set_rng_state(state)
    rate = max(
        work.forward / max(layer_time.forward, 1e-9)
        for work, layer_time in zip(workload.works, layer_times, strict=True)
    )
    return speeds, Timings(layer_times, workload.head.flops / max(rate, 1.0))


def estimate(
    blueprint: Blueprint, workload: Workload, batch: MicroBatch, active: int, backend: Backend
) -> tuple[Machine, Timings]:
    """Estimate the seconds of layers whose experts are leased in groups, which are not timed
    because the device may not hold such a layer: experts compute as fast as one of them does with
    the tokens that it has if routers choose all alike, `active` for each token, and all else as the
    largest matrix does with a micro-batch."""
    split = blueprint.split
    layers = blueprint.layers
    dtype = main_dtype(blueprint.model)
    rate = _matmul(max(layers, key=lambda layer: layer.nbytes), batch.tokens, dtype, backend)
    memory = made_up(torch.empty(COPIED, dtype=torch.float32, device=backend.device))
    copied = 2 * memory.nbytes / median_seconds(memory.clone, backend)  # read and written
    half, single = (rate, math.nan) if dtype.itemsize < 4 else (math.nan, rate)
    total = backend.memory().total
    host = psutil.virtual_memory().total
    speeds, _ = _speeds(blueprint.leased, backend)
    few = torch.ones(8, 8, dtype=dtype, device=backend.device)
    launch = OPERATIONS * median_seconds(lambda: few @ few, backend)
    note = (
        "layers with experts in groups are not timed: seconds are estimated from products as "
        "large as theirs"
    )
    overhead = Overhead(*workspace_memory(backend))
    machine = Machine(
        backend.name,
        total,
        host,
        speeds,
        half,
        single,
        copied,
        launch,
        note=note,
        overhead=overhead,
    )
    timings = by_arithmetic(workload, layers, machine, dtype.itemsize)
    layer_times = list[LayerSeconds]()
    for kind, seconds in enumerate(timings.layers):
        index = workload.kinds.index(kind)
        if (experts := split.experts_of(index)) is None:
            layer_times.append(seconds)
            continue
        stacked = [tensor for tensor in _used(layers[index]) if tensor.name in experts.weights]
        expert_layer = replace(layers[index], tensors=tuple(stacked), expansions=())
        alone = _matmul(
            expert_layer, max(1, batch.tokens * active // experts.count), dtype, backend
        )
        expert_numel = sum(tensor.shape[1:].numel() for tensor in stacked)  # of one expert
        share = min(
            1.0, 2 * batch.tokens * active * expert_numel / max(workload.works[kind].forward, 1)
        )
        slower = share * rate / alone + 1 - share
        # because each is handed over by itself
        groups = launch * len(blueprint.group_bytes.get(index, [0])[1:])
        parts = seconds.forward, seconds.recompute, seconds.backward, seconds.without_products
        forward, again, back, without_products = (slower * part + groups for part in parts)
        layer_times.append(LayerSeconds(forward, again, back, seconds.expand, without_products))
    return machine, replace(timings, layers=tuple(layer_times))


def _one_of_each(
    seen: Split,
    parallel: Parallel,
    layers: Sequence[LayerBytes],
    batch: MicroBatch,
    backend: Backend,
    clock: Clock,
    trained: Sequence[Collection[str]] = (),
    *,
    blank: bool = False,
    loaded_layers: dict[int, Tensor],
) -> tuple[Split, tuple[int, ...], tuple[LayerSeconds, ...], Tensor]:
    """Return the model in its parts on a backend, one layer of each kind, their seconds, and what
    the head is given; `blank` adapters have no values yet. What a split has `seen` of the model
    without values need not be looked at again, and what is `loaded_layers` of layers is not read
    again."""
    if seen.keeps_tensors:  # which mean nothing in another call
        seen = Split(seen.model, backend, parallel=parallel, cast=seen.cast)
    firsts, calls, layer_inputs = calls_of(seen, layers, batch, trained, loaded_layers)
    for index in loaded_layers.keys() - set(firsts):
        del loaded_layers[index]  # because its memory may be needed for another
    split = Split(seen.model, backend, parallel=parallel, learned=seen.learned, cast=seen.cast)
    split.tiles.resize(batch.tile)
    split.model.train()
    for index in firsts:
        for parameter in split.layers[index].parameters():
            if blank and not parameter.is_meta:
                made_up(parameter)
    trained_names = trained or [()] * len(layers)
    layer_times = [
        layer_seconds(
            split,
            layers,
            index,
            calls[index],
            with_values(layer_inputs[index], backend),
            backend,
            clock,
            trained_names[index],
            loaded_layers,
        )
        for index in firsts
    ]
    return split, firsts, tuple(layer_times), layer_inputs[-1]


def process_bytes() -> int:
    """Return the memory that this process takes for itself: interpreter, libraries, module
    objects.
    """
    gc.collect()
    memory = psutil.Process().memory_info()
    # without the pages of files, where the system tells them
    return int(memory.rss - getattr(memory, "shared", 0))


def _speeds(layers: Sequence[LayerBytes], backend: Backend) -> tuple[Speeds, dict[int, Tensor]]:
    """Return the speeds of the disk that the layers are on, and of the link to the device; and the
    memory of the layer that was read last, by its number."""
    largest = max(layer.nbytes for layer in layers)
    began = time.perf_counter()
    count = 0
    buffers = [backend.host_buffer(largest) for _ in range(1 if largest > ALONE else AT_ONCE)]

    def repeated_layers() -> Iterator[LayerBytes]:
        nonlocal count
        while not count or time.perf_counter() - began < ENOUGH:
            count += 1
            yield layers[(count - 1) % len(layers)]

    disk = read_speed(repeated_layers(), buffers)
    last = (count - 1) % len(layers)
    loaded_layers = {last: buffers[(count - 1) % len(buffers)][: layers[last].nbytes]}
    return Speeds(
        disk, math.inf if backend.memory().shared else upload_speed(backend, largest)
    ), loaded_layers


def _used(layer: LayerBytes) -> tuple[SlotTensor, ...]:
    """Return a layer's weights as they are used."""
    return (*layer.tensors, *(expansion.target for expansion in layer.expansions))


def _matmul(layer: LayerBytes, tokens: int, dtype: torch.dtype, backend: Backend) -> float:
    """Return the operations per second of multiplying a micro-batch by the layer's largest
    matrix.
    """
    shapes = [tensor.shape[-2:] for tensor in _used(layer) if len(tensor.shape) > 1]
    rows, columns = max(shapes, key=lambda shape: shape.numel(), default=torch.Size((1024, 1024)))
    states = made_up(torch.empty(tokens, columns, dtype=dtype, device=backend.device))
    weight = made_up(torch.empty(rows, columns, dtype=dtype, device=backend.device))
    return 2 * tokens * rows * columns / median_seconds(lambda: states @ weight.t(), backend)


def _outer_seconds(
    blueprint: Blueprint,
    split: Split,
    config: LemaConfig,
    batch: MicroBatch,
    hidden: Tensor,
    backend: Backend,
    clock: Clock,
) -> tuple[float, float]:
    """Return the seconds of the head with the loss, and of what comes before the layers."""
    tokens = torch.ones(batch.rows, batch.length, dtype=torch.long, device=backend.device)
    model = blueprint.model
    left_out = {id(parameter) for parameter in split.layers.parameters()}
    # which are not loaded
    left_out |= {id(model.get_parameter(name)) for name in blueprint.tables.names}

    def with_memory(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) or not tensor.is_meta or id(tensor) in left_out:
            return tensor
        real = torch.empty(tensor.shape, dtype=tensor.dtype, device=backend.device)
        return nn.Parameter(made_up(real), requires_grad=False)

    with replaced_tensors(model, with_memory), autograd_in_this_thread():
        chunks = LossChunks(
            split.head, [tokens], config.loss_chunk_tokens or CHUNK_TOKENS, parallel=split.parallel
        )
        head = median_seconds(lambda: chunks.backward(0, hidden, lambda _: (), {}), backend, clock)
        prelude = median_seconds(lambda: split.prelude({"input_ids": tokens}, {}), backend, clock)
    return head, prelude


def _optimizer(
    blueprint: Blueprint,
    split: Split,
    config: LemaConfig,
    firsts: Sequence[int],
    backend: Backend,
    clock: Clock,
) -> float:
    """Return the seconds of the optimizer's step, from that over the adapters of one layer of
    each kind.
    """
    trained = blueprint.trained
    if trained is not None:  # in host memory, in fp32
        parameters = [
            nn.Parameter(made_up(torch.empty(max(trained.layers[index].count, 1))))
            for index in firsts
        ]
    else:
        parameters = [
            parameter
            for index in firsts
            for parameter in split.layers[index].parameters()
            if parameter.requires_grad
        ]
    if not parameters:
        return 0.0
    optimizer = make_optimizer(parameters, config)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    seconds = median_seconds(optimizer.step, backend, clock)
    for parameter in parameters:
        parameter.grad = None
    return (
        seconds * blueprint.adapter_parameters / sum(parameter.numel() for parameter in parameters)
    )
