"""Which quantizer expands the weights of a checkpoint, by what its config says of how they are
quantised.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lema.compat import expands
from lema.errors import ConfigError, ModelError, installing
from lema.model.quantizers import awq, gptq
from lema.model.quantizers.packed import PackedForm, PackedQuantizer

__all__ = ["open_quantizer", "quantization_settings"]

# AutoRound packs as others do (`packing_format` is what its `convert_model.py` asks for): the
# method, and the format.
AUTO_ROUND: Mapping[str, tuple[str, str]] = {
    "auto": ("gptq", "gptq"),
    "auto_round:gptq": ("gptq", "gptq"),
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:awq": ("awq", "gemm"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
COMPRESSED = "compressed-tensors"
# By method, how weights are stored, and the formats and bits that are expanded.
PACKED: Mapping[str, tuple[PackedForm, tuple[str, ...], tuple[int, ...]]] = {
    "gptq": (gptq.GPTQ, gptq.FORMATS, tuple(gptq.ONES)),
    "awq": (awq.AWQ, ("gemm",), (awq.BITS,)),
}


# Of what packed checkpoints say, what is needed to read them. The rest matters to who quantises:
# for some of it transformers asks for a library, of some it warns, and some it refuses.
READ = (
    "quant_method",
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "zero_point",
    "format",
    "version",
    "backend",
)
# Settings with which inputs of linear modules are rotated, too, by code that is in no checkpoint.
ROTATIONS = ("rotation", "rotation_config", "transform_config")


def quantization_settings(
    config: PreTrainedConfig,
) -> dict[str, Any] | QuantizationConfigMixin | None:
    """Return what a model's config says of how its weights are quantised, or the config of its part
    that reads text, where some say it; None: neither does."""
    parts = (config, config.get_text_config(decoder=True))
    return next(
        (settings for part in parts if (settings := getattr(part, "quantization_config", None))),
        None,
    )


def open_quantizer(settings: dict[str, Any] | QuantizationConfigMixin, path: Path) -> HfQuantizer:
    """Return the quantizer whose operations expand what is stored.

    Args:
        settings: the `quantization_config` of a config: a dict, or a class of `transformers`.
        path: of the checkpoint, for messages.

    Raises:
        ModelError: weights of this method, or in this format, cannot be expanded.
        ConfigError: the method's library is not installed.
    """
    chosen = copy.deepcopy(settings if isinstance(settings, dict) else settings.to_dict())
    chosen["quant_method"] = method = str(
        getattr(chosen.get("quant_method"), "value", chosen.get("quant_method"))
    )
    where = f"{path}: quantization_config"
    if rotations := [name for name in ROTATIONS if chosen.get(name)]:
        what = (
            f"the checkpoint is quantised with its inputs rotated ({rotations[0]}), which is "
            "not done here"
        )
        raise ModelError(
            what, where=where, how="use the unquantised model, or one that is quantised without"
        )
    if method == "auto-round":
        chosen = _packed_by_auto_round(chosen, where)
        method = chosen["quant_method"]
    if method not in (*PACKED, COMPRESSED) and not expands(method):
        what = (
            f"the checkpoint is quantised by the method {method!r}, whose weights transformers "
            "cannot expand"
        )
        how = (
            "use the unquantised model: quantize_base: nf4, or `lema prepare --quantize`, makes "
            "a quantised one that streams"
        )
        raise ModelError(what, where=where, how=how)
    try:
        return _build_quantizer(method, chosen, where)
    except ImportError as error:
        what = (
            f"the weights are quantised by the method {method!r}, whose library cannot be "
            f"imported: {error}"
        )
        how = installing("quantize")
        raise ConfigError(what, where=where, how=how) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"transformers cannot read how the checkpoint is quantised: {error}"
        how = "check the config, or download it again"
        raise ModelError(what, where=where, how=how) from error


def _build_quantizer(method: str, chosen: dict[str, Any], where: str) -> HfQuantizer:
    if method == COMPRESSED:
        # Here, because it imports the library.
        from lema.model.quantizers.compressed import CompressedTensorsQuantizer, without_order

        settings, numbered = without_order(chosen)
        quantizer: HfQuantizer = CompressedTensorsQuantizer(_expanding(settings), numbered=numbered)
    elif method in PACKED:
        return _packed(method, chosen, where)
    else:
        quantizer = AutoHfQuantizer.from_config(_expanding(chosen), pre_quantized=True)
    quantizer.validate_environment()  # some find out only then how they shall expand
    return quantizer


def _expanding(settings: dict[str, Any]) -> Any:
    config = AutoQuantizationConfig.from_dict(settings)
    config.dequantize = True
    return config


def _packed(method: str, chosen: dict[str, Any], where: str) -> HfQuantizer:
    needed = {name: chosen[name] for name in (*READ, "checkpoint_format") if name in chosen}
    config = _expanding(needed | {"act_group_aware": False})
    form, formats, bits = PACKED[method]
    stored_as = str(getattr(config.format, "value", config.format))
    if stored_as not in formats or config.bits not in bits:
        what = (
            f"the checkpoint is stored as {method!r} in the format {stored_as!r} with "
            f"{config.bits} bits; those"
        )
        what += (
            f" of the formats {', '.join(formats)} with {', '.join(map(str, bits))} bits are "
            "expanded"
        )
        raise ModelError(what, where=where, how="use the unquantised model")
    return PackedQuantizer(config, form)


def _packed_by_auto_round(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings that the same stored tensors have where GPTQ or AWQ wrote them."""
    # as transformers' `AutoRoundConfig`
    packing = settings.get("packing_format", "auto_round:gptq")
    if packing not in AUTO_ROUND or settings.get("data_type", "int") != "int":
        what = f"the checkpoint is quantised by AutoRound with the packing {packing!r} of"
        what += f" {settings.get('data_type', 'int')!r}, which is not expanded"
        how = f"use the unquantised model, or one packed as {', '.join(AUTO_ROUND)}"
        raise ModelError(what, where=where, how=how)
    method, form = AUTO_ROUND[packing]
    named = {"quant_method": method, "checkpoint_format" if method == "gptq" else "version": form}
    return named | {key: settings[key] for key in ("bits", "group_size", "sym") if key in settings}
