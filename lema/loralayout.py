"""How an adapter lies over ranks: derived from how the module lies that it is of.

The axis of the rank is never cut, so that an adapter of rank 4 lies over 8 ranks like any other.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lema.layout import Layout, embedding, replicated

__all__ = ["layout_of_tensor", "lora_layouts", "module_of"]

PREFIX = "base_model.model."  # of names in a model of PEFT's
LEAF = re.compile(
    r"\.(lora_A\.weight|lora_B\.(?:weight|bias)|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?"
    r"|(?:base_layer\.)?(?:weight|bias))$"
)


def lora_layouts(base: Layout, vocabulary: int | None = None) -> tuple[Layout, Layout]:
    """Return the layouts of A `[rank, input]` and B `[output, rank]` of a module whose weight has the layout `base`.

    Column-parallel: A is whole on every rank, B is cut along its outputs; heads and fused parts as they are in the
    module. Row-parallel: A is cut along its inputs, B is whole.

    Args:
        base: of a linear weight `[output, input]`, or of an embedding `[vocabulary, hidden]`.
        vocabulary: of an embedding: cut A `[rank, vocabulary]` by its so many entries; None: both are whole.
    """
    whole = replicated(base.tp)
    if base.kind == "replicated":
        return whole, whole
    if base.kind == "embedding" and base.dim == 0:
        return (whole if vocabulary is None else embedding(base.tp, vocabulary, dim=1)), whole
    if base.kind == "embedding":  # cut along the hidden size
        return whole, replace(base, dim=0)
    return (whole, base) if base.dim == 0 else (base, whole)


def module_of(name: str) -> tuple[str, str]:
    """Return the module a tensor of PEFT's files is of, as the base model names it, and which tensor of it.

    A name of another kind is returned whole, with an empty second.
    """
    found = LEAF.search(name)
    if found is None or not name.startswith(PREFIX):
        return name, ""
    return name[len(PREFIX) : found.start()], found[1]


def layout_of_tensor(leaf: str, module: Layout, axes: int) -> Layout:
    """Return the layout of one tensor of an adapted module.

    Args:
        leaf: which one, as `module_of` says it.
        module: the layout of the module's weight.
        axes: how many the tensor has; one with a single axis goes along the module's outputs.
    """
    a, b = lora_layouts(module)
    if leaf.startswith(("lora_A", "lora_embedding_A")):
        return a
    if leaf.startswith(("lora_B", "lora_embedding_B")):
        return b
    if axes > 1 and leaf.endswith("weight") and not leaf.startswith("lora_"):
        return module  # one that trains whole
    return b
