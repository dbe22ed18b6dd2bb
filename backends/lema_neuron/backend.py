"""The `neuron` backend: layers divided among the processes that `torchrun` started, one for each
NeuronCore.

A runtime (`lema_neuron.probe`) does the computing. This file has the part that all runtimes share:
the grid of processes, and how layers are divided over it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema.backend import (
    BackendOptions,
    DeviceSlots,
    Download,
    MemoryStats,
    Parallel,
    Replicas,
    SingleProcess,
)
from lema.backend.layout import KvLayout
from lema.backend.torchrun import join_in_parts
from lema.errors import BackendUnavailable
from lema_neuron.probe import choose_runtime, probe_machine
from lema_neuron.runtimes import runtime_named
from lema_neuron.settings import KV_LAYOUT, RUNTIME
from lema_neuron.standin import StandIn
from lema_neuron.watch import PATIENCE_AT_START, Watch

__all__ = ["NeuronBackend"]


class NeuronBackend:
    """One NeuronCore, or a process that emulates one.

    Args:
        device: `"neuron"`.
        options: the runtime, and how many processes hold one copy of the model (default: all of
            them).

    Attributes:
        proven: where it has run, by name.
        runtime: its name.
        keeps: the part of the device's memory that layers may fill if the settings set no limit.
            The rest is for compiled graphs, because the memory that they need in addition to their
            tensors is not known beforehand.

    Raises:
        BackendUnavailable: the runtime or the device is missing; the message says what to install.
        ConfigError: the processes cannot be divided into groups of that size.
    """

    name = "neuron"
    keeps = 0.75
    proven: ClassVar = {
        "neuron": "on no hardware yet; with processes on the CPU in the place of cores"
    }

    def __init__(self, device: str = "neuron", options: BackendOptions | None = None) -> None:
        if device != self.name:
            raise BackendUnavailable(
                "each process computes on a NeuronCore of its own",
                where=f"device: {device}",
                how="write device: neuron",
            )
        options = options or BackendOptions()
        self.runtime = choose_runtime(
            str(options.settings.get("neuron_runtime", RUNTIME.default)), probe_machine()
        )
        runtime = runtime_named(self.runtime)
        runtime.prepare()
        joined = join_in_parts(runtime.carrier, options.tensor_parallel_size, PATIENCE_AT_START)
        self._leave = joined.leave
        self._device = runtime.open(options)
        self._replicas = runtime.replicas(joined)
        self._watch = Watch()
        self._parallel: Parallel = SingleProcess()
        if joined.parts is not None:
            # peft and transformers, which `lema backends` can do without
            from lema_neuron.divide import Division

            layout: KvLayout | str = options.settings.get("neuron_kv_layout", KV_LAYOUT.default)
            self._parallel = Division(
                self._watch.around(runtime.comm(joined)),
                sequence_parallel=options.sequence_parallel,
                kv_layout=runtime.kv_layout if layout == "auto" else layout,  # type: ignore[arg-type] # one of its choices
            )

    @staticmethod
    def planned(options: BackendOptions) -> Parallel:
        """Return how layers would be divided over `tensor_parallel_size` processes, as the first of
        them sees it. This is for a plan: it needs no runtime and no other process."""
        from lema_neuron.divide import Division

        size = options.tensor_parallel_size or 1
        layout: KvLayout | str = options.settings.get("neuron_kv_layout", KV_LAYOUT.default)
        return Division(
            StandIn(0, size),
            sequence_parallel=options.sequence_parallel,
            kv_layout="tile" if layout == "auto" else layout,  # type: ignore[arg-type] # one of its choices
        )

    @property
    def device(self) -> torch.device:
        """The device that the runtime computes on."""
        return self._device.device

    @property
    def parallel(self) -> Parallel:
        """The processes that hold one copy of the model together."""
        return self._parallel

    @property
    def replicas(self) -> Replicas:
        """The processes that hold the same part of a copy as this one."""
        return self._replicas

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]`, page-aligned; the runtime locks no memory."""
        return self._device.host_buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots of `nbytes` bytes."""
        return self._device.device_slots(nbytes, count)

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying to host memory, after the compute queued so far."""
        return self._device.download(source, target)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to the weights' dtype if that is half precision; full precision needs no
        autocast.
        """
        return self._device.autocast(dtype)

    def rng_state(self) -> Tensor:
        """Return the state of the generator that dropout draws from."""
        return self._device.rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Restore a state that `rng_state` returned."""
        self._device.set_rng_state(state)

    def end_step(self) -> None:
        """Run the collected graph, on a lazy device. After the first step, waits for other ranks
        end sooner.
        """
        self._device.end_step()
        self._watch.step_ended()

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        self._device.synchronize()

    def memory(self) -> MemoryStats:
        """Return the device's memory, in bytes."""
        return self._device.memory()

    def close(self) -> None:
        """Leave the process group, and release the device."""
        self._watch.close()
        try:
            self._device.close()
        finally:
            self._leave()
