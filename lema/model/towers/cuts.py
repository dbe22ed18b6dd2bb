"""What a model's towers are given of several images, cut into those of each, and what they make of
each, joined as if it had been made at once.

Processors hand images over in two ways. Each tensor has an entry for every image; or the patches of
all images follow one another, and a table of grids says how many each has. Which it is shows in the
shapes. Where neither fits, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["POOLED", "cut", "is_nothing", "joined", "trimmed"]

POOLED = "pooler_output"  # what `transformers` calls that which takes the place of tokens
PLACES = 5  # dimensions of pixels by row: rows, images, channels, height and width
GRID_SIZES = (2, 3)  # numbers of a grid: rows and columns, or frames before them
Arguments = Mapping[str, Any]
Tree: TypeAlias = Any  # a tensor, or a list or tuple of trees
Outputs = Mapping[str, Any]
"""What towers make of images, by the names of `transformers`: tensors, or lists of them."""


def cut(arguments: Arguments) -> list[dict[str, Any]] | None:
    """Return the arguments of a call for each image, or for each row of images where a processor
    puts those of a row together; None: they cannot be told apart.

    Args:
        arguments: by name; what is no tensor is the same for all.
    """
    tensors = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.dim()
    }
    if not tensors:
        return None
    for grids in tensors.values():
        if (parts := _by_grids(tensors, grids)) is not None:
            return [{**arguments, **part} for part in parts]
    counts = {len(tensor) for tensor in tensors.values()}
    if len(counts) != 1:
        return None
    return [
        {**arguments, **{name: tensor[number : number + 1] for name, tensor in tensors.items()}}
        for number in range(counts.pop())
    ]


def _by_grids(tensors: Mapping[str, Tensor], grids: Tensor) -> list[dict[str, Tensor]] | None:
    """Return the tensors of each image, if these are the grids of patches that follow one another;
    None: they are not."""
    if grids.is_floating_point() or grids.dim() != 2 or grids.shape[1] not in GRID_SIZES:
        return None
    sizes: list[int] = grids.prod(dim=1).tolist()
    patches = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not patches or any(len(tensors[name]) != sum(sizes) for name in patches):
        return None
    if any(len(tensors[name]) != len(grids) for name in tensors.keys() - patches):
        return None
    pieces = {
        name: tensor.split(sizes if name in patches else 1) for name, tensor in tensors.items()
    }
    return [{name: pieces[name][number] for name in tensors} for number in range(len(sizes))]


def is_nothing(arguments: Arguments) -> bool:
    """Whether the arguments of a row have no image: its pixels, which have a place for each of
    several images, and what masks them are all zero."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    places = max(tensor.dim() for tensor in tensors) == PLACES
    return places and not any(bool(tensor.any()) for tensor in tensors)


def trimmed(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors of one image without the zeros behind it, whose number goes by the other
    images of a batch. The image's own size is in another tensor; where there is none, nothing is
    taken away."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if len(tensors) < 2:
        return tensors
    return {
        name: _without_zeros(tensor) if len(tensor) == 1 else tensor
        for name, tensor in tensors.items()
    }


def _without_zeros(tensor: Tensor) -> Tensor:
    for dim in range(1, tensor.dim()):
        outer_dims = [outer for outer in range(tensor.dim()) if outer != dim]
        there = (tensor != 0).sum(dim=outer_dims).nonzero()
        tensor = tensor.narrow(dim, 0, int(there[-1]) + 1 if len(there) else 1)
    return tensor


def joined(parts: Sequence[Outputs]) -> dict[str, object] | None:
    """Return what towers make of some images together, of what they make of each; None: that cannot
    be told.

    Args:
        parts: the outputs of each.
    """
    if len(parts) == 1:
        return dict(parts[0])
    names = parts[0].keys()
    if any(part.keys() != names for part in parts):
        return None
    batch: dict[str, object] = {}
    for name in names:
        values = [part[name] for part in parts]
        counts = [_num_tokens(part.get(POOLED)) for part in parts]
        value = _pooled(values) if name == POOLED else _per_token(values, counts)
        if value is None:
            return None
        batch[name] = value
    return batch


def _pooled(values: Sequence[Tree]) -> Tree | None:
    """Join what takes the place of tokens: a list has an entry for each image, and a tensor an
    entry for each image or token."""
    if all(isinstance(value, list | tuple) for value in values):
        return type(values[0])(item for value in values for item in value)
    return _concatenated(values)


def _per_token(values: Sequence[Tree], counts: Sequence[int]) -> Tree | None:
    """Join what is given to later layers for each token; what has another length is no image's, and
    the same for all."""
    if all(isinstance(value, list | tuple) for value in values):
        if len({len(value) for value in values}) != 1:
            return None
        items = [_per_token(items, counts) for items in zip(*values, strict=True)]
        return None if any(item is None for item in items) else type(values[0])(items)
    if not all(isinstance(value, Tensor) for value in values):
        return None
    if all(_num_tokens(value) == count for value, count in zip(values, counts, strict=True)):
        return _concatenated(values)
    return values[0] if all(torch.equal(values[0], value) for value in values[1:]) else None


def _concatenated(values: Sequence[object]) -> Tensor | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    shapes = {tensor.shape[1:] for tensor in tensors}
    return torch.cat(tensors) if len(tensors) == len(values) and len(shapes) == 1 else None


def _num_tokens(value: object) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_num_tokens, value))
    return value.shape[:-1].numel() if isinstance(value, Tensor) else 0
