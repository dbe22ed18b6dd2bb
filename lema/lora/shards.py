"""How the tensors of an adapter lie over ranks: as the modules that they adapt do.

The axis of the rank is never cut, so an adapter of rank 4 lies over 8 ranks like any other.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lema.backend.layout import Layout, replicated

__all__ = ["PREFIX", "layout_of_tensor", "module_of"]

PREFIX = "base_model.model."  # of names in a model of PEFT's

LEAF = re.compile(
    r"\.(lora_A\.weight|lora_B\.(?:weight|bias)|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?"
    r"|(?:base_layer\.)?(?:weight|bias))$"
)


def module_of(name: str) -> tuple[str, str]:
    """Return the module that a tensor of PEFT's files is of, as the base model names it, and which
    tensor of it. A name of another kind is returned whole, with an empty text."""
    match = LEAF.search(name)
    if match is None or not name.startswith(PREFIX):
        return name, ""
    return name[len(PREFIX) : match.start()], match[1]


def layout_of_tensor(leaf: str, module: Layout, axes: int) -> Layout:
    """Return the layout of the tensor `leaf` of a module whose weight has the layout `module`.
    Column-parallel: A `[rank, input]` is whole on every rank, B `[output, rank]` is cut along its
    outputs, heads and fused parts as they are in the module. Row-parallel: A is cut along its
    inputs, B is whole. Where an embedding's vocabulary is cut, both are whole. A tensor with a
    single axis (`axes`) goes along the module's outputs."""
    replicated_layout = replicated(module.tp)
    if axes > 1 and leaf.endswith("weight") and not leaf.startswith("lora_"):
        return module  # one that trains whole
    of_a = leaf.startswith(("lora_A", "lora_embedding_A"))
    if module.kind == "embedding":  # cut along the hidden size, or else by its entries
        return replicated_layout if of_a or module.dim == 0 else replace(module, dim=0)
    along_outputs = module.dim == 0
    return replicated_layout if module.kind == "replicated" or of_a == along_outputs else module
