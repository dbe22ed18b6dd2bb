"""What a run of a model takes on a device of some memory: the settings that are chosen, and the
YAML file with reasons.

A plan is made with a profile's speeds, and nothing is measured: the first settings of `LADDER` that
fit are taken.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lema.config import LemaConfig
from lema.config.units import human_bytes, human_count
from lema.data.forms import beyond_positions, longest_row, num_positions
from lema.errors import MemoryLimitError
from lema.model.skeleton import find_layers
from lema.plan.blueprint import draw_up
from lema.plan.cost import crossover
from lema.plan.machine import PROFILES, Machine
from lema.plan.planner import planner_of

__all__ = ["BASE", "Choice", "choices", "profile_for", "size_text", "yaml_lines"]

GB = 10**9
MB = 10**6
BASE: dict[str, Any] = {"batch_size": 16, "lora_rank": 16, "lora_alpha": 32, "learning_rate": 1e-4}
# Rows of a step that are computed at once, then one row with fewer logits at once and one layer
# less on the device.
LADDER: tuple[dict[str, int], ...] = (
    {"micro_batch_size": 4},
    {"micro_batch_size": 1, "loss_chunk_tokens": 256, "prefetch_depth": 1},
)
LONG = 16384  # tokens: rows of more go through layers in chunks where they do not fit
LONG_STEP = 131072  # tokens of a step of such rows, or one row
# of these, one row at once in any case
LONG_LADDER: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1, "loss_chunk_tokens": 256, "prefetch_depth": 1},
)
HOST = 0.5  # of the profile's host memory, which weights and activations may take


@dataclass(frozen=True)
class Choice:
    """Settings that fit, and what the plan says of them."""

    settings: dict[str, Any]  # beside model, data and output
    profile: str  # whose speeds the plan has
    device_bytes: int  # at the peak
    host_bytes: int
    residents: int  # layers that stay on the device
    cached: int  # layers that stay in host memory
    layers: int
    layer_bytes: int  # of the largest, as it lies in a slot
    model_bytes: int  # of the model's files
    parameters: int
    adapter_parameters: int
    experts: bool  # whether the model has stacked experts
    tokens_per_second: float  # predicted
    bottleneck: str  # computing, the link or the disk
    tokens: int  # of a step
    hidden_from: float | None  # tokens of a step, from which on streaming takes no time; None: any
    # that go through a layer at once, where rows are long; None: whole rows
    chunk: int | None = None
    notes: tuple[str, ...] = ()  # on what the settings leave open


def size_text(nbytes: int) -> str:
    """Return a number of bytes as settings write it, rounded down to whole MB below 1 GB."""
    return f"{nbytes / GB:g}GB" if nbytes >= GB else f"{max(1, nbytes // MB)}MB"


def profile_for(device_memory: int) -> str:
    """Return the profile whose device is most like one of so many bytes."""
    return "t4" if device_memory <= 16 * GB else "4090" if device_memory <= 48 * GB else "h200"


def choices(
    directory: Path,
    memories: Sequence[int],
    profile: str | None = None,
    host_memory: str | None = None,
    modalities: Literal["text", "all"] = "text",
    max_length: int | None = None,
) -> Iterator[Choice | MemoryLimitError]:
    """Yield for each amount of device memory, which rise, what is chosen for the model in
    `directory`, or why nothing fits. The model is looked at once for all of them.

    Args:
        directory: the model's.
        memories: bytes of device memory.
        profile: whose speeds the plan has; None: the one that is most like the device.
        host_memory: what the settings say of it; None: half of the profile's.
        modalities: what the rows have: all, if they have images.
        max_length: tokens of the longest row; None: 1024, or the model's positions if these are
            fewer.

    Raises:
        ModelError: what the model takes cannot be told.
    """
    common = {"device": "cpu", "lora_target_parameters": list[str](), **BASE}
    common["modalities"] = modalities
    blueprint = draw_up(LemaConfig(str(directory), **common), elsewhere=True)
    asked = LemaConfig(str(directory), max_length=max_length)
    common["max_length"] = longest_row(max_length, num_positions(blueprint.model.config, asked))
    is_long = (max_length or 0) > LONG
    if is_long:
        common["gradient_checkpointing"] = True
        common["sequence_chunk"] = "auto"
    cache: dict[Any, Any] = {}
    for memory in memories:
        name = profile or profile_for(memory)
        machine = replace(PROFILES[name], device_memory=memory)
        choice: Choice | MemoryLimitError | None = None
        for changes in LONG_LADDER if is_long else LADDER:
            host = host_memory or f"{int(HOST * machine.host_memory / GB)}GB"
            memories_of = {"device_memory": size_text(memory), "host_memory": host}
            settings = {**memories_of, **BASE, "max_length": common["max_length"], **changes}
            if is_long:
                settings["batch_size"] = max(1, LONG_STEP // common["max_length"])
            config = LemaConfig(str(directory), **{**common, **settings})
            try:
                planner = planner_of(config, machine, blueprint=blueprint, workload_cache=cache)
                choice = _choice(planner, settings, name, machine)
            except MemoryLimitError as error:
                choice = error
                continue
            # A head that was left whole counts with what is outside the layers from now on.
            blueprint = blueprint if planner.blueprint.pieces else planner.blueprint
            break
        assert choice is not None
        yield choice


def _choice(planner: Any, settings: dict[str, Any], profile: str, machine: Machine) -> Choice:
    needs = planner.needs()
    drawn = planner.blueprint
    step = planner.simulated(needs.demand, needs.allocation)
    if sum(needs.device.values()) > machine.device_memory:
        raise MemoryLimitError("the plan needs more than the device has", where="device_memory")
    stack = find_layers(drawn.model)[1]
    experts = any(
        parameter.ndim > 2
        for name, parameter in stack.named_parameters()
        if "lora_" not in name and "conv" not in name
    )
    if planner.chooses_chunk:
        boundaries = needs.allocation.boundaries
        settings = {**settings, "sequence_chunk": "auto", "boundary_activations": boundaries}
    return Choice(
        settings | ({"lora_target_parameters": []} if experts else {}),
        profile,
        sum(needs.device.values()),
        sum(needs.host.values()),
        len(needs.allocation.residents),
        len(needs.allocation.host_cached),
        len(drawn.layers),
        # of layers whole, or of a group of their experts
        max(nbytes for _, nbytes in needs.demand.leased),
        drawn.stored_bytes,
        drawn.parameters,
        drawn.adapter_parameters,
        experts,
        planner.shape.tokens / step.seconds,
        {"compute": "computing", "link": "the link", "disk": "the disk"}[step.bottleneck],
        planner.shape.tokens,
        crossover(needs.demand, needs.allocation, machine.speeds, planner.shape.tokens),
        planner.shape.micro_batch.chunk,
        tuple(beyond_positions(drawn.model.config, planner.config)),
    )


def _long_lines(choice: Choice) -> Iterator[str]:
    """Yield the lines for rows that go through layers in chunks."""
    settings = choice.settings
    cut = "as they are" if choice.chunk is None else f"in chunks of {choice.chunk:,} tokens"
    yield ""
    yield "# Long rows: auto takes the largest chunks with which a step fits into device_memory,"
    yield f"# and whole rows if they fit. By this plan rows go through layers {cut}."
    yield f"sequence_chunk: {settings['sequence_chunk']}"
    yield "gradient_checkpointing: true"
    places = {"device": "on the device", "host": "in host memory", "disk": "on the disk"}
    place = places[settings["boundary_activations"]]
    yield f"# The inputs of all layers, which the backward needs, wait {place}."
    yield f"boundary_activations: {settings['boundary_activations']}"


def yaml_lines(
    choice: Choice,
    model: str,
    data: str,
    output: str,
    command: str,
    needs: str = "",
    *,
    rows: Sequence[str] = (),
    host_reason: str | None = None,
    learning_rate: float = BASE["learning_rate"],
) -> Iterator[str]:
    """Yield the lines of a file for `lema train`. A comment above each part gives the reason for
    the choice. `rows` are lines on the rows of the data, `host_reason` is where `host_memory` is
    from; None: from the profile. `learning_rate` is that of the objective of these rows.
    """
    settings = choice.settings | {"learning_rate": learning_rate}
    host = human_bytes(PROFILES[choice.profile].host_memory)
    size = f"{human_count(choice.parameters)} parameters"
    most = human_bytes(choice.device_bytes)
    trained = human_count(choice.adapter_parameters)
    slot = human_bytes(choice.layer_bytes)
    plain = "LEMA downloads a hub id once. A directory is used as it is."
    stay = "stays" if choice.residents == 1 else "stay"
    are = "is" if choice.cached == 1 else "are"
    yield f"# Made by: {command}"
    yield (
        "# Change any line. `lema plan` predicts memory and time on your machine, and `lema "
        "train` runs the file."
    )
    yield ""
    yield f"# {choice.layers} layers, {size}, {human_bytes(choice.model_bytes)} of files."
    yield f"# Before it can stream, it needs {needs}." if needs else f"# {plain}"
    yield f"model_name_or_path: {_text(model)}"
    yield ""
    yield (
        "# Rows of text, prompts with completions, or messages. `lema data` shows which tokens "
        "are trained on."
    )
    yield "# Longer rows are cut at max_length tokens. The plan below is for rows of this length."
    yield from rows
    yield f"train_data: {_text(data)}"
    yield f"max_length: {settings['max_length']}"
    yield f"output_dir: {_text(output)}"
    yield ""
    if choice.residents or host_reason is None:
        yield f"# The plan uses at most {most}: slots of {slot} for layers that stream,"
        yield f"# and {_layers(choice.residents)} that {stay} on the device."
    else:
        yield f"# The plan uses at most {most}, with slots of {slot} for layers that stream."
    yield f"device_memory: {settings['device_memory']}"
    yield ""
    used = f"The plan uses {human_bytes(choice.host_bytes)} of it."
    if choice.cached or host_reason is None:
        reason = host_reason or f"Half of the {host} of the profile {choice.profile}."
        yield f"# {reason} It keeps {_layers(choice.cached)} in host memory,"
        yield f"# which {are} then not read from the disk. {used}"
    else:
        yield f"# {host_reason} {used}"
    yield f"host_memory: {settings['host_memory']}"
    yield ""
    yield "# LEMA reads a layer once for all rows of a step, so larger steps make reading cheaper."
    yield (
        f"# Predicted, not measured: {choice.tokens_per_second:,.0f} tokens/s, limited by "
        f"{choice.bottleneck}."
    )
    yield f"# Streaming costs nothing {_hidden(choice)}; this one has {choice.tokens:,}."
    yield f"batch_size: {settings['batch_size']}"
    yield f"micro_batch_size: {settings['micro_batch_size']}"
    if "sequence_chunk" in settings:
        yield from _long_lines(choice)
    if "prefetch_depth" in settings:
        yield ""
        yield (
            "# Memory is short: one layer is read ahead instead of two, and fewer logits exist "
            "at once."
        )
        yield "# Both cost some time. Results change only by rounding."
        yield f"prefetch_depth: {settings['prefetch_depth']}"
        yield f"loss_chunk_tokens: {settings['loss_chunk_tokens']}"
    yield ""
    yield (
        f"# Every linear module of the layers has an adapter: {trained} parameters train, with "
        "AdamW."
    )
    mantissa, _, exponent = f"{learning_rate:e}".partition("e")
    rate = f"{float(mantissa):g}e{int(exponent)}"
    yield f"# Start with rank 16 and {rate}. docs/adapters.md describes the other options."
    for name in ("lora_rank", "lora_alpha"):
        yield f"{name}: {settings[name]}"
    yield f"learning_rate: {learning_rate:.8f}".rstrip("0")
    if choice.experts:
        yield ""
        yield (
            "# Experts have no adapters, because these would take many times the memory of all "
            "others."
        )
        yield "# Remove this line to train them, too."
        yield "lora_target_parameters: []"


def _hidden(choice: Choice) -> str:
    if choice.hidden_from is None:
        return "in a step of any size"
    return f"in steps of {math.ceil(choice.hidden_from):,} tokens or more"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _text(value: str) -> str:
    return (
        value
        if all(character.isalnum() or character in "/._-" for character in value)
        else json.dumps(value, ensure_ascii=False)
    )
