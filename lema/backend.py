"""The seam: what a device must offer for the core to stream on it, and how a backend is found.

Backends are entry points of the group `lema.backends`; a third party adds one without touching this project. The
protocols state intent, not mechanism: *compute queued after `wait` sees the bytes*, *refilled only after the compute
queued so far*. How a device keeps those promises (streams, events, nothing at all) is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lema.errors import BackendUnavailable, ConfigError
from lema.replicas import Alone, Gathering, Replicas

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "Alone",
    "Backend",
    "BackendInfo",
    "BackendOptions",
    "DeviceSlots",
    "Download",
    "Downloaded",
    "Gathering",
    "MemoryStats",
    "Parallel",
    "Replicas",
    "SingleProcess",
    "Upload",
    "available",
    "has_addresses",
    "kept_unasked",
    "load",
    "planned",
]

GROUP = "lema.backends"


@dataclass(frozen=True)
class BackendOptions:
    """What a user may say about a device.

    Attributes:
        page_locked: lock host memory that the device copies from; None: as much as the system allows.
        tensor_parallel_size: processes that hold one copy of the model together; None: as the backend is made for.
        sequence_parallel: between attention and MLP each of these holds its part of the sequence only.
        settings: what only this backend has, by name (`lema.backendsettings`).
    """

    page_locked: bool | None = None
    tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def refuse_parts(self, name: str) -> None:
        """Refuse to divide layers, for a backend that gives each process the whole of them.

        Raises:
            ConfigError: the user asks for it.
        """
        for setting in ("tensor_parallel_size", "sequence_parallel"):
            if getattr(self, setting) not in (None, False, 1):
                raise ConfigError(
                    f"the {name} backend gives each process whole layers",
                    where=setting,
                    how="leave it out: several processes train on parts of each batch; shard_weights divides reading",
                )


DEFAULTS = BackendOptions()


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of the device's memory: in use by this process, the most ever in use by it, and the device's total.

    `shared`: the device computes in host memory, so that a host buffer is a slot, and nothing is uploaded.
    """

    used: int
    peak: int
    total: int
    shared: bool = False


class Upload(Protocol):
    """One layer's bytes on their way into a device slot."""

    def wait(self) -> Tensor:
        """Return the slot, uint8 `[nbytes]`; compute queued after this call sees the uploaded bytes.

        It may be called again after `release`, and the slot released again, until something else is uploaded to these
        slots: until then the bytes are still there. What an earlier `wait` returned is not used any more.
        """

    def release(self) -> None:
        """Give the slot back; it is refilled only after the compute queued so far has finished."""

    def drained(self) -> None:
        """Block until the source may be overwritten.

        Called from a reader thread, and from the training thread only of a copy that has long ended; more than once at
        times, and before `release` too.
        """


class DeviceSlots(Protocol):
    """A ring of equal slots on the device; `upload` takes the next free one.

    The core asks for rings of one slot each, and so chooses which to refill.
    """

    def upload(self, source: Tensor) -> Upload:
        """Start copying `source`, uint8 `[n]` with n at most the slot's size, into a slot. It may be dropped meanwhile.

        Slots are released in any order, and an upload nobody waited for may be released too.
        """


class Download(Protocol):
    """One tensor on its way from the device to host memory."""

    def release(self) -> None:
        """Let the source go: compute queued after this call may overwrite it, or its memory if it is freed."""

    def landed(self) -> None:
        """Block until the bytes are in host memory. Any thread may call it, more than once."""


class Downloaded:
    """The `Download` of a device whose copies have ended when they are begun."""

    def release(self) -> None:
        """Nothing reads the source any more."""

    def landed(self) -> None:
        """The bytes are there."""


class Parallel(Protocol):
    """How layers lie over a tensor-parallel group. Every process of it makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """How many processes the group has."""

    def shard(self, layer: nn.Module) -> None:
        """Replace the modules of a model's decoder layers, adapters among them, by this rank's share of them.

        Each parameter that is divided has an attribute `parallel_layout` afterwards (`lema.layout`), by which the core
        knows what of a stored tensor this rank reads, and how to put adapters together.

        Args:
            layer: the model, or one layer where the backend needs to know no more.
        """

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum over the group the gradients of which each rank has formed a part only."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the group, on the device: what several ranks hold alike counts once."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""

    def enter_layers(self, hidden: Tensor) -> Tensor:
        """Return what of a hidden state `[batch, sequence, hidden]` this rank gives its first layer; differentiable."""

    def leave_layers(self, hidden: Tensor) -> Tensor:
        """Return the whole hidden state of what this rank's last layer has made; differentiable."""


@runtime_checkable
class Backend(Protocol):
    """One device, as the core sees it.

    The constructor takes the device string and `BackendOptions`, and joins the process group, if any.
    """

    @property
    def name(self) -> str:
        """The name of the entry point."""

    @property
    def device(self) -> torch.device:
        """Where adapters, boundary activations and resident tensors live."""

    @property
    def parallel(self) -> Parallel:
        """The tensor-parallel group this process belongs to."""

    @property
    def replicas(self) -> Replicas:
        """The data-parallel group this process belongs to."""

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` of host memory at a page boundary, page-locked where that helps, of exact size.

        Args:
            nbytes: how many.
            memory: take this memory, at a page boundary and of that size, instead of new; locked until it is dropped.
        """

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots of `nbytes` bytes."""

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying `source`, on the device, to `target`, in a host buffer, after the compute queued so far.

        They have one shape, dtype and strides. Until `release`, the source stays as it is; both may be dropped
        meanwhile. What is uploaded from `target` after this call is what it brings; nobody need wait in between.
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


class SingleProcess:
    """The `Parallel` of a backend that runs in one process: nothing is sharded, nothing is reduced."""

    rank = 0
    size = 1

    def shard(self, layer: nn.Module) -> None:
        """Leave the layer whole."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients as they are."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients."""
        from torch.nn.utils import get_total_norm

        return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the one tensor there is."""
        return [tensor]

    def enter_layers(self, hidden: Tensor) -> Tensor:
        """Return all of it."""
        return hidden

    def leave_layers(self, hidden: Tensor) -> Tensor:
        """Return what there is."""
        return hidden


@dataclass(frozen=True)
class BackendInfo:
    """One installed backend: its name, the package it comes from, and why it cannot run here (None: it can)."""

    name: str
    source: str
    reason: str | None

    @property
    def ok(self) -> bool:
        """Whether the backend can run on this machine."""
        return self.reason is None


def has_addresses(device: torch.device) -> bool:
    """Return whether a tensor's memory can be pointed at: not on a lazy device, whose memory is its runtime's."""
    import torch

    one = torch.empty(1, dtype=torch.uint8, device=device)
    return one.is_meta or one.data_ptr() != 0


def kept_unasked(backend: Backend | str) -> float:
    """Return the part of its memory up to which a backend has layers stay where the settings set no limit; 0: none do.

    A backend for which that is the usual way has an attribute `keeps` that says so.

    Args:
        backend: one that is open, or what the settings name it by.

    Raises:
        BackendUnavailable: as `load`.
    """
    return float(getattr(_factory(backend)[0] if isinstance(backend, str) else backend, "keeps", 0.0))


def planned(device: str, options: BackendOptions = DEFAULTS) -> Parallel:
    """Return how a backend would have layers lie over processes; none has to be there, and no device.

    A backend that divides layers has a function `planned` that takes the options.

    Raises:
        BackendUnavailable: as `load`.
        ConfigError: it cannot do what the options ask for.
    """
    factory, name = _factory(device)
    divided: Callable[[BackendOptions], Parallel] | None = getattr(factory, "planned", None)
    if divided is None:
        options.refuse_parts(name)
        return SingleProcess()
    return divided(options)


def available() -> list[BackendInfo]:
    """Open every installed backend once and say which can run here."""
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        reason = None
        try:
            _open(point, point.name).close()
        except BackendUnavailable as error:
            reason = error.what
        found.append(BackendInfo(point.name, point.value, reason))
    return found


def load(device: str, options: BackendOptions = DEFAULTS) -> Backend:
    """Open the backend that `device` names, and no other.

    Args:
        device: the backend's name, with a device number after a colon where it has several: `"name"`, `"name:1"`.
        options: what the user says about it.

    Raises:
        BackendUnavailable: no such backend is installed, or it cannot run here; the message says what is missing.
    """
    return _open(_point(device), device, options)


def _point(device: str) -> EntryPoint:
    name = device.partition(":")[0]
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise BackendUnavailable(
            f"no backend named {name!r} is installed",
            where=f"device: {device}",
            how=f"set device to one of: {', '.join(sorted(points)) or 'none is installed'}; `lema backends` lists them",
        )
    return points[name]


def _factory(device: str | EntryPoint) -> tuple[Any, str]:
    """Import what opens a backend; return it, and its name."""
    point = _point(device) if isinstance(device, str) else device
    try:
        return point.load(), point.name
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that it needs is absent
        raise BackendUnavailable(
            f"backend {point.name!r} cannot be imported: {error}", where=point.value, how="install what it needs"
        ) from error


def _open(point: EntryPoint, device: str, options: BackendOptions = DEFAULTS) -> Backend:
    backend = _factory(point)[0](device, options)
    if not isinstance(backend, Backend):
        raise BackendUnavailable(
            f"backend {point.name!r} does not implement lema.backend.Backend",
            where=point.value,
            how="lema.testing has the contract it must pass",
        )
    return backend
