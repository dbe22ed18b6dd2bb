"""No device: every process computes on the CPU and emulates one NeuronCore. It is never chosen
automatically.
"""

from __future__ import annotations

from lema.backend import Alone, BackendOptions, Replicas
from lema.backend.layout import KvLayout
from lema.backend.torchrun import Joined
from lema_cpu import CpuBackend
from lema_neuron.comm import C10dComm, Comm
from lema_neuron.runtimes.computing import Computing

__all__ = ["RUNTIME"]


class Emulated:
    """The runtime."""

    carrier = "gloo"
    kv_layout: KvLayout = "tile"

    def prepare(self) -> None:
        """Do nothing: no variable is needed."""

    def open(self, options: BackendOptions) -> Computing:  # noqa: ARG002 - other runtimes use them
        """Return the CPU."""
        return CpuBackend(joined=(Alone(), lambda: None))

    def comm(self, joined: Joined) -> Comm:
        """Return the group, over gloo."""
        return C10dComm(joined.parts)

    def replicas(self, joined: Joined) -> Replicas:
        """Return the processes as they were joined."""
        return joined.replicas


RUNTIME = Emulated()
