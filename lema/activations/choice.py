"""What to move: everything that autograd saves on the device, but for weights, small things, and what is used soon."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from lema.activations.counters import Kept
from lema.activations.scope import current
from lema.activations.seams import Choice
from lema.activations.weights import Weights

__all__ = ["Everything"]

PLAIN = (Tensor, nn.Parameter)


class Everything:
    """Everything that is worth moving.

    Args:
        weights: what never is.
        on: says of a device type whether tensors there are to be moved.
        min_bytes: smaller tensors stay.
        but: what it leaves to be moved, this may keep all the same.
        held: storages (`_cdata`) that others hold until the backward; asked for at every tensor.
    """

    def __init__(
        self,
        weights: Weights,
        on: Callable[[str], bool],
        *,
        min_bytes: int = 1024,
        but: Choice | None = None,
        held: Collection[int] = (),
    ) -> None:
        self._weights, self._on, self._min_bytes, self._but, self._held = weights, on, min_bytes, but, held

    def why_kept(self, tensor: Tensor) -> Kept | None:
        """Return why `tensor` stays where it is; None: it is to be moved."""
        scope = current()
        if scope is not None and scope.modules:
            scope.modules[-1][1][0] += 1
        if torch._C._current_graph_task_id() != -1:
            return Kept.BACKWARD  # a recomputation: what it saves is used at once
        if self._weights.holds(tensor, scope):
            return Kept.WEIGHT
        if not self._on(tensor.device.type):
            return Kept.ELSEWHERE
        if scope is not None and scope.excluded:
            return Kept.EXCLUDED
        if scope is not None and scope.past_head:
            return Kept.LOSS
        if type(tensor) not in PLAIN:
            return Kept.QUANTIZED
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return Kept.LAYOUT
        if tensor.nbytes < self._min_bytes:
            return Kept.SMALL
        if self._weights.casts(tensor, scope):
            return Kept.CAST
        if self._held and tensor.untyped_storage()._cdata in self._held:
            return Kept.HELD
        return None if self._but is None else self._but.why_kept(tensor)
