"""The settings that may change when a run is resumed: a class for each setting, and the differences found.

A change that would make it another run is refused: other shapes, rows, batches or draws. A change of numbers that a
user may reasonably want, such as a lower learning rate, takes effect and is reported. A setting that changes no number
may change freely: where the run is computed, how much memory it takes, what it writes and how often.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lema.config.lemaconfig import CONFIG_NAME
from lema.errors import AdapterError

__all__ = ["CLASSES", "SCHEDULE", "UPDATE", "Change", "Changed", "changed_settings", "settings_then"]


class Change(Enum):
    """What becomes of a run that goes on with another value of a setting."""

    REFUSED = "the run would be another"
    ADAPTER = "what it came to mean for PEFT is compared, and refused where that differs"
    DATA = "the fingerprint of the rows decides; shown where that differs"
    SAID = "later numbers are others; a line says so"
    SILENT = "no number changes, or something else is compared"


def _classes(groups: Mapping[Change, Iterable[str]]) -> dict[str, Change]:
    return {name: change for change, names in groups.items() for name in names}


CLASSES: Mapping[str, Change] = _classes(
    {
        Change.REFUSED: ("dtype", "seed", "batch_size", "gradient_accumulation_steps", "shuffle"),
        Change.ADAPTER: (
            "lora_rank",
            "lora_alpha",
            "lora_target_modules",
            "lora_exclude_modules",
            "lora_rank_pattern",
            "lora_alpha_pattern",
            "lora_use_rslora",
            "lora_layers_to_transform",
            "lora_layers_pattern",
            "lora_lora_bias",
            "lora_bias",
            "lora_modules_to_save",
            "lora_use_dora",
            "lora_target_parameters",
            "lora_trainable_token_indices",
            "lora_ensure_weight_tying",
        ),
        Change.DATA: ("train_data", "eval_split", "max_length", "overlong"),
        Change.SAID: (
            "learning_rate",
            "lr_scheduler_type",
            "warmup_steps",
            "warmup_ratio",
            "max_steps",
            "num_train_epochs",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
            "lora_dropout",
            "eval_data",
            # These change the last bits:
            "attn_implementation",
            "loss_chunk_tokens",
            "pad_to_multiple_of",
            "tensor_parallel_size",
            "sequence_parallel",
            "tf32",
            "torch_compile",
            "backend_settings",
        ),
        Change.SILENT: (
            # The fingerprint of the model's files decides.
            "model_name_or_path",
            "model_type",
            "gbi_path",
            "revision",
            "lora_init",  # the values are those of the checkpoint
            "device",
            "strategy",
            "micro_batch_size",
            "gradient_checkpointing",
            "prefetch_depth",
            "device_memory",
            "host_memory",
            "boundary_activations",
            "activation_offloading",
            "offload_dir",
            "cache_frozen_prefix",
            "page_locked",
            "embeddings",
            "shard_weights",
            "output_dir",
            "save_steps",
            "save_total_limit",
            "eval_steps",
            "logging_steps",
            "report_to",
            "run_name",
            "max_skipped_steps",
            "check_base_weights",
            "hang_timeout",
        ),
    }
)

# What the learning rate of a step follows from, and what else the optimizer's update does.
SCHEDULE = frozenset(
    {"learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "max_steps", "num_train_epochs"}
)

UPDATE = frozenset({"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"})


@dataclass(frozen=True)
class Changed:
    """A setting, or something else a run goes by, that is not what it was.

    Attributes:
        name: as a user knows it.
        then: what it was.
        now: what it is.
    """

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.then!r} -> {self.now!r}"


def settings_then(checkpoint: Path) -> dict[str, Any]:
    """Read the settings a checkpoint was written with, as plain values; none where they are not beside it.

    Raises:
        AdapterError: the file cannot be read.
    """
    file = checkpoint / CONFIG_NAME
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(f"the checkpoint's settings cannot be read: {error}", where=str(file)) from error


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any], *wanted: Change) -> list[Changed]:
    """Return the settings of some classes that are not what they were.

    Args:
        then: settings as plain values; one that is missing, in a file of an earlier version, counts as the same.
        now: every setting, likewise (`LemaConfig.to_dict`).
        wanted: the classes.
    """
    return [
        Changed(name, then[name], now[name])
        for name, change in CLASSES.items()
        if change in wanted and name in then and then[name] != now[name]
    ]
