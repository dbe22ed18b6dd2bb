"""One thing that was looked at: how it stands, in one sentence, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Fact", "Finding", "Level"]

Fact = str | int | float | bool | None


class Level(StrEnum):
    """How a finding stands, from good to bad."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WARNING = "warning"  # something will not work, or be slower than it could be
    PROBLEM = "problem"  # LEMA cannot run

    @property
    def rank(self) -> int:
        """0 for the best."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: what it belongs to; of a backend's own findings the backend's name.
        name: what was looked at; `section.name` is the same on every machine.
        level: how it stands.
        what: one sentence.
        how: how to mend it; empty where nothing needs mending.
        source: where that is published; empty where it was seen here.
        facts: what was measured: name, with its unit where it has one -> plain value; bytes and bytes per second are
            numbers.
    """

    section: str
    name: str
    level: Level
    what: str
    how: str = ""
    source: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What a script asks for it by."""
        return f"{self.section}.{self.name}".replace(" ", "_")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the same keys for every finding."""
        return {
            "key": self.key,
            "section": self.section,
            "name": self.name,
            "level": self.level.value,
            "what": self.what,
            "how": self.how,
            "source": self.source,
            "facts": dict(self.facts),
        }
