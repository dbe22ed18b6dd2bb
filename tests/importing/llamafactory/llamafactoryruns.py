"""Files of LLaMA-Factory with its own keys, and what they come to as settings of LEMA.

The expectations are written from src/llamafactory (ff6d4d1) and `Seq2SeqTrainingArguments`.
"""

from dataclasses import dataclass, field
from typing import Any

from lema_tools.importing.llamafactory.templates import Format, chat_template

INFO = {
    "shop": {"file_name": "shop.json"},
    "notes": {"file_name": "notes.jsonl", "columns": {"prompt": "text"}},
    "letters": {
        "file_name": "letters.json",
        "columns": {"prompt": "ask", "response": "reply", "system": "about"},
    },
    "talks": {"hf_hub_url": "org/talks", "formatting": "sharegpt", "split": "train_sft"},
    "dialogs": {
        "file_name": "dialogs.jsonl",
        "formatting": "openai",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    },
    "ranked": {
        "file_name": "ranked.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "ranked_rows": {
        "file_name": "ranked_rows.json",
        "ranking": True,
        "columns": {
            "prompt": "instruction",
            "query": "input",
            "chosen": "chosen",
            "rejected": "rejected",
        },
    },
    "thumbs": {
        "file_name": "thumbs.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "sampled": {"file_name": "sampled.json", "num_samples": 50},
    "older": {"file_name": "older.json", "columns": {"prompt": "q", "history": "turns"}},
    "pictures": {"hf_hub_url": "org/pictures", "columns": {"prompt": "q", "images": "images"}},
}
FORM = {"prompt": "{instruction}\n{input}", "chat": True, "without_input": "{instruction}"}
SHOP = {"path": "data/shop.json", "row_format": FORM}
DEFAULTS: dict[str, Any] = {
    "objective": "sft",
    "loss_type": "nll",
    "dtype": None,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": None,
    "lora_target_parameters": [],
    "max_length": 2048,
    "overlong": "error",
    "packing": False,
    "train_on": "assistant",
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": None,
    "seed": 42,
    "data_seed": None,
    "shuffle": "transformers",
    "pad_to_multiple_of": 8,
    "save_steps": 500,
    "save_total_limit": None,
    "eval_split": None,
    "quantize_base": None,
}
"""What a run comes to that sets none of these."""


@dataclass(frozen=True)
class Run:
    """A file, its settings that are not `DEFAULTS`, and the keys that change the numbers."""

    text: str
    settings: dict[str, Any]
    changes: set[str] = field(default_factory=set)


def template(name: str, **options: Any) -> str:
    """The chat template of a name."""
    return chat_template(Format.named(name), **options)


RUNS = {
    "sft": Run(
        """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: shop
template: qwen3_nothink
cutoff_len: 1024
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/shop
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
""",
        {
            "train_data": {**SHOP, "max_samples": 1000},
            "chat_template": template("qwen3_nothink"),
            "lora_rank": 16,
            "lora_alpha": 32,
            "max_length": 1024,
            "batch_size": 1,
            "gradient_accumulation_steps": 8,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "dtype": "bfloat16",
            "compute_dtype": "weights",
            "output_dir": "saves/shop",
        },
    ),
    "reasoning": Run(
        """
model_name_or_path: Qwen/Qwen3-8B
do_train: true
dataset: talks
template: qwen3
enable_thinking: false
mask_history: true
bf16: true
output_dir: out
""",
        {
            "train_data": {"path": "org/talks", "split": "train_sft"},
            "chat_template": template("qwen3", thinks=False, last_thought_only=True),
            "train_on": "last",
            "dtype": "bfloat16",
        },
    ),
    "qlora": Run(
        """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
do_train: true
dataset: dialogs,shop
template: llama3
default_system: You sell boats.
quantization_bit: 4
quantization_method: bnb
double_quantization: false
lora_target: q_proj,v_proj
lora_dropout: 0.1
loraplus_lr_ratio: 16.0
use_rslora: true
additional_target: embed_tokens,lm_head
bf16: true
optim: paged_adamw_8bit
output_dir: out
""",
        {
            "train_data": {"dialogs": {"path": "data/dialogs.jsonl"}, "shop": SHOP},
            "chat_template": template("llama3", default_system="You sell boats."),
            "quantize_base": "nf4",
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_modules_to_save": ["embed_tokens", "lm_head"],
            "lora_dropout": 0.1,
            "lora_use_rslora": True,
            "loraplus_lr_ratio": 16.0,
            "optim": "paged_adamw_8bit",
            "dtype": "bfloat16",
        },
        {"double_quantization"},
    ),
    "double_quantised": Run(
        """
model_name_or_path: org/base
do_train: true
dataset: shop
template: mistral
quantization_bit: 4
bf16: true
output_dir: out
""",
        {
            "train_data": SHOP,
            "chat_template": template("mistral"),
            "quantize_base": "nf4",
            "dtype": "bfloat16",
        },
    ),
    "full": Run(
        """
model_name_or_path: Qwen/Qwen3-0.6B
do_train: true
stage: sft
finetuning_type: full
deepspeed: ds_z3_config.json
dataset: letters
template: chatml
learning_rate: 1.0e-5
weight_decay: 0.1
adam_beta2: 0.95
max_grad_norm: 0.5
bf16: true
save_total_limit: 3
output_dir: out
""",
        {
            "train_data": {
                "path": "data/letters.json",
                "columns": {"instruction": "ask", "system": "about", "output": "reply"},
                "row_format": {"prompt": "{instruction}", "chat": True},
            },
            "chat_template": template("chatml"),
            "trains": "full",
            "objective": ...,
            "loss_type": ...,
            "quantize_base": ...,
            "learning_rate": 1e-5,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 0.5,
            "dtype": "bfloat16",
            "save_total_limit": 3,
            "lora_rank": ...,
            "lora_alpha": ...,
            "lora_dropout": ...,
            "lora_target_modules": ...,
            "lora_target_parameters": ...,
        },
        {"bf16"},
    ),
    "dpo": Run(
        """
model_name_or_path: org/base
do_train: true
stage: dpo
pref_beta: 0.2
pref_loss: sigmoid
dataset: ranked
template: llama3
lora_dropout: 0.05
learning_rate: 5.0e-6
bf16: true
output_dir: out
""",
        {
            "train_data": {
                "path": "data/ranked.json",
                "columns": {"prompt": "conversations", "role": "from", "content": "value"},
            },
            "chat_template": template("llama3"),
            "objective": "dpo",
            "loss_type": "sigmoid",
            "beta": 0.2,
            "reference": "base",
            "lora_dropout": 0.0,
            "learning_rate": 5e-6,
            "dtype": "bfloat16",
        },
    ),
    "simpo": Run(
        """
model_name_or_path: org/base
do_train: true
stage: dpo
pref_loss: simpo
pref_beta: 2.0
simpo_gamma: 1.0
dataset: ranked_rows
template: chatml
bf16: true
output_dir: out
""",
        {
            "train_data": {"path": "data/ranked_rows.json", "row_format": FORM},
            "chat_template": template("chatml"),
            "objective": "simpo",
            "loss_type": None,
            "beta": 2.0,
            "simpo_gamma": 1.0,
            "cpo_alpha": 0.0,
            "dtype": "bfloat16",
        },
        {"dataset ranked_rows"},
    ),
    "orpo": Run(
        """
model_name_or_path: org/base
do_train: true
stage: dpo
pref_loss: orpo
dataset: ranked
template: chatml
bf16: true
output_dir: out
""",
        {"objective": "orpo", "loss_type": None, "beta": 0.1, "dtype": "bfloat16"},
        {"pref_loss"},
    ),
    "kto": Run(
        """
model_name_or_path: org/base
do_train: true
stage: kto
pref_beta: 0.1
kto_chosen_weight: 1.5
dataset: thumbs
template: chatml
bf16: true
output_dir: out
""",
        {
            "train_data": ["data/thumbs.json"],
            "objective": "kto",
            "loss_type": "kto",
            "reference": "base",
            "desirable_weight": 1.5,
            "undesirable_weight": 1.0,
            "dtype": "bfloat16",
        },
        {"stage", "dataset thumbs"},
    ),
    "pretrain": Run(
        """
model_name_or_path: org/base
do_train: true
stage: pt
dataset: notes
packing: false
bf16: true
output_dir: out
""",
        {
            "train_data": ["data/notes.jsonl"],
            "overlong": "truncate",
            "train_on": "all",
            "pad_to_multiple_of": None,
            "dtype": "bfloat16",
        },
    ),
    "pretrain_packed": Run(
        """
model_name_or_path: org/base
do_train: true
stage: pt
dataset: notes
bf16: true
output_dir: out
""",
        {
            "overlong": "truncate",
            "packing": "wrapped",
            "max_length": 2048,
            "train_on": "all",
            "pad_to_multiple_of": None,
            "dtype": "bfloat16",
        },
        {"packing"},
    ),
    "packed": Run(
        """
model_name_or_path: org/base
do_train: true
dataset: shop
template: chatml
neat_packing: true
cutoff_len: 4096
bf16: true
output_dir: out
""",
        {"packing": True, "max_length": 4095, "dtype": "bfloat16"},
        {"neat_packing"},
    ),
    "held_back": Run(
        """
model_name_or_path: org/base
do_train: true
dataset: sampled
template: vicuna
val_size: 0.1
eval_strategy: steps
eval_steps: 100
per_device_eval_batch_size: 1
warmup_steps: 20
train_on_prompt: true
disable_shuffling: true
pure_bf16: true
output_dir: out
""",
        {
            "train_data": {"path": "data/sampled.json", "max_samples": 50, "row_format": FORM},
            "chat_template": template("vicuna"),
            "eval_split": 0.1,
            "eval_steps": 100,
            "warmup_steps": 20,
            "train_on": "all",
            "shuffle": "sequential",
            "dtype": "bfloat16",
        },
        {"dataset sampled", "val_size", "pure_bf16"},
    ),
    "mixed": Run(
        """
model_name_or_path: org/base
do_train: true
dataset: shop,talks
mix_strategy: interleave_under
interleave_probs: 0.7,0.3
eval_dataset: letters
template: glm4
seed: 7
data_seed: 8
bf16: true
output_dir: out
""",
        {
            "mixture": {"shop": 0.7, "talks": 0.3},
            "eval_data": {
                "path": "data/letters.json",
                "columns": {"instruction": "ask", "system": "about", "output": "reply"},
                "row_format": {"prompt": "{instruction}", "chat": True},
            },
            "chat_template": template("glm4"),
            "seed": 7,
            "data_seed": 8,
            "dtype": "bfloat16",
        },
        {"mix_strategy", "template"},
    ),
    "continued": Run(
        """
model_name_or_path: org/base
do_train: true
adapter_name_or_path: saves/first
dataset: older
template: gemma
moe_aux_loss_coef: 0.01
neftune_noise_alpha: 5
use_dft_loss: true
max_steps: 40
output_dir: out
""",
        {
            "train_data": {
                "path": "data/older.json",
                "columns": {"instruction": "q", "history": "turns"},
                "row_format": {"prompt": "{instruction}", "chat": True},
            },
            "adapter_name_or_path": "saves/first",
            "router_aux_loss_coef": 0.01,
            "neftune_noise_alpha": 5,
            "loss_type": "dft",
            "max_steps": 40,
        },
        {"bf16"},
    ),
    "images": Run(
        """
model_name_or_path: org/base
do_train: true
dataset: pictures
template: qwen2_vl
pissa_init: true
resize_vocab: true
add_tokens: a,b
bf16: true
output_dir: out
""",
        {"chat_template": template("qwen2_vl"), "dtype": "bfloat16"},
        {"dataset pictures", "pissa_init", "resize_vocab", "add_tokens"},
    ),
}
