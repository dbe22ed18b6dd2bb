"""A run of another trainer while it is translated: its values, and what became of each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema.storage.header import read_json
from lema_tools.importing.translation import Note, Translation

__all__ = ["Ledger", "number"]

CONFIG_BYTES = 1 << 20


def number(value: object, key: str) -> float:
    """Return a value as a number; YAML reads `1e-4` as a text.

    Raises:
        ConfigError: it is none.
    """
    try:
        return float(str(value))
    except ValueError as error:
        raise ConfigError(
            f"this should be a number, not {value!r}", where=key, how="write it as 0.0001"
        ) from error


def _cached(name: str, revision: str | None) -> object:
    """Return where the hub's cache has the config of a model; anything but a path: nowhere."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # of a directory that is not here
        return None


@dataclass
class Ledger:
    """The values of a run and its translation.

    Args:
        values: all values, the trainer's defaults included.
        written: the keys that the file or the command line has.
        defaults: the trainer's defaults.
        directory: that of the file, against which its paths are read.
        options: further options of the import.
        translation: is filled.
        empty: the written keys without a value, where the trainer's default stands for it.
    """

    values: Mapping[str, Any]
    written: frozenset[str]
    defaults: Mapping[str, Any]
    directory: str = "."
    options: Mapping[str, Any] = field(default_factory=dict)
    translation: Translation = field(default_factory=Translation)
    empty: frozenset[str] = frozenset()

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    @property
    def filled(self) -> frozenset[str]:
        """The keys that the file or the command line has with a value."""
        return self.written - self.empty

    def number(self, key: str) -> float:
        """Return a key's value as a number. `ConfigError`: it is none."""
        return number(self[key], key)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json where its directory, or the hub's copy, is here; empty: neither
        is.
        """
        name = str(self["model_name_or_path"])
        file = Path(name) / "config.json"
        if file.is_file():
            return read_json(file, CONFIG_BYTES, "a config")
        copy = _cached(name, self["model_revision"])
        return read_json(Path(copy), CONFIG_BYTES, "a config") if isinstance(copy, str) else {}

    def is_default(self, key: str) -> bool:
        """Whether a key has the trainer's default."""
        return bool(self[key] == self.defaults.get(key))

    def carry(self, key: str, setting: str, value: Any = ...) -> None:
        """Carry a key to a setting with the same meaning, by its own value or as another one."""
        self.translation.carry(key, self[key] if value is ... else value, setting)

    def put(self, **settings: Any) -> None:
        """Set settings that belong to a key that is in one of the lists already."""
        self.translation.settings.update(settings)

    def same(self, key: str, why: str) -> None:
        """Note that a key has its meaning here, in words; only if the run has it."""
        if key in self.written:
            self.translation.same[key] = why

    def differs(self, key: str, why: str, *, changes_numbers: bool = True) -> None:
        """Note that a key is carried with another meaning."""
        self.translation.differs.append(Note(key, why, changes_numbers))

    def lost(self, key: str, why: str, *, changes_numbers: bool = True) -> None:
        """Note that a key is not carried."""
        self.translation.lost.append(Note(key, why, changes_numbers))

    def settled(self) -> set[str]:
        """Return the keys that are in one of the three lists."""
        translation = self.translation
        notes = (*translation.differs, *translation.lost)
        return {*translation.same, *(note.key for note in notes)}
