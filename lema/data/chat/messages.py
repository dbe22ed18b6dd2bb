"""The messages of a row, in the form that chat templates take, however the data set writes them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema.data.chat.pictures import MARKS, NOUNS, Picture, check_only_text, check_text, picture_of
from lema.data.files import Row
from lema.data.forms import at_path, flag_of, list_of, text_of

__all__ = ["Chat", "read_conversations", "read_messages", "read_tools"]

# Speakers as ShareGPT and the data sets after it name them.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
_CALLS = ("function_call", "tool_call")
# What other tools call the fields of a message.
_FIELDS = (("from", "value"), ("speaker", "text"), ("role", "value"), ("role", "text"))
_SIDES = ("prompt", "completion", "chosen", "rejected")  # which may be one message
_NO_ROLES: Mapping[str, str] = {}

# What says of one message whether it is trained on: axolotl's names, and OpenAI's.
FLAGS = ("train", "training", "weight")
_DETAILS = ("train_detail", "training_detail")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the tokenizer's chat template."""

    # dictionaries with `role` and `content`, as `transformers` takes them
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None  # JSON schemas of the tools on offer, or None
    # How many leading messages are the prompt; None when every assistant message is trained on.
    prompt_length: int | None = None
    # of each message, whether the data say to train on it; empty: they do not say
    flags: tuple[bool | None, ...] = ()
    # the images, in the order in which they stand in the messages
    pictures: tuple[Picture, ...] = ()

    def answers(self) -> list[int]:
        """The assistant's messages that may be trained on: those after the prompt, unless the
        data say not to.
        """
        first = self.prompt_length or 0
        flags = self.flags or (None,) * len(self.messages)
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= first and message["role"] == "assistant" and flags[number] is not False
        ]


def read_messages(
    row: Row, column: str, fields: Mapping[str, str], roles: Mapping[str, str] = _NO_ROLES
) -> Chat:
    """The messages of a column; `fields` names those that are not called `role` and `content`,
    `roles` has the role that is meant by each of the data's own names. `DataError`: a message is
    malformed; names file, line and message."""
    role_key = fields.get("role", "role")
    content_key = fields.get("content", "content")
    how = f'write {{"{role_key}": "user", "{content_key}": "..."}}'
    messages = []
    flags = []
    pictures = list[Picture]()
    value = row.values[column]
    alone = isinstance(value, Mapping) and column in _SIDES
    raw_messages = [value] if alone else list_of(row, column)
    for number, raw_message in enumerate(raw_messages, 1):
        at = f"{column}, message {number}"
        if not isinstance(raw_message, Mapping):
            raise row.broken(
                f"a message should be an object, not {type(raw_message).__name__}", at=at
            )
        # Columnar files fill what a message does not have with nulls.
        message = {key: value for key, value in raw_message.items() if value is not None}
        if at_path(message, role_key) is None:
            raise row.broken(_lacks(role_key, message), at=at, how=_how_to_name(message, how))
        role = text_of(row, at_path(message, role_key), f"'{role_key}'", at)
        content = at_path(message, content_key)
        for key in (role_key, content_key):
            message.pop(key.partition(".")[0], None)
        message = {
            "role": roles.get(role) or (_ROLES.get(role, role) if "role" in fields else role),
            "content": content,
            **message,
        }
        if message.get("tool_calls"):
            message["tool_calls"] = _tool_calls(row, message["tool_calls"], at)
        else:
            message.pop("tool_calls", None)
        message["content"] = _content(row, message, content_key, at, how, pictures)
        flags.append(_flag(row, message, at))
        messages.append(message)
    return Chat(
        messages,
        read_tools(row),
        None,
        tuple(flags) if any(flag is not None for flag in flags) else (),
        tuple(pictures),
    )


def _lacks(field: str, message: Mapping[str, Any]) -> str:
    present = ", ".join(sorted(str(name) for name, value in message.items() if value is not None))
    return f"a message has no {field!r} (it has {present or 'nothing'})"


def _how_to_name(message: Mapping[str, Any], how: str) -> str:
    """Return how to read a message whose fields have other names."""
    for role, content in _FIELDS:
        if role in message and content in message:
            return f"set columns: {{role: {role}, content: {content}}}"
    return f"{how}, or set columns: {{role: FIELD, content: FIELD}}"


def _content(
    row: Row, message: Mapping[str, Any], key: str, at: str, how: str, pictures: list[Picture]
) -> str | None:
    """The words of a message, its parts joined, since templates for words alone show parts as
    nothing, or refuse them; a template that takes parts alone is given the words as one
    (`forms_of_messages`). An image, a video or a sound is one character there, and is added to
    `pictures`."""
    content = message["content"]
    if content is None:
        if not message.get("tool_calls"):
            how = _how_to_name(message, how)
            raise row.broken(_lacks(key, message), at=at, how=how)
        return None
    if not isinstance(content, (list, tuple)):
        return check_text(row, text_of(row, content, f"'{key}'", at), at)
    words = []
    for block in content:
        if not isinstance(block, Mapping):
            what = f"a part of 'content' should be an object, not {type(block).__name__}"
            raise row.broken(what, at=at, how='write {"type": "text", "text": "..."}')
        if block.get("type") == "text":
            check_only_text(row, block, at)
            text = text_of(row, block.get("text"), "the text of a content block", at)
            words.append(check_text(row, text, at))
            continue
        picture = picture_of(row, block, at)
        if message["role"] == "assistant":
            what = f"an answer holds {NOUNS[picture.kind]}, and models write text"
            raise row.broken(what, at=at, how="move it to a message before the answer")
        pictures.append(picture)
        words.append(MARKS[picture.kind])
    return "".join(words)


def _flag(row: Row, message: dict[str, Any], at: str) -> bool | None:
    """Take out of a message what says whether to train on it; None: nothing does."""
    if detail := next((name for name in _DETAILS if message.get(name)), None):
        how = "split the message into parts, each with train: true or false"
        raise row.broken(
            f"{detail!r} asks to train on parts of a message, which LEMA does not support",
            at=at,
            how=how,
        )
    flags = [flag_of(row, message.pop(name), f"'{name}'", at) for name in FLAGS if name in message]
    for name in _DETAILS:
        message.pop(name, None)
    return all(flags) if flags else None


def _tool_calls(row: Row, calls: object, at: str) -> list[dict[str, Any]]:
    """Calls in the form that templates are written for: each a function with a name and an
    object of arguments.
    """
    if not isinstance(calls, (list, tuple)):
        raise row.broken(f"'tool_calls' should be a list, not {type(calls).__name__}", at=at)
    tool_calls = []
    how = 'write {"function": {"name": "...", "arguments": {...}}}'
    for call in calls:
        function = call.get("function") or call if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise row.broken("a tool call has no function name", at=at, how=how)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise row.broken(
                    f"the arguments of a tool call are text that is not JSON: {error}", at=at
                ) from error
        if not isinstance(arguments if arguments is not None else {}, Mapping):
            raise row.broken("the arguments of a tool call are not an object", at=at, how=how)
        named = {
            "name": text_of(row, function["name"], "the name of a tool", at),
            "arguments": dict(arguments or {}),
        }
        left = call.keys() - {"function", "name", "arguments"}
        extra = {key: value for key, value in call.items() if key in left and value is not None}
        tool_calls.append({"type": "function", **extra, "function": named})
    return tool_calls


def read_conversations(
    row: Row, fields: Mapping[str, str], roles: Mapping[str, str] = _NO_ROLES
) -> Chat:
    """ShareGPT's `from` and `value`, turned to `role` and `content`; messages which already have
    those pass.
    """
    turns = list_of(row, "conversations")
    if fields or all(isinstance(turn, Mapping) and "from" not in turn for turn in turns):
        return read_messages(row, "conversations", fields, roles)
    messages: list[dict[str, Any]] = []
    flags: list[bool | None] = []
    if isinstance(row.values.get("system"), str) and row.values["system"].strip():
        messages.append(
            {"role": "system", "content": text_of(row, row.values["system"], "'system'")}
        )
        flags.append(None)
    for number, raw_message in enumerate(turns, 1):
        at = f"conversations, message {number}"
        turn = dict(raw_message) if isinstance(raw_message, Mapping) else {}
        if turn.get("from") is None or turn.get("value") is None:
            raise row.broken(
                "a message lacks 'from' or 'value'",
                at=at,
                how='write {"from": "human", "value": "..."}',
            )
        speaker = str(turn["from"])
        value = text_of(row, turn["value"], "'value'", at)
        role = roles.get(speaker) or _ROLES.get(speaker)
        if role is None:
            raise row.broken(
                f"the speaker {speaker!r} is not known",
                at=at,
                how=f"use one of: {', '.join(_ROLES)}; or map it: roles: {{assistant: {speaker}}}",
            )
        flags.append(
            _flag(row, {key: entry for key, entry in turn.items() if entry is not None}, at)
        )
        message: dict[str, Any] = {"role": role, "content": value}
        if speaker in _CALLS:
            message = {"role": role, "content": "", "tool_calls": _written_calls(row, value, at)}
        messages.append(message)
    return Chat(
        messages,
        read_tools(row),
        None,
        tuple(flags) if any(flag is not None for flag in flags) else (),
    )


def _written_calls(row: Row, value: str, at: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        how = 'write the call as JSON: {"name": "...", "arguments": {...}}'
        raise row.broken(f"a tool call is not JSON: {error}", at=at, how=how) from error
    return _tool_calls(row, calls if isinstance(calls, list) else [calls], at)


def read_tools(row: Row) -> list[Any] | None:
    """The tools on offer, which a .csv and many data sets write as JSON in a text."""
    return list_of(row, "tools") if row.values.get("tools") else None
