"""What the rows of a data file are: which columns they have, and as what kind of rows a run would
read them. Where the columns are nearly right, it is proposed what settings call them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema.data.chat.pictures import PARTS
from lema.data.columns import detect, media_column
from lema.data.files import Row
from lema.data.forms import Forms
from lema.data.sets.sources import find_files, read_rows
from lema.errors import DataError

__all__ = ["DataRows", "look_at"]

PLAIN = re.compile(r"[A-Za-z_][\w-]*")  # a name that YAML takes for text as it is
COUNTED_BYTES = 200 * 10**6  # of files up to which all rows are counted
SAMPLED_ROWS = 1000  # by whose size the rows of larger files are estimated

# Names that data sets give to what LEMA calls so; the first that there is counts.
MEANT: Mapping[str, Sequence[str]] = {
    "prompt": ("prompt", "question", "query", "instruction", "input", "problem", "user", "source"),
    "completion": (
        "completion",
        "answer",
        "response",
        "output",
        "reply",
        "solution",
        "assistant",
        "target",
    ),
    "text": ("text", "content", "document", "body", "passage", "sentence"),
    "messages": ("messages", "conversations", "conversation", "chat", "dialogue", "dialog"),
    "chosen": ("chosen", "preferred", "accepted", "winner"),
    "rejected": ("rejected", "dispreferred", "loser"),
}
ROLES = ("role", "from", "speaker", "author")
CONTENTS = ("content", "value", "text", "message")
KINDS: Mapping[str, str] = {
    "input_ids": "token ids",
    "messages": "chats",
    "conversations": "chats",
    "prompt": "prompts with completions",
    "instruction": "instructions with outputs",
    "text": "text",
}


@dataclass(frozen=True)
class DataRows:
    """What the rows of some data are."""

    columns: tuple[str, ...]  # of the first row
    kind: str  # what they are read as
    count: int
    counted: bool  # whether all rows were counted; else it is an estimate
    # settings without which they would not be read so
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_images(self) -> bool:
        """Whether the rows have images."""
        return self.settings.get("modalities") == "all"

    @property
    def line(self) -> str:
        """What a user is told of them."""
        about = "" if self.counted else "about "
        rows = "row" if self.count == 1 else "rows"
        renamed = self.settings.get("columns")
        how = f", with columns: {_mapping(renamed)}" if renamed else ""
        objective = self.settings.get("objective")
        how += f", with objective: {objective}" if objective else ""
        how += ", with images" if self.has_images else ""
        names = ", ".join(self.columns)
        return f"{about}{self.count:,} {rows} with the columns {names}, read as {self.kind}{how}"

    def setting_lines(self) -> list[str]:
        """Return the lines of a file of settings that these rows need, with the reason."""
        lines = [f"# {self.line[0].upper()}{self.line[1:]}."]
        for name, value in self.settings.items():
            lines.append(f"{name}: {_mapping(value) if isinstance(value, dict) else value}")
        return lines


def look_at(data: str | Path, *, sees_images: bool = False) -> DataRows:
    """Look at the rows of files.

    Args:
        data: a file, a directory or a glob.
        sees_images: whether the model has a processor of images; else images are not looked for.

    Raises:
        DataError: there are no files, they cannot be read, or no kind of row has such columns.
    """
    files = find_files(data)
    first = next(iter(read_rows(files)))
    columns = tuple(str(name) for name, value in first.values.items() if value is not None)
    kind, settings = _kind_of(first)
    if sees_images and _has_images(first):
        settings = {**settings, "modalities": "all"}
    count, counted = _count(files)
    return DataRows(columns, kind, count, counted, settings)


def _has_images(row: Row) -> bool:
    """Whether a row has a column of images, videos or sounds, or messages with such a part."""
    if media_column(row) is not None:
        return True
    messages = (
        message
        for column in ("messages", "prompt", "chosen")
        if isinstance(value := row.values.get(column), list)
        for message in value
    )
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(
        isinstance(part, Mapping) and part.get("type") in PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _kind_of(row: Row) -> tuple[str, dict[str, Any]]:
    """Return what a row is read as, and the settings that it needs for that."""
    present = {str(name): value for name, value in row.values.items() if value is not None}
    if present.keys() >= {"chosen", "rejected"}:
        return "pairs that are compared", {"objective": "dpo"}
    if present.keys() >= {"completion", "label"}:
        return "completions that are good or bad", {"objective": "kto"}
    try:
        kind = detect(row)
    except DataError:
        for kind_name, columns, more in _proposals(present):
            renamed = Forms(columns).renamed(row)
            if not more:
                detect(renamed, Forms(columns))
            return kind_name, {**more, "columns": columns}
        raise
    fields = _message_fields(present.get(kind[0])) if kind[0] == "messages" else {}
    return KINDS[kind[0]], {"columns": fields} if fields else {}


def _proposals(
    present: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Yield what a row may be read as, with the columns and the other settings that this needs."""
    named = {ours: _named(present, names) for ours, names in MEANT.items()}
    if (chats := named["messages"]) and isinstance(present[chats], list):
        fields = _message_fields(present[chats])
        yield "chats", _renamed({"messages": chats}) | fields, {}
    if (chosen := named["chosen"]) and (rejected := named["rejected"]):
        columns = _renamed({"chosen": chosen, "rejected": rejected})
        if prompt := named["prompt"]:
            columns |= _renamed({"prompt": prompt})
        yield "pairs that are compared", columns, {"objective": "dpo"}
    if (prompt := named["prompt"]) and (completion := named["completion"]):
        columns = _renamed({"prompt": prompt, "completion": completion})
        yield "prompts with completions", columns, {}
    if text := named["text"]:
        yield "text", _renamed({"text": text}), {}
    texts = [name for name, value in present.items() if isinstance(value, str)]
    if len(texts) == 1:
        yield "text", _renamed({"text": texts[0]}), {}


def _named(present: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the column that has the first of some names, in upper or lower case."""
    lowered: dict[str, str] = {}
    for name in present:
        lowered.setdefault(name.lower().strip(), name)
    return next((lowered[name] for name in names if name in lowered), None)


def _renamed(columns: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _message_fields(messages: Any) -> dict[str, str]:
    """Return what messages call their role and their content, where they have other names."""
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict):
        return {}
    role = next((name for name in ROLES if name in first), None)
    content = next((name for name in CONTENTS if name in first), None)
    if role is None or content is None:
        return {}
    return _renamed({"role": role, "content": content})


def _mapping(columns: Mapping[str, str]) -> str:
    """Return a mapping as YAML has it, in one line."""
    pairs = (f"{ours}: {_plain(theirs)}" for ours, theirs in columns.items())
    return f"{{{', '.join(pairs)}}}"


def _plain(name: str) -> str:
    return name if PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _count(files: Sequence[Path]) -> tuple[int, bool]:
    """Return how many rows files have, and whether all were counted."""
    size = sum(file.stat().st_size for file in files)
    if size <= COUNTED_BYTES:
        return sum(1 for _ in read_rows(files)), True
    sampled = 0
    nbytes = 0
    for row, _ in zip(read_rows(files), range(SAMPLED_ROWS), strict=False):
        sampled += 1
        nbytes += len(str(row.values))
    return int(size / max(nbytes, 1) * sampled), False
