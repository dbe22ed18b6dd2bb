"""Writes tokens.json: the token ids and labels that axolotl's own code makes of a few rows.

It needs axolotl's sources and the packages that they import, and nothing of LEMA:

    PYTHONPATH=AXOLOTL/src python tests/importing/axolotl/axolotltokens.py AXOLOTL

`tokens.json` was written on 29 November 2026 from axolotl 067b021 with transformers 5.14.1, trl
1.8.0 and datasets 4.8.4. Of each of its examples the keys are taken that decide tokens. Its
`validate_config`, `load_tokenizer` and `get_dataset_wrapper` run as they are, except that files of
models and tokenizers are replaced by a small tokenizer and a small config. Pairs go through its
`load_dpo`, and then through `_prepare_dataset` of TRL's trainer, which its own trainer inherits.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from axolotlcases import CASES
from axolotltokenizer import tokenizer_of
from datasets import Dataset
from transformers import LlamaConfig

HERE = Path(__file__).parent
KEYS = ("datasets", "chat_template", "chat_template_jinja", "eot_tokens", "train_on_inputs", "rl")
KEYS += ("special_tokens", "default_system_message")


def run_of(case: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """The keys of an example that decide tokens; a case may have others in their place."""
    text = (checkout / "examples" / case["example"]).read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    run = {key: values[key] for key in KEYS if values.get(key) is not None}
    run["datasets"] = [run["datasets"][case.get("dataset", 0)]]
    return run | case.get("keys", {})


def tokens_of(case: dict[str, Any], run: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows of a case as axolotl tokenises them."""
    loader = import_module("axolotl.loaders.tokenizer")
    config = import_module("axolotl.utils.config")
    values = import_module("axolotl.utils.dict").DictDefault(
        {
            "base_model": "org/model",
            "sequence_len": 512,
            "learning_rate": 1e-4,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "bf16": False,
            **json.loads(json.dumps(run)),
        }
    )
    small = LlamaConfig()
    loader.load_model_config = config.load_model_config = lambda cfg: small
    tokenizer = tokenizer_of(case["tokenizer"])
    loader.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    cfg = config.validate_config(values)
    cfg.model_config_type = "llama"
    cfg.dataset_num_proc = 1
    loaded = loader.load_tokenizer(cfg)
    rows = Dataset.from_list(case["rows"])
    if cfg.rl:
        return pairs_of(cfg, loaded, rows)
    return rows_of(cfg, loaded, rows)


def rows_of(cfg: Any, tokenizer: Any, rows: Any) -> list[dict[str, list[int]]]:
    """Rows of one data set for a run without pairs."""
    sft = import_module("axolotl.utils.data.sft")
    (entry,) = import_module("axolotl.utils.data.shared").datasets_with_name_generator(cfg.datasets)
    base, style = sft._parse_dataset_type(entry.type)
    data, _ = sft.get_dataset_wrapper(entry, tokenizer, cfg, base, rows, style)
    return [{"ids": row["input_ids"], "labels": row["labels"]} for row in data]


def pairs_of(cfg: Any, tokenizer: Any, rows: Any) -> list[dict[str, list[int]]]:
    """Pairs as text by axolotl, and as tokens by its trainer."""
    rl = import_module("axolotl.utils.data.rl")
    load = rl.load_orpo if cfg.rl == "orpo" else rl.load_dpo
    transform = load(cfg.datasets[0].type, cfg, dataset_idx=0)
    transform, options = transform if isinstance(transform, tuple) else (transform, {})
    if options.get("remove_columns"):
        options["remove_columns"] = [
            name for name in options["remove_columns"] if name in rows.column_names
        ]
    texts = rl._map_dataset(cfg, rows, transform, tokenizer, **options)
    trainer_class = import_module("trl").DPOTrainer
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    args = SimpleNamespace(dataset_num_proc=None)
    data = trainer_class._prepare_dataset(trainer, texts, tokenizer, args, "train")
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: row[name] for name in names} for row in data]


def main() -> None:
    """Write the table."""
    checkout = Path(sys.argv[1])
    table = []
    for case in CASES:
        run = run_of(case, checkout)
        for entry in run["datasets"]:
            entry["path"] = "rows.jsonl"
            entry.pop("name", None)
        kept = {name: case[name] for name in ("example", "tokenizer", "rows")}
        table.append({**kept, "run": run, "tokens": tokens_of(case, run)})
        sys.stderr.write(f"{case['example']}\n")
    lines = [json.dumps(entry, ensure_ascii=False) for entry in table]
    (HERE / "tokens.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
