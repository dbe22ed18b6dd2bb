"""How many processes launch a run, and accelerate's options by which they share its rows."""

from collections.abc import Mapping
from math import prod
from pathlib import Path, PurePath

from lema.config.yaml import read_yaml
from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger

__all__ = ["KEYS", "accelerator", "accumulated", "launcher", "several", "splits"]

KEYS = frozenset(
    {
        *("num_processes", "num_machines", "config_file", "accelerate_config", "launcher"),
        *("main_process_port", "main_process_ip", "machine_rank", "mixed_precision"),
        *("multi_gpu", "use_deepspeed", "use_fsdp", "gpu_ids", "dynamo_backend"),
    }
)
"""Options of `accelerate launch` that stand before the trainer's own."""
LAUNCHED = {"single_gpu": 1} | dict.fromkeys(
    ("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8
)
"""TRL's files for `accelerate launch`, and how many processes they start."""
OPTIONS = "accelerator_config"
SHARING = ("tp_size", "cp_size", "sp_size")
"""How the degrees end by which processes share a row, in a `parallelism_config`."""


def launcher(ledger: Ledger) -> tuple[str, int, Mapping[str, object]]:
    """Return the key that says how many processes there are, how many of them read rows of their
    own, and the values of the launcher's file: one of TRL's by name, or a path.
    """
    key, processes, launched = _launched(ledger)
    sharing = 1
    for section in (ledger["parallelism_config"], launched.get("parallelism_config")):
        if isinstance(section, Mapping):
            degrees = [value for name, value in section.items() if name.endswith(SHARING)]
            sharing *= prod(max(1, int(value or 1)) for value in degrees)
    return key, max(1, processes // sharing), launched


def _launched(ledger: Ledger) -> tuple[str, int, Mapping[str, object]]:
    """Return the same of all processes."""
    if ledger["num_processes"]:
        return "num_processes", int(ledger["num_processes"]), _file(ledger)[1]
    key, launched = _file(ledger)
    if key is None:
        return "num_processes", 1, {}
    name = PurePath(str(ledger[key])).stem
    if launched:
        alone = str(launched.get("distributed_type", "NO")).upper() == "NO"
        return key, 1 if alone else int(str(launched.get("num_processes") or 1)), launched
    if name in LAUNCHED:
        return key, LAUNCHED[name], {}
    if key not in ledger.settled():
        what = f"the file {ledger[key]} is not here: say --num_processes; here it is one"
        ledger.differs(key, what)
    return key, 1, {}


def _file(ledger: Ledger) -> tuple[str | None, Mapping[str, object]]:
    for key in ("accelerate_config", "config_file"):
        if ledger[key] is not None:
            file = Path(str(ledger[key]))
            return key, dict(read_yaml(file).values) if file.is_file() else {}
    return None, {}


def several(ledger: Ledger, key: str, what: str, *, mean_of_means: bool) -> None:
    """Note that a run of several processes is one of one process here.

    Args:
        ledger: the run.
        key: the key that says how many there are.
        what: the setting that stands for them.
        mean_of_means: whether each process takes a mean of its own rows.
    """
    ledger.translation.same.pop(key, None)
    why = "of which there is one mean, not a mean of theirs; " if mean_of_means else ""
    text = (
        f"{what}, {why}where rows do not fill the last step of an epoch, accelerate repeats its "
        "first rows, and LEMA makes a smaller step"
    )
    ledger.differs(key, text)


def accumulated(ledger: Ledger, steps: int) -> int:
    """Return how many micro-batches a step has: accelerate's `num_steps` may say so.

    Raises:
        ConfigError: both say so, which Trainer refuses, too.
    """
    number = _accumulation(ledger).get("num_steps")
    if number is None:
        return steps
    if steps > 1:
        what = "Trainer takes num_steps, or gradient_accumulation_steps, not both"
        raise ConfigError(what, where=OPTIONS, how="leave num_steps out")
    return int(str(number))


def splits(ledger: Ledger) -> bool:
    """Whether processes divide a batch among them, and do not take one each."""
    return bool(_options(ledger).get("split_batches"))


def accelerator(ledger: Ledger) -> None:
    """Note accelerate's options."""
    options = _options(ledger)
    value = ledger[OPTIONS]
    if value is None:
        return
    if not isinstance(value, Mapping) and not options:
        ledger.lost(OPTIONS, "the file of accelerate's options is not here; give a mapping")
    elif options.get("use_seedable_sampler") is False:
        what = (
            "without use_seedable_sampler rows are drawn from a generator that dropout draws from"
        )
        ledger.lost(OPTIONS, what)
    elif number := _accumulation(ledger).get("num_steps"):
        ledger.same(OPTIONS, f"gradient_accumulation_steps: {number}")
    else:
        ledger.lost(OPTIONS, "it divides batches among processes", changes_numbers=False)


def _options(ledger: Ledger) -> Mapping[str, object]:
    value = ledger[OPTIONS]
    if isinstance(value, Mapping):
        return value
    file = Path(str(value))
    return dict(read_yaml(file).values) if value is not None and file.is_file() else {}


def _accumulation(ledger: Ledger) -> Mapping[str, object]:
    options = _options(ledger).get("gradient_accumulation_kwargs")
    return options if isinstance(options, Mapping) else {}
