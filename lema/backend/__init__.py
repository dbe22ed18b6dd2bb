"""The seam: what a device and a group of processes must offer, and what the core asks while it waits for them.

docs/internals/processes.md describes the folder.
"""

from lema.backend.findings import Fact, Finding, Level
from lema.backend.group import Alone, Downloaded, SingleProcess
from lema.backend.protocols import (
    Backend,
    BackendOptions,
    Carrier,
    DeviceSlots,
    Download,
    Exchange,
    Gathering,
    MemoryStats,
    Parallel,
    Replicas,
    SlotLayout,
    Span,
    Upload,
)
from lema.backend.registry import BackendInfo, available, load

__all__ = [
    "Alone",
    "Backend",
    "BackendInfo",
    "BackendOptions",
    "Carrier",
    "DeviceSlots",
    "Download",
    "Downloaded",
    "Exchange",
    "Fact",
    "Finding",
    "Gathering",
    "Level",
    "MemoryStats",
    "Parallel",
    "Replicas",
    "SingleProcess",
    "SlotLayout",
    "Span",
    "Upload",
    "available",
    "load",
]
