"""Adapters on disk: PEFT's two files, written and read unchanged, and readers of
`adapter_model.bin`.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys
from transformers import PreTrainedModel

from lema.backend import Parallel
from lema.config import LemaConfig
from lema.config.lemaconfig import CONFIG_NAME
from lema.config.peft import SETTING_OF, refusals
from lema.config.problems import SettingsError
from lema.errors import AdapterError, ConfigError, WeightsError
from lema.lora.checks import check_ranks, check_types, read_json, read_records
from lema.lora.consent import without_consent
from lema.lora.options import with_options
from lema.lora.published import (
    config_in_files,
    config_in_own,
    publish_files,
    tensors_in_files,
    tensors_in_own,
)
from lema.lora.serving.gathered import LORA_A, published_adapter
from lema.lora.shards import PREFIX
from lema.model.outer_weights import put
from lema.model.partition import local_adapter
from lema.model.sequence.rope import with_saved_rope
from lema.storage import resolve_model
from lema.storage.atomic import finish_directory
from lema.storage.diskspace import not_written
from lema.storage.header import UNREADABLE, check_pickled
from lema.storage.verify import check_finite, check_written, load_tensors


def saved_tensors(model: PeftModel, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the tensors that PEFT writes, by their names in its file; `state`: a state dict to
    use for the model's.
    """
    state_dict = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# as PEFT wrote it before safetensors; without a config, as earlier versions of LEMA did
OLD_WEIGHTS = "adapter_model.bin"
ORDERED = frozenset({"lora_trainable_token_indices"})
PATTERNS = frozenset({"rank_pattern", "alpha_pattern"})


def read_settings(
    directory: Path, *, unread: Container[str] = (), **overrides: Any
) -> tuple[LemaConfig, LoraConfig | None]:
    """Read the settings an adapter was trained with, and PEFT's config of it (None: the older
    format). `overrides` replace settings of `lema_config.json`, or stand for it where PEFT's files
    lie alone. Of a file that this user's runs have not written, settings that act are ignored
    (`lema.lora.consent`), with a line, unless they are `unread`. `AdapterError`: there is no
    adapter, or one of its files is not what it should be; `ConfigError`: a setting is wrong, or
    contradicts it."""
    saved = read_lora_config(directory)
    if (directory / CONFIG_NAME).is_file():
        ignored = without_consent(directory / CONFIG_NAME, overrides, unread)
        config = LemaConfig.from_pretrained(directory, **{**ignored, **overrides})
    elif saved is not None:
        named = {"model_name_or_path": saved.base_model_name_or_path}
        if overrides.keys().isdisjoint({"model_name_or_path", "revision"}):
            named["revision"] = saved.revision
        config = LemaConfig(**{**named, **overrides})
    else:
        how = "choose a directory that save_pretrained, save_checkpoint or `lema train` wrote"
        raise AdapterError(
            f"there is neither {CONFIG_NAME} nor {CONFIG}", where=str(directory), how=how
        )
    config = with_saved_rope(config, directory)
    if saved is None:
        return config, None
    if "lora_dropout" in overrides:
        saved = with_options(saved, lora_dropout=config.lora_dropout)
    return _agreed(config, saved, overrides, directory), saved


def settings_file(directory: Path) -> Path:
    """Return the file that names the base model of an adapter."""
    return next(
        (file for name in (CONFIG_NAME, CONFIG) if (file := directory / name).is_file()), directory
    )


def _agreed(
    config: LemaConfig, saved: LoraConfig, overrides: Mapping[str, Any], directory: Path
) -> LemaConfig:
    """Let the settings say what the adapter is. Only the dropout may be changed, because it is
    no part of the model.
    """
    facts = _facts(saved)
    # the settings as they were given; PEFT writes out the values that they came to have
    file = directory / CONFIG_NAME
    asked = read_json(file) if file.is_file() else {}
    for name, fact in facts.items():
        override = overrides.get(name)
        if override is not None and not any(
            _same(name, override, expected) for expected in (fact, asked.get(name))
        ):
            what = f"{name} is {override!r}, but the adapter was made with {fact!r}"
            how = f"leave {name} out, or begin a new adapter in another directory"
            raise ConfigError(what, where=str(directory), how=how)
    try:
        return LemaConfig(**{**config.model_dump(exclude_unset=True), **facts})
    except SettingsError as error:
        raise AdapterError(
            f"the adapter cannot be used: {error.what}", where=str(directory / CONFIG)
        ) from error


def with_adapter(config: LemaConfig, directory: Path | None = None) -> LemaConfig:
    """Return the settings of a run that begins with a saved adapter, those of that adapter among
    them; raises `AdapterError` or `WeightsError` where there is none, `ConfigError` where a setting
    contradicts it. `directory`: where the adapter is; None: where the settings say."""
    if config.adapter_name_or_path is None:
        return config
    directory = directory or resolve_model(config.adapter_name_or_path)
    config = with_saved_rope(config, directory, begins=True)
    saved = the_lora_config(directory)
    if config.objective != "sft":
        # because these objectives train without, as TRL's `disable_dropout` has it
        saved = with_options(saved, lora_dropout=0.0)
    overrides = config.model_dump(exclude_unset=True)
    if "lora_dropout" in overrides:
        saved = with_options(saved, lora_dropout=config.lora_dropout)
    return _agreed(config, saved, overrides, directory)


def settings_of(config: LoraConfig, task: str = "CAUSAL_LM") -> dict[str, Any]:
    """Return the settings that say what PEFT's config says, which is of this task; `ConfigError`:
    it asks for what cannot be streamed."""
    if type(config) is not LoraConfig:
        what = f"the adapter is of type {type(config).__name__.removesuffix('Config')}"
        raise ConfigError(
            what, where="peft_config", how="give a LoraConfig: only LoRA adapters are supported"
        )
    if problems := [*refusals(vars(config), task)]:
        what = f"the adapter cannot be used, because it has {'; '.join(problems)}"
        raise ConfigError(what, where="LoraConfig", how="leave that out")
    return _facts(config)


def _facts(config: LoraConfig) -> dict[str, Any]:
    return {
        setting: _plain(option, getattr(config, option)) for option, setting in SETTING_OF.items()
    }


def _plain(option: str, value: Any) -> object:
    """Return the value of an option of PEFT's as the setting that says the same has it."""
    if option in PATTERNS:
        return dict(value or {})
    if isinstance(value, set):
        value = sorted(value)
    return None if value in ([], (), {}, "") and option != "target_modules" else value


def _same(setting: str, left: object, right: object) -> bool:
    """Whether two values of a setting mean the same; names and numbers of layers have no order,
    rows have one.
    """
    if (
        isinstance(left, list | tuple | set)
        and isinstance(right, list | tuple | set)
        and setting not in ORDERED
    ):
        return sorted(left) == sorted(right)
    return bool(left == right)


def check_same_adapter(model: PeftModel, directory: Path) -> None:
    """Make sure that the adapter attached is the one in `directory`, but for its values and its
    dropout. `ConfigError`: settings have changed since it was saved; names each."""
    if differing := adapter_differences(model, directory):
        names = " and ".join(setting for setting, _, _ in differing)
        what = "; ".join(
            f"{name} is {now!r}, but the adapter was made with {then!r}"
            for name, then, now in differing
        )
        raise ConfigError(
            what,
            where=str(directory),
            how=f"set {names} back, or begin a new run in another output_dir",
        )


def adapter_differences(model: PeftModel, directory: Path) -> list[tuple[str, Any, Any]]:
    """Return each setting of the adapter in `directory` that is another of the one attached: its
    name, then and now.
    """
    if (saved := read_lora_config(directory)) is None:
        return []
    attached = cast(LoraConfig, model.peft_config["default"])
    then = _facts(saved)
    now = _facts(attached)
    base_model = cast(PreTrainedModel, model.get_base_model())
    written = _facts(
        config_in_files(base_model, attached, [name for name, _ in model.named_parameters()])
    )
    names = [name for name in then if name not in ("lora_dropout", "lora_init")]
    differing = [
        name
        for name in names
        if not any(_same(name, settings[name], then[name]) for settings in (now, written))
    ]
    # an empty list means none, and None would mean the default
    none: dict[str, Any] = {"lora_target_parameters": []}
    return [
        (name, none.get(name) if then[name] is None else then[name], now[name])
        for name in differing
    ]


def the_lora_config(directory: Path, task: str = "CAUSAL_LM") -> LoraConfig:
    """Read `adapter_config.json`, or raise `AdapterError` if it cannot be read or is not there."""
    if (saved := read_lora_config(directory, task)) is None:
        how = f"name a directory with {CONFIG} and {WEIGHTS}"
        raise AdapterError(
            "there is no adapter in PEFT's format here", where=str(directory), how=how
        )
    return saved


def read_lora_config(directory: Path, task: str = "CAUSAL_LM") -> LoraConfig | None:
    """Read `adapter_config.json`, which is of this task; None: the directory has none (the older
    format). `AdapterError`: the file cannot be read, or is not of a LoRA adapter."""
    file = directory / CONFIG
    if not file.is_symlink() and not file.exists():
        return None
    written = read_json(file)
    if (kind := written.get("peft_type")) != "LORA":
        raise AdapterError(
            f"the adapter is of type {kind}",
            where=str(file),
            how="only LoRA adapters are supported",
        )
    unknown = sorted(written.keys() - {field.name for field in fields(LoraConfig)})
    newer = [
        f"{name}, which this version of PEFT does not know" for name in unknown if written[name]
    ]
    if problems := [*refusals(written, task), *newer]:
        what = f"the adapter cannot be used, because it has {'; '.join(problems)}"
        raise AdapterError(
            what, where=str(file), how="upgrade peft" if newer else "use an adapter without this"
        )
    try:
        with warnings.catch_warnings():
            # It repeats names that it does not know, however long they are. They have no value, or
            # were refused above.
            warnings.filterwarnings("ignore", message="Unexpected keyword arguments")
            config = PeftConfig.from_pretrained(str(directory))
    # Any error at all: PEFT takes the types of a file from outside on trust.
    except Exception as error:
        raise AdapterError(
            f"PEFT cannot read this adapter config: {error}", where=str(file)
        ) from error
    assert isinstance(config, LoraConfig)
    check_types(config, file)
    check_ranks(config, directory / WEIGHTS)
    initial: Any = config.init_lora_weights
    if isinstance(initial, str):
        config = with_options(
            config,
            init_lora_weights=True if initial.lower() == "eva" else initial.lower(),
            eva_config=None,  # it read data before the first step, and is of no use by now
        )
    return with_options(
        config,
        rank_pattern=config.rank_pattern or {},
        alpha_pattern=config.alpha_pattern or {},
        inference_mode=False,  # PEFT saves every adapter as one that is not to be trained
    )


def adapter_config(model: PreTrainedModel, saved: LoraConfig, directory: Path) -> LoraConfig:
    """Return the config of a saved adapter for this model, which has no adapters: the names of
    modules may be those of the class that trains or of the published one. `AdapterError`: it adapts
    modules that the model does not have, or its weights are damaged."""
    file = directory / WEIGHTS
    if not file.is_file():
        return saved
    records = read_records(file)
    if (adapter := published_adapter(model, records)) is not None:
        ranks = {
            name.removeprefix(PREFIX).removesuffix(LORA_A): record.shape[0]
            for name, record in records.items()
            if name.endswith(LORA_A)
        }
        return adapter.config(saved, ranks, directory)
    return config_in_own(model, saved, records, directory)


def save_adapter(
    model: PeftModel,
    directory: Path,
    base: str,
    revision: str | None = None,
    consolidated: Mapping[str, Tensor] | None = None,
    writers: Iterable[Callable[[Path], object]] = (),
) -> None:
    """Write PEFT's files, but no model card, each whole or not at all, with the permissions of
    others in the directory.

    Before they get their names, the tensors are read back and compared with those in memory, bit
    for bit. Whatever fails, the files that were there before are untouched. The directory is made
    where it does not exist. `DiskError`: a file could not be written, or reads back otherwise;
    `NonFiniteError`: a tensor that would be saved has a NaN or an infinity. `base`: the base model
    as the user names it, written to `base_model_name_or_path`; beside it, the `revision`.
    `consolidated`: the trained tensors by name, where processes hold parts of them
    (`lema.model.partition`). `writers`: of further files.
    """
    # in place, because another object would be something that the model keeps from call to call
    model.peft_config["default"].base_model_name_or_path = base
    model.peft_config["default"].revision = revision
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adapter-", dir=directory) as name:
            part = Path(name, "adapter")
            part.mkdir()  # has the umask's permissions, which `finish_directory` gives its files
            with warnings.catch_warnings():
                # PEFT takes the bias of B, which has one dimension, for a shard.
                warnings.filterwarnings(
                    "ignore", message=r"Adapter 'default': \d+ LoRA tensor\(s\) have invalid shape"
                )
                state = None if consolidated is None else {**model.state_dict(), **consolidated}
                expected = saved_tensors(model, state)
                check_finite(expected, directory / WEIGHTS)
                model.save_pretrained(str(part), save_embedding_layers=False, state_dict=state)
            (part / "README.md").unlink(missing_ok=True)  # a form with nothing filled in
            base_model = cast(PreTrainedModel, model.get_base_model())
            publish_files(base_model, part, CONFIG, WEIGHTS)
            expected = tensors_in_files(base_model, expected)
            for write in writers:
                write(part)
            finish_directory(part)
            # Not what PEFT chooses to save, because an adapter that is saved empty shall be
            # noticed.
            trained = (
                [parameter for parameter in model.parameters() if parameter.requires_grad]
                if consolidated is None
                else consolidated.values()
            )
            check_written(part / WEIGHTS, expected, sum(tensor.numel() for tensor in trained))
            for file in part.iterdir():
                if file.is_dir():  # of further chat templates
                    shutil.rmtree(directory / file.name, ignore_errors=True)
                file.replace(directory / file.name)
    except (OSError, SafetensorError) as error:
        raise not_written(f"the adapter could not be written: {error}", error, directory) from error


def weights_file(directory: Path) -> Path:
    """Return the file of an adapter's weights: `adapter_model.safetensors`, or `adapter_model.bin`
    where that is not there."""
    file = directory / WEIGHTS
    return file if file.is_file() else directory / OLD_WEIGHTS


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors in either file of PEFT's. `AdapterError`: it is missing or damaged."""
    return (
        _read_pickled(file)
        if file.name == OLD_WEIGHTS and file.is_file()
        else read_safetensors(file)
    )


def load_weights(
    model: PeftModel, directory: Path, layers_name: str, parallel: Parallel | None = None
) -> None:
    """Fill the adapter's parameters from a directory; every one of them must be in the file, and no
    other. The file is `adapter_model.safetensors`, or else `adapter_model.bin`; `layers_name` is
    the dotted name of the decoder layers in the base model. Where processes hold the adapter
    together, each takes its part of it (`parallel`). `AdapterError`: there is no adapter, it is
    damaged, or it does not fit the model."""
    file = weights_file(directory)
    if (directory / CONFIG).is_file() and file.is_file():
        tensors = read_tensors(file)
    elif file.is_file():
        tensors = read_safetensors(file) if file.name == WEIGHTS else _read_old(file, layers_name)
    else:
        what = f"there is no adapter here: neither {WEIGHTS} nor {OLD_WEIGHTS}"
        how = "choose a directory that save_pretrained, save_checkpoint or `lema train` wrote"
        raise AdapterError(what, where=str(directory), how=how)
    base = cast(PreTrainedModel, model.get_base_model())
    if (adapter := published_adapter(base, tensors)) is not None:
        tensors = adapter.tensors(model, tensors)
    tensors = tensors_in_own(base, tensors, file)
    if parallel is not None:
        tensors = local_adapter(model, parallel, tensors)
    _begin_frozen(model, tensors, layers_name, file)
    try:
        outcome = fill_adapter(model, tensors) or set_peft_model_state_dict(model, tensors)
    except (RuntimeError, KeyError) as error:
        raise AdapterError(
            f"the adapter does not fit the model: {error}", where=str(file)
        ) from error
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name in outcome.missing_keys if name in trained]
    # With bias "all" PEFT writes the biases of a module that trains whole twice, and reads them
    # once.
    copies = {name for name in tensors if ".modules_to_save." in name}
    twice = {name for name in copies if name.replace(".modules_to_save", "") in tensors}
    unexpected = [name for name in outcome.unexpected_keys if name not in twice]
    if missing or unexpected:
        raise AdapterError(
            "the adapter does not fit the model: "
            f"missing {', '.join(missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}",
            where=str(file),
            how="load it with the rank, target modules and base model it was trained with",
        )


def fill_adapter(
    model: PeftModel, tensors: Mapping[str, Tensor], adapter: str = "default"
) -> _IncompatibleKeys | None:
    """Fill an adapter's parameters with tensors that have the names which PEFT writes for this
    model, and return which names were missing, and which unexpected; None: some have others, as
    those of earlier versions of `transformers`, and nothing was filled. PEFT's own reader takes
    names in memory for names in files, which rules of `transformers` may rename: of such types,
    those with `shared_experts` for one, it loses what it has written, and only warns."""
    state: dict[str, Tensor] = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    written = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    state_names = {name: name for name in state} | {
        name: names[id(tensor)] for name, tensor in written.items() if id(tensor) in names
    }
    if not tensors.keys() <= state_names.keys():
        return None
    outcome: _IncompatibleKeys = model.load_state_dict(
        {state_names[name]: tensor for name, tensor in tensors.items()}, strict=False
    )
    return outcome


def _begin_frozen(
    model: PeftModel, tensors: Mapping[str, Tensor], layers_name: str, file: Path
) -> None:
    """Fill in frozen weights that PEFT saved with the adapter (those of embeddings) where
    weights are missing.
    """
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in tensors or not parameter.is_meta:
            continue
        if name.startswith(f"{PREFIX}{layers_name}."):
            what = f"unexpected {name}, a frozen weight of a decoder layer"
            how = "use an adapter without it; those weights are streamed from the model"
            raise AdapterError(
                f"the adapter does not fit the model: {what}", where=str(file), how=how
            )
        if tensors[name].shape != parameter.shape:
            what = (
                f"{name} is {list(tensors[name].shape)}, and {list(parameter.shape)} in the model"
            )
            how = "load it with the base model it was trained with"
            raise AdapterError(
                f"the adapter does not fit the model: {what}", where=str(file), how=how
            )
        put(model, name, tensors[name])


def _read_old(file: Path, layers_name: str) -> dict[str, Tensor]:
    """Read `"<layer, from 1>.<module>.lora_A"` -> tensor, and name each as PEFT does."""
    tensors = {}
    for name, tensor in _read_pickled(file).items():
        layer, _, module_path = name.partition(".")
        if not layer.isdecimal():
            what = (
                f"this is not an adapter of the older format: {name} does not begin with the "
                "number of a layer"
            )
            raise AdapterError(
                what, where=str(file), how=f"put PEFT's {CONFIG} beside it, if PEFT wrote it"
            )
        tensors[f"{PREFIX}{layers_name}.{int(layer) - 1}.{module_path}.weight"] = tensor.float()
    return tensors


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Read the tensors that `torch.save` wrote, by names. No code of the file is run, and it may
    hold nothing else.
    """
    try:
        check_pickled(file)
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        for name, tensor in loaded.items():
            if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
                raise WeightsError(
                    f"{name} refers to more numbers than the file has", where=str(file)
                )
        return {str(name): tensor for name, tensor in loaded.items()}
    except (WeightsError, *UNREADABLE) as error:
        what = (
            "this is not an adapter of the older format, a file of tensors and their names: "
            f"{error}"
        )
        raise AdapterError(what, where=str(file), how="only tensors are loaded from it") from error


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of an adapter in PEFT's format. `AdapterError`: the file is missing or
    damaged, leads out of its directory, or holds no floating numbers."""
    read_records(file)
    try:
        return load_tensors(file)
    except WeightsError as error:
        raise AdapterError(
            f"the adapter file is damaged: {error.what}", where=str(file), how=error.how
        ) from error
