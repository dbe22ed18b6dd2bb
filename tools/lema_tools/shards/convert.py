"""Converts sharded adapters to PEFT's files and back, so that any shards become an adapter that
loads at any degree.

Both directions only move numbers, without arithmetic on them, and need nothing of the base model
but its config. Shards have the names of the class that trains, and PEFT's files also those of the
class that `config.json` names, or those of one of the two. Formats are entry points of the group
`lema.shard_formats`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend.layout import Difference, KvLayout
from lema.config.lemaconfig import CONFIG_NAME
from lema.errors import AdapterError, ConfigError, ModelError, WeightsError, named_in
from lema.lora.base import BASE_NAME
from lema.lora.checks import check_shapes, read_json
from lema.lora.class_names import compare_classes
from lema.lora.files import CONFIG, WEIGHTS, read_tensors, the_lora_config, weights_file
from lema.lora.published import ClassForm, publish_files, tensors_in_own
from lema.model import meta_model, read_config
from lema.storage import resolve_model
from lema.storage.atomic import appearing, free_directory, replace_file
from lema.storage.modelfiles import TEMPLATES, check_companions
from lema.storage.regular import check_separate, expanded, read_regular
from lema.storage.rendering import GENERATION
from lema.train.reference import REFERENCE

__all__ = [
    "Consolidated",
    "ShardFormat",
    "consolidate_adapter",
    "rename_adapter",
    "shard_adapter",
    "shard_formats",
]

Settings = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


class ShardFormat(Protocol):
    """One way to lay an adapter in shards: LEMA's own, or another library's."""

    @property
    def marks(self) -> str:
        """What a directory of such shards has in it: a pattern of file names."""

    def read(
        self,
        directory: Path,
        config: Settings,
        model: nn.Module | None,
        kv_layout: KvLayout | None,
        *,
        check: bool,
    ) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int, dict[str, Any]]:
        """Put shards together. Return the tensors by PEFT's names, which replicas of which differ
        (none, if `check`: they must agree, bit for bit), over how many ranks they lay, and PEFT's
        config, made of the `config` beside them. `model`: the base on `meta`; None: it is not here.
        `kv_layout`: where replicas of keys and values lie; None: as the shards say. `AdapterError`:
        files are missing, damaged or unsafe, or ranks or replicas differ."""

    def write(
        self,
        directory: Path,
        tensors: Tensors,
        config: Settings,
        model: PreTrainedModel,
        tp: int,
        kv_layout: KvLayout,
    ) -> None:
        """Cut an adapter of PEFT's `config` up for `tp` ranks, in a directory that does not exist
        yet. `AdapterError`, `ModelError`, `ConfigError`: the format has no place for it, for its
        model, or for so many ranks."""


SHARDS = "adapter_shards"
# What goes with an adapter in any form: LEMA's own files, how its texts end and are written, and
# its tokenizer.
COMPANIONS: tuple[str, ...] = (
    CONFIG_NAME,
    BASE_NAME,
    GENERATION,
    "*.jinja",
    "tokenizer*.json",
    "special_tokens_map.json",
)
COMPANIONS += (
    "added_tokens.json",
    "vocab.json",
    "*processor_config.json",
    "*.model",
    "*.txt",
    "*.tiktoken",
)


def shard_formats() -> dict[str, ShardFormat]:
    """Return the formats that are installed, by name."""
    return {point.name: point.load() for point in entry_points(group="lema.shard_formats")}


@dataclass(frozen=True)
class Consolidated:
    """What was put together."""

    directory: Path  # where it lies, in PEFT's format
    tp: int  # how many ranks it lay over
    num_tensors: int  # of the adapter
    # Where replicas differed and the first rank's were taken: name of the tensor -> on which ranks.
    differing: Mapping[str, list[Difference]]
    # the base model whose modules its shapes were compared with; None: it is not here
    base: str | None = None


def consolidate_adapter(
    shards: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    kv_layout: str | None = None,
    check: bool = True,
    model: str | None = None,
) -> Consolidated:
    """Put a sharded adapter together, as `adapter_config.json` and `adapter_model.safetensors`.
    `AdapterError`: the shards are missing, damaged or unsafe, do not fit together or the base
    model, or replicas differ; `ConfigError`: `out_dir` is taken, or `kv_layout` is none;
    `WeightsError`: `model` is given, and is neither a local directory nor in the hub cache;
    `DiskError`: a file could not be written; nothing is left behind. `shards`: the directory of
    shards, or the one it lies in, in any format (`shard_formats`). `kv_layout`: where replicas of
    keys and values lie, if the shards do not say. `check`: replicas must agree, bit for bit; else
    the first rank's are taken, and it is told which differ. `model`: the base model, whose modules'
    shapes, by its config, the adapter must fit; None: the one it names, if that is here. Without it
    the names are those in the shards."""
    out = free_directory(out_dir, 1)
    directory, form = _find_shards(Path(shards))
    config_file = next(
        (p for p in (directory.parent / CONFIG, directory / CONFIG) if p.is_file()), None
    )
    if config_file is None:
        raise AdapterError(
            f"there is no {CONFIG}", where=str(directory.parent), how="copy it next to the shards"
        )
    config = _adapter_config(config_file)
    check_separate(out, [directory, config_file.parent, *_base_named(config, model)])
    base, skeleton = _base_of(config, model)
    order = None if kv_layout is None else _order(kv_layout)
    tensors, differing, tp, config = form.read(directory, config, skeleton, order, check=check)
    if base is not None and skeleton is not None:
        tensors = tensors_in_own(skeleton, tensors, directory)
        check_shapes(tensors, skeleton, base)
    with appearing(out) as partial:
        _write_adapter(tensors, config, skeleton, config_file.parent, partial)
    return Consolidated(out, tp, len(tensors), differing, base)


def rename_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    names: str,
    *,
    model: str | None = None,
) -> Path:
    """Write an adapter in PEFT's format again, its tensors under the names of one class of its base
    model, or of both (`ClassForm`). `AdapterError`: there is no adapter, or it is damaged;
    `ConfigError`: `out_dir` is taken, there is no such form, or no base model is named;
    `WeightsError`: the base model is neither a local directory nor in the hub cache; `DiskError`: a
    file could not be written; nothing is left behind. `model`: the base model, of which the config
    is read; None: the one the adapter names."""
    if names not in get_args(ClassForm):
        how = f"one of {', '.join(get_args(ClassForm))}"
        raise ConfigError(f"there is no form of names called {names!r}", where="names", how=how)
    out = free_directory(out_dir, 1)
    adapter = Path(adapter_dir)
    if not weights_file(adapter).is_file() and _shards_in(adapter):
        what = "the adapter is in shards, and names are chosen for adapters in PEFT's format"
        how = (
            "put it together first (lema consolidate without --names), then give --names for "
            "the result"
        )
        raise AdapterError(what, where=str(adapter), how=how)
    the_lora_config(adapter)
    settings = _adapter_config(adapter / CONFIG)
    check_separate(out, [adapter, *_base_named(settings, model)])
    skeleton = _named_base(adapter, settings, model)
    tensors = tensors_in_own(skeleton, read_tensors(weights_file(adapter)), weights_file(adapter))
    with appearing(out) as partial:
        _write_adapter(tensors, settings, skeleton, adapter, partial, cast(ClassForm, names))
    return out


def shard_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    tp: int,
    *,
    kv_layout: str = "tile",
    model: str | None = None,
    trust_remote_code: bool = False,
    format: str = "lema",
) -> Path:
    """Cut an adapter in PEFT's format up for a tensor-parallel group, along the plan that its base
    model comes with.

    `format` is one of `shard_formats`; those of other libraries may have no place for something,
    and errors that say so. The axis of the rank is never cut. `AdapterError`: there is no adapter,
    or it is damaged; `WeightsError`: the base model is neither a local directory nor in the hub
    cache; `ModelError`: the base model has no plan, or it does not cover a module of the adapter;
    it says which; `ConfigError`: the model cannot be divided among so many ranks, or `out_dir` is
    taken; `DiskError`: a file could not be written; nothing is left behind.

    `kv_layout`: where replicas of keys and values lie, if there are fewer heads of these than
    ranks. `model`: the base model, of which the config is read; None: the one the adapter names."""
    out = free_directory(out_dir, 1)
    adapter = Path(adapter_dir)
    formats = shard_formats()
    if format not in formats:
        how = f"one of {', '.join(sorted(formats))}"
        raise ConfigError(
            f"there is no format of shards called {format!r}", where="format", how=how
        )
    the_lora_config(adapter)
    settings = _adapter_config(adapter / CONFIG)
    order = _order(kv_layout)
    check_separate(out, [adapter, *_base_named(settings, model)])
    skeleton = _named_base(adapter, settings, model, trust=trust_remote_code)
    tensors = tensors_in_own(skeleton, read_tensors(weights_file(adapter)), weights_file(adapter))
    with appearing(out) as partial:
        _write_settings(settings, adapter, partial)
        _write_reference(skeleton, adapter, partial)
        formats[format].write(partial / SHARDS, tensors, settings, skeleton, tp, order)
    return out


def _base_named(settings: Settings, model: str | None) -> list[Path]:
    """Return where the base model would be, if it is named by its place."""
    base = model or settings.get("base_model_name_or_path")
    return [expanded(base)] if isinstance(base, str) and base else []


def _named_base(
    adapter: Path, settings: Settings, model: str | None, *, trust: bool = False
) -> PreTrainedModel:
    """Return the base model on `meta` that is given, or that the adapter names."""
    base = model or settings.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            "the adapter does not name its base model", where=str(adapter), how="give it: --model"
        )
    with named_in(adapter / CONFIG if model is None else None):
        return _skeleton(
            _config_directory(base, None if model else settings.get("revision"), trust), trust=trust
        )


def _skeleton(directory: Path, *, trust: bool = False) -> PreTrainedModel:
    """Return a model on `meta`, of the class that trains, whose names in the published class are
    known.
    """
    config = read_config(directory, trust_remote_code=trust)
    skeleton = meta_model(config, trust_remote_code=trust)
    compare_classes(skeleton, config, trust_remote_code=trust)
    return skeleton


def _base_of(config: Settings, model: str | None) -> tuple[str | None, PreTrainedModel | None]:
    """Return the name of an adapter's base model, and that model on `meta`; None: it is not
    here.
    """
    base = model or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return None, None
    try:
        directory = _config_directory(base, None if model else config.get("revision"), trust=False)
        return base, _skeleton(directory)
    except (WeightsError, ModelError, ConfigError):
        if model:
            raise
        return None, None


def _config_directory(base: str, revision: str | None, trust: bool) -> Path:
    """Find the base model's config on this machine, since a whole model would be much to fetch
    for it.
    """
    try:
        return resolve_model(base, revision=revision, trust_remote_code=trust, download=False)
    except WeightsError as error:
        how = (
            "give a directory with its config.json: --model DIR (hf download ID config.json "
            "--local-dir DIR)"
        )
        raise WeightsError(
            f"no config of the base model: {error.what}", where=error.where, how=how
        ) from error


def _order(kv_layout: str) -> KvLayout:
    if kv_layout not in get_args(KvLayout):
        raise ConfigError(
            f"{kv_layout!r} is not an order of replicas",
            where="kv_layout",
            how="tile or interleave",
        )
    return cast(KvLayout, kv_layout)


def _find_shards(directory: Path) -> tuple[Path, ShardFormat]:
    """The directory with the shards themselves, the one given or that of one adapter in it, and
    their format.
    """
    candidates = _shards_in(directory)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        how = f"name one of {', '.join(sorted(path.parent.name for path, _ in candidates))}"
        raise AdapterError(
            f"there are {len(candidates)} adapters here", where=str(directory), how=how
        )
    if weights_file(directory).is_file():
        how = "use it unchanged, or give --names for those of one class of its model"
        raise AdapterError("this adapter is already whole", where=str(directory), how=how)
    how = (
        f"name a directory with {SHARDS}, which holds "
        f"{' or '.join(shard_format.marks for shard_format in shard_formats().values())}"
    )
    raise AdapterError("there are no shards of an adapter here", where=str(directory), how=how)


def _shards_in(directory: Path) -> list[tuple[Path, ShardFormat]]:
    """Return every directory of shards in the one given, itself among them, each with its
    format.
    """
    candidates = [
        directory,
        directory / SHARDS,
        *sorted(path / SHARDS for path in directory.glob("adapter_*") if path.name != SHARDS),
    ]
    return [
        (path, shard_format)
        for path in candidates
        for shard_format in shard_formats().values()
        if any(path.glob(shard_format.marks))
    ]


def _adapter_config(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if content.get("peft_type") != "LORA":
        raise AdapterError(
            "not the config of a LoRA adapter",
            where=str(file),
            how="only LoRA adapters are sharded",
        )
    return content


def _write_adapter(
    tensors: Tensors,
    config: Settings,
    skeleton: PreTrainedModel | None,
    source: Path,
    out: Path,
    names: ClassForm = "both",
) -> None:
    """Write PEFT's files into a directory, in the names of the classes of a base that is known."""
    save_file(dict(tensors), out / WEIGHTS, metadata={"format": "pt"})
    _write_settings(config, source, out)
    if skeleton is not None:
        publish_files(skeleton, out, CONFIG, WEIGHTS, names)
    _write_reference(skeleton, source, out, names)


def _write_reference(
    skeleton: PreTrainedModel | None, source: Path, out: Path, names: ClassForm = "both"
) -> None:
    """Write the adapter that a preference loss compared with, if there is one, beside the adapter
    that it trained: in PEFT's files always."""
    if not (directory := source / REFERENCE).is_dir():
        return
    config = _adapter_config(directory / CONFIG)
    tensors = read_tensors(weights_file(directory))
    if skeleton is not None:
        tensors = tensors_in_own(skeleton, tensors, weights_file(directory))
    (out / REFERENCE).mkdir()
    _write_adapter(tensors, config, skeleton, directory, out / REFERENCE, names)


def _write_settings(config: Mapping[str, Any], source: Path, out: Path) -> None:
    """Write PEFT's config into a directory, and copy there what goes with the adapter
    (`BESIDE`).
    """
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    check_companions(source)
    for directory in (source, source / TEMPLATES):
        for file in sorted(
            {file for pattern in COMPANIONS for file in directory.glob(pattern) if file.is_file()}
        ):
            into = out / directory.relative_to(source)
            into.mkdir(exist_ok=True)
            replace_file(into / file.name, read_regular(file, inside=True))
