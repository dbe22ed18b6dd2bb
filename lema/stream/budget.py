"""Which layers stay on the device: as many as the budget holds, spread evenly.

Any choice of R residents saves the same bytes per pass. Even spacing is the one that keeps the link and the compute
busy together: between two residents there is always a streamed layer whose upload their compute can hide.
"""

from __future__ import annotations

from collections.abc import Sequence

from lema.errors import MemoryLimitError

__all__ = ["choose_residents", "spread"]


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Return `count` layer numbers out of `num_layers`, evenly spaced."""
    if not 0 <= count <= num_layers:
        raise ValueError(f"{count} residents out of {num_layers} layers")
    return tuple((2 * index + 1) * num_layers // (2 * count) for index in range(count))


def choose_residents(layer_bytes: Sequence[int], budget: int | None, fixed: int, num_slots: int) -> frozenset[int]:
    """Choose the layers that stay on the device within `budget` bytes.

    Args:
        layer_bytes: size of each layer, in bytes.
        budget: device memory allowed, in bytes; None: slots only, nothing stays.
        fixed: bytes taken before any layer: embeddings, head, adapters and their optimizer state.
        num_slots: slots of the ring, each as large as the largest streamed layer.

    Raises:
        MemoryLimitError: not even the slots fit.
    """
    num_layers = len(layer_bytes)
    if budget is None:
        return frozenset()
    if fixed + sum(layer_bytes) <= budget:
        return frozenset(range(num_layers))
    slots = num_slots * max(layer_bytes)
    if fixed + slots > budget:
        enough = fixed + min(slots, sum(layer_bytes))  # a model of few layers may be smaller than its slots
        raise MemoryLimitError(
            f"{budget:,} bytes of device memory cannot hold {slots:,} bytes of layer slots beside "
            f"{fixed:,} bytes of embeddings, head, adapters and optimizer state",
            where="device_memory",
            how=f"allow at least {enough:,} bytes, or lower prefetch_depth (each slot is {max(layer_bytes):,})",
        )
    for count in range(num_layers - 1, 0, -1):
        chosen = spread(count, num_layers)
        if fixed + slots + sum(layer_bytes[layer] for layer in chosen) <= budget:
            return frozenset(chosen)
    return frozenset()
