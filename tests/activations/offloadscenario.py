"""A random course of packing and unpacking on a device with queues, and what every byte that is
read must be.

What compute does, the course queues: it writes what is packed and reads what is unpacked. Memory
that is given back is somebody else's at once, who writes into it, in the order of compute.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hoststores import FakeStore, HostOnly, ThroughBuffers
from queuefakes import GARBAGE, FakeDevice, FakeQueue, move
from torch import Tensor

from lema.backend.queues import Copies, CopyDown, Slots

ACTIONS = 70


class QueuedCarrier:
    """`lema.backend.Carrier`; device memory is the course's, the order is that of
    `lema.backend.queues`.
    """

    device = torch.device("cpu")

    def __init__(self, device: FakeDevice, memory: Callable[[int], Tensor]) -> None:
        self._copies = Copies(device)
        self._memory = memory

    def device_slots(self, nbytes: int, count: int) -> Slots:
        return Slots(self._copies, [self._memory(nbytes) for _ in range(count)])

    def download(self, source: Tensor, target: Tensor) -> CopyDown:
        return CopyDown(self._copies, source, target)


class CalmDevice(FakeDevice):
    """What a garbage collector queues in the middle of a step is not begun within that step."""

    stepping = False

    def some_steps(self) -> None:
        if not self.stepping:
            super().some_steps()

    def step(self) -> bool:
        with self.calmly():
            return super().step()

    def run_until(self, event: Any) -> None:
        with self.calmly():
            super().run_until(event)

    @contextmanager
    def calmly(self) -> Iterator[None]:
        before = self.stepping
        self.stepping = True
        yield
        self.stepping = before


@dataclass(eq=False)
class Source:
    """Device memory that compute wrote: by version, the bytes. `memory` is None when the course
    has dropped it.
    """

    memory: Tensor | None
    address: int
    nbytes: int
    bytes_of: list[bytes]


@dataclass(eq=False)
class Saved:
    """What a graph keeps, and what it stands for."""

    packed: Any
    like: Tensor
    first: int
    source: Source
    version: int
    stays: bool


@dataclass(eq=False)
class Graph:
    order: Any
    saved: list[Saved] = field(default_factory=list)


class GivenUp(Exception):
    """A backward that fails half way."""


class Course:
    """One course with `code`, which has `Offload`; the seed decides everything.

    Args:
        code: what is under test.
        seed: of the course.
        cycles: drop what graphs keep by leaving it, in a circle, to the garbage collector.
    """

    def __init__(self, code: SimpleNamespace, seed: int, *, cycles: bool = False) -> None:
        self.chance = Random(seed)
        self.cycles = cycles
        self.device = (CalmDevice if cycles else FakeDevice)(self.chance)
        self.alive = dict[int, str]()  # device memory by address: whose it is
        self.store: FakeStore = self.chance.choice((HostOnly, HostOnly, ThroughBuffers))(
            self.device, self.chance
        )
        self.stash = self.chance.choice((1, 1, 2, 4))
        carrier = QueuedCarrier(self.device, lambda nbytes: self.memory(nbytes, "restored"))
        self.offload = code.Offload(
            lambda _: None, self.store, lambda _: carrier,
            stash=self.stash, fetch=self.chance.random() < 0.7,
        )  # fmt: skip
        self.sources = list[Source]()
        self.graphs = [Graph(None)]
        # what was unpacked and is in use: the read there is, expected
        self.held = list[tuple[Tensor, int, bytes]]()
        self.reads = list[tuple[str, bytes, bytearray]]()

    def run(self) -> None:
        """Take random actions; assert that everything read was what had to be read, and that
        nothing is left.
        """
        actions = [
            *[self.pack] * 6, *[self.pack_and_drop] * 6, self.drop_source, self.drop_source, self.overwrite,
            self.new_graph, self.expect, self.let_go, *[self.unpack_one] * 2, *[self.backward] * 3,
            self.use_again, *[self.stop_using] * 4, self.drop_one, self.drop_graph,
        ]  # fmt: skip
        for _ in range(ACTIONS):
            self.chance.choice(actions)()
            self.store.some_steps()
        self.end()
        self.device.run_all()
        if isinstance(self.store, HostOnly):
            assert self.device.host_waits == 0, "the host was made to wait"
        for what, expected, found in self.reads:
            assert bytes(found) == expected, f"{what}: {bytes(found)!r}, not {expected!r}"

    def end(self) -> None:
        self.sources.clear()
        self.held.clear()
        self.drop(self.graphs)
        self.finish_directory()
        assert (self.offload.live_bytes, self.offload._pieces) == (0, {})
        assert not self.alive, f"device memory is still held: {self.alive}"
        assert self.store.live == 0, "host memory is still held"

    def settle(self) -> None:
        """Let go what only waits to be collected, or to be taken out of a buffer."""
        if self.cycles:
            gc.collect()
        self.store.finish()

    # Memory

    def memory(self, nbytes: int, whose: str) -> Tensor:
        memory = self.device.memory(nbytes, self.next_tenant)
        self.write(memory.data_ptr(), bytes([GARBAGE]) * nbytes)
        self.alive[memory.data_ptr()] = whose
        return memory

    def next_tenant(self, memory: np.ndarray) -> None:
        """Use memory for something else, in the queue of compute, the moment the last tensor in
        it is dropped.
        """
        del self.alive[memory.ctypes.data]
        theirs = self.some_bytes(len(memory))
        self.write(memory.ctypes.data, theirs)
        self.read(memory.ctypes.data, theirs, "memory that was given back")

    def some_bytes(self, nbytes: int) -> bytes:
        return self.chance.randbytes(nbytes)

    def write(self, address: int, what: bytes) -> None:
        queue: FakeQueue = self.device.queues[0]
        half = len(what) // 2
        for start, part in ((0, what[:half]), (half, what[half:])):
            queue.do(
                lambda start=start, part=part: ctypes.memmove(address + start, part, len(part))
            )

    def read(self, address: int, expected: bytes, what: str) -> None:
        found = bytearray(len(expected))
        into = (ctypes.c_uint8 * len(expected)).from_buffer(found)
        move(self.device.queues[0], ctypes.addressof(into), address, len(expected), into)
        self.reads.append((what, expected, found))

    def one_of(self, found: list[Any]) -> Any:
        return self.chance.choice(found) if found else None

    # A forward

    def new_source(self) -> Source:
        nbytes = 8 * self.chance.choice((4, 8, 16, 32, 50))
        memory = self.memory(nbytes, "source")
        source = Source(memory, memory.data_ptr(), nbytes, [self.some_bytes(nbytes)])
        self.write(source.address, source.bytes_of[0])
        return source

    def pack(self) -> None:
        """Save a tensor, often one that lies where another lies."""
        if not self.sources or self.chance.random() < 0.4:
            self.sources.append(self.new_source())
        self.save(self.chance.choice(self.sources))

    def pack_and_drop(self) -> None:
        """Save it, perhaps more than once, and let nobody but the graph have it."""
        source = self.new_source()
        for _ in range(self.chance.choice((1, 1, 3))):
            self.save(source)
        source.memory = None
        self.check_stash()

    def save(self, source: Source) -> None:
        assert source.memory is not None
        tensor = self.some_view(source.memory)
        like = (
            tensor.to("meta").as_strided(tensor.shape, tensor.stride())
            if tensor.numel()
            else tensor
        )
        first = tensor.data_ptr() - source.address
        graph = self.chance.choice(self.graphs[-2:])
        moved = self.offload.counters.moved
        packed = self.offload.pack(tensor, graph.order)
        stays = self.offload.counters.moved == moved
        assert not stays or self.store.refused, "there was room for it"
        graph.saved.append(Saved(packed, like, first, source, source.memory._version, stays))

    def some_view(self, memory: Tensor) -> Tensor:
        """Return the whole, or a part of it, of some dtype and strides."""
        tensor = memory.view(
            self.chance.choice((torch.uint8, torch.float16, torch.float32, torch.int64))
        )
        kind = self.chance.randrange(5)
        count = len(tensor)
        if kind == 1:
            tensor = tensor[self.chance.randrange(count) :]
        elif kind == 2:
            tensor = tensor.view(2, -1).t()
        elif kind == 3:
            tensor = tensor[self.chance.randrange(count)].expand(3, 2)
        elif kind == 4:
            start = self.chance.randrange(count)
            tensor = tensor[start : start + self.chance.randrange(1, 4) * 2 : 2]
        return tensor

    def drop_source(self) -> None:
        if source := self.one_of(self.sources):
            self.sources.remove(source)
            source.memory = None

    def overwrite(self) -> None:
        """Write into what may have been saved: who asks for that is told, or gets what it was."""
        if source := self.one_of(self.sources):
            self.held = [
                one for one in self.held if one[0].untyped_storage().data_ptr() != source.address
            ]
            source.memory[:0].zero_()  # torch is to know of it; what is written, the queue writes
            source.bytes_of.append(self.some_bytes(source.nbytes))
            assert source.memory._version == len(source.bytes_of) - 1
            self.write(source.address, source.bytes_of[-1])

    def new_graph(self) -> None:
        self.graphs.append(Graph(self.offload.order()))

    def let_go(self) -> None:
        """A forward is over: the device holds what others hold, and nothing for the offload's
        sake.
        """
        self.offload.let_go()
        self.finish_directory()
        kept = {address for address, whose in self.alive.items() if not self.in_use(address)}
        assert not kept, "memory is held after the end of a forward"

    def in_use(self, address: int) -> bool:
        theirs = {source.address for source in self.sources}
        theirs |= {tensor.untyped_storage().data_ptr() for tensor, *_ in self.held}
        return address in theirs | {
            one.source.address for graph in self.graphs for one in graph.saved if one.stays
        }

    def check_stash(self) -> None:
        self.finish_directory()
        leaving = [
            one for one, whose in self.alive.items() if whose == "source" and not self.in_use(one)
        ]
        assert len(leaving) <= self.stash, "more is held on the device than may be while it leaves"

    # A backward

    def expect(self) -> None:
        if (graph := self.one_of(self.graphs)).order is not None:
            self.offload.expect(graph.order)

    def unpack_one(self) -> None:
        """Ask for anything, in any order, perhaps again."""
        graph = self.one_of(self.graphs)
        if saved := self.one_of(graph.saved):
            self.unpack(saved)

    def unpack(self, saved: Saved) -> None:
        try:
            tensor = saved.packed.unpack()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            assert saved.version < len(saved.source.bytes_of) - 1, "nobody wrote into it"
            return
        like = saved.like
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            like.dtype,
            like.shape,
            like.stride(),
        )
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size = (last + 1) * tensor.element_size()
        expected = saved.source.bytes_of[saved.version][saved.first : saved.first + size]
        self.read(tensor.data_ptr(), expected, "what came back")
        address = tensor.data_ptr()
        # or a view of it
        self.held.append((tensor[-1:] if self.chance.random() < 0.5 else tensor, address, expected))

    def backward(self) -> None:
        """Differentiate a graph: within a backward of torch's or by hand, to the end or not, and
        again perhaps.
        """
        graph = self.one_of(self.graphs)

        def ask() -> None:
            for saved in reversed(graph.saved):
                self.unpack(saved)
                if self.chance.random() < 0.8:
                    self.stop_using()
                if self.chance.random() < 0.05:
                    raise GivenUp

        before = set(self.alive)  # some came back before, as what was expected
        within = self.chance.random() < 0.7
        given_up = False
        try:
            in_a_backward(ask) if within else ask()
        except GivenUp:
            given_up = True
        if given_up:
            self.let_go()
        elif within:
            self.finish_directory()
            left = [one for one in set(self.alive) - before if not self.in_use(one)]
            assert not left, "memory came back for a backward that is over"
        if self.chance.random() < 0.7:
            self.drop([graph])

    def use_again(self) -> None:
        if used := self.one_of(self.held):
            self.read(used[1], used[2], "what came back, once more")

    def stop_using(self) -> None:
        if self.held:
            used = self.held.pop(self.chance.randrange(len(self.held)))
            self.read(used[1], used[2], "what came back, before it is dropped")

    # The end of a graph

    def drop_one(self) -> None:
        graph = self.one_of(self.graphs)
        if saved := self.one_of(graph.saved):
            graph.saved.remove(saved)
            self.leave_alone([saved])

    def drop_graph(self) -> None:
        self.drop([self.one_of(self.graphs)])

    def drop(self, graphs: list[Graph]) -> None:
        for graph in list(graphs):
            gone = graph.saved
            graph.saved = []
            if graph in self.graphs and len(self.graphs) > 1:
                self.graphs.remove(graph)
            self.leave_alone(gone)

    def leave_alone(self, gone: list[Saved]) -> None:
        if self.cycles and gone:
            gone.append(gone)  # type: ignore[arg-type] # a circle


def in_a_backward(ask: Callable[[], None]) -> None:
    """Call `ask` while autograd differentiates something."""
    _Asks.apply(torch.ones((), requires_grad=True), ask).backward()


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, ask: Callable[[], None]) -> Tensor:
        ctx.ask = ask
        return one.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ask()
        return gradients[0], None
