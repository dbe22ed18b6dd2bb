"""LLaMA-Factory's optimizer, learning rate, batches and lengths of a run, which are Trainer's."""

from lema_tools.importing.deepspeed import deepspeed, launched_deepspeed
from lema_tools.importing.launch import accelerator, accumulated, launcher, several, splits
from lema_tools.importing.ledger import Ledger

__all__ = ["batches", "optimizer"]

NUMBERS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
SAME = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "neftune_noise_alpha")
OTHERS = ("galore", "apollo", "badam")
"""Optimizers of LLaMA-Factory, each with keys that begin with its name."""


def optimizer(ledger: Ledger) -> None:
    """Translate what makes an optimizer step of gradients, and how many steps there are."""
    for key in NUMBERS:
        ledger.carry(key, key, ledger.number(key))
    for key in SAME:
        ledger.carry(key, key)
    norm = ledger["max_grad_norm"]
    ledger.carry("max_grad_norm", "max_grad_norm", ledger.number("max_grad_norm") if norm else None)
    ledger.carry("num_train_epochs", "num_train_epochs", ledger.number("num_train_epochs"))
    steps = int(ledger["max_steps"])
    ledger.carry("max_steps", "max_steps", steps if steps > 0 else None)
    _warmup(ledger)
    key, _, launched = launcher(ledger)
    launched_deepspeed(ledger, key, launched)
    deepspeed(ledger)
    _others(ledger)
    if ledger["optim_target_modules"]:
        ledger.lost("optim_target_modules", "LEMA projects no gradients of single modules")
    if ledger["resume_from_checkpoint"]:
        what = "LEMA resumes its own checkpoints with --resume, none of Trainer's"
        ledger.lost("resume_from_checkpoint", what)


def _warmup(ledger: Ledger) -> None:
    """Carry the warmup: a ratio of all steps, rounded up in both, or a number of steps."""
    warmup = ledger.number("warmup_steps")
    ratio = ledger.number("warmup_ratio")
    if warmup >= 1:
        ledger.carry("warmup_steps", "warmup_steps", int(warmup))
        ledger.put(warmup_ratio=0.0)
        ledger.same("warmup_ratio", "warmup_steps decides")
    elif warmup > 0:
        ledger.carry("warmup_steps", "warmup_ratio", warmup)
        ledger.put(warmup_steps=0)
        ledger.same("warmup_ratio", "warmup_steps decides")
    else:
        ledger.carry("warmup_ratio", "warmup_ratio", ratio)
        ledger.put(warmup_steps=0)
        ledger.same("warmup_steps", "warmup_ratio decides")


def _others(ledger: Ledger) -> None:
    for name in OTHERS:
        used = bool(ledger[f"use_{name}"])
        if used:
            ledger.lost(f"use_{name}", f"LEMA has no {name}; `optim` is used instead")
        else:
            ledger.same(f"use_{name}", "no")
        for key in ledger.defaults:
            if key.startswith(f"{name}_"):
                ledger.same(key, f"of use_{name}")
    for name in ("adam_mini", "muon"):
        if ledger[f"use_{name}"]:
            ledger.lost(f"use_{name}", f"LEMA has no {name}; `optim` is used instead")
        else:
            ledger.same(f"use_{name}", "no")


def batches(ledger: Ledger) -> None:
    """Translate how many rows a step has, and in which order they are drawn."""
    steps = accumulated(ledger, int(ledger["gradient_accumulation_steps"]))
    ledger.carry("gradient_accumulation_steps", "gradient_accumulation_steps", steps)
    accelerator(ledger)
    multiple = None if ledger["stage"] == "pt" else 8
    rows = int(ledger["per_device_train_batch_size"])
    key, processes, _ = launcher(ledger)
    total = rows if splits(ledger) else rows * processes
    ledger.carry("per_device_train_batch_size", "batch_size", total)
    if processes > 1:
        what = f"batch_size: {total}, the rows of all {processes} processes"
        several(ledger, key, what, mean_of_means=ledger["stage"] in ("dpo", "kto"))
    micro = max(1, total // processes) if processes > 1 else None
    ledger.put(micro_batch_size=micro, pad_to_multiple_of=multiple, group_by_length=False)
    ledger.carry("seed", "seed")
    ledger.carry("data_seed", "data_seed")
    by_length = ledger["group_by_length"] or ledger["train_sampling_strategy"] == "group_by_length"
    if ledger["disable_shuffling"]:
        ledger.carry("disable_shuffling", "shuffle", "sequential")
        ledger.same("group_by_length", "disable_shuffling decides")
        ledger.same("train_sampling_strategy", "disable_shuffling decides")
    elif by_length:
        ledger.put(shuffle=True, group_by_length=True)
        what = (
            "group_by_length: true groups rows in the same way, from other random numbers than "
            "Trainer's"
        )
        key = "group_by_length" if ledger["group_by_length"] else "train_sampling_strategy"
        ledger.differs(key, what)
    elif ledger["train_sampling_strategy"] == "sequential":
        ledger.carry("train_sampling_strategy", "shuffle", "sequential")
    else:
        ledger.carry("train_sampling_strategy", "shuffle", "transformers")
    for key in ("disable_shuffling", "group_by_length", "train_sampling_strategy"):
        if key not in ledger.settled():
            ledger.same(key, "no" if key != "train_sampling_strategy" else "see group_by_length")
    if ledger["dataloader_drop_last"]:
        what = "LEMA trains on the last, smaller batch of an epoch"
        ledger.lost("dataloader_drop_last", what)
    if ledger["auto_find_batch_size"]:
        what = "LEMA computes fewer rows at once where memory is short, and keeps the batch"
        ledger.differs("auto_find_batch_size", what, changes_numbers=False)
