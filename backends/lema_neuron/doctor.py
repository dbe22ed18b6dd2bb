"""The checks of `lema doctor` on AWS Trainium: the devices, the Neuron packages, and whether they
fit each other.

No Neuron package is imported. The public index has empty packages under the names of two of them,
which raise on import, and the real ones start the runtime.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from lema.backend import Fact, Finding, Level
from lema.backend.findings import Pair, Stub, installed_version, known_bad, stubs

__all__ = ["PAIRS", "STUBS", "doctor"]

SECTION = "neuron"
ROOT = Path("/")
SETUP = "https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/setup/pytorch/index.html"
PACKAGES = (
    "torch-neuronx",
    "torch-xla",
    "neuronx-cc",
    "neuronx-distributed",
    "libneuronxla",
    "nki",
    "optimum-neuron",
)

_STUB = "is the stand-in of the public index, which raises an error on import"
_INSTALL = (
    "uninstall it, and install it from AWS's own package index, as the Neuron setup guide says"
)
_WRONG = "https://github.com/aws-neuron/aws-neuron-sdk/issues/916"
STUBS = (
    Stub("torch-neuronx", "1.0", "torch_neuronx", "WRONG PACKAGE", _STUB, _INSTALL, _WRONG),
    Stub(
        "neuronx-distributed",
        "0.1",
        "neuronx_distributed",
        "WRONG PACKAGE",
        _STUB,
        _INSTALL,
        _WRONG,
    ),
)

PAIRS = (
    Pair(
        "torch-xla==2.8.0",
        "torch-neuronx>=2.8,<2.10",
        Level.WARNING,
        "this build of torch-xla is slow on Trainium",
        "install the torch-xla of AWS's own package index",
        "https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.1/release-notes/components/pytorch.html",
    ),
    Pair(
        "torch-neuronx>=1.13,<2.10",
        "torch>=1.13",
        Level.NOTE,
        (
            "AWS no longer supports training with this kind of torch-neuronx, which goes "
            "through PyTorch/XLA"
        ),
        'on Trn2 and Trn3: pip install "torch-neuronx>=2.13", from AWS\'s own package index',
        "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/announcements/neuron2.x/"
        "announce-no-support-pytorch-xla-training.html",
    ),
)

VARIABLES = {
    "NEURON_RT_VISIBLE_CORES": (Level.OK, "only these cores are seen", ""),
    "NEURON_RT_NUM_CORES": (Level.OK, "the process takes this number of cores", ""),
    "NEURON_CC_FLAGS": (Level.OK, "these flags are passed to the compiler", ""),
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": (
        Level.NOTE,
        "rounding is random, so no two runs are equal",
        "unset it",
    ),
    "XLA_USE_BF16": (
        Level.WARNING,
        "every float32 tensor is computed as bfloat16, which changes results",
        "unset it",
    ),
    "XLA_DOWNCAST_BF16": (
        Level.WARNING,
        "float32 is computed as bfloat16, which changes results",
        "unset it",
    ),
    "NEURON_EXTRACT_GRAPHS_ONLY": (
        Level.WARNING,
        "graphs are compiled but not run, so every result is 0",
        "unset it",
    ),
}


def doctor() -> Iterator[Finding]:
    """Yield the findings on devices, packages and variables."""
    yield driver()
    versions = {name: installed_version(name) for name in PACKAGES}
    wrong = list(stubs(STUBS, SECTION))
    yield from wrong
    stub_names = {finding.name for finding in wrong}
    for name, version in versions.items():
        if version is not None and name not in stub_names:
            yield Finding(
                SECTION, name, Level.OK, f"{name} {version}.", facts={"installed": version}
            )
    if not any(versions.values()):
        facts: dict[str, Fact] = dict(versions)
        yield Finding(
            SECTION, "packages", Level.OK, "No package of the Neuron kit is installed.", facts=facts
        )
    for name in ("torch-neuronx", "torch-xla"):
        if name not in stub_names:
            yield from built_for(name, versions[name], installed_version("torch"))
    yield from known_bad(PAIRS, SECTION)
    yield from environment()


def driver(root: Path = ROOT) -> Finding:
    """Tell which devices there are, and the version of the driver."""
    devices = len(
        [
            device
            for device in (root / "dev").glob("neuron*")
            if device.name[len("neuron") :].isdigit()
        ]
    )
    version = None
    with suppress(OSError):
        version = (root / "sys/module/neuron/version").read_text(encoding="utf-8").strip() or None
    facts: dict[str, Fact] = {"devices": devices, "driver": version}
    if devices:
        what = (
            f"{devices} Neuron device{'s' if devices > 1 else ''}, driver "
            f"{version or 'of unknown version'}."
        )
        note = "LEMA's backend for them (device: neuron) has not run on one yet."
        return Finding(SECTION, "driver", Level.NOTE, f"{what} {note}", facts=facts)
    return Finding(
        SECTION, "driver", Level.OK, "There is no Neuron device in this machine.", facts=facts
    )


def built_for(name: str, version: str | None, torch: str | None) -> Iterator[Finding]:
    """Warn if a package was built for another torch. The first two numbers of its version are
    those of its torch.
    """
    if version is None or torch is None:
        return
    built_release, installed_release = (
        ".".join(number.split(".")[:2]) for number in (version, torch)
    )
    if built_release != installed_release:
        yield Finding(
            SECTION,
            f"{name} build",
            Level.WARNING,
            f"{name} {version} is built for torch {built_release}, and torch {torch} is installed.",
            f'pip install "torch=={built_release}.*"',
            SETUP
            if name == "torch-neuronx"
            else "",  # torch-xla was seen to fail this way, with an undefined symbol
            {"installed": version, "torch": torch},
        )


def environment(variables: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """List the variables of the Neuron kit that are set, with their effect."""
    for name, (level, what, how) in VARIABLES.items():
        value = variables.get(name)
        if value is None or (value == "0" and level is not Level.OK):
            continue
        yield Finding(SECTION, name, level, f"{name}={value}: {what}.", how, facts={"value": value})
