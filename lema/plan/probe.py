"""What this machine reaches, found in seconds: reading the model's own file, copying to the device, computing layers.

Layers are computed as training computes them, one of each kind, with weights that are made up: their values decide
nothing about the time. Weights are read only to see how fast they come, and are not looked at.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lema.backend import Backend
from lema.config import LemaConfig
from lema.flow import tensors_in
from lema.layercall import LayerCall
from lema.loss import LossChunks
from lema.optim import make_optimizer
from lema.plan.blueprint import Blueprint
from lema.plan.machine import Machine
from lema.plan.step import StepShape, Timings
from lema.plan.workload import Workload, calls_of
from lema.recompute import Graph
from lema.split import Split
from lema.stream.cost import Speeds
from lema.stream.lease import Lease
from lema.stream.placement import LayerBytes, views
from lema.stream.reader import LayerReader, Ticket

__all__ = ["probe", "process_bytes"]

ENOUGH = 1.0  # seconds that one measurement takes, about
REPEATS = 5
PERIOD = 1 << 16  # elements drawn; larger tensors repeat them
FREE_PART = 4  # what lies outside the layers is made up only if it takes less than this part of free memory


def probe(
    blueprint: Blueprint, workload: Workload, config: LemaConfig, shape: StepShape, backend: Backend
) -> tuple[Machine, Timings]:
    """Measure this machine with one micro-batch of a run.

    Args:
        blueprint: the model, its adapter on the backend's device.
        workload: what a micro-batch costs.
        config: of the run.
        shape: of its steps.
        backend: the device.
    """
    split = Split(blueprint.model, backend)
    largest = max(blueprint.layers, key=lambda layer: layer.nbytes)
    shared = backend.device.type == "cpu"
    speeds = Speeds(_disk(blueprint.layers, backend), math.inf if shared else _link(largest, backend))
    total, host = backend.memory().total, psutil.virtual_memory().total
    dtype = blueprint.model.dtype
    rate = _matmul(largest, shape.micro_batch.tokens, dtype, backend)
    timings = _Timer(blueprint, config, shape, backend, split).timings(workload, rate)
    half = dtype.itemsize < 4
    return Machine(backend.name, total, host, speeds, rate if half else math.nan, math.nan if half else rate), timings


def process_bytes() -> int:
    """Return the memory that this process takes for itself: interpreter, libraries, module objects."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        resident: int = psutil.Process().memory_info().rss
        return resident
    anonymous = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024


def _disk(layers: Sequence[LayerBytes], backend: Backend) -> float:
    """Return how fast the reader reads layers, some at a time, in bytes per second."""
    reader, under_way = LayerReader(), deque[Ticket]()
    buffers = deque(backend.host_buffer(max(layer.nbytes for layer in layers)) for _ in range(3))
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < ENOUGH or len(under_way):
        if len(under_way) == len(buffers) or time.perf_counter() - began >= ENOUGH:
            under_way.popleft().wait()
        else:
            under_way.append(reader.submit(layers[number % len(layers)], buffers[0]))
            buffers.rotate(-1)
            number += 1
    speed = reader.bytes_read / (time.perf_counter() - began)
    reader.close()
    return speed


def _link(layer: LayerBytes, backend: Backend) -> float:
    """Return how fast a layer is copied to the device, in bytes per second."""
    buffer, slots = backend.host_buffer(layer.nbytes), backend.device_slots(layer.nbytes, 1)

    def copy() -> None:
        upload = slots.upload(buffer)
        upload.wait()
        upload.release()

    return layer.nbytes / _seconds(copy, backend)


def _matmul(layer: LayerBytes, tokens: int, dtype: torch.dtype, backend: Backend) -> float:
    """Return the operations per second of multiplying a micro-batch by the layer's largest matrix."""
    shapes = [tensor.shape[-2:] for tensor in layer.tensors if len(tensor.shape) > 1]
    rows, columns = max(shapes, key=lambda shape: shape.numel(), default=torch.Size((1024, 1024)))
    states = _made_up(torch.empty(tokens, columns, dtype=dtype, device=backend.device))
    weight = _made_up(torch.empty(rows, columns, dtype=dtype, device=backend.device))
    return 2 * tokens * rows * columns / _seconds(lambda: states @ weight.t(), backend)


class _Timer:
    """Times the parts of a step."""

    def __init__(
        self, blueprint: Blueprint, config: LemaConfig, shape: StepShape, backend: Backend, split: Split
    ) -> None:
        self.blueprint, self.config, self.shape, self.backend, self.split = blueprint, config, shape, backend, split

    def timings(self, workload: Workload, rate: float) -> Timings:
        blueprint = self.blueprint
        firsts, calls, like = calls_of(self.split, blueprint.layers, self.shape.micro_batch)
        blueprint.model.train()
        hidden = self._real(like)
        found = [self._layer(index, call, hidden) for index, call in zip(firsts, calls, strict=True)]
        forward, recompute, backward = zip(*found, strict=True)
        head, prelude = self._ends(workload, hidden, rate)
        return Timings(forward, recompute, backward, head, prelude, self._optimizer(firsts))

    def _layer(self, index: int, call: LayerCall, hidden: Tensor) -> tuple[float, float, float]:
        """Return the seconds of a layer's forward, of running it again, and of its backward."""
        layer, backend, split = self.blueprint.layers[index], self.backend, self.split
        source = backend.host_buffer(layer.nbytes)
        slot = backend.device_slots(layer.nbytes, 1).upload(source).wait()
        lease = Lease(index, slot, views(slot, layer))
        for tensor in (*lease.weights.values(), *split.layers[index].parameters()):
            if not tensor.is_meta:
                _made_up(tensor)
        given, gradient = hidden.detach().requires_grad_(), torch.ones_like(hidden)
        args, kwargs = call.others()
        plain = LayerCall(self._real(args), self._real(kwargs), call.hidden_is_keyword)

        def run(lease: Lease) -> Tensor:
            return split.run_layer(index, lease.weights, plain, given)

        def visit(*, recompute: bool) -> Iterator[None]:
            graph = Graph(run if recompute else None)
            with graph.built(lease):
                edge = get_gradient_edge(run(lease))
            yield
            with graph.differentiated(lease):
                torch.autograd.backward(edge, gradient)
            yield

        forward, again = _phases(lambda: visit(recompute=True), backend)
        _, backward = _phases(lambda: visit(recompute=False), backend)
        for parameter in split.layers[index].parameters():
            parameter.grad = None
        return forward, max(0.0, again - backward), backward

    def _ends(self, workload: Workload, hidden: Tensor, rate: float) -> tuple[float, float]:
        """Return the seconds of the head with the loss, and of what comes before the layers; of a model whose ends are
        too large to be made up, what the head's operations take."""
        if self.blueprint.outside_bytes > psutil.virtual_memory().available / FREE_PART:
            return workload.head.flops / rate, 0.0
        batch = self.shape.micro_batch
        tokens = torch.ones(batch.rows, batch.length, dtype=torch.long, device=self.backend.device)
        with _made_up_outside(self.blueprint.model, self.split, self.backend):
            chunks = LossChunks(self.split.head, [tokens], self.config.loss_chunk_tokens)
            head = _seconds(lambda: chunks.backward(0, hidden, lambda _: (), {}), self.backend)
            prelude = _seconds(lambda: self.split.prelude({"input_ids": tokens}, {}), self.backend)
        return head, prelude

    def _optimizer(self, firsts: Sequence[int]) -> float:
        """Return the seconds of the optimizer's step, from that over the adapters of one layer of each kind."""
        parameters = [one for index in firsts for one in self.split.layers[index].parameters() if one.requires_grad]
        if not parameters:
            return 0.0
        optimizer = make_optimizer(parameters, self.config)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        seconds = _seconds(optimizer.step, self.backend)
        for parameter in parameters:
            parameter.grad = None
        return seconds * self.blueprint.adapter_parameters / sum(parameter.numel() for parameter in parameters)

    def _real(self, value: Any) -> Any:
        """Give tensors without values memory on the device: masks let everything through."""
        if isinstance(value, Tensor):
            make = torch.zeros if value.dtype == torch.long else torch.ones
            real = make(value.shape, dtype=value.dtype, device=self.backend.device)
            return _made_up(real) if value.is_floating_point() else real
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        if isinstance(value, tuple | list) and any(True for _ in tensors_in(value)):
            return type(value)(map(self._real, value))
        return value


def _phases(visit: Callable[[], Iterator[None]], backend: Backend) -> tuple[float, float]:
    """Return the seconds of the two parts of a visit: medians, the first visit left out."""
    measured: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(measured) < 2 or (len(measured) <= REPEATS and time.perf_counter() - began < ENOUGH):
        moments = [time.perf_counter()]
        for _ in visit():
            backend.synchronize()
            moments.append(time.perf_counter())
        measured.append((moments[1] - moments[0], moments[2] - moments[1]))
    first, second = zip(*measured[1:], strict=True)
    return statistics.median(first), statistics.median(second)


def _seconds(work: Callable[[], object], backend: Backend) -> float:
    """Return the median of a few runs, the first left out."""
    measured: list[float] = []
    began = time.perf_counter()
    while len(measured) < 2 or (len(measured) <= REPEATS and time.perf_counter() - began < ENOUGH):
        start = time.perf_counter()
        work()
        backend.synchronize()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured[1:])


def _made_up(tensor: Tensor) -> Tensor:
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


@contextmanager
def _made_up_outside(model: nn.Module, split: Split, backend: Backend) -> Iterator[None]:
    """Give what lies outside the layers values and memory for the length of a `with` block."""
    inside = {id(parameter) for parameter in split.layers.parameters()}
    owned = [(module, dict(module._parameters)) for module in model.modules()]
    made: dict[int, nn.Parameter] = {}
    try:
        for module, parameters in owned:
            for name, parameter in parameters.items():
                if parameter is not None and parameter.is_meta and id(parameter) not in inside:
                    if id(parameter) not in made:
                        real = torch.empty(parameter.shape, dtype=parameter.dtype, device=backend.device)
                        made[id(parameter)] = nn.Parameter(_made_up(real), requires_grad=False)
                    module._parameters[name] = made[id(parameter)]
        yield
    finally:
        for module, parameters in owned:
            module._parameters.update(parameters)
