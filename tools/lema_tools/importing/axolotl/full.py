"""What a run that trains every weight has otherwise than one with an adapter."""

from lema_tools.importing.ledger import Ledger

__all__ = ["full_run"]

ADAPTER_ALONE = {
    "eval_on_start": False,
    "early_stopping_patience": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "push_to_hub": False,
    "hub_model_id": None,
    "hub_private_repo": None,
    "neftune_noise_alpha": None,
    "objective": "sft",
    "loss_type": "nll",
    "beta": None,
    "reference": None,
    "simpo_gamma": None,
    "cpo_alpha": None,
    "desirable_weight": None,
    "undesirable_weight": None,
    "quantize_base": None,
}
"""Settings that a run of every weight has not, with the values that have no effect."""
REPORTS = ("push_to_hub", "hub_model_id", "hub_private_repo", "eval_on_start")


def full_run(ledger: Ledger) -> None:
    """Take settings out that a full fine-tune has not, and note those that had an effect."""
    translation = ledger.translation
    settings = translation.settings
    if settings.get("trains") != "full":
        return
    keys = {text.partition(":")[0]: key for key, text in translation.same.items()}
    for name, neutral in ADAPTER_ALONE.items():
        if name in settings and settings.pop(name) != neutral:
            key = keys.get(name, name)
            translation.same.pop(key, None)
            what = "LEMA has it for runs with an adapter alone"
            ledger.lost(key, what, changes_numbers=name not in REPORTS)
    optimizer = settings.get("optim")
    settings["optim"] = "adamw_torch"
    if optimizer == "adamw_torch_fused":
        translation.same.pop("optimizer")
        what = "optim: adamw_torch, the same but for rounding"
        ledger.differs("optimizer", what, changes_numbers=False)
    elif optimizer not in (None, "adamw_torch"):
        translation.same.pop("optimizer")
        ledger.lost("optimizer", "weights of the model train with adamw_torch alone")
