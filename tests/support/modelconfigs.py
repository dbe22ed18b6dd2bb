"""Makes configs/models and docs/your-model.md: a file of settings for named checkpoints on devices
of some sizes.

    PYTHONPATH=.:backends:tools python tests/support/modelconfigs.py [NAME ...]     # a plan each, some seconds a model

Each file is what `lema init` writes for the checkpoint's config, without its weights. If nothing
fits, there is no file. The page lists the files that exist.
"""

import math
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from lema.errors import MemoryLimitError
from lema.plan.machine import PROFILES
from lema_tools.models.checkpoints import CHECKPOINTS, NEAR, PARAMETERS, Checkpoint, named
from lema_tools.models.choices import HOST, Choice, choices, profile_for, yaml_lines
from lema_tools.models.published import write_hollow

__all__ = ["CONFIGS", "MODELS", "SIZES", "files_of", "page"]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "models"
PAGE = ROOT / "docs" / "your-model.md"
GB = 10**9
SIZES = (8, 12, 16, 24, 48, 80)  # GB of device memory
# Their sizes are known, but no file was made so far.
UNPLANNED = ("Qwen3-Coder-480B-A35B", "DeepSeek-V4-Flash")
MODELS = [one for one in CHECKPOINTS if one.name in PARAMETERS and one.name not in UNPLANNED]


def files_of(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the text of the file for each size that the checkpoint fits; none where its sizes
    are not known here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = list(
            choices(write_hollow(checkpoint, Path(scratch)), [size * GB for size in SIZES])
        )
    made = {size: one for size, one in zip(SIZES, found, strict=True) if isinstance(one, Choice)}
    assert all(isinstance(one, Choice | MemoryLimitError) for one in found)
    counted = {one.parameters / 1e9 / PARAMETERS[checkpoint.name] for one in made.values()}
    if any(abs(ratio - 1) > NEAR for ratio in counted):
        sys.stderr.write(
            f"{checkpoint.name}: the sizes give {max(counted):.2f} of the published "
            "parameters, so they are wrong\n"
        )
        return {}
    name = checkpoint.name.lower()
    return {
        size: "".join(f"{line}\n" for line in _lines(checkpoint, one, size, name))
        for size, one in made.items()
    }


def _lines(checkpoint: Checkpoint, choice: Choice, size: int, name: str) -> Iterator[str]:
    command = f"lema init {checkpoint.name} --device-memory {size}GB --data data.jsonl"
    yield from yaml_lines(
        choice, checkpoint.hub_id, "data.jsonl", f"output/{name}", command, checkpoint.needs
    )


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from INTRODUCTION.splitlines()
    sizes = " | ".join(f"{size} GB, host {_host(size)}" for size in SIZES)
    yield f"| model | billion parameters | {sizes} |"
    yield "|---|---|" + "---|" * len(SIZES)
    absent = []
    for one in MODELS:
        files = {size: CONFIGS / one.name / f"{size}GB.yaml" for size in SIZES}
        if not any(file.is_file() for file in files.values()):
            absent.append(one.name)
            continue
        cells = [_cell(file) if file.is_file() else "-" for file in files.values()]
        yield f"| {one.name} | {PARAMETERS[one.name]:g} | {' | '.join(cells)} |"
    yield ""
    if absent:
        yield f"These models have no file, because they fit no size: {', '.join(absent)}."
    yield f"No file was made so far for {', '.join(UNPLANNED)}."


def _host(size: int) -> str:
    """Return the host memory that the plans for a device of so many GB may take."""
    return f"{HOST * PROFILES[profile_for(size * GB)].host_memory / GB:.0f} GB"


def _cell(file: Path) -> str:
    """Return the tokens per second of a file, and the thousands of tokens of a step from which on
    streaming costs nothing.
    """
    text = file.read_text(encoding="utf-8")
    (speed,) = re.findall(r"Predicted, not measured: ([\d,]+) tokens/s", text)
    steps = re.findall(r"Streaming costs nothing in steps of ([\d,]+) tokens", text)
    if not steps:
        return f"{speed} / any"
    return f"{speed} / {math.ceil(int(steps[0].replace(',', '')) / 1000):,}k"


_PROFILES = ", ".join(f"{size} GB: `{profile_for(size * GB)}`" for size in SIZES)
INTRODUCTION = f"""\
# Your model, your GPU: 70B on 24 GB, 8B on 8 GB

This page has a file of settings to train a published model on a GPU of 8 to 80 GB. Made by `python tests/support/modelconfigs.py`, which writes the files as well.

`configs/models/` has a folder for each model, and in it a file for each size of device memory, such as
`configs/models/Qwen3-8B/24GB.yaml`. Put your rows into `data.jsonl`, or name another file, and train:

```bash
lema train configs/models/Qwen3-8B/24GB.yaml --train-data my-rows.jsonl
```

`lema init` writes a file for this machine, and asks for model and data. With options it writes one for another machine:

```bash
lema init Qwen/Qwen3-8B --device-memory 10GB --data my-rows.jsonl --output my.yaml
```

It takes a directory, a hub id in the cache, or a name of [published checkpoints](coverage.md). It ends with code 4 if
nothing fits.

The [planner](planner/index.html) is a page that needs no installation: choose a model, a card, memory, rows and an
objective, and it has memory by part, speed, hours, your price, what is written to the SSD, the file to train with, and
the tokens of a step from which on streaming costs nothing.
It knows 25 published models, and takes a config.json of other sizes if its model_type is llama, mistral, qwen2, qwen3,
gemma2, gemma3_text or smollm3, and its weights have two bytes a number. It says why it does not plan for any other.

A cell has the tokens per second that the plan predicts for steps of 16 rows with 1,024 tokens, which are **16,384 tokens
a step**, with the device memory and the **host memory** of its column. After the `/` it has the **tokens of a step from
which on streaming costs nothing**, because the layers compute for longer than the next ones are read: a larger `batch_size`
gives such a step. `-` means that nothing that was tried fits. These are **predictions, not measurements**: no row was run on such a device. They come from:

- the sizes in the checkpoint's config.json, copied to `tools/lema_tools/models/checkpoints.py`, and its published form.
  The table has only models whose sizes give the publisher's number of parameters within 2%;
- the speeds of computing, link and disk in a profile of `lema plan`
  ({_PROFILES}),
  with the device memory of the column, and half of the profile's host memory;
- LoRA of rank 16 on every linear module of the layers except experts.

`tests/plan/test_model_configs.py` makes the files again and compares them: those of two models in a default run, and
all in the exhaustive run ([what the tests take](internals/tests.md)).

"""


def main(names: list[str]) -> None:
    """Write the files of the models named, or of all, and the page."""
    logging.set_verbosity_error()
    for one in [found for name in names if (found := named(name))] or MODELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts = files_of(one)
        shutil.rmtree(CONFIGS / one.name, ignore_errors=True)
        for size, text in texts.items():
            file = CONFIGS / one.name / f"{size}GB.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{one.name}: {', '.join(f'{size} GB' for size in texts) or 'none'}\n")
        sys.stdout.flush()
    PAGE.write_text("\n".join(page()).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
