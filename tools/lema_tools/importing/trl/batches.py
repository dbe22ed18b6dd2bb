"""TRL's batches, the order of their rows, and its seeds."""

from lema_tools.importing.deepspeed import deepspeed, launched_deepspeed, zero_stage
from lema_tools.importing.launch import accelerator, accumulated, launcher, several, splits
from lema_tools.importing.trl.ledger import Ledger

__all__ = ["batches", "engine"]

ORDERS = {"random": "transformers", "sequential": "sequential"}
"""Trainer's sampling strategies by LEMA's setting `shuffle`, row for row."""


def batches(ledger: Ledger) -> None:
    """Translate how many rows a step has, which these are, and in which order they are drawn."""
    _sizes(ledger)
    _order(ledger)
    ledger.carry("seed", "seed")
    ledger.carry("data_seed", "data_seed")
    if ledger["shuffle_dataset"]:
        what = "TRL reorders the data once before it draws rows; LEMA draws the same rows otherwise"
        ledger.lost("shuffle_dataset", what)
    if ledger["dataloader_drop_last"]:
        what = "LEMA trains on the last, smaller batch of an epoch"
        ledger.lost("dataloader_drop_last", what)
    accelerator(ledger)


def _sizes(ledger: Ledger) -> None:
    rows = ledger["per_device_train_batch_size"]
    steps = accumulated(ledger, ledger["gradient_accumulation_steps"])
    ledger.carry("gradient_accumulation_steps", "gradient_accumulation_steps", steps)
    key, processes, _ = launcher(ledger)
    divided = processes > 1 and splits(ledger)
    total = rows if divided else rows * processes
    ledger.carry("per_device_train_batch_size", "batch_size", total)
    ledger.put(micro_batch_size=None)
    if processes == 1:
        ledger.same("num_processes", "one process")
        return
    micro = max(1, total // processes)
    ledger.put(micro_batch_size=micro * (2 if ledger.kind == "dpo" else 1))
    mean_of_means = ledger.kind != "sft" or not ledger["average_tokens_across_devices"]
    what = f"batch_size: {total}, the rows of all {processes} processes"
    several(ledger, key, what, mean_of_means=mean_of_means)


def engine(ledger: Ledger) -> None:
    """Note what DeepSpeed has otherwise; with its third stage TRL keeps adapters in the type of
    the weights.
    """
    key, _, launched = launcher(ledger)
    stage = deepspeed(ledger)
    if stage is None:
        stage = launched_deepspeed(ledger, key, launched)
    if stage is None and not launched:
        stage = zero_stage(str(ledger[key]))
    quantised = ledger["load_in_4bit"] or ledger["load_in_8bit"]
    dtype = ledger.translation.settings.get("dtype")
    if stage == 3 and ledger["use_peft"] and dtype in ("bfloat16", "float16") and not quantised:
        what = f"with ZeRO-3 TRL has adapters in {dtype}, the type of the weights; LEMA in float32"
        ledger.differs("dtype", what)
        ledger.translation.same.pop("dtype", None)


def _order(ledger: Ledger) -> None:
    strategy = ledger["train_sampling_strategy"]
    if ledger["dataset_streaming"] or (ledger["streaming"] and ledger["datasets"]):
        ledger.carry("train_sampling_strategy", "shuffle", "sequential")
    elif strategy in ORDERS:
        ledger.carry("train_sampling_strategy", "shuffle", ORDERS[strategy])
    elif strategy == "group_by_length":
        ledger.put(shuffle=True, group_by_length=True)
        what = (
            "group_by_length: true groups rows in the same way, but Trainer "
            "draws them from a generator whose state nothing says"
        )
        ledger.differs("train_sampling_strategy", what)
    else:
        ledger.put(shuffle="transformers")
        what = f"LEMA has no strategy {strategy}; rows are drawn as with `random`"
        ledger.lost("train_sampling_strategy", what)
