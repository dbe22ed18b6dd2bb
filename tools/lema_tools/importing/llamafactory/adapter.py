"""What trains in LLaMA-Factory's runs: an adapter, all weights, or the last layers."""

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger

__all__ = ["adapter", "names_of"]

SAME = {
    "lora_rank": "lora_rank",
    "use_rslora": "lora_use_rslora",
    "use_dora": "lora_use_dora",
    "loraplus_lr_ratio": "loraplus_lr_ratio",
}
OF_LORA = (*SAME, "lora_alpha", "lora_dropout", "lora_target", "pissa_init", "additional_target")
OF_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
OF_OFT = ("oft_rank", "oft_block_size", "oft_target", "module_dropout")


def names_of(value: object) -> list[str]:
    """Return names that a text has between commas, or a list."""
    if value is None:
        return []
    parts = value.split(",") if isinstance(value, str) else list(map(str, value))  # type: ignore[call-overload] # a list of YAML
    return [part.strip() for part in parts if part.strip()]


def adapter(ledger: Ledger) -> None:
    """Translate what trains.

    Raises:
        ConfigError: `finetuning_type` is none of LLaMA-Factory's.
    """
    kind = ledger["finetuning_type"]
    if kind == "lora":
        ledger.same("finetuning_type", "LEMA trains an adapter unless it is told otherwise")
        _lora(ledger)
    elif kind == "full":
        ledger.carry("finetuning_type", "trains", "full")
        if ledger["stage"] in ("dpo", "kto"):
            del ledger.translation.same["finetuning_type"]
            del ledger.translation.settings["trains"]
            what = "LEMA trains all weights with objective: sft alone; here it trains an adapter"
            ledger.lost("finetuning_type", what)
        _without(ledger, OF_LORA, "of adapters alone")
    elif kind == "freeze":
        what = (
            "a file with `phases` trains single layers (layers: [last:2], docs/phases.md); this "
            "one would train an adapter"
        )
        ledger.lost("finetuning_type", what)
        _without(ledger, OF_LORA, "of adapters alone")
    elif kind == "oft":
        ledger.lost("finetuning_type", "LEMA has no OFT; this file would train a LoRA adapter")
        _without(ledger, OF_LORA, "of LoRA alone")
    else:
        what = f"LLaMA-Factory has no finetuning_type {kind!r}"
        raise ConfigError(what, where="finetuning_type", how="use lora, oft, freeze or full")
    _without(ledger, OF_FREEZE, "of finetuning_type: freeze")
    _without(ledger, OF_OFT, "of finetuning_type: oft")
    _continued(ledger)
    if ledger["use_llama_pro"]:
        ledger.lost(
            "use_llama_pro", "LEMA trains the layers of the file, and knows no expanded ones"
        )


def _without(ledger: Ledger, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        ledger.same(key, why)


def _lora(ledger: Ledger) -> None:
    for key, setting in SAME.items():
        ledger.carry(key, setting)
    rank = ledger["lora_rank"]
    ledger.carry("lora_alpha", "lora_alpha", ledger["lora_alpha"] or 2 * rank)
    targets = names_of(ledger["lora_target"])
    everything = targets == ["all"]
    ledger.carry("lora_target", "lora_target_modules", None if everything else targets)
    ledger.put(lora_target_parameters=[])
    extra = names_of(ledger["additional_target"])
    ledger.carry("additional_target", "lora_modules_to_save", extra or None)
    _dropout(ledger)
    _pissa(ledger)
    embedding = ledger["loraplus_lr_embedding"]
    if embedding is not None and ledger["loraplus_lr_ratio"]:
        ledger.same("loraplus_lr_embedding", "no adapter is on the embeddings")
    else:
        ledger.same("loraplus_lr_embedding", "of loraplus_lr_ratio alone")


def _dropout(ledger: Ledger) -> None:
    dropout = float(ledger["lora_dropout"] or 0)
    if ledger["stage"] in ("dpo", "kto"):
        ledger.put(lora_dropout=0.0)
        ledger.translation.same["lora_dropout"] = (
            "none: LLaMA-Factory turns dropout off in preference runs"
        )
        return
    ledger.carry("lora_dropout", "lora_dropout", dropout)
    if dropout:
        ledger.translation.same["lora_dropout"] += " (its random numbers are those of another seed)"


def _pissa(ledger: Ledger) -> None:
    keys = ("pissa_iter", "pissa_convert")
    if not ledger["pissa_init"]:
        ledger.carry("pissa_init", "lora_init", True)
        _without(ledger, keys, "of pissa_init alone")
        return
    steps = ledger["pissa_iter"]
    name = "pissa" if steps == -1 else f"pissa_niter_{steps}"
    ledger.put(lora_init=True)
    what = (
        f"LEMA does not take principal components of weights as an adapter: make it with PEFT "
        f"(init_lora_weights: {name}), save adapter and residual model, and name both "
        "(adapter_name_or_path)"
    )
    ledger.lost("pissa_init", what)
    _without(ledger, keys, "of pissa_init alone")


def _continued(ledger: Ledger) -> None:
    adapters = names_of(ledger["adapter_name_or_path"])
    merges = ledger["create_new_adapter"] or ledger["finetuning_type"] != "lora"
    if not adapters:
        ledger.carry("adapter_name_or_path", "adapter_name_or_path", None)
        ledger.same("create_new_adapter", "a new adapter")
    elif len(adapters) == 1 and not merges:
        ledger.carry("adapter_name_or_path", "adapter_name_or_path", adapters[0])
        ledger.same("create_new_adapter", "training continues with the adapter")
    else:
        last = adapters[-1]
        what = (
            f"LEMA merges no adapters before it trains: run `lema merge {adapters[0]} MERGED` and "
            f"name MERGED as the model (and {last} as the adapter, if that is to be continued)"
        )
        ledger.lost("adapter_name_or_path", what)
        ledger.same("create_new_adapter", "see adapter_name_or_path")
    if ledger["adapter_folder"]:
        what = "LEMA looks for the adapter in its own folder: name the subfolder"
        ledger.lost("adapter_folder", what, changes_numbers=bool(adapters))
    else:
        ledger.same("adapter_folder", "none")
