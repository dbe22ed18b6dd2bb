"""How long one layer takes: visited as training visits it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lema.activations import BoundaryArena
from lema.backend import Backend
from lema.flow import tensors_in
from lema.layercall import LayerCall
from lema.split import Split
from lema.stream.lease import LayerStream
from lema.stream.placement import LayerBytes
from lema.trainedweights import TrainedWeights
from lema.visit import Engine, visit

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
    trained: Collection[str] = (),
) -> LayerSeconds:
    """Time one micro-batch in a layer, by the engine's own visits: leased, kept, recomputed and differentiated.

    Args:
        split: the model; its adapters have memory.
        layers: its decoder layers as bytes.
        index: of the layer, which is read.
        call: of it, tensors without values.
        hidden: its input.
        backend: the device.
        clock: seconds.
        trained: those of its weights that train themselves; their gradients are dropped.
    """
    args, kwargs = call.others()
    plain = LayerCall(with_values(args, backend), with_values(kwargs, backend), call.hidden_is_keyword)
    given, gradient = hidden.detach().requires_grad_(), torch.ones_like(hidden)
    with (
        closing(LayerStream(layers, backend, prefetch_depth=0, host_cached={index})) as stream,
        closing(BoundaryArena(backend)) as arena,
    ):
        engine = Engine(split, stream, backend)
        engine.trained = TrainedWeights({index: trained}, lambda *_: None)

        def visits(*, recompute: bool) -> Iterator[None]:
            boundaries = arena.step([given], [index]) if recompute else None
            (output,) = visit(engine, index, [plain], [given], boundaries)
            yield
            torch.autograd.backward(output, gradient)
            yield

        forward, again = _phases(lambda: visits(recompute=True), backend, clock)
        _, backward = _phases(lambda: visits(recompute=False), backend, clock)
        expand = _expanding(stream, index, backend, clock) if layers[index].expansions else 0.0
    for parameter in split.layers[index].parameters():
        parameter.grad = None
    return LayerSeconds(max(0.0, forward - expand), max(0.0, again - backward), max(0.0, backward - expand), expand)


def _expanding(stream: LayerStream, index: int, backend: Backend, clock: Clock) -> float:
    """Return the seconds that a lease takes of a layer whose weights are stored quantised."""

    def lease() -> None:
        with stream.lease(index):
            pass

    return median_seconds(lease, backend, clock)


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
