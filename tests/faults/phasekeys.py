"""Settings of phases at the ends of their types, one or several in a file of one to three phases.

The settings and their types are those of the plan's own schema, with what a phase may override, so
that a new setting is drawn without a word here. What is refused must name a setting; what is taken
trains if it is a run of a few steps, and is planned otherwise.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from faults import watch
from faults.extremes import REQUIRED
from faults.outcome import Outcome
from faults.tinymodel import TinyModel, tiny_model

__all__ = ["run"]

SHORT = 3000  # tokens of a run that is trained, all phases together
LONG = "a" * 5000
WHOLE = (-1, 0, 1, 2, 3, 7, 1000, 2**31, 10**18 - 1, 10**18, 10**18 + 1, 2**63, 2**64, 10**30)
REAL = (
    -0.0,
    0.0,
    5e-324,
    1e-300,
    0.1,
    0.5,
    1.0,
    2.0,
    1e17,
    1e300,
    1.7e308,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = (
    "",
    " ",
    LONG,
    "\0",
    "\ud800",
    "\u2028",
    "../x",
    "/",
    "~nosuchuser/x",
    "auto",
    "none",
    "(a+)+$",
    "[",
    "*",
    "%s",
)
# What a text may mean where it is read: modules, layers, data sets, lengths, amounts of memory,
# files.
TEXTS += (
    "q_proj",
    "lm_head",
    "embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "norm",
    "layers",
    "weight",
    "first:1",
)
TEXTS += (
    "last:2",
    "last:99999999999999999999",
    f"first:{'9' * 5000}",
    "embeddings",
    "head",
    "text",
    "chat",
    "gaussian",
)
TEXTS += (
    "gaussian",
    "64",
    "0.1k",
    "9e99B",
    "9" * 400 + "G",
    "8GB",
    "0B",
    "1e30GB",
    "loftq",
    "pissa",
    "all-linear",
)
OTHERS: Sequence[Any] = (
    None,
    True,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": [1]}},
    "1",
    1,
    0.5,
    [1, "a", None],
)

Place = tuple[str | None, ...]  # keys that lead to a setting; None: the number of a phase


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Write `count` files of phases, each of which has one setting, all in turn, and often
    others at an end.
    """
    started, made, (known, kinds) = time.perf_counter(), tiny_model(), _schema()

    def case(number: int) -> str:
        draw = Random(f"{seed}:{number}")
        place = made.fresh()
        os.chdir(place)
        document = _document(made, place, draw)
        named = list[str]()
        for path in [
            list(known)[number % len(known)],
            *draw.sample(list(known), draw.choice((0, 0, 0, 1, 1, 2))),
        ]:
            named.append(_put(document, path, _end(known[path], kinds, draw), draw))
        wrong = _opened(place / "run.yaml", document, [*named, "phases[", f"{place / 'run.yaml'}:"])
        shutil.rmtree(place, ignore_errors=True)
        return wrong and f"seed {seed}, {' '.join(named)}: {wrong}"

    seen = watch.watched(count, case, made.place, report, growth=None)
    return watch.outcome(
        "settings of phases at the ends of their types", REQUIRED, count, seen, started
    )


def _schema() -> tuple[dict[Place, Any], Mapping[str, Any]]:
    """Return the schema of every setting by its place, and the types that these name."""
    from lema.config import LemaConfig
    from lema.train.phases.phase import OVERRIDES, Phase
    from lema.train.phases.plan import PhasePlan

    plan = PhasePlan.model_json_schema()
    run = LemaConfig.model_json_schema()
    phase = Phase.model_json_schema()
    kinds = {**run.get("$defs", {}), **plan["$defs"]}
    own = {**phase["properties"], **{name: run["properties"][name] for name in sorted(OVERRIDES)}}
    found = {(name,): schema for name, schema in plan["properties"].items() if name != "phases"}
    found |= {("phases", None, *rest): schema for rest, schema in _places(own, kinds)}
    return found, kinds


def _places(
    properties: Mapping[str, Any], kinds: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every setting, those within settings too, by its path."""
    for name, schema in properties.items():
        yield (name,), schema
        for form in [schema, schema.get("items", {}), *schema.get("anyOf", ())]:
            inner = kinds.get(form.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
            yield from (((name, *rest), one) for rest, one in _places(inner, kinds))


def _document(made: TinyModel, place: Path, draw: Random) -> dict[str, Any]:
    """Draw a sound file of phases."""
    phases: list[dict[str, Any]] = []
    for index in range(draw.choice((1, 2, 2, 3))):
        name = draw.choice(("text", "chat"))
        phase: dict[str, Any] = {
            "trains": draw.choice(("full", "lora", "selection")),
            "tokens": 192,
        }
        phase |= {"learning_rate": 1e-3, "mixture": [{"name": name, "rate": 1.0}]}
        if phase["trains"] == "selection":
            phase["layers"] = draw.choice((["last:1"], [0, "head"], ["embeddings"]))
        if phase["trains"] == "lora":
            phase["lora_rank"] = 2
        if index and phases[-1]["trains"] == "lora":
            phase["merge"] = True
        phases.append(phase)
    return {
        "model_name_or_path": str(made.place / "model"),
        "train_data": {
            "text": str(made.place / "rows.jsonl"),
            "chat": str(made.place / "chat.jsonl"),
        },
        "output_dir": str(place / "out"),
        "device": "cpu",
        "batch_size": 2,
        "max_length": 48,
        "save_steps": 0,
        "data_cache": False,
        "phases": phases,
    }


def _put(document: dict[str, Any], path: Place, value: Any, draw: Random) -> str:
    """Give a setting a value; return its name."""
    holder: Any = document
    for key in path[:-1]:
        if key is None:
            holder = draw.choice(holder)
        elif isinstance(holder.setdefault(key, {}), dict | list):
            holder = holder[key]
        else:  # another setting has made it something else
            holder[key] = holder = {}
        if isinstance(holder, list) and key != "phases":
            holder = next((one for one in holder if isinstance(one, dict)), {})
    holder[str(path[-1])] = value
    return str(path[-1])


def _end(schema: Mapping[str, Any], kinds: Mapping[str, Any], draw: Random) -> Any:
    """Draw a value at an end of a type, or of another type."""
    if draw.random() < 0.05:
        return draw.choice(OTHERS)
    if "$ref" in schema:
        schema = kinds[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        form = draw.choice(
            [one for one in schema["anyOf"] for _ in range(1 if one.get("type") == "null" else 3)]
        )
        return _end(
            {**{key: one for key, one in schema.items() if key != "anyOf"}, **form}, kinds, draw
        )
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        word = draw.choice(words)
        return draw.choice((word, word, word, str(word).upper(), f"{word}x", ""))
    kind = schema.get("type", "object")
    match draw.choice(kind) if isinstance(kind, list) else kind:
        case "integer":
            return draw.choice(
                [*WHOLE, *(one + by for one in _bounds(schema) for by in (-1, 0, 1))]
            )
        case "number":
            near = [
                math.nextafter(one, to)
                for one in _bounds(schema)
                for to in (-math.inf, one, math.inf)
            ]
            return draw.choice([*REAL, *near])
        case "string":
            return draw.choice(TEXTS)
        case "array":
            items = [
                _end(schema.get("items", {}), kinds, draw)
                for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))
            ]
            return items * draw.choice((1, 1, 1, 1, 2, 300))
        case "object":
            inside = schema.get("properties") or {
                draw.choice(TEXTS): schema.get("additionalProperties") or {}
            }
            chosen = draw.sample(list(inside), draw.randrange(len(inside) + 1))
            return {
                name: _end(inside[name] if isinstance(inside[name], dict) else {}, kinds, draw)
                for name in chosen
            }
        case "boolean":
            return draw.random() < 0.5
    return None


def _bounds(schema: Mapping[str, Any]) -> list[Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "gt", "ge", "lt", "le")
    return [schema[name] for name in names if name in schema]


def _opened(file: Path, document: dict[str, Any], named: list[str]) -> str:
    """Train or plan what is written into a file; say what is wrong with how that ended."""
    from lema.train.phases.file import read_phase_file

    text = json.dumps(document, indent=1)
    for ours, theirs in ((": NaN", ": .nan"), ("Infinity", ".inf")):
        text = text.replace(ours, theirs)
    file.write_text(text, encoding="utf-8")
    try:
        plan = read_phase_file(file).plan
        short = plan.num_steps * plan.batch_size * plan.max_length <= SHORT
    except Exception:  # noqa: BLE001 - the command says how
        named = [*named, "train_data", "the config file", "not YAML"]
        return watch.command("plan", "--profile", "cpu", file, named=named)
    return watch.command(*(("train",) if short else ("plan", "--profile", "cpu")), file)
