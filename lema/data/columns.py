"""The kind of a row, told by the names of its columns: token ids, a chat, a prompt with its
completion, or text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lema.data.chat.messages import Chat, read_conversations, read_messages
from lema.data.files import Row
from lema.data.forms import IGNORED, MESSAGE_FIELDS, Forms, flag_of, list_of, text_of

__all__ = [
    "ALPACA_HEAD",
    "FLAGS",
    "IGNORED",
    "Example",
    "Kind",
    "Text",
    "Tokens",
    "alpaca_prompt",
    "detect",
    "left_out",
    "num_trained",
    "parse",
    "unused",
]

Kind: TypeAlias = tuple[str, ...]
"""The columns a row is read from. The first entry of `KINDS` whose columns a row has is its
kind.
"""

KINDS: tuple[Kind, ...] = (
    ("input_ids", "labels"),
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)

# What else is read of a row of a kind, by the first column of the kind.
_EXTRA_COLUMNS: dict[str, tuple[str, ...]] = {
    "input_ids": ("attention_mask",),
    "messages": ("tools",),
    "conversations": ("tools", "system"),
    "prompt": ("tools",),
    "instruction": ("input",),
}
FLAGS = frozenset(("train", "weight"))  # of any row: false or 0 leaves it out

# Stanford Alpaca's wording (https://github.com/tatsu-lab/stanford_alpaca), for tokenizers without a
# chat template.
ALPACA_HEAD = "Below is an instruction that describes a task"
_ALPACA = (
    f"{ALPACA_HEAD}. Write a response that appropriately "
    "completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

_ALPACA_INPUT = (
    f"{ALPACA_HEAD}, paired with an input that provides "
    "further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row tokenised beforehand; `labels` is as long as `ids` and holds -100 where nothing is
    trained on.
    """

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Text:
    """Text whose part after the prompt is trained on; the prompt is empty for plain text."""

    prompt: str
    completion: str


Example: TypeAlias = Tokens | Text | Chat

_AS_IT_IS = Forms()


def num_trained(labels: npt.NDArray[np.int32]) -> int:
    """How many tokens are trained on. The first never is: there is nothing to predict it from."""
    return int(np.count_nonzero(labels[1:] != IGNORED))


def detect(row: Row, forms: Forms = _AS_IT_IS) -> Kind:
    """The kind of a row, by the columns which are present and not null, and first of all by those
    the settings name. `DataError`: no kind fits; the message lists the columns found and those
    understood."""
    present = {name for name, value in row.values.items() if value is not None}
    named = {name for name in forms.columns if any(name in kind for kind in KINDS)}
    if present.issuperset(("chosen", "rejected")):
        how = "set objective: dpo, or rename 'chosen' to train only on it"
        raise row.broken(
            "the row has 'chosen' and 'rejected', but objective: sft compares nothing", how=how
        )
    if present.issuperset(("completion", "label")):
        how = "set objective: kto, or remove the column and the rows with bad completions"
        raise row.broken(
            "'label' marks good and bad completions, but objective: sft would train on all", how=how
        )
    for kind in KINDS:
        if present.issuperset(kind) and named.issubset(kind):
            return kind
    columns = ", ".join(sorted(map(str, present))) or "none"
    supported = "; ".join(" + ".join(kind) for kind in KINDS)
    how = (
        f"use one of these sets of columns: {supported}; or map your columns, for example "
        f"`columns: {{prompt: question}}`"
    )
    raise row.broken(f"the columns say nothing to train on (found: {columns})", how=how)


def unused(row: Row, kind: Kind) -> list[str]:
    """The names of the columns that hold something and that nothing is read from."""
    used = {*kind, *_EXTRA_COLUMNS.get(kind[0], ()), *FLAGS}
    return sorted(
        str(name) for name, value in row.values.items() if value is not None and name not in used
    )


def left_out(row: Row) -> bool:
    """Whether `train: false` or `weight: 0` keeps the row from training. `DataError`: one is no
    truth value, 1 or 0.
    """
    flags = [
        flag_of(row, row.values[name], f"'{name}'")
        for name in sorted(FLAGS)
        if row.values.get(name) is not None
    ]
    return not all(flags)


def parse(row: Row, kind: Kind, *, chat_template: bool, forms: Forms = _AS_IT_IS) -> Example:
    """Read a row of the kind that `detect` found; with a `chat_template` instruction data become
    chats. `DataError`: a value is missing, of the wrong type, or empty; names file, line and
    column."""
    fields = {name: forms.columns[name] for name in MESSAGE_FIELDS if name in forms.columns}
    match kind[0]:
        case "input_ids":
            return _tokens(row, labelled="labels" in kind)
        case "messages":
            return read_messages(row, "messages", fields)
        case "conversations":
            return read_conversations(row, fields)
        case "prompt":
            return _prompt_completion(row, fields)
        case "instruction":
            return _instruction(row, chat_template)
    return Text("", _text(row, "text"))


def _ints(row: Row, column: str) -> list[int]:
    values = list_of(row, column)
    for position, value in enumerate(values):
        if type(value) is not int:  # bool is an int to isinstance, and is never a token
            raise row.broken(
                f"'{column}' should hold whole numbers, not {value!r}", at=f"position {position}"
            )
    return values


def _tokens(row: Row, *, labelled: bool) -> Tokens:
    ids = _ints(row, "input_ids")
    labels = _ints(row, "labels") if labelled else list(ids)
    if len(labels) != len(ids):
        how = "give one label per token, -100 for tokens not to train on"
        raise row.broken(f"{len(ids)} input_ids but {len(labels)} labels", how=how)
    if row.values.get("attention_mask") is None:
        return Tokens(ids, labels)
    mask = _ints(row, "attention_mask")
    if len(mask) != len(ids):
        raise row.broken(f"{len(ids)} input_ids but an attention_mask of {len(mask)}")
    # padding is put back per batch, as much as that batch needs
    attended = [i for i, seen in enumerate(mask) if seen]
    return Tokens([ids[i] for i in attended], [labels[i] for i in attended])


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = text_of(row, row.values[column], f"'{column}'")
    if not may_be_empty and not value.strip():
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return value


def _prompt_completion(row: Row, fields: Mapping[str, str]) -> Example:
    """Two strings, or two lists of messages; the second begins with the assistant's answer."""
    prompt = row.values["prompt"]
    completion = row.values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        how = "write both as text, or both as lists of messages"
        raise row.broken("only one of 'prompt' and 'completion' is text", how=how)
    before = read_messages(row, "prompt", fields)
    after = read_messages(row, "completion", fields)
    if after.messages[0]["role"] != "assistant":
        raise row.broken(
            "'completion' should begin with an assistant message", at="completion, message 1"
        )
    length = len(before.messages)
    flags = (None,) * length + after.flags if after.flags else ()
    return Chat(before.messages + after.messages, before.tools, length, flags)


def _instruction(row: Row, chat_template: bool) -> Example:
    instruction = _text(row, "instruction")
    output = _text(row, "output")
    raw_input = row.values.get("input")
    extra = text_of(row, raw_input, "'input'") if raw_input is not None else ""
    if chat_template:
        question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        return Chat(
            [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        )
    return Text(alpaca_prompt(instruction, extra), output)


def alpaca_prompt(instruction: str, extra: str = "") -> str:
    """Return an instruction, with its input if it has one, in Alpaca's words."""
    wording = _ALPACA_INPUT if extra.strip() else _ALPACA
    return wording.format(instruction=instruction, input=extra)
