"""Checks of the NVIDIA driver that do not use torch, because torch may not be able to use the
driver.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lema.backend import Fact, Finding, Level

__all__ = ["SECTION", "driver", "driver_version", "system_management"]

SECTION = "cuda"
ROOT = Path("/")
PATIENCE = 20.0  # seconds; the first call after a boot may load the driver

COLUMNS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "total_mebibytes",
    "memory.used": "used_mebibytes",
    "persistence_mode": "persistence",
    "ecc.mode.current": "ecc",
    "pcie.link.gen.max": "link_generation",
    "pcie.link.width.current": "link_width",
    "pcie.link.width.max": "link_width_max",
}


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the loaded driver; None: no driver is loaded."""
    if match := re.search(
        r"\s(\d+\.\d+(\.\d+)*)(\s|$)", _first_line(root / "proc/driver/nvidia/version")
    ):
        return match[1]
    return _first_line(root / "sys/module/nvidia/version") or None


def driver(root: Path = ROOT) -> Finding:
    """Tell which driver is loaded; without one, tell whether there is a device that needs it."""
    version = driver_version(root)
    present = len(list(_on_the_bus(root)))
    facts: dict[str, Fact] = {"driver": version, "devices_on_the_bus": present}
    if version is not None:
        facts["open_module"] = "Open Kernel" in _first_line(root / "proc/driver/nvidia/version")
        return Finding(SECTION, "driver", Level.OK, f"NVIDIA driver {version}.", facts=facts)
    if (root / "dev/dxg").exists():
        what = "The driver is that of Windows, which hosts this system."
        return Finding(SECTION, "driver", Level.OK, what, facts=facts)
    if present:
        return Finding(
            SECTION,
            "driver",
            Level.WARNING,
            "An NVIDIA device is in this machine, and no NVIDIA driver is loaded.",
            (
                "install NVIDIA's driver and load it (modprobe nvidia); in a container: docker "
                "run --gpus all"
            ),
            facts=facts,
        )
    how = "nothing, if this machine has no NVIDIA device; in a container: docker run --gpus all"
    return Finding(SECTION, "driver", Level.NOTE, "No NVIDIA driver is loaded.", how, facts=facts)


def _on_the_bus(root: Path) -> Iterator[Path]:
    """Yield the NVIDIA display and compute devices on the PCI bus."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _first_line(device / "vendor") == "0x10de" and _first_line(device / "class").startswith(
            "0x03"
        ):
            yield device


def _first_line(file: Path) -> str:
    """Return the first line of a file; empty if there is no such file."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8").partition("\n")[0].strip()
    return ""


def system_management(command: str = "nvidia-smi") -> Iterator[Finding]:
    """Report on each device from `nvidia-smi`, which also sees devices that torch cannot use."""
    if shutil.which(command) is None:
        return
    asked = [command, f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(
            SECTION, "nvidia-smi", Level.WARNING, f"nvidia-smi does not answer: {error}.", "reboot"
        )
        return
    if done.returncode:
        message = (done.stdout + done.stderr).strip().partition("\n")[0]
        how = "load the driver; after an update of it: reboot"
        yield Finding(SECTION, "nvidia-smi", Level.WARNING, f"nvidia-smi fails: {message}", how)
        return
    for number, line in enumerate(done.stdout.splitlines()):
        yield _managed(number, [cell.strip() for cell in line.split(",")])


def _managed(number: int, cells: Sequence[str]) -> Finding:
    facts: dict[str, Fact] = dict(zip(COLUMNS.values(), cells, strict=False))
    for name in ("total", "used"):
        mebibytes = str(facts.pop(f"{name}_mebibytes", ""))
        facts[f"{name}_bytes"] = int(mebibytes) << 20 if mebibytes.isdigit() else None
    width = str(facts.get("link_width", ""))
    widest = str(facts.get("link_width_max", ""))
    what = f"Device {number} is {facts.get('name', 'unknown')}"
    if width.isdigit() and widest.isdigit() and int(width) < int(widest):
        return Finding(
            SECTION,
            f"nvidia-smi {number}",
            Level.NOTE,
            f"{what}, on {width} of the {widest} lanes it has: layers arrive that much slower.",
            "put it into another slot of the machine",
            facts=facts,
        )
    return Finding(SECTION, f"nvidia-smi {number}", Level.OK, f"{what}.", facts=facts)
