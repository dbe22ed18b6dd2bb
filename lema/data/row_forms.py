"""The forms of the rows that a model was trained on: chats, Alpaca's text, prompts with
completions, plain text. A prompt is written in the same form later.

The form of each row is a bit of its mark (`lema.data.dataset.ROW`), so that kept tokens know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from lema.data.chat.messages import Chat
from lema.data.columns import ALPACA_HEAD, Example, Text

__all__ = ["BITS", "PromptForm", "RowForm", "form_bit", "prompt_form_of"]

RowForm: TypeAlias = Literal["chat", "alpaca", "completion", "text"]

PromptForm: TypeAlias = Literal["chat", "alpaca", "text"]
"""How the text of a prompt is written: as a message of the user, as Alpaca's instruction, or as it
is.
"""

# The two bits before these are those of preferences (`lema.data.preference`).
BITS: dict[RowForm, int] = {"chat": 16, "alpaca": 32, "completion": 64, "text": 128}


def form_bit(example: Example) -> int:
    """Return the bit of a row's form; 0: it has tokens, which say nothing of it."""
    if isinstance(example, Chat):
        return BITS["chat"]
    if not isinstance(example, Text):
        return 0
    if example.prompt.startswith(ALPACA_HEAD):
        return BITS["alpaca"]
    return BITS["completion" if example.prompt else "text"]


def prompt_form_of(forms: Iterable[str]) -> PromptForm | None:
    """Return how a prompt is written to a model that was trained on rows of these forms; None:
    nothing is known. Where some of the rows were chats it is a chat, because text of a mixture is
    there to be read and chats are there to be answered."""
    names = set(forms)
    if "chat" in names:
        return "chat"
    if "alpaca" in names:
        return "alpaca"
    return "text" if names & BITS.keys() else None
