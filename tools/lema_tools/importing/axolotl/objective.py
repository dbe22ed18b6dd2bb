"""What axolotl's runs minimise."""

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger

__all__ = ["objective"]

PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "kto")
REFUSED = ("grpo", "gdpo", "ebft")
WAY = "use TRL's trainers with a model of lema.streamed(...): docs/trainers.md"


def objective(ledger: Ledger) -> None:
    """Translate `rl` and the values of its loss.

    Raises:
        ConfigError: axolotl has no such value of `rl`.
    """
    kind = ledger["rl"]
    for key in ("reward_model", "process_reward_model"):
        if ledger[key]:
            ledger.lost(key, f"`lema train` has no loss for a head that scores texts: {WAY}")
    for key in ("diffusion", "use_eaft", "qat"):
        if ledger[key]:
            ledger.lost(key, f"LEMA has no such loss of tokens: {WAY}")
    if not kind:
        ledger.put(objective="sft", loss_type="nll")
        ledger.same("rl", "objective: sft")
    elif kind in REFUSED:
        ledger.lost("rl", f"`lema train` generates no answers to reward: {WAY}")
    elif kind not in PREFERENCES:
        how = f"use {', '.join((*PREFERENCES, *REFUSED))}"
        raise ConfigError(f"axolotl has no rl: {kind}", where="rl", how=how)
    else:
        _preference(ledger, kind)


def _preference(ledger: Ledger, kind: str) -> None:
    ledger.carry("rl", "objective", kind)
    trl = ledger["trl"] if isinstance(ledger["trl"], dict) else {}
    betas = {
        "trl": trl.get("beta"),
        "rl_beta": ledger["rl_beta"],
        "orpo_alpha": ledger["orpo_alpha"],
    }
    written = [(key, beta) for key, beta in betas.items() if beta is not None]
    ledger.put(beta=float(written[0][1]) if written else 0.1)
    for position, (key, beta) in enumerate(written):
        ledger.same(key, f"beta: {beta}" if not position else f"{written[0][0]} has precedence")
    if kind in ("dpo", "ipo", "kto"):
        ledger.put(reference="base")
    if kind == "dpo":
        _dpo(ledger)
    if kind == "kto":
        for word in ("desirable", "undesirable"):
            weight = ledger[f"kto_{word}_weight"] or 1.0
            ledger.carry(f"kto_{word}_weight", f"{word}_weight", float(weight))
    if kind == "simpo":
        gamma = ledger["simpo_gamma"]
        ledger.carry("simpo_gamma", "simpo_gamma", 0.5 if gamma is None else float(gamma))
        alpha = ledger["cpo_alpha"]
        ledger.carry("cpo_alpha", "cpo_alpha", 1.0 if alpha is None else float(alpha))


def _dpo(ledger: Ledger) -> None:
    loss = ledger["dpo_loss_type"] or ["sigmoid"]
    losses = [loss] if isinstance(loss, str) else list(loss)
    if len(losses) == 1:
        ledger.carry("dpo_loss_type", "loss_type", losses[0])
    else:
        ledger.lost("dpo_loss_type", "LEMA has one loss of pairs in a run, and no sum of several")
    if ledger["dpo_label_smoothing"]:
        ledger.lost("dpo_label_smoothing", "LEMA's sigmoid loss takes pairs as they are ordered")
