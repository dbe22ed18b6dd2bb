"""TorchNeuron, which drives Trn2 and Trn3: torch-neuronx from 2.13 on, torch's own device `neuron`.

torch finds the device by itself, so nothing is imported for it. Processes are joined before the
first use of the device, which decides which NeuronCore a process has. **It has not run on
hardware**: tests check the order of calls on mock objects that follow AWS's documentation of 2.33.
"""

from __future__ import annotations

from typing import Any

import torch

from lema.backend import BackendOptions, Replicas
from lema.backend.layout import KvLayout
from lema.backend.torchrun import Joined
from lema.errors import BackendUnavailable
from lema_neuron.comm import C10dComm, Comm
from lema_neuron.environment import set_variables
from lema_neuron.runtimes.computing import Computing
from lema_neuron.runtimes.nativedevice import NativeDevice

__all__ = ["RUNTIME"]


class Native:
    """The runtime."""

    carrier = "cpu:gloo,neuron:neuron"
    kv_layout: KvLayout = "interleave"

    def prepare(self) -> None:
        """Set the variables that compiler and runtime read when they start, unless the user has."""
        set_variables("native")

    def open(self, options: BackendOptions) -> Computing:  # noqa: ARG002 - other runtimes use them
        """Open the device of this process.

        Raises:
            BackendUnavailable: torch has no such device.
        """
        module: Any = getattr(torch, "neuron", None)
        if module is None:
            raise BackendUnavailable(
                "torch has no device `neuron`, which torch-neuronx brings",
                where=f"torch {torch.__version__}",
                how=(
                    "install the torch that this torch-neuronx was built for; `lema doctor` "
                    "shows both"
                ),
            )
        return NativeDevice(module)

    def comm(self, joined: Joined) -> Comm:
        """Return the group, over the devices."""
        return C10dComm(joined.parts)

    def replicas(self, joined: Joined) -> Replicas:
        """Return the processes as they were joined: their sums go over the devices, in the queue
        that computes.
        """
        return joined.replicas


RUNTIME = Native()
