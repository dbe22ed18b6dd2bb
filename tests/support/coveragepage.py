"""Makes docs/coverage.md: which public checkpoints stream, tested on tiny models in their published
layout.

    PYTHONPATH=.:backends:tools python tests/support/coveragepage.py > docs/coverage.md

Nothing is downloaded. A checkpoint is its model type, its published form and, where they are known,
its sizes. A tiny model of the type is written in that form and opened: names, dtypes and scales are
mapped, and the model is run up to its layers and from them to its logits. Bytes are those of the
tiny model's tensors, by their names, for the real sizes.
"""

import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch
from mutations import ACCEPTED, REFUSED
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
from lema_tools.models.checkpoints import CHECKPOINTS, PARAMETERS, Checkpoint, config_of
from lema_tools.survey.attempt import try_model

__all__ = ["CHECKPOINTS", "Checkpoint", "Found", "page", "parameters_of", "try_checkpoint"]


@dataclass(frozen=True)
class Found:
    """The result: `refused` says why it does not stream, `how` says how its tensors are read."""

    refused: str = ""
    how: str = ""
    parameters: float = 0.0  # billions
    wire: float = 0.0
    slot: float = 0.0


@cache
def _tried(model_type: str, form: str) -> tuple[str, str, dict[str, float]]:
    """Return why a tiny model is refused, how its tensors are read, and the bytes per element by
    kind of name.
    """
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
    how = (
        ", pieces are assembled when they are read" * assembled
        + ", layers are expanded when they are leased" * bool(names.quantized)
    )
    return row.reason if row.streams is False else "", how, widths


@cache  # the page and its test ask for each
def try_checkpoint(checkpoint: Checkpoint) -> Found:
    """Try a tiny model of a checkpoint, and count bytes for its sizes."""
    refused, how, widths = _tried(checkpoint.model_type, checkpoint.form)
    if refused or checkpoint.sizes is None:
        return Found(refused, how)
    model = meta_model(config_of(checkpoint), torch.bfloat16)
    name, layers = find_layers(model)
    counts = []
    sizes = []
    for number, layer in enumerate(layers):
        inside = [
            (f"{name}.{number}.{own_name}", one.numel())
            for own_name, one in layer.named_parameters()
        ]
        counts.append(sum(count for _, count in inside))
        sizes.append(sum(count * widths.get(_kind(full), 2.0) for full, count in inside))
    return Found("", how, parameters_of(model), sum(sizes) / sum(counts), max(sizes) / 1e9)


def parameters_of(model: torch.nn.Module) -> float:
    """Count the parameters of a model, in billions; tied ones count once."""
    return sum(one.numel() for one in model.parameters()) / 1e9


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    rows = [(checkpoint, try_checkpoint(checkpoint)) for checkpoint in CHECKPOINTS]
    streaming = sum(not found.refused and not checkpoint.needs for checkpoint, found in rows)
    needing = sum(not found.refused and bool(checkpoint.needs) for checkpoint, found in rows)
    made_with = ", ".join(
        f"{package} {version(package).partition('+')[0]}" for package in ("transformers", "peft")
    )
    yield "# Published checkpoints"
    yield ""
    yield f"Made by `python tests/support/coveragepage.py > docs/coverage.md`, with {made_with}."
    yield ""
    yield from INTRODUCTION.splitlines()
    yield ""
    refused = len(rows) - streaming - needing
    yield (
        f"{len(rows)} in all: {streaming} stream as published, {needing} need a change first, "
        f"{refused} is refused."
    )
    yield ""
    yield (
        "| checkpoint | model type | form | result | parameters | wire, bytes per parameter | "
        "largest slot, GB |"
    )
    yield "|---|---|---|---|---|---|---|"
    for checkpoint, found in rows:
        answer = f"streams as published{found.how}"
        if checkpoint.needs:
            answer = f"needs {checkpoint.needs}"
        if found.refused:
            answer = f"refused: {found.refused}"
        count = f"{found.parameters:.1f}" + ", unverified" * (checkpoint.name not in PARAMETERS)
        sizes = (count, f"{found.wire:.2f}", f"{found.slot:.2f}") if found.wire else ("", "", "")
        cells = (checkpoint.name, f"`{checkpoint.model_type}`", checkpoint.form, answer, *sizes)
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from differences()


def differences() -> Iterator[str]:
    """Yield the lines of the page on what LEMA does otherwise than `from_pretrained`."""
    yield from DIFFERENCES.splitlines()
    yield ""
    for sentence in (*REFUSED.values(), *ACCEPTED.values(), *OTHERWISE):
        yield from textwrap.wrap(
            f"- {sentence}", 120, subsequent_indent="  ", break_on_hyphens=False
        )


INTRODUCTION = """\
A tiny model of the type was tested in the published layout. `transformers` writes it with the names that it reads, and
the weights are quantised as the publisher's are, with their scales and `quantization_config`. LEMA opens the model,
maps every tensor, and runs the model up to its layers and from them to its logits.
`tests/model/test_published_forms.py` trains one model of each form for two steps: loss and gradients are bitwise those
of PEFT on the weights that `transformers` dequantises, or, of gptq and awq, on those that a slow reader of the packing
finds. No published weights were read, and it was not checked which linear modules each publisher left unquantised.
`tests/model/test_packed_forms.py` and `tests/model/test_compressed_forms.py` have the forms that are not in the table:
other groups and bits of gptq and awq, what AutoRound packs as these, and asymmetric integers of compressed-tensors.

Parameters and bytes come from the sizes in the checkpoint's config.json, where they are known. *Parameters* counts the
model that `transformers` builds from them, in billions. `tests/model/test_coverage_page.py` compares the number with
the publisher's within 2%; *unverified* means that the publisher's number is not known here. *Wire* and *largest slot*
count the decoder layers without embeddings and head, with the bytes that a tensor of that name takes in the tiny model.
The largest slot is the largest layer as it is copied to the device. A quantised layer also takes its expanded size
while it is leased.

DeepSeek-V4.1-Flash (a V4 with Engram tables) and Mistral-Large-3 are not in the table, because their configs are not
known here. Qwen3.8-Flash-Next has its type here only because of the name of its table (95 GiB in one layer, of which
LEMA reads rows).
"""


DIFFERENCES = """\
## Where LEMA differs from `from_pretrained`

`tests/loader/test_oracle.py` changes checkpoints, their configs and the rows that they read in more than 200 ways, in
18 model types: fields, ties, dtypes, names and files, rotary tables, packs and padding, and the forms in which weights
are quantised. Each is opened by LEMA and by `from_pretrained` with PEFT, and the loss, every adapter gradient,
generated tokens and every tensor of the merged model are the same bits in fp32, but for what is listed here.
"""

# Further differences, of calls that the oracle makes alike.
OTHERWISE = (
    "Of compressed-tensors, numbered groups (`actorder: group`), which newer versions of "
    "the library refuse, are "
    "expanded, and asymmetric integers in experts that are merged, with which "
    "`transformers` fails. Merged experts "
    "have the dtype of the model; in `transformers` they keep that of their scales.",
    "In experts that are merged, blocks of fp8 at the edge of a weight may be smaller; "
    "`transformers` expands them "
    "wrongly.",
    "What `fusion_config` in `config.json` fuses is not fused: modules of towers, through "
    "which no text goes. A merged "
    "model has the published weights, as `transformers` writes them.",
    "Blocks of bitsandbytes' 4 bits that go on in the next row of a weight are expanded as "
    "on a GPU; on a CPU "
    "bitsandbytes 0.50 expands them wrongly.",
    "`use_cache: false` in `config.json`, which trainers leave there, does not keep `lema "
    "generate` from using a cache "
    "of keys and values: without one every token would read the whole text again.",
    "Layers may keep something from call to call, such as a counter, as long as it is "
    "their own. What several layers "
    "share, what a later step differentiates through, and a buffer of the checkpoint that "
    "a layer writes into is "
    "refused by name. So are layers that keep something under `objective: dpo` or `kto`, "
    "whose reference rows would "
    "change it (`recurrent_gemma`).",
    "An adapter of `deepseek_ocr2`, `inkling2`, `laguna`, `mistral_large4` or "
    "`unlimited_ocr` is read whole. PEFT's "
    "own reader takes names in memory for names in files there, loses what it has written, "
    "and warns (`Found missing "
    "adapter keys`): merge such an adapter with `lema merge` for programs that load it by PEFT.",
    "An adapter on a module that several layers share (`zamba`, `zamba2`) is merged for "
    "each layer, as it was trained, "
    "and the merged config says `tie_word_embeddings: false`. PEFT's merge adds the "
    "adapters of all layers to the one "
    "weight.",
    "`emu3` and `shieldgemma2` stream from files with the names of the class that trains "
    "on text. The files of the "
    "class that is published have names which that class does not read: LEMA refuses them "
    "as tensors that are missing, "
    "and `AutoModelForCausalLM` (of `shieldgemma2`, `AutoModelForImageTextToText`) draws "
    "random values for all weights "
    "of the text.",
)


def main() -> None:
    """Print the page."""
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = list(page())
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
