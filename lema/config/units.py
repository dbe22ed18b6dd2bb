"""Amounts of memory as people write them ("4GB", "512MiB", bytes, a fraction, "auto"), and what
LEMA shows of them.
"""

import math
import re

from lema.errors import ConfigError

__all__ = [
    "MEMORY_PARTS",
    "human_bytes",
    "human_count",
    "human_duration",
    "human_rate",
    "memory_bytes",
    "parse_memory",
]

# What a run spends memory on, by the names of its plan and of plan.json, in words.
MEMORY_PARTS = {
    "used": "in use before the first step",
    "slots": "slots that layers stream through",
    "residents": "layers that stay",
    "outside": "embeddings, norm, head",
    "adapters": "adapter, gradients, optimizer",
    "gradients": "gradients of two layers",
    "working": "one micro-batch in one layer",
    "flight": "hidden states between layers",
    "expanded": "weights of one layer, expanded",
    "gathered": "layers assembled from parts",
    "boundaries": "inputs of layers, kept",
    "keys": "keys, values and their gradients",
    "saved": "activations not recomputed",
    "workspaces": "libraries, and rounding of memory",
    "ring": "buffers that layers are read into",
    "cached": "layers kept in host memory",
    "masters": "weights in fp32",
    "moments": "optimizer state",
    "waiting": "gradients that wait",
    "stepping": "optimizer working memory",
    "process": "interpreter and libraries",
    "model": "the model's files",  # on disk, as is the next
    "checkpoint": "one checkpoint",
    "checkpoints": "the checkpoints that are kept",
}

# "auto" leaves the rest to the allocator's rounding and to whatever else is on the machine.
_AUTO_FRACTION = 0.9

# Beyond this a size is a slip of the keyboard, and infinity has no whole part.
_LARGEST = 2**63

_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}


def parse_memory(value: int | float | str, total: int) -> int:
    """Return the bytes that a memory setting means, of `total` bytes there are; `ConfigError` where
    it means none. It is bytes (`2_000_000`), a size (`"4GB"` is 4 * 1000**3, `"4GiB"` is 4 *
    1024**3; one larger than `total` is returned as asked), a fraction of `total` (`0.5`; more than
    0, at most 1) or `"auto"` (nine tenths of `total`)."""
    try:
        return memory_bytes(value, total)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def memory_bytes(value: int | float | str, total: int) -> int:
    """`parse_memory`, with the ValueError that a field validator raises."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return int(total * _AUTO_FRACTION)
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)", text)
        if match and not match[2]:
            return memory_bytes(int(text) if text.isdecimal() else float(text), total)
        if (
            match
            and (unit := _UNITS.get(match[2].upper()))
            and 0 < (size := float(match[1]) * unit) < _LARGEST
        ):
            return math.ceil(size)
    elif not isinstance(value, bool):
        if 0 < value <= 1 and isinstance(value, float):
            return max(1, int(total * value))
        # YAML reads 4e9 as a float.
        if 1 <= value < _LARGEST and value == int(value):
            return int(value)
    raise ValueError(
        f"{value!r} is not an amount of memory; write 4GB, 512MiB, a fraction like 0.5, "
        "auto, or bytes"
    )


def human_bytes(count: float) -> str:
    """`1.2 GB`; powers of 1000, as disks and links are sold."""
    return _scaled(count, " ", ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(count: float) -> str:
    """`3.4k`, `12M`."""
    return _scaled(count, "", ("", "k", "M", "G", "T", "P"))


def human_rate(count: float, unit: str) -> str:
    """`27.8 GFLOP/s`."""
    scaled = _scaled(count, " ", ("", "k", "M", "G", "T", "P"))
    return f"{scaled}{unit}" if scaled[-1].isalpha() else f"{scaled} {unit}"


def human_duration(seconds: float) -> str:
    """`48s`, `3m 05s`, `2h 07m`, `4d 01h`."""
    total_seconds = max(0, round(seconds))
    minutes, second = divmod(total_seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minutes}m {second:02}s" if minutes else f"{second}s"


def _scaled(count: float, space: str, units: tuple[str, ...]) -> str:
    size = float(count)
    power = 0
    # 999.5 would print as 1000; it is 1.0 of the next unit.
    while abs(size) >= 999.5 and power < len(units) - 1:
        size = size / 1000
        power = power + 1
    digits = 0 if power == 0 or abs(size) >= 99.95 else 1
    return f"{size:.{digits}f}{space}{units[power]}".rstrip()
