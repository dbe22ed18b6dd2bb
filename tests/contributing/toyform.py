"""A quantised form to be published in: one byte a weight, and a power of two for each row.

It is stored in two ways. `transformers` expands the first, by the operation of `ToyQuantizer`. Of
the second it knows the settings alone, as of GPTQ's and AWQ's, and LEMA expands it, by `TOY`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lema.compat import loading_by_operations
from lema.model.quantizers.packed import PackedForm, unpack_columns

METHOD = "toy"
FORMATS = ("rows",)
BITS = 8


class ToySettings(QuantizationConfigMixin):
    """What `config.json` says of the form."""

    def __init__(self, bits: int = BITS, format: str = "rows", dequantize: bool = False, **_: Any):
        self.quant_method = METHOD
        self.bits = bits
        self.format = format
        self.dequantize = dequantize


class Expand(ConversionOps):
    """The operation that makes a weight of the tensors that are stored of it."""

    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: Mapping[str, Any], *_: Any, **about: Any) -> dict[str, Tensor]:
        """Return the weight of one module by its name, from lists of one stored tensor each."""
        (weight,) = input_dict["weight"]
        if "weight_scale" in input_dict:  # otherwise it is not quantised, as those of norms
            weight = weight.float() * input_dict["weight_scale"][0]
        return {about["full_layer_name"]: weight}


@loading_by_operations
class ToyQuantizer(HfQuantizer):
    """Says which stored tensors make a weight, and by which operation."""

    serialized_names: ClassVar = {"weight": ["weight", "weight_scale"]}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": Expand}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def expand_words(parts: Mapping[str, Tensor], settings: Any, dtype: torch.dtype) -> Tensor:
    """Return a weight, `[outputs, inputs]`, of codes in words. Parts may be on `meta`."""
    codes = unpack_columns(parts["qweight"], settings.bits)
    weight = (codes - parts["qzeros"]).float() * parts["scales"]
    return weight.to(dtype)


PARTS = ("qweight", "qzeros", "scales")
TOY = PackedForm(parts=PARTS, needed=PARTS, expand=expand_words)


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, whole numbers from -127 to 127, and the scale of each row, a power of two."""
    scales = torch.exp2(torch.log2(weight.abs().amax(1, keepdim=True) / 127).ceil())
    return (weight / scales).round(), scales


def for_transformers(name: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return what is stored of a weight in the first way."""
    return {name: codes.to(torch.int8), f"{name}_scale": scales}


def for_lema(name: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return what is stored of a weight in the second way."""
    stem = name.removesuffix("weight")
    words = (codes + 128).to(torch.uint8).view(torch.int32)
    zeros = torch.full(scales.shape, 128, dtype=torch.int32)
    return {f"{stem}qweight": words, f"{stem}qzeros": zeros, f"{stem}scales": scales}
