"""The model of LLaMA-Factory's runs, and the types that it is kept and computed in."""

from lema.errors import ConfigError
from lema_tools.importing.fourbits import SCALES_TOO, four_bits
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.ropes import rope_of_length

__all__ = ["model"]

ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
"""LLaMA-Factory's names of attention by those of `transformers`."""


def model(ledger: Ledger) -> None:
    """Translate which model it is, its dtype, autocast and quantisation."""
    if not ledger["model_name_or_path"]:
        raise ConfigError("the run names no model", where="model_name_or_path", how="set it")
    ledger.carry("model_name_or_path", "model_name_or_path")
    revision = ledger["model_revision"]
    ledger.carry("model_revision", "revision", None if revision == "main" else revision)
    attention = ledger["flash_attn"]
    ledger.carry("flash_attn", "attn_implementation", ATTENTION.get(attention, attention))
    ledger.carry("torch_compile", "torch_compile", bool(ledger["torch_compile"]))
    ledger.carry("tf32", "tf32", bool(ledger["tf32"]))
    _types(ledger)
    _quantised(ledger)
    _changed(ledger)


def _types(ledger: Ledger) -> None:
    """Carry the dtype: LLaMA-Factory loads the model in the type that it computes in."""
    ledger.put(compute_dtype="weights")
    full = ledger["finetuning_type"] != "lora"
    if ledger["pure_bf16"]:
        ledger.put(dtype="bfloat16")
        what = "what trains is rounded to bfloat16 there; LEMA trains it in float32"
        ledger.differs("pure_bf16", what)
        ledger.same("bf16", "dtype: bfloat16")
    elif ledger["bf16"] and full:
        _trained_whole(ledger)
    elif ledger["bf16"]:
        ledger.carry("bf16", "dtype", "bfloat16")
    elif ledger["fp16"]:
        ledger.put(dtype="float16")
        ledger.differs("fp16", "dtype: float16, without the scale of gradients that Trainer has")
    else:
        ledger.put(dtype=None)
        what = (
            "without bf16 and fp16 LLaMA-Factory decides the type by the device, and computes "
            "without autocast; LEMA takes the checkpoint's type: set bf16: true there"
        )
        ledger.differs("bf16", what)
    if ledger["fp16"] and (ledger["bf16"] or ledger["pure_bf16"]):
        raise ConfigError("fp16 and bf16 exclude each other", where="fp16", how="take one")
    if "fp16" not in ledger.settled():
        ledger.same("fp16", "no")
    if not ledger["pure_bf16"]:
        ledger.same("pure_bf16", "what trains is kept in float32, in both")


def _trained_whole(ledger: Ledger) -> None:
    """Carry weights that LLaMA-Factory loads in bfloat16, trains in float32, and multiplies under
    autocast; DeepSpeed has copies in bfloat16 of its float32 masters.
    """
    if ledger["deepspeed"]:
        ledger.put(dtype="bfloat16")
        what = "dtype: bfloat16 with float32 masters, as DeepSpeed has, whose rounding of gradients"
        ledger.differs("bf16", f"{what} is its own")
        return
    ledger.put(dtype="float32", autocast="bfloat16")
    what = "dtype: float32, autocast: bfloat16"
    stored = ledger.model_config.get("dtype") or ledger.model_config.get("torch_dtype")
    if stored in ("bfloat16", None):
        rounded = "" if stored else " (LLaMA-Factory rounds weights of other types to it first)"
        ledger.same("bf16", f"{what}, of a checkpoint in bfloat16{rounded}")
    else:
        ledger.differs("bf16", f"{what}; LLaMA-Factory rounds the {stored} weights to bfloat16")


def _quantised(ledger: Ledger) -> None:
    bits = ledger["quantization_bit"]
    method = str(ledger["quantization_method"]).lower()
    options = ("quantization_method", "quantization_type", "double_quantization")
    if bits is None:
        ledger.carry("quantization_bit", "quantize_base", None)
        for key in options:
            ledger.same(key, "of quantization_bit alone")
        return
    if ledger["finetuning_type"] not in ("lora", "oft"):
        what = "a quantised model trains adapters alone"
        raise ConfigError(what, where="quantization_bit", how="set finetuning_type: lora")
    if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        for key in options:
            ledger.same(key, "see quantization_bit")
        what = f"LEMA quantises as bitsandbytes does, to 4 or 8 bits, not to {bits} by {method}"
        ledger.lost("quantization_bit", what)
        return
    ledger.same("quantization_method", "the numbers of bitsandbytes")
    if bits == 8:
        what = "quantize_base: int8; bitsandbytes also computes outliers in half precision"
        ledger.put(quantize_base="int8")
        ledger.differs("quantization_bit", what)
        ledger.same("quantization_type", "of 4 bits alone")
        ledger.same("double_quantization", "of 4 bits alone")
        return
    four_bits(ledger, "quantization_bit")
    if ledger["quantization_type"] != "nf4":
        ledger.lost("quantization_type", "LEMA's 4-bit numbers are nf4")
    else:
        ledger.same("quantization_type", "nf4")
    if ledger["double_quantization"]:
        ledger.same("double_quantization", "the scales of blocks are quantised, too")
    else:
        ledger.differs("double_quantization", SCALES_TOO)


CHANGES = {
    "shift_attn": "LEMA has no shifted sparse attention",
    "mixture_of_depths": "LEMA has no mixture of depths",
    "resize_vocab": "LEMA does not resize the embeddings: save a resized model, and name that",
    "add_tokens": "LEMA does not add tokens: save the tokenizer and a resized model",
    "add_special_tokens": "LEMA does not add tokens: save the tokenizer and a resized model",
    "new_special_tokens_config": "LEMA does not add tokens: save a resized model",
    "split_special_tokens": "LEMA reads special tokens in texts as such",
    "train_from_scratch": "LEMA begins with the weights of the model",
    "upcast_lmhead_output": "LEMA computes the loss in float32 from logits in the model's type",
    "upcast_layernorm": "LEMA computes norms as the model does",
    "moe_aux_loss_coef": "",
}


def _changed(ledger: Ledger) -> None:
    """Note what changes the model itself, which LEMA takes as it is in its files."""
    coefficient = ledger["moe_aux_loss_coef"]
    ledger.carry(
        "moe_aux_loss_coef", "router_aux_loss_coef", None if coefficient is None else coefficient
    )
    _rope(ledger)
    for key, why in CHANGES.items():
        if why and not ledger.is_default(key) and ledger[key]:
            ledger.lost(key, why)
        elif why:
            ledger.same(key, "none, in both")


def _rope(ledger: Ledger) -> None:
    """Carry rotary parameters, whose factor LLaMA-Factory makes of the rows' length."""
    kind = ledger["rope_scaling"]
    length = int(ledger["cutoff_len"])
    positions = ledger.model_config.get("max_position_embeddings")
    if not kind:
        ledger.same("rope_scaling", "none, in both")
    elif not positions:
        what = "its factor goes by the model's config.json, which is not here: set rope_parameters"
        ledger.lost("rope_scaling", what)
    elif length <= positions:
        ledger.same("rope_scaling", "off, in both, of rows no longer than the model's positions")
    elif (parameters := rope_of_length(str(kind), length, positions)) is None:
        what = "of dynamic ones LLaMA-Factory raises the length from which they change"
        ledger.lost("rope_scaling", f"{what}: set rope_parameters")
    else:
        ledger.put(rope_parameters=parameters)
        ledger.same("rope_scaling", f"rope_parameters: {parameters}")
