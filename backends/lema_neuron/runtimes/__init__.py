"""What computes: each runtime is a module that is imported when it is chosen, and no earlier."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from lema.backend import BackendOptions, Replicas
from lema.backend.layout import KvLayout
from lema.backend.torchrun import Joined
from lema_neuron.comm import Comm
from lema_neuron.probe import Runtime
from lema_neuron.runtimes.computing import Computing

__all__ = ["RuntimeModule", "runtime_named"]

MODULES: dict[Runtime, str] = {"emulated": "emulated", "native": "native", "xla": "lazy"}


class RuntimeModule(Protocol):
    """What the module of a runtime has.

    Attributes:
        carrier: what `torch.distributed` calls the library that carries tensors between its devices.
        kv_layout: how its own parallel layers lay out copies of key and value heads.
    """

    carrier: str
    kv_layout: KvLayout

    def prepare(self) -> None:
        """Do what must be done before processes are joined: set variables, import what registers a carrier."""

    def open(self, options: BackendOptions) -> Computing:
        """Open this process's device, once the processes have been joined."""

    def comm(self, joined: Joined) -> Comm:
        """Return the processes that hold one copy together, as parallel layers see them."""

    def replicas(self, joined: Joined) -> Replicas:
        """Return the processes that hold the same part of a copy as this one."""


def runtime_named(name: Runtime) -> RuntimeModule:
    """Import a runtime.

    Raises:
        BackendUnavailable: what it needs cannot be imported.
    """
    module: RuntimeModule = import_module(f"lema_neuron.runtimes.{MODULES[name]}").RUNTIME
    return module
