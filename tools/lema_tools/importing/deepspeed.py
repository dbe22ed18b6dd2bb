"""The values of DeepSpeed's files that decide numbers: clipping, accumulation, optimizer, schedule.

`transformers` fills values that are "auto" with its own, and refuses others that are not the
same as its own (`HfTrainerDeepSpeedConfig.trainer_config_process`). Its optimizer and schedule
give way to those of the file.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from lema.storage.header import read_json
from lema_tools.importing.ledger import CONFIG_BYTES, Ledger

__all__ = ["deepspeed", "launched_deepspeed", "zero_stage"]

Config = Mapping[str, object]
AUTOMATIC = re.compile(r"(ds_z|zero)(\d)(_\w+)?")
"""Names of the files that axolotl and LLaMA-Factory publish, whose values are all "auto"."""
OF_TRAINER = {
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
OF_OPTIMIZER = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
DEFAULT_CLIPPING = 1.0  # that of DeepSpeed 0.19.8, where the file has no gradient_clipping
ADAMS = ("adamw", "adam")


def deepspeed(ledger: Ledger, key: str = "deepspeed") -> int | None:
    """Note what a file of DeepSpeed, or a mapping, has otherwise than the run, whose optimizer is
    carried already.

    Returns:
        The stage of ZeRO; None: the run has no DeepSpeed, or its stage is not known.
    """
    value = ledger[key]
    if not value:
        return None
    config = _config(ledger, key, value)
    if config is None:
        return zero_stage(str(value))
    _values(ledger, key, config)
    return _stage(config)


def launched_deepspeed(ledger: Ledger, key: str, launched: Config) -> int | None:
    """Note what the `deepspeed_config` of a launcher's file has otherwise than the run.

    Args:
        ledger: the run.
        key: the key that names the launcher's file.
        launched: the values of the file.

    Returns:
        The stage of ZeRO; None: the launcher uses no DeepSpeed.
    """
    section = launched.get("deepspeed_config")
    if not isinstance(section, Mapping):
        return None
    where = f"{key}.deepspeed_config"
    name = section.get("deepspeed_config_file")
    config = _config(ledger, where, name) if name else dict(section)
    if config is None:
        return None
    if not name:  # the launcher fills what its file leaves out
        config = {name: config.get(name, "auto") for name in (*OF_TRAINER, "zero_stage")}
    _values(ledger, where, config)
    return _stage(config)


def zero_stage(name: str) -> int | None:
    """Return the stage that a published file is named after; None: it is another file."""
    match = AUTOMATIC.fullmatch(PurePath(name).stem)
    return int(match[2]) if match else None


def _stage(config: Config) -> int | None:
    section = config.get("zero_optimization")
    stage = section.get("stage") if isinstance(section, Mapping) else config.get("zero_stage")
    return int(str(stage)) if str(stage).isdecimal() else None


def _config(ledger: Ledger, key: str, value: object) -> Config | None:
    """Return the values of a file that is here; None: a note says that it is not, unless it is a
    published one.
    """
    if isinstance(value, Mapping):
        return value
    for file in (Path(str(value)), Path(ledger.directory) / str(value)):
        if file.is_file():
            return read_json(file, CONFIG_BYTES, "a config of DeepSpeed")
    if zero_stage(str(value)) is None:
        what = (
            f"the file {value} is not here, so its clipping, accumulation, optimizer and scheduler "
            "are not read: run the import where it is"
        )
        ledger.differs(f"{key}.file", what)
    return None


def _values(ledger: Ledger, key: str, config: Config) -> None:
    for name, other in OF_TRAINER.items():
        value = config.get(name, DEFAULT_CLIPPING if name == "gradient_clipping" else "auto")
        _match(ledger, f"{key}.{name}", value, other)
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping):
        _optimizer(ledger, f"{key}.optimizer", optimizer)
    scheduler = config.get("scheduler")
    if isinstance(scheduler, Mapping):
        what = (
            f"DeepSpeed's {scheduler.get('type')} decides the learning rate instead of the "
            "trainer's schedule, and LEMA has the trainer's: leave the scheduler out of the file"
        )
        ledger.lost(f"{key}.scheduler", what)


def _match(ledger: Ledger, key: str, value: object, other: str) -> None:
    if value == "auto" or _number(value) == _number(ledger[other]):
        return
    what = (
        f"{value} in DeepSpeed's file is not {other}: {ledger[other]} of the run, which LEMA has, "
        "and Trainer refuses two different values"
    )
    ledger.lost(key, what)


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _optimizer(ledger: Ledger, key: str, optimizer: Config) -> None:
    """Note an optimizer that is not the AdamW of the run."""
    options = optimizer.get("params")
    options = dict(options) if isinstance(options, Mapping) else {}
    name = str(optimizer.get("type")).lower()
    if name not in ADAMS or (name == "adam" and options.get("adam_w_mode") is False):
        ledger.lost(f"{key}.type", f"LEMA has not DeepSpeed's {optimizer.get('type')} here")
    elif not str(carried := ledger.translation.settings["optim"]).startswith("adamw_torch"):
        what = f"AdamW in DeepSpeed's file decides instead of {carried}"
        ledger.put(optim="adamw_torch")
        ledger.differs(f"{key}.type", what, changes_numbers=False)
    for option, other in OF_OPTIMIZER.items():
        _match(ledger, f"{key}.params.{option}", options.get(option, "auto"), other)
    betas = options.get("betas", "auto")
    run = [ledger["adam_beta1"], ledger["adam_beta2"]]
    if betas != "auto" and betas != run:
        what = f"{betas} in DeepSpeed's file are not {run} of the run, which Trainer refuses"
        ledger.lost(f"{key}.params.betas", what)
