"""The runtimes that compute: each is a module, which is imported only when it is chosen."""

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
    """The contents of a runtime's module.

    Attributes:
        carrier: the library that carries tensors between its devices, by its name in
            `torch.distributed`.
        kv_layout: how its own parallel layers lay out copies of key and value heads.
    """

    carrier: str
    kv_layout: KvLayout

    def prepare(self) -> None:
        """Prepare for joining the processes: set variables, and import the module that registers
        a carrier.
        """

    def open(self, options: BackendOptions) -> Computing:
        """Open this process's device, once the processes have been joined."""

    def comm(self, joined: Joined) -> Comm:
        """Return the processes that hold one copy together, as parallel layers see them."""

    def replicas(self, joined: Joined) -> Replicas:
        """Return the processes that hold the same part of a copy as this one."""


def runtime_named(name: Runtime) -> RuntimeModule:
    """Import a runtime.

    Raises:
        BackendUnavailable: a package that it needs cannot be imported.
    """
    module: RuntimeModule = import_module(f"lema_neuron.runtimes.{MODULES[name]}").RUNTIME
    return module
