"""Adapters whose modules have the names of published files, read into a model of `transformers`.

Other programs, and `lema export`, give each published matrix of an expert an adapter of its own.
`transformers` keeps the experts of a layer in one parameter, and PEFT adapts that with factors of
all experts. What B A adds to matrices of one expert is one product as well: their A are put on top
of each other, and each B is beside the others, in the rows of its matrix. Its other numbers are
zero, so no number changes, and the rank is the sum of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel

from lema.errors import AdapterError
from lema.lora.class_names import class_names
from lema.lora.merge import ADAPTER, OWN, WRAPPED
from lema.lora.options import as_integer, pattern_value, with_options
from lema.lora.serving.experts import ExpertPart, expert_parts, parameter_wrappers
from lema.lora.serving.names import published_modules
from lema.lora.shards import PREFIX

__all__ = ["LORA_A", "PublishedAdapter", "published_adapter"]

LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"


@dataclass(frozen=True)
class PublishedAdapter:
    """Which modules and parameters of a model the adapted modules of a file are."""

    modules: Mapping[str, str]  # a module of the model -> its name in the file
    # A parameter of experts -> its adapted matrices, each with its name in the file.
    experts: Mapping[str, Sequence[tuple[str, ExpertPart]]]

    def config(self, saved: LoraConfig, ranks: Mapping[str, int], where: Path) -> LoraConfig:
        """Return PEFT's config of this adapter for the model.

        Args:
            saved: the config that lies beside the file.
            ranks: the rank of each adapted module of the file.
            where: the directory of the file, for the error.

        Raises:
            AdapterError: matrices of one parameter are scaled differently.
        """
        patterns = dict[str, dict[str, Any]](rank_pattern={}, alpha_pattern={})

        def note(name: str, rank: int, alpha: float) -> None:
            if rank != saved.r:
                patterns["rank_pattern"][re.escape(name)] = rank
            if alpha != saved.lora_alpha:
                patterns["alpha_pattern"][re.escape(name)] = alpha

        for name, there in self.modules.items():
            note(name, ranks[there], _alpha(saved, there))
        for name, parts in self.experts.items():
            rank = self.rank(name, ranks)
            scales = {_alpha(saved, there) / _divisor(saved, ranks[there]) for there, _ in parts}
            if len(scales) > 1:
                what = f"the adapters of {name} are scaled by {sorted(scales)}, and not by one"
                how = "multiply their B by the scales, and save them with one alpha and rank"
                raise AdapterError(what, where=str(where), how=how)
            there = parts[0][0]
            ratio = _divisor(saved, rank) / _divisor(saved, ranks[there])
            note(name, rank, as_integer(_alpha(saved, there) * ratio))
        return with_options(
            saved,
            target_modules=sorted(self.modules),
            target_parameters=sorted(self.experts) or None,
            exclude_modules=None,
            layers_to_transform=None,
            layers_pattern=None,
            **patterns,
        )

    def rank(self, parameter: str, ranks: Mapping[str, int]) -> int:
        """Return the rank with which a parameter of experts is adapted."""
        by_expert = dict[int, int]()
        for there, part in self.experts[parameter]:
            by_expert[part.expert] = by_expert.get(part.expert, 0) + ranks[there]
        return max(by_expert.values())

    def tensors(self, model: PeftModel, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an adapter's tensors under the names that PEFT writes for a model.

        Args:
            model: with the adapter of `config` attached.
            saved: the tensors of the file, by the names there.
        """
        names = [*self.modules.items()]
        tensors = {
            f"{PREFIX}{name}{leaf}": saved[f"{PREFIX}{there}{leaf}"]
            for name, there in names
            for leaf in (LORA_A, LORA_B)
        }
        base = model.get_base_model()
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in self.experts):
            for depth, wrapper in enumerate(parameter_wrappers(base.get_submodule(owner))):
                parts = self.experts[f"{owner}.{wrapper.parameter_name}"]
                bare = f"{PREFIX}{owner}{'.base_layer' * depth}"
                a, b = _gathered(wrapper, parts, saved)
                tensors[f"{bare}{LORA_A}"] = a
                tensors[f"{bare}{LORA_B}"] = b
        return tensors


def published_adapter(model: PreTrainedModel, names: Collection[str]) -> PublishedAdapter | None:
    """Return what the adapted modules of a file are in a model; None: they have its own names, or
    are not of it.

    Args:
        model: with or without adapters; its weights may be on `meta`.
        names: of the tensors of the file.
    """
    rename = class_names(model).in_own
    modules = {
        (in_file := name.removeprefix(PREFIX).removesuffix(LORA_A)): rename(
            WRAPPED.sub("", in_file)
        )
        for name in names
        if name.endswith(LORA_A)
    }
    present = {WRAPPED.sub("", name) for name, _ in model.named_modules() if not OWN.search(name)}
    if present.issuperset(modules.values()) or not all(map(_is_factor, names)):
        return None
    written = {name: in_file for in_file, name in modules.items()}
    own_names = {in_file: name for name, in_file in published_modules(model).items()}
    plain = {own_names[name]: in_file for name, in_file in written.items() if name in own_names}
    experts = dict[str, list[tuple[str, ExpertPart]]]()
    for parameter in _stacked(model):
        adapted = [
            (written[part.module], part)
            for part in expert_parts(model, parameter) or ()
            if part.module in written
        ]
        if adapted:
            experts[parameter] = adapted
    placed = {*plain.values(), *(name for parts in experts.values() for name, _ in parts)}
    return PublishedAdapter(plain, experts) if placed == modules.keys() else None


def _is_factor(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith((LORA_A, LORA_B))


def _stacked(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of a model's parameters of experts."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and not OWN.search(name):
            yield WRAPPED.sub("", name)


def _alpha(config: LoraConfig, module: str) -> float:
    patterns: dict[str, float] = config.alpha_pattern or {}
    return pattern_value(patterns, module, config.lora_alpha)


def _divisor(config: LoraConfig, rank: int) -> float:
    return rank**0.5 if config.use_rslora else rank


def _gathered(
    wrapper: ParamWrapper, parts: Sequence[tuple[str, ExpertPart]], saved: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return PEFT's factors of a parameter of experts: A (experts * rank, in), B (out, rank *
    experts)."""
    untyped: Any = wrapper
    experts: int = untyped.num_experts
    weight_a: Tensor = untyped.lora_A[ADAPTER].weight
    weight_b: Tensor = untyped.lora_B[ADAPTER].weight
    a = torch.zeros(experts, weight_a.shape[0] // experts, weight_a.shape[1])
    b = torch.zeros(weight_b.shape[0], weight_b.shape[1] // experts, experts)
    # PEFT adds B A to parameters (experts, out, in), and its transpose to those (experts, in, out).
    swapped: bool = untyped._did_swap_in_out_features
    used = [0] * experts
    for name, part in parts:
        part_a = saved[f"{PREFIX}{name}{LORA_A}"].float()
        part_b = saved[f"{PREFIX}{name}{LORA_B}"].float()
        begin = used[part.expert]
        used[part.expert] = end = begin + part_a.shape[0]
        left, right = (
            (b[:, begin:end, part.expert], a[part.expert, begin:end])
            if swapped
            else (a[part.expert, begin:end].T, b[:, begin:end, part.expert].T)
        )
        part.put(part_a, part_b, left, right)
    return a.flatten(0, 1), b.flatten(1)
