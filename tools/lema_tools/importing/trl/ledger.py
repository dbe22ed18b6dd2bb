"""A run of TRL while it is translated: its values, and what has become of each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lema.storage.header import read_json
from lema_tools.importing.translation import Note, Translation

__all__ = ["Ledger"]

CONFIG_BYTES = 1 << 20


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
        kind: `sft`, `dpo` or `kto`.
        values: all values, TRL's defaults included.
        written: the keys that the file or the command line has.
        defaults: TRL's defaults.
        directory: that of the file, against which its paths are read.
        translation: is filled.
    """

    kind: str
    values: Mapping[str, Any]
    written: frozenset[str]
    defaults: Mapping[str, Any]
    directory: str
    translation: Translation = field(default_factory=Translation)

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json where its directory, or the hub's copy, is here; empty: neither
        is.
        """
        file: object = Path(str(self["model_name_or_path"])) / "config.json"
        if not Path(str(file)).is_file():
            file = _cached(str(self["model_name_or_path"]), self["model_revision"])
        return (
            read_json(Path(file), CONFIG_BYTES, "a config") if isinstance(file, str | Path) else {}
        )

    def is_default(self, key: str) -> bool:
        """Whether a key has TRL's default."""
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
