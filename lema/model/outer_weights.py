"""The weights that stay on the device: tensors outside the decoder layers, and those inside that train.

Outside the layers are embeddings, the final norm and the head. Input embeddings may stay in host memory instead, since
they are the largest tensor of many models and a step needs only as many rows of them as it has tokens. The rows of a
micro-batch's tokens become the embedding's weight while the module runs, and the tokens become their places among these
rows. So the numbers are those of the whole tensor, whatever else the module does with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend
from lema.backend.registry import has_addresses
from lema.errors import ConfigError
from lema.model.inputs import Inputs
from lema.model.skeleton import find_towers, is_in
from lema.storage.quantized.records import Stored
from lema.stream.dequantize import expand_into, weights_in
from lema.stream.placement import LayerBytes, place
from lema.stream.reader import LayerReader

__all__ = ["HostRows", "StoredTensors", "host_rows_name", "layer_bytes", "load_outside", "place_outside"]


def layer_bytes(
    records: Mapping[str, Stored],
    dtypes: Mapping[str, torch.dtype],
    layers_name: str,
    num_layers: int,
) -> list[LayerBytes]:
    """Return each decoder layer as bytes, its tensors named relative to the layer."""
    layers: list[dict[str, tuple[Stored, torch.dtype]]] = [{} for _ in range(num_layers)]
    for name, record in records.items():
        if name.startswith(f"{layers_name}."):
            index, _, inner = name.removeprefix(f"{layers_name}.").partition(".")
            layers[int(index)][inner] = (record, dtypes[name])
    return [place(layer) for layer in layers]


class StoredTensors:
    """A model's tensors where they are stored, to be read by name; quantised ones are expanded.

    Args:
        records: where each is, by its name in the model without adapters.
        dtypes: what the model wants each in.
        backend: the device.
        reader: reads them.
    """

    def __init__(
        self,
        records: Mapping[str, Stored],
        dtypes: Mapping[str, torch.dtype],
        backend: Backend,
        reader: LayerReader,
    ) -> None:
        self.records, self.dtypes, self.device = records, dtypes, backend.device
        self._backend, self._reader = backend, reader

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return those of `names` that are stored, on the device: views of memory that is the caller's."""
        return self.load(self.place(names))

    def place(self, names: Collection[str]) -> LayerBytes:
        """Lay out those of `names` that are stored."""
        return place({name: (self.records[name], self.dtypes[name]) for name in names if name in self.records})

    def read_to_host(self, name: str) -> Tensor:
        """Return a stored tensor in host memory that is its own."""
        placed = self.place([name])
        buffer = self._backend.host_buffer(placed.nbytes)
        self._reader.submit(placed, buffer).wait()
        expanded = torch.empty(placed.expanded_bytes, dtype=torch.uint8) if placed.expansions else None
        if expanded is not None:
            expand_into(expanded, buffer, placed)
        return weights_in(buffer, placed, expanded)[name]

    def load(self, placed: LayerBytes) -> dict[str, Tensor]:
        """Return on the device what `place` laid out."""
        buffer = self._backend.host_buffer(placed.nbytes)
        self._reader.submit(placed, buffer).wait()
        if not placed.expansions and not has_addresses(self._backend.device):
            # One by one: views of one buffer would be a graph to compile, and copies of what is in the buffer.
            return {name: one.to(self._backend.device) for name, one in weights_in(buffer, placed, None).items()}
        on_device = self._backend.device_slots(placed.nbytes, 1).upload(buffer).wait()
        expanded = None
        if placed.expansions:
            expanded = torch.empty(placed.expanded_bytes, dtype=torch.uint8, device=self._backend.device)
            expand_into(expanded, on_device, placed)
        self._backend.synchronize()  # the buffer goes here, and the copy may still be reading it
        return weights_in(on_device, placed, expanded)


def load_outside(model: PreTrainedModel, stored: StoredTensors, layers_name: str, left_out: str | None = None) -> int:
    """Make every stored tensor that text reaches outside the decoder layers real, on the device; return their bytes.

    Tensors that are tied stay one tensor; the one `left_out` stays as it is.
    """
    outside, placed = place_outside(model, stored, layers_name, left_out)
    tied = _same_object(model)
    real = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in stored.load(placed).items()}
    for name in outside:
        _replace(model, name, real[tied.get(name, name)])
    _show_device(model, stored.device, [layers_name] if left_out is None else [layers_name, left_out])
    return placed.nbytes + placed.expanded_bytes


def place_outside(
    model: PreTrainedModel, stored: StoredTensors, layers_name: str, left_out: str | None = None
) -> tuple[list[str], LayerBytes]:
    """Name every stored tensor that text reaches outside the decoder layers, but for `left_out`, and lay them out, tied
    ones once."""
    towers = [layers_name, *find_towers(model)]
    outside = [name for name in stored.records if not is_in(name, towers) and name != left_out]
    tied = _same_object(model)
    return outside, stored.place([name for name in outside if tied.get(name, name) == name])


def _show_device(model: PreTrainedModel, device: torch.device, on_meta: Sequence[str]) -> None:
    """Put the first parameter of the model, and of each model around its layers, on the device where it is not read.

    A model puts its inputs on the device of its first parameter. What stands there takes the memory of one element.

    Args:
        model: with all that is read in its place.
        device: the device.
        on_meta: the layers first, and what else is to stay as it is.
    """
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and is_in(on_meta[0], [name]):
            first, parameter = next(iter(part.named_parameters(prefix=name)))
            if parameter.is_meta and not is_in(first, on_meta):
                zero = torch.zeros((), dtype=parameter.dtype, device=device)
                _replace(model, first, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))


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


SETTING = "host_embeddings"


def host_rows_name(model: PreTrainedModel) -> str:
    """Return the name of the input embeddings' weight.

    Raises:
        ConfigError: they cannot stay in host memory.
    """
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, nn.Embedding):
        raise _refusal("the model looks its tokens up in no plain table")
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is embeddings.weight]
    if len(names) != 1:
        raise _refusal("they are the head's weight as well, which is needed whole on the device")
    return names[0]


class HostRows:
    """Looks tokens up in host memory, on behalf of the model's own embeddings.

    Args:
        model: whose input embeddings have their weight on `meta`.
        weight: it, `[vocabulary, hidden]`, in host memory.
        backend: the device.
    """

    def __init__(self, model: PreTrainedModel, weight: Tensor, backend: Backend) -> None:
        self._model, self._weight, self._inputs = model, weight, Inputs(backend)
        module = model.get_input_embeddings()
        assert isinstance(module, nn.Embedding)
        self._module, self._forward = module, module.forward
        self._known: list[tuple[weakref.ref[Tensor], Tensor]] = []  # tokens on the device, and the same in host memory
        self._looked_at = True
        module.forward = self._look_up  # type: ignore[method-assign] # of this module alone: its class stays as it is

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._weight.nbytes

    def check(self) -> None:
        """Make sure that nothing trains the embeddings.

        Raises:
            ConfigError: an adapter, or something beside it, does.
        """
        if self._model.get_input_embeddings() is not self._module or self._module.weight.requires_grad:
            raise _refusal("they are trained, or adapted")

    def remember(self, tokens: Tensor, same: Tensor) -> None:
        """Note what tokens on the device are, for as long as they are there, so that the device need not be asked."""
        self._known = [(ref, one) for ref, one in self._known if ref() is not None]
        self._known.append((weakref.ref(tokens), same))

    @contextmanager
    def nothing_looked_at(self) -> Iterator[None]:
        """Look nothing up for the length of a `with` block: what the embeddings return is thrown away."""
        self._looked_at = False
        try:
            yield
        finally:
            self._looked_at = True

    def _look_up(self, input: Tensor) -> Tensor:
        tokens = input  # torch's name for it
        if not self._module.weight.is_meta:  # somebody gave it values, or pretends to
            return self._forward(tokens)
        if self._looked_at:
            there = next((same for ref, same in self._known if ref() is tokens), None)
            unique, places = torch.unique(tokens.cpu() if there is None else there.cpu(), return_inverse=True)
            (placed,) = self._inputs.place([{"rows": self._weight.index_select(0, unique), "places": places}])
        else:
            row = torch.zeros(1, self._weight.shape[1], dtype=self._weight.dtype, device=tokens.device)
            placed = {"rows": row, "places": torch.zeros_like(tokens)}
        return self._with_weight(placed["rows"], lambda: self._forward(placed["places"]))

    def _with_weight(self, rows: Tensor, run: Callable[[], Any]) -> Tensor:
        absent, padding = self._module._parameters["weight"], self._module.padding_idx
        self._module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        self._module.padding_idx = None  # it says whose row gets no gradient, by a number that means another row here
        try:
            found: Tensor = run()
        finally:
            self._module._parameters["weight"], self._module.padding_idx = absent, padding
        return found


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"the input embeddings cannot stay in host memory: {why}", where=SETTING, how="set it to false")
