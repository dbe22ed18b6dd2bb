"""The kind of a row, told by the names of its columns: token ids, a chat, a prompt with its
completion, or text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lema.config.data.rows import PLACES
from lema.data.chat.messages import Chat, read_conversations, read_messages
from lema.data.chat.pictures import Kind as Medium
from lema.data.files import Row
from lema.data.forms import IGNORED, Forms, flag_of, list_of, text_of

__all__ = [
    "ALPACA_HEAD",
    "FLAGS",
    "IGNORED",
    "MEDIA_COLUMNS",
    "Example",
    "Kind",
    "Text",
    "Tokens",
    "alpaca_prompt",
    "check_without_images",
    "detect",
    "left_out",
    "media_column",
    "num_trained",
    "parse",
    "unused",
    "with_system",
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
MEDIA_COLUMNS: Mapping[Medium, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio"),
}
"""The columns of chats that hold images, videos and sounds, where the model sees or hears them."""
_MEDIA_NAMES = tuple(name for names in MEDIA_COLUMNS.values() for name in names)
_OF_FORMATS = ("system", "history")  # of instructions in a form that the settings name
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


_AS_CHAT = {
    "prompt": "{instruction}\n\n{input}",
    "without_input": "{instruction}",
    "chat": True,
}


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
    separate: bool = False  # whether the two are tokenised each for itself


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
    named = {
        name
        for name, theirs in forms.columns.items()
        if theirs is not None and any(name in kind for kind in KINDS)
    }
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


def unused(row: Row, kind: Kind, forms: Forms = _AS_IT_IS) -> list[str]:
    """The names of the columns that hold something and that nothing is read from."""
    used = {*kind, *_EXTRA_COLUMNS.get(kind[0], ()), *FLAGS}
    used |= {"system"} & forms.columns.keys()
    used |= set(_MEDIA_NAMES) if forms.pictures else set()
    if kind[0] == "instruction":
        used |= set(_OF_FORMATS) if _formatted(forms) else _OF_FORMATS & forms.columns.keys()
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
    chats, unless the forms say how they are written. `DataError`: a value is missing, of the wrong
    type, or empty; names file, line and column."""
    match kind[0]:
        case "input_ids":
            return _tokens(row, labelled="labels" in kind)
        case "messages":
            example: Example = read_messages(row, "messages", forms.fields, forms.roles)
        case "conversations":
            example = read_conversations(row, forms.fields, forms.roles)
        case "prompt":
            example = _prompt_completion(row, forms)
        case "instruction":
            example = _instruction(row, forms, chat_template=chat_template)
        case _:
            return Text("", _text(row, "text"))
    if not isinstance(example, Chat):
        return example
    if not forms.pictures:
        check_without_images(row, example)
    return with_system(row, example, forms)


def media_column(row: Row) -> str | None:
    """Return the first column of a row that has images, videos or sounds; None: none has."""
    for name in _MEDIA_NAMES:
        value = row.values.get(name)
        values = value if isinstance(value, list | tuple) else [value]
        if any(item is not None for item in values):
            return name
    return None


def check_without_images(row: Row, chat: Chat) -> None:
    """Refuse a chat with images, videos or sounds, with `DataError`, because the model is opened
    for text alone."""
    how = "set modalities: all for a model that sees images"
    if chat.pictures:
        what = "'content' holds something other than text"
        raise row.broken(what, at=chat.pictures[0].at, how=how)
    if (name := media_column(row)) is not None:
        what = f"the row has a column '{name}', and the model is opened for text alone"
        raise row.broken(what, how=f"{how}, or leave it unread: columns: {{{name}: NONE}}")


def with_system(row: Row, chat: Chat, forms: Forms) -> Chat:
    """Return a chat with the system message that the settings ask for. `DataError`: the column of
    system messages does not hold text."""
    if not (forms.drops_system or forms.system_prompt or "system" in row.values):
        return chat
    flags = chat.flags or (None,) * len(chat.messages)
    messages = list(zip(chat.messages, flags, strict=True))
    length = chat.prompt_length
    if forms.drops_system:
        removed = [
            number for number, (message, _) in enumerate(messages) if message["role"] == "system"
        ]
        messages = [pair for number, pair in enumerate(messages) if number not in removed]
        length = length and length - sum(number < length for number in removed)
    if not any(message["role"] in ("system", "developer") for message, _ in messages):
        text = "" if forms.drops_system else _system_of(row, forms)
        if text := text or forms.system_prompt or "":
            messages.insert(0, ({"role": "system", "content": text}, None))
            length = None if chat.prompt_length is None else (length or 0) + 1
    return replace(
        chat,
        messages=[message for message, _ in messages],
        prompt_length=length,
        flags=tuple(flag for _, flag in messages) if chat.flags else (),
    )


def _system_of(row: Row, forms: Forms) -> str:
    """Return the text of a row's column of system messages, if the settings name it."""
    named = "system" in forms.columns or ("instruction" in row.values and _formatted(forms))
    value = row.values.get("system") if named else None
    text = "" if value is None else text_of(row, value, "'system'")
    return text if text.strip() else ""


def _formatted(forms: Forms) -> bool:
    """Whether the settings say how instructions are written."""
    return forms.row_format != "auto"


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


def _prompt_completion(row: Row, forms: Forms) -> Example:
    """Two strings, or two lists of messages; the second begins with the assistant's answer."""
    prompt = row.values["prompt"]
    completion = row.values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        how = "write both as text, or both as lists of messages"
        raise row.broken("only one of 'prompt' and 'completion' is text", how=how)
    before = read_messages(row, "prompt", forms.fields, forms.roles)
    after = read_messages(row, "completion", forms.fields, forms.roles)
    if after.messages[0]["role"] != "assistant":
        raise row.broken(
            "'completion' should begin with an assistant message", at="completion, message 1"
        )
    length = len(before.messages)
    flags = (None,) * length + after.flags if after.flags else ()
    pictures = before.pictures + after.pictures
    return Chat(before.messages + after.messages, before.tools, length, flags, pictures)


def _instruction(row: Row, forms: Forms, *, chat_template: bool) -> Example:
    instruction = _text(row, "instruction")
    output = _text(row, "output")
    raw_input = row.values.get("input")
    extra = text_of(row, raw_input, "'input'") if raw_input is not None else ""
    extra = extra if extra.strip() else ""
    form: Any = forms.row_format
    if form == "auto":
        form = "chat" if chat_template else "alpaca"
    if form == "chat":
        form = _AS_CHAT
    elif form == "alpaca":
        form = {"prompt": _ALPACA_INPUT, "without_input": _ALPACA}
    elif isinstance(form, str):
        form = {"prompt": form}
    text = form["prompt"] if extra else form.get("without_input") or form["prompt"]
    if extra and "{input}" not in text:
        how = "write {input} in row_format, or leave the column out: columns: {input: NONE}"
        raise row.broken("the row has an 'input', and row_format has no place for it", how=how)
    system = _system_of(row, forms) or forms.system_prompt or ""
    values = {"instruction": instruction, "input": extra, "system": system}
    question = PLACES.sub(lambda match: values[match[1]], text)
    before = _history(row, forms)
    if form.get("chat"):
        asked = {"role": "user", "content": question}
        return Chat([*before, asked, {"role": "assistant", "content": output}])
    if before:
        how = "set row_format: chat"
        raise row.broken("the row has a 'history', and row_format writes no chats", how=how)
    return Text(question, output, bool(form.get("separate")))


def _history(row: Row, forms: Forms) -> list[dict[str, Any]]:
    """Return the earlier turns of an instruction, pairs of a question and an answer."""
    named = _formatted(forms) or "history" in forms.columns
    if not named or not row.values.get("history"):
        return []
    messages = []
    for number, pair in enumerate(list_of(row, "history"), 1):
        at = f"history, turn {number}"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise row.broken("a turn should be a question and an answer", at=at)
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text_of(row, text, f"the {role}'s text", at)})
    return messages


def alpaca_prompt(instruction: str, extra: str = "") -> str:
    """Return an instruction, with its input if it has one, in Alpaca's words."""
    wording = _ALPACA_INPUT if extra.strip() else _ALPACA
    return wording.format(instruction=instruction, input=extra)
