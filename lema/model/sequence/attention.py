"""Attention of a chunk to all tokens before it, over one block of keys at a time.

`transformers` repeats keys and values for each head of queries where there is a mask, and hands the
whole mask to the kernel: both grow with the sequence. Here the queries of a group lie behind each
other, so that one product is of all of them with their key, and a block's scores are merged with
those of the blocks before it by the logarithm of their sum (Milakov and Gimelshein, 2018; Dao et
al., 2022). The backward makes each block's scores again. Gradients of keys and values are added
where those of later chunks have been summed.

Where torch has a kernel of its own for attention that needs no mask, that computes each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention import bias
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lema.model.capture import interface_replaced
from lema.model.sequence.blockmask import ATTENTION, BlockMask
from lema.model.sequence.states import AttendedBlocks

__all__ = ["Handed", "attention_in_blocks"]

KEYS = 256  # of a block
SCORES = 1 << 18  # at once: so many stay in a core's own cache
# Scores are in units of log 2, because on a CPU `exp2` is twice as fast as `exp`, and many times as
# fast for numbers that are far below zero.
LOG_2 = math.log(2)
# Arguments of `transformers`' function that are answered here; of others it must have none.
ANSWERED = frozenset(
    {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"}
)


class Handed(NamedTuple):
    """The keys and values that the cache has handed to a layer last.

    Args:
        keys: all that the chunk attends to, as the layer was given them.
        values: the same.
        chunk: keys and values of the chunk itself, with their graph.
        attended: where they are, and the sums of their gradients.
    """

    keys: Tensor
    values: Tensor
    chunk: tuple[Tensor, Tensor]
    attended: AttendedBlocks


@contextmanager
def attention_in_blocks(handed: Callable[[], Handed | None]) -> Iterator[None]:
    """Compute attention in blocks where layers are called on a chunk in the `with` block.

    Args:
        handed: returns what the cache has handed out last.
    """
    interfaces: Any = ALL_ATTENTION_FUNCTIONS
    theirs = interfaces[ATTENTION]
    if theirs is not sdpa_attention_forward:
        yield  # somebody's own
        return
    with interface_replaced(interfaces, ATTENTION, partial(_attend, theirs, handed)):
        yield


def _attend(
    theirs: Callable[..., tuple[Tensor, None]],
    handed: Callable[[], Handed | None],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention as `transformers`' function for `sdpa` does, with its arguments."""
    asked = options.keys() & {*signature(theirs).parameters, "softcap", "output_attentions"}
    groups = getattr(module, "num_key_value_groups", 1)
    if (
        not isinstance(attention_mask, BlockMask)
        or dropout
        or any(_is_set(options[name]) for name in asked - ANSWERED)
        or query.shape[1] != groups * key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        return theirs(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    by_group = query.unflatten(1, (-1, groups))
    last = handed()
    memory: AttendedBlocks
    if last is not None and key is last.keys and value is last.values:
        memory, chunk = last.attended, last.chunk
    else:
        memory, chunk = _Given(key, value), (key, value)
    if memory.on_device and _has_kernel(by_group[:, :, 0], key, value):
        output = _by_kernel(by_group, key, value, attention_mask, scale)
    else:
        output = _InBlocks.apply(by_group, *chunk, memory, attention_mask, scale)  # type: ignore[no-untyped-call] # torch's is
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None


def _is_set(option: object) -> bool:
    return not (option is None or option is False)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel for attention to all tokens before each that is given no mask."""
    asked: Any = bias
    parameters = asked.SDPAParams(query, key, value, None, 0.0, False, False)
    return bool(
        asked.can_use_flash_attention(parameters) or asked.can_use_efficient_attention(parameters)
    )


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Return attention `[rows, heads, groups, chunk, width]`, each group in a kernel of torch's."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    full: Any = mask.full()
    by_order = bias.causal_lower_right(num_queries, num_keys)
    if torch.equal(full, by_order._materialize(query.device).expand_as(full)):
        full = by_order
    of_groups = [
        scaled_dot_product_attention(group, key, value, attn_mask=full, scale=scale)
        for group in query.unbind(2)
    ]
    return torch.stack(of_groups, dim=2)


class _Given:
    """Keys and values as a layer was given them, of which autograd wants the gradients."""

    on_device = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys.detach()
        self._values = values.detach()
        self._sums: tuple[Tensor, Tensor] | None = None

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from `start` to before `stop`."""
        return self._keys[..., start:stop, :], self._values[..., start:stop, :]

    @contextmanager
    def gradients(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the gradients of a block, to add to in the `with` block."""
        keys, values = self._all_sums()
        yield keys[..., start:stop, :], values[..., start:stop, :]

    def _all_sums(self) -> tuple[Tensor, Tensor]:
        if self._sums is None:
            self._sums = _zeros_like(self._keys), _zeros_like(self._values)
        return self._sums

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients."""
        keys, values = self._all_sums()
        return keys.to(self._keys.dtype), values.to(self._values.dtype)


def _zeros_like(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


class _InBlocks(torch.autograd.Function):
    """Attention of a chunk over blocks of keys."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        own_keys: Tensor,  # noqa: ARG004 - autograd looks at it
        own_values: Tensor,
        memory: AttendedBlocks,
        mask: BlockMask,
        scale: float,
    ) -> Tensor:
        """Return `[rows, heads, groups, chunk, width]` of a `query` of that shape."""
        device = query.device.type
        dtype = query.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            tiles = _Tiles(query)
            merged = _merged(tiles, memory, mask, scale, own_values.shape[-1])
        output, log_sums = map(tiles.joined, merged)
        output = output.to(dtype)
        ctx.save_for_backward(query, output, log_sums)
        ctx.attending = memory, mask, scale  # type: ignore[attr-defined] # autograd keeps it
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the queries, and of the chunk's own keys and values."""
        query, output, log_sums = ctx.saved_tensors  # type: ignore[attr-defined] # as above
        memory, mask, scale = ctx.attending  # type: ignore[attr-defined] # as above
        tiles = _Tiles(query)
        dtype = tiles.queries[0].dtype
        # of the softmax: what each score's gradient has less than that of its probability
        shares = (gradient.to(dtype) * output.to(dtype)).sum(-1, keepdim=True)
        in_tiles = map(tiles.cut, (gradient, log_sums, shares))
        of_query = _differentiated(tiles, memory, mask, scale, *in_tiles)
        of_keys, of_values = memory.own_gradients()
        needs_grad = ctx.needs_input_grad  # type: ignore[attr-defined] # as above
        return (
            tiles.joined(of_query).to(query.dtype) if needs_grad[0] else None,
            of_keys if needs_grad[1] else None,
            of_values if needs_grad[2] else None,
            None,
            None,
            None,
        )


class _Tiles:
    """Queries `[rows, heads, groups, chunk, width]` in tiles `[rows, heads, groups * n, width]` of
    a few tokens, in single precision at least.

    Attributes:
        queries: the tiles.
        parts: which of the chunk's tokens each has.
    """

    def __init__(self, query: Tensor) -> None:
        self._rows, self._heads, self.groups, length, _ = query.shape
        self._fake = isinstance(query, FakeTensor)
        step = max(1, SCORES // KEYS // self.groups)
        self.parts = [slice(start, start + step) for start in range(0, length, step)]
        self._dtype = torch.promote_types(query.dtype, torch.float32)
        self.queries = self.cut(query)

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor shaped as the queries in tiles."""
        return [
            tensor[:, :, :, part]
            .reshape(self._rows, self._heads, -1, tensor.shape[-1])
            .to(self._dtype)
            for part in self.parts
        ]

    def joined(self, tiles: Sequence[Tensor]) -> Tensor:
        """Return what is in tiles, `[rows, heads, groups, chunk, width]`."""
        return torch.cat([tile.unflatten(2, (self.groups, -1)) for tile in tiles], dim=3)

    def blocks(self, memory: AttendedBlocks, mask: BlockMask) -> Iterator[_Block]:
        """Yield the blocks of keys that any query sees."""
        for start in range(0, mask.shape[-1], KEYS):
            stop = min(start + KEYS, mask.shape[-1])
            hidden = mask.hidden(start, stop)
            if not hidden.all:
                keys, values = (_heads(part.to(self._dtype)) for part in memory.block(start, stop))
                masks = None if hidden.mask is None else self._masks(hidden.mask)
                yield _Block(start, stop, keys, values, masks, self._seeing(hidden.mask))
            if self._fake:
                break  # for all are alike, and leave nothing behind

    def _seeing(self, hidden: Tensor | None) -> list[tuple[int, int]]:
        """Return the numbers of tiles and of heads, over all rows, where a query sees a key."""
        heads = list(product(range(len(self.parts)), range(self._rows * self._heads)))
        if self._fake or hidden is None:
            return heads[:1] if self._fake else heads
        by_tile = [hidden[:, 0, part].flatten(1).all(dim=1) for part in self.parts]
        unseen = torch.stack(by_tile, dim=1).tolist()  # at once, because a device is waited for
        return [pair for pair in heads if not unseen[pair[1] // self._heads % len(unseen)][pair[0]]]

    def _masks(self, hidden: Tensor) -> list[Tensor]:
        """Return the mask of each head, `[chunk, keys]`."""
        of_rows = [hidden[row % len(hidden), 0] for row in range(self._rows)]
        return [mask for mask in of_rows for _ in range(self._heads)]


def _heads(tensor: Tensor) -> list[Tensor]:
    """Return the heads of all rows of `[rows, heads, n, width]`, as views."""
    # once, because as many views as there are products take a twentieth of their time
    return [head for row in tensor.unbind() for head in row.unbind()]


class _Block(NamedTuple):
    """A block of keys and values.

    Args:
        start: the first token.
        stop: the token after the last.
        keys: of each head, `[keys, width]`.
        values: the same.
        hidden: of each head, `[chunk, keys]`, true where a key is not seen; None: all are seen.
        seeing: the tiles and heads that see a key.
    """

    start: int
    stop: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    hidden: Sequence[Tensor] | None
    seeing: Sequence[tuple[int, int]]

    def scores(self, query: Tensor, head: int, part: slice, groups: int) -> Tensor:
        """Return the scores of a tile's queries of one head of keys, `[groups * n, keys]`; minus
        infinity where a key is not seen."""
        scores = query @ self.keys[head].T
        if self.hidden is not None:
            hidden = self.hidden[head][part]
            scores.unflatten(0, (groups, -1)).masked_fill_(hidden, float("-inf"))
        return scores


def _merged(
    tiles: _Tiles, memory: AttendedBlocks, mask: BlockMask, scale: float, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return attention, and the logarithms to base 2 of the sums of scores, in tiles; `width` is
    that of values.
    """
    queries = [query * (scale / LOG_2) for query in tiles.queries]
    outputs = [query.new_zeros(*query.shape[:-1], width) for query in queries]
    lowest = torch.finfo(queries[0].dtype).min
    highest = [query.new_full((*query.shape[:-1], 1), lowest) for query in queries]
    sums = [torch.zeros_like(most) for most in highest]
    query_heads, output_heads, highest_heads, sum_heads = (
        list(map(_heads, tensors)) for tensors in (queries, outputs, highest, sums)
    )
    for block in tiles.blocks(memory, mask):
        for tile, head in block.seeing:
            query = query_heads[tile][head]
            scores = block.scores(query, head, tiles.parts[tile], tiles.groups)
            most, total = highest_heads[tile][head], sum_heads[tile][head]
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            factor = most.sub_(higher).exp2_()
            total.mul_(factor)
            output = output_heads[tile][head].mul_(factor)
            most.copy_(higher)
            scores.sub_(higher).exp2_()
            total.add_(scores.sum(-1, keepdim=True))
            output.addmm_(scores, block.values[head])
    for output, total, most in zip(outputs, sums, highest, strict=True):
        # A query that sees nothing has a sum of zero: it gets zero, and gives no gradient.
        output.div_(total.masked_fill(total == 0, 1.0))
        most.add_(total.log2_()).masked_fill_(total == float("-inf"), float("inf"))
    return outputs, highest


def _differentiated(
    tiles: _Tiles,
    memory: AttendedBlocks,
    mask: BlockMask,
    scale: float,
    gradients: Sequence[Tensor],
    log_sums: Sequence[Tensor],
    shares: Sequence[Tensor],
) -> list[Tensor]:
    """Add to the gradients of keys and values; return those of queries in tiles.

    Args:
        tiles: the queries.
        memory: keys and values.
        mask: which keys are seen.
        scale: the factor of scores.
        gradients: of what attention has returned.
        log_sums: the logarithms to base 2 of the sums of scores.
        shares: what a score's gradient has less than that of its probability.
    """
    queries = [query * (scale / LOG_2) for query in tiles.queries]
    of_queries = [torch.zeros_like(query) for query in queries]
    query_heads, of_query_heads, gradient_heads, log_sum_heads, share_heads = (
        list(map(_heads, tensors)) for tensors in (queries, of_queries, gradients, log_sums, shares)
    )
    for block in tiles.blocks(memory, mask):
        with memory.gradients(block.start, block.stop) as of_block:
            of_keys, of_values = map(_heads, of_block)
            for tile, head in block.seeing:
                query, gradient = query_heads[tile][head], gradient_heads[tile][head]
                probabilities = block.scores(query, head, tiles.parts[tile], tiles.groups)
                probabilities.sub_(log_sum_heads[tile][head]).exp2_()
                of_values[head].addmm_(probabilities.T, gradient)
                of_scores = gradient @ block.values[head].T
                of_scores.sub_(share_heads[tile][head]).mul_(probabilities)
                of_keys[head].addmm_(of_scores.T, query, alpha=LOG_2)
                of_query_heads[tile][head].addmm_(of_scores, block.keys[head])
    return [of_query.mul_(scale) for of_query in of_queries]
