"""The settings that have changed since a run began, by what becomes of it then (`lema.config.settings`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema.config.lemaconfig import CONFIG_NAME, LemaConfig
from lema.config.settings import Change
from lema.errors import AdapterError

__all__ = ["CLASSES", "SCHEDULE", "UPDATE", "Changed", "changed_settings", "settings_then"]

CLASSES: Mapping[str, Change] = {
    name: next(one for one in field.metadata if isinstance(one, Change))
    for name, field in LemaConfig.model_fields.items()
}

# What the learning rate of a step follows from, and what else the optimizer's update does.
SCHEDULE = frozenset(
    [
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        *("max_steps", "num_train_epochs"),
    ]
)

UPDATE = frozenset({"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"})


@dataclass(frozen=True)
class Changed:
    """A setting, or something else a run goes by, as a user knows it, that is not what it was."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.then!r} -> {self.now!r}"


def settings_then(checkpoint: Path) -> dict[str, Any]:
    """Read the settings a checkpoint was written with; none where they are not beside it; or raise `AdapterError`."""
    file = checkpoint / CONFIG_NAME
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(f"the checkpoint's settings cannot be read: {error}", where=str(file)) from error


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any], *wanted: Change) -> list[Changed]:
    """Return the settings of the wanted classes that are not what they were; one that is missing then is the same."""
    return [
        Changed(name, then[name], now[name])
        for name, change in CLASSES.items()
        if change in wanted and name in then and then[name] != now[name]
    ]
