"""Weights whose codes are packed into words of 32 bits beside scales and zero points, as GPTQ and
AWQ publish them.

`transformers` replaces the modules of such models by those of kernels that it does not have, and
expands nothing. The quantizer here has the interface of its quantizers that do expand: it says
which stored tensors make a weight, and with which operation, so that renaming, merging of experts
and everything else stays that of `transformers`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lema.compat import loading_by_operations

__all__ = [
    "WORD",
    "PackedForm",
    "PackedQuantizer",
    "group_size_of",
    "scaled",
    "unpack_columns",
    "unpack_rows",
]

WORD = 32
BYTE = 8  # bits
WEIGHT = "qweight"


@dataclass(frozen=True)
class PackedForm:
    """One way to store a weight in packed words.

    Attributes:
        parts: what its stored tensors are called, `qweight` first.
        needed: those without which it cannot be expanded.
        expand: takes the tensors by name, the settings of the checkpoint and a dtype; returns the
            weight, `[outputs, inputs]`, on the device of the tensors. `ValueError`: they do not fit
            each other.
    """

    parts: tuple[str, ...]
    needed: tuple[str, ...]
    expand: Callable[[Mapping[str, Tensor], Any, torch.dtype], Tensor]


@loading_by_operations
class PackedQuantizer(HfQuantizer):
    """Loads weights of a packed form expanded; `quantization_config` is the settings class of
    `transformers`.
    """

    def __init__(self, quantization_config: QuantizationConfigMixin, form: PackedForm) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self._form = form
        self.serialized_names = {"weight": list(form.parts)}

    def get_load_operations(self) -> dict[str, Any]:
        """Return what makes a weight of its stored tensors."""
        return {"dequantize": partial(_Expand, form=self._form)}

    def is_serializable(self) -> bool:
        """Whether `transformers` could write such a model: nothing here quantises."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether quantised weights could train: they are expanded."""
        return False


class _Expand(ConversionOps):
    """The operation of `PackedQuantizer`: of one module, or, before they are merged, of all
    experts.
    """

    def __init__(self, hf_quantizer: HfQuantizer, form: PackedForm) -> None:
        self.hf_quantizer = hf_quantizer
        self._form = form

    def convert(
        self,
        input_dict: Mapping[str, Tensor | Sequence[Tensor]],
        source_patterns: list[str],  # noqa: ARG002 - as transformers calls it
        target_patterns: list[str],  # noqa: ARG002 - transformers' signature
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the weights by the pattern of their words, as lists; that of one module, by its
        name in the model.

        Raises:
            ValueError: a tensor is missing, or they do not fit each other.
        """
        model = kwargs["model"]
        settings = self.hf_quantizer.quantization_config
        parameter = model.get_parameter(full_layer_name)
        lists = {
            name: [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for name, tensors in input_dict.items()
        }
        expanded: dict[str, Any] = {}
        stems = dict.fromkeys(name[: len(name) - len(name.rpartition(".")[2])] for name in lists)
        for stem in stems:
            parts = {part: lists[stem + part] for part in self._form.parts if stem + part in lists}
            self._check(stem, parts)
            rows = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
            expanded[stem + WEIGHT] = [
                self._form.expand(row, settings, parameter.dtype) for row in rows
            ]
        if len(expanded) == 1 and not any(stems):
            _refuse_transposed(model, str(full_layer_name))
            (weights,) = expanded.values()
            return {str(full_layer_name): weights[0]}
        return expanded

    def _check(self, stem: str, parts: Mapping[str, Sequence[Tensor]]) -> None:
        if missing := [part for part in self._form.needed if part not in parts]:
            raise ValueError(f"{stem}{', '.join(missing)} is missing")
        if len({len(group) for group in parts.values()}) > 1:
            raise ValueError(f"{stem}{WEIGHT} and the tensors beside it are not equally many")
        for part in (WEIGHT, "qzeros"):
            if wrong_dtypes := [
                tensor.dtype for tensor in parts.get(part, ()) if tensor.dtype != torch.int32
            ]:
                raise ValueError(
                    f"{stem}{part} is {wrong_dtypes[0]}, and words of {WORD} bits are expanded"
                )


def _refuse_transposed(model: nn.Module, name: str) -> None:
    # transformers' Conv1D, of GPT-2
    if hasattr(model.get_submodule(name.rpartition(".")[0]), "nf"):
        raise ValueError(
            "the module keeps its weight as [inputs, outputs], which is not expanded here"
        )


def unpack_rows(words: Tensor, shifts: Sequence[int], bits: int) -> Tensor:
    """Return the codes in words that have those of neighbouring rows.

    Args:
        words: int32, `[rows * bits / 32, columns]`.
        shifts: how far each code of a word lies from its lowest bit, in the order of the rows.
        bits: how many bits a code has, 2, 4 or 8.

    Returns:
        `[rows, columns]`, not negative; int8, or int16 for 8 bits.
    """
    words = words.contiguous()
    narrow = torch.int16 if bits == 8 else torch.int8
    codes = torch.empty(
        words.shape[0], len(shifts), words.shape[1], dtype=narrow, device=words.device
    )
    # Place by place, because a tensor of the shifts would have to come from the host at each lease;
    # and byte by byte, because a processor takes four times as many bytes as words at once.
    for start in range(0, WORD, BYTE):
        low_bytes = (words >> start).to(torch.uint8)
        for inner in range(0, BYTE, bits):
            codes[:, shifts.index(start + inner)] = (low_bytes >> inner) & ((1 << bits) - 1)
    return codes.flatten(0, 1)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words that have those of neighbouring columns, from their lowest bits on;
    the same shape otherwise, and the same dtypes."""
    codes = words.contiguous().view(torch.uint8)  # the lowest byte first
    width = BYTE
    while width > bits:
        width //= 2
        pairs = codes.to(torch.int16)  # each number becomes two with a half of its bits
        codes = (
            (pairs << (BYTE - width))
            .bitwise_or_(pairs)
            .bitwise_and_(0x0101 * ((1 << width) - 1))
            .view(torch.uint8)
        )
    return codes.to(torch.int16) if bits == BYTE else codes.view(torch.int8)


def scaled(codes: Tensor, zeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights of codes, of shapes that fit each other; the product is rounded in the
    scales' type, as the kernels do. Fp32 lies between two types, because torch converts number by
    number where both are short."""
    product = (codes - zeros).float().to(scales.dtype).mul_(scales)
    return product if product.dtype == dtype else product.float().to(dtype)


def group_size_of(inputs: int, groups: int, configured: int) -> int:
    """Return how many inputs share a scale. `ValueError`: so many inputs do not make so many
    groups.
    """
    if configured > 0 and -(-inputs // configured) == groups:
        return configured
    # settings of single modules differ from those of the model, or one group has all inputs
    if inputs % groups == 0:
        return inputs // groups
    raise ValueError(
        f"{inputs} inputs are stored with scales of {groups} groups, and groups have {configured}"
    )
