"""The two files of an adapter in a layout: with an adapter for each published matrix, or as PEFT
writes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lema.lora.files import CONFIG, WEIGHTS, saved_tensors
from lema.lora.merge import ADAPTER, wrapped
from lema.lora.serving.checks import PublishedNames
from lema.lora.serving.experts import Factors, factors_of, parameter_wrappers
from lema.lora.shards import PREFIX

__all__ = ["AdapterFiles", "split_files", "stacked_files"]

GATE_UP = re.compile(r"gate_up|input_linear|w13")


@dataclass(frozen=True)
class AdapterFiles:
    """What the two files of an adapter hold."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    experts: int  # adapters of single experts

    def write(self, directory: Path) -> None:
        """Write them into a directory; `OSError`: that failed."""
        save_file(self.tensors, directory / WEIGHTS, {"format": "pt"})
        text = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
        (directory / CONFIG).write_text(text, encoding="utf-8", newline="\n")


@dataclass(frozen=True)
class _Split:
    """The factors of each published matrix."""

    factors: dict[str, Factors]
    experts: int  # how many of these are of single experts


@torch.no_grad()
def split_files(model: PeftModel, names: PublishedNames) -> AdapterFiles:
    """Return the files of an adapter in which each published matrix has an adapter of its own.

    Args:
        model: with the adapter.
        names: what published files call what is adapted; none of them is missing.
    """
    adapter = _split(cast(PreTrainedModel, model.get_base_model()), names)
    lora = cast(LoraConfig, model.peft_config[ADAPTER])
    config = _config(lora, adapter, names)
    return AdapterFiles(_tensors(adapter), config, adapter.experts)


@torch.no_grad()
def stacked_files(model: PeftModel, layout: str) -> AdapterFiles:
    """Return the files of an adapter whose experts of a layer are in one pair of tensors.

    Args:
        model: with the adapter.
        layout: a server's, or PEFT's own (`peft`).
    """
    config = _plain(model.peft_config[ADAPTER].to_dict())
    return AdapterFiles(_apart(_stacked_tensors(model, layout)), config, 0)


def _split(model: PreTrainedModel, names: PublishedNames) -> _Split:
    """Return the factors of each published matrix that is adapted."""
    factors = dict[str, Factors]()
    experts = 0
    for name, module in wrapped(model):
        if isinstance(module, ParamWrapper):
            for wrapper in parameter_wrappers(module):
                parameter = f"{name}.{wrapper.parameter_name}"
                if parameter not in names.experts:  # the matrix of a router
                    factors[names.modules[name]] = _factors(wrapper)
                    continue
                pieces = names.experts[parameter] or ()
                for piece in pieces:
                    factors[piece.module] = piece.factors(*factors_of(wrapper, piece.expert))
                experts += len(pieces)
        elif isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            factors[names.modules[name]] = _factors(module)
    return _Split(factors, experts)


def _factors(module: LoraLayer) -> Factors:
    """Return the factors of a module of one matrix."""
    layer: Any = module
    a = layer.lora_A[ADAPTER].weight.detach().cpu()
    b = layer.lora_B[ADAPTER].weight.detach().cpu()
    return Factors(a, b, layer.scaling[ADAPTER])


def _tensors(adapter: _Split) -> dict[str, Tensor]:
    """Return the tensors of the file. Experts of one layer share factors in memory, which
    safetensors does not write, so each is a tensor of its own."""
    tensors = dict[str, Tensor]()
    for name, factors in adapter.factors.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = factors.a.contiguous().clone()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = factors.b.contiguous().clone()
    return tensors


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which each has memory of its own, because safetensors writes no others:
    tied modules that train whole share it."""
    seen = set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = tensor.clone()
        seen.add(storage)
    return tensors


def _stacked_tensors(model: PeftModel, layout: str) -> dict[str, Tensor]:
    """Return the tensors under PEFT's names. Of two adapted parameters of one module, a server
    takes the inner one (`base_layer`) for the first product's."""
    tensors = saved_tensors(model, None)
    if layout == "peft":
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    swapped = {
        name
        for name, module in wrapped(model.get_base_model())
        if isinstance(module, ParamWrapper) and GATE_UP.search(module.parameter_name)
    }
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        module, dot, leaf = name.removeprefix(PREFIX).rpartition(".lora_")
        bare = module.removesuffix(".base_layer")
        if bare in swapped:
            module = bare if module != bare else f"{bare}.base_layer"
        renamed[f"{PREFIX}{module}{dot}{leaf}"] = tensor.contiguous()
    return renamed


def _config(lora: LoraConfig, adapter: _Split, names: PublishedNames) -> dict[str, Any]:
    """Return PEFT's config of the modules by their published names: ranks and scales that are not
    those of most modules stand under the whole name, and so do modules that share the last part of
    their name with others that are not adapted."""
    config = _plain(lora.to_dict())
    ranks = dict[str, int]()
    alphas = dict[str, float]()
    for name, factors in adapter.factors.items():
        rank = factors.a.shape[0]
        alpha = factors.scale * (rank**0.5 if lora.use_rslora else rank)
        if rank != lora.r:
            ranks[re.escape(name)] = rank
        if abs(alpha - lora.lora_alpha) > 1e-9 * abs(lora.lora_alpha):
            alphas[re.escape(name)] = alpha
    unadapted = {
        name.rpartition(".")[2] for name in names.modules.values() if name not in adapter.factors
    }
    targets = {
        name if name.rpartition(".")[2] in unadapted else name.rpartition(".")[2]
        for name in adapter.factors
    }
    return config | {
        "target_modules": sorted(targets),
        "target_parameters": None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them."""
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in values.items()
    } | {"inference_mode": True}
