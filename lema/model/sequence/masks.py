"""What the model's own code before the layers would know of the whole sequence, while it is called
on a chunk: the borders of packed rows, and the longest position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from lema.compat import by_position_in_pack
from lema.model.capture import interface_replaced, replaced
from lema.model.sequence.cache import refusal
from lema.model.state.rotary import goes_by_length

__all__ = [
    "asks_for_packs",
    "numbers_of_rows",
    "packed_rows",
    "rotary_of_length",
    "tables_by_length",
]

# whose masks are tables of what attends to what
TABLES = ("eager", "sdpa")


def numbers_of_rows(position_ids: Tensor) -> Tensor | None:
    """Return for each token `[rows, sequence]` which of the rows of its pack it belongs to; None:
    nothing is packed. A row begins where a position does not follow the one before, as
    `transformers` has it."""
    first = position_ids[:, :1] - 1
    numbers = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
    return numbers if bool(numbers.any()) else None


def asks_for_packs(run: Callable[[], object]) -> bool:
    """Whether a model's own masks keep attention within the rows of a pack: whether `run`, which
    runs it on one up to its layers, has `transformers` look for them. Some types do not."""
    find = masking_utils.find_packed_sequence_indices
    asked = list[bool]()

    def looked(position_ids: Tensor) -> Tensor | None:
        numbers = find(position_ids)
        asked.append(numbers is not None)
        return numbers

    module: Any = masking_utils
    module.find_packed_sequence_indices = looked
    try:
        run()
    finally:
        module.find_packed_sequence_indices = find
    return any(asked)


@contextmanager
def packed_rows(attention: str, position_ids: Tensor, numbers: Tensor) -> Iterator[None]:
    """Keep attention within the rows of a pack, in masks that are made in a `with` block.

    `transformers` does so itself where there is no cache; the functions are its own.

    Args:
        attention: the implementation of attention.
        position_ids: of the whole sequence, `[rows, sequence]`.
        numbers: of the row of its pack that each token belongs to, `[rows, sequence]`.

    Raises:
        ConfigError: the implementation has no such masks.
    """
    if attention not in TABLES:
        raise refusal(f"rows are packed, and attention is {attention}, not {' or '.join(TABLES)}")
    interfaces: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    make = interfaces[attention]

    def within_rows(*, mask_function: Callable[..., Any], **options: object) -> object:
        by_position = by_position_in_pack(mask_function, position_ids)
        same_row = masking_utils.packed_sequence_mask_function(numbers)
        function = masking_utils.and_masks(by_position, same_row)
        return make(mask_function=function, **{**options, "allow_is_causal_skip": False})

    with interface_replaced(interfaces, attention, within_rows):
        yield


def tables_by_length(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return the rotary embeddings whose table goes by the longest position. `ConfigError`: there
    is one inside of a layer."""
    modules = [module for module in model.modules() if goes_by_length(module)]
    inside = {module for layer in layers for module in layer.modules()} if modules else set()
    if any(module in inside for module in modules):
        raise refusal("its layers make tables of rotary embeddings by the longest position")
    return modules


def rotary_of_length(modules: Sequence[nn.Module], longest: Tensor) -> AbstractContextManager[None]:
    """Return the context in which rotary embeddings make the table of a whole sequence.

    Args:
        modules: those whose table goes by the longest position.
        longest: the longest position of the sequence, one element.
    """

    def forward_of(module: nn.Module) -> Callable[..., Any]:
        forward: Callable[..., Any] = type(module).forward

        def forward_with(
            x: Tensor, position_ids: Tensor, *args: object, **kwargs: object
        ) -> Tensor | tuple[Tensor, ...]:
            last = longest.to(position_ids).expand(*position_ids.shape[:-1], 1)
            tables = forward(module, x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
            if isinstance(tables, Tensor):
                return tables[..., :-1, :]
            return tuple(table[..., :-1, :] for table in tables)

        return forward_with

    return replaced({module: forward_of(module) for module in modules})
