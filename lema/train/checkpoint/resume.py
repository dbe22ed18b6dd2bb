"""The checkpoint a run is resumed from: the newest one that verifies, of the same settings, adapter
and data.

What becomes of a setting that has changed since says its type (`lema.config.settings`). The states
of all random generators are JSON in a checkpoint, or in memory for a stop that goes back to a
moment: a resumed run draws the same.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from lema.backend import Backend
from lema.config.lemaconfig import CONFIG_NAME, LemaConfig
from lema.config.settings import Change
from lema.errors import AdapterError, ConfigError, ReadError, listed
from lema.lora.base import COMPUTED_TYPES
from lema.lora.files import WEIGHTS, adapter_differences, read_lora_config
from lema.model.state.model import ModelState
from lema.model.state.rotary import types_by_length
from lema.storage.manifest import check_manifest
from lema.storage.regular import read_regular
from lema.train.checkpoint.format import OPTIMIZER, PREFIX, STATE, checkpoints, read_state

__all__ = [
    "SCHEDULE",
    "UPDATE",
    "Changed",
    "Generators",
    "Reporter",
    "check_same_run",
    "check_sound",
    "newest_sound",
    "past_log",
    "report_changes",
    "report_regrouped",
    "report_warning",
    "restore_own",
    "states_of_all",
]

Reporter = Callable[[str], None]

CLASSES: Mapping[str, Change] = {
    name: next(marker for marker in field.metadata if isinstance(marker, Change))
    for name, field in LemaConfig.model_fields.items()
}

# The settings that decide the learning rate of a step, and those of the optimizer's update.
SCHEDULE = frozenset(
    [
        *(
            "learning_rate",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "warmup_steps",
            "warmup_ratio",
            "warmup_rounding",
        ),
        *("max_steps", "num_train_epochs"),
    ]
)

# which rows, and how wide
AT_ONCE = frozenset({"micro_batch_size", "micro_batch_tokens", "pad_to_multiple_of"})


UPDATE = frozenset({"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"})


@dataclass(frozen=True)
class Changed:
    """A setting, or another property of a run that users know, which has changed."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.then!r} -> {self.now!r}"


# The files that a checkpoint of each kind must have.
KINDS = {"adapters": (WEIGHTS, OPTIMIZER), "full": (OPTIMIZER,)}


def newest_sound(
    candidates: Sequence[Path], report: Reporter, *, weights_only: bool = False
) -> Path:
    """Return the newest sound checkpoint of those `candidates`, the oldest first, with
    `weights_only` but for its optimizer; why newer ones are passed over is said, and where none is
    sound, the `AdapterError` says why of each."""
    faults: list[str] = []
    for directory in reversed(candidates):
        try:
            check_sound(directory, weights_only=weights_only)
        except AdapterError as error:
            fault = f"{error.what} ({error.where})"
            faults.append(f"{directory.name}: {fault}")
            report_warning(f"{directory} is damaged and passed over: {fault}", report)
        else:
            return directory
    how = "restore one from a good copy, or begin a new run in another output_dir"
    how += (
        ""
        if weights_only
        else "; if only the optimizer is damaged, --weights-only continues without it"
    )
    where = str(candidates[-1].parent) if candidates else ""
    raise AdapterError(f"no checkpoint is valid:{listed(faults)}", where=where, how=how)


def check_sound(directory: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint that is whole and unchanged; else an `AdapterError` names
    a file.
    """
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
    extra = state["extra"]
    # named by the phase's own step
    in_phase = isinstance(extra, dict) and {"plan", "phase", "step"} <= extra.keys()
    if step.isdigit() and int(step) != (
        recorded_step := int(extra["step"] if in_phase else state["global_step"])
    ):
        what = (
            f"it is of step {recorded_step}, and its name says {step}: it was renamed, or "
            "another was copied over it"
        )
        raise AdapterError(what, where=str(directory / STATE))
    return state


def past_log(file: Path) -> dict[str, Any]:
    """Read what an earlier process logged and found best, or raise `AdapterError`; `train_step`
    writes none of it.
    """
    if not file.is_file():
        return {}
    try:
        state = json.loads(read_regular(file, inside=True))
        history = {name: state[name] for name in ("log_history", "best_metric", "best_global_step")}
        return history | {"stateful_callbacks": state.get("stateful_callbacks", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"the checkpoint's log cannot be read: {error!r}", where=str(file)
        ) from error


def report_warning(line: str, report: Reporter) -> None:
    """Say a line, and have it in the log as a warning."""
    log = logging.getLogger(__name__)
    if not log.hasHandlers():  # the line has been said: Python would print it once more
        log.addHandler(logging.NullHandler())
    log.warning("%s", line)
    report(line)


def adapter_to_begin(
    config: LemaConfig, candidates: Sequence[Path], *, weights_only: bool = False
) -> Path | None:
    """Return where a run that goes on from checkpoints, the oldest first, has the adapter that it
    begins with: in the newest sound one, because the adapter that the settings name may have
    changed or be gone by now. None: where the settings say, if anywhere."""
    for directory in reversed(candidates if config.adapter_name_or_path is not None else ()):
        with suppress(AdapterError):  # which the run tells, when it passes over the checkpoint
            check_sound(directory, weights_only=weights_only)
            return directory
    return None


def as_begun(config: LemaConfig, checkpoint: Path | None) -> LemaConfig:
    """Return the settings of a run that goes on: what the plan chose when it began, and changes
    last bits, stays, among it the chunks of sequences. So do the type that is computed in, the
    default targets, where experts were not among them, and the date that the chat template was
    told."""
    names = ("micro_batch_size", "loss_chunk_tokens", "template_date")
    left_open = [name for name in names if getattr(config, name) is None]
    with suppress(AdapterError, ReadError):  # which the trainer tells
        then = {} if checkpoint is None else settings_then(checkpoint)
        updates: dict[str, Any] = {
            name: then[name] for name in left_open if then.get(name) is not None
        }
        for name in ("sequence_chunk", "keys_values", "mlp_tile_tokens"):
            if getattr(config, name) == "auto" and then.get(name, "auto") != "auto":
                updates[name] = then[name]
        if (
            checkpoint is not None
            and config.compute_dtype == "auto"
            and config.dtype
            == then.get("dtype")  # or else the run is another, which the trainer tells
            and (saved_dtype := computed_then(checkpoint)) is not None
        ):
            updates["compute_dtype"] = saved_dtype
        named = (
            config.lora_target_modules,
            config.lora_target_parameters,
            config.adapter_name_or_path,
        )
        # a saved adapter has its own targets
        if checkpoint is not None and not any(setting is not None for setting in named):
            saved = read_lora_config(checkpoint)
            updates |= (
                {} if saved is None or saved.target_parameters else {"lora_target_parameters": []}
            )
        begun = config.model_copy(update=updates)
        # What was measured is nothing that a user set, and is no line of the card, whether the run
        # was resumed or not.
        begun.model_fields_set.difference_update({"compute_dtype"} - config.model_fields_set)
        return begun
    return config


def check_same_run(
    checkpoint: Path,
    config: LemaConfig,
    adapter: PeftModel | None,
    data: Mapping[str, Any],
    computed: torch.dtype | None = None,
) -> list[Changed]:
    """Refuse to go on with what another run began; return the settings that may have changed, and
    have. `adapter` is what is attached now; None: none trains. `data` tells the rows apart from
    others, as JSON types; it is compared with what the `extra` there has under `data`. Layers are
    `computed` in that type now. The `ConfigError` names what differs, then and now."""
    then = settings_then(checkpoint)
    now = config.to_dict()
    # what was chosen, not what was asked
    if computed is not None and (saved_dtype := computed_then(checkpoint)) is not None:
        then["compute_dtype"] = saved_dtype
        now["compute_dtype"] = str(computed).removeprefix("torch.")
    refused = changed_settings(then, now, Change.REFUSED)
    if adapter is not None:
        refused += [Changed(*difference) for difference in adapter_differences(adapter, checkpoint)]
    refused_names = {change.name for change in refused}
    was = read_state(checkpoint)["extra"].get("data", {})
    rows = [
        Changed(
            name if name in CLASSES or name.startswith("data ") else f"data {name}",
            was[name],
            value,
        )
        for name, value in data.items()
        if name in was and was[name] != value and name not in refused_names
    ]
    refused += rows
    if any(change.name not in CLASSES for change in rows):
        refused += changed_settings(then, now, Change.DATA)
    if refused:
        what = (
            "the run began with other settings or data (then -> "
            f"now):{listed([*map(str, refused)])}"
        )
        how = "resume with the original settings and data, or begin a new run in another output_dir"
        raise ConfigError(what, where=str(checkpoint), how=how)
    return changed_settings(then, now, Change.REPORTED)


def report_changes(changed: Sequence[Changed], report: Reporter) -> None:
    """Say which settings are others from here on, if any are."""
    if changed:
        report(
            "settings changed from here on (then -> now): "
            f"{'; '.join(str(change) for change in changed)}"
        )


def report_regrouped(
    checkpoint: Path, config: LemaConfig, model: nn.Module, report: Reporter
) -> None:
    """Say that other rows are computed at once from here on, where that changes more than the
    rounding of sums.
    """
    then = settings_then(checkpoint)
    now = config.to_dict()
    regrouped = [
        change for change in changed_settings(then, now, *Change) if change.name in AT_ONCE
    ]
    if regrouped and (types := types_by_length(model)):
        reason = (
            f"rotary embeddings of type {' and '.join(types)} go by the longest of the rows "
            "computed at once"
        )
        report(
            "numbers change by more than rounding where rows are long "
            f"({'; '.join(map(str, regrouped))}): {reason}"
        )


def newest_settings(directory: Path) -> dict[str, Any]:
    """Read the settings of the newest checkpoint in a directory, as `settings_then` does; none
    where it has none.
    """
    directories = checkpoints(directory)
    return settings_then(directories[-1]) if directories else {}


def settings_then(checkpoint: Path) -> dict[str, Any]:
    """Read the settings of a checkpoint; none if it was saved without them; or raise
    `AdapterError`.
    """
    file = checkpoint / CONFIG_NAME
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(read_regular(file, inside=True)))
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(
            f"the checkpoint's settings cannot be read: {error}", where=str(file)
        ) from error


def computed_then(checkpoint: Path) -> str | None:
    """Return the type that the layers of a checkpoint's run were computed in, if it says one
    that settings name.
    """
    with suppress(AdapterError, ReadError):  # which the trainer tells
        dtype_name = read_state(checkpoint).get("compute_dtype")
        return dtype_name if dtype_name in COMPUTED_TYPES else None
    return None


def changed_settings(
    then: Mapping[str, Any], now: Mapping[str, Any], *classes: Change
) -> list[Changed]:
    """Return the changed settings of the wanted classes; one that the checkpoint lacks counts as
    unchanged.
    """
    return [
        Changed(name, then[name], now[name])
        for name, change in CLASSES.items()
        if change in classes and name in then and then[name] != now[name]
    ]


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@dataclass(frozen=True)
class Generators:
    """The states of Python's, NumPy's, torch's and the device's generators, as each of them
    gives its own.
    """

    python: Any
    numpy: Any
    torch: Tensor
    device: Tensor

    @classmethod
    def now(cls, backend: Backend) -> Self:
        """Return the states at this moment."""
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.get_rng_state(),
            backend.rng_state(),
        )

    def put_back(self, backend: Backend | None) -> None:
        """Let the generators go on from here; without a backend, those of the host alone."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if backend is not None:
            backend.set_rng_state(self.device)

    def to_json(self) -> dict[str, Any]:
        """Return the states as JSON types."""
        version, words, gauss = self.python
        inner = self.numpy["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": {**self.numpy, "state": {**inner, "key": inner["key"].tolist()}},
            "torch": _encode(self.torch),
            "device": _encode(self.device),
        }

    @classmethod
    def from_json(cls, states: Mapping[str, Any]) -> Self:
        """Return what `to_json` was made of."""
        version, words, gauss = states["python"]
        inner = states["numpy"]["state"]
        numpy_state = {
            **states["numpy"],
            "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)},
        }
        return cls(
            (version, tuple(words), gauss),
            numpy_state,
            _decode(states["torch"]),
            _decode(states["device"]),
        )


def states_of_all(backend: Backend, model_state: ModelState) -> dict[str, Any]:
    """Return the states of every process's generators, and what modules keep from call to call, as
    the keys of a checkpoint's state."""
    mine = {**Generators.now(backend).to_json(), "kind": backend.name}
    if modules := model_state.saved():
        mine["modules"] = modules
    first, *other_states = backend.replicas.exchange(mine)
    return {"generators": first, "generators_of_others": other_states}


def restore_own(
    backend: Backend, state: Mapping[str, Any], seed: int, model_state: ModelState
) -> None:
    """Put this process's generators back where a checkpoint found them, and what modules keep. A
    process that was not there, or has a device of another kind, draws other numbers, from the seed
    and the step."""
    saved = [state["generators"], *state.get("generators_of_others", [])]
    rank = backend.replicas.rank
    there = rank < len(saved)
    alike = there and saved[rank].get("kind", backend.name) == backend.name
    if not alike:
        torch.manual_seed(seed + rank + int(state["global_step"]))  # every device's
    if there:
        Generators.from_json(saved[rank]).put_back(backend if alike else None)
        model_state.restore(saved[rank].get("modules", {}))
