"""What commands read besides models and rows: settings of other trainers, kept tokens, prompts,
preferences, deltas.

Each case is drawn from the grammar of its kind and opened as a command opens it; it must end as
those of `bombs` must.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from faults import forked, watch
from faults.extremes import VALUES
from faults.mutations import mutate, mutate_bytes
from faults.outcome import Outcome
from faults.rundirs import BAIT, plain
from faults.tinymodel import TinyModel, tiny_model
from lema.data import cache as tokens

__all__ = ["KINDS", "run"]


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Open `count` files, each drawn from the seed and its own number, of all kinds in turn."""
    kept_tokens(tiny_model())
    fault = "settings of others, kept tokens, prompts, preferences"
    required = "taken, or refused by name, within 10 s and 1 GiB; no exit of 1"
    return watch.drawn(fault, KINDS, count, seed, report, required)


# Of axolotl and TRL, each with a value that their users give it.
THEIRS: Mapping[str, str] = {
    "base_model": "org/model",
    "datasets": "[{path: a.jsonl, type: alpaca, field: text}, {path: b.jsonl, type: chat_template}]",
    "dataset_name": "org/rows",
    "dataset_text_field": "text",
    "adapter": "qlora",
    "micro_batch_size": "2",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "4",
    "sequence_len": "2048",
    "lora_r": "16",
    "bf16": "true",
    "flash_attention": "true",
    "val_set_size": "0.1",
    "wandb_project": "p",
    "special_tokens": "{pad_token: <pad>}",
    "lora_target_modules": "all-linear",
    "optimizer": "adamw_torch",
    "rl": "dpo",
    "trust_remote_code": "true",
}


def imported(made: TinyModel, place: Path, draw: Random) -> str:
    """A file of axolotl or TRL with values of any type, and names of its own."""
    file = place / "theirs.yml"
    given = {key: THEIRS[key] for key in draw.sample(list(THEIRS), draw.randrange(1, 9))}
    for _ in range(draw.choice((1, 1, 2, 4))):
        given[draw.choice((*THEIRS, json.dumps(draw.choice(BAIT)), "a" * 300))] = draw.choice(
            VALUES
        )
    if draw.random() < 0.3:
        inner = {
            key: draw.choice((None, 1, [], {}, *BAIT))
            for key in ("path", "type", "field", "field_messages")
        }
        given["datasets"] = json.dumps(draw.choice(([inner], [inner, 1, None], inner, [[inner]])))
    file.write_text(
        "".join(f"{key}: {value}\n" for key, value in given.items()), "utf-8", "surrogatepass"
    )
    return watch.command("config", "import", file, named=(str(file), *THEIRS), printed=_each_line)


def _each_line(said: str) -> str:
    """What is printed is settings, and notes behind `#`."""
    found = [
        line
        for line in said.splitlines()
        if "not carried over" in line and not line.startswith("#")
    ]
    return plain(said) or (f"{found[0]!r} is no note" if found else "")


@cache
def kept_tokens(made: TinyModel) -> Path:
    """Tokenise rows once, and return where the tokens are kept.

    Raises:
        RuntimeError: it fails.
    """
    place = made.place / "kept"

    def work() -> int:
        tokens.SMALL = 0  # bytes below which rows are tokenised anew
        return int(bool(watch.command("data", made.config(made.fresh(), data_cache=str(place)))))

    ended = forked.run(work, made.place / "kept.log")
    if ended.code or not any(place.rglob("about.json")):
        raise RuntimeError(f"tokens were not kept: {ended.said}")
    return place


def kept(made: TinyModel, place: Path, draw: Random) -> str:
    """Kept tokens of which a file is harmed, most often told anew in the digest beside it."""
    folder = Path(shutil.copytree(kept_tokens(made), place / "kept"))
    about = next(folder.rglob("about.json"))
    file = draw.choice(
        [about, *(about.with_name(name) for name in ("rows.bin", "tokens.bin", "skipped.jsonl"))]
    )
    whole = json.loads(about.read_bytes())
    if file == about:
        raw = mutate(whole["about"] if draw.random() < 0.8 else whole, draw, BAIT)
        with_digest = b'{"about": ' + raw + b', "sha256": "' + _digest(raw) + b'"}'
        about.write_bytes(with_digest if raw.startswith(b"{") and draw.random() < 0.8 else raw)
    else:
        raw = file.read_bytes()
        for _ in range(draw.choice((1, 1, 8))):
            raw = mutate_bytes(raw, draw)
        if file.name == "rows.bin" and draw.random() < 0.5:
            raw = raw[: len(raw) // 40 * 40]
        file.write_bytes(raw)
        told = whole["about"]
        told["sizes"][file.name] = len(raw)
        told["rows"] = hashlib.sha256(about.with_name("rows.bin").read_bytes()).hexdigest()
        digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        about.write_text(json.dumps({"about": told, "sha256": digest}), encoding="utf-8")
    tokens.SMALL = 0
    return watch.command(
        "data", made.config(place, data_cache=str(folder)), named=(str(made.place),), printed=plain
    )


def _digest(raw: bytes) -> bytes:
    try:
        return hashlib.sha256(json.dumps(json.loads(raw)).encode()).hexdigest().encode()
    except (ValueError, RecursionError):
        return b"0"


TEXTS: tuple[Any, ...] = (
    "a b",
    "",
    " ",
    "a\0b",
    "\ud800",
    "a" * 3000,
    "a" * (1 << 20) + "a",
    *BAIT,
    None,
    1,
    [],
    {},
)
ROLES = ("user", "assistant", "system", "tool", "", "x" * 300, None, 1)


def _said(draw: Random) -> Any:
    """Draw a text, messages, or something that is neither."""
    if draw.random() < 0.5:
        return draw.choice(TEXTS)
    return [
        {"role": draw.choice(ROLES), "content": draw.choice(TEXTS)}
        for _ in range(draw.choice((0, 1, 2, 3)))
    ]


def preferences(made: TinyModel, place: Path, draw: Random) -> str:
    """Pairs, or rows with a label, with any text, in any number of columns."""
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    ] * draw.choice((0, 1, 3))
    bad = {
        name: _said(draw)
        for name in ("prompt", "chosen", "rejected", "completion")
        if draw.random() < 0.8
    }
    bad |= {"label": draw.choice((True, False, 0, "true", None, [], "x", 2))}
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in [*rows, bad]), encoding="utf-8")
    given = {
        "objective": draw.choice(("dpo", "kto", "orpo", "simpo", "ipo")),
        "train_data": str(file),
    }
    config = made.config(place, **given, max_length=draw.choice((1, 8, 48)))
    return watch.command("data", config, named=(str(file), str(place)), printed=plain)


def prompts(made: TinyModel, place: Path, draw: Random) -> str:
    """A file of prompts, with a tokenizer that may fail on them, and perhaps results of another
    run.
    """
    file = place / draw.choice(("p.jsonl", "p.txt", "p.csv"))
    out = place / "done.jsonl"
    rows = [
        {draw.choice(("prompt", "messages", "text", "x")): _said(draw)}
        for _ in range(draw.choice((1, 2)))
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    if draw.random() < 0.5:
        out.write_bytes(
            mutate(
                {"index": 0, "completion": "a", "finish_reason": "stop", "prompt": "a"}, draw, BAIT
            )
        )
    if draw.random() < 0.4:
        tokenizer = made.model(place) / "tokenizer.json"
        content = json.loads(tokenizer.read_bytes())
        pieces = [
            {"SpecialToken": {"id": "absent", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        special: dict[str, Any] = {"absent": {"id": "absent", "ids": [2**31], "tokens": ["absent"]}}
        template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
        content["post_processor"] = {**template, "special_tokens": draw.choice(({}, special))}
        tokenizer.write_text(json.dumps(content), encoding="utf-8")
    words = [
        "generate",
        made.config(place),
        "--prompts",
        file,
        "--output",
        out,
        "--max-new-tokens",
        "1",
    ]
    return watch.command(*words, named=(str(file), str(out), str(place)), printed=plain)


KINDS: Mapping[str, Callable[[TinyModel, Path, Random], str]] = {
    "imported settings": imported,
    "kept tokens": kept,
    "preferences": preferences,
    "prompts": prompts,
}
