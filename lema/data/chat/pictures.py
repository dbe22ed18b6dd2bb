"""Where images, sounds and videos stand in a message: one character in its text, in the place of
each.

All that looks for the words of a chat sees text. Only when the chat template is applied does the
text become the parts that templates of models with images take, `{"type": "text"}` and
`{"type": "image"}`. What an image is, a path or bytes, is kept beside the messages in their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lema.data.files import Row

__all__ = ["MARKS", "NOUNS", "PARTS", "Kind", "Picture", "check_text", "has_pictures", "kinds_in"]
__all__ += ["parts_of", "picture_of"]

Kind: TypeAlias = Literal["image", "video", "audio"]
# of a private plane, before the marks of `lema.data.chat.marks`
MARKS: Mapping[Kind, str] = {
    "image": chr(0x107FFD),
    "video": chr(0x107FFE),
    "audio": chr(0x107FFF),
}
"""The character that stands for one of a kind, in the words of a message."""
PARTS: Mapping[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""What a part of a message is, by its type: the types of transformers and of OpenAI."""
NOUNS: Mapping[Kind, str] = {"image": "an image", "video": "a video", "audio": "audio"}
KEYS: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image", "url", "path", "base64", "image_url"),
    "video": ("video", "url", "path", "video_url"),
    "audio": ("audio", "url", "path", "base64", "audio_url", "input_audio"),
}
OF_URLS = ("image_url", "video_url", "audio_url")
_ANY = re.compile("([" + "".join(MARKS.values()) + "])")
_KINDS: Mapping[str, Kind] = {mark: kind for kind, mark in MARKS.items()}


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, a video or a sound as a row names it.

    Attributes:
        value: a path, a URL, bytes, an object of PIL, or `{"bytes": ..., "path": ...}`; of a video
            also a list of such, which are its frames; of a sound also `{"array": ...,
            "sampling_rate": ...}`. None: the next one of the row's column.
        at: where in the row it is named.
        encoded: whether the value is text in base64.
        kind: what it is.
    """

    value: object
    at: str
    encoded: bool = False
    kind: Kind = "image"


def picture_of(row: Row, block: Mapping[str, Any], at: str) -> Picture:
    """Return the image, video or sound of a part of a message. `DataError`: the part is none, or
    has several values."""
    kind = PARTS.get(str(block.get("type")))
    if kind is None:
        what = f"'content' holds a part of the type {block.get('type')!r}"
        raise row.broken(what, at=at, how=f"only text, {', '.join(MARKS)} can be trained on")
    values = {name: block[name] for name in KEYS[kind] if block.get(name) is not None}
    if len(values) > 1:
        what = f"{NOUNS[kind]} has several values: {', '.join(values)}"
        raise row.broken(what, at=at, how="keep one of them")
    for name, value in values.items():
        inner = value
        if name in OF_URLS and isinstance(value, Mapping):
            inner = value.get("url")
        if name == "input_audio" and isinstance(value, Mapping):
            return Picture(value.get("data"), at, encoded=True, kind=kind)
        if kind == "audio" and block.get("sampling_rate") is not None:
            inner = {"array": value, "sampling_rate": block["sampling_rate"]}
        return Picture(inner, at, encoded=name == "base64", kind=kind)
    return Picture(None, at, kind=kind)


def check_only_text(row: Row, block: Mapping[str, Any], at: str) -> None:
    """Refuse, with `DataError`, a part of text that has a value for an image, a video or a sound:
    nobody would see it."""
    for kind, keys in KEYS.items():
        named = [key for key in keys if kind in key and block.get(key) is not None]
        if named:
            what = f"a part of the type 'text' has '{named[0]}', which would be lost"
            how = f'write it as a part of its own, {{"type": "{kind}", ...}}'
            raise row.broken(what, at=at, how=how)


def check_text(row: Row, text: str, at: str) -> str:
    """Return the words of a message. `DataError`: they have a character that stands for an image,
    a video or a sound."""
    if mark := _ANY.search(text):
        what = f"a message has the character U+{ord(mark[0]):X}, which LEMA uses for an image"
        raise row.broken(what, at=at, how="remove it")
    return text


def kinds_in(text: str) -> list[Kind]:
    """Return what stands in a text, in its order."""
    return [_KINDS[mark] for mark in _ANY.findall(text)]


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an image, a video or a sound stands in any of the messages."""
    return any(_ANY.search(str(message.get("content"))) for message in messages)


def parts_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form of templates for images: each content is a list of parts."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: object) -> object:
    if isinstance(content, list):
        texts = [block["text"] for block in content]
    elif isinstance(content, str):
        texts = [content]
    else:
        return content
    parts: list[dict[str, Any]] = []
    for text in texts:
        for piece in _ANY.split(text):
            if piece in _KINDS:
                parts.append({"type": _KINDS[piece]})
            elif piece:
                parts.append({"type": "text", "text": piece})
    return parts
