"""The small files next to a model's weights that `transformers` reads: checked first, then loaded.

A tokenizer's files and `config.json` come from the same strangers as the weights. A link may not lead out of the
model's directory, and a pipe or a device, which would block or never end, is not read. `transformers` counts layers in
loops and makes tables as long as the config says, so a number that no model has would cost hours or all memory, and is
refused; so is a config that sends `transformers` to other files, which nobody has checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema.errors import DataError, ModelError, WeightsError
from lema.storage.header import open_regular, parse_json, regular_size
from lema.storage.index import check_inside

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

__all__ = ["MAX_CONFIG_BYTES", "load_generation_config", "load_tokenizer", "read_config_file"]

COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
TEMPLATES = "additional_chat_templates"
MAX_BYTES = 500_000_000  # ten times the largest tokenizers


def check_companions(directory: Path) -> None:
    """Make sure that the files `transformers` may open in a model's directory are files, and lie in it. `WeightsError`:
    one is a link that leaves the directory, no regular file, or enormous."""
    folder = directory / TEMPLATES
    if folder.is_symlink() or folder.exists():
        check_inside(folder)
    for place in (directory, folder):
        for file in sorted({file for pattern in COMPANIONS for file in place.glob(pattern)}):
            check_inside(file)
            if not file.is_dir() and regular_size(file) > MAX_BYTES:
                what = f"{file.name} is larger than the {MAX_BYTES:,} bytes that such a file may have"
                raise DataError(what, where=str(file))


def load_tokenizer(directory: Path, *, trusted: bool, how: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory, and run code that comes with it if `trusted`. `DataError`: there is
    none, it cannot be loaded, or one of its files is not what it should be; `how` says what to do."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    check_companions(directory)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    # Any error at all: the files are from outside, and the library that reads them raises plain `Exception`.
    except Exception as error:
        what = f"the model has no tokenizer that can be loaded: {str(error) or type(error).__name__}"
        raise DataError(what, where=str(directory), how=how) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        what = f"the model has no tokenizer that can be loaded: {type(tokenizer).__name__} is none"
        raise DataError(what, where=str(directory), how=how)
    return tokenizer


def load_generation_config(directory: Path) -> GenerationConfig | None:
    """Load a model's own settings of generation; None: it has none. `ModelError`: the file cannot be read;
    `WeightsError`: it is a link that leaves the directory, or no regular file."""
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    if not file.is_symlink() and not file.exists():
        return None
    check_inside(file)
    regular_size(file)
    try:
        settings: GenerationConfig = GenerationConfig.from_pretrained(directory)
    except Exception as error:
        what = f"transformers cannot read these settings of generation: {error}"
        raise ModelError(what, where=str(file), how="correct the file, or delete it") from error
    return settings


MAX_CONFIG_BYTES = 10_000_000
MAX_LAYERS = 2048  # an order of magnitude beyond the deepest models there are
MAX_DEPTH = 32  # of objects and lists in each other
COUNTS = re.compile(r"(layers?|blocks)$")  # how a key ends that says how often something is made


def read_config_file(directory: Path) -> dict[str, Any]:
    """Return what a model's `config.json` says. `ModelError`: there is none, it is damaged, a link out of the directory
    or no regular file, it holds numbers that no model has, or it sends its readers to other files."""
    file = directory / "config.json"
    if not file.is_symlink() and not file.exists():
        how = "point model_name_or_path at a directory written by save_pretrained, or at a hub id"
        raise ModelError("the model directory has no config.json", where=str(directory), how=how)
    try:
        check_inside(file)
        if (size := regular_size(file)) > MAX_CONFIG_BYTES:
            what = f"config.json is {size} bytes long, more than the {MAX_CONFIG_BYTES} a config may have"
            raise WeightsError(what, where=str(file), how="download the model again")
        with open_regular(file) as stream:
            config = parse_json(file, stream.read())
    except WeightsError as error:
        raise ModelError(error.what, where=error.where, how=error.how) from error
    for place, what in _absurd(config, "", MAX_DEPTH):
        raise ModelError(f"config.json is not that of a model: {what}", where=f"{file}: {place}", how="correct it")
    if "configuration_files" in config:
        what = "config.json sends its readers to other files, which are not checked"
        raise ModelError(what, where=f"{file}: configuration_files", how="copy the one you trust over config.json")
    return config


def _absurd(value: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield where a number is that no model has, or where a value is nested too deep, and what is wrong."""
    if depth == 0:
        yield place, "it is nested too deep"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _absurd(inner, f"{place}.{key}" if place else key, depth - 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _absurd(inner, f"{place}[{number}]", depth - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield place, "a number of more than 64 bits"
    elif isinstance(value, int | float) and value > MAX_LAYERS and COUNTS.search(place):
        yield place, f"{value} of them, and {MAX_LAYERS} is the most that is built"
