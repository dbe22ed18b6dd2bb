"""The model of TRL's runs: its files, and the types that it is kept and computed in."""

from collections.abc import Mapping
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.fourbits import SCALES_TOO
from lema_tools.importing.full import masters
from lema_tools.importing.ropes import carry_rope
from lema_tools.importing.trl.ledger import Ledger

__all__ = ["model"]

HALVES = ("bfloat16", "float16")


def model(ledger: Ledger) -> None:
    """Translate which model it is, its dtype, autocast and quantisation."""
    if not ledger["model_name_or_path"]:
        raise ConfigError("TRL's run names no model", where="model_name_or_path", how="set it")
    ledger.carry("model_name_or_path", "model_name_or_path")
    options = dict(_init_options(ledger))
    revision = options.pop("revision", ledger["model_revision"])
    ledger.carry("model_revision", "revision", None if revision == "main" else revision)
    attention = options.pop("attn_implementation", ledger["attn_implementation"])
    ledger.carry("attn_implementation", "attn_implementation", attention)
    dtype = options.pop("dtype", options.pop("torch_dtype", ledger["dtype"]))
    for name in (
        "trust_remote_code",
        "device_map",
        "use_cache",
        "use_kernels",
        "low_cpu_mem_usage",
    ):
        options.pop(name, None)
    for name in carry_rope(ledger, options):
        options.pop(name)
    if options:
        names = ", ".join(sorted(options))
        ledger.lost("model_init_kwargs", f"LEMA gives from_pretrained no {names}")
    elif ledger["model_init_kwargs"]:
        ledger.same("model_init_kwargs", "with the settings of the same names")
    _types(ledger, dtype)
    _quantised(ledger)
    ledger.carry("tf32", "tf32", bool(ledger["tf32"]))
    ledger.carry("torch_compile", "torch_compile")


def _init_options(ledger: Ledger) -> Mapping[str, Any]:
    options = ledger["model_init_kwargs"] or {}
    if not isinstance(options, Mapping):
        what = f"it should be a mapping, not {options!r}"
        raise ConfigError(what, where="model_init_kwargs", how="write key: value below it")
    return options


def _types(ledger: Ledger, dtype: str | None) -> None:
    """Carry the dtype of weights, and of products.

    TRL loads weights as float32 and computes products in bfloat16 (`torch.autocast`) unless it is
    told otherwise. Where weights are in half precision, LEMA computes them under autocast, too.
    """
    weights = None if dtype in (None, "auto") else dtype
    ledger.carry("dtype", "dtype", weights)
    half = ledger["fp16"]
    cast = not half if ledger["bf16"] is None else ledger["bf16"]
    stored = weights or ledger.model_config.get("dtype") or ledger.model_config.get("torch_dtype")
    ledger.put(autocast=None, compute_dtype="weights")
    if not ledger["use_peft"]:
        _trained_whole(ledger, stored)
    if half:
        what = (
            "LEMA has no products in float16 of other weights, nor TRL's scale of their gradients"
        )
        ledger.lost("fp16", what)
    elif not cast:
        if stored in ("float32", None):
            ledger.translation.same["bf16"] = "compute_dtype: weights"
        else:
            what = "LEMA computes weights in half precision under autocast to their type"
            ledger.differs("bf16", what)
    elif stored == "float32":
        ledger.carry("bf16", "autocast", "bfloat16")
    elif stored is None:
        what = "LEMA computes in the type of the checkpoint: set dtype where that is not bfloat16"
        ledger.differs("bf16", what)
    elif stored == "bfloat16":
        ledger.translation.same["bf16"] = "layers compute in bfloat16"
    else:
        ledger.differs("bf16", f"LEMA computes {stored} weights in {stored}")


def _trained_whole(ledger: Ledger, stored: str | None) -> None:
    """Note that TRL trains weights in the type in which it loads them."""
    if stored in HALVES:
        masters(ledger, "dtype", stored, "TRL")
    elif stored is None:
        ledger.translation.same.pop("dtype", None)
        what = (
            "LEMA trains float32 masters, and TRL weights in the type of the checkpoint, whose "
            "config is not here: set dtype"
        )
        ledger.differs("dtype", what)


def _quantised(ledger: Ledger) -> None:
    if ledger["load_in_4bit"] and ledger["load_in_8bit"]:
        what = "a model has 4 bits or 8 bits, not both"
        raise ConfigError(what, where="load_in_4bit", how="leave one of them out")
    if ledger["load_in_8bit"]:
        ledger.put(quantize_base="int8")
        _differs_by_adapters(
            ledger,
            "load_in_8bit",
            "quantize_base: int8, torchao's weights of 8 bits, not bitsandbytes'",
        )
    if not ledger["load_in_4bit"]:
        for key in ("bnb_4bit_quant_type", "use_bnb_nested_quant"):
            ledger.same(key, "of load_in_4bit alone")
        return
    if ledger["bnb_4bit_quant_type"] != "nf4":
        ledger.lost("bnb_4bit_quant_type", "LEMA's 4-bit numbers are nf4")
    if ledger["use_bnb_nested_quant"]:
        ledger.same("use_bnb_nested_quant", "the scales of blocks are quantised, too")
    else:
        ledger.differs("use_bnb_nested_quant", f"{SCALES_TOO}; TRL does so with `true` alone")
    ledger.put(quantize_base="nf4")
    _differs_by_adapters(ledger, "load_in_4bit", "quantize_base: nf4")


def _differs_by_adapters(ledger: Ledger, key: str, setting: str) -> None:
    what = f"{setting}; TRL rounds adapters of a quantised model to bfloat16, LEMA has float32"
    ledger.differs(key, what)
