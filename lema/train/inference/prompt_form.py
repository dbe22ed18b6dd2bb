"""How the text of a prompt is written for a model: as the rows of its training were."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lema.config import LemaConfig
from lema.data import forms_of, read_rows
from lema.data.chat.stop_tokens import answer_stop_tokens
from lema.data.columns import detect
from lema.data.row_forms import PromptForm, prompt_form_of
from lema.errors import ConfigError, DataError
from lema.model.files import ModelFiles

__all__ = ["ChosenForm", "choose_form", "recorded_form"]


class ChosenForm(NamedTuple):
    """A form, and why it was chosen; empty: the user chose it, or there is no other."""

    form: PromptForm
    reason: str


def recorded_form(files: ModelFiles, chat: bool | None) -> PromptForm:
    """Return the form of prompts given from Python.

    Args:
        files: the model's directory and the adapter's.
        chat: True: chats; False: text as it is; None: as the rows of the training were, and text
            as it is where no training is known.

    Returns:
        The form.

    Raises:
        ConfigError: chats are asked for, and the tokenizer has no chat template.
    """
    if chat is not None:
        return _requested(files, chat)
    return prompt_form_of(files.row_forms) or "text"


def choose_form(files: ModelFiles, config: LemaConfig, chat: bool | None) -> ChosenForm:
    """Return the form of prompts given to a command.

    What is known of the training decides: `row_forms.json` beside the adapter or the model, else
    the first row of the run's data. Where neither is there, the tokenizer's chat template does.

    Args:
        files: the model's directory and the adapter's.
        config: the settings of the run.
        chat: True: chats; False: text as it is; None: what is known decides.

    Returns:
        The form and why it was chosen.

    Raises:
        ConfigError: chats are asked for, and the tokenizer has no chat template.
    """
    chosen = _chosen(files, config, chat)
    if chosen.form == "chat":
        files.end_turns_at(answer_stop_tokens(files.tokenizer))
    return chosen


_ROWS = {"chat": "chats", "alpaca": "instructions in Alpaca's form", "text": "text"}


def _chosen(files: ModelFiles, config: LemaConfig, chat: bool | None) -> ChosenForm:
    if chat is not None:
        return ChosenForm(_requested(files, chat), "")
    templated = bool(files.tokenizer.chat_template)
    if (form := prompt_form_of(files.row_forms)) is not None:
        reason = f"the run was trained on {_ROWS[form]}"
        return ChosenForm(form, reason if templated or form != "text" else "")
    if (form := _form_of_data(files, config)) is not None:
        reason = f"the data of the run are {_ROWS[form]}"
        return ChosenForm(form, reason if templated or form != "text" else "")
    if templated:
        return ChosenForm("chat", "the tokenizer has a chat template")
    return ChosenForm("text", "")


def _requested(files: ModelFiles, chat: bool) -> PromptForm:
    if not chat:
        return "text"
    if not files.tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template to write messages with",
            where=files.tokenizer.name_or_path or "tokenizer",
            how="set chat_template, or continue the text as it is with --raw (chat=False)",
        )
    files.end_turns_at(answer_stop_tokens(files.tokenizer))
    return "chat"


def _form_of_data(files: ModelFiles, config: LemaConfig) -> PromptForm | None:
    """Return the form that the first row of the training data has; None: it cannot be told here."""
    named = config.train_data
    groups = list(named.values()) if isinstance(named, dict) else [named]
    paths = [path for group in groups for path in (group if isinstance(group, list) else [group])]
    forms = forms_of(config)
    for path in paths:
        if not isinstance(path, str) or not Path(path).is_file():
            continue
        with suppress(DataError):  # because generating needs no data
            row = forms.renamed(next(iter(read_rows(path))))
            columns = detect(row, forms)
            if columns[0] in ("messages", "conversations"):
                return "chat"
            if columns[0] == "instruction":
                return "chat" if files.tokenizer.chat_template else "alpaca"
            if columns[0] == "prompt":
                return "text" if isinstance(row.values["prompt"], str) else "chat"
            return "text" if columns[0] == "text" else None
    return None
