"""Attention of rows of a few hundred tokens as matrix products, for `arithmetic: fast`.

Torch's fused kernel for a CPU walks over small tiles, which takes longer than products of the same
arithmetic do. Here one product over all heads multiplies a block of queries with all keys that it
may see. Above the diagonal only the rest of a block is computed. The probabilities are kept for the
backward. Longer rows, and other cases that this code does not cover, use transformers' `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["NAME", "attend"]

NAME = "lema_cpu"  # in the settings and the configs of transformers
BLOCK = 128  # queries of one product
# tokens of a row; the probabilities of longer rows would take more memory than all else of a layer
LONGEST = 512
OTHERS = "position_bias", "cache", "softcap", "s_aux"  # arguments that this code does not support


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the same as transformers' `sdpa`, but for rounding: `[batch, tokens, heads, size]`.
    `query` is `[batch, heads, tokens, size]`; `key` and `value` may have fewer heads."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    flags = (
        attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.dim() == 4
    )
    length = query.shape[2]
    has_known_mask = flags or (causal and attention_mask is None)
    covered = (
        1 < length <= LONGEST
        and key.shape[2] == length
        and query.dtype in (torch.bfloat16, torch.float32)
    )
    same = query.dtype == key.dtype == value.dtype
    if (
        not (has_known_mask and covered and same)
        or dropout
        or any(options.get(name) is not None for name in OTHERS)
    ):
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **arguments
        )
        return output
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _Blocks.apply(  # type: ignore[no-untyped-call] # torch's is
        query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, scale
    )
    return out.transpose(1, 2).contiguous(), None


class _Blocks(torch.autograd.Function):
    """`softmax(scale q k') v` of blocks of queries. Heads are one dimension with the rows of a
    batch.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float
    ) -> Tensor:
        """Attend; `allowed` is True where a query sees a key, `[batch, 1 or heads, tokens,
        tokens]`; None: causal.
        """
        batch, heads, length, _ = query.shape
        q = (query * scale).flatten(0, 1)
        k = key.flatten(0, 1)
        v = value.flatten(0, 1)
        lowest = torch.finfo(q.dtype).min
        size = min(BLOCK, length)
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        out = q.new_empty(*v.shape)
        saved = []
        for begin, end, seen in _blocks(length, causal=allowed is None):
            scores = torch.bmm(q[:, begin:end], k[:, :seen].transpose(1, 2))
            if allowed is None:
                scores[:, :, begin:].masked_fill_(later[: end - begin, : end - begin], lowest)
            else:
                scores.view(batch, heads, end - begin, seen).masked_fill_(
                    ~allowed[:, :, begin:end], lowest
                )
            saved.append(torch.softmax(scores, dim=-1))
            out[:, begin:end] = torch.bmm(saved[-1], v[:, :seen])
        ctx.save_for_backward(q, k, v, *saved)
        ctx.scale = scale
        ctx.causal = allowed is None
        return out.view(batch, heads, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q, k, v, *saved = ctx.saved_tensors
        grad_out = gradients[0].flatten(0, 1)
        sizes = gradients[0].shape[:3]
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for (begin, end, seen), probabilities in zip(
            _blocks(q.shape[1], causal=ctx.causal), saved, strict=True
        ):
            of_out = grad_out[:, begin:end]
            dv[:, :seen] += torch.bmm(probabilities.transpose(1, 2), of_out)
            back = torch.bmm(of_out, v[:, :seen].transpose(1, 2))
            scores = torch._softmax_backward_data(back, probabilities, -1, probabilities.dtype)
            dq[:, begin:end] = torch.bmm(scores, k[:, :seen])
            dk[:, :seen] += torch.bmm(scores.transpose(1, 2), q[:, begin:end])
        dq.mul_(ctx.scale)
        return *(gradient.view(*sizes, -1) for gradient in (dq, dk, dv)), None, None


def _blocks(length: int, *, causal: bool) -> list[tuple[int, int, int]]:
    """Return where each block of queries begins and ends, and how many keys it is multiplied
    with.
    """
    bounds = [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]
    return [(begin, end, end if causal else length) for begin, end in bounds]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
