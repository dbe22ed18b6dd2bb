"""Experts whose adapted weights multiply as their parts do: the sum `W + B A` of all experts is
never formed.

Where PEFT puts that sum in the place of a stacked weight while a layer runs, an object is put here,
whose product is `x W + scaling (x A) B`, by the function that the model's own code calls.
docs/internals/experts.md describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from lema.compat import delta_factors, grouped_fallback
from lema.stream.schedule import ExpertGroup

__all__ = [
    "ExpertInputs",
    "LayerExperts",
    "Routed",
    "form_no_frozen_gradients",
    "layer_experts",
    "most_pairs",
    "multiply_unmerged",
    "stacked_weights",
]

# By name, because torch has different objects for a function and for the method that does the same.
PRODUCTS = frozenset(
    ["linear", "matmul", "__matmul__", "mm", "bmm", "_grouped_mm", "grouped_mm_fallback"]
)
# the dtype of products, and the inputs of experts
ExpertInputs = tuple[torch.dtype | None, Sequence[Tensor]]
# the attribute of a module of experts with adapters of the group that it is now
FACTORS = "leased_factors"
WEIGHT_ATTRIBUTES = frozenset(
    ["dtype", "device", "shape", "ndim", "dim", "size", "data_ptr", "requires_grad"]
)


def stacked_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights in which a module holds several experts; none where
    `transformers` does not mark it as one whose computation goes through its `ExpertsInterface`."""
    marked = hasattr(module, "has_gate")
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if marked and parameter.ndim == 3
    ]


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer, whose stacked weights may be leased in groups."""

    module: nn.Module  # which has the weights
    name: str  # of the same with its adapters around it, in the layer
    outer: nn.Module  # that
    # the names in the layer of those whose first dimension are experts, without adapters
    weights: tuple[str, ...]
    count: int  # of experts

    @contextmanager
    def narrowed(
        self, weights: Mapping[str, Tensor], group: ExpertGroup
    ) -> Iterator[NarrowedExperts]:
        """Have the module be one of a group of its experts in a `with` block; `weights` are the
        group's, by their names in the layer as it is now (`Split.renamed`), and may be more."""
        attributes = vars(self.module)
        inner = f"{self.name}."
        wrappers = [
            module
            for module in self.outer.modules()
            if isinstance(module, UnmergedWrapper) and not module.disable_adapters
        ]
        names = [
            (wrapper, adapter)
            for wrapper in wrappers
            for adapter in wrapper.active_adapters
            if adapter in wrapper.lora_A
        ]
        factors = {
            (wrapper.parameter_name, adapter): Factors.of(wrapper, adapter, group)
            for wrapper, adapter in names
        }
        group_weights = {
            name.removeprefix(inner): weight
            for name, weight in weights.items()
            if name.startswith(inner)
        }
        try:
            attributes |= {"num_experts": group.end - group.first, FACTORS: factors}
            yield NarrowedExperts(self.outer, group_weights, group, [*factors.values()])
        finally:
            attributes["num_experts"] = self.count
            del attributes[FACTORS]


@dataclass(frozen=True)
class NarrowedExperts:
    """The experts of one layer while they are those of a group."""

    outer: nn.Module
    weights: Mapping[str, Tensor]  # by their names in that
    group: ExpertGroup
    factors: Sequence[Factors]  # of their adapters

    def run(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return their outputs for hidden states `[tokens, hidden]`, the experts of each, and their
        weights, `[tokens, experts of each]`."""
        hidden, chosen, factors = inputs
        args = hidden, chosen - self.group.first, factors
        outputs: Tensor = torch.func.functional_call(
            self.outer, dict(self.weights), args, tie_weights=False
        )
        return outputs

    def trained(self) -> list[nn.Parameter]:
        """Return the other parameters that train, besides the factors."""
        factor_ids = {id(weight) for factor in self.factors for weight in factor.weights}
        return [
            parameter
            for parameter in self.outer.parameters()
            if parameter.requires_grad and id(parameter) not in factor_ids
        ]


@dataclass(frozen=True)
class Factors:
    """One adapter of a stacked weight, for a group of its experts: what they compute with, as
    leaves, so that gradients are formed of the group's rows alone."""

    wrapper: UnmergedWrapper
    weights: tuple[nn.Parameter, nn.Parameter]  # PEFT's, A and B, of all experts
    span: slice  # of the experts
    leaves: tuple[Tensor, Tensor]  # left and right, as `LowRankSum` has them

    @classmethod
    def of(cls, wrapper: UnmergedWrapper, adapter: str, group: ExpertGroup) -> Factors:
        """Return the factors of a group."""
        weights: Any = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        base: Any = wrapper.get_base_layer()
        span = slice(group.first, group.end)
        dtype = getattr(base, wrapper.parameter_name).dtype
        left, right = (
            stacked[span].to(dtype)
            for stacked in wrapper.stacked(*(weight.detach() for weight in weights))
        )
        left, right = (factor.detach() for factor in aligned(left, right))
        for parameter, of in zip(wrapper.stacked(*weights), (left, right), strict=True):
            of.requires_grad_(parameter.requires_grad)
        return cls(wrapper, weights, span, (left, right))

    def sums(self, gradients: dict[nn.Parameter, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the leaves that train, and what to add the gradient of each to, but for columns
        that fill it up: views of the `gradients` of PEFT's weights, with zeros where there is
        nothing yet."""
        for weight in self.weights:
            if weight.requires_grad and weight not in gradients:
                gradients[weight] = torch.zeros_like(weight)
        views = self.wrapper.stacked(
            *(gradients.get(weight, weight.detach()) for weight in self.weights)
        )
        return [
            (leaf, view[self.span])
            for leaf, view in zip(self.leaves, views, strict=True)
            if leaf.requires_grad
        ]


LEAST_PAIRS = 128  # that are worth a run of a group
# Pairs of a micro-batch that a group runs at once, as a part of what it has if routers choose all
# experts alike. A group that has more runs several times, so that no choice of routers takes more.
PAIRS_AT_ONCE = 1.25


def most_pairs(tokens: int, top_k: int, experts: int, count: int) -> int:
    """Return how many pairs of a token and an expert a group of experts runs at once.

    Args:
        tokens: of a micro-batch.
        top_k: experts of each token.
        experts: of the group.
        count: experts of the layer.
    """
    alike = tokens * top_k * experts / count
    at_once = max(LEAST_PAIRS, math.ceil(PAIRS_AT_ONCE * alike))
    return min(at_once, tokens * min(top_k, experts))


@dataclass(frozen=True)
class PairsAtOnce:
    """Pairs of a token and an expert that a group runs together, and how many there are of each
    place among a token's experts."""

    pairs: Tensor  # their places in the numbers of experts that are chosen, flat
    tokens: Tensor  # of the pairs
    counts: Sequence[int]


@dataclass(eq=False)
class Routed:
    """One micro-batch at the experts of a layer. The pairs of a token and an expert are in the
    order of groups, then of the experts' places among the token's own, so that of one group and
    place each token comes once, and what is added to it is added in one order on every device."""

    autocast: torch.dtype | None  # as the layer's call has it
    # hidden states [tokens, hidden], experts and weights [tokens, of each token]
    inputs: tuple[Tensor, Tensor, Tensor]
    pairs: Sequence[Tensor]  # of each group, where in the experts, flat
    counts: Sequence[Sequence[int]]  # of each group, how many pairs there are of each place
    at_once: Sequence[int]  # of each group, how many pairs it runs together, at most

    @classmethod
    def of(cls, inputs: ExpertInputs, groups: Sequence[ExpertGroup]) -> Routed:
        """Return the inputs of the experts, in the order of their groups."""
        hidden, chosen, weights = (tensor.detach() for tensor in inputs[1])
        stops = torch.tensor([group.end for group in groups], device=chosen.device)
        top_k = chosen.shape[1]
        group = torch.bucketize(chosen, stops, right=True)
        key = (group * top_k + torch.arange(top_k, device=chosen.device)).flatten()
        counts = (
            torch.bincount(key, minlength=(len(groups) + 1) * top_k)
            .view(-1, top_k)
            .tolist()[: len(groups)]
        )
        order = key.argsort(stable=True).split(
            [sum(group_counts) for group_counts in counts] + [len(key) - sum(map(sum, counts))]
        )
        sizes = (group.end - group.first for group in groups)
        at_once = [most_pairs(len(chosen), top_k, size, groups[-1].end) for size in sizes]
        return cls(inputs[0], (hidden, chosen, weights), order[: len(groups)], counts, at_once)

    def of_group(self, number: int) -> Iterator[PairsAtOnce]:
        """Yield the pairs of a group, as many as it runs at once."""
        pairs = self.pairs[number]
        at_once = self.at_once[number]
        ends = [*accumulate(self.counts[number], initial=0)]
        for start in range(0, len(pairs), at_once):
            here = [min(max(end, start), start + at_once) for end in ends]
            counts = [after - before for before, after in pairwise(here)]
            some_pairs = pairs[start : start + at_once]
            yield PairsAtOnce(some_pairs, some_pairs // self.inputs[1].shape[1], counts)

    def arguments(self, at_once: PairsAtOnce) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs in the form of the experts' arguments."""
        hidden, chosen, weights = self.inputs
        # Not by brackets, which take several times as long on a CPU.
        picked = (
            tensor.flatten().index_select(0, at_once.pairs).unsqueeze(1)
            for tensor in (chosen, weights)
        )
        return hidden.index_select(0, at_once.tokens), next(picked), next(picked)

    def sums(self) -> Tensor:
        """Return zeros to add to, as wide as the hidden states and no narrower than fp32."""
        hidden = self.inputs[0]
        return torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))

    def add(self, sums: Tensor, at_once: PairsAtOnce, outputs: Tensor) -> None:
        """Add the results for pairs to the sums of their tokens."""
        for at, rows in zip(
            at_once.tokens.split(list(at_once.counts)),
            outputs.split(list(at_once.counts)),
            strict=True,
        ):
            sums.index_add_(0, at, rows.to(sums.dtype))


def layer_experts(layer: nn.Module) -> LayerExperts | None:
    """Return the experts of a layer, adapters attached or not; None: it has none that are
    stacked, or several times.
    """
    candidates = [
        (name, module) for name, module in layer.named_modules() if stacked_weights(module)
    ]
    if len(candidates) != 1:
        return None
    name, module = candidates[0]
    count = getattr(candidates[0][1], "num_experts", 0)
    parameters = {
        key: parameter
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    }
    if not isinstance(vars(module).get("num_experts"), int) or any(
        len(parameter) != count for parameter in parameters.values()
    ):
        return None
    plain = name.replace(".base_layer", "")
    return LayerExperts(
        module,
        plain,
        layer.get_submodule(plain),
        tuple(f"{plain}.{key}" for key in parameters),
        count,
    )


def multiply_unmerged(model: nn.Module) -> None:
    """Have the weights of a model's adapted experts, or a layer's, multiply apart from their
    adapters from here on.
    """
    for part in model.modules():
        if type(part) is ParamWrapper and part.parameter_name in stacked_weights(
            part.get_base_layer()
        ):
            part.__class__ = UnmergedWrapper


class UnmergedWrapper(ParamWrapper):
    """PEFT's wrapper around a weight, whose sum with its active adapters is put in the weight's
    place unformed.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        base = self.get_base_layer()
        name = self.parameter_name
        weight: Any = getattr(base, name)
        for adapter in filter(self.lora_A.__contains__, active_adapters):
            if (group := vars(base).get(FACTORS)) is not None:
                left, right = group[name, adapter].leaves
            else:
                left, right = aligned(*delta_factors(self, adapter))
            weight = LowRankSum(weight, left, right, self.scaling[adapter])
        vars(base)[name] = weight  # an attribute, which is found before the parameter of that name
        try:
            yield
        finally:
            del vars(base)[name]

    def stacked(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of an adapter's two weights, or what has their shapes, by experts, as
        `get_delta_factors` does of the weights in another dtype."""
        first_view = first.reshape(self.num_experts, -1, first.shape[-1])
        second_view = second.reshape(len(second), -1, self.num_experts).permute(2, 0, 1)
        return (
            (second_view, first_view)
            if self._did_swap_in_out_features
            else (first_view.mT, second_view.mT)
        )


def aligned(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of stacked experts as grouped products want them: rows of 16 bytes, one
    after the other.
    """
    if missing := -left.shape[-1] % (16 // left.element_size()):
        left = pad(left, (0, missing))
        right = pad(right, (0, 0, 0, missing))
    left, right = (
        factor if 1 in factor.stride()[-2:] else factor.contiguous() for factor in (left, right)
    )
    return left, right


UnmergedWrapper.__name__ = ParamWrapper.__name__  # by which PEFT knows it


@dataclass(frozen=True)
class LowRankSum:
    """The sum `weight + scaling left @ right`, `[..., rows, columns]`, used like a tensor. What is
    neither a product with it nor a part of it is computed with the sum formed."""

    weight: Any  # a tensor, or the sum with another adapter
    left: Tensor  # [..., rows, rank]
    right: Tensor  # [..., rank, columns]
    scaling: float

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = func.__name__.partition(".")[0]
        kwargs = kwargs or {}
        if not _multiplies(name, args, kwargs):
            formed: Any = tree_map(
                lambda argument: argument.formed() if isinstance(argument, cls) else argument,
                (args, kwargs),
            )
            return func(*formed[0], **formed[1])
        left_operand, right_operand, *extra_args = args
        if isinstance(left_operand, cls):
            return func(left_operand.weight, right_operand).add_(
                func(
                    left_operand.left,
                    func(left_operand.right, right_operand) * left_operand.scaling,
                )
            )
        # added to in place, because no backward needs a product
        product = func(left_operand, right_operand.weight, *extra_args, **kwargs)
        if name == "linear":  # its matrix is transposed, and its bias is added once
            return product.add_(
                func(
                    func(left_operand, right_operand.right) * right_operand.scaling,
                    right_operand.left,
                )
            )
        small = (
            func(left_operand, right_operand.left, *extra_args, **kwargs) * right_operand.scaling
        )
        return product.add_(func(small, right_operand.right, *extra_args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight if name in WEIGHT_ATTRIBUTES else self.formed(), name)

    def __getitem__(self, index: int | slice | Tensor) -> LowRankSum:
        return LowRankSum(self.weight[index], self.left[index], self.right[index], self.scaling)

    def transpose(self, dim0: int, dim1: int) -> LowRankSum | Tensor:
        """Return the sum with two dimensions exchanged; of the last two, `(W + L R)' = W' + R'
        L'`.
        """
        if {dim0 % self.ndim, dim1 % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.formed().transpose(dim0, dim1)
        return LowRankSum(self.weight.transpose(-2, -1), self.right.mT, self.left.mT, self.scaling)

    def formed(self) -> Tensor:
        """Return the sum as a tensor."""
        return torch.add(self.weight, self.left @ self.right, alpha=self.scaling)


def _multiplies(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a product of matrices, with no other options than groups or, for a
    linear, a bias.
    """
    asked = {key for key, value in kwargs.items() if value is not None} - {"offs"}
    if name not in PRODUCTS or len(args) < 2 or min(argument.ndim for argument in args[:2]) < 2:
        return False
    return (
        asked <= {"bias"} and not isinstance(args[0], LowRankSum) if name == "linear" else not asked
    )


class _GroupedContext(Protocol):
    """What `transformers` saves for the backward of a grouped product."""

    offs: Tensor
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs and the weight."""


@cache
def form_no_frozen_gradients() -> None:
    """Have `transformers`' fallback for grouped products, where torch has none (older devices, and
    the CPU before torch 2.9), form no gradient of a frozen weight: its own backward forms that of
    all experts."""

    usual, setup_context = grouped_fallback()

    def backward(ctx: _GroupedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            gradients: tuple[Tensor | None, ...] = usual(ctx, gradient)
            return gradients
        return (
            torch.ops.transformers.grouped_mm_fallback(gradient, ctx.saved_tensors[1].mT, ctx.offs),
            None,
            None,
        )

    torch.library.register_autograd(
        "transformers::grouped_mm_fallback", backward, setup_context=setup_context
    )
