"""Whether a run that goes on is the one that began: its settings, its adapter and its data, compared with then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel

from lema.adapter import adapter_differences
from lema.changedsettings import CLASSES, Change, Changed, changed_settings, settings_then
from lema.checkpoint import read_state
from lema.config import LemaConfig
from lema.errors import ConfigError

__all__ = ["check_same_run"]


def check_same_run(
    checkpoint: Path, config: LemaConfig, adapter: PeftModel | None, data: Mapping[str, Any]
) -> list[Changed]:
    """Refuse to go on with what another run began; return the settings that may have changed, and have.

    Args:
        checkpoint: that is gone on from.
        config: the settings now.
        adapter: that is attached now; None: none trains.
        data: what tells the rows apart from others, as JSON types; compared with what the checkpoint's `extra` has
            under `data`, as far as that goes.

    Raises:
        ConfigError: something differs that would make it another run; names each, with what it was and is.
        AdapterError: the checkpoint's settings cannot be read.
    """
    then, now = settings_then(checkpoint), config.to_dict()
    refused = changed_settings(then, now, Change.REFUSED)
    if adapter is not None:
        refused += [Changed(*difference) for difference in adapter_differences(adapter, checkpoint)]
    known = {one.name for one in refused}
    was = read_state(checkpoint)["extra"].get("data", {})
    rows = [
        Changed(name if name in CLASSES or name.startswith("data ") else f"data {name}", was[name], value)
        for name, value in data.items()
        if name in was and was[name] != value and name not in known
    ]
    refused += rows
    if any(one.name not in CLASSES for one in rows):
        refused += changed_settings(then, now, Change.DATA)
    if refused:
        listed = "".join(f"\n  - {one}" for one in refused)
        raise ConfigError(
            f"the run began with other settings or data (then -> now):{listed}",
            where=str(checkpoint),
            how="resume with those it began with, or begin a new run in another output_dir",
        )
    return changed_settings(then, now, Change.SAID)
