"""Masks of attention that are made one block of keys at a time.

A mask of a chunk against all tokens before it grows with the sequence. So `transformers`' own
function of masks, which a model calls before its layers, is called later, by whoever wants a block,
and what the model hands to its layers only stands for the mask. If anything else is computed with
that, the mask is made in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map
from transformers import masking_utils

from lema.model.capture import interface_replaced

__all__ = ["ATTENTION", "BlockMask", "HiddenKeys", "block_masks"]

ATTENTION = "sdpa"  # whose masks say of each pair of tokens whether one sees the other
# What a stand-in answers itself.
QUESTIONS: frozenset[Any] = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.untyped_storage,
        Tensor.is_floating_point,
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "device", "dtype", "ndim", "requires_grad", "is_meta", "nbytes")
        ),
    }
)


class HiddenKeys(NamedTuple):
    """Which keys of a block the queries do not see.

    Args:
        all: none of the keys is seen.
        mask: `[rows or 1, 1, queries, keys]`, true where a key is not seen; None: all keys are
            seen, or none is.
    """

    all: bool
    mask: Tensor | None


class BlockMask(Tensor):
    """Stands for a mask `[rows, 1, queries, keys]`, bool, true where a key is seen; it has no
    values of its own. `standing_for` makes one."""

    _make: Callable[[int, int], Tensor]
    # of blocks, by their ends, whether no key is seen; None: some are
    _all_hidden: dict[tuple[int, int], bool | None]

    @staticmethod
    def standing_for(
        make: Callable[[int, int], Tensor], shape: Sequence[int], device: torch.device
    ) -> BlockMask:
        """Return what stands for a mask of `shape` on `device`; `make` makes the part of the keys
        from one to before another, `[rows, 1, queries, n]`.
        """
        with unset_fake_temporarily():
            stand_in = torch.empty(1, dtype=torch.bool, device=device).expand(*shape)
            mask = stand_in.as_subclass(BlockMask)
        mask._stand_for(make)
        return mask

    def _stand_for(self, make: Callable[[int, int], Tensor]) -> None:
        self._make = make
        self._all_hidden = {}

    def hidden(self, start: int, stop: int) -> HiddenKeys:
        """Return which keys from `start` to before `stop` are not seen."""
        bounds = start, stop
        all_hidden = self._all_hidden.get(bounds)
        if all_hidden is not None:
            return HiddenKeys(all_hidden, None)
        seen = self._make(start, stop)
        # all rows alike
        hidden = ~(seen if seen.stride(0) else seen[:1])
        # Asked once, because a device is waited for.
        if bounds not in self._all_hidden and not isinstance(hidden, FakeTensor):
            none_seen = bool(hidden.all())
            all_alike = none_seen or not bool(hidden.any())
            self._all_hidden[bounds] = none_seen if all_alike else None
            if all_alike:
                return HiddenKeys(none_seen, None)
        return HiddenKeys(all=False, mask=hidden)

    def full(self) -> Tensor:
        """Return the mask."""
        return self._make(0, self.shape[-1])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Answer questions about the shape; make the mask for all else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in QUESTIONS:
                return func(*args, **kwargs)
        arguments, named = tree_map(_in_full, (args, dict(kwargs)))
        return func(*arguments, **named)


def _in_full(value: object) -> object:
    return value.full() if isinstance(value, BlockMask) else value


@contextmanager
def block_masks() -> Iterator[None]:
    """Have what stands for them made for masks of a chunk and the tokens before it, in a `with`
    block.
    """
    interfaces: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    make = interfaces[ATTENTION]

    def block_mask(**options: Any) -> Tensor | None:
        shape = options["batch_size"], 1, options["q_length"], options["kv_length"]
        if options["q_length"] == options["kv_length"] or options.get(
            "allow_is_bidirectional_skip", False
        ):
            mask: Tensor | None = make(**options)
            return mask
        options["allow_is_causal_skip"] = False
        by_block = partial(_block, make, options)
        return BlockMask.standing_for(by_block, shape, torch.device(options.get("device", "cpu")))

    with interface_replaced(interfaces, ATTENTION, block_mask):
        yield


def _block(
    make: Callable[..., Tensor], options: Mapping[str, Any], start: int, stop: int
) -> Tensor:
    """Return the part of a mask of the keys from `start` to before `stop`."""
    offset = options.get("kv_offset", 0) + start
    return make(**{**options, "kv_length": stop - start, "kv_offset": offset})
