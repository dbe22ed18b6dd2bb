"""Plans of every type that streams, and of large models as they are published, on fixed machines, as JSON.

    python tests/support/plansnapshots.py FILE [--few]

Two files, made before and after a change of `lema/plan`, are equal to the byte (`cmp`) where no plan
has changed. No weights are read and nothing is measured, so that nothing depends on the machine that
this runs on. Each type has what a step needs with one of the settings, and every fortieth whole plans with
all of them, and plans of texts, of rows and of weights that train; with `--few` only these and one large
model have some.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from everytype import STREAMED
from hollowmodel import write_hollow
from tinyconfig import tiny_config
from transformers import PreTrainedModel
from transformers.utils import logging

from lema import LemaConfig
from lema.data.forms import num_positions
from lema.engine.oom import Shortage
from lema.errors import LemaError
from lema.plan import make_plan
from lema.plan.advice import advise
from lema.plan.blueprint import draw_up
from lema.plan.inference.capacity import plan_rows, plan_texts
from lema.plan.machine import Machine, machine_state_of, profile
from lema.plan.plan import brief
from lema.plan.planner import Planner, fitted_planner, planner_of
from lema.plan.work.step import by_arithmetic, step_shape
from lema_cpu import CpuBackend
from lema_tools.models.checkpoints import named
from lema_tools.models.published import write_hollow as write_published

LARGE = (
    "Llama-3.1-8B-Instruct",
    "Qwen3-30B-A3B",
    "gpt-oss-20b",
    "gemma-3-27b-it",
    "Mixtral-8x7B-Instruct",
    "DeepSeek-V3",
    "Qwen2.5-72B-Instruct-AWQ",
)
FEW = 1  # of the large models
EVERY = 40  # of the types one has plans of every kind
SMALL_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("4090", {"device_memory": "1MB"}),
    ("4090", {"device_memory": "auto", "gradient_checkpointing": "auto"}),
    ("cpu", {"device_memory": None, "gradient_checkpointing": False}),
    (
        "4090",
        {"device_memory": "650KB", "experts_per_slot": "auto", "lora_target_parameters": []},
    ),
    ("4090", {"device_memory": "600KB"}),
)
LARGE_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("4090", {"device_memory": "auto"}),
    ("4090", {"device_memory": "10GB", "host_memory": "40GB"}),
    ("t4", {"device_memory": "auto", "experts_per_slot": "auto"}),
    ("h200", {"device_memory": "80GB", "objective": "dpo"}),
    ("h200", {"device_memory": "auto", "activation_offloading": True}),
    ("4090", {"device_memory": "auto", "boundary_activations": "disk", "packing": True}),
    ("cpu", {"device_memory": None, "strategy": "resident"}),
    ("trn1", {"device_memory": "auto", "tokens_per_step": "auto", "batch_size": None}),
    ("4090", {"device_memory": "20GB", "micro_batch_size": 1, "head": "stream"}),
)
SHAPE = {"lora_rank": 4, "batch_size": 8, "max_length": 64, "save_steps": 0}
LARGE_SHAPE = {"lora_rank": 16, "batch_size": 16, "max_length": 1024, "save_steps": 0}


def snapshots(scratch: Path, *, few: bool = False) -> Iterator[tuple[str, object]]:
    """Yield the names of plans, and what each says.

    Args:
        scratch: a folder for models without weights.
        few: a part of them.
    """
    for number, kind in enumerate(STREAMED):
        all_settings = number % EVERY == 0
        if few and not all_settings:
            continue
        directory = write_hollow(scratch / kind, tiny_config(kind))
        if not all_settings:
            name, settings = SMALL_SETTINGS[number % len(SMALL_SETTINGS)]
            yield f"{kind} {name} {settings}", _needs(directory, SHAPE | settings, profile(name))
            continue
        for name, settings in SMALL_SETTINGS:
            yield f"{kind} {name} {settings}", _plan(directory, SHAPE | settings, profile(name))
        limits = SHAPE | {"device_memory": "1200KB"}
        yield from _other_plans(kind, directory, limits, "4090")
    for model in LARGE[: FEW if few else None]:
        checkpoint = named(model)
        assert checkpoint is not None
        directory = write_published(checkpoint, scratch / model)
        for name, settings in LARGE_SETTINGS:
            told = _plan(directory, LARGE_SHAPE | settings, profile(name))
            yield f"{model} {name} {settings}", told
        limits = LARGE_SHAPE | {"device_memory": "20GB"}
        yield from _other_plans(model, directory, limits, "4090")


def _config(directory: Path, settings: dict[str, Any]) -> LemaConfig:
    counts = {} if settings["batch_size"] is None else {"batch_size": settings["batch_size"]}
    settings = {name: value for name, value in settings.items() if name != "batch_size"}
    return LemaConfig(str(directory), device="cpu", **settings, **counts)


def _plan(directory: Path, settings: dict[str, Any], machine: Machine) -> object:
    """Return a plan as JSON, and with some settings what more memory would give."""

    def told() -> object:
        plan, planner = make_plan(_config(directory, settings), machine, price=1.0)
        room = None if settings["device_memory"] else asdict(plan.room)
        plan.__dict__["room"] = room  # or it would be found out, which takes as long as many plans
        shape = asdict(planner.shape)
        return plan.to_dict() | {"settings": planner.chosen, "shape": shape, "room": room}

    return _or_refused(told)


def _needs(directory: Path, settings: dict[str, Any], machine: Machine) -> object:
    """Return what is chosen of a plan, and what it takes of memory."""

    def told() -> object:
        planner = planner_of(_config(directory, settings), machine)
        needs = planner.needs()
        taken = {"device": needs.device, "host": needs.host, "seconds": needs.seconds}
        return taken | {"settings": planner.chosen, "allocation": asdict(needs.allocation)}

    return _or_refused(told)


def _other_plans(
    kind: str, directory: Path, settings: dict[str, Any], name: str
) -> Iterator[tuple[str, object]]:
    """Yield plans of texts and of rows, of an open model, of weights that train, and advice."""
    config = _config(directory, settings)
    planners: list[Planner] = []

    def opened() -> object:
        planners.append(_opened(config, profile(name)))
        return brief(planners[0]) | planners[0].chosen

    yield f"{kind} opened", _or_refused(opened)
    for planner in planners:
        texts: dict[str, Any] = {"rows": None, "most": 64, "current_allocation": None}
        yield (
            f"{kind} texts",
            _or_refused(lambda: asdict(plan_texts(planner, 24, 8, host=False, **texts))),  # noqa: B023
        )
        yield (
            f"{kind} texts whose keys and values are on the host",
            _or_refused(lambda: asdict(plan_texts(planner, 24, 8, host=True, **texts))),  # noqa: B023
        )
        yield (
            f"{kind} rows",
            _or_refused(lambda: asdict(plan_rows(planner, 48, 64, at_once=8, **_rows(planner)))),  # noqa: B023
        )
        yield f"{kind} advice", _or_refused(lambda: _advice(planner))  # noqa: B023
    yield f"{kind} weights that train", _or_refused(lambda: _full(config, profile(name)))


def _rows(planner: Planner) -> dict[str, Any]:
    return {"rows": None, "current_allocation": planner.needs().allocation}


def _advice(planner: Planner) -> str:
    allocation = planner.needs().allocation
    batch = planner.shape.micro_batch
    return advise(planner, allocation, Shortage("a layer", batch.rows, batch.length, 2))


def _opened(config: LemaConfig, machine: Machine) -> Planner:
    """Return the planner of a model as if it were open, with seconds by arithmetic."""
    blueprint = draw_up(config, elsewhere=True)
    shape = step_shape(config, num_positions(blueprint.model.config))
    state = machine_state_of(config, machine)
    planner = Planner(config, blueprint, state, None, None, shape, backend=CpuBackend())
    itemsize = blueprint.model.dtype.itemsize
    work = planner.work(shape.micro_batch)
    timings = by_arithmetic(work, blueprint.layers, machine, itemsize)
    planner = fitted_planner(replace(planner, timings=timings), trains=True)
    if not planner.blueprint.pieces:
        blueprint.head.keep_whole(blueprint.tables)
    return planner


def _full(config: LemaConfig, machine: Machine) -> object:
    """Return what a phase needs that trains all weights of the upper layers, and the head."""

    def upper(model: PreTrainedModel) -> Callable[[str], bool]:
        names = [name for name, _ in model.named_parameters()]
        chosen = frozenset(names[len(names) // 2 :])
        return chosen.__contains__

    host = machine.host_memory
    needs = planner_of(
        config.model_copy(update={"device_memory": None}),
        replace(machine, host_memory=host if "KB" in str(config.device_memory) else 64 * host),
        chosen=upper,
        device_memory=None,
        strict=False,
    ).needs()
    return {
        "device": needs.device,
        "host": needs.host,
        "mapped": needs.mapped,
        "traffic": asdict(needs.traffic(10)),
        "seconds": needs.seconds,
        "settings": needs.planner.chosen,
        "checkpoint": needs.planner.blueprint.checkpoint_bytes,
    }


def _or_refused(told: Callable[[], object]) -> object:
    try:
        return told()
    except LemaError as error:
        return f"{type(error).__name__}: {error}"


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset | set) else str(value)


def main(target: Path, *, few: bool) -> None:
    """Write the plans to a file."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    with TemporaryDirectory() as scratch:
        plans = {
            name: json.loads(json.dumps(plan, default=_plain).replace(scratch, "SCRATCH"))
            for name, plan in snapshots(Path(scratch), few=few)
        }
    target.write_text(json.dumps(plans, indent=1, sort_keys=True))
    refused = sum(isinstance(plan, str) for plan in plans.values())
    sys.stdout.write(f"{len(plans)} plans, of them {refused} that refuse\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), few="--few" in sys.argv)
