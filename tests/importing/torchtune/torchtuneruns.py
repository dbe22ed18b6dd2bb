"""Files of torchtune's recipes with their own keys, and what they come to as settings of LEMA.

The expectations are written from recipes/*.py, torchtune/models/*/_model_builders.py and
torchtune/datasets/*.py at bd2a0fc, and from torch.optim.AdamW.
"""

from dataclasses import dataclass, field
from typing import Any

from lema_tools.importing.torchtune.sources import ALPACA
from lema_tools.importing.torchtune.templates import FAMILIES, chat_template

__all__ = ["DEFAULTS", "RUNS", "Run", "dataset", "file_of"]

LORA = """
output_dir: out
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/original/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
  checkpoint_files: [model-00001-of-00001.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: false
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: false
seed: null
shuffle: true
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: false
device: cuda
dtype: fp32
log_every_n_steps: 1
"""
CLEANED = {
    "path": "yahma/alpaca-cleaned",
    "split": "train",
    "row_format": ALPACA,
    "train_on": "all",
}
ATTENTION = ["q_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DEFAULTS = {
    "model_name_or_path": "/models/llama",
    "train_data": CLEANED,
    "chat_template": chat_template(FAMILIES["llama3_tokenizer"]),
    "max_length": 131072,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ATTENTION + MLP,
    "dtype": "float32",
    "optim": "adamw_torch_fused",
    "learning_rate": 3e-4,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
    "max_grad_norm": None,
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 1.0,
    "max_steps": None,
    "objective": "sft",
    "loss_type": "nll",
    "quantize_base": None,
    "packing": False,
    "overlong": "error",
    "shuffle": True,
}
"""What `LORA` comes to."""


@dataclass(frozen=True)
class Run:
    """What a file has besides `LORA`, its settings besides `DEFAULTS`, and what changes."""

    keys: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    changes: set[str] = field(default_factory=set)


def file_of(run: Run) -> dict[str, Any]:
    """The keys of a file, components nested."""
    from ruamel.yaml import YAML

    values: dict[str, Any] = YAML(typ="safe").load(LORA)
    for key, value in run.keys.items():
        *path, name = key.split(".")
        place = values
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        if value is ...:
            place.pop(name)
        else:
            place[name] = value
    return values


def dataset(name: str, **arguments: Any) -> dict[str, Any]:
    """The component of a data set."""
    return {"_component_": f"torchtune.datasets.{name}", **arguments}


FULL = {f"model.{key}": ... for key in ("lora_attn_modules", "apply_lora_to_mlp", "lora_rank")}
FULL |= {"model.lora_alpha": ..., "model.lora_dropout": ...}
NO_LORA = dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"), ...)
DPO = {
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05, "label_smoothing": 0},
    "dataset": dataset("stack_exchange_paired_dataset"),
    "tokenizer.max_seq_len": 1024,
    "max_steps_per_epoch": 1000,
    "clip_grad_norm": 1.0,
}
RUNS = {
    "lora": Run({}),
    "bf16": Run({"dtype": "bf16"}, {"dtype": "bfloat16"}, {"dtype"}),
    "qlora": Run(
        {
            "model._component_": "torchtune.models.llama3_1.qlora_llama3_1_8b",
            "model.apply_lora_to_output": True,
            "model.lora_rank": 64,
            "model.lora_alpha": 128,
            "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 2e-5},
        },
        {
            "quantize_base": "nf4",
            "lora_rank": 64,
            "lora_alpha": 128,
            "lora_target_modules": [*ATTENTION, *MLP, "lm_head"],
            "optim": "paged_adamw_8bit",
            "learning_rate": 2e-5,
        },
        {"model.quantize_base"},
    ),
    "dora": Run(
        {"model.use_dora": True, "model.apply_lora_to_mlp": False, "model.lora_dropout": 0.1},
        {"lora_use_dora": True, "lora_target_modules": ATTENTION, "lora_dropout": 0.1},
    ),
    "full": Run(
        {
            **FULL,
            "model._component_": "torchtune.models.qwen3.qwen3_8b_instruct",
            "tokenizer._component_": "torchtune.models.qwen3.qwen3_tokenizer",
            "tokenizer.merges_file": "/models/llama/merges.txt",
            "lr_scheduler": ...,
            "optimizer_in_bwd": False,
            "clip_grad_norm": 1.0,
            "epochs": 2,
        },
        {
            **NO_LORA,
            "trains": "full",
            "optim": "adamw_torch",
            "objective": ...,
            "loss_type": ...,
            "chat_template": chat_template(FAMILIES["qwen3_tokenizer"]),
            "max_length": 40960,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
            "num_train_epochs": 2.0,
            "quantize_base": ...,
        },
    ),
    "dpo": Run(
        DPO,
        {
            "objective": "dpo",
            "loss_type": "sigmoid",
            "reference": "base",
            "beta": 0.05,
            "max_length": 1024,
            "max_steps": 1000,
            "max_grad_norm": 1.0,
            "train_data": {
                "path": "lvwerra/stack-exchange-paired",
                "split": "train",
                "row_format": {"prompt": "Question: {instruction}\n\nAnswer: ", "chat": True},
                "columns": {
                    "instruction": "question",
                    "chosen": "response_j",
                    "rejected": "response_k",
                },
            },
        },
        {"dataset._component_"},
    ),
    "dpo_smoothed": Run(
        {**DPO, "loss.label_smoothing": 0.1, "model.lora_dropout": 0.1},
        {"objective": "dpo", "lora_dropout": 0.0, "train_data": ..., "max_length": ...}
        | {"max_steps": 1000, "max_grad_norm": 1.0, "loss_type": "sigmoid"},
        {"loss.label_smoothing", "model.lora_dropout", "dataset._component_"},
    ),
    "chat_of_files": Run(
        {
            "dataset": dataset(
                "chat_dataset",
                source="json",
                data_files="data/talks.json",
                conversation_column="dialog",
                conversation_style="openai",
                new_system_prompt="Be kind.",
                split="train[:95%]",
            )
        },
        {
            "train_data": {
                "path": "json",
                "data_files": "data/talks.json",
                "split": "train[:95%]",
                "columns": {"messages": "dialog"},
                "train_on": "assistant",
                "system_prompt": "Be kind.",
                "drop_system_messages": True,
            }
        },
    ),
    "sharegpt": Run(
        {
            "dataset": dataset(
                "chat_dataset",
                source="org/talks",
                conversation_column="conversations",
                conversation_style="sharegpt",
                train_on_input=True,
            )
        },
        {"train_data": {"path": "org/talks", "split": "train", "train_on": "all"}},
    ),
    "instruct": Run(
        {
            "dataset": dataset(
                "instruct_dataset", source="org/rows", column_map={"input": "q", "output": "a"}
            ),
            "seed": 7,
        },
        {
            "train_data": {
                "path": "org/rows",
                "split": "train",
                "row_format": {"prompt": "{instruction}", "chat": True},
                "columns": {"instruction": "q", "output": "a"},
                "train_on": "assistant",
            },
            "seed": 7,
        },
        {"shuffle"},
    ),
    "samsum": Run(
        {"dataset": dataset("samsum_dataset")},
        {
            "train_data": {
                "path": "Samsung/samsum",
                "split": "train",
                "row_format": {"prompt": "{instruction}", "chat": True},
                "columns": {"instruction": "dialogue", "output": "summary"},
                "train_on": "assistant",
            }
        },
    ),
    "text": Run(
        {"dataset": dataset("text_completion_dataset", source="org/books", column="body")},
        {
            "train_data": {
                "path": "org/books",
                "split": "train",
                "train_on": "all",
                "columns": {"text": "body"},
            }
        },
    ),
    "several": Run(
        {"dataset": [dataset("alpaca_cleaned_dataset"), dataset("slimorca_dataset")]},
        {
            "train_data": {
                "alpaca_cleaned_1": CLEANED,
                "slimorca_2": {
                    "path": "Open-Orca/SlimOrca-Dedup",
                    "split": "train",
                    "train_on": "assistant",
                },
            }
        },
    ),
    "packed": Run(
        {
            "dataset.packed": True,
            "tokenizer.max_seq_len": 4096,
            "lr_scheduler.num_cycles": 1.5,
            "lr_scheduler.num_warmup_steps": 5,
            "max_steps_per_epoch": 10,
            "epochs": 3,
        },
        {
            "packing": True,
            "max_length": 4096,
            "lr_scheduler_kwargs": {"num_cycles": 1.5},
            "warmup_steps": 5,
            "max_steps": 30,
            "num_train_epochs": 3.0,
        },
        {"dataset.packed", "max_steps_per_epoch"},
    ),
    "pieces": Run(
        {
            "tokenizer._component_": "torchtune.models.llama2.llama2_tokenizer",
            "model._component_": "torchtune.models.llama2.lora_llama2_7b",
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
        },
        {
            "chat_template": chat_template(FAMILIES["llama2_tokenizer"]),
            "max_length": 4096,
            "optim": "sgd",
            "learning_rate": 0.1,
            "weight_decay": 0.0,
        },
        {"tokenizer._component_"},
    ),
    "fused": Run(
        {
            "tokenizer._component_": "torchtune.models.phi3.phi3_mini_tokenizer",
            "model._component_": "torchtune.models.phi3.lora_phi3_mini",
            "dataset": {"_component_": "my.own.dataset"},
            "optimizer": {"_component_": "torchao.optim.Own", "lr": 1e-3},
        },
        {
            "chat_template": chat_template(FAMILIES["phi3_mini_tokenizer"]),
            "max_length": 4096,
            "lora_target_modules": None,
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "train_data": ...,
        },
        {
            "tokenizer._component_",
            "model.lora_attn_modules",
            "dataset._component_",
            "optimizer._component_",
        },
    ),
}
