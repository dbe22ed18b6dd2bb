"""A tower that is open: its weights are there, and it runs without a graph where nothing in it
trains.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import wraps

import torch
from torch import nn
from transformers import PreTrainedModel

from lema.backend import Parallel
from lema.errors import ConfigError, WeightsError, listed
from lema.model.skeleton import is_in

__all__ = ["check_towers", "open_towers"]


def check_towers(
    model: PreTrainedModel, towers: Sequence[str], stored: Container[str], parallel: Parallel
) -> None:
    """Make sure that towers can be opened.

    Args:
        model: the model, its parameters on `meta`.
        towers: names of the towers' modules in it.
        stored: the names of all tensors that the files have.
        parallel: the processes that hold the model together.

    Raises:
        ConfigError: several processes divide the model.
        WeightsError: the files do not have a tensor of a tower.
    """
    if parallel.size > 1:
        what = "several processes hold the model together, and towers are not divided among them"
        raise ConfigError(what, where="modalities", how="remove tensor_parallel_size")
    tensors = model.state_dict()
    if missing := [name for name in tensors if is_in(name, towers) and name not in stored]:
        what = f"the files do not have {len(missing)} tensors of the towers: {listed(missing, 5)}"
        how = 'set modalities="text", or use files that have all that the class reads'
        raise WeightsError(what, where=type(model).__name__, how=how)


def open_towers(model: PreTrainedModel, towers: Iterable[str]) -> None:
    """Have towers run without a graph while nothing in any of them trains, whatever a trainer makes
    require a gradient.

    Args:
        model: the model, with the weights of its towers.
        towers: names of their modules in the model.
    """
    modules = [model.get_submodule(name) for name in towers]
    for module in modules:
        vars(module)["forward"] = _without_graph(module, modules)


def _without_graph(module: nn.Module, towers: Sequence[nn.Module]) -> Callable[..., object]:
    run = module.forward

    @wraps(run)
    def forward(*args: object, **kwargs: object) -> object:
        # In any of them, because one may be given what another makes.
        trains = any(
            parameter.requires_grad for tower in towers for parameter in tower.parameters()
        )
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            return run(*args, **kwargs)

    return forward
