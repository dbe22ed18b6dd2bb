"""The JSON schema of a file of settings, with or without phases, by which editors complete and
check YAML.
"""

from collections.abc import Mapping
from typing import Any

from lema.config import LemaConfig
from lema.config.problems import SettingsError
from lema.train.phases.file import EVAL_ROWS, IDLE, OF_ROWS, PHASES, STAGES
from lema.train.phases.phase import OVERRIDES, Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.twophase import LoRATrainerConfig

__all__ = ["DRAFT", "TITLE", "file_schema"]

DRAFT = "http://json-schema.org/draft-07/schema#"  # that editors know
TITLE = "Settings of LEMA"
# What says where data are may have many forms, which are read when the data are.
FREE = {"type": ["string", "array", "object", "null"]}
FREE_NAMES = ("train_data", "eval_data", "evaluations", "mixture", *sorted(STAGES))
COUNT = {"type": "integer", "minimum": 1, "description": "Rows that are validated on."}


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of what `lema train` takes: settings of a run, or of phases."""
    run = LemaConfig.json_schema()
    plan = PhasePlan.model_json_schema()
    phase = Phase.model_json_schema()
    stages = LoRATrainerConfig.model_json_schema()
    kinds = {
        name: kind
        for schema in (stages, phase, plan, run)
        for name, kind in schema.get("$defs", {}).items()
    }
    of_run = _loosened(run["properties"])
    of_phase = _loosened(
        {**phase["properties"], **{name: of_run[name] for name in sorted(OVERRIDES)}}
    )
    of_phase.pop("overrides")
    entry = {"type": "object", "additionalProperties": False, "properties": of_phase}
    phases = {
        "type": "array",
        "minItems": 1,
        "items": entry,
        "description": "Phases of the run, one after the other (docs/phases.md).",
    }
    of_stages = _loosened(stages["properties"]) | dict.fromkeys(STAGES, FREE)
    only_phased = {PHASES: phases, EVAL_ROWS: COUNT, **of_phase, **of_stages}
    properties = {**only_phased, **of_run}
    phased = {"anyOf": [{"required": [name]} for name in (PHASES, *sorted(STAGES))]}
    return {
        "$schema": DRAFT,
        "title": TITLE,
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": ["model_name_or_path"],
        "if": phased,
        "then": {"properties": dict.fromkeys(sorted(IDLE.keys() - OF_ROWS.keys()), False)},
        "else": {
            "properties": dict.fromkeys(
                sorted(only_phased.keys() - of_run.keys() - {"trains"}), False
            )
        },
        "$defs": kinds,
    }


def _loosened(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return what settings may be in a file, where that is more than they are when they are read:
    `auto`, and a share of all steps."""
    loosened = {}
    for name, schema in properties.items():
        about = {key: schema[key] for key in ("description", "default") if key in schema}
        if name in FREE_NAMES:
            loosened[name] = about | FREE
        elif name == "warmup_steps":
            loosened[name] = about | {"type": ["number", "null"], "minimum": 0}
        elif name in LemaConfig.model_fields and _takes_auto(name):
            inner = {key: value for key, value in schema.items() if key not in about}
            loosened[name] = about | {"anyOf": [{"const": "auto"}, inner]}
        else:
            loosened[name] = schema
    return loosened


def _takes_auto(name: str) -> bool:
    values: dict[str, Any] = {"model_name_or_path": "model", name: "auto"}
    try:
        LemaConfig(**values)
    except SettingsError:
        return False
    return True
