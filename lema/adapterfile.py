"""The two files of an adapter, distrusted: what PEFT would take as it comes is checked before PEFT sees it.

Adapters are passed around more freely than models. A rank of a billion is made real before it is compared with the
weights beside it, and text where a number belongs fails somewhere else, in words nobody understands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema.configfile import MAX_CONFIG_BYTES
from lema.errors import AdapterError, WeightsError
from lema.header import TensorRecord, damaged, open_regular, parse_json, read_header, regular_size
from lema.weights import check_inside

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["check_file", "check_ranks", "check_types", "read_json", "read_records"]

FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an adapter.

    Raises:
        AdapterError: it cannot be read, is too large, leads out of its directory, or is no JSON object.
    """
    check_file(file)
    try:
        with open_regular(file) as stream:
            return parse_json(file, stream.read())
    except WeightsError as error:
        raise AdapterError(f"this is no config of an adapter: {error.what}", where=str(file), how=error.how) from error


def check_file(file: Path) -> None:
    """Make sure that a small file of an adapter is a file, small, and in the adapter's directory.

    Raises:
        AdapterError: it is not.
    """
    try:
        check_inside(file)
        if (size := regular_size(file)) > MAX_CONFIG_BYTES:
            raise damaged(file, f"it is {size} bytes long, more than the {MAX_CONFIG_BYTES} a config may have")
    except WeightsError as error:
        raise AdapterError(f"this is no config of an adapter: {error.what}", where=str(file), how=error.how) from error


def read_records(file: Path) -> Mapping[str, TensorRecord]:
    """Return what the header of an adapter's weights says; the tensors are not read.

    Raises:
        AdapterError: the file is missing or damaged, leads out of its directory, or holds no floating numbers.
    """
    try:
        check_inside(file)
        _, records = read_header(file)
    except WeightsError as error:
        raise AdapterError(f"the adapter file is damaged: {error.what}", where=str(file), how=error.how) from error
    if odd := [f"{name} ({record.dtype})" for name, record in records.items() if record.dtype not in FLOATING]:
        raise AdapterError(
            f"the adapter file is damaged: {', '.join(odd[:3])} are no floating numbers",
            where=str(file),
            how="copy or save the adapter again",
        )
    return records


def check_types(config: LoraConfig, file: Path) -> None:
    """Make sure that the values of a config are of the types that PEFT's own are of.

    Raises:
        AdapterError: one is not; names each.
    """
    wanted: dict[str, bool] = {
        "r": type(config.r) is int and config.r > 0,
        "lora_alpha": type(config.lora_alpha) in (int, float),
        "lora_dropout": type(config.lora_dropout) in (int, float),
        "base_model_name_or_path": _is_text(config.base_model_name_or_path),
        "revision": _is_text(config.revision),
        "target_modules": _are_names(config.target_modules) or _is_text(config.target_modules),
        "exclude_modules": _are_names(config.exclude_modules) or _is_text(config.exclude_modules),
        "layers_pattern": _are_names(config.layers_pattern) or _is_text(config.layers_pattern),
        "modules_to_save": _are_names(config.modules_to_save),
        "target_parameters": _are_names(config.target_parameters),
        "layers_to_transform": _are_rows(config.layers_to_transform) or type(config.layers_to_transform) is int,
        "rank_pattern": _is_table(config.rank_pattern, int),
        "alpha_pattern": _is_table(config.alpha_pattern, int, float),
        "trainable_token_indices": _are_rows(config.trainable_token_indices)
        or (isinstance(rows := config.trainable_token_indices, dict) and all(map(_are_rows, rows.values()))),
    }
    if wrong := [f"{name} is {getattr(config, name)!r:.200}" for name, right in wanted.items() if not right]:
        raise AdapterError(
            f"this is no config of an adapter: {'; '.join(wrong)}", where=str(file), how="correct the file"
        )


def check_ranks(config: LoraConfig, weights: Path) -> None:
    """Make sure that no rank of a config is beyond every size in the weights beside it, where there are any.

    Raises:
        AdapterError: one is, or the weights are damaged.
    """
    if not weights.is_symlink() and not weights.exists():
        return
    largest = max((size for record in read_records(weights).values() for size in record.shape), default=0)
    asked = {"r": config.r, **{f"rank_pattern[{name!r}]": rank for name, rank in (config.rank_pattern or {}).items()}}
    if beyond := [f"{name} is {rank}" for name, rank in asked.items() if rank > largest]:
        raise AdapterError(
            f"the adapter's config does not fit its weights: {'; '.join(beyond)}, and {weights.name} has no tensor so "
            "large",
            where=str(weights.parent),
            how="copy or save the adapter again; its files come from different saves",
        )


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_names(value: Any) -> bool:
    return value is None or _all(value, str)


def _are_rows(value: Any) -> bool:
    return value is None or _all(value, int)


def _is_table(value: Any, *kinds: type) -> bool:
    return value is None or (isinstance(value, dict) and _all(value.values(), *kinds))


def _all(values: Any, *kinds: type) -> bool:
    listed = isinstance(values, Iterable) and not isinstance(values, str | dict)
    return listed and all(type(one) in kinds for one in values)
