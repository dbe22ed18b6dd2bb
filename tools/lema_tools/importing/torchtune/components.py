"""torchtune's files as flat keys: nested components, values of other keys, and overrides."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lema.errors import ConfigError

__all__ = ["component_of", "flat_keys"]

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMPONENT = "_component_"
DEPTH = 8


def flat_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted keys, with `${...}` replaced by the values they name.

    A word for a component, such as `optimizer=torch.optim.SGD` on a command line, names it.

    Raises:
        ConfigError: a `${...}` names no key.
    """
    flat = dict[str, Any]()
    components = {key for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in _flat(values, ""):
        flat[f"{key}.{COMPONENT}" if key in components else key] = value
    return {key: _resolved(key, value, flat, 0) for key, value in flat.items()}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolved(key: str, value: Any, flat: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > DEPTH:
        raise ConfigError("the value names itself", where=key, how="write it out")
    if whole := REFERENCE.fullmatch(value):
        return _resolved(key, _named(key, whole[1], flat), flat, depth + 1)
    text = REFERENCE.sub(lambda match: str(_named(key, match[1], flat)), value)
    if "${" in text and not REFERENCE.search(text):
        how = "write its value out: LEMA replaces names of keys alone"
        raise ConfigError(f"{value} cannot be read", where=key, how=how)
    return _resolved(key, text, flat, depth + 1)


def _named(key: str, name: str, flat: Mapping[str, Any]) -> Any:
    if name not in flat:
        what = f"${{{name}}} names no key of the file"
        raise ConfigError(what, where=key, how=f"set {name}, or write the value out")
    return flat[name]


def component_of(values: Mapping[str, Any], key: str) -> str:
    """Return the last name of a component, such as `lora_llama3_1_8b`; empty: there is none."""
    return str(values.get(f"{key}.{COMPONENT}") or "").rpartition(".")[2]
