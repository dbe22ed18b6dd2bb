"""What LLaMA-Factory's runs measure, write and report; nothing of it changes the training."""

from lema_tools.importing.ledger import Ledger

__all__ = ["results"]

SAME = (
    "output_dir",
    "run_name",
    "eval_on_start",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "push_to_hub",
)


def results(ledger: Ledger) -> None:
    """Translate evaluation, checkpoints and reports."""
    for key in SAME:
        if ledger[key] is None:
            ledger.same(key, "none")
        else:
            ledger.carry(key, key)
    for key in ("hub_model_id", "hub_private_repo"):
        if ledger["push_to_hub"] and ledger[key] is not None:
            ledger.carry(key, key)
        else:
            ledger.same(key, "of push_to_hub alone")
    reports = ledger["report_to"]
    ledger.carry("report_to", "report_to", [] if reports in (None, "none", ["none"]) else reports)
    steps = ledger.number("logging_steps")
    if steps >= 1:
        ledger.carry("logging_steps", "logging_steps", int(steps))
    else:
        what = "LEMA counts steps: each is logged"
        ledger.differs("logging_steps", what, changes_numbers=False)
    ledger.carry(
        "overwrite_output_dir", "overwrite_output_dir", bool(ledger["overwrite_output_dir"])
    )
    _evaluations(ledger)
    _checkpoints(ledger)
    patience = ledger["early_stopping_steps"]
    if patience:
        ledger.carry("early_stopping_steps", "early_stopping_patience", patience)
    else:
        ledger.same("early_stopping_steps", "none")


def _evaluations(ledger: Ledger) -> None:
    strategy = ledger["eval_strategy"]
    steps = ledger["eval_steps"] or ledger["logging_steps"]
    if strategy in ("no", False, None):
        ledger.same("eval_strategy", "no evaluation")
        ledger.same("eval_steps", "no evaluation")
        return
    what = "eval_loss is one mean over all tokens, and the mean of its batches' means in Trainer"
    if strategy == "epoch":
        ledger.put(eval_steps=None)
        ledger.same("eval_steps", "at the end of each epoch")
    elif float(steps) >= 1:
        ledger.put(eval_steps=int(steps))
        ledger.same("eval_steps", f"eval_steps: {int(steps)}")
    else:
        what = f"LEMA evaluates after each epoch, not after shares of the run; {what}"
        ledger.same("eval_steps", "see eval_strategy")
    ledger.differs("eval_strategy", what, changes_numbers=False)


def _checkpoints(ledger: Ledger) -> None:
    strategy = ledger["save_strategy"]
    steps = ledger.number("save_steps")
    if strategy in ("no", False):
        ledger.carry("save_strategy", "save_steps", 0)
        ledger.same("save_steps", "no checkpoints")
    elif strategy == "steps" and steps >= 1:
        ledger.carry("save_steps", "save_steps", int(steps))
        ledger.same("save_strategy", "after steps")
    else:
        what = "LEMA writes checkpoints every save_steps steps, here its default"
        ledger.differs("save_strategy", what, changes_numbers=False)
        ledger.same("save_steps", "see save_strategy")
    limit = ledger["save_total_limit"]
    if limit is None or int(limit) >= 2:
        ledger.carry("save_total_limit", "save_total_limit")
    else:
        ledger.put(save_total_limit=2)
        what = "save_total_limit: 2, so that a run can go on if the newest one is damaged"
        ledger.differs("save_total_limit", what, changes_numbers=False)
