"""The seam: what a device and a group of processes must offer, and what the core asks while it
waits for them.

docs/internals/processes.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Alone": "group",
        "Backend": "protocols",
        "BackendInfo": "registry",
        "BackendOptions": "protocols",
        "Carrier": "protocols",
        "DeviceSlots": "protocols",
        "Download": "protocols",
        "Downloaded": "group",
        "Exchange": "protocols",
        "Fact": "findings",
        "Finding": "findings",
        "Gathering": "protocols",
        "Level": "findings",
        "MemoryStats": "protocols",
        "Parallel": "protocols",
        "Replicas": "protocols",
        "SingleProcess": "group",
        "SlotLayout": "protocols",
        "Span": "protocols",
        "Upload": "protocols",
        "available": "registry",
        "load": "registry",
    },
)
