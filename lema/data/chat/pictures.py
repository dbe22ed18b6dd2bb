"""Where images stand in a message: one character in its text, in the place of each.

All that looks for the words of a chat sees text. Only when the chat template is applied does the
text become the parts that templates of models with images take, `{"type": "text"}` and
`{"type": "image"}`. What an image is, a path or bytes, is kept beside the messages in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lema.data.files import Row

__all__ = ["PICTURE", "Picture", "check_text", "has_pictures", "parts_of", "picture_of"]

PICTURE = chr(0x107FFD)  # of a private plane, before the marks of `lema.data.chat.marks`
KINDS = ("image", "image_url")
KEYS = ("image", "url", "path", "base64", "image_url")
OTHERS = {"video": "video", "video_url": "video", "audio": "audio", "input_audio": "audio"}


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a row names it.

    Attributes:
        value: a path, a URL, bytes, an object of PIL, or `{"bytes": ..., "path": ...}`; None: the
            next one of the row's column `images`.
        at: where in the row it is named.
        encoded: whether the value is text in base64.
    """

    value: object
    at: str
    encoded: bool = False


def picture_of(row: Row, block: Mapping[str, Any], at: str) -> Picture:
    """Return the image of a part of a message. `DataError`: the part is no image, or has several
    values."""
    kind = block.get("type")
    if kind not in KINDS:
        what = f"'content' holds a part of the type {kind!r}"
        if kind in OTHERS:
            what = f"'content' holds {OTHERS[str(kind)]}"
        raise row.broken(what, at=at, how="only text and images can be trained on")
    values = {name: block[name] for name in KEYS if block.get(name) is not None}
    if len(values) > 1:
        what = f"an image has several values: {', '.join(values)}"
        raise row.broken(what, at=at, how="keep one of them")
    for name, value in values.items():
        inner = value.get("url") if name == "image_url" and isinstance(value, Mapping) else value
        return Picture(inner, at, encoded=name == "base64")
    return Picture(None, at)


def check_text(row: Row, text: str, at: str) -> str:
    """Return the words of a message. `DataError`: they have the character that stands for an
    image."""
    if PICTURE in text:
        what = f"a message has the character U+{ord(PICTURE):X}, which LEMA uses for an image"
        raise row.broken(what, at=at, how="remove it")
    return text


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an image stands in any of the messages."""
    return any(PICTURE in str(message.get("content")) for message in messages)


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
        for number, words in enumerate(text.split(PICTURE)):
            if number:
                parts.append({"type": "image"})
            if words:
                parts.append({"type": "text", "text": words})
    return parts
