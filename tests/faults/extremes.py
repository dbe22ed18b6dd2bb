"""Every setting, and every small file beside a model or an adapter, with values at the ends of what
its type can be.

A setting is given to the command as a user gives it. What is refused must end with the exit code of
its kind, in words that name the setting or the file; what is taken goes on to a run of one step,
and must end so, too.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from faults import watch
from faults.mutations import mutate
from faults.outcome import Outcome
from faults.tinymodel import TinyModel, tiny_model

__all__ = ["REQUIRED", "files", "settings"]

REQUIRED = "taken, or refused by name with the exit code of its kind; no exit of 1, no hang"
LONG = "a" * 5000
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "7",
    "-0.0",
    "0.5",
    "1e-300",
    "5e-324",
    "1e5",
    "1e300",
    "-1e300",
    "1e400",
    ".nan",
    ".inf",
    "-.inf",
)
NUMBERS += (
    "100000",
    "2147483648",
    "4294967295",
    str(10**12),
    str(10**18),
    str(10**18 - 1),
    str(2**63),
    "1" + "0" * 400,
)
NUMBERS += ("0x1F", "1_000", "8GB", "8e30GB", "-1GB", "16k", "9e99B", "'0'", "1.")
TEXTS = (
    '""',
    '" "',
    LONG,
    f"a/{LONG}",
    '"\\0"',
    '"a\\0b"',
    '"\\ud800"',
    '"\\u2028"',
    "../x",
    ".",
    "/",
    "~nosuchuser/x",
    "é",
    "auto",
    "none",
)
TEXTS += (
    "/dev/null",
    "/dev/full",
    "/proc/self/mem",
    "all",
    "disk",
    "cpu",
    "'(a+)+$'",
    "'['",
    "'*'",
    "'%s{}'",
    "'{{ 1 // 0 }}'",
    "x=1",
    "a=b,c",
)
OTHERS = (
    "null",
    "~",
    "",
    "true",
    "false",
    "[]",
    "{}",
    "[[]]",
    "[[[1]]]",
    "[null]",
    "[1, a, null, {}]",
    "[0, -1]",
    "[a, a]",
    "[true]",
)
OTHERS += (
    f"[{10**12}]",
    f"[{LONG}]",
    "{a: 1}",
    "{a: b}",
    '{"": ""}',
    "{1: 2}",
    "{null: null}",
    "{a: {b: [1]}}",
    "{a: .nan}",
    "{a: [a]}",
)
OTHERS += (
    "&a [*a]",
    "&a {b: *a}",
    "[" * 40 + "]" * 40,
    "[" * 2000 + "]" * 2000,
    "{a: " * 50 + "}" * 50,
    "!!python/object:os.x a",
)
OTHERS += (
    "2026-11-23",
    "=",
    "<<",
    "!!binary aGk=",
    "!!set {a}",
    "[1,2",
    "\t",
    "- a",
    "a: b: c",
    "%",
    "@",
    "`",
    "|",
    ">",
)
VALUES = NUMBERS + TEXTS + OTHERS
# A run of so many steps, tokens or rows takes as long as it says, or as much memory.
LENGTHS = (
    "max_steps",
    "num_train_epochs",
    "eval_prompts_max_new_tokens",
    "lora_rank",
    "max_length",
    "batch_size",
    "tokens_per_step",
    "micro_batch_tokens",
    "gradient_accumulation_steps",
    "pad_to_multiple_of",
    "lora_rank_pattern",
)


def settings(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Give settings, all in turn, extreme values: `count` cases, one in five with two settings
    at once.
    """
    from lema.config import LemaConfig

    started = time.perf_counter()
    made = tiny_model()
    known = list(LemaConfig.defaults())
    order = Random(seed).sample(known, len(known))

    def case(number: int) -> str:
        draw = Random(f"{seed}:{number}")
        keys = [order[number % len(order)], *([draw.choice(known)] if draw.random() < 0.2 else [])]
        pairs = [f"{key}={draw.choice(VALUES)}" for key in dict.fromkeys(keys)]
        place = made.fresh()
        wrong = _setting(made, place, pairs, keys, draw)
        shutil.rmtree(place, ignore_errors=True)
        return wrong and f"seed {seed}, {' '.join(pair[:80] for pair in pairs)}: {wrong}"

    seen = watch.watched(count, case, made.place, report, growth=None)
    return watch.outcome("every setting with extreme values", REQUIRED, count, seen, started)


def _setting(made: TinyModel, place: Path, pairs: list[str], keys: list[str], draw: Random) -> str:
    os.chdir(place)  # what is named by a relative path is written there
    config = made.config(
        place, train_data=str(made.place / draw.choice(("rows.jsonl", "chat.jsonl")))
    )
    given = [word for pair in pairs for word in ("--set", pair)]
    if watch.refused(config, pairs):
        return watch.command("config", "show", config, *given, named=keys)
    if set(keys) & {*LENGTHS} or draw.random() < 0.2:
        return watch.command("data", config, *given)
    return watch.command(
        *draw.choice((("train",), ("train",), ("plan", "--profile", "cpu"))), config, *given
    )


def files(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Mutate small files, all in turn: `count` cases."""
    started = time.perf_counter()
    made = tiny_model()
    names = list(FILES)

    def case(number: int) -> str:
        draw = Random(f"{seed}:{number}")
        name = names[number % len(names)]
        place = made.fresh()
        os.chdir(place)
        shutil.copytree(made.place / "model", place / "model")
        shutil.copytree(made.place / "out", place / "out")
        file = place / name
        document = json.loads(file.read_bytes())
        if file.name == "lema_config.json":
            document["model_name_or_path"] = str(place / "model")
        file.write_bytes(mutate(document, draw, WORDS))
        words = [str(word).replace("PLACE", str(place)) for word in draw.choice(FILES[name])]
        words = [str(made.config(place)) if word == "CONFIG" else word for word in words]
        wrong = watch.command(*words, named=(str(made.place), *_names(document)))
        shutil.rmtree(place, ignore_errors=True)
        return wrong and f"{name}, seed {seed}: {wrong}"

    seen = watch.watched(count, case, made.place, report, growth=None)
    return watch.outcome("small files with extreme values", REQUIRED, count, seen, started)


TRAIN = ("train", "CONFIG")
DATA = ("data", "CONFIG")
GENERATE = ("generate", "-p", "a", "--max-new-tokens", "1", "PLACE/out")
MERGE = ("merge", "PLACE/out", "PLACE/merged")
RESUME = ("train", "--resume", "CONFIG")
FILES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "model/config.json": (TRAIN,),
    "model/generation_config.json": (("generate", "-p", "a", "--max-new-tokens", "1", "CONFIG"),),
    "model/tokenizer_config.json": (DATA, GENERATE),
    "model/special_tokens_map.json": (DATA,),
    "model/model.safetensors.index.json": (TRAIN,),
    "out/adapter_config.json": (GENERATE, MERGE),
    "out/lema_config.json": (GENERATE, MERGE),
}
WORDS = (
    "float16",
    "lora_only",
    "all-linear",
    "(a+)+$",
    "gelu",
    "yarn",
    "llama",
    "PreTrainedTokenizerFast",
    "model.safetensors",
    "orthogonal",
    "eager",
)


def _names(value: Any) -> Iterator[str]:
    """Yield the names in a document."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        yield from _names(inner)
