"""GPTQ (https://arxiv.org/abs/2210.17323) as GPTQModel and AutoGPTQ store it, expanded as GPTQModel
does.

A word has the codes of consecutive inputs of one output. Each input has a number of its group
(`g_idx`), because a quantiser that takes inputs in the order of their activations (`desc_act`) does
not group neighbours. The format `gptq` has zero points less one, and adds one to whole words:
GPTQModel subtracted it so. `gptq_v2` has them as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lema.model.quantizers.packed import (
    WORD,
    PackedForm,
    group_size_of,
    scaled,
    unpack_columns,
    unpack_rows,
)
from lema.storage.quantized.records import pieces

__all__ = ["FORMATS", "GPTQ"]

FORMATS = ("gptq", "gptq_v2")
# By the bits of a code, a word with one in each of its codes.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def expand(parts: Mapping[str, Tensor], settings: Any, dtype: torch.dtype) -> Tensor:
    """Return a weight.

    Args:
        parts: `qweight` int32 `[inputs * bits / 32, outputs]`, `qzeros` int32 `[groups, outputs *
            bits / 32]`, `scales` `[groups, outputs]`, and `g_idx`, whole numbers `[inputs]`, where
            it is stored.
        settings: transformers' `GPTQConfig`.
        dtype: of the weight; the product is of the scales' dtype, as the kernel's.

    Returns:
        `[outputs, inputs]`.

    Raises:
        ValueError: the parts do not fit each other.
    """
    words = parts["qweight"]
    zero_words = parts["qzeros"]
    scales = parts["scales"]
    groups, outputs = scales.shape
    # a module's own, where settings of single modules differ
    bits = WORD * zero_words.shape[-1] // outputs
    if bits not in ONES or words.shape[-1] != outputs or zero_words.shape[0] != groups:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
        raise ValueError(
            f"{shapes} are not codes of 2, 4 or 8 bits with their scales and zero points"
        )
    number_of = parts.get("g_idx")
    inputs = words.shape[0] * WORD // bits if number_of is None else number_of.shape[0]
    if -(-inputs * bits // WORD) != words.shape[0]:
        raise ValueError(
            f"qweight has codes of {words.shape[0] * WORD // bits} inputs, and g_idx "
            f"groups of {inputs}"
        )
    if number_of is None:
        if settings.desc_act:
            raise ValueError(
                "it was quantised in the order of activations (desc_act), but g_idx is missing"
            )
        size = group_size_of(inputs, groups, settings.group_size)
        number_of = torch.arange(inputs, device=words.device) // size
    weight = torch.empty(outputs, inputs, dtype=dtype, device=words.device)
    if weight.is_meta:
        return weight
    if settings.format == "gptq":
        zero_words = zero_words + ONES[bits]
    zeros = unpack_columns(zero_words, bits)[:, :outputs]
    number_of = number_of.long()
    neighbours = _are_neighbours(number_of, groups)
    for span in pieces(weight):
        own_zeros = zeros[:, span].contiguous()
        own_scales = scales[:, span].contiguous()
        if neighbours:
            # words are transposed faster than codes
            codes = unpack_columns(words[:, span].contiguous().t(), bits)
            codes = codes.view(-1, groups, inputs // groups)
            own_zeros, own_scales = (
                tensor.t().contiguous().unsqueeze(-1) for tensor in (own_zeros, own_scales)
            )
            weight[span] = scaled(codes, own_zeros, own_scales, dtype).flatten(1)
        else:
            codes = unpack_rows(words[:, span], range(0, WORD, bits), bits)[:inputs]
            own_zeros, own_scales = (
                tensor.index_select(0, number_of) for tensor in (own_zeros, own_scales)
            )
            weight[span] = scaled(codes, own_zeros, own_scales, dtype).t()
    return weight


def _are_neighbours(number_of: Tensor, groups: int) -> bool:
    """Whether each group is known to have equally many inputs, one after the other."""
    inputs = number_of.shape[0]
    # Elsewhere numbers are not looked at, because a lease would wait for the device.
    if number_of.device.type != "cpu" or inputs % groups != 0:
        return False
    return torch.equal(number_of, torch.arange(inputs) // (inputs // groups))


GPTQ = PackedForm(
    parts=("qweight", "qzeros", "scales", "g_idx"),
    needed=("qweight", "qzeros", "scales"),
    expand=expand,
)
