"""A model's `config.json`, distrusted: what is in it is checked before `transformers` makes anything of it.

The file comes from strangers. `transformers` counts layers in loops and makes tables as long as the file says, so a
number that no model has costs hours or all memory; and it may be sent to other files, which nobody would have checked.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lema.errors import ModelError, WeightsError
from lema.header import open_regular, parse_json, regular_size
from lema.weights import check_inside

__all__ = ["MAX_CONFIG_BYTES", "MAX_LAYERS", "read_config_file"]

MAX_CONFIG_BYTES = 10_000_000
MAX_LAYERS = 2048  # an order of magnitude beyond the deepest models there are
MAX_DEPTH = 32  # of objects and lists in each other
COUNTS = re.compile(r"(layers?|blocks)$")  # how a key ends that says how often something is made


def read_config_file(directory: Path) -> dict[str, Any]:
    """Return what a model's `config.json` says.

    Raises:
        ModelError: there is none, it is damaged, a link out of the directory or no regular file, it holds numbers that
            no model has, or it sends its readers to other files.
    """
    file = directory / "config.json"
    if not file.is_symlink() and not file.exists():
        raise ModelError(
            "the model directory has no config.json",
            where=str(directory),
            how="point model_name_or_path at a directory written by save_pretrained, or at a hub id",
        )
    try:
        check_inside(file)
        if (size := regular_size(file)) > MAX_CONFIG_BYTES:
            raise WeightsError(
                f"config.json is {size} bytes long, more than the {MAX_CONFIG_BYTES} a config may have",
                where=str(file),
                how="download the model again",
            )
        with open_regular(file) as stream:
            config = parse_json(file, stream.read())
    except WeightsError as error:
        raise ModelError(error.what, where=error.where, how=error.how) from error
    for place, what in _absurd(config, "", MAX_DEPTH):
        raise ModelError(f"config.json is not that of a model: {what}", where=f"{file}: {place}", how="correct it")
    if "configuration_files" in config:
        raise ModelError(
            "config.json sends its readers to other files, which are not checked",
            where=f"{file}: configuration_files",
            how="copy the one you trust over config.json",
        )
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
