"""Whether a server takes an adapter, told from the settings and the model's classes: before the
adapter is trained, and when it is exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.errors import ConfigError
from lema.lora.attach import param_filter
from lema.lora.merge import WRAPPED, wrapped
from lema.lora.serving.experts import WEIGHT, ExpertPart, expert_parts, parameter_wrappers
from lema.lora.serving.names import published_modules
from lema.lora.serving.servers import SERVERS, Server, ServerName, unserved
from lema.model.skeleton import find_layers, find_towers, is_in

__all__ = ["PublishedNames", "check_served", "first_of", "published_names", "stacks"]


@dataclass(frozen=True)
class PublishedNames:
    """What published files have of the weights that an adapter adapts."""

    modules: Mapping[str, str]  # a module with a matrix of its own -> its name there
    # An adapted parameter of experts -> its matrices; None: experts are in one tensor.
    experts: Mapping[str, Sequence[ExpertPart] | None]
    adapted: Sequence[str]  # names of all adapted parameters, in the order of the model

    @property
    def missing(self) -> list[str]:
        """The adapted modules and parameters that published files do not have as matrices."""
        return [
            name.removesuffix(WEIGHT)
            for name in self.adapted
            if (
                not self.experts[name]
                if name in self.experts
                else name.removesuffix(WEIGHT) not in self.modules
            )
        ]


def published_names(model: PreTrainedModel, config: LoraConfig | None = None) -> PublishedNames:
    """Return what published files call what an adapter adapts.

    Args:
        model: its base; the weights may be on `meta`.
        config: PEFT's of the adapter, which is not attached; None: it is attached.
    """
    adapted = _attached(model) if config is None else param_filter(model, config)
    stacked = {
        WRAPPED.sub("", name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim == 3
    }
    return PublishedNames(
        published_modules(model),
        {name: expert_parts(model, name) for name in adapted if name in stacked},
        adapted,
    )


def _attached(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that an attached adapter adapts."""
    adapted = list[str]()
    for name, module in wrapped(model):
        wrappers = parameter_wrappers(module)
        adapted.extend(f"{name}.{wrapper.parameter_name}" for wrapper in wrappers)
        if not wrappers and isinstance(module, LoraLayer):
            adapted.append(f"{name}{WEIGHT}")
    return adapted


def stacks(server: Server, model: PreTrainedModel) -> bool:
    """Return whether a server reads the experts of a model as PEFT writes them."""
    return type(model).__name__ in server.stacked


def check_served(
    name: ServerName,
    model: PreTrainedModel,
    config: LoraConfig,
    names: PublishedNames | None = None,
    *,
    where: str,
) -> None:
    """Make sure that a server takes an adapter.

    Args:
        name: of the server.
        model: the adapter's base, on `meta`, without adapters.
        config: PEFT's of the adapter.
        names: what published files call what is adapted; None: it is looked up.
        where: what asked for the server, for the error.

    Raises:
        ConfigError: it does not take it; all that it does not take is named.
    """
    server = SERVERS[name]
    names = names or published_names(model, config)
    modules = [parameter.removesuffix(WEIGHT) for parameter in names.adapted]
    problems = [
        *_gaps_of_class(server, model, names),
        *unserved(server, config, modules),
        *_gaps(server, model, names),
    ]
    if problems:
        what = f"{server.title} {server.release} does not take {'; '.join(problems)}"
        how = "train an adapter without these, or serve the merged model (`lema merge`)"
        raise ConfigError(what, where=where, how=how)


def first_of(names: Sequence[str]) -> str:
    """Return the first names of many, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _gaps_of_class(server: Server, model: PreTrainedModel, names: PublishedNames) -> Iterator[str]:
    """Yield what a server does not take of any adapter of a class: the one that is published."""
    published = (model.config.architectures or [type(model).__name__])[0]
    if published in server.without_adapters:
        yield f"adapters of {published}"
    if published in server.without_experts and names.experts:
        yield f"adapters of experts of {published}"
    misread, why = server.misread.get(published, (frozenset(), ""))
    leaves = {name.removesuffix(WEIGHT).rpartition(".")[2] for name in names.adapted}
    if wrong := sorted(misread & leaves):
        yield f"{' and '.join(wrong)} of {published}, {why}"


def _gaps(server: Server, model: PreTrainedModel, names: PublishedNames) -> Iterator[str]:
    """Yield what a server does not take of adapters of experts and of towers."""
    layers = find_layers(model)[0]
    if outside := [name for name in names.adapted if not is_in(name, [layers])]:
        towers = find_towers(model)
        if seen := [name.removesuffix(WEIGHT) for name in outside if is_in(name, towers)]:
            yield f"adapters of towers, which see images or hear ({first_of(seen)})"
    if not stacks(server, model) and (missing := names.missing):
        yield f"modules that no published file has as matrices ({first_of(missing)})"
    if not server.has_routers and (routers := _routers(model, names)):
        yield f"adapters of routers ({first_of(routers)})"
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names.experts):
        parameters = _bare(model, owner).named_parameters(recurse=False)
        every = {leaf for leaf, parameter in parameters if parameter.ndim == 3}
        untrained = sorted(leaf for leaf in every if f"{owner}.{leaf}" not in names.experts)
        if untrained:
            left_out = ", ".join(untrained)
            yield f"an adapter of some matrices of experts alone (not {left_out} of {owner})"
            return


def _routers(model: PreTrainedModel, names: PublishedNames) -> list[str]:
    """Return the adapted modules that have a matrix and are no linear layer."""
    linear = (nn.Linear, nn.Embedding, Conv1D)
    owners = [
        name.removesuffix(WEIGHT)
        for name in names.adapted
        if name not in names.experts and name.endswith(WEIGHT)
    ]
    return [name for name in owners if not isinstance(_plain(model, name), linear)]


def _plain(model: PreTrainedModel, name: str) -> nn.Module:
    """Return a module without PEFT's wrapper of it."""
    module = _bare(model, name)
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _bare(model: PreTrainedModel, name: str) -> nn.Module:
    """Return a module without PEFT's wrappers of its parameters."""
    module = model.get_submodule(name)
    wrappers = parameter_wrappers(module)
    return wrappers[-1].base_layer if wrappers else module
