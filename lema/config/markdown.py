"""Texts from elsewhere within Markdown: names of models, data and runs are shown as they are, and
do nothing.

Whatever could be markup is written as a character reference, which CommonMark never takes for
structure, nor do tables split at it
(https://spec.commonmark.org/0.31.2/#entity-and-numeric-character-references). Names and numbers as
most are stay readable in the file.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from lema.errors import printable

__all__ = ["code", "python_text", "table", "text"]

# HTML, tables, code, emphasis, strikethrough, formulas, links, mentions, and addresses that become
# links by themselves.
MARKUP = re.compile(
    r"[&<>|`*~$\\@]|(?<![^\W_])_|_(?![^\W_])|\](?=[\[(:])|:(?=//)|(?<=www)\.", re.IGNORECASE
)
LINES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def text(raw: object) -> str:
    """Return a text for a line or a cell of a table, shown letter by letter. Line breaks are
    written out.
    """
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", _line(raw))


def code(raw: object) -> str:
    """Return a span of code with a text, for a line; not for a table, where a `|` would end the
    cell within it.
    """
    shown = _line(raw)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}{shown}{fence}" if "`" not in shown else f"{fence} {shown} {fence}"


def python_text(raw: str) -> str:
    """Return a text as a program in a block of code writes it."""
    return json.dumps(raw)


def table(title: str, rows: Mapping[str, Any]) -> str:
    """Return a table of names and values, with a title; nothing where there are none."""
    lines = (f"| {text(name)} | {text(value)} |" for name, value in rows.items())
    return "\n".join([f"## {title}\n\n| | |\n|---|---|", *lines]) if rows else ""


def _line(raw: object) -> str:
    return re.sub(r"[\n\r\t]", lambda match: LINES[match[0]], printable(str(raw)))
