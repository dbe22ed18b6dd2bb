"""Whole models whose weights lie where torch's allocator puts tensors, and not where a file
happens to have them.
"""

from itertools import chain
from typing import TypeVar

import torch
from torch import nn

__all__ = ["ALIGNMENT", "aligned"]

ALIGNMENT = 64  # bytes; torch's allocator on the CPU gives no other addresses

Model = TypeVar("Model", bound=nn.Module)


def aligned(model: Model) -> Model:
    """Give every parameter and buffer of a model storage of its own, and return the model.

    `from_pretrained` maps safetensors files, so a weight begins wherever it begins in its file. On
    some processors, such as those with AVX2 and without AVX-512, a product of a matrix at such an
    address rounds in another way than at an aligned one, where LEMA has all weights. Values,
    strides, ties and names stay as they are: a tensor that two modules share is one afterwards too.
    """
    parts = chain(model.parameters(), model.buffers())
    with torch.no_grad():
        for part in {id(one): one for one in parts}.values():
            if not part.is_meta:
                part.data = part.detach().clone(memory_format=torch.preserve_format)
    return model
