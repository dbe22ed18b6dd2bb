"""Which decoder layers a phase trains, and whether the embeddings and the head do: `["last:4",
3, "embeddings"]`.
"""

import re
from collections.abc import Sequence

from lema.config.problems import Problem, SettingsError, meant

__all__ = ["layer_selection", "may_overlap", "selection_problems"]

_EMBED_HEAD = ("embeddings", "head")
_FORMS = 'use a layer\'s number from 0 on, "first:2", "last:4", "embeddings" or "head"'


def selection_problems(
    items: Sequence[object], num_layers: int | None = None, key: str = "layers"
) -> list[Problem]:
    """Return all that is wrong with a selection; without `num_layers`, all that is wrong in
    every model.
    """
    if not items:
        return [
            Problem(
                key, f"{key} selects nothing".strip(), f"{_FORMS}; leave it out for every layer"
            )
        ]
    return [
        Problem(f"{key}[{index}]", f"{key}[{index}] {problem[0]}", problem[1])
        for index, item in enumerate(items)
        if (problem := _problem(item, num_layers)) is not None
    ]


def layer_selection(items: Sequence[int | str], num_layers: int) -> frozenset[int]:
    """Return what a list like `["last:4", "first:2", 3, "embeddings", "head"]` selects of so many
    decoder layers, counted from 0; a `SettingsError` holds each problem."""
    if problems := selection_problems(items, num_layers):
        raise SettingsError(problems)
    return _layers_of(items, num_layers) or frozenset()


def _span(item: str) -> tuple[str, int]:
    side, _, count = item.partition(":")
    return side, int(count)


def _problem(item: object, num_layers: int | None) -> tuple[str, str] | None:
    """Return what is wrong with an item, and how to fix it."""
    if isinstance(item, int) and not isinstance(item, bool):
        if item < 0:
            return (
                f"is {item}, but layers count from 0",
                f'write "last:{-item}" for the last {-item}',
            )
        if num_layers is not None and item >= num_layers:
            return f"is {item}, and the model has layers 0 to {num_layers - 1}", "name one of those"
        return None
    if item in _EMBED_HEAD:
        return None
    if not isinstance(item, str) or not re.fullmatch(r"(first|last):[0-9]+", item):
        how = meant(item, _EMBED_HEAD) if isinstance(item, str) else ""
        return f"is {item!r}, which selects nothing known", how or _FORMS
    side, count = _span(item)
    if count < 1:
        return f"is {item!r}, which selects no layer", f"write {side}:1 or more, or leave it out"
    if num_layers is not None and count > num_layers:
        return (
            f"is {item!r}, and the model has {num_layers} layers",
            f"write {side}:{num_layers} or less",
        )
    return None


Choice = tuple[Sequence[int | str] | None, Sequence[str] | None]


def may_overlap(selection: Choice, other_selection: Choice) -> bool:
    """Whether two phases, each by its `layers` and `trainable`, may train one weight; false: in
    no model they can.
    """
    layers, suffixes = selection
    other_layers, other_suffixes = other_selection
    if set(_EMBED_HEAD) & set(layers or ()) and set(_EMBED_HEAD) & set(other_layers or ()):
        return True  # the embeddings may be the head's weight too
    if suffixes is not None and other_suffixes is not None:
        pairs = [
            (f".{end}", f".{other_suffix}") for end in suffixes for other_suffix in other_suffixes
        ]
        if not any(
            end.endswith(other_suffix) or other_suffix.endswith(end) for end, other_suffix in pairs
        ):
            return False
    first = _layers_of(layers)
    second = _layers_of(other_layers)
    if not (first is None or second is None):
        return bool(first & second)
    return first != frozenset() and second != frozenset()


def _layers_of(
    items: Sequence[int | str] | None, num_layers: int | None = None
) -> frozenset[int] | None:
    """The decoder layers that a selection has in every model, or one of so many; None: it
    depends on the model.
    """
    if items is None:
        return None
    layers: set[int] = set()
    for item in items:
        if isinstance(item, int):
            layers.add(item)
        elif item not in _EMBED_HEAD:
            side, count = _span(item)
            if side == "last" and num_layers is None:
                return None
            layers.update(
                range(num_layers - count, num_layers)
                if side == "last" and num_layers
                else range(count)
            )
    return frozenset(layers)
