"""The names of modules in two classes of one model: the one that trains, and the one that
`config.json` names.

Of some types the causal class of `transformers` reads text alone, while what is published is a
class that sees images as well and has the same layers under longer names. Published weights and
adapters have the names of that class. Which name is which is asked of `transformers`: the names of
the published class are sent to those in its files, as `save_pretrained` does, and these into the
class that trains, as `from_pretrained` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

import transformers
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from lema.compat import models_of
from lema.model import meta_model
from lema.model.skeleton import auto_class, scores_texts

__all__ = ["ClassNames", "class_names", "class_of_modalities", "compare_classes"]
__all__ += ["named_reader", "published_class"]

Prefixes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class ClassNames:
    """How the names in a model are written in the class that `config.json` names, and in the one
    that trains.
    """

    # that class, on `meta`; None: its names are those of the one that trains
    published: PreTrainedModel | None = None
    prefixes: Prefixes = ()  # beginnings of names: in the published class, in the one that trains
    own_published: bool = False  # the model is of the published class

    @property
    def num_forms(self) -> int:
        """Under how many names a file of an adapter has each of its tensors."""
        return 1 if self.published is None or self.own_published else 2

    def in_published(self, name: str) -> str:
        """Return what the published class calls a module or tensor of the model."""
        return (
            name
            if self.own_published
            else _renamed(name, [(model_prefix, there) for there, model_prefix in self.prefixes])
        )

    def in_own(self, name: str) -> str:
        """Return what the model calls a module or tensor that has the name of either class. A name
        that the model does not have, as that of an image tower, stays."""
        text = _renamed(name, self.prefixes)
        if not self.own_published:
            return text
        there = _renamed(text, [(model_prefix, there) for there, model_prefix in self.prefixes])
        return max(name, there, key=self._depth)

    def _depth(self, name: str) -> int:
        """Return how many parts of a name lead to a module of the published class."""
        parts = name.split(".")
        return next(
            (n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self._modules), 0
        )

    @cached_property
    def _modules(self) -> frozenset[str]:
        return (
            frozenset(name for name, _ in self.published.named_modules())
            if self.published
            else frozenset()
        )


_names_by_model: WeakKeyDictionary[nn.Module, ClassNames] = WeakKeyDictionary()


def class_names(model: nn.Module) -> ClassNames:
    """Return how the names of a model that `compare_classes` knows are written; of any other,
    alike.
    """
    return _names_by_model.get(model, ClassNames())


def compare_classes(
    model: PreTrainedModel, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> ClassNames:
    """Return how the names of a model are written in the class that `config`, all of `config.json`,
    names. It is remembered as long as the model lives, because what saves an adapter has the model,
    whose config may be a part."""
    if model not in _names_by_model:
        kind = None if scores_texts(model) else published_class(config)
        names = ClassNames() if kind is None else _compared(config, kind, trust_remote_code)
        _names_by_model[model] = replace(
            names, own_published=kind is not None and type(model) is kind
        )
    return _names_by_model[model]


def published_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that a config names in `architectures`, where it is of this type and of
    another name than the one that trains; None: the class that trains, or one that `transformers`
    does not have."""
    named = (getattr(config, "architectures", None) or [None])[0]
    kind: Any = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return None
    trains = models_of(auto_class(config)).get(type(config), None)
    return None if kind is trains or kind.config_class is not type(config) else kind


def class_of_modalities(
    config: PreTrainedConfig, modalities: Literal["text", "all"]
) -> type[PreTrainedModel] | None:
    """Return the class that reads what the setting `modalities` asks for: for all, the published
    one; None: the one that trains on text."""
    if modalities == "text":
        return None
    if not getattr(config, "architectures", None):
        kind: type[PreTrainedModel] | None = models_of(AutoModelForImageTextToText).get(
            type(config), None
        )
        return kind
    return published_class(config)


def named_reader(config: PreTrainedConfig) -> Callable[[str], bool]:
    """Return what says whether the class that a config names reads a tensor of its files, where
    that is not the class that trains; what a class reads that `transformers` does not have is not
    known, so any may be."""
    named = (getattr(config, "architectures", None) or [None])[0]
    if (kind := published_class(config)) is None:
        unknown = isinstance(named, str) and not hasattr(transformers, named)
        return lambda _: unknown
    model = meta_model(deepcopy(config), kind=kind)
    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    return lambda name: _sent(name, mapping, model) in state


def _compared(config: PreTrainedConfig, kind: type[PreTrainedModel], trust: bool) -> ClassNames:
    published = meta_model(deepcopy(config), kind=kind)
    trains = meta_model(deepcopy(config), trust_remote_code=trust)
    prefixes = _prefixes(published, trains)
    names = ClassNames(published, prefixes)
    state = published.state_dict()
    alike = all(published_prefix == model_prefix for published_prefix, model_prefix in prefixes)
    # Where the published class does not have all that trains, as one with another head, it is of
    # another use.
    if alike or any(names.in_published(name) not in state for name in trains.state_dict()):
        return ClassNames()
    return names


def _prefixes(published: PreTrainedModel, trains: PreTrainedModel) -> Prefixes:
    """Return with what the names of tensors begin in two classes, where they go on alike; the
    longest first.
    """
    written = _in_files(published)
    read = _from_files(published, written.values()), _from_files(trains, written.values())
    states = published.state_dict(), trains.state_dict()
    prefix_pairs: dict[tuple[str, str], None] = {}
    for file in written.values():
        published_name = read[0][file]
        model_name = read[1][file]
        if published_name not in states[0] or model_name not in states[1]:
            continue
        first = published_name.split(".")
        second = model_name.split(".")
        while first and second and first[-1] == second[-1]:
            first.pop()
            second.pop()
        prefix_pairs[".".join(first), ".".join(second)] = None
    return tuple(sorted(prefix_pairs, key=lambda pair: -len(pair[0])))


def _in_files(model: PreTrainedModel) -> dict[str, str]:
    """Name the tensors of a model as `revert_weight_conversion` does; nothing is converted."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    # Left out as there: whether a beginning was removed is known only of a model that was read from
    # files.
    back = [
        conversion.reverse_transform()
        for conversion in mapping
        if not isinstance(conversion, loading.PrefixChange)
    ]
    return {name: _sent(name, back, reverse=True) for name in model.state_dict()}


def _from_files(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name tensors of files as `from_pretrained` does in a model."""
    mapping = get_model_conversion_mapping(model)
    return {name: _sent(name, mapping, model) for name in names}


def _sent(
    name: str, transforms: list[Any], model: PreTrainedModel | None = None, *, reverse: bool = False
) -> str:
    renamings = [
        transform for transform in transforms if isinstance(transform, loading.WeightRenaming)
    ]
    converters = [
        transform for transform in transforms if isinstance(transform, loading.WeightConverter)
    ]
    prefix, state = (None, None) if model is None else (model.base_model_prefix, model.state_dict())
    new_name: str = loading.rename_source_key(
        name, renamings, converters, prefix, state, reverse=reverse
    )[0]
    return new_name


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return a name with the longest beginning that it has of the first of each pair replaced by
    the second.
    """
    for begin, instead in sorted(pairs, key=lambda pair: -len(pair[0])):
        suffix = name if not begin else name.removeprefix(begin)
        if not begin or (name.startswith(begin) and suffix[:1] in ("", ".")):
            return f"{instead}.{suffix.removeprefix('.')}".strip(".")
    return name
