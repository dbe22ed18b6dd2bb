"""Settings that only one backend has: named and checked like all others, and unknown to the core.

A backend lists each under the entry point group `lema.settings`: the name as users write it, and a
`BackendSetting`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lema.config.problems import meant

__all__ = ["BackendSetting", "backend_setting", "backend_settings", "check_backend_settings"]

GROUP = "lema.settings"


@dataclass(frozen=True)
class BackendSetting:
    """A setting of one backend."""

    choices: tuple[str, ...]  # its values
    default: str  # one of them
    meaning: str  # a sentence


@cache
def backend_settings() -> Mapping[str, EntryPoint]:
    """Return every setting that an installed backend has, by name; nothing of a backend is
    imported.
    """
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_setting(name: str) -> BackendSetting:
    """Return what a backend says of its setting."""
    setting = backend_settings()[name].load()
    assert isinstance(setting, BackendSetting), f"{GROUP}: {name} is not a BackendSetting"
    return setting


def check_backend_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each setting that no backend has, or that has a wrong value, with the problem and
    how to fix it.
    """
    for name, value in settings.items():
        if name not in backend_settings():
            how = meant(name, backend_settings()) or "leave it out"
            yield (
                "backend_settings",
                f"backend_settings: no backend that is installed has a setting {name!r} ({how})",
            )
        elif value not in (choices := backend_setting(name).choices):
            how = f" ({near})" if (near := meant(str(value), choices)) else ""
            listed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
            yield name, f"{name} must be one of {listed}, not {value!r}{how}"
