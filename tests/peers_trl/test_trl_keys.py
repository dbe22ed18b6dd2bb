"""The table of TRL's defaults against the classes of the TRL that is installed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import trl
from trl.scripts.grpo import GRPOScriptArguments

from lema_tools.importing.translation import ForeignRun
from lema_tools.importing.trl import PEER
from lema_tools.importing.trl.kind import DEFAULTS

CLASSES: dict[str, tuple[type, ...]] = {
    "sft": (trl.ScriptArguments, trl.SFTConfig),
    "dpo": (trl.ScriptArguments, trl.DPOConfig),
    "kto": (trl.ScriptArguments, trl.KTOConfig),
    "reward": (trl.ScriptArguments, trl.RewardConfig),
    "grpo": (GRPOScriptArguments, trl.GRPOConfig),
}
OF_ALL = (trl.ModelConfig, trl.DatasetMixtureConfig)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default as the table has it."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None
    return getattr(value, "value", value)


def fields_of(kind: str) -> dict[str, Any]:
    """Return every option of a script with its default."""
    classes = (*CLASSES[kind], *OF_ALL)
    fields = [field for cls in classes for field in dataclasses.fields(cls) if field.init]
    return {field.name: default_of(field) for field in fields}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_table_has_every_field_with_its_default(kind: str) -> None:
    assert DEFAULTS.of(kind) == fields_of(kind)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_no_field_is_silent(kind: str) -> None:
    """Every field of the installed classes, as a file may have them all, is in one list."""
    least = {"model_name_or_path": "org/model", "dataset_name": "org/data", "output_dir": "out"}
    values = fields_of(kind) | least
    translation = PEER.translate(ForeignRun(values, objective=kind))
    notes = (*translation.differs, *translation.lost)
    assert sorted([*translation.same, *(note.key for note in notes)]) == sorted(values)
