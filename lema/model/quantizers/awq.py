"""AWQ (https://arxiv.org/abs/2306.00978) as AutoAWQ stores it for its kernel `gemm`, expanded as
GPTQModel does.

A word has the codes of eight consecutive outputs of one input, in the order in which the kernel
wants them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lema.model.quantizers.packed import WORD, PackedForm, group_size_of, scaled, unpack_rows
from lema.storage.quantized.records import pieces

__all__ = ["AWQ"]

BITS = 4
# of the eight outputs of a word
SHIFTS = tuple(BITS * position for position in (0, 4, 1, 5, 2, 6, 3, 7))
OUTPUTS = WORD // BITS  # of a word


def expand(parts: Mapping[str, Tensor], settings: Any, dtype: torch.dtype) -> Tensor:
    """Return a weight.

    Args:
        parts: `qweight` int32 `[inputs, outputs / 8]`, `qzeros` int32 `[groups, outputs / 8]`,
            `scales` `[groups, outputs]`.
        settings: transformers' `AwqConfig`.
        dtype: of the weight; the product is of the scales' dtype, as the kernel's.

    Returns:
        `[outputs, inputs]`.

    Raises:
        ValueError: the parts do not fit each other.
    """
    words = parts["qweight"]
    zero_words = parts["qzeros"]
    scales = parts["scales"]
    inputs, columns = words.shape
    groups, outputs = scales.shape
    if columns * OUTPUTS != outputs or tuple(zero_words.shape) != (groups, columns):
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
        raise ValueError(f"{shapes} are not codes of {BITS} bits with their scales and zero points")
    size = group_size_of(inputs, groups, settings.group_size)
    weight = torch.empty(outputs, inputs, dtype=dtype, device=words.device)
    if weight.is_meta:
        return weight
    zeros = unpack_rows(zero_words.t(), SHIFTS, BITS)
    for span in pieces(weight, block=OUTPUTS):
        there = slice(span.start // OUTPUTS, span.stop // OUTPUTS)
        # words are transposed faster than codes
        codes = unpack_rows(words[:, there].contiguous().t(), SHIFTS, BITS)
        own_zeros = zeros[span]
        own_scales = scales[:, span].t().contiguous()
        if inputs == groups * size:
            codes = codes.view(-1, groups, size)
            own_zeros = own_zeros[..., None]
            own_scales = own_scales[..., None]
        else:
            own_zeros, own_scales = (
                tensor.repeat_interleave(size, 1)[:, :inputs] for tensor in (own_zeros, own_scales)
            )
        weight[span] = scaled(codes, own_zeros, own_scales, dtype).flatten(1)
    return weight


AWQ = PackedForm(
    parts=("qweight", "qzeros", "scales"), needed=("qweight", "qzeros", "scales"), expand=expand
)
