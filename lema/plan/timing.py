"""How long one layer takes: computed as training computes it, with weights that are made up.

Their values decide nothing about the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lema.backend import Backend
from lema.flow import tensors_in
from lema.layercall import LayerCall
from lema.recompute import Graph
from lema.split import Split
from lema.stream.expand import expand_into, weights_in
from lema.stream.leased import Lease
from lema.stream.placement import LayerBytes

__all__ = ["ENOUGH", "Clock", "LayerSeconds", "layer_seconds", "made_up", "median_seconds", "with_values"]

Clock = Callable[[], float]

ENOUGH = 1.0  # seconds that one measurement takes, about
REPEATS = 5
PERIOD = 1 << 16  # elements drawn; larger tensors repeat them


@dataclass(frozen=True)
class LayerSeconds:
    """One micro-batch in one layer.

    Attributes:
        forward: seconds.
        recompute: of running it again, as far as the backward needs it.
        backward: without that.
        expand: of expanding weights that are stored quantised, once in each lease.
    """

    forward: float
    recompute: float
    backward: float
    expand: float


def layer_seconds(
    split: Split,
    layers: Sequence[LayerBytes],
    index: int,
    call: LayerCall,
    hidden: Tensor,
    backend: Backend,
    clock: Clock = time.perf_counter,
) -> LayerSeconds:
    """Time one micro-batch in a layer, which is leased, recomputed and differentiated as training does it.

    Args:
        split: the model; its adapters have memory.
        layers: its decoder layers as bytes.
        index: of the layer.
        call: of it, tensors without values.
        hidden: its input.
        backend: the device.
        clock: seconds.
    """
    layer = layers[index]
    source = backend.host_buffer(layer.nbytes)
    slot = backend.device_slots(layer.nbytes, 1).upload(source).wait()
    expanded, expand = None, 0.0
    if layer.expansions:
        into = expanded = torch.empty(layer.expanded_bytes, dtype=torch.uint8, device=backend.device)
        slot.zero_()
        expand = median_seconds(lambda: expand_into(into, slot, layer), backend, clock)
    lease = Lease(index, slot, weights_in(slot, layer, expanded), expanded)
    for tensor in lease.weights.values():
        made_up(tensor)
    given, gradient = hidden.detach().requires_grad_(), torch.ones_like(hidden)
    args, kwargs = call.others()
    plain = LayerCall(with_values(args, backend), with_values(kwargs, backend), call.hidden_is_keyword)

    def run(lease: Lease) -> Tensor:
        return split.run_layer(index, lease.weights, plain, given)

    def visit(*, recompute: bool) -> Iterator[None]:
        graph = Graph(run if recompute else None, split.needless[index])
        with graph.built(lease):
            edge = get_gradient_edge(run(lease))
        yield
        with graph.differentiated(lease):
            torch.autograd.backward(edge, gradient)
        yield

    forward, again = _phases(lambda: visit(recompute=True), backend, clock)
    _, backward = _phases(lambda: visit(recompute=False), backend, clock)
    for parameter in split.layers[index].parameters():
        parameter.grad = None
    return LayerSeconds(forward, max(0.0, again - backward), backward, expand)


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


def median_seconds(work: Callable[[], object], backend: Backend, clock: Clock = time.perf_counter) -> float:
    """Return the median of a few runs, the first left out."""
    measured: list[float] = []
    began = time.perf_counter()
    while len(measured) < 2 or (len(measured) <= REPEATS and time.perf_counter() - began < ENOUGH):
        start = clock()
        work()
        backend.synchronize()
        measured.append(clock() - start)
    return statistics.median(measured[1:])


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
