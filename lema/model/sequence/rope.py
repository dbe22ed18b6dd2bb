"""Rotary parameters that take the place of a model's own, so that it reads longer rows than it was
made for.

They are parameters as `transformers` writes them to `config.json`, and its own code completes,
checks and uses them. An adapter that was trained with some has them in a file beside it, because
with other ones it is another model.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TypeAlias

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lema.config import LemaConfig
from lema.errors import AdapterError, ConfigError, WeightsError
from lema.storage.atomic import replace_file
from lema.storage.header import read_json
from lema.storage.regular import check_inside

__all__ = [
    "ROPE",
    "SETTING",
    "RopeParameters",
    "check_rope",
    "read_rope",
    "rope_of",
    "set_rope",
    "with_rope",
    "with_saved_rope",
    "write_rope",
]

SETTING = "rope_parameters"
ROPE = "rope_parameters.json"
"""The file beside an adapter."""

RopeParameters: TypeAlias = Mapping[str, object]

MOST_BYTES = 1 << 20
# What a model's own parameters say of its heads and not of its length: an override need not repeat
# it.
OF_BASE = ("rope_theta", "partial_rotary_factor")
OF_HEADS = {"mrope_section", "mrope_interleaved"}
# of `transformers`, where an override is there to go beyond the model's positions
BEYOND = "must be less than max_position_embeddings"
UNCHECKED = "Missing validation function"  # of a type of the user's own
NOTICE = "warning_once"  # how `transformers` says what it does not mind
CHECKS = "transformers.modeling_rope_utils"


def set_rope(config: PreTrainedConfig, override: RopeParameters) -> None:
    """Let a model's config have other rotary parameters.

    What the override leaves out is the model's own where it does not depend on the length: the
    base, the part of a head that turns, and layer types that are not named.

    Args:
        config: of the model; its text part is changed.
        override: as `config.json` has them, one for all layers, or one for each type of layers.

    Raises:
        ConfigError: the model has none, has them for types of layers, or `transformers` refuses
            them.
    """
    text = config.get_text_config()
    published = getattr(text, SETTING, None)
    if not published:
        what = f"a model of type {config.model_type} has no rotary embeddings that could be set"
        raise ConfigError(what, where=SETTING, how="leave it out")
    setattr(text, SETTING, _completed(text, published, override))
    with _refusals() as refusals:
        try:
            text.standardize_rope_params()
            text.validate_rope()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refusals.append(str(error.args[0] if error.args else error))
    if refusals:
        raise _refused("; ".join(dict.fromkeys(refusals)))


def rope_of(config: PreTrainedConfig) -> dict[str, object]:
    """Return the rotary parameters of a model's text part, in full."""
    parameters: dict[str, object] = deepcopy(config.get_text_config().rope_parameters)
    return parameters


def with_rope(config: Mapping[str, object], parameters: RopeParameters) -> dict[str, object]:
    """Return what a `config.json` says of a model that has such parameters.

    Args:
        config: what the file says.
        parameters: in full.
    """
    part = next((name for name in TEXT_PARTS if isinstance(config.get(name), dict)), None)
    if part is not None:
        inner = config[part]
        assert isinstance(inner, dict)
        return {**config, part: with_rope(inner, parameters)}
    values = {key: value for key, value in config.items() if key != OLDER}
    return {**values, SETTING: dict(parameters)}


TEXT_PARTS = ("text_config", "llm_config", "language_config")
OLDER = "rope_scaling"  # an older name, which `transformers` would prefer


def read_rope(directory: Path) -> dict[str, object] | None:
    """Return the rotary parameters that an adapter was trained with; None: the model's own.

    Raises:
        AdapterError: the file cannot be read.
    """
    file = directory / ROPE
    if not file.is_symlink() and not file.exists():
        return None
    try:
        check_inside(file)
        parameters = read_json(file, MOST_BYTES, "a description of rotary embeddings")
    except (OSError, WeightsError) as error:
        what = f"the rotary parameters cannot be read: {error}"
        raise AdapterError(what, where=str(file), how="restore it from a good copy") from error
    return LemaConfig("model", rope_parameters=parameters).rope_parameters


def write_rope(directory: Path, parameters: RopeParameters | None) -> None:
    """Write the rotary parameters of an adapter, or take away those of an earlier one.

    Raises:
        DiskError: the file could not be written.
    """
    if parameters is None:
        (directory / ROPE).unlink(missing_ok=True)
        return
    text = json.dumps(parameters, indent=2, sort_keys=True) + "\n"
    replace_file(directory / ROPE, text.encode())


def with_saved_rope(config: LemaConfig, directory: Path, *, begins: bool = False) -> LemaConfig:
    """Return the settings with the rotary parameters that an adapter was trained with.

    Args:
        config: the settings, which may have some.
        directory: where the adapter is.
        begins: training begins with it, and may go on with other ones, which is said; else these
            are refused.

    Raises:
        AdapterError: the file beside the adapter cannot be read.
        ConfigError: the settings have other ones.
    """
    saved = read_rope(directory)
    why = _contradiction(config.rope_parameters, saved)
    if why is None:
        return config if saved is None else config.model_copy(update={SETTING: saved})
    if not begins:
        how = "leave rope_parameters out: those of the adapter are used"
        raise ConfigError(why, where=str(directory), how=how)
    warnings.warn(f"{why}; training goes on with those of the settings", stacklevel=3)
    return config


def check_rope(parameters: RopeParameters | None, directory: Path) -> None:
    """Make sure that a model has the rotary parameters that an adapter was trained with.

    Args:
        parameters: of the model, in full; None: its own.
        directory: where the adapter is.

    Raises:
        ConfigError: it has others.
    """
    saved = read_rope(directory)
    why = _contradiction(parameters, saved)
    if parameters is None and saved is not None:
        why = "the adapter was made with other rope_parameters than the model's own"
    if why is not None:
        how = f"open the model with the rope_parameters of {directory / ROPE}, or with none"
        raise ConfigError(why, where=str(directory), how=how)


def _contradiction(override: RopeParameters | None, saved: RopeParameters | None) -> str | None:
    """Say in which values an override is not what an adapter was trained with; None: in none. The
    override may leave out what is the model's own."""
    if override is None:
        return None
    if saved is None:
        return "rope_parameters are set, but the adapter was made with the model's own"
    differing = [
        f"{key} is {value!r}, not {then!r}" for key, value, then in _differences(override, saved)
    ]
    if not differing:
        return None
    return f"the adapter was made with other rope_parameters: {'; '.join(differing)}"


def _differences(
    override: RopeParameters, saved: RopeParameters, within: str = ""
) -> Iterator[tuple[str, object, object]]:
    for key, value in override.items():
        then = saved.get(key)
        if isinstance(value, Mapping) and isinstance(then, Mapping):
            yield from _differences(value, then, f"{within}{key}.")
        elif value != then:
            yield f"{within}{key}", value, then


def _completed(
    text: PreTrainedConfig, published: RopeParameters, override: RopeParameters
) -> dict[str, object]:
    """Return an override with what it leaves out of the model's own parameters."""
    types = [key for key, value in published.items() if isinstance(value, Mapping)]
    nested = [key for key, value in override.items() if isinstance(value, Mapping)]
    if types and (not nested or set(override) - set(types)):
        wrong = sorted(set(override) - set(types))
        what = f"this model has them for each type of layers, and {wrong[0]} is none"
        how = f"write them as {types[0]}: {{...}}; the types are {', '.join(types)}"
        raise ConfigError(what, where=SETTING, how=how)
    if nested and not types:
        what = f"this model has one for all layers, and {nested[0]} has parameters of its own"
        raise ConfigError(what, where=SETTING, how="write the parameters without types of layers")
    if not types:
        return _filled(text, published, override)
    filled: dict[str, object] = dict(deepcopy(published))
    for key, value in override.items():
        before = published[key]
        assert isinstance(value, Mapping)
        assert isinstance(before, Mapping)
        filled[key] = _filled(text, before, value)
    return filled


def _filled(
    text: PreTrainedConfig, published: RopeParameters, override: RopeParameters
) -> dict[str, object]:
    """Return parameters of one kind of layers in full."""
    kinds = {"default", *ROPE_INIT_FUNCTIONS}
    kind = override.get("rope_type")
    if kind not in kinds:
        raise _refused(
            f"there is no rope_type {kind!r}", f"choose one of {', '.join(sorted(kinds))}"
        )
    of_model = {*OF_BASE, *OF_HEADS, *(getattr(text, "ignore_keys_at_rope_validation", None) or ())}
    of_heads = {key: value for key, value in published.items() if key in of_model}
    return {**of_heads, **deepcopy(dict(override))}


@contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect what `transformers` warns of as it checks parameters: it would go on with them."""
    messages = list[str]()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if record.funcName != NOTICE and BEYOND not in message and UNCHECKED not in message:
                messages.append(message)

    log = logging.getLogger(CHECKS)
    handler = Collector()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _refused(
    what: str, how: str = "correct it, as config.json of a model would have it"
) -> ConfigError:
    return ConfigError(f"transformers refuses these parameters: {what}", where=SETTING, how=how)
