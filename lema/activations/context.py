"""The public context managers: inside one of them, what autograd saves for the backward waits off the device."""

import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lema.activations.diskstore import DiskStore, Store
from lema.activations.hooks import Scope, Sites, current, entered, has_storage
from lema.activations.hoststore import HostPool, HostStore
from lema.activations.layers import LayerInputs, only_layer_inputs, only_layer_values
from lema.activations.lazy import ByValue
from lema.activations.offload import Offload
from lema.activations.policy import WeightStorages, everything
from lema.activations.protocols import Counters
from lema.backend.torchstreams import carrier_for
from lema.errors import ConfigError
from lema.storage.spillfile import OffloadFile

__all__ = ["Mode", "NoOpManager", "OffloadActivations", "get_lora_act_offloading_ctx_manager"]

Mode = Literal[True, "legacy", "hidden_states", "disk"]
MODES = (True, "legacy", "hidden_states", "disk")
WHAT = "saved activations"
HOW = "free some space, or give an offload_dir on another disk"
STAGING_BYTES = 256 << 20  # of host memory, through which pieces go to a file and come back


class NoOpManager:
    """A context in which nothing is moved, though one that offloads is open around it."""

    def __init__(self) -> None:
        self._scopes: list[Scope | None] = []

    def __enter__(self) -> Self:
        self._scopes.append(scope := current())
        if scope is not None:
            scope.excluded += 1
        return self

    def __exit__(self, *_: object) -> None:
        if (scope := self._scopes.pop()) is not None:
            scope.excluded -= 1


class OffloadActivations:
    """A context in which what autograd saves on the device is moved to host memory, or to disk, until the backward.

    It may be entered again and again, once per training step; the backward may run inside or after it. What is moved
    belongs to the graph that saved it, and goes with it.

    Args:
        use_pin_memory: lock the pages of host memory, so that the device copies from and to it by itself.
        use_streams: let copies run beside the compute; otherwise each has ended before the compute goes on.
        min_offload_size: smaller tensors stay, in bytes.
        max_fwd_stash_size: pieces of memory that may still be on the device while they leave; as many are fetched ahead
            in the backward. At least 1.
        model: whose weights are never moved, whose head and excluded modules are left alone, and whose layers' inputs
            "hidden_states" moves; None: no model is known, so what is no parameter or view of one counts as activation.
        mode: True: all that autograd saves. "legacy": that, without streams. "hidden_states": inputs of decoder layers
            alone. "disk": all, to a file without a name.
        offload_dir: where that file is; with another mode it takes what finds no room in host memory. None: where the
            system keeps temporary files, and no such file for other modes.
        host_memory: bytes of host memory to use at most; None: as long as some is left to the machine, and with "disk"
            256 MiB.
        disk_space: bytes of disk to use at most; None: as many as are free.
        exclude_modules: modules in which nothing is moved: the ends of their names, or regular expressions for them.
        warn_if_no_head: warn where the model has no output head that is known as one.
        certify: compare every byte that comes back with what left, which is kept on the device for it.
        sync: on a lazy device, whose tensors have no storage, runs what was computed so far: it is called where layers'
            inputs leave and come back. There "hidden_states" is the only mode.

    Raises:
        ConfigError: a setting is wrong, or `exclude_modules` match nothing. DiskError: there is no space for the file.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        model: nn.Module | None = None,
        mode: Mode = True,
        offload_dir: str | Path | None = None,
        host_memory: int | None = None,
        disk_space: int | None = None,
        exclude_modules: Sequence[str] = (),
        warn_if_no_head: bool = True,
        certify: bool = False,
        sync: Callable[[], None] | None = None,
    ) -> None:
        by_value = model is not None and not all(map(has_storage, islice(model.parameters(), 1)))
        _check(mode, max_fwd_stash_size, model, by_value=by_value)
        self.mode = mode
        carrier = partial(carrier_for, use_streams=use_streams and mode != "legacy", pin_memory=use_pin_memory)
        self._scope, self._weights = Scope(), WeightStorages(model)
        self._sites = None if model is None else Sites(model, exclude=exclude_modules, warn_if_no_head=warn_if_no_head)
        self._layers = None if model is None else LayerInputs(model)
        self._devices = set(_device_types(model))
        self._by_value = by_value
        self.offload: Offload | ByValue
        if by_value:
            self.offload = ByValue(only_layer_values, sync=sync or (lambda: None))
        else:
            but = only_layer_inputs if mode == "hidden_states" else None
            choice = everything(self._weights, self._devices, min_bytes=min_offload_size, but=but)
            allocate = carrier(torch.device(min(self._devices))).host_buffer
            store = _store(mode, allocate, offload_dir, host_memory, disk_space)
            self.offload = Offload(choice, store, carrier, stash=max_fwd_stash_size, certify=certify)
        self._entered: list[ExitStack] = []
        # Not a method of this object, because what closes it must not keep it alive.
        self._close = weakref.finalize(self, _close, self.offload, self._sites, self._layers)
        self._model = None if model is None else weakref.ref(model)

    @property
    def counters(self) -> Counters:
        """What was seen, moved, brought back and left so far, and why."""
        return self.offload.counters

    @property
    def live_bytes(self) -> int:
        """Bytes that wait for a backward now."""
        return self.offload.live_bytes

    def __enter__(self) -> Self:
        if not self._close.alive:
            raise ConfigError("this offloading context is closed", how="build another")
        if not self._entered:
            self.offload.let_go()
            self._scope.reset()
            if not self._by_value:
                self._weights.refresh()
                self._devices.clear()
                self._devices |= _device_types(None if self._model is None else self._model())
            self.offload.order()
        with ExitStack() as stack:
            stack.enter_context(entered(self._scope))
            if self._layers is not None:
                stack.enter_context(self._layers.opened())
            stack.enter_context(saved_tensors_hooks(self.offload.pack, methodcaller("unpack")))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._entered.pop().__exit__(kind, error, trace)
        finally:
            if not self._entered:
                self.offload.let_go()

    def close(self) -> None:
        """Take the hooks off the model and give all memory back. What still waits for a backward is lost."""
        self._close()


def get_lora_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
    *,
    mode: Mode | Literal[False] = True,
    **options: Any,
) -> OffloadActivations | NoOpManager:
    """Return the context in which a training step of `model` offloads its activations. For any `transformers` model,
    with or without an adapter of PEFT, all of whose parameters may train or few, wrapped for several processes or not.
    The output head and what comes after it stay on the device, as does what `exclude_modules` names. Arguments and
    errors are those of `OffloadActivations`; `mode` may be False as well: nothing is moved."""
    if mode is False:  # not a null context, because one that offloads may be open around this one
        return NoOpManager()
    return OffloadActivations(
        use_pin_memory,
        use_streams,
        min_offload_size,
        max_fwd_stash_size,
        model=model,
        mode=mode,
        warn_if_no_head=warn_if_no_head,
        **options,
    )


def _check(mode: Mode, stash: int, model: nn.Module | None, *, by_value: bool) -> None:
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ConfigError(f"there is no mode {mode!r}", where="mode", how=f"use one of {known}")
    if stash < 1:
        raise ConfigError(f"max_fwd_stash_size is {stash}", how="use at least 1")
    if mode == "hidden_states" and model is None:
        raise ConfigError("hidden_states moves the inputs of a model's layers, but no model was given", where="model")
    if by_value and mode != "hidden_states":
        raise ConfigError(
            f"{mode!r} moves storages, and tensors of this device have none", where="mode", how="use hidden_states"
        )


def _device_types(model: nn.Module | None) -> frozenset[str]:
    """Return the kinds of device whose memory is to be saved: those of the weights, but the host's only if alone."""
    if model is None:
        accelerator = torch.accelerator.current_accelerator()
        return frozenset(("cpu" if accelerator is None else accelerator.type,))
    kinds = {weight.device.type for weight in model.parameters()} - {"meta"}
    return frozenset(kinds - {"cpu"} or {"cpu"})


def _store(
    mode: Mode, allocate: Any, offload_dir: str | Path | None, host_memory: int | None, disk_space: int | None
) -> Store:
    if mode != "disk" and offload_dir is None:
        return HostStore(HostPool(allocate, host_memory))
    staging = HostPool(allocate, min(STAGING_BYTES, host_memory or STAGING_BYTES))
    file = OffloadFile(Path(offload_dir or tempfile.gettempdir()), WHAT, HOW)
    disk = DiskStore(file, staging, disk_space)
    return disk if mode == "disk" else HostStore(HostPool(allocate, host_memory), disk)


def _close(offload: Offload | ByValue, sites: Sites | None, layers: LayerInputs | None) -> None:
    offload.close()
    if sites is not None:
        sites.close()
    if layers is not None:
        layers.close()
