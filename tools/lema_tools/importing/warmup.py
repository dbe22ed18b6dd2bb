"""A warm-up that is longer than the run, which LEMA refuses and other trainers break off."""

from lema_tools.importing.ledger import Ledger

__all__ = ["broken_off"]

WITHOUT = ("constant", "reduce_lr_on_plateau")
"""Schedules that have no warm-up."""


def broken_off(ledger: Ledger, key: str) -> None:
    """Carry a warm-up beyond `max_steps` as the part of it that takes place.

    The rate of step t is learning_rate * t / warmup_steps in every schedule of `transformers`, so
    a run that ends within its warm-up is one to a lower rate, over all of its steps.

    Args:
        ledger: the run, with `max_steps`, `warmup_steps` and `learning_rate` as they were carried.
        key: the trainer's key of the warm-up.
    """
    settings = ledger.translation.settings
    steps = settings.get("max_steps")
    warmup = settings.get("warmup_steps")
    if not steps or not isinstance(warmup, int) or warmup <= steps:
        return
    ledger.translation.same.pop(key, None)
    if settings.get("lr_scheduler_type") in WITHOUT:
        ledger.put(warmup_steps=0)
        ledger.same(key, "the schedule has no warm-up")
        return
    rate = settings["learning_rate"] * steps / warmup
    ledger.put(warmup_steps=steps, learning_rate=rate)
    what = (
        f"warmup_steps: {steps} to learning_rate: {rate:g}, the rate that the run reaches before "
        f"it ends within its warm-up of {warmup} steps"
    )
    ledger.differs(key, what, changes_numbers=False)
