"""What other trainers call settings, and what says the same here, as hints in errors.

The names are those of TRL's settings, of axolotl's, and of others that call them so.
"""

from collections.abc import Mapping

__all__ = ["CALLED_HERE", "FOREIGN_HINTS"]

# What the columns of a data set, and of a message in it, are called by `field_...` and
# `message_field_...`.
_COLUMNS = ("messages", "tools", "system", "instruction", "input", "output")
_OF_MESSAGES = ("role", "content")

_ANSWERS = (
    "here: train_on: assistant, which is the default: answers and completions are trained on, "
    "prompts are not"
)
_COLUMN = "here: columns: {{{ours}: NAME}}"
_QUANTISE = "here: quantize_base: {kind}, which quantises the base at the first start"
_FORMATTED = "give formatted rows: text, prompt + completion, or messages"
_STREAMS = "not needed: layers stream, so a model need not be divided"
_HUB_DATA = "here: train_data: {path: org/name, name: subset, split: train}, or files"
_TOKENISED = "not needed: LEMA tokenises rows once, with several processes, before the first step"
_EVALUATES = (
    "not needed: LEMA evaluates eval_data or eval_split every eval_steps, or at the end of "
    "each epoch"
)

FOREIGN_HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_responses_only"), _ANSWERS
    ),
    **dict.fromkeys(
        ("response_template", "instruction_template"),
        f"{_ANSWERS}; the chat template says where they begin",
    ),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt"),
        "here: train_on: all, or assistant, which is the default",
    ),
    "roles_to_train": "here: train_on: assistant (the default), last, completion or all",
    **dict.fromkeys(("mask_history", "last_turn_only"), "here: train_on: last"),
    **dict.fromkeys(
        ("train_on_eos", "train_on_eot"), "only the token that ends an answer is trained on, always"
    ),
    **dict.fromkeys(
        ("template", "chat_template_jinja", "chat_template_path"),
        "here: chat_template: a name such as chatml, a .jinja file, or the Jinja text; without it "
        "the tokenizer's own",
    ),
    **dict.fromkeys(("dataset_text_field", "text_column", "field"), _COLUMN.format(ours="text")),
    **{f"field_{ours}": _COLUMN.format(ours=ours) for ours in _COLUMNS},
    **{f"message_field_{ours}": _COLUMN.format(ours=ours) for ours in _OF_MESSAGES},
    "message_property_mappings": "here: columns: {role: NAME, content: NAME}",
    "message_field_training": "not needed: `train` or `training` of a message already works",
    "message_field_training_detail": (
        "LEMA cannot leave out parts; split the message into several with train: false"
    ),
    **dict.fromkeys(("formatting_func", "formatting_prompts_func"), _FORMATTED),
    "remove_unused_columns": (
        "not needed: LEMA names columns that it does not use, and ignores them"
    ),
    "excess_length_strategy": "here: overlong: truncate, drop or error",
    "truncation_mode": "here: truncation_side: right keeps the beginning, left the end",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _STREAMS),
    "evals_per_epoch": "evaluations are at the end of each epoch, or every eval_steps",
    "hub_token": "no setting holds a token; use `hf auth login` or HF_TOKEN",
    "load_in_4bit": _QUANTISE.format(kind="nf4"),
    "load_in_8bit": _QUANTISE.format(kind="int8"),
    "saves_per_epoch": "checkpoints are written every save_steps",
    "special_tokens": "LEMA uses the tokenizer's own; change them in its files",
    "trust_remote_code": (
        "a file cannot allow code to run; use --trust-remote-code on the command line"
    ),
    "sample_packing": "here: packing: true",
    **dict.fromkeys(
        ("eval_packing", "eval_sample_packing"),
        "here: packing: true, which also packs the evaluation rows",
    ),
    "packing_strategy": (
        "here: packing: true joins whole rows by best fit, packing: wrapped cuts them"
    ),
    "padding_free": (
        "here: packing: true; without it a micro-batch has no more padding than its longest "
        "row needs"
    ),
    "train_sampling_strategy": (
        "here: group_by_length: true; shuffle: false keeps the order of the data, and "
        "transformers draws rows as its Trainer does"
    ),
    **dict.fromkeys(
        ("max_tokens", "max_tokens_per_batch", "batch_tokens"), "here: micro_batch_tokens"
    ),
    "append_eos_token": "text and completions always end in the end-of-sequence token, once",
    "adapter": "not needed for lora, which LEMA trains; for qlora, " + _QUANTISE.format(kind="nf4"),
    "use_peft": "not needed: LEMA trains an adapter",
    "peft_config": (
        "here: lora_rank, lora_alpha, lora_target_modules, ...: each PEFT option is a setting "
        "lora_NAME"
    ),
    **dict.fromkeys(("dataset_name", "dataset_config", "dataset_train_split"), _HUB_DATA),
    "dataset_test_split": (
        "here: eval_data: {path: org/name, name: subset, split: test}, or eval_split"
    ),
    **dict.fromkeys(
        ("dataset_num_proc", "dataset_processes", "dataloader_num_workers"), _TOKENISED
    ),
    "dataset_prepared_path": (
        "here: data_cache: the folder that keeps tokens of large data; it has a default"
    ),
    "wandb_project": "here: report_to: wandb, with the environment variable WANDB_PROJECT",
    "logging_dir": (
        "metrics.jsonl is in output_dir; TENSORBOARD_LOGGING_DIR sets the directory of tensorboard"
    ),
    "eos_token": "not needed: the tokenizer's own is used; change it in the tokenizer's files",
    "strict": "not needed: an unknown setting is always an error",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "do_eval"), _EVALUATES),
    "save_strategy": "here: save_steps: the steps between checkpoints, 0 for none",
    "do_train": "not needed: `lema train` trains, and `lema eval` evaluates",
    **dict.fromkeys(("bf16", "bfloat16"), "here: dtype: bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "here: dtype: float16"),
}


# What other trainers call the same thing: TRL's and axolotl's names where ours is another.
CALLED_HERE: Mapping[str, str] = {
    "base_model": "model_name_or_path",
    "epochs": "num_train_epochs",
    "eval_dataset": "eval_data",
    "lora_model_dir": "adapter_name_or_path",
    "lora_r": "lora_rank",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_seq_length": "max_length",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "peft_use_dora": "lora_use_dora",
    "peft_use_rslora": "lora_use_rslora",
    "rl": "objective",
    "rl_beta": "beta",
    "sample_packing": "packing",
    "sequence_len": "max_length",
    "torch_dtype": "dtype",
    "use_dora": "lora_use_dora",
    "use_rslora": "lora_use_rslora",
    "val_set_size": "eval_split",
    "wandb_name": "run_name",
}
