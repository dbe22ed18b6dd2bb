"""axolotl's optimizer, learning rate, batches and lengths of a run, which are Trainer's."""

from lema.errors import ConfigError
from lema_tools.importing.deepspeed import deepspeed, launched_deepspeed
from lema_tools.importing.launch import accelerator, accumulated, launcher, several, splits
from lema_tools.importing.ledger import Ledger

__all__ = ["batches", "optimizer"]

NUMBERS = {
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
}
CUSTOM = frozenset(
    {
        "optimi_adamw",
        "ao_adamw_4bit",
        "ao_adamw_8bit",
        "ao_adamw_fp8",
        "adopt_adamw",
        "came_pytorch",
        "muon",
        "dion",
        "sinkgd",
        "flash_adamw",
        "flash_adam",
        "flash_sgd",
        "flash_sgdw",
        "flash_lion",
        "q_galore_adamw8bit",
    }
)
"""Optimizers that axolotl adds to those of transformers."""
OWN_SCHEDULES = ("one_cycle", "rex")
STRATEGIES = {"drop": "drop", "truncate": "truncate", "raise": "error"}
DEFAULT_WARMUP = 0.03
MOST_DEFAULT_WARMUP_STEPS = 100


def optimizer(ledger: Ledger) -> None:
    """Translate what makes an optimizer step of gradients, and how many steps there are."""
    ledger.carry("learning_rate", "learning_rate", ledger.number("learning_rate"))
    for key, setting in NUMBERS.items():
        ledger.carry(key, setting, ledger.number(key))
    norm = ledger.number("max_grad_norm")  # Trainer clips to norms above 0 alone
    ledger.carry("max_grad_norm", "max_grad_norm", norm if norm > 0 else None)
    name = str(ledger["optimizer"])
    if name in CUSTOM:
        ledger.lost("optimizer", f"LEMA has transformers' optimizers, and no {name}")
    else:
        ledger.carry("optimizer", "optim", name)
    arguments = ledger["optim_args"]
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    ledger.carry("optim_args", "optim_args", arguments)
    _noise(ledger)
    ledger.carry("num_epochs", "num_train_epochs", ledger.number("num_epochs"))
    ledger.carry("max_steps", "max_steps", ledger["max_steps"] or None)
    _schedule(ledger)
    _warmup(ledger)


def _noise(ledger: Ledger) -> None:
    alpha = ledger["neftune_noise_alpha"] or None
    if alpha and ledger["rl"]:
        ledger.put(neftune_noise_alpha=None)
        ledger.same("neftune_noise_alpha", "axolotl adds no noise in preference runs")
    else:
        ledger.carry("neftune_noise_alpha", "neftune_noise_alpha", alpha)


def _schedule(ledger: Ledger) -> None:
    name = ledger["lr_scheduler"]
    options = dict(ledger["lr_scheduler_kwargs"] or {})
    ratio = ledger["cosine_min_lr_ratio"]
    if name in OWN_SCHEDULES:
        ledger.lost("lr_scheduler", f"LEMA has transformers' schedules, and no {name}")
        return
    if name == "cosine" and ratio:
        ledger.carry("lr_scheduler", "lr_scheduler_type", "cosine_with_min_lr")
        ledger.put(lr_scheduler_kwargs={"min_lr_rate": float(ratio)})
        ledger.same("cosine_min_lr_ratio", f"lr_scheduler_kwargs: min_lr_rate: {ratio}")
        if ledger["cosine_constant_lr_ratio"]:
            what = "LEMA's cosine ends with the run, and stays nowhere at its lowest rate"
            ledger.lost("cosine_constant_lr_ratio", what)
        return
    ledger.carry("lr_scheduler", "lr_scheduler_type", name)
    ledger.carry("lr_scheduler_kwargs", "lr_scheduler_kwargs", options or None)
    for key in ("cosine_min_lr_ratio", "cosine_constant_lr_ratio"):
        ledger.same(key, f"axolotl does not use it with {name}")


def _warmup(ledger: Ledger) -> None:
    """Carry warmup; axolotl makes steps of a ratio, rounds down, and makes two steps of one."""
    steps = ledger["warmup_steps"]
    ratio = ledger["warmup_ratio"]
    total = ledger["max_steps"]
    if steps is None and total:
        share = DEFAULT_WARMUP if ratio is None else float(ratio)
        steps = int(share * int(total))
        steps = min(steps, MOST_DEFAULT_WARMUP_STEPS) if ratio is None else steps
    if steps is not None:
        steps = 2 if steps == 1 else steps
        ledger.put(warmup_steps=steps, warmup_ratio=0.0)
        ledger.same("warmup_steps", f"warmup_steps: {steps}")
        ledger.same("warmup_ratio", f"warmup_steps: {steps}")
        return
    if ratio is None and ledger["adapter"]:
        ledger.put(warmup_steps="auto", warmup_ratio=0.0)
        ledger.same("warmup_steps", "warmup_steps: auto, which is axolotl's rule")
        ledger.same("warmup_ratio", "warmup_steps: auto")
        return
    # a full fine-tune has no `auto`
    share = DEFAULT_WARMUP if ratio is None else float(ratio)
    ledger.put(warmup_steps=0, warmup_ratio=share)
    if not share:
        ledger.same("warmup_ratio", "warmup_ratio: 0.0")
        return
    ledger.put(warmup_rounding="down")
    if ratio is None:
        what = f"warmup_ratio: {share}, of any number of steps; axolotl has at most 100 of warm-up"
        ledger.differs("warmup_ratio", what)
        return
    ledger.same("warmup_ratio", f"warmup_ratio: {share}, warmup_rounding: down")


def batches(ledger: Ledger) -> None:
    """Translate how many rows a step has, how long they are, and in which order they come.

    Raises:
        ConfigError: a value is none of axolotl's.
    """
    _sizes(ledger)
    ledger.carry("seed", "seed", int(ledger["seed"]))
    ledger.carry("group_by_length", "group_by_length", bool(ledger["group_by_length"]))
    sequential = bool(ledger["curriculum_sampling"])
    grouped = bool(ledger["group_by_length"])
    shuffle = "sequential" if sequential else True if grouped else "transformers"
    ledger.put(shuffle=shuffle)
    ledger.same("curriculum_sampling", f"shuffle: {shuffle}")
    _preshuffle(ledger, sequential=sequential)
    _steps(ledger)
    _lengths(ledger)


def _sizes(ledger: Ledger) -> None:
    """Carry how many rows a step has: `batch_size` says so only beside an empty
    `gradient_accumulation_steps`, whose default is 1.

    Raises:
        ConfigError: axolotl refuses the values together, too.
    """
    micro = int(ledger["micro_batch_size"])
    steps = accumulated(ledger, int(ledger["gradient_accumulation_steps"]))
    key = "gradient_accumulation_steps"
    if size := int(ledger["batch_size"] or 0):
        sizes = {"micro_batch_size", key} & ledger.filled
        if key in sizes or not sizes:
            what = "axolotl takes batch_size beside micro_batch_size alone"
            raise ConfigError(what, where="batch_size", how=f"write {key} in its place")
        if key in ledger.written:  # and empty
            steps = size // micro
    total = micro * steps
    ledger.put(batch_size=total, gradient_accumulation_steps=1)
    ledger.translation.same[key] = f"batch_size: {total}"
    if size and size != total:
        what = (
            f"batch_size: {total}, the rows with which axolotl makes a step, because its "
            f"gradient_accumulation_steps is 1; it ends after as many steps as batches of {size} "
            "rows are, and LEMA after all rows"
        )
        ledger.differs("batch_size", what)
    else:
        ledger.same("batch_size", f"batch_size: {total}")
    ledger.carry("micro_batch_size", "micro_batch_size", micro)
    _processes(ledger, total)
    accelerator(ledger)


def _processes(ledger: Ledger, total: int) -> None:
    """Carry the rows of all processes that read rows of their own: those of tensor and context
    parallelism share theirs.
    """
    key, processes, launched = launcher(ledger)
    launched_deepspeed(ledger, key, launched)
    deepspeed(ledger)
    sharing = _degree(ledger, "tensor_parallel_size")
    sharing *= max(
        _degree(ledger, "context_parallel_size"), _degree(ledger, "sequence_parallel_degree")
    )
    if processes > 1:
        readers = processes // sharing
    else:
        key = "dp_shard_size" if _degree(ledger, "dp_shard_size") > 1 else "dp_replicate_size"
        readers = _degree(ledger, "dp_shard_size") * _degree(ledger, "dp_replicate_size")
    if readers <= 1 or splits(ledger):
        return
    rows = total * readers
    ledger.put(batch_size=rows)
    what = f"batch_size: {rows}, the rows of all {readers} processes that read rows of their own"
    several(ledger, key, what, mean_of_means=bool(ledger["rl"]))


def _degree(ledger: Ledger, key: str) -> int:
    return max(1, int(ledger[key] or 1))


def _preshuffle(ledger: Ledger, *, sequential: bool) -> None:
    """Carry that rows are shuffled before the split, unless they stay in their order."""
    several = len(ledger["datasets"] or ()) > 1
    shuffles = ledger["shuffle_merged_datasets"] is not False and (several or not sequential)
    ledger.put(preshuffle=shuffles)
    ledger.translation.same["shuffle_merged_datasets"] = f"preshuffle: {shuffles}"
    if ledger["shuffle_before_merging_datasets"] and several:
        what = "LEMA shuffles the rows of all data sets together, and not those of each before"
        ledger.lost("shuffle_before_merging_datasets", what)


def _steps(ledger: Ledger) -> None:
    """Carry that the number of steps follows from that of all rows of all epochs."""
    if ledger["max_steps"] or ledger.number("num_epochs") == 1:
        return
    if ledger["adapter"]:
        ledger.put(count_steps_by="rows")
        return
    ledger.translation.same.pop("num_epochs", None)
    what = (
        "LEMA counts the batches of each epoch, the last of which may be smaller; axolotl ends "
        "after as many steps as the rows of all epochs fill"
    )
    ledger.differs("num_epochs", what)


def _lengths(ledger: Ledger) -> None:
    ledger.carry("sequence_len", "max_length", int(ledger["sequence_len"]))
    strategy = str(ledger["excess_length_strategy"] or "drop")
    if strategy not in STRATEGIES:
        what = f"axolotl has no strategy {strategy!r}"
        how = f"use {', '.join(STRATEGIES)}"
        raise ConfigError(what, where="excess_length_strategy", how=how)
    ledger.carry("excess_length_strategy", "overlong", STRATEGIES[strategy])
    packing = bool(ledger["sample_packing"]) and not ledger["rl"]
    ledger.put(packing=packing)
    if packing:
        what = "packing: true, which fills packs with other rows, so steps have other rows"
        ledger.differs("sample_packing", what)
    else:
        ledger.same("sample_packing", "packing: False")
