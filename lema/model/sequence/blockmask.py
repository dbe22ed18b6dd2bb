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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map
from transformers import masking_utils

from lema.model.capture import interface_replaced
from lema.model.sequence.states import Span

__all__ = ["ATTENTION", "BlockMask", "HiddenKeys", "MakeMask", "block_masks"]
__all__ += ["causal_like", "pairs_of", "seen_by"]

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


MakeMask: TypeAlias = Callable[[Span, Span], Tensor]
"""Makes the part of a mask of some queries and some keys, `[rows, 1, queries, keys]`."""


class BlockMask(Tensor):
    """Stands for a mask `[rows, 1, queries, keys]`, bool, true where a key is seen; it has no
    values of its own. `standing_for` makes one."""

    _make: MakeMask
    _queries: Span
    _keys: Span
    # of blocks, by their ends, whether no key is seen; None: some are
    _all_hidden: dict[tuple[int, int], bool | None]

    @staticmethod
    def standing_for(
        make: MakeMask, num_rows: int, queries: Span, keys: Span, device: torch.device
    ) -> BlockMask:
        """Return what stands for the mask that `make` makes of some queries and keys."""
        shape = num_rows, 1, queries.stop - queries.start, keys.stop - keys.start
        with unset_fake_temporarily():
            stand_in = torch.empty(1, dtype=torch.bool, device=device).expand(*shape)
            mask = stand_in.as_subclass(BlockMask)
        mask._stand_for(make, queries, keys)
        return mask

    def _stand_for(self, make: MakeMask, queries: Span, keys: Span) -> None:
        self._make = make
        self._queries = queries
        self._keys = keys
        self._all_hidden = {}

    def part(self, queries: Span, keys: Span) -> BlockMask:
        """Return what stands for the part of some of the queries and some of the keys."""
        return BlockMask.standing_for(
            self._make,
            self.shape[0],
            queries.within(self._queries),
            keys.within(self._keys),
            self.device,
        )

    def hidden(self, start: int, stop: int) -> HiddenKeys:
        """Return which keys from `start` to before `stop` are not seen."""
        bounds = start, stop
        all_hidden = self._all_hidden.get(bounds)
        if all_hidden is not None:
            return HiddenKeys(all_hidden, None)
        seen = self._make(self._queries, Span(start, stop).within(self._keys))
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
        return self._make(self._queries, self._keys)

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
def block_masks(*, of_sequences: bool = False) -> Iterator[None]:
    """Have what stands for them made for masks of a chunk and the tokens before it, in a `with`
    block.

    Args:
        of_sequences: also for masks of sequences, of which chunks have a part.
    """
    interfaces: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    make = interfaces[ATTENTION]

    def block_mask(**options: Any) -> Tensor | None:
        of_sequence = options["q_length"] == options["kv_length"]
        if (of_sequence and not of_sequences) or options.get("allow_is_bidirectional_skip", False):
            mask: Tensor | None = make(**options)
            return mask
        options["allow_is_causal_skip"] = False
        queries, keys = Span(0, options["q_length"]), Span(0, options["kv_length"])
        device = torch.device(options.get("device", "cpu"))
        by_block = partial(_block, make, options)
        return BlockMask.standing_for(by_block, options["batch_size"], queries, keys, device)

    with interface_replaced(interfaces, ATTENTION, block_mask):
        yield


def _block(
    make: Callable[..., Tensor], options: Mapping[str, Any], queries: Span, keys: Span
) -> Tensor:
    """Return the part of a mask of some queries and some keys."""
    part = {
        "q_length": queries.stop - queries.start,
        "q_offset": options.get("q_offset", 0) + queries.start,
        "kv_length": keys.stop - keys.start,
        "kv_offset": options.get("kv_offset", 0) + keys.start,
    }
    return make(**{**options, **part})


def pairs_of(mask: Tensor, queries: Span, keys: Span) -> Tensor:
    """Return the part of a mask `[rows, 1, queries, keys]` of some queries and some keys; what
    stands for it, where the mask says yes or no."""
    if isinstance(mask, BlockMask):
        return mask.part(queries, keys)
    if mask.is_floating_point():
        return mask[:, :, queries.slice, keys.slice]

    def make(queries: Span, keys: Span) -> Tensor:
        return mask[:, :, queries.slice, keys.slice]

    return BlockMask.standing_for(make, len(mask), queries, keys, mask.device)


def seen_by(mask: Tensor, queries: Span) -> Tensor:
    """Return which keys are seen by some queries of a mask `[rows, 1, queries, keys]`, in any row;
    bool `[queries, keys]`."""
    part = pairs_of(mask, queries, Span(0, mask.shape[-1]))
    values = part.full() if isinstance(part, BlockMask) else part == 0  # what is added to scores
    return values.any(dim=0)[0]


def causal_like(mask: Tensor, length: int, window: int | None) -> Tensor:
    """Return the mask of so many tokens, `[1, 1, length, length]`, in which each sees itself and
    those before it, at most `window` of them; of the form of another mask."""
    seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if window is not None:
        seen &= ~seen.tril(-window)
    seen = seen[None, None]
    if not mask.is_floating_point():
        return seen
    lowest = torch.finfo(mask.dtype).min
    return torch.zeros(seen.shape, dtype=mask.dtype, device=mask.device).masked_fill(~seen, lowest)
