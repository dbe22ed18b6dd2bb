"""What a machine with a GPU has: card, driver, software, host memory, room for weights, and the
link both ways.

    python benchmarks/gpu_card.py --out card.jsonl
    python benchmarks/gpu_card.py --device cpu

Only torch is needed. Each fact is a line of JSON as soon as it is known, the quick ones first.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_device import Device
from gpu_lines import Lines

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "liger-kernel",
    "pydantic",
    "lema-lora",
)
QUERY = "name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm"
COPY = 1 << 29  # bytes
REPEATS = 5
PRESENT = 4 << 30  # bytes of host memory that are taken, to see whether it is there


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="torch's name for it")
    parser.add_argument(
        "--tiny", action="store_true", help="copy little, to see that everything runs"
    )
    parser.add_argument("--out", type=Path, help="a file for the lines")
    options = parser.parse_args()
    lines = Lines(options.out)
    lines.write(
        what="machine",
        cores=os.cpu_count(),
        kernel=platform.release(),
        python=platform.python_version(),
    )
    lines.write(what="packages", **{name: _version(name) for name in PACKAGES})
    for where in ("/dev/shm", "/tmp", "."):
        if Path(where).is_dir():
            usage = shutil.disk_usage(where)
            lines.write(what="room", where=where, total=usage.total, free=usage.free)
    lines.write(what="host memory", **_host_memory())
    lines.write(what="driver", said=_driver())
    device = Device(options.device)
    lines.write(what="card", **_card(device))
    if device.accelerated:
        for locked in (True, False):
            for name, speed in _link(
                device, 1 << 20 if options.tiny else COPY, locked=locked
            ).items():
                lines.write(what="link", direction=name, page_locked=locked, bytes_per_second=speed)
    before = _host_memory()
    torch.ones(1 << 20 if options.tiny else PRESENT, dtype=torch.uint8)
    lines.write(
        what="host memory, after much was taken and given back", before=before, after=_host_memory()
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _host_memory() -> dict[str, int]:
    """Return bytes of host memory; where it grows on demand, little of it is available until it
    is asked for.
    """
    wanted = ("MemTotal", "MemAvailable", "MemFree", "Mlocked")
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0].rstrip(":") in wanted
    }


def _driver() -> str:
    try:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (done.stdout + done.stderr).strip()


def _card(device: Device) -> dict[str, object]:
    facts: dict[str, object] = {
        "device": str(device.torch),
        "name": device.name,
        "cuda": torch.version.cuda,
    }
    if device.torch.type == "cuda":
        about = torch.cuda.get_device_properties(device.torch)
        free, total = torch.cuda.mem_get_info(device.torch)
        facts |= {
            "capability": f"{about.major}.{about.minor}",
            "processors": about.multi_processor_count,
        }
        facts |= {"memory": total, "memory_free": free, "bf16": torch.cuda.is_bf16_supported()}
    return facts


def _link(device: Device, nbytes: int, *, locked: bool) -> dict[str, float]:
    """Return bytes per second to the device and back."""
    pinned = locked and device.torch.type == "cuda"
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    card = torch.ones(nbytes, dtype=torch.uint8, device=device.torch)
    ways: dict[str, Callable[[], object]] = {
        "up": lambda: card.copy_(host, non_blocking=True),
        "down": lambda: host.copy_(card, non_blocking=True),
    }
    return {name: nbytes / _median(device, copy) for name, copy in ways.items()}


def _median(device: Device, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        device.synchronize()
        began = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
