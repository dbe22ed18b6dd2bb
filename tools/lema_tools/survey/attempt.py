"""Whether a model type streams, what an adapter trains in it, and why not where it does not: found
out by trying.

LEMA has no list of models. `transformers` names the types and has a default config for most. The
model is built on `meta`, and its own forward is run up to the layers, and from the layers to the
logits, on tensors that have shapes and no values. That tries all that training needs of a model, in
a fraction of a second and without memory.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import CRITICAL, getLogger

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from lema.backend import load
from lema.config import LemaConfig
from lema.errors import LemaError
from lema.lora.attach import configured_lora, inject_lora_params
from lema.model import Split, meta_model, read_config
from lema.model.capture import replaced_tensors
from lema.model.skeleton import find_layers
from lema.model.state.rotary import tables_as_they_are
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.hub import own_weights
from lema.storage.modelfiles import known_types

__all__ = ["Row", "model_types", "survey", "survey_model", "try_model"]

TOKENS = 8
VALUES_NEEDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Row:
    """What is known of one model."""

    model_type: str  # the `model_type` of its `config.json`
    streams: bool | None  # None where it cannot be told without another config
    # the linear modules and experts of its layers that an adapter trains by default
    targets: tuple[str, ...] = ()
    # why it does not stream, why that is not known, or why adapters do not fit; one sentence
    reason: str = ""
    source: str = ""  # where its weights are; empty where only the type was asked for
    # Whether its weights are rearranged whenever they are read; None: no weights were looked at.
    prepare: bool | None = None


def model_types() -> list[str]:
    """Every type of which the installed `transformers` has a causal language model, or one of
    images and text.
    """
    return sorted(known_types())


def survey(model_type: str) -> Row:
    """Try the default config of a type."""
    with _quiet():
        try:
            config = CONFIG_MAPPING[model_type]()
            # models that can be encoders are causal language models here
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            model = meta_model(config, torch.float32)
        # Any error at all: configs and models are others' code, and what they say is passed on.
        except Exception as error:  # noqa: BLE001 - a model's own code raises anything
            return Row(model_type, None, reason=_unknown(error))
    return try_model(model, model_type)


def survey_model(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Row:
    """Try a model that is on disk, with its own config, and see whether its weights stream as they
    are stored. It is named by its directory, a `.safetensors` file in one, or the hub id of a model
    in the cache. `ConfigError` or `WeightsError`: there is no such model, or it is none that can be
    tried."""
    directory = resolve_model(
        name_or_path, revision=revision, trust_remote_code=trust_remote_code, download=False
    )
    config = read_config(directory, trust_remote_code=trust_remote_code)
    index = GlobalBinaryIndex(own_weights(name_or_path, directory))
    with _quiet():
        model = meta_model(config, torch.float32, trust_remote_code=trust_remote_code)
        try:
            prepare = bool(map_names(model, index).rearranged)
        except LemaError as error:
            return Row(config.model_type, False, reason=_sentence(error), source=name_or_path)
    return replace(try_model(model, config.model_type), source=name_or_path, prepare=prepare)


def try_model(model: PreTrainedModel, model_type: str) -> Row:
    """Try one model as `meta_model` builds it, which cannot be used afterwards."""
    with _quiet():
        try:
            # Up to the layers, the first layer, and from the layers to the logits.
            not_run = {part for layer in find_layers(model)[1][1:] for part in layer.modules()}
            with _shapes_only(model, not_run):
                for training in (True, False):
                    split = Split(model.train(training), load("cpu"))
                    tokens = torch.ones(1, TOKENS, dtype=torch.long)
                    prelude = split.prelude({"input_ids": tokens}, split.layers[0].state_dict())
                    split.head(prelude.hidden)
        except Exception as error:  # noqa: BLE001 - a model's own code raises anything
            if isinstance(error.__cause__ or error, VALUES_NEEDED):
                return Row(
                    model_type,
                    None,
                    reason="unknown without weights: its computation depends on values",
                )
            refused = isinstance(error, LemaError)
            if not (refused and error.__cause__ is None) and (model_error := _own_failure(model)):
                return Row(model_type, None, reason=_unknown(model_error))  # not for our reasons
            reason = (
                _sentence(error)
                if refused
                else f"it runs whole, but not layer by layer: {_sentence(error)}"
            )
            return Row(model_type, False, reason=reason)
        try:
            return Row(model_type, True, _adapted(model))
        except LemaError as error:
            return Row(model_type, True, reason=f"no adapter by default: {_sentence(error)}")


def _own_failure(model: PreTrainedModel) -> Exception | None:
    """Return the error that the whole model raises in the same mode; None: it runs."""
    try:
        with _shapes_only(model):
            model(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
    except Exception as error:  # noqa: BLE001 - a model's own code raises anything
        return error
    return None


def _adapted(model: PreTrainedModel) -> tuple[str, ...]:
    """Attach the default adapter, and return the names of the modules that got one."""
    layers = find_layers(model)[1]
    seen = set()
    targets = set()
    for index, layer in enumerate(layers):
        made_of = tuple((name, type(module)) for name, module in layer.named_modules())
        if made_of in seen:  # adapters fit both or neither
            layers[index] = nn.Identity()
        seen.add(made_of)
    config = configured_lora(model, LemaConfig("-", lora_rank=1))
    inject_lora_params(model, config, torch.device("cpu"), seed=None)
    for name, module in model.named_modules():
        leaf = name.replace(".base_layer", "").rpartition(".")[2]
        if isinstance(module, ParamWrapper):  # a parameter of a module that has several
            targets.add(f"{leaf}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            targets.add(leaf)
    return tuple(sorted(targets))


@contextmanager
def _shapes_only(model: PreTrainedModel, not_run: Collection[nn.Module] = ()) -> Iterator[None]:
    """Run what is inside without values: parameters seem to be in memory, but only shapes and
    dtypes are computed. Those of modules that are `not_run` stay as they are, because a large model
    has most of its parameters in them."""
    # The other implementations of experts sort tokens by values, or compute in half precision only.
    model.set_experts_implementation("batched_mm")
    unrun_ids = {id(parameter) for module in not_run for parameter in module._parameters.values()}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) in unrun_ids or not isinstance(tensor, nn.Parameter):
            return tensor
        return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), requires_grad=False)

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with tables_as_they_are(model), mode, torch.no_grad(), replaced_tensors(model, like):
        yield


def _unknown(error: BaseException) -> str:
    """Say why a type cannot be judged: its default config makes no model that runs."""
    cause = error.__cause__ if isinstance(error, LemaError) and error.__cause__ else error
    if isinstance(cause, ImportError):
        return f"unknown until a package is installed: {_sentence(cause)}"
    return f"unknown until given a config: {_sentence(cause)}"


def _sentence(error: BaseException) -> str:
    """Return an error's words in one line that is not too long."""
    message = error.what if isinstance(error, LemaError) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(message, LONGEST_REASON, placeholder=" ...")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs about a config that is only tried; errors are raised, and told
    in the row.
    """
    level = logging.get_verbosity()
    tracer = getLogger("torch._subclasses.fake_tensor")
    logging.set_verbosity_error()
    before = tracer.level
    tracer.level = CRITICAL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        tracer.level = before
