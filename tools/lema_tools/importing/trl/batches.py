"""TRL's batches, the order of their rows, and its seeds."""

from collections.abc import Mapping
from pathlib import Path

from lema.config.yaml import read_yaml
from lema_tools.importing.trl.ledger import Ledger

__all__ = ["batches"]

LAUNCHED = {"single_gpu": 1} | dict.fromkeys(
    ("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8
)
"""TRL's files for `accelerate launch`, and how many processes they start."""

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
    _of_accelerate(ledger)


def _sizes(ledger: Ledger) -> None:
    rows = ledger["per_device_train_batch_size"]
    ledger.carry("gradient_accumulation_steps", "gradient_accumulation_steps")
    key, processes = _processes(ledger)
    ledger.carry("per_device_train_batch_size", "batch_size", rows * processes)
    ledger.put(micro_batch_size=None)
    if processes == 1:
        ledger.same("num_processes", "one process")
        return
    ledger.put(micro_batch_size=rows * (2 if ledger.kind == "dpo" else 1))
    what = f"batch_size: {rows * processes}, the rows of all {processes} processes"
    if ledger.kind == "sft":
        ledger.differs(key, what, changes_numbers=False)
    else:
        ledger.differs(key, f"{what}, of which there is one mean, not a mean of theirs")


def _processes(ledger: Ledger) -> tuple[str, int]:
    """Return how many processes are launched, and the key that says so: the number, or the
    launcher's file, one of TRL's by name or a path.
    """
    if ledger["num_processes"]:
        return "num_processes", int(ledger["num_processes"])
    for key in ("accelerate_config", "config_file"):
        name = ledger[key]
        if name is None:
            continue
        file = Path(str(name))
        if file.is_file():
            launched = read_yaml(file).values
            alone = str(launched.get("distributed_type", "NO")).upper() == "NO"
            return key, 1 if alone else int(launched.get("num_processes") or 1)
        if file.stem in LAUNCHED:
            return key, LAUNCHED[file.stem]
        ledger.differs(key, f"the file {name} is not here: say --num_processes; here it is one")
    return "num_processes", 1


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


def _of_accelerate(ledger: Ledger) -> None:
    options = ledger["accelerator_config"]
    if options is None:
        return
    key = "accelerator_config"
    if not isinstance(options, Mapping):
        ledger.lost(key, "a file of accelerate's options is not read; give them as a mapping")
    elif options.get("use_seedable_sampler") is False:
        what = (
            "without use_seedable_sampler rows are drawn from a generator that dropout draws from"
        )
        ledger.lost(key, what)
    elif steps := (options.get("gradient_accumulation_kwargs") or {}).get("num_steps"):
        ledger.carry(key, "gradient_accumulation_steps", steps)
    else:
        ledger.lost(key, "it divides batches among processes", changes_numbers=False)
