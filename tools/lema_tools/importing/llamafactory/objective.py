"""What LLaMA-Factory's runs minimise: its stages, and the losses of preference training."""

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger

__all__ = ["REFUSED", "STAGES", "objective"]

STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
REFUSED = {
    "rm": (
        "`lema train` has no loss for a head that scores texts",
        "use TRL's RewardTrainer with a model of lema.streamed(...): docs/trainers.md",
    ),
    "ppo": (
        "`lema train` generates no answers to reward",
        "use TRL's GRPOTrainer with a model of lema.streamed(...): docs/trainers.md",
    ),
}
"""Stages that have no counterpart: the reason, and the way."""

LOSSES = {
    "sigmoid": ("dpo", "sigmoid"),
    "hinge": ("dpo", "hinge"),
    "ipo": ("ipo", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
OF_PREFERENCE = ("pref_beta", "pref_loss", "pref_ftx", "pref_bco_weight", "dpo_label_smoothing")
OF_KTO = ("kto_chosen_weight", "kto_rejected_weight")
OF_REFERENCE = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit")
OF_PPO = ("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards")
OF_REWARD = (
    "reward_model",
    "reward_model_adapters",
    "reward_model_quantization_bit",
    "reward_model_type",
)


def objective(ledger: Ledger) -> None:
    """Translate the stage and its loss.

    Raises:
        ConfigError: the stage has no counterpart, or is none of LLaMA-Factory's.
    """
    stage = ledger["stage"]
    if stage in REFUSED:
        what, how = REFUSED[stage]
        raise ConfigError(what, where=f"stage: {stage}", how=how)
    if stage not in STAGES:
        raise ConfigError(
            f"LLaMA-Factory has no stage {stage!r}", where="stage", how=f"use {', '.join(STAGES)}"
        )
    {"pt": _sft, "sft": _sft, "dpo": _dpo, "kto": _kto}[stage](ledger)
    for key in (*OF_PREFERENCE, *OF_KTO, *OF_REFERENCE, "simpo_gamma", "ld_alpha"):
        if key not in ledger.settled():
            ledger.same(key, "of other stages or losses")
    for key in (*OF_PPO, *OF_REWARD):
        ledger.same(key, "of stage: ppo alone")
    for key in ("asft_alpha", "eaft_alpha"):
        ledger.same(key, f"of use_{key.removesuffix('_alpha')}_loss alone")


def _sft(ledger: Ledger) -> None:
    ledger.carry("stage", "objective", "sft")
    dft = bool(ledger["use_dft_loss"]) and ledger["stage"] == "sft"
    ledger.put(loss_type="dft" if dft else "nll")
    ledger.same("use_dft_loss", f"loss_type: {'dft' if dft else 'nll'}")
    for key in ("use_asft_loss", "use_eaft_loss"):
        if ledger[key]:
            ledger.lost(key, "LEMA has the losses nll and dft")
        else:
            ledger.same(key, "no")
    smoothing = ledger.number("label_smoothing_factor")
    ledger.carry("label_smoothing_factor", "label_smoothing_factor", smoothing)


def _dpo(ledger: Ledger) -> None:
    loss = ledger["pref_loss"]
    if loss not in LOSSES:
        ledger.put(objective="dpo", loss_type="sigmoid")
        ledger.same("stage", "objective: dpo")
        ledger.lost("pref_loss", f"LEMA has no loss {loss}: use sigmoid, hinge, ipo or simpo")
    else:
        name, variant = LOSSES[loss]
        ledger.put(loss_type=variant)
        ledger.translation.same["stage"] = f"objective: {name}"
        ledger.carry("pref_loss", "objective", name)
    ledger.carry("pref_beta", "beta", ledger.number("pref_beta"))
    if loss == "orpo":
        del ledger.translation.same["pref_loss"]
        what = (
            "objective: orpo, in which the cross-entropy also covers the prompts, as in TRL; "
            "LLaMA-Factory's is that of the answers"
        )
        ledger.differs("pref_loss", what)
    if loss == "simpo":
        ledger.carry("simpo_gamma", "simpo_gamma", ledger.number("simpo_gamma"))
        ledger.put(cpo_alpha=0.0)
    if loss not in ("orpo", "simpo"):
        ledger.put(reference="base")
        _reference(ledger)
    _additions(ledger, loss)
    ledger.same("label_smoothing_factor", "LLaMA-Factory's loss of pairs does not use it")


def _additions(ledger: Ledger, loss: str) -> None:
    """Note what LLaMA-Factory adds to a loss of pairs."""
    smoothing = ledger.number("dpo_label_smoothing")
    if smoothing > 1e-6 and loss != "sigmoid":
        what = "LLaMA-Factory smooths labels of the sigmoid loss alone"
        raise ConfigError(what, where="dpo_label_smoothing", how="leave it out")
    if smoothing > 1e-6:
        ledger.lost("dpo_label_smoothing", "LEMA's sigmoid loss takes every pair as it is ordered")
    else:
        ledger.same("dpo_label_smoothing", "none")
    for key, why in {
        "pref_ftx": "LEMA adds no cross-entropy of the chosen answers to a loss of pairs",
        "pref_bco_weight": "LEMA has bco_pair as a loss of its own (loss_type), not as a part",
        "ld_alpha": "LEMA weighs all tokens of an answer alike",
    }.items():
        if (
            ledger[key]
            and ledger.number(key) > 1e-6
            and not (key == "ld_alpha" and ledger[key] == 1)
        ):
            ledger.lost(key, why)
        else:
            ledger.same(key, "none")


def _reference(ledger: Ledger) -> None:
    model = ledger["ref_model"]
    if model and model != ledger["model_name_or_path"]:
        what = "LEMA's reference is the model itself without adapters, or with those at the start"
        ledger.lost("ref_model", what)
    elif ledger["ref_model_adapters"]:
        adapters = ledger["ref_model_adapters"]
        if adapters == ledger["adapter_name_or_path"]:
            ledger.put(reference="adapter")
            ledger.same("ref_model_adapters", "reference: adapter")
        else:
            ledger.lost("ref_model_adapters", "LEMA's reference is the adapter it begins with")
    for key in OF_REFERENCE:
        if key not in ledger.settled():
            ledger.same(key, "the model itself without adapters")


def _kto(ledger: Ledger) -> None:
    ledger.put(objective="kto", loss_type="kto", reference="base")
    what = (
        "objective: kto; for its KL term LLaMA-Factory gives each prompt the answer of the row "
        "before it in the data, and LEMA that of the row before it in the batch, as TRL does"
    )
    ledger.differs("stage", what)
    ledger.carry("pref_beta", "beta", ledger.number("pref_beta"))
    for key, setting in {
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
    }.items():
        ledger.carry(key, setting, ledger.number(key))
    if ledger.number("pref_ftx") > 1e-6:
        ledger.lost("pref_ftx", "LEMA adds no cross-entropy of the desirable answers to kto")
    _reference(ledger)
    ledger.same("label_smoothing_factor", "LLaMA-Factory's kto does not use it")
