"""compressed-tensors, as `transformers` and the library expand it, and what they leave out.

That is: zero points of experts, which `transformers` does not hand to the library; and groups of inputs that are not
neighbours (`weight_g_idx`), which the library no longer reads.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.integrations.compressed_tensors import (
    CompressedTensorsDequantize,
    get_dense_scheme,
    get_experts_scheme,
)
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from lema.storage.quantized.records import pieces

__all__ = ["CompressedTensorsQuantizer", "without_order"]

FORM = "pack-quantized"
GROUPS = "weight_g_idx"
ZEROS = "weight_zero_point"
PACKED = "weight_packed"
SHAPE = "weight_shape"
NAMES = (PACKED, "weight_scale", SHAPE, ZEROS, GROUPS)


def without_order(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the settings of a checkpoint for a library that no longer knows the order `group`, and whether they name
    it: groups of inputs in the order of activations, whose numbers are stored."""
    schemes, numbered = dict(settings.get("config_groups") or {}), False
    for name, scheme in schemes.items():
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if isinstance(weights, dict) and weights.get("actorder") == "group":
            schemes[name] = {**scheme, "weights": {**weights, "actorder": None}}
            numbered = True
    return {**settings, "config_groups": schemes} if numbered else dict(settings), numbered


class CompressedTensorsQuantizer(CompressedTensorsHfQuantizer):
    """The quantizer of `transformers`, with one stored tensor and one operation more."""

    def __init__(self, quantization_config: Any, *, numbered: bool) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self.serialized_names = {"weight": [*self.serialized_names["weight"], GROUPS]}
        self.numbered = numbered  # every packed weight has the numbers of its inputs' groups

    def get_load_operations(self) -> dict[str, Any]:
        """Return what makes a weight of its stored tensors."""
        return {"dequantize": _Expand}


class _Expand(ConversionOps):
    """The operation of `transformers`, but where it would leave a stored tensor out."""

    def __init__(self, hf_quantizer: CompressedTensorsQuantizer) -> None:
        self.hf_quantizer = hf_quantizer
        self._usual = CompressedTensorsDequantize(hf_quantizer)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Return weights as the operation of `transformers` does; those of experts, by the pattern of their codes.

        Raises:
            ValueError: a tensor is missing.
        """
        config, dense = self.hf_quantizer.compressor.quantization_config, PACKED in input_dict
        scheme = get_dense_scheme(config) if dense else get_experts_scheme(config)
        form = scheme.format or config.format
        if not self._differs(input_dict, form, dense=dense):
            usual: dict[str, Any] = self._usual.convert(input_dict, source_patterns, target_patterns, **kwargs)
            return usual
        dtype = kwargs["model"].get_parameter(kwargs["full_layer_name"]).dtype
        expanded: dict[str, Any] = {}
        for pattern in [name for name in input_dict if name.endswith(PACKED)]:
            stem = pattern.removesuffix(PACKED)
            parts = {name: _listed(input_dict[stem + name]) for name in NAMES if stem + name in input_dict}
            if missing := self._needed(scheme) - parts.keys():
                raise ValueError(f"{stem}{', '.join(sorted(missing))} is missing")
            rows = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
            expanded[pattern] = [_expand(row, scheme, form).to(dtype) for row in rows]
        return {kwargs["full_layer_name"]: expanded[PACKED][0]} if dense else expanded

    def _differs(self, input_dict: dict[str, Any], form: str, *, dense: bool) -> bool:
        """Whether these tensors are not those that the operation of `transformers` expands."""
        ends = {name.rpartition(".")[2] for name in input_dict}
        packed = [one for name, given in input_dict.items() if name.endswith(PACKED) for one in _listed(given)]
        if form != FORM or not packed:
            return False
        # Tensors without bytes are asked for the shape of the result, which the library only guesses.
        tried = all(one.is_meta for one in packed)
        return GROUPS in ends or (ZEROS in ends and not dense) or (tried and (dense or SHAPE in ends))

    def _needed(self, scheme: Any) -> set[str]:
        weights = scheme.weights
        has_zeros = not weights.symmetric and weights.strategy in ("group", "channel")
        beside = {ZEROS: has_zeros, GROUPS: self.hf_quantizer.numbered}
        return {"weight_scale", SHAPE} | {name for name, is_needed in beside.items() if is_needed}


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _expand(parts: dict[str, Tensor], scheme: Any, form: str) -> Tensor:
    """Return one weight, `[outputs, inputs]`, of the scales' dtype."""
    packed, scales, shape = parts[PACKED], parts["weight_scale"], parts[SHAPE].tolist()
    if GROUPS not in parts and not packed.is_meta:
        made: Tensor = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
        return made
    bits, inputs = scheme.weights.num_bits, shape[-1]
    if list(packed.shape) != [*shape[:-1], _words(inputs, bits)]:
        raise ValueError(f"{PACKED} is {list(packed.shape)}, which is not {shape} with {bits} bits")
    weight = torch.empty(shape, dtype=scales.dtype, device=packed.device)
    if weight.is_meta:
        return weight
    neighbours = torch.arange(inputs, device=packed.device) // scheme.weights.group_size
    # -1: the writer had a place for the numbers, but did not group the inputs by them.
    number_of = torch.where((parts[GROUPS] < 0).any(), neighbours, parts[GROUPS].long())
    single = scheme.weights.model_copy(update={"group_size": 1})  # each input has its scale beside it then
    zeros = unpack_from_int32(parts[ZEROS], bits, scales.shape, packed_dim=0) if ZEROS in parts else None
    for span in pieces(weight):
        codes = unpack_from_int32(packed[span], bits, weight[span].shape)
        beside = None if zeros is None else zeros[span][:, number_of]
        weight[span] = dequantize(codes, scales[span][:, number_of], beside, single)
    return weight


@cache
def _words(codes: int, bits: int) -> int:
    """Return how many words the library packs so many codes in: older ones leave bits free that do not make a code."""
    return int(pack_to_int32(torch.zeros(1, codes, dtype=torch.int8), bits).shape[-1])
