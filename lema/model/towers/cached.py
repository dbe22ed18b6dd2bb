"""Towers whose outputs are kept by image: what they have made of one once, they do not make again.

`transformers` has one method of a model for each kind of input that goes through towers, and the
model's forward calls it. It is called here for each image alone, so that what is kept is a function
of that image, whichever others were beside it, and a run has the same numbers whether its images
are kept already or not. The key of an image is what the processor made of it, with the weights of
the towers and what else decides their numbers.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from functools import wraps
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs
from transformers.utils import ModelOutput

from lema.backend import Backend
from lema.errors import ConfigError, ModelError
from lema.model.towers.cuts import POOLED, Tree, cut, is_nothing, joined, trimmed
from lema.model.towers.store import TowerOutputs, TowerStore

__all__ = ["CachedTowers"]

METHODS = ("get_image_features", "get_video_features", "get_audio_features")
# Inputs of tokens, which some models hand on with everything else that they are given.
OF_TOKENS = frozenset(
    {"attention_mask", "cache_position", "input_ids", "inputs_embeds", "labels", "position_ids"}
    | {"mm_token_type_ids", "token_type_ids"}
)
# What towers make besides that nothing after them reads.
UNREAD = ("hidden_states", "attentions", "last_hidden_state")
SETTING = "tower_cache"


class CachedTowers:
    """The towers of one model, whose outputs are kept from here on.

    Args:
        model: the model.
        towers: names of their modules in it.
        store: keeps the outputs.
        identity: of the weights of the towers, and of how they are computed.
        load: reads the weights of the towers, when they are first needed.
        backend: the device.

    Attributes:
        store: as given; it counts what was there and what was not.
        loaded: whether the towers have been read.

    Raises:
        ConfigError: the model has no method for what goes through its towers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        towers: Sequence[str],
        store: TowerStore,
        identity: str,
        load: Callable[[], object],
        backend: Backend,
    ) -> None:
        self.store = store
        self.loaded = False
        self._towers = [model.get_submodule(name) for name in towers]
        self._identity = identity
        self._load = load
        self._backend = backend
        self._inside = False
        owners = [
            (module, name)
            for module in model.modules()
            for name in METHODS
            if hasattr(module, name)
        ]
        if not owners:
            what = f"{type(model).__name__} has no method that computes the output of its towers"
            raise _refusal(what)
        for module, name in owners:
            vars(module)[name] = self._caching(module, name)
        for tower in self._towers:
            vars(tower)["forward"] = self._read_first(tower)

    def check_frozen(self) -> None:
        """Refuse, with `ConfigError`, what trains in the towers: their outputs change with it."""
        if any(
            parameter.requires_grad for tower in self._towers for parameter in tower.parameters()
        ):
            raise _refusal("something in the towers trains, so that their outputs change")

    def _ready(self) -> None:
        if not self.loaded:
            self._load()
            self.loaded = True

    def _read_first(self, tower: nn.Module) -> Callable[..., object]:
        run = tower.forward

        @wraps(run)
        def forward(*args: object, **kwargs: object) -> object:
            self._ready()
            return run(*args, **kwargs)

        return forward

    def _caching(self, owner: nn.Module, name: str) -> Callable[..., object]:
        run: Callable[..., Any] = getattr(owner, name)
        signature = inspect.signature(run)

        @wraps(run)
        def outputs_of(*args: object, **kwargs: object) -> object:
            if self._inside:  # a model's method calls that of the model in it
                return run(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            arguments: dict[str, Any] = {}
            for parameter, value in bound.items():
                several = signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD
                arguments |= value if several else {parameter: value}
            return self._of_call(run, owner, name, arguments)

        return outputs_of

    def _of_call(
        self, run: Callable[..., Any], owner: nn.Module, name: str, arguments: dict[str, Any]
    ) -> object:
        """Return what towers make of the images of one call."""
        self.check_frozen()
        inputs = {
            key: value
            for key, value in arguments.items()
            if value is not None and key not in OF_TOKENS
        }
        images = cut(inputs)
        if images is None or not _plain(inputs):
            shapes = {
                key: list(value.shape) for key, value in inputs.items() if isinstance(value, Tensor)
            }
            raise _refusal(f"images of {type(owner).__name__} cannot be told apart in {shapes}")
        if len(images) > 1:
            images = [image for image in images if not is_nothing(image)] or images[:1]
        parts = [self._of_image(run, name, image) for image in images]
        batch = joined([part.values for part in parts])
        kinds = {part.kind for part in parts}
        if batch is None or len(kinds) != 1:
            what = f"what towers of {type(owner).__name__} make of several images cannot be joined"
            raise _refusal(what)
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        return _as_kind(kinds.pop(), _moved(batch, device), owner)

    def _of_image(
        self, run: Callable[..., Any], name: str, arguments: dict[str, Any]
    ) -> TowerOutputs:
        """Return what towers make of one image; in host memory, where it was there."""
        key = self._key(name, arguments)
        if (stored := self.store.read(key)) is not None:
            return stored
        self._ready()
        self._inside = True
        drawn = self._backend.rng_state()
        try:
            with torch.no_grad():
                output = run(**arguments)
        finally:
            self._inside = False
        if not torch.equal(drawn, self._backend.rng_state()):
            raise _refusal("the towers draw random numbers (dropout), so that outputs change")
        outputs = _outputs_of(output)
        self.store.write(key, outputs)
        return outputs

    def _key(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a digest of all that decides what towers make of one image."""
        device = self._backend.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        tensors = trimmed(arguments)
        about = {
            "identity": self._identity,
            "method": name,
            "autocast": str(cast),
            "arguments": {
                key: value for key, value in arguments.items() if not isinstance(value, Tensor)
            },
            "tensors": {
                key: [str(tensor.dtype), list(tensor.shape)] for key, tensor in tensors.items()
            },
        }
        digest = sha256(json.dumps(about, sort_keys=True).encode())
        for key in sorted(tensors):
            flat = tensors[key].detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where=SETTING, how=f"set {SETTING}: false")


def _plain(arguments: Mapping[str, Any]) -> bool:
    """Whether what is no tensor among arguments can be written down."""
    try:
        json.dumps([value for value in arguments.values() if not isinstance(value, Tensor)])
    except TypeError:
        return False
    return True


def _outputs_of(output: object) -> TowerOutputs:
    """Return what is read after towers of what they made. `ConfigError`: it is of no class that is
    known here."""
    if isinstance(output, ModelOutput):
        # attributes, because some models add one that the class does not have
        fields = {**vars(output), **output}
        trees = {name: value for name, value in fields.items() if _is_tree(value)}
        read = {name: value for name, value in trees.items() if not name.endswith(UNREAD)}
        if read or trees:
            return TowerOutputs(type(output).__name__, read or trees)
    elif _is_tree(output):
        return TowerOutputs("", {POOLED: output})
    raise _refusal(f"towers make {type(output).__name__}, which cannot be kept")


def _is_tree(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_tree, value))
    return isinstance(value, Tensor)


def _as_kind(kind: str, outputs: dict[str, Any], owner: nn.Module) -> object:
    """Return outputs as an object of a class of the model's own module, or of `transformers`."""
    if not kind:
        return outputs[POOLED]
    modules = (sys.modules[type(owner).__module__], modeling_outputs)
    output_type = next((vars(module)[kind] for module in modules if kind in vars(module)), None)
    if not (isinstance(output_type, type) and issubclass(output_type, ModelOutput)):
        raise ModelError(f"transformers has no {kind} for what towers make", where=SETTING)
    # which its decorator makes of it
    names = {field.name for field in fields_of(cast(Any, output_type))}
    fields = {name: value for name, value in outputs.items() if name in names}
    output = output_type(**fields)
    for name in outputs.keys() - fields.keys():
        setattr(output, name, outputs[name])
    return output


def _moved(value: Tree, device: torch.device) -> Tree:
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device)
