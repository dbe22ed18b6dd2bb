"""The public context managers: inside one of them, what autograd saves for the backward waits
off the device.
"""

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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lema.activations.diskstore import DiskStore, Store
from lema.activations.hooks import ModelHooks, Scope, current, entered, has_storage
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
    """A context in which nothing is moved, even inside a context that offloads."""

    def __init__(self) -> None:
        self._scopes: list[Scope | None] = []

    def __enter__(self) -> Self:
        self._scopes.append(scope := current())
        if scope is not None:
            scope.exclude()
        return self

    def __exit__(self, *_: object) -> None:
        if (scope := self._scopes.pop()) is not None:
            scope.include()


class OffloadActivations:
    """A context that moves the tensors that autograd saves on the device to host memory or disk
    until the backward.

    Enter it once per training step. The backward may run inside or after it. A moved tensor belongs
    to the graph that saved it, and is freed with it.

    Args:
        use_pin_memory: lock the pages of host memory, so that the device can copy on its own.
        use_streams: copy while the device computes; otherwise the computation waits for each copy.
        min_offload_size: size in bytes below which tensors stay.
        max_fwd_stash_size: pieces that may be on the device while they are copied away; the same
            number is fetched ahead in the backward. At least 1.
        model: its weights, its head and excluded modules are not moved, and "hidden_states" moves
            the inputs of its layers. None: every tensor that is not a parameter or a view of one
            counts as an activation.
        mode: True: everything that autograd saves. "legacy": the same without streams.
            "hidden_states": only inputs of decoder layers. "disk": everything, to a file without a
            name.
        offload_dir: directory of that file; in other modes the file takes what does not fit into
            host memory. None: the system's directory for temporary files, and no file in other
            modes.
        host_memory: limit of host memory in bytes; None: no limit as long as the machine has some
            left, and 256 MiB with "disk".
        disk_space: limit of disk space in bytes; None: the free space.
        exclude_modules: modules whose tensors stay: ends of their names, or regular expressions.
        warn_if_no_head: warn if no output head is found in the model.
        certify: keep moved tensors on the device, too, and compare every byte that returns.
        sync: on a lazy device, whose tensors have no storage, runs the computation so far. It is
            called when inputs of layers leave and return. "hidden_states" is the only mode there.

    Raises:
        ConfigError: a setting is wrong, or `exclude_modules` match nothing. DiskError: there is no
            space for the file.
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
        carrier = partial(
            carrier_for, use_streams=use_streams and mode != "legacy", pin_memory=use_pin_memory
        )
        self._scope = Scope()
        self._weights = WeightStorages(model)
        self._model_hooks = (
            None
            if model is None
            else ModelHooks(model, exclude=exclude_modules, warn_if_no_head=warn_if_no_head)
        )
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
            self.offload = Offload(
                choice, store, carrier, stash=max_fwd_stash_size, certify=certify
            )
        self._entered: list[ExitStack] = []
        # Not a method of this object, because what takes its hooks off must not keep it alive. What
        # waits for a backward does not go with it: the graph owns that.
        self._take_off = weakref.finalize(self, _take_off, self._model_hooks, self._layers)
        self._model = None if model is None else weakref.ref(model)

    @property
    def counters(self) -> Counters:
        """Counts of tensors that were seen, moved, returned and kept so far, with reasons."""
        return self.offload.counters

    @property
    def live_bytes(self) -> int:
        """Bytes that currently wait for a backward."""
        return self.offload.live_bytes

    def __enter__(self) -> Self:
        if not self._take_off.alive:
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._entered.pop().__exit__(kind, error, trace)
        finally:
            if not self._entered:
                self.offload.let_go()

    def close(self) -> None:
        """Remove the hooks from the model and free all memory. Tensors that still wait for a
        backward are lost.
        """
        if self._take_off.alive:
            self._take_off()
            self.offload.close()


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
    """Return the context in which a training step of a model offloads its activations.

    It works for any model of transformers, with or without a PEFT adapter, with few or all
    parameters trained, and wrapped for several processes or not. The output head, everything after
    it, and modules in `exclude_modules` stay on the device.

    Args:
        model: the model that is trained.
        use_pin_memory: lock the pages of host memory, so that the device can copy on its own.
        use_streams: copy while the device computes; otherwise the computation waits for each copy.
        min_offload_size: size in bytes below which tensors stay.
        max_fwd_stash_size: pieces that may be on the device while they are copied away. At least 1.
        warn_if_no_head: warn if no output head is found in the model.
        mode: as in `OffloadActivations`; False: nothing is moved.
        options: further arguments of `OffloadActivations`.

    Returns:
        A context to enter once per training step.

    Raises:
        ConfigError: a setting is wrong, or `exclude_modules` match nothing.
        DiskError: there is no space for the file.

    Example:
        ```python
        offload = get_lora_act_offloading_ctx_manager(model, mode="hidden_states")
        with offload:
            loss = model(**batch).loss
        loss.backward()
        ```
    """
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
        modes = ", ".join(map(repr, MODES))
        raise ConfigError(f"there is no mode {mode!r}", where="mode", how=f"use one of {modes}")
    if stash < 1:
        raise ConfigError(f"max_fwd_stash_size is {stash}", how="use at least 1")
    if mode == "hidden_states" and model is None:
        raise ConfigError(
            "hidden_states moves the inputs of a model's layers, but no model was given",
            where="model",
        )
    if by_value and mode != "hidden_states":
        raise ConfigError(
            f"{mode!r} moves storages, and tensors of this device have none",
            where="mode",
            how="use hidden_states",
        )


def _device_types(model: nn.Module | None) -> frozenset[str]:
    """Return the kinds of device whose memory is to be saved: those of the weights, but the
    host's only if alone.
    """
    if model is None:
        accelerator = torch.accelerator.current_accelerator()
        return frozenset(("cpu" if accelerator is None else accelerator.type,))
    kinds = {weight.device.type for weight in model.parameters()} - {"meta"}
    return frozenset(kinds - {"cpu"} or {"cpu"})


def _store(
    mode: Mode,
    allocate: Callable[[int], Tensor],
    offload_dir: str | Path | None,
    host_memory: int | None,
    disk_space: int | None,
) -> Store:
    if mode != "disk" and offload_dir is None:
        return HostStore(HostPool(allocate, host_memory))
    staging = HostPool(allocate, min(STAGING_BYTES, host_memory or STAGING_BYTES))
    file = OffloadFile(Path(offload_dir or tempfile.gettempdir()), WHAT, HOW)
    disk = DiskStore(file, staging, disk_space)
    return disk if mode == "disk" else HostStore(HostPool(allocate, host_memory), disk)


def _take_off(model_hooks: ModelHooks | None, layers: LayerInputs | None) -> None:
    if model_hooks is not None:
        model_hooks.close()
    if layers is not None:
        layers.close()
