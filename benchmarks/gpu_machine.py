"""What a machine can do at best: copies between host and device, and plain matrix products of a
layer's shapes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Shape
from gpu_device import Device

from lema.backend import Backend, BackendOptions, load
from lema.errors import LemaError

__all__ = ["link", "matmul"]

REPEATS = 5
ROUND = 30


def link(device: str, nbytes: int) -> dict[str, Any]:
    """Return bytes per second from host to device and back, page-locked and pageable, through the
    backend's seam.

    Args:
        device: LEMA's name for it.
        nbytes: of one copy. The median of five is taken, after one that is not measured.
    """
    found: dict[str, Any] = {"bytes": nbytes}
    for name, locked in (("page-locked", True), ("pageable", False)):
        try:
            backend = load(device, BackendOptions(page_locked=locked))
        except LemaError as error:
            found[name] = {"error": error.what}
            continue
        try:
            found[name] = _both_ways(backend, nbytes)
        except (LemaError, RuntimeError) as error:
            found[name] = {"error": str(error)}
        finally:
            backend.close()
    stats = load(device).memory()
    return found | {
        "device": Device(device).name,
        "device_memory": stats.total,
        "shared": stats.shared,
    }


def _both_ways(backend: Backend, nbytes: int) -> dict[str, float]:
    buffer = backend.host_buffer(nbytes)
    buffer.fill_(1)  # so that its pages are there
    slots = backend.device_slots(nbytes, 1)
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=backend.device)

    def up() -> None:
        upload = slots.upload(buffer)
        upload.wait()
        upload.release()
        upload.drained()

    def down() -> None:
        download = backend.download(on_device, buffer)
        download.landed()
        download.release()

    ways: dict[str, Callable[[], None]] = {"up": up, "down": down}
    return {name: nbytes / _median(way, backend.synchronize) for name, way in ways.items()}


def _median(call: Callable[[], None], synchronize: Callable[[], None]) -> float:
    found = []
    for _ in range(REPEATS + 1):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def matmul(device: str, shape: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the operations per second of multiplying one micro-batch by each matrix of a layer,
    once after the other.

    That is the arithmetic of a layer's forward without attention, norms, adapters and casts: the
    rate that a step is measured against. The best of five rounds, each of thirty times all
    matrices.
    """
    layer = Shape(**shape)
    dtype = getattr(torch, shape["dtype"])
    where = load(device).device
    pairs = [
        (
            torch.randn(tokens, columns, device=where).to(dtype),
            torch.randn(rows, columns, device=where).to(dtype),
        )
        for rows, columns in layer.matrices.values()
    ]

    def products() -> None:
        for _ in range(ROUND):
            for states, weight in pairs:
                states @ weight.t()  # what comes of it is dropped

    synchronize = Device(device).synchronize
    found = []
    for _ in range(REPEATS + 1):
        synchronize()
        began = time.perf_counter()
        products()
        synchronize()
        found.append(time.perf_counter() - began)
    return {"flops_per_second": ROUND * 2 * tokens * layer.layer_parameters / min(found[1:])}
