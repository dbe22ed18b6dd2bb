"""The checks of `lema doctor` on NVIDIA devices: whether the driver fits the CUDA that torch was
built with.

`lema_cuda.installeddriver` checks the driver itself, without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from lema.backend import Fact, Finding, Level
from lema.backend.findings import installed_version
from lema.config.units import human_bytes
from lema.errors import installing
from lema_accelerator.device import starting_error
from lema_cuda.attention import SOURCE, gives_nan
from lema_cuda.installeddriver import SECTION, driver, driver_version, system_management

__all__ = ["doctor"]

# Any driver from these on runs every toolkit of the same major version.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
DRIVERS = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
ARCHITECTURES = "https://github.com/pytorch/pytorch/issues/172352"
FLASH = "https://github.com/Dao-AILab/flash-attention/issues/1644"
OTHER_NUMBERS = 100  # drivers of embedded boards have lower numbers, of another kind

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": (Level.OK, "only these devices are seen", ""),
    "CUDA_LAUNCH_BLOCKING": (
        Level.WARNING,
        "the host waits for every kernel, so nothing overlaps",
        "unset it",
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        Level.NOTE,
        "with few queues copies wait behind kernels",
        "unset it",
    ),
    "NVIDIA_TF32_OVERRIDE": (
        Level.NOTE,
        "tf32 is set for the whole process and overrides the config",
        "unset it",
    ),
    "NCCL_P2P_DISABLE": (Level.NOTE, "devices exchange tensors through host memory", "unset it"),
}


def doctor() -> Iterator[Finding]:
    """Yield the findings on the driver, torch and the devices."""
    yield driver()
    yield from system_management()
    yield from _torch(driver_version())
    yield from environment()


def _torch(driver: str | None) -> Iterator[Finding]:
    import torch

    built = torch.version.cuda
    yield runtime(built, driver)
    if built is None:
        return
    yield from _quantizer(built)
    if not torch.cuda.is_available():
        if driver is not None:
            reason = starting_error(torch.cuda).partition("\n")[0]
            yield Finding(
                SECTION,
                "torch sees",
                Level.WARNING,
                f"torch cannot use the driver: {reason}.",
                (
                    "check CUDA_VISIBLE_DEVICES, that /dev/nvidia* may be opened, and that the "
                    "driver is new enough"
                ),
            )
        return
    kinds = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = (properties.major, properties.minor)
        kinds.append(capability)
        free, total = torch.cuda.mem_get_info(number)
        yield memory(number, properties.name, free, total)
        yield kernels(number, capability, torch.cuda.get_arch_list())
    yield from attention(torch.__version__, kinds)
    yield from _flash_attention()
    yield fused_kernels(installed_version("liger-kernel"))


def runtime(built: str | None, driver: str | None) -> Finding:
    """Tell whether the driver runs the CUDA that torch was built with."""
    facts: dict[str, Fact] = {"built_with": built, "driver": driver}
    if built is None:
        level = Level.NOTE if driver is None else Level.WARNING
        how = "install the build of torch for CUDA, as PyTorch's install page says"
        return Finding(
            SECTION, "runtime", level, "This torch is built without CUDA.", how, facts=facts
        )
    if driver is None:
        what = f"torch is built with CUDA {built}, and there is no driver to run it."
        return Finding(SECTION, "runtime", Level.NOTE, what, facts=facts)
    oldest = OLDEST_DRIVER.get(int(built.partition(".")[0]))
    major = int(driver.partition(".")[0])
    facts["oldest_driver"] = oldest
    if oldest is not None and OTHER_NUMBERS <= major < oldest:
        return Finding(
            SECTION,
            "runtime",
            Level.WARNING,
            (
                f"torch is built with CUDA {built}, which needs driver {oldest} or newer; "
                f"driver {driver} is loaded."
            ),
            "install a newer driver, or the build of torch for an older CUDA",
            DRIVERS,
            facts,
        )
    what = f"torch is built with CUDA {built}, which driver {driver} runs."
    return Finding(SECTION, "runtime", Level.OK, what, facts=facts)


def memory(number: int, name: str, free: int, total: int) -> Finding:
    """Tell how much of a device's memory is free."""
    facts: dict[str, Fact] = {"name": name, "free_bytes": free, "total_bytes": total}
    what = f"{name}: {human_bytes(free)} of {human_bytes(total)} free"
    if free >= 0.9 * total:  # a context of this process takes some hundred megabytes of it
        return Finding(SECTION, f"memory {number}", Level.OK, f"{what}.", facts=facts)
    how = (
        "nvidia-smi lists the processes that use it; set device_memory to a number of bytes "
        "that is free"
    )
    return Finding(
        SECTION, f"memory {number}", Level.NOTE, f"{what}: others use the rest.", how, facts=facts
    )


def kernels(number: int, capability: tuple[int, int], built_for: Sequence[str]) -> Finding:
    """Tell whether torch has kernels for a device.

    Args:
        number: of the device.
        capability: its compute capability.
        built_for: from `torch.cuda.get_arch_list`: `sm_90` are kernels, `compute_90` can be
            compiled at run time.
    """
    major, minor = capability
    facts: dict[str, Fact] = {"capability": f"{major}.{minor}", "built_for": " ".join(built_for)}
    if not any(_runs(architecture, capability) for architecture in built_for):
        return Finding(
            SECTION,
            f"kernels {number}",
            Level.WARNING,
            f"This torch has no kernels for compute capability {major}.{minor}.",
            (
                "install the build of torch for another CUDA: newer for a newer device, 12.6 "
                "for an older one"
            ),
            ARCHITECTURES,
            facts,
        )
    if major < 8:
        what = f"Compute capability {major}.{minor} has no bfloat16 of its own, nor tf32."
        how = "set dtype: float16"
        return Finding(SECTION, f"kernels {number}", Level.NOTE, what, how, facts=facts)
    what = f"torch has kernels for compute capability {major}.{minor}."
    return Finding(SECTION, f"kernels {number}", Level.OK, what, facts=facts)


def _runs(built_for: str, capability: tuple[int, int]) -> bool:
    """Whether kernels of `sm_XY` run on the device (same major version), or `compute_XY` is
    compiled for it.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", built_for)
    if not match:
        return False
    major = int(match[2])
    minor = int(match[3])
    if match[4]:  # such kernels run on this device alone
        return (major, minor) == capability
    if match[1] == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def attention(torch_version: str, capabilities: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Tell that an attention is not used that may give gradients with NaN."""
    if not any(gives_nan(torch_version, capability) for capability in capabilities):
        return
    yield Finding(
        SECTION,
        "attention",
        Level.NOTE,
        f"torch {torch_version} on compute capability 9.0: cuDNN's attention may give "
        "gradients with NaN where rows "
        "are padded, so LEMA switches it off and torch takes another.",
        "call torch.backends.cuda.enable_cudnn_sdp(False) in programs of your own",
        SOURCE,
        {"torch": torch_version},
    )


def _quantizer(built: str) -> Iterator[Finding]:
    """Tell whether bitsandbytes has a library for this CUDA; one of another major version does
    not work.
    """
    installed = installed_version("bitsandbytes")
    spec = find_spec("bitsandbytes") if installed else None
    if installed is None or spec is None or not spec.submodule_search_locations:
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    names = (
        re.fullmatch(r"libbitsandbytes_cuda(\d\d)\d+", file.stem)
        for file in folder.glob("libbitsandbytes_cuda*")
    )
    majors = {match[1] for match in names if match}
    facts: dict[str, Fact] = {"installed": installed, "built_with": " ".join(sorted(majors))}
    if built.partition(".")[0] in majors:
        yield Finding(
            SECTION,
            "bitsandbytes",
            Level.OK,
            f"bitsandbytes has a library for CUDA {built}.",
            facts=facts,
        )
        return
    what = (
        f"bitsandbytes {installed} has no library for CUDA {built}: nf4 models cannot be "
        "opened on a device."
    )
    yield Finding(
        SECTION,
        "bitsandbytes",
        Level.WARNING,
        what,
        "pip install --upgrade bitsandbytes",
        facts=facts,
    )


def _flash_attention() -> Iterator[Finding]:
    installed = installed_version("flash-attn")
    if installed is None:
        return
    facts: dict[str, Fact] = {"installed": installed}
    try:
        import_module("flash_attn_2_cuda")
    except ImportError as error:
        what = f"flash-attn {installed} was built for another torch: {error}."
        how = (
            "pip install --no-build-isolation --force-reinstall --no-deps flash-attn, or "
            "uninstall it"
        )
        yield Finding(SECTION, "flash-attn", Level.WARNING, what, how, FLASH, facts)
        return
    yield Finding(
        SECTION, "flash-attn", Level.OK, f"flash-attn {installed} can be used.", facts=facts
    )


def fused_kernels(installed: str | None) -> Finding:
    """Tell whether `arithmetic: fast` has kernels for norms, rotary embeddings and gated MLPs
    (`lema_cuda.liger`).
    """
    what = "norms, rotary embeddings and gated MLPs"
    facts = dict[str, Fact](installed=installed)
    if installed is not None:
        what = f"liger-kernel {installed} fuses {what} under arithmetic: fast."
        return Finding(SECTION, "liger-kernel", Level.OK, what, facts=facts)
    what = f"liger-kernel, which fuses {what}, is not installed."
    how = f"for arithmetic: fast, {installing('kernels')}"
    return Finding(SECTION, "liger-kernel", Level.NOTE, what, how, facts=facts)


def environment(variables: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """List the variables of NVIDIA's libraries that are set, with their effect."""
    for name, (level, what, how) in VARIABLES.items():
        value = variables.get(name)
        if value is None or (value == "0" and level is not Level.OK):
            continue
        yield Finding(SECTION, name, level, f"{name}={value}: {what}.", how, facts={"value": value})
