"""The kind of a row, told by the names of its columns: token ids, a chat, a prompt with its completion, or text.

`parse` reads a row of a known kind, and `longest_row` says how many tokens a row may have.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lema.data.files import Row
from lema.errors import ConfigError

__all__ = [
    "IGNORED",
    "Chat",
    "Example",
    "Kind",
    "Text",
    "Tokens",
    "detect",
    "longest_row",
    "num_trained",
    "parse",
    "prompt_of",
]

IGNORED = -100
"""The label of a token which is read but not learnt; the value `torch.nn.functional.cross_entropy` ignores."""

Kind: TypeAlias = tuple[str, ...]
"""The columns a row is read from. The first entry of `KINDS` whose columns a row has is its kind."""

KINDS: tuple[Kind, ...] = (
    ("input_ids", "labels"),
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}

# The wording of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), which such data sets assume when a
# tokenizer has no chat template of its own.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row tokenised beforehand; `labels` is as long as `ids` and holds -100 where nothing is learnt."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Text:
    """Text of which the part after the prompt is learnt; the prompt is empty for plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the tokenizer's chat template."""

    messages: list[dict[str, Any]]  # dictionaries with `role` and `content`, as `transformers` takes them
    tools: list[Any] | None = None  # JSON schemas of the tools on offer, or None
    # How many leading messages are the prompt; None when every assistant message is learnt.
    prompt_length: int | None = None


Example: TypeAlias = Tokens | Text | Chat


def num_trained(labels: list[int]) -> int:
    """How many tokens are learnt. The first never is: there is nothing to predict it from."""
    return len(labels[1:]) - labels[1:].count(IGNORED)


def detect(row: Row) -> Kind:
    """The kind of a row, by the columns which are present and not null.

    Raises:
        DataError: no kind fits; the message lists the columns found and those understood.
    """
    present = {name for name, value in row.values.items() if value is not None}
    for kind in KINDS:
        if present.issuperset(kind):
            return kind
    found = ", ".join(sorted(map(str, present))) or "none"
    known = "; ".join(" + ".join(kind) for kind in KINDS)
    raise row.broken(f"the columns say nothing to train on (found: {found})", how=f"name the columns one of: {known}")


def parse(row: Row, kind: Kind, *, chat_template: bool) -> Example:
    """Read a row of the kind that `detect` found; with a `chat_template` instruction data become chats.

    Raises:
        DataError: a value is missing, of the wrong type, or empty; names file, line and column.
    """
    match kind[0]:
        case "input_ids":
            return _tokens(row, labelled="labels" in kind)
        case "messages":
            return Chat(_messages(row, "messages"), _tools(row))
        case "conversations":
            return Chat(_conversations(row), _tools(row))
        case "prompt":
            return _prompt_completion(row)
        case "instruction":
            return _instruction(row, chat_template)
    return Text("", _text(row, "text"))


def _list(row: Row, column: str) -> list[Any]:
    """A list; or one written as JSON in a string, which is the only way a .csv can hold one."""
    value = row.values[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.broken(f"'{column}' should be a list, and the text there is not JSON: {error}") from error
    elif hasattr(value, "tolist"):  # arrays and tensors, in rows from memory
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise row.broken(f"'{column}' should be a list, not {type(value).__name__}")
    if not value:
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return list(value)


def _ints(row: Row, column: str) -> list[int]:
    values = _list(row, column)
    for place, value in enumerate(values):
        if type(value) is not int:  # bool is an int to isinstance, and is never a token
            raise row.broken(f"'{column}' should hold whole numbers, not {value!r}", at=f"position {place}")
    return values


def _tokens(row: Row, *, labelled: bool) -> Tokens:
    ids = _ints(row, "input_ids")
    labels = _ints(row, "labels") if labelled else list(ids)
    if len(labels) != len(ids):
        how = "give one label per token, -100 where nothing is learnt"
        raise row.broken(f"{len(ids)} input_ids but {len(labels)} labels", how=how)
    if row.values.get("attention_mask") is None:
        return Tokens(ids, labels)
    mask = _ints(row, "attention_mask")
    if len(mask) != len(ids):
        raise row.broken(f"{len(ids)} input_ids but an attention_mask of {len(mask)}")
    kept = [i for i, seen in enumerate(mask) if seen]  # padding is put back per batch, as much as that batch needs
    return Tokens([ids[i] for i in kept], [labels[i] for i in kept])


def _string(row: Row, value: Any, name: str, at: str = "") -> str:
    if not isinstance(value, str):
        raise row.broken(f"{name} should be text, not {type(value).__name__}", at=at)
    if "\0" in value:
        raise row.broken(f"{name} holds a NUL character", at=at, how="remove it; the text is probably damaged")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{name} holds half a surrogate pair, which is no character"
            how = "the text was cut inside a character; repair or remove the row"
            raise row.broken(what, at=at, how=how) from error
    return value


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = _string(row, row.values[column], f"'{column}'")
    if not may_be_empty and not value.strip():
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return value


def _prompt_completion(row: Row) -> Example:
    """Two strings, or two lists of messages of which the second begins with the assistant's answer."""
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        how = "write both as text, or both as lists of messages"
        raise row.broken("one of 'prompt' and 'completion' is text and the other is not", how=how)
    before, after = _messages(row, "prompt"), _messages(row, "completion")
    if after[0]["role"] != "assistant":
        raise row.broken("'completion' should begin with an assistant message", at="completion, message 1")
    return Chat(before + after, _tools(row), len(before))


def _instruction(row: Row, chat_template: bool) -> Example:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = row.values.get("input")
    extra = _string(row, given, "'input'") if given is not None else ""
    if chat_template:
        question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": output}])
    if extra.strip():
        return Text(_ALPACA_INPUT.format(instruction=instruction, input=extra), output)
    return Text(_ALPACA.format(instruction=instruction), output)


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    messages = []
    for number, message in enumerate(_list(row, column), 1):
        at = f"{column}, message {number}"
        if not isinstance(message, Mapping):
            raise row.broken(f"a message should be an object, not {type(message).__name__}", at=at)
        if message.get("role") is None:
            raise row.broken("a message has no 'role'", at=at, how='write {"role": "user", "content": "..."}')
        _string(row, message["role"], "'role'", at)
        _check_content(row, message, at)
        messages.append(dict(message))
    return messages


def prompt_of(row: Row, column: str) -> str | list[dict[str, Any]]:
    """Return a column that holds text, or messages.

    Raises:
        DataError: it is empty or malformed.
    """
    return _text(row, column) if isinstance(row.values[column], str) else _messages(row, column)


def _check_content(row: Row, message: Mapping[str, Any], at: str) -> None:
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise row.broken("a message has no 'content'", at=at, how='write {"role": "user", "content": "..."}')
    elif isinstance(content, (list, tuple)):
        for block in content:
            if not isinstance(block, Mapping) or block.get("type") != "text":
                raise row.broken("'content' holds something other than text", at=at, how="only text can be trained on")
            _string(row, block.get("text"), "the text of a content block", at)
    else:
        _string(row, content, "'content'", at)


def _conversations(row: Row) -> list[dict[str, Any]]:
    """ShareGPT's `from` and `value`, turned to `role` and `content`; messages which already have those pass."""
    turns = _list(row, "conversations")
    if all(isinstance(turn, Mapping) and "from" not in turn for turn in turns):
        return _messages(row, "conversations")
    messages: list[dict[str, Any]] = []
    if isinstance(row.values.get("system"), str) and row.values["system"].strip():
        messages.append({"role": "system", "content": _text(row, "system")})
    for number, turn in enumerate(turns, 1):
        at = f"conversations, message {number}"
        if not isinstance(turn, Mapping) or turn.get("from") is None or turn.get("value") is None:
            raise row.broken("a message lacks 'from' or 'value'", at=at, how='write {"from": "human", "value": "..."}')
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            how = f"use one of: {', '.join(_SHAREGPT_ROLES)}"
            raise row.broken(f"the speaker {turn['from']!r} is not known", at=at, how=how)
        messages.append({"role": role, "content": _string(row, turn["value"], "'value'", at)})
    return messages


def _tools(row: Row) -> list[Any] | None:
    return _list(row, "tools") if row.values.get("tools") else None


DEFAULT_LENGTH = 1024  # tokens; what TRL cuts at


def longest_row(wanted: int | None, positions: int | None) -> int:
    """Return the most tokens a row may have: as `wanted`, else 1024, or the model's `positions` where they are fewer.

    Raises:
        ConfigError: the model takes fewer than asked for.
    """
    if positions is None:
        return wanted or DEFAULT_LENGTH
    if wanted is not None and wanted > positions:
        what = f"the model has {positions} positions, fewer than max_length: {wanted}"
        raise ConfigError(what, where="max_length", how=f"set max_length to {positions} or less, or leave it out")
    return wanted or min(DEFAULT_LENGTH, positions)
