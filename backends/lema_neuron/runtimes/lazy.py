"""PyTorch/XLA, which drives Trn1: torch-neuronx up to 2.9 with torch_xla.

Several processes reduce through collectives that are part of the graph, so every process must build
the same graph: each graph names the groups of all ranks. A runtime that does not know the other
processes silently ignores collectives, so a sum at the start checks it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from lema.backend import BackendOptions, Replicas
from lema.backend.layout import KvLayout
from lema.backend.torchrun import Joined
from lema.errors import BackendUnavailable
from lema_neuron.comm import Comm, XlaComm
from lema_neuron.environment import set_variables
from lema_neuron.runtimes import lazybits
from lema_neuron.runtimes.computing import Computing
from lema_neuron.runtimes.lazydevice import LazyDevice
from lema_neuron.runtimes.lazyreplicas import LazyReplicas

__all__ = ["RUNTIME"]


class Lazy:
    """The runtime."""

    carrier = "xla"
    kv_layout: KvLayout = "tile"

    def prepare(self) -> None:
        """Set variables that compiler and runtime read when they are imported, unless the user has;
        import them.

        Raises:
            BackendUnavailable: they cannot be imported.
        """
        set_variables("xla")
        try:
            # registers the carrier with torch.distributed
            import_module("torch_xla.distributed.xla_backend")
        except (ImportError, OSError) as error:
            raise BackendUnavailable(
                f"torch_xla cannot be imported: {error}",
                where="neuron_runtime: xla",
                how="install the torch that this torch_xla was built for; `lema doctor` shows both",
            ) from error

    def open(self, options: BackendOptions) -> Computing:  # noqa: ARG002 - other runtimes use them
        """Open the device of this process, and check that it reaches the devices of the others.

        Raises:
            BackendUnavailable: the runtime does not know the other processes, or a sum over them is
                wrong.
        """
        xla, xm, metrics = (
            import_module(f"torch_xla{name}") for name in ("", ".core.xla_model", ".debug.metrics")
        )
        lazybits.register()
        device = LazyDevice(xla, xm, lambda: int(metrics.counter_value("UncachedCompile") or 0))
        if (size := _num_processes()) > 1:
            _see_the_others(size, xla, xm)
        return device

    def comm(self, joined: Joined) -> Comm:
        """Return the processes that hold one copy together; the groups of all ranks are named."""
        size = _num_processes()
        ordinal = _ordinal()
        parts = size // joined.replicas.size
        groups = [range(start, start + parts) for start in range(0, size, parts)]
        return XlaComm(groups, import_module("torch_xla.core.xla_model"), ordinal)

    def replicas(self, joined: Joined) -> Replicas:
        """Return the processes that hold the same part of a copy: sums go over their groups, all
        of them named.
        """
        if joined.replicas.num_processes == 1:
            return joined.replicas
        size = joined.replicas.num_processes
        parts = size // joined.replicas.size
        groups = [range(part, size, parts) for part in range(parts)]
        return LazyReplicas(
            joined.replicas, XlaComm(groups, import_module("torch_xla.core.xla_model"), _ordinal())
        )


def _num_processes() -> int:
    dist: Any = torch.distributed
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def _ordinal() -> int:
    return int(import_module("torch_xla.runtime").global_ordinal())


def _see_the_others(size: int, xla: Any, xm: Any) -> None:
    """Add up the ranks of all processes on the devices.

    Raises:
        BackendUnavailable: the runtime has other processes than `torchrun` started, or the sum is
            wrong.
    """
    runtime = import_module("torch_xla.runtime")
    rank = torch.distributed.get_rank()
    how = (
        "start the processes with torchrun on one machine's NeuronCores, and set no variables "
        "of other launchers"
    )
    if (runtime.world_size(), runtime.global_ordinal()) != (size, rank):
        raise BackendUnavailable(
            f"torch_xla takes this for process {runtime.global_ordinal()} of "
            f"{runtime.world_size()}, "
            f"and torchrun for {rank} of {size}: its collectives would do nothing",
            where=f"rank {rank}",
            how=how,
        )
    mine = torch.tensor([float(rank + 1)], device=xla.device())
    total = xm.all_reduce(xm.REDUCE_SUM, mine, groups=[list(range(size))], pin_layout=False)
    xla.sync()
    if (actual := float(total.cpu())) != (expected := size * (size + 1) / 2):
        raise BackendUnavailable(
            f"the devices' sum of the numbers from 1 to {size} is {actual} instead of {expected}",
            where=f"rank {rank}",
            how=how,
        )


RUNTIME = Lazy()
