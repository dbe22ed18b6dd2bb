"""Makes docs/defaults.md, which has LEMA's defaults beside those of four peers.

    PYTHONPATH=.:backends:tools:tests/support python tests/support/defaultspage.py > docs/defaults.md

LEMA's come from the schema of `LemaConfig`, and the peers' from the dated tables that
`lema config import` starts from. Unsloth has no files to import; its table is beside this file.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema.config import LemaConfig

_HERE = Path(__file__).parent
_IMPORTERS = _HERE.parents[1] / "tools" / "lema_tools" / "importing"
TABLES = {
    "TRL": _IMPORTERS / "trl" / "defaults.json",
    "axolotl": _IMPORTERS / "axolotl" / "defaults.json",
    "LLaMA-Factory": _IMPORTERS / "llamafactory" / "defaults.json",
    "Unsloth": _HERE / "unslothdefaults.json",
}
# What a table calls the kind of run.
_SFT = {"TRL": "sft"}
_DPO = {"TRL": "dpo"}


@dataclass(frozen=True)
class Row:
    """One default: LEMA's setting, and the key of each peer that has it.

    A key in brackets is no key: it says in words what the peer does where a file is silent.
    """

    setting: str
    trl: str
    axolotl: str
    llama_factory: str
    unsloth: str
    lema: str = ""  # in words, where the schema's default is decided later
    objective: str = "sft"


ROWS = (
    Row(
        "learning_rate",
        "learning_rate",
        "learning_rate",
        "learning_rate",
        "learning_rate",
    ),
    Row(
        "learning_rate",
        "learning_rate",
        "learning_rate",
        "learning_rate",
        "learning_rate",
        lema="5e-06",
        objective="dpo",
    ),
    Row(
        "lr_scheduler_type",
        "lr_scheduler_type",
        "lr_scheduler",
        "lr_scheduler_type",
        "lr_scheduler_type",
    ),
    Row(
        "warmup_steps",
        "warmup_steps",
        "[3 % of the steps, at most 100]",
        "warmup_steps",
        "[10 % of the steps]",
        lema="3 % of the steps, at most 100",
    ),
    Row("max_grad_norm", "max_grad_norm", "max_grad_norm", "max_grad_norm", "max_grad_norm"),
    Row("weight_decay", "weight_decay", "weight_decay", "weight_decay", "weight_decay"),
    Row("adam_beta1", "adam_beta1", "adam_beta1", "adam_beta1", "adam_beta1"),
    Row("adam_beta2", "adam_beta2", "adam_beta2", "adam_beta2", "adam_beta2"),
    Row("adam_epsilon", "adam_epsilon", "adam_epsilon", "adam_epsilon", "adam_epsilon"),
    Row("optim", "optim", "optimizer", "optim", "optim"),
    Row(
        "num_train_epochs",
        "num_train_epochs",
        "num_epochs",
        "num_train_epochs",
        "num_train_epochs",
    ),
    Row(
        "batch_size",
        "per_device_train_batch_size",
        "micro_batch_size",
        "per_device_train_batch_size",
        "per_device_train_batch_size",
    ),
    Row(
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
    ),
    Row("seed", "seed", "seed", "seed", "seed"),
    Row(
        "max_length",
        "max_length",
        "sequence_len",
        "cutoff_len",
        "max_seq_length",
        lema="1024, or the model's positions",
    ),
    Row("packing", "packing", "[off]", "[off]", "packing"),
    Row(
        "train_on",
        "[all but the column `prompt`]",
        "[answers]",
        "[answers]",
        "[as TRL]",
    ),
    Row(
        "trains",
        "[all weights, unless `use_peft`]",
        "[all weights, unless `adapter`]",
        "[an adapter]",
        "[an adapter]",
        lema="an adapter",
    ),
    Row("quantize_base", "[off]", "[off]", "[off]", "[nf4]", lema="off"),
    Row("lora_rank", "lora_r", "[must be given]", "lora_rank", "r"),
    Row(
        "lora_alpha",
        "lora_alpha",
        "[must be given]",
        "[2 x the rank]",
        "lora_alpha",
        lema="2 x the rank",
    ),
    Row("lora_dropout", "lora_dropout", "lora_dropout", "lora_dropout", "lora_dropout"),
    Row(
        "lora_target_modules",
        "[PEFT's for the type of model]",
        "[must be given]",
        "[all linear modules]",
        "[all linear modules]",
        lema="all linear modules",
    ),
    Row(
        "gradient_checkpointing",
        "[on]",
        "[off]",
        "[on]",
        "[its own]",
        lema="if memory requires it",
    ),
    Row("save_steps", "save_steps", "[at each epoch]", "save_steps", "save_steps"),
    Row(
        "save_total_limit",
        "save_total_limit",
        "save_total_limit",
        "save_total_limit",
        "save_total_limit",
    ),
    Row(
        "logging_steps",
        "logging_steps",
        "[0.5 % of the steps, from 1 to 10]",
        "logging_steps",
        "logging_steps",
    ),
)

_HEAD = """# Defaults, beside those of TRL, axolotl, LLaMA-Factory and Unsloth

This page shows what a run does where its file is silent, and what four other trainers do. Those of TRL, axolotl and LLaMA-Factory
are the tables that `lema config import` starts from, so an imported file keeps them; Unsloth's were read in its source."""

_TAIL = """
`null` stands for none. A batch of LEMA is `batch_size` rows of all processes together, and the others count rows of one device.

Why LEMA's are as they are:

- **Clipping at 1.0**, AdamW's numbers, no weight decay, the seed and the linear schedule are what most of them share.
- **The learning rate** is for adapters: 1e-4 and, for preferences, 5e-6. LLaMA-Factory's 15 examples of LoRA and QLoRA write these two.
- **`lora_alpha` is twice the rank**, as in LLaMA-Factory, and in TRL for its rank of 16. Dropout stays 0 as in three of four: with it, numbers would
  depend on `micro_batch_size`.
- **The warm-up** is axolotl's, because it has a sensible length for short and for long runs.
- **One epoch**, because a pass over the data of a model that streams takes long; three are one setting away.
- **Three checkpoints are kept**, so that a long run does not fill the disk.

`python tests/support/defaultspage.py > docs/defaults.md` generates this page."""


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    tables = {tool: json.loads(file.read_text(encoding="utf-8")) for tool, file in TABLES.items()}
    yield from _HEAD.splitlines()
    yield ""
    yield "| tool | release or commit | date |"
    yield "|---|---|---|"
    for tool, table in tables.items():
        commit = table["commit"]
        known = commit[:8] if len(commit) == 40 else commit
        yield f"| {tool} {table['version']} | {known} | {table['date']} |"
    yield ""
    yield f"| setting | LEMA | {' | '.join(tables)} |"
    yield f"|---|---|{'---|' * len(tables)}"
    for row in ROWS:
        yield _line(row, tables)
    yield from _TAIL.splitlines()


def _line(row: Row, tables: dict[str, dict[str, Any]]) -> str:
    keys = (row.trl, row.axolotl, row.llama_factory, row.unsloth)
    peers = [
        peer_default(table, tool, key, row.objective)
        for (tool, table), key in zip(tables.items(), keys, strict=True)
    ]
    name = f"`{row.setting}`" + ("" if row.objective == "sft" else f" for `{row.objective}`")
    own = row.lema or _shown(LemaConfig.json_schema()["properties"][row.setting]["default"])
    return f"| {name} | {own} | {' | '.join(peers)} |"


def peer_default(table: dict[str, Any], tool: str, key: str, objective: str) -> str:
    """Return a peer's default as the page shows it: of its table, or the words in brackets."""
    if key.startswith("["):
        return key.strip("[]")
    kinds = _SFT if objective == "sft" else _DPO
    values = table["defaults"]["all"] | table["defaults"].get(kinds.get(tool, "all"), {})
    return _shown(values[key])


def _shown(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
