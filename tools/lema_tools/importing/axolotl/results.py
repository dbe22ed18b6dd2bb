"""What a run of axolotl leaves: evaluations, checkpoints and reports."""

from lema_tools.importing.ledger import Ledger

__all__ = ["results"]

REPORTS = {
    "use_wandb": "wandb",
    "use_mlflow": "mlflow",
    "use_tensorboard": "tensorboard",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
}


def results(ledger: Ledger) -> None:
    """Translate where a run writes, how often, and whom it tells."""
    ledger.carry("output_dir", "output_dir")
    ledger.carry("save_total_limit", "save_total_limit", max(2, int(ledger["save_total_limit"])))
    if ledger["logging_steps"]:
        ledger.carry("logging_steps", "logging_steps", int(ledger["logging_steps"]))
    _evaluations(ledger)
    _checkpoints(ledger)
    reports = [name for key, name in REPORTS.items() if ledger[key] is True]
    if ledger["wandb_project"] and ledger["use_wandb"] is not False and "wandb" not in reports:
        reports.insert(0, "wandb")
    ledger.put(report_to=reports)
    for key, name in REPORTS.items():
        ledger.same(key, f"report_to: {name if name in reports else 'none'}")
    if "wandb" in reports and ledger["wandb_name"]:
        ledger.carry("wandb_name", "run_name")
    if ledger["hub_model_id"]:
        ledger.carry("hub_model_id", "hub_model_id")
        ledger.put(push_to_hub=True, hub_private_repo=True)
    if ledger["resume_from_checkpoint"]:
        what = "use `lema train FILE --resume` with a checkpoint of LEMA's"
        ledger.lost("resume_from_checkpoint", what)


def _evaluations(ledger: Ledger) -> None:
    patience = ledger["early_stopping_patience"]
    if patience:
        ledger.carry("early_stopping_patience", "early_stopping_patience", int(patience))
    matters = bool(patience or ledger["load_best_model_at_end"])
    ledger.carry(
        "load_best_model_at_end", "load_best_model_at_end", bool(ledger["load_best_model_at_end"])
    )
    for key in ("metric_for_best_model", "greater_is_better"):
        if ledger[key]:
            ledger.carry(key, key)
    steps = ledger["eval_steps"]
    if steps and float(steps) >= 1:
        ledger.carry("eval_steps", "eval_steps", int(steps))
    elif steps:
        what = "LEMA evaluates at the end of each epoch: write eval_steps as a number of steps"
        ledger.differs("eval_steps", what, changes_numbers=matters)
    per_epoch = ledger["evals_per_epoch"]
    if per_epoch and float(per_epoch) == 1:
        ledger.same("evals_per_epoch", "LEMA evaluates at the end of each epoch")
    elif per_epoch:
        what = "LEMA evaluates at the end of each epoch: write eval_steps to do it more often"
        ledger.differs("evals_per_epoch", what, changes_numbers=matters)
    if ledger["eval_strategy"]:
        what = "LEMA evaluates at the end of each epoch, or every eval_steps, if there are rows"
        ledger.differs("eval_strategy", what, changes_numbers=matters)


def _checkpoints(ledger: Ledger) -> None:
    steps = ledger["save_steps"]
    if ledger["save_strategy"] == "no":
        ledger.carry("save_strategy", "save_steps", 0)
    elif steps and float(steps) >= 1:
        ledger.carry("save_steps", "save_steps", int(steps))
        ledger.same("save_strategy", "by save_steps")
    else:
        key = "saves_per_epoch" if ledger["saves_per_epoch"] else "save_strategy"
        what = "LEMA saves every save_steps steps (500), and at the end"
        ledger.differs(key, what, changes_numbers=False)
        if steps:
            ledger.differs("save_steps", what, changes_numbers=False)
