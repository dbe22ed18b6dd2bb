"""A tower that was not opened: whoever calls it is told so in a sentence.

Its weights are on `meta`, so that a call would fail somewhere inside with an error of torch's.
Which inputs of a model reach a tower is the model's own affair: the tower is called, or it is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import NoReturn

from torch import nn
from transformers import PreTrainedModel

from lema.errors import ConfigError

__all__ = ["close_towers", "foreign_inputs", "refusal"]

HOW = 'set modalities="all", which reads the towers as well, or leave the images out of the rows'


def refusal(what: str, where: str) -> ConfigError:
    """Return the error for inputs other than text that a model was not opened for."""
    return ConfigError(what, where=where, how=HOW)


def close_towers(model: PreTrainedModel, towers: Iterable[str]) -> None:
    """Have every call of a tower, or of a module in it that has weights, refused.

    Args:
        model: the model, whose towers have no weights.
        towers: names of their modules in the model.
    """
    for name in towers:
        tower = model.get_submodule(name)
        for path, module in tower.named_modules(prefix=name):
            # Some models call a method of the tower that is not its forward; its modules are called
            # in any case.
            if module is tower or [*module.parameters(recurse=False)]:
                vars(module)["forward"] = _refusing(module, path, type(model).__name__)


def _refusing(module: nn.Module, path: str, owner: str) -> Callable[..., NoReturn]:
    @wraps(module.forward)
    def refuse(*_: object, **__: object) -> NoReturn:
        what = "the rows have images, audio or video, and the model was opened for text alone"
        raise refusal(what, f"{path} of {owner}")

    return refuse


def foreign_inputs(
    model: PreTrainedModel, published: type[PreTrainedModel] | None
) -> frozenset[str]:
    """Return the names of inputs that the published class of a model reads, and the class that is
    open does not: it would let them pass as if they were not there.

    Args:
        model: the model that is open.
        published: the class that `config.json` names; None: the same.
    """
    if published is None or isinstance(model, published):
        return frozenset()
    return _named(published) - _named(type(model))


def _named(kind: type[PreTrainedModel]) -> frozenset[str]:
    parameters = inspect.signature(kind.forward).parameters.values()
    return frozenset(
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    )
