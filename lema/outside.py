"""The tensors outside the decoder layers (embeddings, final norm, head): read once, and kept on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend
from lema.stream.placement import LayerBytes, place, views
from lema.stream.reader import LayerReader
from lema.weights import TensorRecord

__all__ = ["layer_bytes", "load_outside"]


def layer_bytes(
    records: Mapping[str, TensorRecord], dtypes: Mapping[str, torch.dtype], layers_name: str, num_layers: int
) -> list[LayerBytes]:
    """Return each decoder layer as bytes, its tensors named relative to the layer."""
    layers: list[dict[str, tuple[TensorRecord, torch.dtype]]] = [{} for _ in range(num_layers)]
    for name, record in records.items():
        if name.startswith(f"{layers_name}."):
            index, _, inner = name.removeprefix(f"{layers_name}.").partition(".")
            layers[int(index)][inner] = (record, dtypes[name])
    return [place(layer) for layer in layers]


def load_outside(
    model: PreTrainedModel,
    records: Mapping[str, TensorRecord],
    dtypes: Mapping[str, torch.dtype],
    layers_name: str,
    backend: Backend,
    reader: LayerReader,
) -> int:
    """Make every stored tensor outside the decoder layers real, on the device; return their bytes.

    Tensors that are tied stay one tensor.
    """
    outside = {
        name: (record, dtypes[name]) for name, record in records.items() if not name.startswith(f"{layers_name}.")
    }
    tied = _same_object(model)
    stored = place({name: entry for name, entry in outside.items() if tied.get(name, name) == name})
    buffer = backend.host_buffer(stored.nbytes)
    reader.submit(stored, buffer).wait()
    on_device = backend.device_slots(stored.nbytes, 1).upload(buffer).wait()
    backend.synchronize()  # the buffer goes here, and the copy may still be reading it
    real = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in views(on_device, stored).items()}
    for name in outside:
        _replace(model, name, real[tied.get(name, name)])
    return stored.nbytes


def _same_object(model: nn.Module) -> dict[str, str]:
    """Name every parameter by the first name of the same parameter object."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _replace(model: nn.Module, name: str, tensor: nn.Parameter) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = Tensor.detach(tensor)
    else:
        owner._parameters[leaf] = tensor
