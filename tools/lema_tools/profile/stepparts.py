"""What a training step spends its time on: every operation is timed and put to a part, and what is
left is Python.

Each step is taken twice: as it is, for its seconds, and watched by a dispatch mode, for the shares
of its parts. A part's own limit is the time that its work would take alone: a matrix product that
of the same product measured by itself, attention that of its arithmetic at the best of these
speeds, all else that of its bytes at the speed of memory, and waiting for weights what reading
takes longer than computing.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lema.backend import Backend
from lema.backend.trace import NoTrace
from lema.engine.head.loss import split_batch
from lema.plan.work.meter import FORMULAS
from lema.stream.speed import median_seconds, read_speed
from lema.train import LemaModel
from lema.train.phases.file import PhaseFile, read_sources
from lema.train.phases.stage import mixture_of, settings_of_phase
from lema.train.plain.stage import plain_data
from lema.train.run import load_data

__all__ = ["PARTS", "Part", "PhaseSteps", "Spans", "StepProfile", "Watched", "profile_steps"]

aten = torch.ops.aten
BASE = "base matmuls"
ADAPTER = "adapter matmuls"
ATTENTION = "attention"
ELEMENTWISE = "norms and elementwise"
CASTS = "casts and copies"
LOSS = "loss"
PYTHON = "Python"
WAITING = "waiting for weights"
OPTIMIZER = "optimizer"
PARTS = BASE, ADAPTER, ATTENTION, ELEMENTWISE, CASTS, LOSS, OPTIMIZER, WAITING, PYTHON
PRODUCTS = {aten.mm, aten.addmm}
IN_ATTENTION = {aten.bmm, aten.baddbmm, aten._softmax, aten._softmax_backward_data}
FUNCTIONAL_FORMS = {aten.addmm_: aten.addmm}  # what the same is called where it makes a tensor
PICKS = {aten.embedding, aten.index, aten.index_select, aten.gather}
COPIES = {aten._to_copy, aten.copy_, aten.clone}
TOGETHER = 4  # adapters that `arithmetic: fast` multiplies together, at most
# shapes of products that are measured apart, those that took longest; others go by these
MEASURED = 64
CALLS = 1000  # of an operation, by which the cost of watching one is measured
RUNS = 8  # of each thing that a limit goes by
BANDWIDTH_ELEMENTS = 1 << 24

Shape = tuple[Any, ...]


class Spans(NoTrace):
    """A trace that knows which part of a step runs now, where operations do not tell: the loss,
    the optimizer, none.
    """

    def __init__(self) -> None:
        self.where = ""

    @contextmanager
    def span(self, track: str, name: str, **details: Any) -> Iterator[None]:  # noqa: ARG002 - as in NoTrace
        """Note what runs, in the thread that trains alone: no other one has these tracks."""
        part = OPTIMIZER if track == "optimizer" else LOSS if name == "head and loss" else ""
        if not part:
            yield
            return
        before = self.where
        self.where = part
        try:
            yield
        finally:
            self.where = before


@dataclass
class Work:
    """What the operations of one part did."""

    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0  # read and written by what is no product
    products: Counter[Shape] = field(default_factory=Counter)


class Watched(TorchDispatchMode):
    """Times the operations in the `with` block, and waits for the device after each. `ranks` are
    those of the adapters: a matrix product with one of them among its three sizes is an adapter's.
    As attributes it has the work of each part, `parts`, how many operations there were, and the
    seconds and floating-point operations of each shape of product."""

    def __init__(self, spans: Spans, backend: Backend, ranks: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._spans = spans
        self._backend = backend
        self._ranks = ranks
        self.parts: dict[str, Work] = defaultdict(Work)
        self.count = 0
        self.seconds: dict[Shape, float] = defaultdict(float)
        self.flops: dict[Shape, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and put its time to a part."""
        keywords = kwargs or {}
        packet = FUNCTIONAL_FORMS.get(func.overloadpacket, func.overloadpacket)
        began = time.perf_counter()
        out = func(*args, **keywords)
        self._backend.synchronize()
        seconds = time.perf_counter() - began
        self.count += 1
        if func.is_view:
            return out  # which costs no more than its call, and that is Python's part
        work = self.parts[self._part(packet, args)]
        work.seconds += seconds
        if packet in FORMULAS:
            flops = int(FORMULAS[packet](*args, **keywords, out_val=out))
            work.flops += flops
            shape = _shape(packet, args)
            work.products[shape] += 1
            self.seconds[shape] += seconds
            self.flops[shape] = flops
        else:
            # Of what is picked out of a table by row no more is read than is made.
            trees = (out, *args[1:], out) if packet in PICKS else (args, keywords, out)
            tensors = [tensor for tensor in tree_leaves(trees) if isinstance(tensor, Tensor)]
            work.nbytes += sum(
                min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors
            )
        return out

    def _part(self, packet: Any, args: Any) -> str:
        if self._spans.where:
            return self._spans.where
        if packet in PRODUCTS:
            left, right = args[-2:]
            return ADAPTER if self._ranks & {*left.shape, *right.shape} else BASE
        if packet in IN_ATTENTION or "scaled_dot_product" in packet.__name__:
            return ATTENTION
        if packet in FORMULAS:
            return BASE  # grouped products of experts
        return CASTS if packet in COPIES else ELEMENTWISE


@dataclass(frozen=True)
class Part:
    """One part of a step's time; numbers are means of one step. `limit_seconds`: None, it has
    none.
    """

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    limit_seconds: float | None = None

    @property
    def of_limit(self) -> float | None:
        """The part's limit by its seconds; None: there is none, or it took no time."""
        return (
            self.limit_seconds / self.seconds
            if self.limit_seconds is not None and self.seconds
            else None
        )


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step went. `step_seconds` is of steps as they are, `watched_seconds` of
    those watched; speeds are bytes, or floating-point operations, per second."""

    device: str
    steps: int
    tokens: float
    step_seconds: float
    watched_seconds: float
    parts: Mapping[str, Part]
    bytes_read: float
    disk_speed: float
    memory_speed: float
    flops_per_second: float

    @property
    def flops(self) -> float:
        """Of the matrix products and the attention of one step."""
        return sum(part.flops for part in self.parts.values())

    @property
    def limit_seconds(self) -> float:
        """What a step would take if each part were at its limit, and reading went on beside the
        others.
        """
        computing = sum(
            part.limit_seconds or 0.0 for name, part in self.parts.items() if name != WAITING
        )
        return max(computing, self.bytes_read / self.disk_speed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        parts = {
            name: {**asdict(part), "of_limit": part.of_limit} for name, part in self.parts.items()
        }
        for part in parts.values():
            part["share"] = part["seconds"] / self.step_seconds
        return asdict(self) | {
            "parts": parts,
            "flops": self.flops,
            "limit_seconds": self.limit_seconds,
        }


@dataclass
class Totals:
    """What was measured of all steps together."""

    plain: float = 0.0  # seconds of steps as they are
    watched: float = 0.0  # of those watched
    waited: float = 0.0  # of those as they are, for weights
    watched_waited: float = 0.0
    tokens: int = 0
    nbytes: int = 0  # read


class PhaseSteps:
    """The steps of one phase of a file, which trains adapters. It begins on the base model here,
    whatever the phases before it make of that: seconds do not depend on it. As an attribute it has
    the `settings` of the phase."""

    def __init__(self, file: PhaseFile, index: int) -> None:
        self._file = file
        self._index = index
        self.settings = settings_of_phase(file.config, file.plan, file.plan.phases[index])

    @property
    def is_of_rows(self) -> bool:
        """Whether its steps are those of a run without phases."""
        return self._file.plan.phases[self._index].is_of_rows

    def draw(self, model: LemaModel, count: int) -> list[Any]:
        """Return the micro-batches of the first steps of the phase."""
        plan = self._file.plan
        replicas = model.backend.replicas
        size = model.config.micro_batch_size
        sources = read_sources(
            self.settings, plan, self._file.train_data, "train", files=model.files
        )
        mixture = mixture_of(plan, self._index, sources)
        rows = plan.batch_size
        row_arguments = replicas.rank, replicas.size, size
        batches = (
            mixture.collated(mixture.rows(step * rows, rows, *row_arguments), replicas.size)
            for step in range(count)
        )
        return [[] if batch is None else split_batch(batch, size) for batch in batches]


def profile_steps(
    model: LemaModel, spans: Spans, steps: int, phase: PhaseSteps | None = None
) -> StepProfile:
    """Take steps of a model's own data, from the first on, or of a `phase`: one to warm up, then
    `steps` of them, each as it is and watched. The model has no adapter yet, and `spans` is its
    trace. Nothing is written. Raises what `lema.train.run.train` does before its first step."""
    model.initialize_lora()
    model.settle_tokens()
    trainer = model.get_trainer()
    watched = Watched(spans, model.backend, _ranks(model))
    if phase is None or phase.is_of_rows:
        data = plain_data(trainer, load_data(model)[0])
        drawn = [data.draw(number % data.num_steps).micro_batches for number in range(steps + 1)]
    else:
        drawn = phase.draw(model, steps + 1)
    totals = Totals()
    step = _step_of(model, trainer)
    step(drawn[0])
    for micro_batches in drawn[1:]:
        before = model.adapter.counters
        totals.plain += step(micro_batches)
        after = model.adapter.counters
        totals.waited += _waited(after) - _waited(before)
        totals.nbytes += after.bytes_read - before.bytes_read
        totals.tokens += sum(micro_batch["input_ids"].numel() for micro_batch in micro_batches)
        with watched:
            totals.watched += step(micro_batches)
        totals.watched_waited += _waited(model.adapter.counters) - _waited(after)
    model.adapter.stream.cancel()
    return _profile_of(model, watched, totals, steps)


def _profile_of(model: LemaModel, watched: Watched, totals: Totals, steps: int) -> StepProfile:
    """Return the profile of what was measured, and measure what the parts' limits go by."""
    seconds = _seconds(watched, totals, _watching(model.backend))
    memory = _memory_speed(model.backend)
    disk = _disk_speed(model)
    alone = _alone(watched, model.backend)
    best = max(
        (watched.flops[shape] / alone_seconds for shape, alone_seconds in alone.items()),
        default=1.0,
    )
    parts = {}
    for name in PARTS:
        work = watched.parts[name]
        limit = None
        if name == WAITING:
            limit = max(0.0, totals.nbytes / disk - (totals.plain - totals.waited))
        elif work.flops or work.nbytes:
            products = work.products.items()
            limit = sum(
                count * alone.get(shape, watched.flops[shape] / best) for shape, count in products
            )
            limit += work.nbytes / memory
        limit_per_step = None if limit is None else limit / steps
        parts[name] = Part(
            seconds[name] / steps, work.flops / steps, work.nbytes / steps, limit_per_step
        )
    return StepProfile(
        device=str(model.backend.device),
        steps=steps,
        tokens=totals.tokens / steps,
        step_seconds=totals.plain / steps,
        watched_seconds=totals.watched / steps,
        parts=parts,
        bytes_read=totals.nbytes / steps,
        disk_speed=disk,
        memory_speed=memory,
        flops_per_second=best,
    )


def _seconds(watched: Watched, totals: Totals, watching: float) -> dict[str, float]:
    """Return the seconds of each part, which add up to those of the steps as they are: these are
    divided, but for the waiting in them, as the steps that were watched are. Python has what is
    neither an operation nor `watching` one."""
    seconds = {name: watched.parts[name].seconds for name in PARTS}
    between = totals.watched - totals.watched_waited - sum(seconds.values())
    seconds[PYTHON] = max(0.0, between - watched.count * watching)
    factor = (totals.plain - totals.waited) / max(sum(seconds.values()), 1e-9)
    return {name: part_seconds * factor for name, part_seconds in seconds.items()} | {
        WAITING: totals.waited
    }


def _watching(backend: Backend) -> float:
    """Return the seconds that it takes to watch one operation, beside those of the operation."""
    operand = torch.ones(1, device=backend.device)
    watched = Watched(Spans(), backend, frozenset())

    def work() -> None:
        for _ in range(CALLS):
            torch.add(operand, operand)

    alone = median_seconds(work, backend)
    with watched:
        watched_seconds = median_seconds(work, backend)
    return max(0.0, watched_seconds - alone) / CALLS


def _step_of(model: LemaModel, trainer: Any) -> Callable[[Any], float]:
    """Return what takes a step and returns its seconds; the step after it is announced, as in a
    run.
    """

    def step(micro_batches: Any) -> float:
        began = time.perf_counter()
        trainer.accumulate(micro_batches, more=True, following=micro_batches)
        model.backend.synchronize()
        return time.perf_counter() - began

    return step


def _ranks(model: LemaModel) -> frozenset[int]:
    """Return the sides by which products with an adapter are known: its rank, or the ranks of a
    product they share.
    """
    assert model.lora_manager is not None
    parts: list[Any] = list(model.lora_manager.modules())
    rank_maps = (getattr(module, "r", None) for module in parts)
    ranks = frozenset(
        rank for rank_map in rank_maps if isinstance(rank_map, dict) for rank in rank_map.values()
    )
    bases = (part.base_layer for part in parts if hasattr(part, "base_layer"))
    sides = {
        side
        for base in bases
        for weight in base.parameters(recurse=False)
        for side in weight.shape[-2:]
    }
    return ranks | {number * rank for rank in ranks for number in range(2, TOGETHER + 1)} - sides


def _waited(counters: Any) -> float:
    return float(
        counters.seconds_blocked_disk
        + counters.seconds_blocked_upload
        + counters.seconds_blocked_gather
    )


def _shape(packet: Any, args: Any) -> Shape:
    """Return what tells one product from another: how its matrices lie in memory, and of what
    dtype they are.
    """
    signatures = (
        (argument.shape, argument.stride(), argument.dtype)
        if isinstance(argument, Tensor)
        else None
        for argument in args
    )
    return packet, *signatures


def _alone(watched: Watched, backend: Backend) -> dict[Shape, float]:
    """Return the seconds that matrix products take by themselves, of the shapes that took
    longest.
    """
    longest = sorted(watched.seconds, key=watched.seconds.__getitem__, reverse=True)
    shapes = (shape for shape in longest if shape[0] in (*PRODUCTS, aten.bmm))
    seconds_by_shape = {}
    for shape in islice(shapes, MEASURED):
        packet, *signatures = shape
        args = [_tensor(backend, *signature) for signature in signatures if signature is not None]
        seconds_by_shape[shape] = _fastest(partial(packet, *args), backend)
    return seconds_by_shape


def _fastest(work: Callable[[], object], backend: Backend) -> float:
    """Return the least seconds of some runs of `work`: a limit is what the machine reaches when
    it is left alone.
    """
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        backend.synchronize()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)


def _tensor(
    backend: Backend, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.randn(max(extent, 1), device=backend.device).to(dtype).as_strided(size, stride)


def _memory_speed(backend: Backend) -> float:
    """Return the bytes per second at which the device's memory is read and written by an
    addition.
    """
    left, right, out = (torch.ones(BANDWIDTH_ELEMENTS, device=backend.device) for _ in range(3))
    return 3 * left.nbytes / _fastest(partial(torch.add, left, right, out=out), backend)


def _disk_speed(model: LemaModel) -> float:
    """Return the bytes per second at which some of the model's layers are read, past the page
    cache.
    """
    layers = list(model.memory.layers)[:4]
    nbytes = max(layer.nbytes for layer in layers)
    return read_speed(layers, [model.backend.host_buffer(nbytes) for _ in range(2)])
