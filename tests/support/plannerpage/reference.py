"""What `lema plan` says of what a person chose on the planner's page."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lema.config import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan.cost import Speeds
from lema.plan.machine import PROFILES
from lema.plan.plan import plan_with
from lema.plan.planner import planner_of
from lema_tools.models.checkpoints import named
from plannerpage.hollowforms import AS_PUBLISHED, write_config, write_form
from plannerpage.modelfacts import CHUNKS

__all__ = ["COMPARED", "figures_of", "relative_differences"]

COMPARED = (
    *("tokens", "devicePeak", "hostPeak", "tokensPerSecond", "crossover", "hours", "cost"),
    *("written", "device", "host", "disk"),
)


@dataclass(frozen=True)
class _Counts:
    rows: int
    tokens: int


@dataclass(frozen=True)
class _Rows:
    """Rows of which only their number and their tokens are known."""

    counts: _Counts

    def __len__(self) -> int:
        return self.counts.rows


def figures_of(inputs: dict[str, Any], text: str | None, folder: Path) -> dict[str, Any]:
    """Return the figures that `lema plan --json` has for the file of settings that the page wrote.

    Args:
        inputs: what a person chose.
        text: the file; None: the page wrote none, because nothing fits, and the plan is of what it
            tried last.
        folder: where checkpoints without weights are kept from call to call, by model and form.
    """
    settings = _tried(inputs) if text is None else yaml.safe_load(text)
    profile = PROFILES[inputs["card"]]
    machine = replace(
        profile,
        device_memory=max(profile.device_memory, inputs["deviceMemory"]),
        host_memory=max(profile.host_memory, inputs["hostMemory"]),
        speeds=Speeds(inputs["diskSpeed"], profile.speeds.link),
    )
    directory = _checkpoint(inputs, folder)
    # The directory has the weights that quantize_base makes.
    assert settings.pop("quantize_base", AS_PUBLISHED) == inputs["form"]
    config = LemaConfig(**{**settings, "model_name_or_path": str(directory), "device": "cpu"})
    rows = inputs["dataRows"]
    data: Any = _Rows(_Counts(rows, round(rows * inputs["dataLength"])))
    try:
        plan = plan_with(planner_of(config, machine), data=data)
    except MemoryLimitError:
        return {"fits": False}
    epoch = plan.epoch
    if not plan.fits or epoch is None:
        return {"fits": False}
    disk = plan.memory.disk
    spilled = disk["boundaries"] + disk["saved"]
    return {
        "fits": True,
        "tokens": plan.tokens,
        "devicePeak": plan.step.device_peak,
        "hostPeak": plan.host_peak,
        "tokensPerSecond": plan.tokens_per_second,
        "crossover": plan.crossover,
        "hours": epoch.run_hours,
        "cost": inputs["price"] * epoch.run_hours,
        "written": epoch.run_steps * spilled + disk["checkpoint"],
        "device": plan.memory.device,
        "host": plan.memory.host,
        "disk": disk,
    }


def _checkpoint(inputs: dict[str, Any], folder: Path) -> Path:
    """Return the directory of a checkpoint in a form, which is written where it is not yet."""
    form: str = inputs["form"]
    model: str = inputs["model"]
    place = folder / model / form
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as scratch:
            written = Path(scratch) / form
            if "config" in inputs:
                write_config(inputs["config"], form, written)
            else:
                checkpoint = named(model)
                assert checkpoint is not None, f"{model} is published"
                assert write_form(checkpoint, form, written) is not None, f"it has a form {form}"
            with suppress(OSError):  # another process has written it meanwhile
                written.rename(place)
    return place / form


def _tried(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the page tries last."""
    return {
        "train_data": "data.jsonl",
        "output_dir": "output",
        "objective": inputs["objective"],
        "max_length": inputs["length"],
        "batch_size": inputs["rows"],
        "device_memory": inputs["deviceMemory"],
        "host_memory": inputs["hostMemory"],
        "loss_chunk_tokens": CHUNKS[-1],
        "lora_rank": inputs["rank"],
        "lora_target_parameters": list[str](),
        "experts_per_slot": None,
        **({} if inputs["form"] == AS_PUBLISHED else {"quantize_base": inputs["form"]}),
    }


def relative_differences(page: dict[str, Any], plan: dict[str, Any]) -> dict[str, float]:
    """Return how far each figure of the page is from the plan's, relative to it; parts of memory
    relative to their sum."""
    if page["fits"] != plan["fits"]:
        return {"fits": 1.0}
    if not page["fits"]:
        return {}
    differences = {}
    for name in COMPARED:
        here, there = page[name], plan[name]
        if isinstance(there, dict):
            total = max(1, sum(there.values()))
            for part, size in there.items():
                differences[f"{name}.{part}"] = abs(here[part] - size) / total
        else:
            differences[name] = abs((here or 0) - (there or 0)) / max(abs(there or 0), 1e-9)
    return differences
