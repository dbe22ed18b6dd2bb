"""Memory and initial values for the parameters that train: drawn as PEFT draws them, or read.

PEFT attaches its modules to a model whose layers are on `meta`, so none of their parameters has
memory or a value. The matrices of LoRA are drawn from shapes alone. Biases and modules that train
whole begin as copies of the stored weights, and the magnitudes of DoRA
(https://arxiv.org/abs/2402.09353) as norms of them, which are read once, by layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.errors import ModelError
from lema.model.outer_weights import move_tensors, put

__all__ = ["Read", "check_attached", "check_saved_modules", "make_real", "take_off"]

ADAPTER = "default"  # PEFT's name for the first adapter, and mostly the only one
SAVED = ".modules_to_save."  # where PEFT keeps the copy that trains, by adapter
MAGNITUDE = ".lora_magnitude_vector."
WRAPPER_PARTS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.\w+|lora_magnitude_vector\.\w+)\b"
)
Read = Callable[[Collection[str]], Mapping[str, Tensor]]
"""Names of tensors of the model without adapters -> those of them that are stored, on the
device.
"""

Kind = TypeVar("Kind")


def check_saved_modules(model: PreTrainedModel, config: LoraConfig, layers_name: str) -> None:
    """Refuse modules that cannot be trained whole, before anything is attached. `ModelError`: one
    holds decoder layers, or is a mere list of modules."""
    module_names = tuple(config.modules_to_save or ())
    for name, module in model.named_modules():
        if not name.endswith(module_names):  # what PEFT looks at
            continue
        where = f"lora_modules_to_save: {', '.join(module_names)}"
        if f"{layers_name}.".startswith(f"{name}.") or name.rpartition(".")[0] == layers_name:
            what = f"{name} contains whole decoder layers, which are not kept on the device"
            raise ModelError(
                what, where=where, how="name modules inside a layer, or outside all layers"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ModelError(
                f"{name} is a list of modules",
                where=where,
                how="name a module in it, such as its last",
            )


def check_attached(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuse what cannot be trained, once PEFT's modules are attached. `ModelError`: a module to
    train whole is adapted in part, or has rows that train; or LoRA's matrices are to be tied to
    each other."""
    for name, wrapper in _of(ModulesToSaveWrapper, model):
        if any(
            isinstance(part, LoraLayer | ModulesToSaveWrapper)
            for part in wrapper.original_module.modules()
        ):
            what = f"{name} trains whole, but a part of it is adapted"
            how = "leave one of them out"
            raise ModelError(
                what,
                where=f"lora_modules_to_save: {', '.join(config.modules_to_save or ())}",
                how=how,
            )
    for name, rows in _of(TrainableTokensLayer, model):
        if isinstance(rows.base_layer, ModulesToSaveWrapper):
            what = f"{name.removesuffix('.token_adapter')} trains whole, and rows of it train, too"
            how = "leave out one of them; rows of tied embeddings are rows of the head as well"
            raise ModelError(
                what, where="lora_modules_to_save and lora_trainable_token_indices", how=how
            )
    if getattr(config, "target_modules_to_tie", None):
        what = "adapters of the embeddings and of the head cannot be tied to each other"
        how = (
            "leave it out, or train embeddings and head whole in modules_to_save, where they "
            "can be tied"
        )
        raise ModelError(what, where="ensure_weight_tying", how=how)


def take_off(model: nn.Module) -> None:
    """Restore the modules that PEFT has wrapped, and freeze everything, as it was before."""
    for name, wrapper in reversed(
        list(_of(AuxiliaryTrainingWrapper, model))
    ):  # the innermost first
        model.set_submodule(name, wrapper.original_module)
    for name, module in list(_of(LoraLayer, model)):
        if ".base_layer" not in name:  # what a wrapper wraps comes off with it
            model.set_submodule(name, module.get_base_layer())
    model.__dict__.pop("peft_config", None)
    model.requires_grad_(False)


def make_real(
    model: PreTrainedModel,
    config: LoraConfig,
    device: torch.device,
    layers_name: str,
    *,
    draw: bool,
    read: Read | None = None,
    adapter: str = ADAPTER,
) -> None:
    """Give everything of an adapter its memory on the device, and the value it has in PEFT after
    `get_peft_model`. Values are left unset, to be loaded, if not `draw`. `read` is needed where a
    parameter begins as a stored tensor."""
    for module in _as_drawn(model):
        _make_matrices(module, config.init_lora_weights, device, adapter, draw=draw)
    _tie(model, config)
    if draw:
        for _, rows in _of(TrainableTokensLayer, model):
            if rows.tied_adapter is None and adapter in rows.token_indices:
                rows.update_layer(adapter, token_indices=rows.token_indices[adapter])
                rows.trainable_tokens_delta.float()
        stored_names = _stored_beginnings(model, config, layers_name, adapter)
        _begin_with_stored(model, config, layers_name, stored_names, read, adapter)
    else:
        for name, parameter in _unreal(model, config, adapter):
            put(model, name, torch.empty_like(parameter, device=device))
    _tie(model, config)
    assert not (unset := _unreal(model, config, adapter)), f"{unset[0][0]} has no value"
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.untyped_storage().nbytes() > parameter.nbytes:
            # outside the layers, all frozen tensors lie in one allocation
            parameter.data = parameter.data.clone()
    move_tensors(model, device)


def _stored_beginnings(
    model: PreTrainedModel, config: LoraConfig, layers_name: str, adapter: str
) -> dict[str, str | None]:
    """Return the parameters and buffers that begin with a stored tensor, each with that tensor's
    name; None: it is in memory.
    """
    stored_names: dict[str, str | None] = {}
    for name, _ in _unreal(model, config, adapter):
        is_in_memory = (
            MAGNITUDE in name and not _adapted_by(model, name).get_base_layer().weight.is_meta
        )
        stored_names[name] = None if is_in_memory else WRAPPER_PARTS.sub("", name)
    for name, _ in model.named_buffers():
        if f"{SAVED}{adapter}." in name and name.startswith(f"{layers_name}."):
            stored_names[name] = WRAPPER_PARTS.sub("", name)
    return stored_names


def _begin_with_stored(
    model: PreTrainedModel,
    config: LoraConfig,
    layers_name: str,
    stored_names: Mapping[str, str | None],
    read: Read | None,
    adapter: str,
) -> None:
    """Let these parameters and buffers begin with the tensors of their stored names, which are read
    once, by layer."""

    def layer(name: str) -> int:
        inside = name.startswith(f"{layers_name}.")
        return int(name.removeprefix(f"{layers_name}.").partition(".")[0]) if inside else -1

    # Modules outside the layers are one group.
    for _, group in groupby(sorted(stored_names, key=layer), layer):
        names = {name: stored_names[name] for name in group}
        to_read = {stored for stored in names.values() if stored is not None}
        assert read is not None or not to_read, (
            f"{next(iter(names))} begins with a stored tensor: `read` is needed"
        )
        tensors = read(to_read) if read is not None and to_read else {}
        for name, stored in names.items():
            if MAGNITUDE in name:
                weight = None if stored is None else tensors[stored]
                _measure(_adapted_by(model, name), config, weight, adapter)
            elif stored is not None and stored in tensors:
                # a buffer that is not stored is as the module made it
                put(model, name, tensors[stored].clone())


def _as_drawn(model: nn.Module) -> Iterator[LoraLayer]:
    """Yield adapted modules and parameters in PEFT's order: all modules, then parameters, the
    innermost first.
    """
    wrappers: list[ParamWrapper] = []
    for _, module in _of(LoraLayer, model):
        if isinstance(module, ParamWrapper):
            wrappers.append(module)
        else:
            yield module
    nest: list[ParamWrapper] = []
    for wrapper in wrappers:
        nest.append(wrapper)
        if not isinstance(wrapper.base_layer, ParamWrapper):
            yield from reversed(nest)
            nest.clear()


def _make_matrices(
    module: LoraLayer, init: bool | str | None, device: torch.device, adapter: str, *, draw: bool
) -> None:
    """Give LoRA's matrices memory, and the values PEFT would draw, in PEFT's order: A, B, then
    both as `init` says.
    """
    matrices = [
        factors[adapter] for factors in (module.lora_A, module.lora_B) if adapter in factors
    ]
    for matrix in matrices:
        matrix.float().to_empty(device="cpu")  # cast first: on meta it costs nothing
        if draw:
            cast(nn.Linear, matrix).reset_parameters()
    rows = [
        factors
        for factors in (module.lora_embedding_A, module.lora_embedding_B)
        if adapter in factors
    ]
    for factors in rows:
        values = (torch.randn if draw else torch.empty)(factors[adapter].shape)
        factors[adapter] = nn.Parameter(values, requires_grad=factors[adapter].requires_grad)
    if draw and init == "orthogonal" and matrices:
        module.orthogonal_init(adapter)
    elif draw and init and (matrices or rows):
        module.reset_lora_parameters(adapter, init)
    base = (
        module.get_param()
        if isinstance(module, ParamWrapper)
        else _beneath_rows(module.get_base_layer()).weight
    )
    # As PEFT: a fresh adapter has its module's dtype, then fp32.
    dtype = cast(Tensor, base).dtype if draw else torch.float32
    for matrix in matrices:
        for value in matrix.parameters():
            value.data.copy_(
                value.data.to(dtype)
            )  # in place, because memory that is new costs more than rounding
        matrix.to(device)
    for factors in rows:  # new, because not every device lets a parameter's memory move to it
        values = factors[adapter].detach().to(dtype).float().to(device)
        factors[adapter] = nn.Parameter(values, requires_grad=factors[adapter].requires_grad)


def _beneath_rows(module: nn.Module) -> nn.Linear:
    """Return the module around which PEFT puts rows that train; the wrapper's weight would be
    with these added.
    """
    base_module = (
        cast(Any, module).token_adapter.get_base_layer()
        if isinstance(module, TrainableTokensWrapper)
        else module
    )
    return cast(nn.Linear, base_module)


def _unreal(model: nn.Module, config: LoraConfig, adapter: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters without memory that need it: those that train, those of the adapter,
    which another one may be active beside, and the biases that PEFT saves with them."""
    adapter_pattern = re.compile(rf"\.(lora_\w+|modules_to_save)\.{re.escape(adapter)}(\.|$)")
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_meta
        and (
            parameter.requires_grad
            or adapter_pattern.search(name)
            or (config.bias == "all" and name.endswith(".bias"))
        )
    ]


def _measure(module: LoraLayer, config: LoraConfig, weight: Tensor | None, adapter: str) -> None:
    """Let PEFT measure the magnitudes of a module, lent `weight` where its own is not in memory."""
    base = cast(nn.Linear, module.get_base_layer())
    original_weight = base.weight
    if weight is not None:
        base.weight = nn.Parameter(weight, requires_grad=False)
    for matrices in _matrices(module):
        matrices.to(original_weight.dtype)  # what PEFT measures is not in fp32 yet
    with torch.no_grad():
        cast(Any, module.lora_variant[adapter]).init(module, adapter_name=adapter, config=config)
    for matrices in (*_matrices(module), module.lora_magnitude_vector):
        matrices.float()
    base.weight = original_weight


def _tie(model: PreTrainedModel, config: LoraConfig) -> None:
    """Let modules that PEFT ties to the embeddings' copy that trains share its weight."""
    if tied := tuple(getattr(config, "modules_to_tie", None) or ()):
        embeddings = cast(ModulesToSaveWrapper, model.get_input_embeddings())
        for name, wrapper in _of(ModulesToSaveWrapper, model):
            if name.endswith(tied):
                saved = cast(nn.Linear, wrapper.modules_to_save[ADAPTER])
                saved.weight = cast(nn.Embedding, embeddings.modules_to_save[ADAPTER]).weight


def _of(kind: type[Kind], model: nn.Module) -> Iterator[tuple[str, Kind]]:
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name, module


def _adapted_by(model: nn.Module, magnitude: str) -> LoraLayer:
    return cast(LoraLayer, model.get_submodule(magnitude.partition(MAGNITUDE)[0]))


def _matrices(module: LoraLayer) -> tuple[nn.Module, ...]:
    return module.lora_A, module.lora_B, module.lora_embedding_A, module.lora_embedding_B
