"""Routers that choose the experts they are told to: those that a server chose for the same tokens.

A server computes in other types and orders than a learner, so a few tokens of a mixture of experts
go to other experts there. Replayed, its choices give the learner the server's numbers but for
rounding, while the factors of the experts, and all gradients, are the learner's own (Ma et al.
2025, https://arxiv.org/abs/2510.11370).

Routers of `transformers` choose by `torch.topk` of a score for each expert, and take the factors
from the chosen places of that score or of another. So nothing is replaced but what `topk` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lema.errors import ConfigError
from lema.model.experts import LayerExperts

__all__ = ["FREE", "RowChoices", "check_choices", "has_routers", "replayed"]

FREE = -1  # in the places of a token's experts: the router chooses itself
WHERE = "expert choices"
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
# Types of servers' arrays, which have no `FREE` and in which torch computes next to nothing.
COMPUTED_AS = {
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


class RowChoices:
    """The choices of rows that calls of a model take one after the other.

    Args:
        choices: a tensor `[rows, sequence, layers, experts of each token]` of integers; `FREE` for
            a token for which a router chooses itself. It may lie in host memory.
        num_layers: how many layers the model has.

    Raises:
        ConfigError: they are no such tensor.
    """

    def __init__(self, choices: object, num_layers: int) -> None:
        if not isinstance(choices, Tensor):
            what = f"choices are a {type(choices).__name__}, and not a tensor of integers"
            raise ConfigError(what, where=WHERE, how="convert them with torch.as_tensor")
        if (
            choices.dim() != 4
            or choices.shape[2] != num_layers
            or choices.dtype not in (*INTEGERS, *COMPUTED_AS)
        ):
            what = (
                f"choices are {choices.dtype} {list(choices.shape)}, and not integers "
                f"[rows, sequence, {num_layers} layers, experts of each token]"
            )
            raise ConfigError(what, where=WHERE, how="give one choice for each token and layer")
        self._choices = choices.to(COMPUTED_AS.get(choices.dtype, choices.dtype))
        self._taken = 0  # rows

    def next_rows(self, size: int, width: int) -> Tensor:
        """Return the choices of the next call's rows.

        Args:
            size: how many rows it has.
            width: how many tokens each has.

        Returns:
            `[size, width, layers, experts of each token]`.

        Raises:
            ConfigError: there are not as many, or they are not as wide.
        """
        rows = self._choices[self._taken : self._taken + size]
        if rows.shape[:2] != (size, width):
            what = (
                f"a call has {size} rows of {width} tokens, and choices are left for "
                f"{len(rows)} of {self._choices.shape[1]}"
            )
            raise ConfigError(what, where=WHERE, how="give those of exactly the rows called")
        self._taken += size
        return rows

    def check_taken(self) -> None:
        """Refuse choices that no call has taken."""
        if self._taken < len(self._choices):
            what = f"{len(self._choices) - self._taken} rows of choices belong to no call"
            raise ConfigError(what, where=WHERE, how="give those of exactly the rows called")


@contextmanager
def replayed(
    layer: nn.Module, number: int, experts: LayerExperts | None, choices: Tensor
) -> Iterator[None]:
    """Have the routers of a layer choose these experts in a `with` block.

    Args:
        layer: a decoder layer.
        number: which one it is.
        experts: its experts, if they are known.
        choices: `[tokens, experts of each]`; `FREE`, or zeros alone where there are several, for a
            token for which the router chooses itself.

    Raises:
        ConfigError: the layer has no router that chooses as many experts, or one that chooses in
            another way, and differently; or a token has an expert twice, or has only some.
    """
    counts = _counts(layer)
    if not counts:
        # a server tells something of layers without experts as well, which is always the same
        if bool((choices > 0).any()):
            raise _no_experts(number)
        yield
        return
    choices = _distinct(choices, number)
    if bool((choices == FREE).all()):
        yield
        return
    mode = _Replay(choices, counts)
    received = list[Tensor]()
    hooks = (
        []
        if experts is None
        else [experts.module.register_forward_pre_hook(lambda _, args: received.append(args[1]))]
    )
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    # Some routers choose by a table of tokens, as the server's does, and need not be told.
    by_table = not mode.taken and len(received) == 1 and _same(received[0], choices)
    if mode.taken != 1 and not by_table:
        what = (
            f"the router of layer {number} does not choose {choices.shape[-1]} of "
            f"{sorted(counts)} experts by torch.topk, so no choices can be replayed in it"
        )
        raise ConfigError(what, where=WHERE, how="train without replaying choices")


class _Replay(TorchFunctionMode):
    """Has `topk` of scores for experts return what is told.

    Args:
        choices: `[tokens, experts of each]`.
        counts: how many experts a router may have.

    Attributes:
        taken: how often something was replaced.
    """

    def __init__(self, choices: Tensor, counts: frozenset[int]) -> None:
        super().__init__()
        self._choices = choices
        self._counts = counts
        self.taken = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        indices = result.indices
        # Routers that choose groups of experts first do it by scores `[tokens, groups, experts]`.
        if indices.shape != self._choices.shape or scores.shape[-1] not in self._counts:
            return result
        self.taken += 1
        _check_range(self._choices, scores.shape[-1] - 1)
        choices = self._choices.to(indices.device, indices.dtype)
        chosen = torch.where(choices == FREE, indices, choices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def has_routers(layer: nn.Module) -> bool:
    """Whether a decoder layer has experts to choose from."""
    return bool(_counts(layer))


def check_choices(layer: nn.Module, number: int, choices: Tensor) -> None:
    """Make sure that the routers of a layer can choose these experts, as far as can be told before
    they run; the arguments and errors are those of `replayed`.
    """
    counts = _counts(layer)
    if not counts:
        if bool((choices > 0).any()):
            raise _no_experts(number)
        return
    choices = _distinct(choices, number)
    _check_range(choices, max(counts) - 1)


def _no_experts(number: int) -> ConfigError:
    what = f"there are choices of experts for layer {number}, which has no experts"
    return ConfigError(what, where=WHERE, how="give those of this model's own layers")


def _check_range(choices: Tensor, last: int) -> None:
    highest = int(choices.max())
    lowest = int(choices.min())
    if highest > last or lowest < FREE:
        choice = highest if highest > last else lowest
        what = f"a choice is {choice}, and there are experts 0 to {last}"
        raise ConfigError(what, where=WHERE, how="give those of this model's own routers")


def _counts(layer: nn.Module) -> frozenset[int]:
    """Return how many experts the routers of a layer may have: every number that one of its
    modules keeps under a name with "experts"."""
    return frozenset(
        value
        for module in layer.modules()
        for name, value in vars(module).items()
        if "experts" in name and type(value) is int and value > 1
    )


def _distinct(choices: Tensor, number: int) -> Tensor:
    """Return the choices of a layer with `FREE` for every token for which nothing was chosen: a
    server has zeros there. `ConfigError`: a token has an expert twice, or has only some."""
    if choices.shape[-1] == 1:
        return choices
    is_zero = (choices == 0).all(dim=-1, keepdim=True)
    choices = choices.masked_fill(is_zero, FREE) if bool(is_zero.any()) else choices
    ordered = choices.sort(dim=-1).values
    is_free = (ordered == FREE).all(dim=-1)
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
    refused = ((is_repeated | (ordered == FREE).any(dim=-1)) & ~is_free).nonzero()
    if len(refused):
        token = int(refused[0])
        what = (
            f"the experts of token {token} in layer {number} are {choices[token].tolist()}, and a "
            f"token has as many different ones, or {FREE} in all places"
        )
        raise ConfigError(what, where=WHERE, how="give what a router can choose")
    return choices


def _same(chosen: Tensor, choices: Tensor) -> bool:
    """Whether the experts of each token are those told, in any order."""
    if chosen.shape != choices.shape:
        return False
    expected = choices.to(chosen.device, chosen.dtype).sort(dim=-1).values
    is_free = (expected == FREE).any(dim=-1, keepdim=True)
    return bool(((chosen.sort(dim=-1).values == expected) | is_free).all())
