"""Measures this machine in seconds: reading the model's own file, copying to the device, computing layers.

One layer of each kind is timed, visited as training visits it. Weights are read only to time the reading, and are not
checked.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.activations.kept import BoundaryArena
from lema.backend import Backend
from lema.backend.hostmemory import memory_available
from lema.config import LemaConfig
from lema.engine.head.loss import LossChunks
from lema.engine.optim import make_optimizer
from lema.engine.trained_weights import TrainedWeights
from lema.engine.visit import Engine, visit
from lema.model import Split
from lema.model.capture import replaced_tensors, tensors_in
from lema.model.flow import LayerCall
from lema.model.skeleton import main_dtype
from lema.plan.blueprint import Blueprint
from lema.plan.cost import Speeds
from lema.plan.machine import Machine
from lema.plan.step import LayerSeconds, StepShape, Timings
from lema.plan.workload import Workload, calls_of
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.speed import ENOUGH, REPEATS, Clock, median_seconds, read_speed, upload_speed

__all__ = ["calibrate", "layer_seconds", "made_up", "probe", "process_bytes", "with_values"]


AT_ONCE = 3  # layers being read
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
) -> LayerSeconds:
    """Time one micro-batch in a layer, by the engine's own visits: leased, kept, recomputed and differentiated.

    Args:
        index: of the layer, which is read.
        call: of it, tensors without values.
        trained: those of its weights that train themselves; their gradients are dropped.
    """
    call, given = call.mapped(lambda value: with_values(value, backend)), hidden.detach().requires_grad_()
    with (
        closing(LayerStream(layers, backend, prefetch_depth=0, host_cached={index})) as stream,
        closing(BoundaryArena(backend)) as arena,
    ):
        engine = Engine(split, stream, backend)
        engine.trained = TrainedWeights({index: trained}, lambda *_: None)

        def visits(*, recompute: bool) -> Iterator[None]:
            boundaries = arena.step([given], [index]) if recompute else None
            (output,) = visit(engine, index, [call], [given], boundaries)
            yield
            torch.autograd.backward(output, torch.ones_like(output))
            yield

        forward, again = _phases(lambda: visits(recompute=True), backend, clock)
        _, backward = _phases(lambda: visits(recompute=False), backend, clock)

        def lease() -> None:
            with stream.lease(index):
                pass

        expand = median_seconds(lease, backend, clock) if layers[index].expansions else 0.0
    for parameter in split.layers[index].parameters():
        parameter.grad = None
    return LayerSeconds(max(0.0, forward - expand), max(0.0, again - backward), max(0.0, backward - expand), expand)


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


def _phases(visit: Callable[[], Iterator[None]], backend: Backend, clock: Clock) -> tuple[float, float]:
    """Return the seconds of the two parts of a visit: medians, the first visit left out."""
    measured: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(measured) < 2 or (len(measured) <= REPEATS and time.perf_counter() - began < ENOUGH):
        moments = [clock()]
        for _ in visit():
            backend.synchronize()
            moments.append(clock())
        measured.append((moments[1] - moments[0], moments[2] - moments[1]))
    first, second = zip(*measured[1:], strict=True)
    return statistics.median(first), statistics.median(second)


def made_up(tensor: Tensor) -> Tensor:
    """Fill a tensor with small numbers: zeros, subnormals and overflows compute at another speed."""
    if tensor.is_floating_point():
        few = torch.randn(min(PERIOD, tensor.numel())).mul_(0.02)
        flat = tensor.detach().view(-1)
        for start in range(0, flat.numel(), PERIOD):
            part = flat[start : start + PERIOD]
            part.copy_(few[: part.numel()])
    elif not tensor.is_meta:
        tensor.detach().zero_()
    return tensor


FREE_PART = 4  # what lies outside the layers is made up only if it takes less than this part of free memory


def probe(
    blueprint: Blueprint,
    workload: Workload,
    config: LemaConfig,
    shape: StepShape,
    backend: Backend,
    clock: Clock = time.perf_counter,
) -> tuple[Machine, Timings]:
    """Measure this machine with one micro-batch of a run; the clock times computing alone, not reading and copying."""
    split = Split(blueprint.model, backend, parallel=blueprint.parallel)
    speeds = _speeds(blueprint.layers, backend)
    largest = max(blueprint.layers, key=lambda layer: layer.nbytes)
    total, host = backend.memory().total, psutil.virtual_memory().total
    dtype = main_dtype(blueprint.model)
    rate = _matmul(largest, shape.micro_batch.tokens, dtype, backend)
    timings = _Timer(blueprint, config, shape, backend, split, clock).timings(workload, rate)
    half = dtype.itemsize < 4
    return Machine(backend.name, total, host, speeds, rate if half else math.nan, math.nan if half else rate), timings


def calibrate(
    model: PreTrainedModel, layers: Sequence[LayerBytes], workload: Workload, shape: StepShape, backend: Backend
) -> tuple[Speeds, Timings]:
    """Measure what decides where memory is best spent, with a model that is about to train and is left as it is."""
    state, training = backend.rng_state(), model.training
    with torch.random.fork_rng(devices=[]):
        speeds = _speeds(layers, backend)
        split = Split(model, backend)
        firsts, calls, given = calls_of(split, layers, shape.micro_batch)
        model.train()
        found = [
            layer_seconds(split, layers, index, calls[index], with_values(given[index], backend), backend)
            for index in firsts
        ]
    model.train(training)
    backend.set_rng_state(state)
    rate = max(work.forward / max(one.forward, 1e-9) for work, one in zip(workload.works, found, strict=True))
    return speeds, Timings(tuple(found), workload.head.flops / max(rate, 1.0))


def process_bytes() -> int:
    """Return the memory that this process takes for itself: interpreter, libraries, module objects."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        resident: int = psutil.Process().memory_info().rss
        return resident
    anonymous = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024


def _speeds(layers: Sequence[LayerBytes], backend: Backend) -> Speeds:
    """Return the speeds of the disk that the layers are on, and of the link to the device."""
    largest, began = max(layer.nbytes for layer in layers), time.perf_counter()
    buffers = [backend.host_buffer(largest) for _ in range(AT_ONCE)]
    some = takewhile(lambda _: time.perf_counter() - began < ENOUGH, cycle(layers))
    return Speeds(read_speed(some, buffers), math.inf if backend.memory().shared else upload_speed(backend, largest))


def _matmul(layer: LayerBytes, tokens: int, dtype: torch.dtype, backend: Backend) -> float:
    """Return the operations per second of multiplying a micro-batch by the layer's largest matrix."""
    placed = (*layer.tensors, *(expansion.placed for expansion in layer.expansions))
    shapes = [tensor.shape[-2:] for tensor in placed if len(tensor.shape) > 1]
    rows, columns = max(shapes, key=lambda shape: shape.numel(), default=torch.Size((1024, 1024)))
    states = made_up(torch.empty(tokens, columns, dtype=dtype, device=backend.device))
    weight = made_up(torch.empty(rows, columns, dtype=dtype, device=backend.device))
    return 2 * tokens * rows * columns / median_seconds(lambda: states @ weight.t(), backend)


@dataclass(frozen=True)
class _Timer:
    """Times the parts of a step."""

    blueprint: Blueprint
    config: LemaConfig
    shape: StepShape
    backend: Backend
    split: Split
    clock: Clock

    def timings(self, workload: Workload, rate: float) -> Timings:
        blueprint = self.blueprint
        names = () if blueprint.trained is None else blueprint.trained.names
        firsts, calls, given = calls_of(self.split, blueprint.layers, self.shape.micro_batch, names)
        blueprint.model.train()
        hidden = with_values(given[-1], self.backend)
        for index in firsts:
            for parameter in self.split.layers[index].parameters():
                if not parameter.is_meta:  # the adapter's, which has memory and no values yet
                    made_up(parameter)
        found = [
            layer_seconds(
                self.split,
                blueprint.layers,
                index,
                calls[index],
                with_values(given[index], self.backend),
                self.backend,
                self.clock,
                names[index] if names else (),
            )
            for index in firsts
        ]
        return Timings(tuple(found), *self._ends(workload, hidden, rate), self._optimizer(firsts))

    def _ends(self, workload: Workload, hidden: Tensor, rate: float) -> tuple[float, float]:
        """Return the seconds of the head with the loss, and of what comes before the layers; of a model whose ends are
        too large to be made up, what the head's operations take."""
        whole = self.blueprint.outside_bytes + (self.blueprint.head.nbytes if self.blueprint.head.module else 0)
        if whole > memory_available() / FREE_PART:
            return workload.head.flops / rate, 0.0
        batch = self.shape.micro_batch
        tokens = torch.ones(batch.rows, batch.length, dtype=torch.long, device=self.backend.device)
        model, tables = self.blueprint.model, self.blueprint.tables.names
        left_out = {id(parameter) for parameter in self.split.layers.parameters()}
        left_out |= {id(model.get_parameter(name)) for name in tables}  # which are not loaded

        def with_memory(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter) or not tensor.is_meta or id(tensor) in left_out:
                return tensor
            real = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.backend.device)
            return nn.Parameter(made_up(real), requires_grad=False)

        with replaced_tensors(model, with_memory):
            chunks = LossChunks(self.split.head, [tokens], self.config.loss_chunk_tokens)
            head = median_seconds(lambda: chunks.backward(0, hidden, lambda _: (), {}), self.backend, self.clock)
            prelude = median_seconds(lambda: self.split.prelude({"input_ids": tokens}, {}), self.backend, self.clock)
        return head, prelude

    def _optimizer(self, firsts: Sequence[int]) -> float:
        """Return the seconds of the optimizer's step, from that over the adapters of one layer of each kind."""
        trained = self.blueprint.trained
        if trained is not None:  # in host memory, in fp32
            parameters = [nn.Parameter(made_up(torch.empty(max(trained.layers[index].count, 1)))) for index in firsts]
        else:
            parameters = [one for index in firsts for one in self.split.layers[index].parameters() if one.requires_grad]
        if not parameters:
            return 0.0
        optimizer = make_optimizer(parameters, self.config)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        seconds = median_seconds(optimizer.step, self.backend, self.clock)
        for parameter in parameters:
            parameter.grad = None
        return seconds * self.blueprint.adapter_parameters / sum(parameter.numel() for parameter in parameters)
