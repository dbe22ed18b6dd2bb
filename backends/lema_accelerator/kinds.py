"""The devices that are known by name, in words and by what torch calls them; others have the
name of torch's device.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "PROVEN", "Kind", "kind_of"]

INSTALL_PAGE = "https://pytorch.org/get-started/locally has the command"

# What `lema backends` and docs/devices.md say of each: on which hardware LEMA ran, and when.
ON_SECOND = "on no hardware yet; the class of all accelerators on the tests' second device"
PROVEN = {
    "cuda": f"{ON_SECOND}, what only CUDA has with stand-ins",
    "mps": "on no hardware yet, and its copies without streams on no second device either",
    "npu": ON_SECOND,
    "rocm": ON_SECOND,
    "xpu": ON_SECOND,
}


@dataclass(frozen=True)
class Kind:
    """A kind of device.

    Attributes:
        name: of the backend, as the settings have it.
        type: torch's name of the device.
        words: what people call it.
        build: how to get a torch that has it.
        hint: what to look at where torch finds none.
    """

    name: str
    type: str
    words: str
    build: str
    hint: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "cuda",
            "cuda",
            "CUDA",
            (
                "install a CUDA build of torch (its version ends in +cu and CUDA's version; "
                f"{INSTALL_PAGE})"
            ),
            "check that `nvidia-smi` lists a device, that the driver is new enough for "
            "this torch, and "
            "CUDA_VISIBLE_DEVICES",
        ),
        Kind(
            "rocm",
            "cuda",
            "ROCm",
            (
                "install a ROCm build of torch (its version ends in +rocm and ROCm's version; "
                f"{INSTALL_PAGE})"
            ),
            "check that `rocminfo` lists a device, that this user is in the groups render "
            "and video, and "
            "HIP_VISIBLE_DEVICES",
        ),
        Kind(
            "xpu",
            "xpu",
            "XPU",
            (
                "install an XPU build of torch for Intel GPUs (its version ends in +xpu; "
                f"{INSTALL_PAGE})"
            ),
            "check that `xpu-smi discovery` lists a device, its driver, and ZE_AFFINITY_MASK",
        ),
        Kind(
            "npu",
            "npu",
            "NPU",
            "install Ascend's CANN, and torch_npu in the version that belongs to this torch",
            "check that `npu-smi info` lists a device, that CANN's set_env.sh was sourced, and "
            "ASCEND_RT_VISIBLE_DEVICES",
        ),
        Kind(
            "mps",
            "mps",
            "MPS",
            f"use a Mac with Apple silicon, and torch's build for macOS ({INSTALL_PAGE})",
            "use macOS 14 or newer on a Mac with Apple silicon",
        ),
    )
}


def kind_of(name: str) -> Kind:
    """Return the kind of that name; torch knows one that is not listed by the same name."""
    build = (
        f"install the package that brings {name!r} to torch, and check that `import torch` loads it"
    )
    return KINDS.get(
        name,
        Kind(name, name, name, build, "check its driver, and which devices the process may see"),
    )
