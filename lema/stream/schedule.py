"""The order in which layers are visited: pure Python, no tensors, no threads.

A training pass goes up through the layers and down again. The top layer is where it turns: one visit does both its
forward and its backward, so it is leased once. Nothing below the lowest layer that trains is visited on the way down.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["forward_order", "layers_read", "training_order"]


def forward_order(num_layers: int) -> tuple[int, ...]:
    """Return the leases of an evaluation: each layer once, from the bottom up."""
    return tuple(range(num_layers))


def training_order(num_layers: int, lowest_trained: int = 0) -> tuple[int, ...]:
    """Return the leases of one optimizer step, whatever its number of micro-batches.

    Up `0 .. L-1`, then down `L-2 .. lowest_trained`: `2 L - 1 - lowest_trained` leases, the turn counted once.
    """
    return forward_order(num_layers) + tuple(range(num_layers - 2, lowest_trained - 1, -1))


def layers_read(order: Sequence[int], residents: Collection[int] = ()) -> int:
    """Return how many layer reads an order costs when `residents` stay on the device."""
    return sum(layer not in residents for layer in order)
