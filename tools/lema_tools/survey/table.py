"""The models that stream, shown to a reader: a table on a terminal, tab-separated lines
elsewhere, JSON, a page.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.progress import track

from lema.config.printing import draws, print_table
from lema.config.problems import meant
from lema.errors import ConfigError
from lema.storage.regular import expanded
from lema_tools.survey.attempt import Row, model_types, survey, survey_model

__all__ = ["json_text", "markdown", "show_models", "survey_all"]

HEADERS = ("type", "streams", "adapters", "why not")
STEPS = Path(__file__).with_name("seconddevice.json")  # written by `tox -e seconddevice`
COMMAND = "lema models --markdown"

INTRODUCTION = """\
This page has one row for each type of which `transformers` has a causal language model, or a model of images and text,
which trains on text; parts that only images reach are not read. The list is that of `transformers`. The command builds
the default config of a type without weights, and runs its own forward up to the layers, and from the layers to the
logits, on tensors with shapes and no values. *adapters* are the modules and experts that LoRA trains by default.
*unknown*: `transformers` has no default config that makes a model, or the model cannot run without values.

Another config of the same type may give another result. `lema models DIRECTORY` tries a model that you have, and says
whether its weights are used as they are stored, or rearranged each time they are read.
""".splitlines()


def survey_all(
    names: Sequence[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> Iterator[Row]:
    """Try each of `names`, or every type where none is given; a bar on a terminal says how far it
    has come. Names are types, else directories, files, or hub ids in the cache; a ConfigError or a
    WeightsError says of one that it is none of these, or cannot be tried."""
    types = model_types()
    for name in names:
        _check(name, types)
    console = Console(stderr=True)
    for name in track(
        names or types, "trying", console=console, transient=True, disable=not draws(console)
    ):
        if name in types:
            yield survey(name)
        else:
            yield survey_model(name, revision=revision, trust_remote_code=trust_remote_code)


def show_models(rows: Iterable[Row], console: Console) -> None:
    """Print a table with a summary on a terminal; anywhere else a line for each row as soon as
    it is known.
    """
    all_rows = list(rows) if console.is_terminal else []
    print_table(map(_cells, all_rows or rows), console, headers=HEADERS)
    if console.is_terminal:
        console.print(_summary(all_rows), style="bold", highlight=False)


def json_text(rows: Iterable[Row]) -> str:
    """Return the rows as a JSON array of objects."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def markdown(rows: Iterable[Row]) -> str:
    """Return the page of the docs."""
    all_rows = list(rows)
    versions = (
        f"{package} {version(package).partition('+')[0]}"
        for package in ("transformers", "peft", "torch")
    )
    origin = f"Made by `{COMMAND} > docs/models.md`, with {', '.join(versions)}."
    steps = json.loads(STEPS.read_text(encoding="utf-8"))
    distances: dict[str, float] = steps["distances"]
    measured = (
        "*second device*: a tiny model of the type took one training step on the tests' "
        "second device, which is not "
        "the CPU, and one on the CPU, both with the attention that all devices share; the "
        "column has the relative "
        "difference of loss and of all gradients together in fp32 "
        f"(`tox -e seconddevice`, {steps['date']}, {steps['versions']}). No step could be "
        "taken where `transformers` "
        "makes no tiny model here, or does not read again what it writes."
    )
    page = [
        "# Models",
        "",
        origin,
        "",
        *INTRODUCTION,
        "",
        *wrap(measured, 120),
        "",
        _summary(all_rows),
        "",
    ]
    headers = (*HEADERS[:2], "second device", *HEADERS[2:])
    page += [f"| {' | '.join(headers)} |", "|---" * len(headers) + "|"]
    for row in all_rows:
        name, streams, _, reason = _cells(row)
        adapters = " ".join(f"`{target}`" for target in row.targets)
        escaped = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", reason)
        step = f"{distances[name]:.0e}" if name in distances else ""
        page.append(f"| `{name}` | {streams} | {step} | {adapters} | {escaped} |")
    return "".join(line + "\n" for line in page)


def _cells(row: Row) -> tuple[str, str, str, str]:
    name = f"{row.source} ({row.model_type})" if row.source else row.model_type
    streams = {True: "yes", False: "no", None: "unknown"}[row.streams]
    if row.streams and row.prepare is not None:
        streams = "rearranged" if row.prepare else "as stored"
    return name, streams, " ".join(row.targets), row.reason


def _summary(rows: Sequence[Row]) -> str:
    counts = {answer: sum(row.streams is answer for row in rows) for answer in (True, False, None)}
    return (
        f"{len(rows)} in all: {counts[True]} stream, {counts[False]} do not, {counts[None]} "
        "unknown."
    )


def _check(name: str, types: Sequence[str]) -> None:
    """Tell a misspelt type before anything is tried; a path or a hub id is looked up when its
    turn comes.
    """
    if name not in types and "/" not in name and not expanded(name).exists():
        how = meant(name, types) or "`lema models` lists the types"
        raise ConfigError(
            f"{name!r} is neither a type of model nor a directory", where="lema models", how=how
        )
