"""The installed backends: which there are, and how one is found by the name of a device and
opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from lema.backend.group import SingleProcess
from lema.backend.protocols import DEFAULTS, Backend, BackendOptions, Parallel
from lema.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "BackendInfo",
    "available",
    "fast_dtype",
    "fused",
    "has_addresses",
    "in_host_memory",
    "load",
    "own_attention",
    "planned",
    "resident_fraction",
    "runs_anywhere",
    "workspace_memory",
]

GROUP = "lema.backends"
AUTO = "auto"  # the device of a run that names none: the first backend that can run here


@dataclass(frozen=True)
class BackendInfo:
    """One installed backend: its name, the package it comes from, and why it cannot run here (None:
    it can). `proven` says where LEMA has run with it, in words; empty: it does not say. A backend
    that does has an attribute `proven`: these words by the name of an entry point."""

    name: str
    source: str
    reason: str | None
    proven: str = ""

    @property
    def ok(self) -> bool:
        """Whether the backend can run on this machine."""
        return self.reason is None


def has_addresses(device: torch.device) -> bool:
    """Return whether a tensor's memory can be pointed at: not on a lazy device, whose memory is
    its runtime's.
    """
    import torch

    probe = torch.empty(1, dtype=torch.uint8, device=device)
    return probe.is_meta or probe.data_ptr() != 0


def in_host_memory(backend: Backend) -> bool:
    """Return whether a device that is not the host's processor computes in host memory: nothing is
    copied for it, but its kernels ask for aligned addresses as those of other accelerators do."""
    return backend.device.type != "cpu" and backend.memory().shared


def resident_fraction(backend: Backend | str) -> float:
    """Return the part of its memory up to which a backend has layers stay where the settings set no
    limit; 0: none do. A backend says so by an attribute `keeps`; it is given open, or by name (as
    `load`)."""
    return float(
        getattr(_factory(_point(backend)) if isinstance(backend, str) else backend, "keeps", 0.0)
    )


def workspace_memory(backend: Backend) -> tuple[int, int]:
    """Return the bytes of device memory that a backend's libraries of kernels take for themselves,
    and those of which memory for larger tensors is a multiple, which a plan counts; 0 and 1: none
    is known of. A backend says so by a function `workspace_bytes` and an attribute
    `allocation_granularity`."""
    workspace_bytes: Callable[[], int] | None = getattr(backend, "workspace_bytes", None)
    return 0 if workspace_bytes is None else workspace_bytes(), int(
        getattr(backend, "allocation_granularity", 1)
    )


def fast_dtype(backend: Backend | str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a backend computes weights of `dtype` fast: that, or a wider one. A
    backend of devices that may be slow in some type has a static function `fast_dtype`; it is given
    open, or by name (as `load`)."""
    provider = _factory(_point(backend)) if isinstance(backend, str) else backend
    choose_dtype: Callable[[torch.dtype], torch.dtype] | None = getattr(
        provider, "fast_dtype", None
    )
    return dtype if choose_dtype is None else choose_dtype(dtype)


def own_attention(backend: Backend) -> str | None:
    """Return the name that `transformers` knows a backend's own attention by, which `arithmetic:
    fast` computes with; None: it has none. A backend that does has a function `attention` that
    registers it and returns the name."""
    register: Callable[[], str] | None = getattr(backend, "attention", None)
    return None if register is None else register()


def fused(backend: Backend, model: PreTrainedModel, layers: nn.ModuleList) -> str | None:
    """Have a backend fuse what modules of a model's decoder `layers` do, for `arithmetic: fast`;
    return what it says of that; None: it fuses nothing. A backend that does has a function `fuse`
    that takes both."""
    fuse: Callable[[PreTrainedModel, nn.ModuleList], str] | None = getattr(backend, "fuse", None)
    return None if fuse is None else fuse(model, layers)


def runs_anywhere(device: str) -> bool:
    """Return whether a device needs nothing that a machine may lack: its backend is the last
    resort of `load`.
    """
    with suppress(BackendUnavailable):
        return device != AUTO and bool(getattr(_factory(_point(device)), "last_resort", False))
    return False


def planned(device: str, options: BackendOptions = DEFAULTS) -> Parallel:
    """Return how a backend would have layers lie over processes, without a device or other
    processes. A backend that divides layers has a function `planned` that takes the options.
    `BackendUnavailable` is as of `load`; `ConfigError`: it cannot do what the options ask for."""
    point = _point(device)
    divided: Callable[[BackendOptions], Parallel] | None = getattr(_factory(point), "planned", None)
    if divided is None:
        options.refuse_parts(point.name)
        return SingleProcess()
    return divided(options)


def available() -> list[BackendInfo]:
    """Open every installed backend once and say which can run here."""
    backends = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        reason = None
        proven = ""
        try:
            proven = getattr(_factory(point), "proven", {}).get(point.name, "")
            _open(point, point.name).close()
        except BackendUnavailable as error:
            reason = error.what
        backends.append(BackendInfo(point.name, point.value, reason, proven))
    return backends


def load(device: str, options: BackendOptions = DEFAULTS) -> Backend:
    """Open the backend that `device` names (`"name"`, or `"name:1"` where it has several devices),
    and no other. "auto" is the first that opens, in the order of their names; one with a true
    attribute `last_resort` comes after all others. `BackendUnavailable`: no such backend is
    installed, or it cannot run here; the message says what is missing.
    """
    return _first(options)[1] if device == AUTO else _open(_point(device), device, options)


def _first(options: BackendOptions) -> tuple[str, Backend]:
    """Open the first backend that can run here; return its name as the settings have it, too."""
    ranked = []
    why = []
    for point in entry_points(group=GROUP):
        with suppress(BackendUnavailable):
            ranked.append((bool(getattr(_factory(point), "last_resort", False)), point.name, point))
    for _, name, point in sorted(ranked):
        try:
            return name, _open(point, name, options)
        except BackendUnavailable as error:
            why.append(f"{name}: {error.what}")
    raise BackendUnavailable(
        f"no backend can run here: {'; '.join(why) or 'none is installed'}", where="device: auto"
    )


@cache
def _chosen() -> str:
    """Return the name of the backend that "auto" opens."""
    name, backend = _first(DEFAULTS)
    backend.close()
    return name


def _point(device: str) -> EntryPoint:
    name = _chosen() if device == AUTO else device.partition(":")[0]
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        how = (
            f"set device to one of: {', '.join(sorted(points)) or 'none is installed'}; `lema "
            "backends` lists them"
        )
        raise BackendUnavailable(
            f"no backend named {name!r} is installed", where=f"device: {device}", how=how
        )
    return points[name]


def _factory(point: EntryPoint) -> Callable[..., Any]:
    """Import the class or function that opens a backend."""
    try:
        factory: Callable[..., Any] = point.load()
        return factory
    except (
        ImportError,
        AttributeError,
        OSError,
    ) as error:  # OSError: a shared library that it needs is absent
        what = f"backend {point.name!r} cannot be imported: {error}"
        raise BackendUnavailable(
            what, where=point.value, how="install the packages that it needs"
        ) from error


def _open(point: EntryPoint, device: str, options: BackendOptions = DEFAULTS) -> Backend:
    backend = _factory(point)(device, options)
    if not isinstance(backend, Backend):
        what = f"backend {point.name!r} does not implement lema.backend.protocols.Backend"
        raise BackendUnavailable(
            what, where=point.value, how="lema.testing has the contract it must pass"
        )
    return backend
