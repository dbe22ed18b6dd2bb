"""Makes plan.js, models.js and families.js of docs/planner, which the page of the planner stands on.

    PYTHONPATH=.:backends:tools:tests/support python -m plannerpage.write [NAME ...]

plan.js is the arithmetic of `lema plan`, translated in a second. models.js has the models, of which
each takes a minute or more: those named are measured again, and of others only what a config.json
is recognised by is written again; `all` measures all of them. families.js has the formulas of kinds
of models, for sizes that no table has; they are made again for a NAME that is one of
`plannerpage.formulas.FAMILIES`, and for `all`.
"""

import json
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from lema.config import LemaConfig
from lema.config.objective import OBJECTIVES
from lema.config.units import MEMORY_PARTS
from lema.engine.head.objectives import objective_of
from lema_tools.models.checkpoints import CHECKPOINTS, Checkpoint, config_of, named
from plannerpage.formulas import FAMILIES, absent_keys, formulas_of, stored_bytes
from plannerpage.javascript import translated
from plannerpage.modelfacts import CHUNKS, LENGTHS, LENGTHS_OF_HEAD, RANKS, facts_of, signs_of
from plannerpage.sizes import SYMBOLS

__all__ = ["CARDS", "MODELS_FILE", "PLAN_FILE", "known_models", "plan_text"]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "planner"
PLAN_FILE = PAGE / "plan.js"
MODELS_FILE = PAGE / "models.js"
FAMILIES_FILE = PAGE / "families.js"
BEGIN = "const lemaModels = "
BEGIN_FAMILIES = "const lemaFamilies = "
END = "\n};\n"
WHOLE = """for (const model of Object.values(lemaModels)) {
  if (model.same) Object.assign(model, { ...lemaModels[model.same], ...model });
}
"""
PROFILES_DATED = "profiles of lema/plan/machine.py, as of November 2026"
CARDS = ("t4", "4090", "h200")  # profiles of devices with memory of their own
MODULES = (
    "lema/config/units.py",
    "lema/engine/head/spans.py",
    "lema/stream/schedule.py",
    "lema/stream/ring.py",
    "lema/stream/residents.py",
    "lema/stream/preload.py",
    "lema/stream/stream.py",
    "lema/activations/boundaries.py",
    "lema/activations/chunks/copies.py",
    "lema/activations/stepstore.py",
    "lema/plan/cost.py",
    "lema/plan/memory.py",
    "lema/plan/budget.py",
    "lema/plan/machine.py",
    "lema/plan/work/workload.py",
    "lema/plan/work/step.py",
    "lema/plan/allocate.py",
    "lema/plan/simulation/virtual.py",
    "lema/plan/simulation/simulator.py",
    "lema/plan/needs.py",
    "lema/plan/choice.py",
    "lema/plan/plan.py",
)
NAMES = {  # of these modules, the definitions that a plan without a model takes
    "lema.config.units": [
        "human_bytes",
        "human_count",
        "human_duration",
        "_scaled",
        "MEMORY_PARTS",
    ],
    "lema.activations.boundaries": ["NUM_BUFFERS", "boundaries_on_device", "boundaries_in_host"],
    "lema.activations.chunks.copies": ["NUM_LEAVING", "NUM_SLOTS", "chunks_on_device"],
    "lema.activations.stepstore": ["STAGING", "graphs_on_device", "graphs_in_host"],
    "lema.plan.work.workload": ["MicroBatch", "LayerWork", "HeadWork", "Workload", "grown"],
    "lema.plan.machine": [
        "GB",
        "GIB",
        "Machine",
        "PROFILES",
        "MachineState",
        "TRN1",
        "unknown_speeds",
    ],
    "lema.plan.plan": [
        "GB",
        "BOTTLENECKS",
        "MOST_ADAPTERS",
        "MOST_TOKENS",
        "CURVE",
        "PlannedMemory",
        "Headroom",
        "Epoch",
        "Plan",
        "plan_with",
        "_crossover",
        "_limited",
        "_epoch",
        "_memory",
        "_headroom",
        "most_adapters",
        "_largest_micro_batch",
        "_of_rows",
        "_largest",
        "_notes",
    ],
}
LEFT_OUT = {
    "Tier",
    "Memory",
    "LayerStream.forward_order",
    "Planner.work",
    "Planner._cut_work",
    "Planner.least_work",
    "with_work",
    "Planner._run",
    "Planner._elsewhere",
    "MicroBatch.inputs",
    "_notes",
    "surely_fits",
    "_most_heads",
    "main_dtype",
    "_agree",
    "_host_memory_shared",
    "Plan.to_dict",
    "Plan.long_rows",
}
SETTINGS = (  # of a run that a plan asks for, whose defaults the page has
    *("strategy", "gradient_checkpointing", "activation_offloading", "boundary_activations"),
    *("prefetch_depth", "torch_compile", "micro_batch_size", "deterministic", "packing"),
    *("tokens_per_step", "gradient_accumulation_steps", "shard_weights", "shard_optimizer"),
    *(
        "micro_batch_tokens",
        "sequence_parallel",
        "pad_to_multiple_of",
        "max_steps",
        "counts_tokens",
    ),
    *("reference", "offloading_tier", "group_by_length", "shuffle", "seed", "host_memory"),
    *("sequence_chunk", "keys_values", "mlp_tile_tokens"),
)


def plan_text() -> str:
    """Return plan.js."""
    files = [ROOT / name for name in MODULES]
    config = LemaConfig("model")
    defaults = {name: getattr(config, name) for name in SETTINGS}
    facts = {
        "defaults": defaults,
        "objectives": {name: _objective(name) for name in OBJECTIVES},
        "cards": CARDS,
        "chunks": CHUNKS,
        "ranks": RANKS,
        "lengths": LENGTHS,
        "lengthsOfHead": LENGTHS_OF_HEAD,
        "parts": list(MEMORY_PARTS.items()),
        "dated": PROFILES_DATED,
    }
    lines = [
        "// Made by tests/support/plannerpage/write.py from lema/plan and what it stands on; not to be",
        "// changed by hand.",
        '"use strict";',
        f"const lemaFacts = {json.dumps(facts, default=str)};",
        "const { Exception, BaseException, ValueError } = stubs;",
        "stubs.OBJECTIVES = new Map(Object.entries(lemaFacts.objectives));",
        "stubs.objective_of = (config) => lemaFacts.objectives[config.objective].loss;",
        translated(files, ROOT, LEFT_OUT, NAMES),
    ]
    return "\n".join(lines) + "\n"


def _objective(name: str) -> dict[str, Any]:
    """Return what a plan asks of an objective."""
    loss = objective_of(LemaConfig("model", objective=name))
    return {
        "examples": OBJECTIVES[name].examples,
        "loss": None
        if loss is None
        else {"reference": loss.reference, "mismatched": loss.mismatched},
    }


def known_models() -> dict[str, Any]:
    """Return the models that models.js has, each whole."""
    models = _written_models()
    return {
        name: {**models[facts["same"]], **facts} if "same" in facts else facts
        for name, facts in models.items()
    }


def _written_models() -> dict[str, Any]:
    """Return the models as models.js has them: of equal ones the tables of the first alone."""
    if not MODELS_FILE.exists():
        return {}
    text = MODELS_FILE.read_text(encoding="utf-8")
    tables = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    models: dict[str, Any] = json.loads(f"{tables}\n}}")
    return models


def write_models(models: Mapping[str, Any]) -> None:
    """Write models.js, the models in the order of the published checkpoints."""
    order = [checkpoint.name for checkpoint in CHECKPOINTS if checkpoint.name in models]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(models[name])}" for name in order)
    head = "// Made by tests/support/plannerpage/write.py; not to be changed by hand.\n"
    MODELS_FILE.write_text(f"{head}{BEGIN}{{\n{lines}{END}{WHOLE}", encoding="utf-8")


def known_families() -> dict[str, Any]:
    """Return the kinds of models that families.js has formulas of."""
    if not FAMILIES_FILE.exists():
        return {}
    text = FAMILIES_FILE.read_text(encoding="utf-8")
    tables = text[text.index(BEGIN_FAMILIES) + len(BEGIN_FAMILIES) : text.index(END)]
    families: dict[str, Any] = json.loads(f"{tables}\n}}")
    return families


def write_families(families: Mapping[str, Any]) -> None:
    """Write families.js."""
    lines = ",\n".join(
        f"{json.dumps(kind)}: {json.dumps(families[kind])}" for kind in FAMILIES if kind in families
    )
    head = "// Made by tests/support/plannerpage/write.py; not to be changed by hand.\n"
    symbols = f"const lemaSymbols = {json.dumps(SYMBOLS)};\n"
    stored = f"const lemaStored = {json.dumps(stored_bytes())};\n"
    absent = {kind: absent_keys(kind) for kind in FAMILIES}
    defaults = f"const lemaAbsent = {json.dumps(absent)};\n"
    FAMILIES_FILE.write_text(
        f"{head}{symbols}{stored}{defaults}{BEGIN_FAMILIES}{{\n{lines}{END}", encoding="utf-8"
    )


def equal_one(checkpoint: Checkpoint, models: Collection[str]) -> str | None:
    """Return the model with tables whose config and form a checkpoint has; None: there is none."""
    config = config_of(checkpoint).to_dict()
    return next(
        (
            other.name
            for other in CHECKPOINTS
            if other.name in models
            and other.name != checkpoint.name
            and other.form == checkpoint.form
            and other.model_type == checkpoint.model_type
            and config_of(other).to_dict() == config
        ),
        None,
    )


def main(names: list[str]) -> None:
    """Write both files."""
    logging.set_verbosity_error()
    PLAN_FILE.write_text(plan_text(), encoding="utf-8")
    models = _written_models()
    asked = [
        one for one in CHECKPOINTS if one.name in (list(models) if names == ["all"] else names)
    ]
    for checkpoint in asked:
        with_tables = [name for name, facts in models.items() if "same" not in facts]
        if same := equal_one(checkpoint, with_tables):
            models[checkpoint.name] = {"hub": checkpoint.hub_id, "same": same}
            write_models(models)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models[checkpoint.name] = facts_of(checkpoint)
        write_models(models)
    for name, facts in models.items():
        if "same" not in facts:
            facts |= signs_of(_named(name))
    write_models(models)
    families = known_families()
    for kind in FAMILIES:
        if kind in names or names == ["all"]:
            families[kind] = formulas_of(kind)
    write_families(families)


def _named(name: str) -> Checkpoint:
    checkpoint = named(name)
    assert checkpoint is not None, f"{name} is published"
    return checkpoint


if __name__ == "__main__":
    main(sys.argv[1:])
