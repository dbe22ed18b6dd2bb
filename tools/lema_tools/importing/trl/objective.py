"""What TRL's trainers minimise."""

from collections.abc import Mapping
from typing import Any

from lema_tools.importing.trl.ledger import Ledger

__all__ = ["objective"]

ROUNDING_OF_TOKENS = (
    "losses equal TRL's but for rounding, about 1e-7 of them in float32, because TRL adds up the "
    "vocabulary in tiles"
)
ROUNDING_OF_PAIRS = (
    "losses equal TRL's but for rounding, about 1e-6 of them in float32, because TRL adds up the "
    "vocabulary in tiles, and computes all chosen answers before the rejected ones"
)
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


def objective(ledger: Ledger) -> None:
    """Translate the loss and its options."""
    ledger.put(objective=ledger.kind)
    {"sft": _sft, "dpo": _dpo, "kto": _kto}[ledger.kind](ledger)
    _routers(ledger)


def _rounded(ledger: Ledger, loss: str, why: str) -> None:
    """Carry the loss, with a note on how its last digits differ."""
    ledger.put(loss_type=loss)
    ledger.differs("loss_type", f"loss_type: {loss}; {why}", changes_numbers=False)


def _sft(ledger: Ledger) -> None:
    loss = "nll" if ledger["loss_type"] == "chunked_nll" else ledger["loss_type"]
    _rounded(ledger, loss, ROUNDING_OF_TOKENS)
    smoothing = ledger["label_smoothing_factor"]
    ledger.carry("label_smoothing_factor", "label_smoothing_factor", float(smoothing or 0))


def _dpo(ledger: Ledger) -> None:
    losses = ledger["loss_type"]
    losses = [losses] if isinstance(losses, str) else list(losses)
    if len(losses) > 1:
        ledger.put(loss_type=losses[0])
        ledger.lost("loss_type", f"LEMA has one loss, here {losses[0]}, and no sum of several")
    else:
        _rounded(ledger, losses[0], ROUNDING_OF_PAIRS)
    if ledger["loss_weights"] not in (None, [1], [1.0]):
        ledger.lost("loss_weights", "LEMA's loss has no weight; a learning rate may stand for it")
    ledger.carry("beta", "beta", float(ledger["beta"]))
    _smoothing(ledger, losses[0])
    _options_of_dpo(ledger, losses)
    _of_reference(ledger)
    _no_label_smoother(ledger)


def _smoothing(ledger: Ledger, loss: str) -> None:
    smoothing = float(ledger["label_smoothing"] or 0)
    if loss in SMOOTHED:
        ledger.carry("label_smoothing", "label_smoothing", smoothing)
    elif smoothing:
        what = f"loss_type {loss} does not use it, in both"
        ledger.same("label_smoothing", what)


def _options_of_dpo(ledger: Ledger, losses: list[str]) -> None:
    """Note options without which LEMA's DPO is TRL's, and which it has not."""
    if ledger["ld_alpha"] not in (None, 1, 1.0):
        ledger.lost("ld_alpha", "LEMA weighs all tokens of an answer alike")
    if ledger["f_divergence_type"] != "reverse_kl":
        ledger.lost("f_divergence_type", "LEMA has the reverse divergence alone")
    elif not ledger.is_default("f_alpha_divergence_coef"):
        ledger.same("f_alpha_divergence_coef", "of alpha_divergence alone, in both without effect")
    if ledger["use_weighting"]:
        ledger.lost("use_weighting", "LEMA weighs all pairs alike")
    if not ledger.is_default("discopop_tau"):
        if "discopop" in losses:
            ledger.lost("discopop_tau", "LEMA's discopop has a temperature of 0.05")
        else:
            ledger.same("discopop_tau", "of discopop alone, in both without effect")


def _kto(ledger: Ledger) -> None:
    _rounded(ledger, ledger["loss_type"], ROUNDING_OF_PAIRS)
    for key in ("beta", "desirable_weight", "undesirable_weight"):
        ledger.carry(key, key, float(ledger[key]))
    _of_reference(ledger)
    _no_label_smoother(ledger)


def _of_reference(ledger: Ledger) -> None:
    if ledger["sync_ref_model"]:
        ledger.lost("sync_ref_model", "LEMA's reference stays as it is at the start")
    for key in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if not ledger.is_default(key):
            ledger.same(key, "of sync_ref_model alone")


def _no_label_smoother(ledger: Ledger) -> None:
    if ledger["label_smoothing_factor"]:
        ledger.same("label_smoothing_factor", "TRL's trainer of this kind does not use it")


def _routers(ledger: Ledger) -> None:
    """Carry the load-balancing loss of a mixture of experts, which TRL adds by default with the
    coefficient of the model's config.
    """
    config: Mapping[str, Any] = ledger.model_config
    config = config.get("text_config", config)
    coefficient = ledger["router_aux_loss_coef"]
    if coefficient is None:
        coefficient = config.get("router_aux_loss_coef")
    if ledger.kind == "sft":
        ledger.carry("router_aux_loss_coef", "router_aux_loss_coef", coefficient)
        if not config and ledger["router_aux_loss_coef"] is None:
            why = (
                "the model's config is not here: if it is a mixture of experts, set "
                "router_aux_loss_coef to the one of its config.json, which TRL adds by default"
            )
            del ledger.translation.same["router_aux_loss_coef"]
            ledger.differs("router_aux_loss_coef", why, changes_numbers=False)
    elif coefficient:
        ledger.lost("router_aux_loss_coef", "LEMA adds it with objective: sft alone")
