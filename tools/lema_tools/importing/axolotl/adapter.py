"""The adapter of axolotl's runs, or that they train every weight, and the weights below it."""

from lema.errors import ConfigError
from lema_tools.importing.fourbits import SCALES_TOO, four_bits
from lema_tools.importing.ledger import Ledger

__all__ = ["adapter"]

PLAIN = {
    "lora_target_parameters": "lora_target_parameters",
    "lora_modules_to_save": "lora_modules_to_save",
    "lora_exclude_modules": "lora_exclude_modules",
    "peft_layers_to_transform": "lora_layers_to_transform",
    "peft_layers_pattern": "lora_layers_pattern",
    "peft_trainable_token_indices": "lora_trainable_token_indices",
    "loraplus_lr_ratio": "loraplus_lr_ratio",
}
FLAGS = {
    "peft_use_dora": "lora_use_dora",
    "peft_use_rslora": "lora_use_rslora",
    "peft_ensure_weight_tying": "lora_ensure_weight_tying",
}
MAPPINGS = {"lora_rank_pattern": "lora_rank_pattern", "lora_alpha_pattern": "lora_alpha_pattern"}
OPTIONS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""The options with which axolotl has bitsandbytes quantise, and LEMA, too."""
WITHOUT_EFFECT = (
    *("bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_has_fp16_weight"),
    "llm_int8_enable_fp32_cpu_offload",
)
"""Options that change no weight of 4 bits."""
INITS = (True, False, "gaussian", "orthogonal")


def adapter(ledger: Ledger) -> None:
    """Translate what trains, and how the frozen weights are kept.

    Raises:
        ConfigError: axolotl refuses the combination, too.
    """
    kind = ledger["adapter"]
    if ledger["load_in_8bit"] and ledger["load_in_4bit"]:
        what = "a model has 4 bits or 8 bits, not both"
        raise ConfigError(what, where="load_in_8bit", how="leave one of them out")
    if kind == "qlora" and not ledger["load_in_4bit"]:
        what = "axolotl's adapter: qlora requires load_in_4bit: true"
        raise ConfigError(what, where="adapter", how="write load_in_4bit: true")
    if not kind:
        ledger.put(trains="full")
        ledger.same("adapter", "trains: full")
        if ledger["unfrozen_parameters"]:
            what = "LEMA trains every weight, or phases of whole layers (docs/phases.md)"
            ledger.lost("unfrozen_parameters", what)
        for key in sorted(ledger.written):
            if key.startswith(("lora_", "peft_", "loraplus_")):
                ledger.same(key, "of adapters alone")
    elif kind not in ("lora", "qlora"):
        ledger.lost("adapter", f"LEMA has LoRA's adapters, and no {kind}")
    else:
        ledger.same("adapter", "LEMA trains a LoRA adapter")
        _lora(ledger)
    _quantised(ledger)


def _lora(ledger: Ledger) -> None:
    if ledger["lora_model_dir"]:
        ledger.carry("lora_model_dir", "adapter_name_or_path")
    if ledger["lora_r"] is not None:
        ledger.carry("lora_r", "lora_rank", int(ledger["lora_r"]))
    elif not ledger["lora_model_dir"]:
        what = "axolotl's adapters need a rank"
        raise ConfigError(what, where="lora_r", how="write lora_r: 16")
    if ledger["lora_alpha"] is not None:
        ledger.carry("lora_alpha", "lora_alpha")
    ledger.carry("lora_dropout", "lora_dropout", ledger.number("lora_dropout"))
    _targets(ledger)
    for key, setting in PLAIN.items():
        if ledger[key]:
            ledger.carry(key, setting)
    for key, setting in MAPPINGS.items():
        ledger.carry(key, setting, dict(ledger[key] or {}))
    for key, setting in FLAGS.items():
        ledger.carry(key, setting, bool(ledger[key]))
    init = ledger["peft_init_lora_weights"]
    if init is None or init in INITS:
        ledger.carry("peft_init_lora_weights", "lora_init", True if init is None else init)
    else:
        what = f"LEMA has no initial values {init}: make the adapter with PEFT, and name it"
        ledger.lost("peft_init_lora_weights", what)
    if ledger["lora_fan_in_fan_out"]:
        what = "LEMA goes by the class of each module, as PEFT does"
        ledger.differs("lora_fan_in_fan_out", what, changes_numbers=False)


def _targets(ledger: Ledger) -> None:
    names = ledger["lora_target_modules"]
    parameters = ledger["lora_target_parameters"]
    if ledger["lora_target_linear"]:
        ledger.carry("lora_target_linear", "lora_target_modules", None)
        ledger.put(lora_target_parameters=list(parameters or []))
        ledger.same("lora_target_modules", "all linear modules are among the targets")
    elif names or parameters:
        ledger.carry("lora_target_modules", "lora_target_modules", names or [])
        ledger.same("lora_target_linear", "no")
    elif not ledger["lora_model_dir"]:
        what = "axolotl's adapter has no target, which PEFT refuses; LEMA takes all linear modules"
        ledger.differs("lora_target_modules", what)


def _quantised(ledger: Ledger) -> None:
    bits4 = ledger["load_in_4bit"]
    bits8 = ledger["load_in_8bit"]
    ledger.put(quantize_base="nf4" if bits4 else "int8" if bits8 else None)
    for key in ("load_in_4bit", "load_in_8bit"):
        if not ledger[key]:
            ledger.same(key, "no")
    if bits8:
        what = "quantize_base: int8, torchao's weights of 8 bits, not bitsandbytes'"
        ledger.differs("load_in_8bit", what)
    if bits4 and ledger["adapter"] == "qlora":
        _four_bits(ledger)
        return
    if bits4 and ledger["adapter"] == "lora":
        ledger.put(quantize_base=None)
        what = (
            "axolotl quantises the base with adapter: qlora alone, and trains on unquantised "
            "weights here, so LEMA does: write adapter: qlora if you mean 4 bits"
        )
        ledger.differs("load_in_4bit", what)
    elif bits4:
        ledger.lost("load_in_4bit", "LEMA quantises a base below LoRA's adapters alone")
    ledger.same("bnb_config_kwargs", "of adapter: qlora alone")


def _four_bits(ledger: Ledger) -> None:
    four_bits(ledger, "load_in_4bit")
    kind = ledger.model_config.get("model_type", ledger["base_model"])
    if str(kind).lower().replace("-", "_").rpartition("/")[2].startswith("falcon_h1"):
        ledger.translation.same.pop("load_in_4bit", None)
        what = "quantize_base: nf4; axolotl leaves out_proj of Falcon-H1 unquantised"
        ledger.differs("load_in_4bit", what)
    _options(ledger)


def _options(ledger: Ledger) -> None:
    """Note options of bitsandbytes that give other weights than axolotl's own options do."""
    options = dict(ledger["bnb_config_kwargs"] or {})
    changed = {
        key: value
        for key, value in options.items()
        if key not in WITHOUT_EFFECT and value != OPTIONS.get(key, ...)
    }
    if "bnb_4bit_use_double_quant" in changed:
        ledger.differs("bnb_config_kwargs", SCALES_TOO)
    elif changed:
        ledger.lost("bnb_config_kwargs", f"LEMA's nf4 has no other {', '.join(sorted(changed))}")
    else:
        ledger.same("bnb_config_kwargs", "as axolotl has them anyway")
