"""The protocols of the seam: `Backend` and its parts for a device, `Replicas` and `Parallel` for
groups of processes.

Backends are entry points of the group `lema.backends`, so a third party adds one without touching
this project. The protocols state intent, not mechanism: *compute queued after `wait` sees the
bytes*, *a slot is refilled only after the compute queued so far*. How a device keeps those promises
(streams, events, nothing at all) is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lema.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Gathering(Protocol):
    """One layer on its way from the replicas that each hold a part of it."""

    def wait(self) -> None:
        """Compute queued after this call sees the whole; the uploaded part has been released."""


class Replicas(Protocol):
    """The processes that train copies of one adapter, each on its share of every batch (data
    parallelism).

    Every process makes the same calls in the same order. Where several processes hold one copy
    together (`lema.backend.Parallel`), the replicas of a process are those that hold the same part
    as it.
    """

    @property
    def rank(self) -> int:
        """This process's place among all."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def local_rank(self) -> int:
        """This process's place among those of this machine."""

    @property
    def local_size(self) -> int:
        """How many of the processes run on this machine."""

    @property
    def first(self) -> bool:
        """Whether this process is the one, of all there are, that writes and reports."""

    @property
    def num_processes(self) -> int:
        """How many processes there are in all."""

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor on the device over all processes, in place; queued like compute. All
        get the same bits.
        """

    def gather(self, upload: Upload, target: Tensor) -> Gathering:
        """Start to put an uploaded part of every process, all of one size, one after the other into
        `target`. `target`, uint8 `[size * part]` on the device, is overwritten only after the
        compute queued so far; the part is released once it has been sent."""

    def exchange(self, value: object) -> list[Any]:
        """Return every process's value, in rank order: plain data, through the hosts; no device
        is waited for.
        """

    def everyone(self, value: object) -> list[Any]:
        """Exchange a value with all processes, also those that hold other parts of a copy; the
        first one's is first.
        """

    def of_copy(self, value: object) -> list[Any]:
        """Exchange a value with the processes that hold one copy together with this one."""

    def shared_memory(self, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of zeroed host memory at a page boundary that all processes of
        this machine share.
        """


@dataclass(frozen=True)
class BackendOptions:
    """What a user may say about a device."""

    page_locked: bool | None = (
        None  # lock host memory that the device copies from; None: as much as the system allows
    )
    # Processes that hold one copy of the model together; None: as the backend is made for.
    tensor_parallel_size: int | None = None
    sequence_parallel: bool = (
        False  # between attention and MLP each of these holds its part of the sequence only
    )
    deterministic: bool = (
        False  # have the device's libraries compute the same bits each time, before they are used
    )
    # What only this backend has, by name (`lema.config.backendsettings`).
    settings: Mapping[str, Any] = field(default_factory=dict)

    def refuse_parts(self, name: str) -> None:
        """Refuse to divide layers, for a backend that gives each process all. `ConfigError`: the
        user asks for it.
        """
        for setting in ("tensor_parallel_size", "sequence_parallel"):
            if getattr(self, setting) not in (None, False, 1):
                how = (
                    "leave it out: several processes train on parts of each batch; "
                    "shard_weights divides reading"
                )
                raise ConfigError(
                    f"the {name} backend gives each process whole layers", where=setting, how=how
                )


DEFAULTS = BackendOptions()


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of the device's memory: in use by this process, the most ever in use by it, and the
    device's total.

    `shared`: the device computes in host memory, so that a host buffer is a slot, and nothing is
    uploaded. `free`: what other processes leave to this one, with what it has; None: no others are
    known.
    """

    used: int
    peak: int
    total: int
    shared: bool = False
    free: int | None = None


@dataclass(frozen=True)
class Span:
    """Bytes of an upload's source, and where in the slot they go."""

    start: int  # in the source
    nbytes: int
    slot: int  # in the slot


@dataclass(frozen=True)
class SlotLayout:
    """Which bytes of a source go where in a slot. What of the slot is in no span is undefined."""

    nbytes: int  # of the slot, from its start, that the upload is
    spans: tuple[Span, ...]  # none overlap, in the source or in the slot

    @property
    def copied(self) -> int:
        """Bytes that are copied."""
        return sum(span.nbytes for span in self.spans)


class Upload(Protocol):
    """One layer's bytes on their way into a device slot."""

    def wait(self) -> Tensor:
        """Return the slot, uint8 `[nbytes]`; compute queued after this call sees the uploaded
        bytes. It may be called again after `release`, and the slot released again, until something
        else is uploaded to these slots: until then the bytes are still there. What an earlier
        `wait` returned is not used any more."""

    def release(self) -> None:
        """Give the slot back; it is refilled only after the compute queued so far has finished."""

    def drained(self) -> None:
        """Block until the source may be overwritten. It may be called before `release` and more
        than once. Calls come from a reader thread, and from the training thread only for a copy
        that has long ended."""


class DeviceSlots(Protocol):
    """A ring of equal slots on the device. The core asks for rings of one slot each, and so
    chooses which to refill.
    """

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        """Start copying `source`, uint8 `[n]` with n at most the slot's size, into the next free
        slot. It may be dropped meanwhile. Slots are released in any order, uploads also without a
        wait. With a `layout` only the bytes in its spans are copied, each span to its place, and
        the slot is `[layout.nbytes]`; `n` may then be more. Only a device that has memory of its
        own, and addresses, is given one."""


class Download(Protocol):
    """One tensor on its way from the device to host memory."""

    def release(self) -> None:
        """Let the source go: compute queued after this call may overwrite it, or its memory if
        it is freed.
        """

    def landed(self) -> None:
        """Block until the bytes are in host memory. Any thread may call it, more than once."""


@dataclass(frozen=True)
class Exchange:
    """Collectives of a tensor-parallel group, and the bytes that each of its processes sends to
    another in them.
    """

    count: int = 0
    nbytes: int = 0

    def plus(self, addend: Exchange, times: int = 1) -> Exchange:
        """Return these and the other ones, so many times; those since an earlier look are these
        `plus(before, -1)`.
        """
        return Exchange(self.count + times * addend.count, self.nbytes + times * addend.nbytes)


class Parallel(Protocol):
    """How layers lie over a tensor-parallel group. Every process of it makes the same calls in
    the same order.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """How many processes the group has."""

    @property
    def exchanged(self) -> Exchange:
        """What its collectives have exchanged so far, those of tensors without values among
        them.
        """

    def shard(self, layer: nn.Module, words: Collection[str] = ()) -> None:
        """Replace the modules of a model's decoder layers, adapters among them, by this rank's
        share of them. It is given the model, or one layer where the backend needs to know no more.
        `words` names weights of the input embeddings and the head, on `meta`, that may be divided
        over the vocabulary; what they return stays whole. Each parameter that is divided has an
        attribute `parallel_layout` afterwards (`lema.backend.layout`), by which the core knows
        which part of a stored tensor this rank reads, and how to put adapters together."""

    def cross_entropy(
        self, logits: Callable[[], Tensor], targets: Tensor, **options: Any
    ) -> Tensor:
        """Return torch's `cross_entropy` in fp32, with its `options`, of what the model's head
        makes when `logits` is called, `[rows, tokens, vocabulary]`. Of a head that is divided each
        rank then makes its words' only, and what the embeddings return meanwhile is thrown away."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the group that are partial, because each rank has formed only a
        part of them.
        """

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the group, on the device: what several ranks hold
        alike counts once.
        """

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""

    def enter_layers(self, hidden: Tensor) -> Tensor:
        """Return what of a hidden state `[batch, sequence, hidden]` this rank gives its first
        layer; differentiable.
        """

    def leave_layers(self, hidden: Tensor) -> Tensor:
        """Return the whole hidden state of what this rank's last layer has made; differentiable."""


class Carrier(Protocol):
    """How bytes get from one device to host memory and back; all that some parts of the core
    need of a `Backend`.
    """

    @property
    def device(self) -> torch.device:
        """The device that bytes are carried from and to."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of host memory of its own, at a page boundary."""

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots of `nbytes` bytes on the device."""

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying `source`, on the device, to `target`, in a host buffer, after the compute
        queued so far. They have one shape, dtype and strides. Until `release`, the source stays as
        it is; both may be dropped meanwhile. An upload from `target` after this call brings the
        downloaded bytes, without a wait in between."""


@runtime_checkable
class Backend(Carrier, Protocol):
    """One device, as the core sees it: adapters, boundary activations and resident tensors live
    there.

    The constructor takes the device string and `BackendOptions`, and joins the process group, if
    any. What a backend may have beside this is in `lema.backend.registry`: `keeps`, `attention`,
    `fuse`, `planned`, `fast_dtype`, and `workspace_bytes` and `allocation_granularity`, the device
    memory that is taken beside tensors. `end_visit` is called after visits.
    """

    @property
    def name(self) -> str:
        """The name of the entry point."""

    @property
    def parallel(self) -> Parallel:
        """The tensor-parallel group this process belongs to."""

    @property
    def replicas(self) -> Replicas:
        """The data-parallel group this process belongs to."""

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` of host memory at a page boundary, page-locked where that helps,
        of exact size. `memory`, at a page boundary and of that size, is taken in place of new
        memory, and locked until it is dropped.
        """

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context in which a layer with weights of `dtype` is computed."""

    def rng_state(self) -> Tensor:
        """Return the state of the generator that dropout on this device draws from."""

    def set_rng_state(self, state: Tensor) -> None:
        """Put back a state that `rng_state` returned."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step (lazy devices run their graph here)."""

    def synchronize(self) -> None:
        """Block until all queued work is done."""

    def memory(self) -> MemoryStats:
        """Return the device's memory, in bytes."""

    def close(self) -> None:
        """Give back what the constructor took."""
