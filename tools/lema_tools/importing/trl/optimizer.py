"""TRL's optimizer, learning rate and lengths of a run."""

from lema_tools.importing.trl.ledger import Ledger

__all__ = ["optimizer"]

SAME = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "optim": "optim",
    "optim_args": "optim_args",
    "lr_scheduler_type": "lr_scheduler_type",
    "lr_scheduler_kwargs": "lr_scheduler_kwargs",
    "neftune_noise_alpha": "neftune_noise_alpha",
}
FLOATS = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}


def optimizer(ledger: Ledger) -> None:
    """Translate what makes an optimizer step of gradients, and how many steps there are."""
    for key, setting in SAME.items():
        value = ledger[key]
        ledger.carry(key, setting, float(value) if key in FLOATS else value)
    norm = ledger["max_grad_norm"]
    ledger.carry("max_grad_norm", "max_grad_norm", float(norm) if norm else None)
    _length(ledger)
    _warmup(ledger)
    if ledger["optim_target_modules"]:
        what = "LEMA has no GaLore, APOLLO or LOMO, which project gradients of these modules"
        ledger.lost("optim_target_modules", what)
    if ledger["full_determinism"]:
        ledger.carry("full_determinism", "deterministic", True)


def _length(ledger: Ledger) -> None:
    ledger.carry("num_train_epochs", "num_train_epochs", float(ledger["num_train_epochs"]))
    steps = ledger["max_steps"]
    ledger.carry("max_steps", "max_steps", steps if steps > 0 else None)
    if ledger["resume_from_checkpoint"]:
        what = "LEMA cannot go on from a checkpoint of Trainer; it resumes its own with --resume"
        ledger.lost("resume_from_checkpoint", what)


def _warmup(ledger: Ledger) -> None:
    """Carry the warmup, which is a share of all steps if it is below 1, rounded up, in both."""
    warmup = ledger["warmup_steps"] or 0
    if 0 < warmup < 1:
        ledger.carry("warmup_steps", "warmup_ratio", float(warmup))
        ledger.put(warmup_steps=0)
    else:
        ledger.carry("warmup_steps", "warmup_steps", int(warmup))
        ledger.put(warmup_ratio=0.0)
