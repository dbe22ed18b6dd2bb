"""Checks of an adapter's files, which come from anywhere, before PEFT loads them.

A rank of a billion would be allocated before it is compared with the weights, and text instead of a
number would fail elsewhere with a message that does not help. PEFT matches an adapter's regular
expressions with the names of all modules, and some take years for a name of thirty letters
(https://owasp.org/www-community/attacks/Regular_expression_Denial_of_Service_-_ReDoS), so each is
matched once beforehand under a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from torch import Tensor, nn

from lema.backend.timelimit import limited
from lema.errors import AdapterError, ModelError, WeightsError
from lema.lora.shards import module_of
from lema.storage import header
from lema.storage.header import TensorRecord, read_header
from lema.storage.index import MAX_CONFIG_BYTES
from lema.storage.regular import check_inside

__all__ = ["check_patterns", "check_shapes", "read_json"]

FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
Names = list[str] | set[str] | tuple[str, ...]
Rows = list[int] | tuple[int, ...]


class _Types(BaseModel):
    """The options of PEFT's `LoraConfig` that LEMA reads, each with the types that it may have
    in a file.
    """

    model_config = ConfigDict(strict=True)

    r: PositiveInt
    lora_alpha: int | float
    lora_dropout: int | float
    base_model_name_or_path: str | None
    revision: str | None
    target_modules: Names | str | None
    exclude_modules: Names | str | None
    layers_pattern: Names | str | None
    modules_to_save: Names | None
    target_parameters: Names | None
    layers_to_transform: Rows | int | None
    rank_pattern: dict[str, int] | None
    alpha_pattern: dict[str, int | float] | None
    trainable_token_indices: Rows | dict[str, Rows] | None


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an adapter. `AdapterError`: it cannot be read, is too
    large, leads out of its directory, or is no JSON object."""
    try:
        check_inside(file)
        return header.read_json(file, MAX_CONFIG_BYTES, "a config")
    except WeightsError as error:
        raise AdapterError(
            f"not the config of an adapter: {error.what}", where=str(file), how=error.how
        ) from error


def read_records(file: Path) -> Mapping[str, TensorRecord]:
    """Return what the header of an adapter's weights says; the tensors are not read.
    `AdapterError`: the file is missing or damaged, leads out of its directory, or holds no floating
    numbers."""
    try:
        check_inside(file)
        _, records = read_header(file)
    except WeightsError as error:
        raise AdapterError(
            f"the adapter file is damaged: {error.what}", where=str(file), how=error.how
        ) from error
    if odd := [
        f"{name} ({record.dtype})"
        for name, record in records.items()
        if record.dtype not in FLOATING
    ]:
        what = f"the adapter file is damaged: {', '.join(odd[:3])} are no floating numbers"
        raise AdapterError(what, where=str(file), how="copy or save the adapter again")
    return records


def check_types(config: LoraConfig, file: Path) -> None:
    """Make sure that values of a config have the types of PEFT's own; `AdapterError` names each
    that has not.
    """
    try:
        _Types.model_validate({name: getattr(config, name) for name in _Types.model_fields})
    except ValidationError as error:
        names = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        wrong = "; ".join(f"{name} is {getattr(config, name)!r:.200}" for name in names)
        what = f"this is not the config of an adapter: {wrong}"
        raise AdapterError(what, where=str(file), how="correct the file") from error


def check_ranks(config: LoraConfig, weights: Path) -> None:
    """Check that no rank of a config is larger than every size in the adapter's weights, if there
    are any. `AdapterError`: one is, or the weights are damaged."""
    if not weights.is_symlink() and not weights.exists():
        return
    largest = max(
        (size for record in read_records(weights).values() for size in record.shape), default=0
    )
    asked = {
        "r": config.r,
        **{f"rank_pattern[{name!r}]": rank for name, rank in (config.rank_pattern or {}).items()},
    }
    if beyond := [f"{name} is {rank}" for name, rank in asked.items() if rank > largest]:
        raise AdapterError(
            f"the adapter's config does not match its weights: {'; '.join(beyond)}; "
            f"{weights.name} has no tensor so "
            "large",
            where=str(weights.parent),
            how="copy or save the adapter again; its files do not belong together",
        )


MAX_SECONDS = 3.0  # for all names and patterns; those of a large model take thousandths
PLAIN = re.compile(r"[\w.-]*")  # there is one way to match it, and that is found at once


def check_patterns(config: LoraConfig, names: Iterable[str]) -> None:
    """Make sure that the patterns of an adapter's config can be matched with `names`, those of all
    modules. `ModelError`: one is no regular expression, or takes too long to match."""
    module_names = [path for name in names for path in (name, f"base_model.model.{name}")]
    where = ""
    try:
        with limited(MAX_SECONDS, TimeoutError):
            for option, pattern, within in _patterns(config):
                if PLAIN.fullmatch(pattern):
                    continue
                where = f"{option}: {pattern:.200}"
                matcher = re.compile(within.format(pattern) if within else pattern)
                match = matcher.match if within else matcher.fullmatch
                for name in module_names:
                    match(name)
    except TimeoutError:
        what = (
            "matching the names of the model's modules with this expression takes more than "
            f"{MAX_SECONDS:g} seconds"
        )
        how = "list the modules by name; do not use this adapter unless you trust it"
        raise ModelError(what, where=where, how=how) from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(
            f"this is no regular expression: {error}", where=where, how="correct it"
        ) from error


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each pattern as (option, pattern, the expression PEFT puts it into; empty: it is to
    match whole names).
    """
    for option in ("target_modules", "exclude_modules"):
        if isinstance(pattern := getattr(config, option), str):
            yield option, pattern, ""
    layers = config.layers_pattern
    for pattern in [layers] if isinstance(layers, str) else layers or ():
        yield "layers_pattern", pattern, r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
    for pattern in config.modules_to_save or ():
        yield "modules_to_save", pattern, r"(^|.*\.){}($|\..*)"
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or ():
            yield option, pattern, r"(.*\.)?({})$"


def check_shapes(tensors: Mapping[str, Tensor], model: nn.Module, base: str) -> None:
    """Refuse an adapter that is not of this model, whose parameters may be on `meta`; errors call
    the model `base`. `AdapterError` names a tensor of a module that the model does not have, or of
    another shape."""
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        path, leaf = module_of(name)
        module = modules.get(path)
        if not leaf or module is None:
            what = f"{base} has no module for this tensor"
            raise AdapterError(
                what, where=name, how="name the model on which it was trained: --model"
            )
        paired_factor = tensors.get(
            name.removesuffix(leaf) + leaf.translate(str.maketrans("AB", "BA"))
        )
        rank = (
            None
            if paired_factor is None or paired_factor.dim() != 2
            else paired_factor.shape[0 if "B" in leaf else 1]
        )
        expected = _shape(module, leaf, rank)
        if expected is not None and list(tensor.shape) != list(expected):
            what = f"it is {list(tensor.shape)}, and in {base} it would be {list(expected)}"
            how = (
                "shards are missing, were padded, or belong to another model: name it with --model"
            )
            raise AdapterError(what, where=name, how=how)


def _shape(module: nn.Module, leaf: str, rank: int | None) -> Sequence[int] | None:
    """The shape that a tensor of an adapted module has, given the other factor's rank; None: it
    is not known.
    """
    if not leaf.startswith("lora_"):
        parameter = getattr(module, leaf.removeprefix("base_layer."), None)
        return parameter.shape if isinstance(parameter, Tensor) else None
    if isinstance(module, nn.Linear):
        inputs = module.in_features
        outputs = module.out_features
    elif isinstance(module, nn.Embedding):
        inputs = module.num_embeddings
        outputs = module.embedding_dim
    else:
        return None
    if leaf == "lora_B.bias":
        return (outputs,)
    if rank is None or leaf.startswith("lora_magnitude"):
        return None
    return (rank, inputs) if "_A" in leaf else (outputs, rank)
