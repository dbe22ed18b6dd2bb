"""TRL's LoRA, or its training of all weights."""

from lema_tools.importing.trl.ledger import Ledger

__all__ = ["adapter"]

SAME = {
    "lora_r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "lora_use_rslora",
    "use_dora": "lora_use_dora",
    "lora_modules_to_save": "lora_modules_to_save",
}


def adapter(ledger: Ledger) -> None:
    """Translate what trains: an adapter, or with `use_peft: false` every weight."""
    if not ledger["use_peft"]:
        if ledger.kind == "sft":
            ledger.put(trains="full")
            ledger.translation.same["use_peft"] = "trains: full"
        else:
            what = "LEMA trains preferences with an adapter alone, here TRL trains every weight"
            ledger.lost("use_peft", what)
        for key in (*SAME, "lora_target_modules", "lora_target_parameters", "lora_task_type"):
            ledger.same(key, "without use_peft there is no adapter, in both")
        return
    ledger.translation.same["use_peft"] = "LEMA trains an adapter unless it is told otherwise"
    for key, setting in SAME.items():
        ledger.carry(key, setting)
    if ledger["lora_dropout"] and ledger["gradient_accumulation_steps"] > 1:
        ledger.translation.same["lora_dropout"] += (
            " (drawn for all batches of a step in one layer after the other, so its random numbers "
            "are those of another seed)"
        )
    _targets(ledger)
    if ledger.kind != "sft" and ledger["disable_dropout"]:
        ledger.put(lora_dropout=0.0)
        ledger.translation.same["lora_dropout"] = "none, because TRL's disable_dropout is true"
        ledger.same("disable_dropout", "preference runs have no dropout of adapters")
    elif ledger.kind != "sft":
        ledger.put(lora_dropout=0.0)
        ledger.lost("disable_dropout", "preference runs have no dropout of adapters in LEMA")
    if ledger["lora_task_type"] not in ("CAUSAL_LM", None):
        what = "`lema train` trains language models; heads that score are in docs/trainers.md"
        ledger.lost("lora_task_type", what)


def _targets(ledger: Ledger) -> None:
    """Carry what is adapted; without a list it is what PEFT adapts in models of this type."""
    targets = ledger["lora_target_modules"]
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]  # which TRL makes a text of, an expression for PEFT or all-linear
    parameters = ledger["lora_target_parameters"]
    ledger.carry("lora_target_modules", "lora_target_modules", targets or "peft")
    if isinstance(parameters, str):
        parameters = [parameters]
    ledger.carry("lora_target_parameters", "lora_target_parameters", parameters or [])
