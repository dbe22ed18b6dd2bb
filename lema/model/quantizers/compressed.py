"""compressed-tensors, as `transformers` and the library expand it, and what they leave out.

That is: zero points of experts, which `transformers` does not hand to the library; and groups of
inputs that are not neighbours (`weight_g_idx`), which the library no longer reads.
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
from transformers.integrations.compressed_tensors import get_experts_scheme
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from lema.compat import loading_by_operations
from lema.storage.quantized.records import pieces

__all__ = ["CompressedTensorsQuantizer", "without_order"]

FORM = "pack-quantized"
GROUPS = "weight_g_idx"
ZEROS = "weight_zero_point"
PACKED = "weight_packed"
SCALE = "weight_scale"
SHAPE = "weight_shape"
WHOLE = "weight"
NAMES = (WHOLE, SCALE, ZEROS, "weight_global_scale", PACKED, SHAPE, GROUPS)


def without_order(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the settings of a checkpoint for a library that no longer knows the order `group`, and
    whether they name it: groups of inputs in the order of activations, whose numbers are stored."""
    schemes = dict(settings.get("config_groups") or {})
    numbered = False
    for name, scheme in schemes.items():
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if isinstance(weights, dict) and weights.get("actorder") == "group":
            schemes[name] = {**scheme, "weights": {**weights, "actorder": None}}
            numbered = True
    return {**settings, "config_groups": schemes} if numbered else dict(settings), numbered


@loading_by_operations
class CompressedTensorsQuantizer(CompressedTensorsHfQuantizer):
    """The quantizer of `transformers`, with one stored tensor and one operation of its own."""

    def __init__(self, quantization_config: Any, *, numbered: bool) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self.serialized_names = {"weight": list(NAMES)}
        self.numbered = numbered  # every packed weight has the numbers of its inputs' groups

    def get_load_operations(self) -> dict[str, Any]:
        """Return what makes a weight of its stored tensors."""
        return {"dequantize": _Expand}


class _Expand(ConversionOps):
    """What makes weights of stored tensors by the library, and in the order of `transformers`'
    operation.
    """

    def __init__(self, hf_quantizer: CompressedTensorsQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002 - as transformers calls it
        target_patterns: list[str],  # noqa: ARG002 - the same
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the weight of a module by its name in the model; those of experts, by the pattern
        of what is stored.

        Raises:
            ValueError: a tensor is missing.
        """
        config = self.hf_quantizer.compressor.quantization_config
        dense = not any("." in name for name in input_dict)
        scheme = dense_scheme(config) if dense else get_experts_scheme(config)
        form = scheme.format or config.format
        dtype = kwargs["model"].get_parameter(kwargs["full_layer_name"]).dtype
        expanded: dict[str, Any] = {}
        for pattern in [name for name in input_dict if name.rpartition(".")[2] in (PACKED, WHOLE)]:
            stem = pattern[: len(pattern) - len(pattern.rpartition(".")[2])]
            parts = {
                name: _listed(input_dict[stem + name])
                for name in NAMES
                if stem + name in input_dict
            }
            if (
                PACKED in parts
                and form == FORM
                and (missing := self._needed(scheme) - parts.keys())
            ):
                raise ValueError(f"{stem}{', '.join(sorted(missing))} is missing")
            rows = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
            expanded[pattern] = [_expand(row, scheme, form, dense=dense).to(dtype) for row in rows]
        if dense and not expanded:
            raise ValueError(f"{PACKED if form == FORM else WHOLE} is missing")
        return {kwargs["full_layer_name"]: next(iter(expanded.values()))[0]} if dense else expanded

    def _needed(self, scheme: Any) -> set[str]:
        weights = scheme.weights
        has_zeros = not weights.symmetric and weights.strategy in ("group", "channel")
        optional = {ZEROS: has_zeros, GROUPS: self.hf_quantizer.numbered}
        return {SCALE, SHAPE} | {name for name, is_needed in optional.items() if is_needed}


def dense_scheme(config: Any) -> Any:
    """Return the scheme of the modules that are no experts: the first whose targets do not
    single these out.
    """
    groups = list(config.config_groups.values())
    dense_groups = [
        group
        for group in groups
        if not any(name.startswith("re:") and "experts" in name for name in group.targets)
    ]
    return (dense_groups or groups)[0]


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _expand(parts: dict[str, Tensor], scheme: Any, form: str, *, dense: bool) -> Tensor:
    """Return one weight, `[outputs, inputs]`."""
    if SCALE not in parts:  # as norms and embeddings, which are not quantised
        return parts[WHOLE]
    if not dense and WHOLE in parts:  # products in fp32, as those of transformers
        return parts[WHOLE].float() * parts[SCALE].float()
    packed = parts.get(PACKED)
    scales = parts[SCALE]
    if packed is None or form != FORM or (GROUPS not in parts and not packed.is_meta):
        decompressed: Tensor = BaseCompressor.get_value_from_registry(form).decompress(
            dict(parts), scheme
        )[WHOLE]
        return decompressed
    shape = parts[SHAPE].tolist()
    bits = scheme.weights.num_bits
    inputs = shape[-1]
    if list(packed.shape) != [*shape[:-1], _words(inputs, bits)]:
        raise ValueError(f"{PACKED} is {list(packed.shape)}, which is not {shape} with {bits} bits")
    weight = torch.empty(shape, dtype=scales.dtype, device=packed.device)
    if weight.is_meta:
        return weight
    neighbours = torch.arange(inputs, device=packed.device) // scheme.weights.group_size
    # -1: the writer had a place for the numbers, but did not group the inputs by them.
    number_of = torch.where((parts[GROUPS] < 0).any(), neighbours, parts[GROUPS].long())
    # each input has its scale beside it then
    single = scheme.weights.model_copy(update={"group_size": 1})
    zeros = (
        unpack_from_int32(parts[ZEROS], bits, scales.shape, packed_dim=0)
        if ZEROS in parts
        else None
    )
    for span in pieces(weight):
        codes = unpack_from_int32(packed[span], bits, weight[span].shape)
        zero_points = None if zeros is None else zeros[span][:, number_of]
        weight[span] = dequantize(codes, scales[span][:, number_of], zero_points, single)
    return weight


@cache
def _words(codes: int, bits: int) -> int:
    """Return how many words the library packs so many codes in: older ones leave bits free that
    do not make a code.
    """
    return int(pack_to_int32(torch.zeros(1, codes, dtype=torch.int8), bits).shape[-1])
