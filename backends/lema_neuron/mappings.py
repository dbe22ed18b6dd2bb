"""How an activation is gathered, summed or cut over the ranks, and its gradient in the backward.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053;
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). A tensor is either whole on every rank,
a share along a dimension, or partial: then its value is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lema_neuron.comm import Comm, share

__all__ = [
    "copy_to_group",
    "gather_from_group",
    "gather_sequence",
    "reduce_from_group",
    "reduce_scatter_sequence",
    "scatter_to_group",
]

Step = Callable[[Tensor], Tensor]


class _Mapping(torch.autograd.Function):
    """One function in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Step, back: Step) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _map(tensor: Tensor, comm: Comm, there: Step, back: Step) -> Tensor:
    if comm.size == 1:
        return tensor
    mapped: Tensor = _Mapping.apply(tensor, there, back)  # type: ignore[no-untyped-call] # torch's is
    return mapped


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def copy_to_group(tensor: Tensor, comm: Comm) -> Tensor:
    """Whole to whole; its gradient is partial, and is summed."""
    return _map(tensor, comm, _same, comm.all_reduce)


def reduce_from_group(tensor: Tensor, comm: Comm) -> Tensor:
    """Partial to whole; its gradient is whole."""
    return _map(tensor, comm, comm.all_reduce, _same)


def gather_from_group(tensor: Tensor, comm: Comm, dim: int = -1) -> Tensor:
    """Share to whole; the gradient is whole and the same on every rank, and each rank takes its
    share of it.
    """
    return _map(
        tensor,
        comm,
        lambda local: comm.all_gather(local, dim),
        lambda gradient: share(gradient, dim, comm).contiguous(),
    )


def scatter_to_group(tensor: Tensor, comm: Comm, dim: int = -1) -> Tensor:
    """Whole to share; its gradient is gathered."""
    return _map(
        tensor,
        comm,
        lambda full: share(full, dim, comm).contiguous(),
        lambda gradient: comm.all_gather(gradient, dim),
    )


def gather_sequence(tensor: Tensor, comm: Comm, dim: int, *, partial: bool = True) -> Tensor:
    """Share of the sequence to whole.

    Args:
        tensor: this rank's tokens.
        comm: the group.
        dim: the sequence's dimension.
        partial: the ranks use the result in different ways, so the gradient is partial and is
            summed. False: it is whole, and each rank takes its share.
    """
    if not partial:
        return gather_from_group(tensor, comm, dim)
    return _map(
        tensor,
        comm,
        lambda local: comm.all_gather(local, dim),
        lambda gradient: comm.reduce_scatter(gradient, dim),
    )


def reduce_scatter_sequence(tensor: Tensor, comm: Comm, dim: int) -> Tensor:
    """Partial to share of the sequence; its gradient is gathered."""
    return _map(
        tensor,
        comm,
        lambda partial: comm.reduce_scatter(partial, dim),
        lambda gradient: comm.all_gather(gradient, dim),
    )
