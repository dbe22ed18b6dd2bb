"""Chooses the runtime that drives this machine's Neuron devices, by the installed packages or by
name.

PyTorch/XLA (torch-neuronx up to 2.9) drives Trn1; TorchNeuron (torch-neuronx from 2.13 on) drives
Trn2 and Trn3. They are one package under one name, so an environment has one of them. This module
imports neither to find out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from lema.backend.findings import installed_version, stubs
from lema.errors import BackendUnavailable, installing
from lema_neuron.doctor import SECTION, STUBS

__all__ = ["Machine", "Runtime", "choose_runtime", "probe_machine"]

Runtime = Literal["xla", "native", "emulated"]

# AWS's own; the public index has stand-ins for two of its packages
INDEX = "https://pip.repos.neuron.amazonaws.com"
FIRST_NATIVE = Version("2.10")
PACKAGES = ("torch", "torch-neuronx", "torch-xla", "neuronx-distributed")
INSTALL: Mapping[str, str] = {
    "xla": (
        f'Trn1: {installing("neuron-xla")} "torch-neuronx==2.9.*" neuronx-cc --extra-index-url '
        f"{INDEX}"
    ),
    "native": f'Trn2, Trn3: {installing("neuron")} "torch-neuronx>=2.13" --extra-index-url {INDEX}',
}
ELSE = "without a device: neuron_runtime: emulated"


@dataclass(frozen=True)
class Machine:
    """The packages and devices of a machine.

    Attributes:
        versions: those of the packages that matter; None: not installed.
        devices: how many Neuron devices there are.
        stand_ins: a sentence for each installed package that is empty but has a real one's name,
            with the fix.
        on_cpu: the user has told torch_xla to compute on the CPU (`PJRT_DEVICE=CPU`), as for tests.
    """

    versions: Mapping[str, str | None]
    devices: int
    stand_ins: tuple[str, ...] = ()
    on_cpu: bool = False

    @property
    def installed(self) -> Runtime | None:
        """The runtime that is installed, even if parts of it are missing."""
        version = self.versions.get("torch-neuronx")
        if version is None or self.stand_ins:
            return None
        return "native" if Version(version) >= FIRST_NATIVE else "xla"

    def summary(self) -> str:
        """The versions, in one line."""
        listed = [
            f"{name} {version or 'is not installed'}" for name, version in self.versions.items()
        ]
        return (
            f"{', '.join(listed)}; {self.devices} Neuron device{'' if self.devices == 1 else 's'}"
        )


def probe_machine(root: Path = Path("/")) -> Machine:
    """Look at what is installed and which devices there are."""
    devices = [
        path
        for path in (root / "dev").glob("neuron*")
        if path.name.removeprefix("neuron").isdigit()
    ]
    wrong = tuple(f"{finding.what} {finding.how}" for finding in stubs(STUBS, SECTION))
    on_cpu = os.environ.get("PJRT_DEVICE") == "CPU"
    return Machine(
        {name: installed_version(name) for name in PACKAGES}, len(devices), wrong, on_cpu
    )


def choose_runtime(asked: str, machine: Machine) -> Runtime:
    """Return the runtime to use.

    Args:
        asked: `auto` or the name of one. `auto` never chooses `emulated`, so that nobody thinks
            that a device trains. `xla` accepts the CPU device of torch_xla, if the user has chosen
            it.
        machine: the machine's packages and devices.

    Raises:
        BackendUnavailable: packages or the device are missing, or the packages are of another
            runtime. The message has the versions, and says what to install from where.
    """
    if asked == "emulated":
        return "emulated"
    if asked == "xla" and machine.on_cpu and machine.versions.get("torch-xla") is not None:
        return "xla"
    if machine.stand_ins:
        raise _missing(machine.stand_ins[0], asked, machine)
    if (installed := machine.installed) is None:
        raise _missing("torch-neuronx is not installed", asked, machine)
    if asked not in ("auto", installed):
        raise BackendUnavailable(
            (
                f"neuron_runtime is {asked}, and torch-neuronx "
                f"{machine.versions['torch-neuronx']} is for {installed}"
            ),
            where=machine.summary(),
            how=(
                f"set neuron_runtime: {installed}, or in another environment "
                f"{_lowered(INSTALL[asked])}"
            ),
        )
    if installed == "xla" and machine.versions.get("torch-xla") is None:
        raise _missing(
            "torch-xla is not installed, through which this torch-neuronx computes", "xla", machine
        )
    if not machine.devices:
        raise BackendUnavailable(
            "there is no Neuron device in this machine",
            where=machine.summary(),
            how=f"run on trn1, trn2 or trn3; {ELSE}",
        )
    return installed


def _missing(what: str, asked: str, machine: Machine) -> BackendUnavailable:
    commands = [INSTALL[asked]] if asked in INSTALL else list(INSTALL.values())
    return BackendUnavailable(what, where=machine.summary(), how="; ".join([*commands, ELSE]))


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
