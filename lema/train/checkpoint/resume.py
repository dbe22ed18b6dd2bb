"""The checkpoint a run is resumed from: the newest one that verifies, of the same settings, adapter and data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel

from lema.config import LemaConfig
from lema.config.settings import Change
from lema.errors import AdapterError, ConfigError
from lema.lora.files import WEIGHTS, adapter_differences
from lema.storage.manifest import check_manifest
from lema.train.checkpoint.changes import CLASSES, Changed, changed_settings, settings_then
from lema.train.checkpoint.format import OPTIMIZER, PREFIX, STATE, read_state

__all__ = ["Say", "check_same_run", "check_sound", "newest_sound", "past_log", "say_changed", "tell_warning"]

Say = Callable[[str], None]

# The files without which a checkpoint of a kind is none.
KINDS = {"adapters": (WEIGHTS, OPTIMIZER), "full": (OPTIMIZER,)}


def newest_sound(found: Sequence[Path], say: Say, *, weights_only: bool = False) -> Path:
    """Return the newest sound checkpoint of those `found`, the oldest first; why newer ones are passed over is said.

    With `weights_only` the optimizer may be damaged. Where none is sound, the `AdapterError` says why of each.
    """
    faults: list[str] = []
    for directory in reversed(found):
        try:
            check_sound(directory, weights_only=weights_only)
        except AdapterError as error:
            fault = f"{error.what} ({error.where})"
            faults.append(f"{directory.name}: {fault}")
            tell_warning(f"{directory} is damaged and passed over: {fault}", say)
        else:
            return directory
    listed = "".join(f"\n  - {fault}" for fault in faults)
    raise AdapterError(
        f"no checkpoint is sound:{listed}",
        where=str(found[-1].parent) if found else "",
        how="copy one back from where it is whole, or begin a new run in another output_dir"
        + ("" if weights_only else "; where the optimizer alone is damaged, --weights-only goes on without it"),
    )


def check_sound(directory: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint that is what was written, and all of it; else an `AdapterError` names a file."""
    check_manifest(directory, spared=(OPTIMIZER,) if weights_only else ())
    state = read_state(directory)
    kind = state.get("kind", "adapters")
    if kind not in KINDS:
        raise AdapterError(f"there is no kind of training {kind!r}", where=str(directory / STATE))
    for name in KINDS[kind]:
        if not (directory / name).is_file() and not (weights_only and name == OPTIMIZER):
            raise AdapterError("a file is missing", where=str(directory / name))
    settings_then(directory)
    step = directory.name.removeprefix(PREFIX)
    if step.isdigit() and int(step) != (said := _step_of(state)):
        what = f"it is of step {said}, and its name says {step}: it was renamed, or another copied over it"
        raise AdapterError(what, where=str(directory / STATE))
    return state


def past_log(file: Path) -> dict[str, Any]:
    """Read what an earlier process logged and found best, or raise `AdapterError`; `train_step` writes none of it."""
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        told = {name: state[name] for name in ("log_history", "best_metric", "best_global_step")}
        return told | {"stateful_callbacks": state.get("stateful_callbacks", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"the checkpoint's log cannot be read: {error!r}", where=str(file)) from error


def tell_warning(line: str, say: Say) -> None:
    """Say a line, and have it in the log as a warning."""
    log = logging.getLogger(__name__)
    if not log.hasHandlers():  # the line has been said: Python would print it once more
        log.addHandler(logging.NullHandler())
    log.warning("%s", line)
    say(line)


def _step_of(state: dict[str, Any]) -> int:
    """Return the step that a checkpoint is named by: in a phase, that of the phase."""
    extra = state["extra"]
    in_phase = isinstance(extra, dict) and {"plan", "phase", "step"} <= extra.keys()
    return int(extra["step"] if in_phase else state["global_step"])


def check_same_run(
    checkpoint: Path, config: LemaConfig, adapter: PeftModel | None, data: Mapping[str, Any]
) -> list[Changed]:
    """Refuse to go on with what another run began; return the settings that may have changed, and have.

    `adapter` is what is attached now; None: none trains. `data` tells the rows apart from others, as JSON types; it is
    compared with what the checkpoint's `extra` has under `data`, as far as that goes. The `ConfigError` names each
    thing that differs, with what it was and is. Settings that cannot be read are an `AdapterError`.
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
        what = f"the run began with other settings or data (then -> now):{listed}"
        how = "resume with those it began with, or begin a new run in another output_dir"
        raise ConfigError(what, where=str(checkpoint), how=how)
    return changed_settings(then, now, Change.SAID)


def say_changed(changed: Sequence[Changed], say: Say) -> None:
    """Say which settings are others from here on, if any are."""
    if changed:
        say(f"other settings from here on (then -> now): {'; '.join(str(one) for one in changed)}")
