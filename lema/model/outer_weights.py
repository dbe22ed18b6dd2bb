"""The weights that stay on the device: tensors outside the decoder layers, and those inside that
train.

Outside the layers are embeddings, the final norm and the head; embeddings may be looked up row by
row instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lema.backend import Backend
from lema.backend.hostmemory import anonymous
from lema.backend.registry import has_addresses, in_host_memory
from lema.errors import ConfigError
from lema.model.experts import layer_experts
from lema.model.skeleton import is_in
from lema.storage.quantized.formats import cut_rows
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import row_ranges, rows_of
from lema.stream.lease import expand_into
from lema.stream.placement import (
    LayerBytes,
    in_slot,
    lay_out_tensors,
    slot_layout,
    vector_aligned,
    views,
)
from lema.stream.reader import LayerReader, StoredRows
from lema.stream.schedule import ExpertGroup
from lema.stream.slotlayout import identity_layout, upload_to

__all__ = [
    "ExpertParts",
    "StoredTensors",
    "buffer_bytes",
    "draw_head",
    "expanded_weights",
    "expert_parts",
    "layer_bytes",
    "load_outside",
    "load_towers",
    "move_tensors",
    "outside_layout",
    "put",
    "read_stored",
    "tensors_elsewhere",
    "towers_layout",
]

# attributes that every module has: hooks, and what it registers
OF_TORCH = frozenset(vars(nn.Module()))


def layer_bytes(
    records: Mapping[str, Stored],
    dtypes: Mapping[str, torch.dtype],
    layers_name: str,
    num_layers: int,
    left_out: Collection[str] = (),
    *,
    narrow: bool = False,
) -> list[LayerBytes]:
    """Return each decoder layer as bytes but for the tensors `left_out`, its tensors named relative
    to the layer; `narrow` as in `place`."""
    by_layer = _by_layer(records, dtypes, layers_name, num_layers, left_out)
    return [lay_out_tensors(layer, narrow=narrow) for layer in by_layer]


def _by_layer(
    records: Mapping[str, Stored],
    dtypes: Mapping[str, torch.dtype],
    layers_name: str,
    num_layers: int,
    left_out: Collection[str],
) -> list[dict[str, tuple[Stored, torch.dtype]]]:
    layers: list[dict[str, tuple[Stored, torch.dtype]]] = [{} for _ in range(num_layers)]
    for name, record in records.items():
        if name.startswith(f"{layers_name}.") and name not in left_out:
            index, _, inner = name.removeprefix(f"{layers_name}.").partition(".")
            layers[int(index)][inner] = (record, dtypes[name])
    return layers


@dataclass(frozen=True)
class ExpertParts:
    """Layers as bytes whose experts are leased in groups: `layers` without them, and the `groups`
    of each such layer, as the first expert, the one after the last, and bytes."""

    layers: tuple[LayerBytes, ...]
    groups: Mapping[int, tuple[tuple[int, int, LayerBytes], ...]] = field(default_factory=dict)

    def numbered(
        self, pieces: Sequence[LayerBytes]
    ) -> tuple[list[LayerBytes], dict[int, tuple[ExpertGroup, ...]]]:
        """Return what is leased, in the order of its numbers: layers, pieces of the head,
        groups; and all groups.
        """
        numbers = count(len(self.layers) + len(pieces))
        groups = dict[int, tuple[ExpertGroup, ...]]()
        for layer, layer_groups in self.groups.items():
            groups[layer] = tuple(
                ExpertGroup(next(numbers), first, end) for first, end, _ in layer_groups
            )
        return [*self.layers, *pieces, *self.leased[len(self.layers) :]], groups

    @property
    def leased(self) -> list[LayerBytes]:
        """Layers, then groups."""
        return [
            *self.layers,
            *(part for layer_groups in self.groups.values() for _, _, part in layer_groups),
        ]


def expert_parts(
    records: Mapping[str, Stored],
    dtypes: Mapping[str, torch.dtype],
    layers_name: str,
    layers: nn.ModuleList,
    left_out: Collection[str],
    size: int,
    *,
    narrow: bool = False,
) -> ExpertParts:
    """Return layers as bytes, as `layer_bytes` does, with `size` of their experts in each group. A
    layer with no more stays whole, and one without stacked experts. `ConfigError`: experts are
    stored in a form that cannot be cut."""
    groups = dict[int, tuple[tuple[int, int, LayerBytes], ...]]()
    by_layer = _by_layer(records, dtypes, layers_name, len(layers), left_out)
    for index, (layer, tensors) in enumerate(zip(layers, by_layer, strict=True)):
        experts = layer_experts(layer)
        if experts is None or experts.count <= size or not tensors.keys() >= set(experts.weights):
            continue
        stacked = {name: tensors.pop(name) for name in experts.weights}
        spans = [
            (first, min(first + size, experts.count)) for first in range(0, experts.count, size)
        ]
        rows = [lay_out_tensors(_rows_of(stacked, *span), narrow=narrow) for span in spans]
        renamed = (
            replace(part, name=named(*span, index)) for span, part in zip(spans, rows, strict=True)
        )
        groups[index] = tuple((*span, part) for span, part in zip(spans, renamed, strict=True))
    return ExpertParts(tuple(lay_out_tensors(layer, narrow=narrow) for layer in by_layer), groups)


def named(first: int, end: int, layer: int) -> str:
    """Return the words for experts of a layer in messages; `end` is the one after the last."""
    which = f"expert {first}" if end - first == 1 else f"experts {first} to {end - 1}"
    return f"{which} of layer {layer}"


def _rows_of(
    stacked: Mapping[str, tuple[Stored, torch.dtype]], first: int, end: int
) -> dict[str, tuple[Stored, torch.dtype]]:
    rows = dict[str, tuple[Stored, torch.dtype]]()
    for name, (record, dtype) in stacked.items():
        how = (
            "set experts_per_slot: null, or convert once with `lema prepare MODEL OUT` and use OUT"
        )
        cut: Any = cut_rows if isinstance(record, QuantizedRecord) else rows_of
        try:
            rows[name] = cut(record, first, end), dtype
        except ValueError as error:
            raise ConfigError(
                f"{name} is not stored expert by expert: {error}", where="experts_per_slot", how=how
            ) from error
    return rows


@dataclass(frozen=True, eq=False)
class StoredTensors:
    """A model's tensors where they are stored, to be read by name; quantised ones are expanded."""

    records: Mapping[str, Stored]  # where each is, by its name in the model without adapters
    dtypes: Mapping[str, torch.dtype]  # what the model wants each in
    backend: Backend
    reader: LayerReader

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return those of `names` that are stored, on the device: views of memory that is the
        caller's.
        """
        return self.load(self.byte_layout(names))

    def byte_layout(self, names: Collection[str]) -> LayerBytes:
        """Lay out those of `names` that are stored."""
        byte_layout = lay_out_tensors(
            {
                name: (self.records[name], self.dtypes[name])
                for name in names
                if name in self.records
            }
        )
        return vector_aligned(byte_layout) if in_host_memory(self.backend) else byte_layout

    def read_to_host(self, name: str) -> Tensor:
        """Return a stored tensor in host memory that is its own."""
        byte_layout = self.byte_layout([name])
        return expanded_weights(self._buffer(byte_layout), byte_layout)[name]

    def rows(self, name: str) -> StoredRows | None:
        """Return the rows of a stored table, which stays on disk; None: they cannot be read one
        by one.
        """
        record = self.records[name]
        ranges = None if isinstance(record, QuantizedRecord) else row_ranges(record)
        return (
            None
            if ranges is None
            else StoredRows(self.reader, name, ranges, record.shape, self.dtypes[name])
        )

    def load(self, byte_layout: LayerBytes) -> dict[str, Tensor]:
        """Return on the device what `byte_layout` laid out."""
        buffer = self._buffer(byte_layout)
        if not byte_layout.expansions and not has_addresses(self.backend.device):
            # One by one: views of one buffer would be a graph to compile, and copies of what is in
            # the buffer.
            return {
                name: view.to(self.backend.device)
                for name, view in views(buffer, byte_layout).items()
            }
        layout = (
            identity_layout(0, byte_layout.nbytes)
            if self.backend.memory().shared
            else slot_layout(byte_layout)
        )
        on_device = upload_to(
            self.backend.device_slots(byte_layout.nbytes, 1), buffer, layout
        ).wait()
        weights = expanded_weights(on_device, in_slot(byte_layout, layout))
        self.backend.synchronize()  # the buffer goes here, and the copy may still be reading it
        return weights

    def _buffer(self, byte_layout: LayerBytes) -> Tensor:
        """Return host memory with what is stored of these tensors."""
        buffer = self.backend.host_buffer(byte_layout.nbytes)
        self.reader.submit(byte_layout, buffer).wait()
        return buffer


def expanded_weights(memory: Tensor, byte_layout: LayerBytes) -> dict[str, Tensor]:
    """Return the tensors in memory that was read, quantised ones expanded on the same device."""
    expanded = None
    if byte_layout.expansions:
        expanded = torch.empty(byte_layout.expanded_bytes, dtype=torch.uint8, device=memory.device)
        expand_into(expanded, memory, byte_layout)
    return views(memory, byte_layout, expanded)


def read_stored(record: Stored, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor in host memory, as `dtype`; expanded, if it is quantised. `ReadError`:
    its bytes could not be read."""
    byte_layout = lay_out_tensors({record.name: (record, dtype)})
    buffer = anonymous(byte_layout.nbytes)
    with closing(LayerReader()) as reader:
        reader.submit(byte_layout, buffer, name=record.name).wait()
    return expanded_weights(buffer, byte_layout)[record.name]


def load_outside(
    model: PreTrainedModel,
    stored: StoredTensors,
    layers_name: str,
    left_out: Collection[str] = (),
    towers: Collection[str] = (),
) -> int:
    """Make every stored tensor outside the decoder layers real, on the device;
    return their bytes. Tensors that are tied stay one tensor; those `left_out` stay as they are,
    and those in the modules `towers`.
    What no checkpoint has, as rotary tables, is on the device afterwards as well."""
    outside, byte_layout = outside_layout(model, stored, layers_name, left_out, towers)
    _make_real(model, stored, outside, byte_layout)
    # A model puts its inputs on the device of its first parameter. So that one, of the model and of
    # each model around its layers, is there where it is not read, too; what stands there takes the
    # memory of one element.
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and is_in(layers_name, [name]):
            first, parameter = next(iter(part.named_parameters(prefix=name)))
            if parameter.is_meta and not is_in(first, [layers_name, *left_out]):
                zero = torch.zeros((), dtype=parameter.dtype, device=stored.backend.device)
                put(model, first, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
    move_tensors(model, stored.backend.device)
    return byte_layout.nbytes + byte_layout.expanded_bytes


def towers_layout(
    model: PreTrainedModel,
    stored: StoredTensors,
    towers: Collection[str],
    left_out: Collection[str] = (),
) -> tuple[list[str], LayerBytes]:
    """Name and lay out, tied ones once, stored tensors of the modules `towers`, but those in the
    modules `left_out`."""
    names = [name for name in stored.records if is_in(name, towers) and not is_in(name, left_out)]
    tied = _same_object(model)
    return names, stored.byte_layout([name for name in names if tied.get(name, name) == name])


def load_towers(
    model: PreTrainedModel,
    stored: StoredTensors,
    towers: Collection[str],
    left_out: Collection[str] = (),
) -> None:
    """Make the tensors that `towers_layout` names real, on the device."""
    _make_real(model, stored, *towers_layout(model, stored, towers, left_out))


def _make_real(
    model: PreTrainedModel, stored: StoredTensors, names: Iterable[str], byte_layout: LayerBytes
) -> None:
    """Load what `byte_layout` laid out, and put it in its places in the model."""
    tied = _same_object(model)
    real = {
        name: nn.Parameter(tensor, requires_grad=False)
        for name, tensor in stored.load(byte_layout).items()
    }
    for name in names:
        put(model, name, real[tied.get(name, name)])


def move_tensors(model: nn.Module, device: torch.device) -> None:
    """Move to the device every tensor of a model that is neither there nor without values:
    parameters, buffers, those of the layers among them, and tensors in other attributes of modules,
    in lists, tuples and dicts too. A model's code expects to find them where its weights are; where
    it moves them itself, in each forward, the host would wait.

    What is elsewhere on purpose is in no attribute of a module: a table in host memory is its
    function's, and what is leased has no values until then. Tensors that are one stay one.
    """
    # by `id`, with the tensor, so that no other one gets its number
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def there(tensor: Tensor) -> Tensor:
        if not _elsewhere(tensor, device):
            return tensor
        if id(tensor) not in moved:
            copy = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = tensor, copy
        return moved[id(tensor)][1]

    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for registered in registries:
            for name, tensor in registered.items():
                if tensor is not None:
                    registered[name] = there(tensor)
        for name, value in _plain(module):
            vars(module)[name] = _mapped(value, there)


def tensors_elsewhere(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors that `move_tensors` would move, by name; of several in one attribute
    each with a number.
    """
    return {name: tensor for name, tensor in _tensors(model) if _elsewhere(tensor, device)}


def buffer_bytes(model: nn.Module) -> int:
    """Return the bytes that a model's buffers, and tensors in other attributes, take of a device
    with memory of its own. Those that were stored are not counted: they lie with the weights
    outside the layers, in one allocation."""
    tensors = {
        id(tensor): tensor
        for _, tensor in _tensors(model)
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta
    }
    return sum(
        tensor.nbytes
        for tensor in tensors.values()
        if tensor.untyped_storage().nbytes() <= tensor.nbytes
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules have in any attribute, with their names."""
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *_plain(module)]:
            inside: list[Tensor] = []

            def note(tensor: Tensor, inside: list[Tensor] = inside) -> Tensor:
                inside.append(tensor)
                return tensor

            _mapped(value, note)
            for number, tensor in enumerate(inside):
                part = f"[{number}]" if len(inside) > 1 else ""
                yield f"{path}.{name}{part}".removeprefix("."), tensor


def _elsewhere(tensor: Tensor, device: torch.device) -> bool:
    return not tensor.is_meta and tensor.device != device


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that are not torch's own."""
    return [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """Return a value with its tensors changed: those in lists and dicts in place, so that who
    shares them sees it.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | dict):
        for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (new := _mapped(entry, change)) is not entry:
                value[key] = new
    elif isinstance(value, tuple):
        items = [_mapped(entry, change) for entry in value]
        if any(new is not entry for new, entry in zip(items, value, strict=True)):
            kind: Any = type(value)
            return kind(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def outside_layout(
    model: PreTrainedModel,
    stored: StoredTensors,
    layers_name: str,
    left_out: Collection[str] = (),
    towers: Collection[str] = (),
) -> tuple[list[str], LayerBytes]:
    """Name and lay out, tied ones once, stored tensors outside the layers and outside the modules
    `towers`, but those `left_out`.
    """
    elsewhere = [layers_name, *towers]
    outside = [
        name for name in stored.records if not is_in(name, elsewhere) and name not in left_out
    ]
    tied = _same_object(model)
    return outside, stored.byte_layout([name for name in outside if tied.get(name, name) == name])


def draw_head(model: PreTrainedModel, device: torch.device, seed: int) -> Tensor | None:
    """Draw what no checkpoint has of the head of a text classifier, as `from_pretrained` does after
    `manual_seed`. Returns the state of the generator afterwards, which itself is left where it was;
    None: nothing had to be drawn."""
    base = [model.base_model_prefix]
    absent = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and not is_in(name, base)
    ]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in absent)
    with torch.no_grad(), torch.random.fork_rng(devices=()), guard_torch_init_functions():
        torch.manual_seed(seed)
        for name in modules:
            module = model.get_submodule(name)
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    drawn = nn.Parameter(
                        torch.empty_like(parameter, device="cpu"), requires_grad=False
                    )
                    module.register_parameter(parameter_name, drawn)
                else:
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined] # so that it is left alone
            model._init_weights(module)
            module.to(device)
        return torch.get_rng_state() if absent else None


def _same_object(model: nn.Module) -> dict[str, str]:
    """Name every parameter by the first name of the same parameter object."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a buffer or a parameter: a tensor that is none itself becomes one, and keeps its
    `requires_grad`.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = Tensor.detach(tensor)
    elif isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(
            tensor, requires_grad=owner.get_parameter(leaf).requires_grad
        )
