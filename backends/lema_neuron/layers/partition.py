"""Code that the parallel layers share: initial values of their weights, and arguments that they
refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lema.backend.layout import Layout, shard
from lema.errors import ConfigError
from lema_neuron.comm import Comm
from lema_neuron.shares import local_size

__all__ = ["Initial", "as_linear", "partitioned", "refuse", "sequence_dim"]

Initial = Callable[[Tensor], Any]


def as_linear(weight: Tensor) -> None:
    """Fill a weight as `nn.Linear` does."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def partitioned(
    shape: tuple[int, ...],
    layout: Layout,
    comm: Comm,
    initial: Initial,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Return this rank's share of a new weight.

    It is drawn whole on the host, in fp32, so that the same generator gives the same weight for any
    number of ranks.

    Args:
        shape: of the whole weight.
        layout: how it is cut.
        comm: the group.
        initial: fills the whole weight.
        dtype: of the weight.
        device: of the weight; on `meta` nothing is drawn.
    """
    local = list(shape)
    dim = layout.dim
    local[dim] = local_size(layout, shape[dim])
    if torch.empty(0, device=device).device.type == "meta":
        return nn.Parameter(torch.empty(local, dtype=dtype, device="meta"))
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    initial(full)
    return nn.Parameter(shard(full, layout, comm.rank).to(device, dtype))


def refuse(layer: str, **arguments: Any) -> None:
    """Refuse arguments for which a layer supports only neuronx-distributed's default.

    Raises:
        ConfigError: one is set; the message names it.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"{name}={value!r} is not supported", where=layer, how=f"leave {name} out"
            )


def sequence_dim(sequence_dimension: int | None) -> int:
    """Return the dimension of the sequence; None means the first one."""
    return 0 if sequence_dimension is None else sequence_dimension
