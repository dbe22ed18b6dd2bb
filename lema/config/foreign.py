"""What other trainers call settings of the data, and what says the same here.

The names are those of TRL's settings, of axolotl's, and of others that call them so.
"""

from collections.abc import Mapping

__all__ = ["SAID_HERE"]

_ANSWERS = "here: train_on: assistant, which is the default: answers and completions are trained on, prompts are not"
_COLUMN = "here: columns: {{{ours}: NAME}}"

SAID_HERE: Mapping[str, str] = {
    "assistant_only_loss": _ANSWERS,
    "completion_only_loss": _ANSWERS,
    "train_on_responses_only": _ANSWERS,
    "response_template": f"{_ANSWERS}; the chat template says where they begin",
    "instruction_template": f"{_ANSWERS}; the chat template says where they begin",
    "train_on_inputs": "here: train_on: all, or assistant, which is the default",
    "train_on_prompt": "here: train_on: all, or assistant, which is the default",
    "roles_to_train": "here: train_on: assistant (the default), last, completion or all",
    "mask_history": "here: train_on: last",
    "last_turn_only": "here: train_on: last",
    "train_on_eos": "the token that ends an answer is always trained on, and no other is",
    "train_on_eot": "the token that ends an answer is always trained on, and no other is",
    "eot_tokens": "the chat template says which token ends an answer, and that is trained on",
    "template": "here: chat_template: a .jinja file, or the Jinja text; without it the tokenizer's own",
    "chat_template_jinja": "here: chat_template: a .jinja file, or the Jinja text; without it the tokenizer's own",
    "chat_template_path": "here: chat_template: a .jinja file, or the Jinja text; without it the tokenizer's own",
    "dataset_text_field": _COLUMN.format(ours="text"),
    "text_column": _COLUMN.format(ours="text"),
    "field": _COLUMN.format(ours="text"),
    "field_messages": _COLUMN.format(ours="messages"),
    "field_tools": _COLUMN.format(ours="tools"),
    "field_system": _COLUMN.format(ours="system"),
    "field_instruction": _COLUMN.format(ours="instruction"),
    "field_input": _COLUMN.format(ours="input"),
    "field_output": _COLUMN.format(ours="output"),
    "message_field_role": _COLUMN.format(ours="role"),
    "message_field_content": _COLUMN.format(ours="content"),
    "message_property_mappings": "here: columns: {role: NAME, content: NAME}",
    "message_field_training": "`train` or `training` of a message, true or false, is obeyed as it is",
    "message_field_training_detail": "parts of a message cannot be left out; split it into messages with train: false",
    "formatting_func": "give rows that are formatted: text, prompt + completion, or messages",
    "formatting_prompts_func": "give rows that are formatted: text, prompt + completion, or messages",
    "remove_unused_columns": "columns that nothing reads are named and left alone",
    "excess_length_strategy": "here: overlong: truncate, drop or error",
    "truncation_mode": "rows are cut at their end; overlong: drop leaves long ones out",
    "append_eos_token": "text and completions always end in the end-of-sequence token, once",
}
