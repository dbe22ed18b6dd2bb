"""Settings of how rows are read, besides the names of their columns and the chat template; each
may also be given for one data set.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from lema.config.problems import SettingsError, Several
from lema.config.settings import OfData, Settings
from lema.config.types import Name, Names

__all__ = [
    "PLACES",
    "READING",
    "InstructionForm",
    "Roles",
    "RowFormat",
    "RowSettings",
    "TrainOn",
    "TruncationSide",
]

READING = (
    "columns",
    "roles",
    "chat_template",
    "train_on",
    "eot_tokens",
    "row_format",
    "system_prompt",
    "drop_system_messages",
    "truncation_side",
)
"""The settings that a data set may have a value of its own for."""

PLACES = re.compile(r"\{(instruction|input|system)\}")
"""Where a form of an instruction has the texts of a row."""

TrainOn = Literal["assistant", "last", "all", "completion", "contents"]
TruncationSide = Literal["right", "left"]


def _each_once(value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    seen = dict[str, str]()
    for role, names in value.items():
        for name in [names] if isinstance(names, str) else names:
            if seen.setdefault(name, role) != role:
                raise ValueError(f"must give {name!r} one role, not {seen[name]} and {role}")
    return value


class InstructionForm(Settings):
    """How an instruction is written."""

    prompt: Name
    """The text before the answer, with {instruction}, {input} and {system} in it."""
    without_input: Name | None = None
    """The same for rows without an input; else `prompt`, with nothing in the place of {input}."""
    chat: bool = False
    """true: the text is the user's message of a chat. false: it is the prompt."""
    separate: bool = False
    """true: prompt and answer are tokenised each for itself, as axolotl does; no token has the end
    of one and the beginning of the other."""


def _form(value: object) -> object:
    if value in ("auto", "alpaca", "chat"):
        return value
    if isinstance(value, dict):
        try:
            value = InstructionForm(**value)
        except SettingsError as error:
            raise Several(error.problems) from error
    texts = [value.prompt, value.without_input] if isinstance(value, InstructionForm) else [value]
    for text in texts:
        if text is not None and (not isinstance(text, str) or "{instruction}" not in text):
            raise ValueError(
                f"must be auto, alpaca, chat, or a text with {{instruction}}, not {text!r}"
            )
    return value


Roles = Annotated[dict[Name, Names], AfterValidator(_each_once)]
RowFormat = Annotated[Name | InstructionForm, BeforeValidator(_form)]


class RowSettings(Settings):
    """Settings of how rows are read."""

    roles: OfData[Roles | None] = None
    """The names that your data use for roles, by role: {assistant: [gpt, model], user: human}.
    None: ShareGPT's names."""
    eot_tokens: OfData[list[Name] | None] = None
    """The tokens that end a turn, for `train_on: contents`; the tokenizer's end-of-sequence token
    is one of them, and the only one by default."""
    system_prompt: OfData[Name | None] = None
    """The system message of chats that have none."""
    drop_system_messages: OfData[bool] = False
    """Leave out the system messages of chats; `system_prompt` then takes their place."""
    row_format: OfData[RowFormat] = "auto"
    """How rows of `instruction` and `output` are written. `auto`: as `chat` if the tokenizer has a
    chat template, otherwise as `alpaca`; `alpaca`: in the words of Stanford Alpaca; `chat`: as the
    user's message and the answer; or a text with {instruction} and {input}, or {prompt: text,
    without_input: text, chat: true, separate: true}."""
    truncation_side: OfData[TruncationSide] = "right"
    """Which side of rows that are too long is cut off; `left` keeps the end."""
