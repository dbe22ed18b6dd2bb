"""Rows of imported files have the token ids and labels that axolotl's own code gives them.

`tokens.json` is written by `axolotltokens.py`, which says with which version of axolotl, and when.
What cannot be carried is in `DIFFERENT`: a file of that kind ends the import with exit code 3.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from axolotltokenizer import tokenizer_of

from lema.config import LemaConfig
from lema.data.forms import forms_of
from lema.data.preference import prepare_preferences
from lema.data.read import prepare_data
from lema.data.sets.sources import data_files
from lema_tools.importing.axolotl.peer import PEER
from lema_tools.importing.checking import checked
from lema_tools.importing.translation import ForeignRun, Translation

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "tokens.json").read_text(encoding="utf-8"))
OTHERS = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "learning_rate": 1e-4,
    "warmup_steps": 10,
    "base_model": "org/model",
}


def imported(case: dict[str, Any], folder: Path) -> Translation:
    """The translation of a case's run, whose rows are in a file."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in case["rows"]), encoding="utf-8")
    run = json.loads(json.dumps(case["run"]))
    run["datasets"][0]["path"] = str(file)
    for key in ("split", "data_files", "ds_type"):
        run["datasets"][0].pop(key, None)
    return checked(PEER.translate(ForeignRun({**OTHERS, **run})))


def rows_of(case: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows that LEMA makes, as the table has them."""
    config = LemaConfig(**{key: value for key, value in settings.items() if value is not None})
    options: dict[str, Any] = {
        "max_length": 512,
        "overlong": config.overlong,
        "forms": forms_of(config),
    }
    data: Any = data_files(config.train_data)  # type: ignore[arg-type] # it names a file
    tokenizer = tokenizer_of(case["tokenizer"])
    if config.objective == "sft":
        rows = prepare_data(data, tokenizer, **options)
        return [{"ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    pairs = prepare_preferences(data, tokenizer, labelled=False, **options)
    return [pair_of(pairs[number]) for number in range(len(pairs))]


def counted(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """A row without the label of its first token, which no loss counts."""
    return row | ({"labels": row["labels"][1:]} if "labels" in row else {})


def pair_of(rows: Any) -> dict[str, list[int]]:
    """A pair as TRL has it: the prompt, and the two answers."""
    chosen, rejected = rows
    start = next(at for at, label in enumerate(chosen["labels"]) if label != -100)
    return {
        "prompt_ids": chosen["input_ids"][:start],
        "chosen_ids": chosen["input_ids"][start:],
        "rejected_ids": rejected["input_ids"][start:],
    }


DIFFERENT = {
    "llama-3/fft-8b-liger-fsdp.yaml": "special_tokens",
    "gemma3n/gemma-3n-e2b-qlora.yml": "chat_template",
    "qwen3/32b-qlora.yaml": "chat_template",
    "plano/plano-4b-qlora.yaml": "chat_template",
    "llama-4/do-no-use-fa2/maverick-qlora-fsdp1.yaml": "chat_template",
    "gemma4/26b-a4b-moe-bnb-lora.yaml": "chat_template",
    "qwen3.5/122b-a10b-moe-qlora-fsdp.yaml": "chat_template",
    "qwen2-vl/lora-7b.yaml": "chat_template",
    "mistral/dpo/mistral-dpo-qlora.yml": "datasets[0].type",
    "qwen2/dpo.yaml": "datasets[0].type",
}
"""Files whose rows have other tokens or labels here, and the key that the import names for it."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["example"])
def test_rows_have_the_tokens_and_labels_of_axolotl(case: dict[str, Any], tmp_path: Path) -> None:
    translation = imported(case, tmp_path)
    different = DIFFERENT.get(case["example"])
    if different is None:
        rows = rows_of(case, translation.settings)
        assert [counted(row) for row in rows] == [counted(row) for row in case["tokens"]]
    else:
        assert different in {note.key for note in translation.changes}


def test_expectations_cover_fifteen_files_that_are_the_same() -> None:
    assert len({case["example"] for case in CASES} - DIFFERENT.keys()) >= 15
