"""What TRL's runs measure, write and report."""

from lema_tools.importing.trl.ledger import Ledger

__all__ = ["results"]

SAME = {
    "output_dir": "output_dir",
    "run_name": "run_name",
    "eval_on_start": "eval_on_start",
    "load_best_model_at_end": "load_best_model_at_end",
    "metric_for_best_model": "metric_for_best_model",
    "greater_is_better": "greater_is_better",
    "push_to_hub": "push_to_hub",
    "hub_private_repo": "hub_private_repo",
    "hub_model_id": "hub_model_id",
}


def results(ledger: Ledger) -> None:
    """Translate evaluation, checkpoints and reports, none of which changes the training."""
    for key, setting in SAME.items():
        if ledger[key] is not None:
            ledger.carry(key, setting)
        else:
            ledger.same(key, "none")
    reports = ledger["report_to"]
    ledger.carry("report_to", "report_to", [] if reports in (None, "none", ["none"]) else reports)
    if not ledger["push_to_hub"]:
        for key in ("hub_private_repo", "hub_model_id"):
            ledger.translation.settings.pop(key, None)
            if ledger.translation.same.pop(key, None) is not None:
                ledger.same(key, "of push_to_hub alone")
    _evaluations(ledger)
    _checkpoints(ledger)
    steps = ledger["logging_steps"]
    if steps >= 1:
        ledger.carry("logging_steps", "logging_steps", int(steps))
    elif "logging_steps" in ledger.written:
        what = "LEMA counts steps: each is logged"
        ledger.lost("logging_steps", what, changes_numbers=False)


def _evaluations(ledger: Ledger) -> None:
    strategy = ledger["eval_strategy"]
    if strategy in ("no", False, None):
        ledger.same("eval_strategy", "no evaluation")
        if ledger["eval_steps"] is not None:
            ledger.same("eval_steps", "no evaluation")
        return
    steps = ledger["eval_steps"] or ledger["logging_steps"]
    what = "eval_loss is one mean over all tokens, and the mean of its batches' means in TRL"
    if strategy == "epoch":
        ledger.put(eval_steps=None)
        ledger.same("eval_steps", "at the end of each epoch")
    elif steps >= 1:
        ledger.put(eval_steps=int(steps))
        ledger.same("eval_steps", f"eval_steps: {int(steps)}")
    else:
        what = f"LEMA evaluates at the end of each epoch, not after shares of the run; {what}"
        ledger.same("eval_steps", "see eval_strategy")
    ledger.differs("eval_strategy", what, changes_numbers=False)


def _checkpoints(ledger: Ledger) -> None:
    strategy = ledger["save_strategy"]
    steps = ledger["save_steps"]
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
    if limit is None or limit >= 2:
        ledger.carry("save_total_limit", "save_total_limit")
    else:
        ledger.put(save_total_limit=2)
        what = "save_total_limit: 2, so that a run can go on if the newest one is damaged"
        ledger.differs("save_total_limit", what, changes_numbers=False)
