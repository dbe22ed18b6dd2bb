"""Writes values.json: what axolotl's own code makes of the values of its examples.

It needs axolotl's sources and the packages that they import, and nothing of LEMA:

    PYTHONPATH=AXOLOTL/src python tests/importing/axolotl/axolotlvalues.py AXOLOTL

`values.json` was written on 29 November 2026 from axolotl 067b021, as `axolotltokens` says. Of each
example `validate_config` and `_set_base_training_args` of its builder run as they are, for a run of
so many steps as `STEPS` says. What they leave out has the default of its class of arguments.
"""

import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from transformers import LlamaConfig

HERE = Path(__file__).parent
STEPS = (7, 45, 1015)
NAMES = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
NAMES += ("max_grad_norm", "num_train_epochs", "per_device_train_batch_size", "seed")
NAMES += ("gradient_accumulation_steps", "lr_scheduler_type", "optim", "bf16", "save_total_limit")
ADAPTER = ("adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
ADAPTER += ("lora_target_linear", "sequence_len", "val_set_size", "cosine_min_lr_ratio")
EXAMPLES = (
    "llama-3/lora-1b.yml",
    "llama-3/qlora-1b.yml",
    "llama-3/lora-8b.yml",
    "llama-3/instruct-lora-8b.yml",
    "llama-3/qlora.yml",
    "llama-3/fft-8b.yaml",
    "llama-2/lora.yml",
    "llama-2/qlora.yml",
    "llama-2/fft_optimized.yml",
    "mistral/lora.yml",
    "mistral/qlora.yml",
    "mistral/config.yml",
    "gemma2/qlora.yml",
    "gemma3/gemma-3-1b-qlora.yml",
    "qwen2/qlora-fsdp.yaml",
    "qwen3/qlora-fsdp.yaml",
    "phi/phi3-ft.yml",
    "phi/lora-3.5.yaml",
    "jamba/qlora.yaml",
    "falcon-h1/falcon-h1-1b-deep-qlora.yaml",
    "deepseek-v2/fft-fsdp-16b.yaml",
    "granite4/granite-4.0-tiny-fft.yaml",
    "archived/pythia/lora.yml",
    "archived/tiny-llama/lora.yml",
    "archived/openllama-3b/lora.yml",
)


def values_of(text: str) -> dict[str, Any]:
    """The resolved values of a file, and its steps of warm-up for each number of steps."""
    config = import_module("axolotl.utils.config")
    builders = import_module("axolotl.core.builders")
    arguments = import_module("axolotl.core.training_args").AxolotlTrainingArguments
    config.load_model_config = lambda cfg: LlamaConfig()
    raw = import_module("axolotl.utils.dict").DictDefault(yaml.safe_load(text))
    capabilities = {
        "bf16": True,
        "fp8": False,
        "tf32": True,
        "n_gpu": 1,
        "compute_capability": "sm_90",
    }
    cfg = config.validate_config(raw, capabilities, {"torch_version": "2.11.0"})
    cfg.gradient_accumulation_steps = cfg.gradient_accumulation_steps or (
        cfg.batch_size // cfg.micro_batch_size
    )
    builder = builders.HFCausalTrainerBuilder.__new__(builders.HFCausalTrainerBuilder)
    builder.cfg = cfg
    builder._eval_dataset = None
    builder.model = SimpleNamespace()
    made = {steps: builder._set_base_training_args(steps)[0] for steps in STEPS}
    defaults = {
        each.name: each.default for each in dataclasses.fields(arguments) if each.name in NAMES
    }
    resolved = {name: made[STEPS[0]].get(name, defaults.get(name)) for name in NAMES}
    resolved |= {name: cfg.get(name) for name in ADAPTER}
    resolved["warmup_steps"] = {steps: made[steps]["warmup_steps"] for steps in STEPS}
    return json.loads(json.dumps(resolved, default=str))


def main() -> None:
    """Write the table."""
    folder = Path(sys.argv[1]) / "examples"
    lines = []
    for name in EXAMPLES:
        file = folder / name
        if not file.is_file():
            sys.stderr.write(f"there is no {name}\n")
            continue
        text = file.read_text(encoding="utf-8")
        try:
            resolved = values_of(text)
        except Exception as error:  # noqa: BLE001 - of any kind: the file is left out, and named
            sys.stderr.write(f"{name}: {str(error)[:200]}\n")
            continue
        lines.append(
            json.dumps({"example": name, "file": yaml.safe_load(text), "values": resolved})
        )
    (HERE / "values.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
