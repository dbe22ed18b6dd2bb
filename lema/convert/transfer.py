"""Moves every tensor of a checkpoint to its place in a new file: copied, cast, put together, or of the model itself.

Copying and casting hold a few megabytes. A tensor that is put together from several, or is quantised, is held whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from lema.convert.quantize import Quantizer
from lema.convert.tensors import bytes_of, read_tensor, write_cast
from lema.model.weight_names import NameMap
from lema.storage import TensorFile
from lema.storage.header import TensorRecord

__all__ = ["transfer"]


def transfer(
    out: TensorFile,
    order: list[str],
    model: PreTrainedModel,
    names: NameMap,
    dtypes: Mapping[str, torch.dtype],
    quantizer: Quantizer | None = None,
) -> None:
    """Write every tensor of a model.

    Args:
        out: announced every name of `order`, or what `quantizer` makes of it.
        order: the names of the model's state dict, in the order to write them.
        model: without weights, but with its buffers.
        names: where each tensor comes from.
        dtypes: what each is written as.
        quantizer: writes those that are quantised; None: none is.

    Raises:
        ReadError, ModelError: a tensor could not be read, or is stored in a form no model computes with.
        DiskError: the bytes could not be written.
    """
    state = model.state_dict()
    for name in order:
        stored = names.tied.get(name, name)
        record, quantized = names.stored.get(stored), quantizer is not None and name in quantizer.chosen
        if record is None:
            if stored in names.kept:
                out.write(name, [bytes_of(state[stored])])
        elif isinstance(record, TensorRecord) and not quantized:
            write_cast(out, name, record, dtypes[name])
        else:
            tensor = read_tensor(record, dtypes[name])
            if quantizer is not None and quantized:
                quantizer.write(out, name, tensor)
            else:
                out.write(name, [bytes_of(tensor)])
            del tensor  # before the next one is read
