"""The `neuron` backend: layers divided among the processes that `torchrun` started, one for each NeuronCore.

What computes is a runtime (`lema_neuron.probe`). What is here is the same for all of them: the grid of processes, and
how layers lie over it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lema.backend import BackendOptions, DeviceSlots, Download, MemoryStats, Parallel, Replicas, SingleProcess
from lema.backend.layout import KvLayout
from lema.backend.torchrun import join_in_parts
from lema.errors import BackendUnavailable
from lema_neuron.probe import choose_runtime, look
from lema_neuron.runtimes import runtime_named
from lema_neuron.settings import KV_LAYOUT, RUNTIME
from lema_neuron.standin import StandIn
from lema_neuron.watch import PATIENCE_AT_START, Watch

__all__ = ["NeuronBackend"]


class NeuronBackend:
    """One NeuronCore, or a process that stands for one.

    Args:
        device: `"neuron"`.
        options: the runtime, and how many processes hold one copy of the model; all, where nothing is said.

    Attributes:
        runtime: the name of what computes.
        keeps: the part of the device's memory up to which layers stay where the settings set no limit. What compiled
            graphs take beside their tensors is not known beforehand; the rest is for them.

    Raises:
        BackendUnavailable: the runtime or the device is missing; says what there is and what to install.
        ConfigError: the processes cannot be divided into groups of that size.
    """

    name = "neuron"
    keeps = 0.75

    def __init__(self, device: str = "neuron", options: BackendOptions | None = None) -> None:
        if device != self.name:
            raise BackendUnavailable(
                "each process computes on a NeuronCore of its own",
                where=f"device: {device}",
                how="write device: neuron",
            )
        options = options or BackendOptions()
        self.runtime = choose_runtime(str(options.settings.get("neuron_runtime", RUNTIME.default)), look())
        runtime = runtime_named(self.runtime)
        runtime.prepare()
        joined = join_in_parts(runtime.carrier, options.tensor_parallel_size, PATIENCE_AT_START)
        self._leave = joined.leave
        self._device = runtime.open(options)
        self._replicas = runtime.replicas(joined)
        self._watch = Watch()
        self._parallel: Parallel = SingleProcess()
        if joined.parts is not None:
            from lema_neuron.divide import Division  # peft and transformers, which `lema backends` can do without

            layout: KvLayout | str = options.settings.get("neuron_kv_layout", KV_LAYOUT.default)
            self._parallel = Division(
                self._watch.around(runtime.comm(joined)),
                sequence_parallel=options.sequence_parallel,
                kv_layout=runtime.kv_layout if layout == "auto" else layout,  # type: ignore[arg-type] # one of its choices
            )

    @staticmethod
    def planned(options: BackendOptions) -> Parallel:
        """Return how layers would lie over `tensor_parallel_size` processes, as the first of them sees it, for a plan:
        no runtime is needed, and no other process."""
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
        """What the runtime computes on."""
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
        """Autocast to half-precision weights' dtype; full-precision weights compute as they are."""
        return self._device.autocast(dtype)

    def rng_state(self) -> Tensor:
        """Return the state of the generator that dropout draws from."""
        return self._device.rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Put back a state that `rng_state` returned."""
        self._device.set_rng_state(state)

    def end_step(self) -> None:
        """Run what was computed, on a lazy device; from the first step on, others are waited for less long."""
        self._device.end_step()
        self._watch.step_ended()

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        self._device.synchronize()

    def memory(self) -> MemoryStats:
        """Return the device's memory, in bytes."""
        return self._device.memory()

    def close(self) -> None:
        """Leave the processes, and give the device back."""
        self._watch.close()
        try:
            self._device.close()
        finally:
            self._leave()
