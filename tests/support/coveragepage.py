"""Makes docs/coverage.md: what becomes of named public checkpoints, tried on tiny models in their published layout.

    PYTHONPATH=.:backends:tools python tests/support/coveragepage.py > docs/coverage.md

Nothing is downloaded. A checkpoint is its model type, its published form and, where they are known, its sizes. A tiny
model of the type is written in that form and opened: names, dtypes and scales are mapped, and the model is run up to
its layers and from them to its logits. Bytes are those of the tiny model's tensors, by their names, for the real sizes.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch
from publishedforms import write_published
from tinyconfig import tiny_config
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from lema.errors import LemaError
from lema.model import meta_model, read_config
from lema.model.skeleton import find_layers
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex
from lema.storage.slices import AssembledRecord
from lema_tools.models.checkpoints import CHECKPOINTS, Checkpoint, config_of
from lema_tools.survey.attempt import try_model

__all__ = ["CHECKPOINTS", "Checkpoint", "Found", "page", "try_checkpoint"]


@dataclass(frozen=True)
class Found:
    """What becomes of it: `refused` says why it does not stream, `how` what is done to what is read."""

    refused: str = ""
    how: str = ""
    wire: float = 0.0
    slot: float = 0.0


@cache
def _tried(model_type: str, form: str) -> tuple[str, str, dict[str, float]]:
    """Return why a tiny model is refused, what is done to what is read, and the bytes per element by kind of name."""
    if model_type not in CONFIG_MAPPING:
        return f"transformers {version('transformers')} has no type {model_type!r}", "", {}
    with tempfile.TemporaryDirectory() as directory:
        published = write_published(tiny_config(model_type), form, Path(directory))
        model = meta_model(read_config(published), torch.float32)
        try:
            names = map_names(model, GlobalBinaryIndex(published))
        except LemaError as error:
            return error.what.replace("\n", " ")[:200], "", {}
    stored = names.stored.items()
    widths = {_kind(name): record.nbytes / max(1, prod(record.shape)) for name, record in stored}
    row = try_model(model, model_type)
    assembled = any(isinstance(record, AssembledRecord) for _, record in stored)
    how = ", pieces put together as they are read" * assembled + ", expanded when it is leased" * bool(names.quantized)
    return row.reason if row.streams is False else "", how, widths


@cache  # the page and its test ask for each
def try_checkpoint(checkpoint: Checkpoint) -> Found:
    """Try a tiny model of a checkpoint, and count bytes for its sizes."""
    refused, how, widths = _tried(checkpoint.model_type, checkpoint.form)
    if refused or checkpoint.sizes is None:
        return Found(refused, how)
    model = meta_model(config_of(checkpoint), torch.bfloat16)
    name, layers = find_layers(model)
    counts, sizes = [], []
    for number, layer in enumerate(layers):
        inside = [(f"{name}.{number}.{own_name}", one.numel()) for own_name, one in layer.named_parameters()]
        counts.append(sum(count for _, count in inside))
        sizes.append(sum(count * widths.get(_kind(full), 2.0) for full, count in inside))
    return Found("", how, sum(sizes) / sum(counts), max(sizes) / 1e9)


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    rows = [(checkpoint, try_checkpoint(checkpoint)) for checkpoint in CHECKPOINTS]
    streaming = sum(not found.refused and not checkpoint.needs for checkpoint, found in rows)
    needing = sum(not found.refused and bool(checkpoint.needs) for checkpoint, found in rows)
    made_with = ", ".join(f"{package} {version(package).partition('+')[0]}" for package in ("transformers", "peft"))
    yield "# Published checkpoints"
    yield ""
    yield f"Made by `python tests/support/coveragepage.py > docs/coverage.md`, with {made_with}."
    yield ""
    yield from INTRODUCTION.splitlines()
    yield ""
    refused = len(rows) - streaming - needing
    yield f"{len(rows)} in all: {streaming} stream as published, {needing} need something first, {refused} are refused."
    yield ""
    yield "| checkpoint | model type | form | becomes | wire, bytes per parameter | largest slot, GB |"
    yield "|---|---|---|---|---|---|"
    for checkpoint, found in rows:
        answer = f"streams as published{found.how}"
        if checkpoint.needs:
            answer = f"needs {checkpoint.needs}"
        if found.refused:
            answer = f"refused: {found.refused}"
        sizes = (f"{found.wire:.2f}", f"{found.slot:.2f}") if found.wire else ("", "")
        cells = (checkpoint.name, f"`{checkpoint.model_type}`", checkpoint.form, answer, *sizes)
        yield f"| {' | '.join(cells)} |"


INTRODUCTION = """\
What was checked is a tiny model of the type in the published layout: `transformers` writes it under the names it reads,
the weights are quantised as the publisher's are, with their scales and `quantization_config`, and LEMA opens it, maps
every tensor, and runs the model up to its layers and from them to its logits. `tests/model/test_published_forms.py`
trains one model of each form for two steps: loss and gradients are bitwise those of PEFT on the weights that
`transformers` dequantises. No published file was read, and which linears a publisher left unquantised was not looked up
for each.

Bytes are those of the decoder layers, without embeddings and head: what a tensor of that name takes in the tiny model,
for the sizes of the checkpoint. Where no bytes are told, its sizes are not known here; where the class of its config
is documented with the checkpoint, the sizes are its defaults. The largest slot is the largest layer as it crosses to
the device; what is quantised takes its expanded size there as well while it is leased.

Not in the table, because no config of theirs is known here: DeepSeek-V4.1-Flash (a V4 with Engram tables) and
Mistral-Large-3. That Qwen3.8-Flash-Next is of the type it has here is told by the name of its table alone (95 GiB in
one layer, of which rows are read).
"""


def main() -> None:
    """Print the page."""
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = list(page())
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
