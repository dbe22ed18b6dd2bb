"""Imported files have the values that axolotl's own code resolves, or name the key that differs.

`values.json` is written by `axolotlvalues.py`, which says with which version of axolotl, and when.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lema.config import LemaConfig
from lema.engine.optim import num_warmup_steps
from lema.engine.schedules import spans_as_trainer
from lema_tools.importing.axolotl.peer import PEER
from lema_tools.importing.checking import checked
from lema_tools.importing.translation import ForeignRun

TABLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "values.json").read_text(encoding="utf-8")
)
SAME = {
    "learning_rate": ("learning_rate", "learning_rate"),
    "weight_decay": ("weight_decay", "weight_decay"),
    "adam_beta1": ("adam_beta1", "adam_beta1"),
    "adam_beta2": ("adam_beta2", "adam_beta2"),
    "adam_epsilon": ("adam_epsilon", "adam_epsilon"),
    "max_grad_norm": ("max_grad_norm", "max_grad_norm"),
    "num_train_epochs": ("num_train_epochs", "num_epochs"),
    "per_device_train_batch_size": ("micro_batch_size", "micro_batch_size"),
    "seed": ("seed", "seed"),
    "optim": ("optim", "optimizer"),
    "save_total_limit": ("save_total_limit", "save_total_limit"),
    "lora_r": ("lora_rank", "lora_r"),
    "lora_alpha": ("lora_alpha", "lora_alpha"),
    "lora_dropout": ("lora_dropout", "lora_dropout"),
    "sequence_len": ("max_length", "sequence_len"),
    "lr_scheduler_type": ("lr_scheduler_type", "lr_scheduler"),
}
"""axolotl's name of a resolved value, LEMA's setting, and the key of axolotl's files."""
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout")


def told_of(file: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The settings of a file, and the keys that the import names as different."""
    translation = checked(PEER.translate(ForeignRun(file)))
    notes = (*translation.differs, *translation.lost)
    return translation.settings, {note.key for note in notes}


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["example"])
def test_values_are_those_that_axolotl_resolves(entry: dict[str, Any]) -> None:
    settings, different = told_of(entry["file"])
    values = entry["values"]
    defaults = LemaConfig.defaults()
    for name, (setting, key) in SAME.items():
        if key in different or (name in OF_ADAPTERS and not values["adapter"]):
            continue
        expected = values[name]
        if name == "lr_scheduler_type" and values["cosine_min_lr_ratio"] and expected == "cosine":
            expected = "cosine_with_min_lr"
        assert settings.get(setting, defaults[setting]) == expected, (name, key)
    rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert settings["batch_size"] == rows
    assert settings["dtype"] == ("bfloat16" if values["bf16"] else "float32") or "fp16" in different
    if values["adapter"] and "lora_target_modules" not in different:
        targets = None if values["lora_target_linear"] else values["lora_target_modules"]
        assert settings["lora_target_modules"] == targets


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["example"])
def test_the_warm_up_has_as_many_steps_as_axolotls(entry: dict[str, Any]) -> None:
    settings, different = told_of(entry["file"])
    if "warmup_ratio" in different:
        return
    steps = settings["warmup_steps"]
    ratio = settings["warmup_ratio"]
    rounding = settings.get("warmup_rounding", "up")
    for total, expected in entry["values"]["warmup_steps"].items():
        if settings.get("trains") == "full":
            share = ratio or int(steps)
            spans = spans_as_trainer("cosine", int(total), rounding, warmup=share)
            assert spans.warmup == expected
        else:
            config = LemaConfig(
                "model",
                warmup_steps=None if steps == "auto" else steps,
                warmup_ratio=ratio,
                warmup_rounding=rounding,
            )
            assert num_warmup_steps(config, int(total)) == expected


def test_expectations_cover_twenty_files() -> None:
    assert len({entry["example"] for entry in TABLE}) >= 20
