"""The forms in which a model is written: the names and shapes of the tensors of its files.

In the published form, what is written again has the names it was read by: every tensor of the
source is there, and one that holds parts of tensors of the model that have changed gets these
parts, wherever `transformers` had put them. What was expanded has no such name;
`revert_weight_conversion` of `transformers` says what it is called and how it is laid out, as it
does in `save_pretrained`. Tensors that the model does not read, but of which `transformers` knows,
those of prediction layers for one, are copied as bytes; what no class reads is left out.

In the assembled form, tensors that are published in pieces are put together as they are in memory,
so that no later run has to. Names in memory are written where `transformers` reads them as they
are, in the class that is published and in the one that trains, and published ones elsewhere: so the
files are a checkpoint like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from lema.convert.tensors import bytes_of, cast_pieces, read_tensor, records_of, stored_name
from lema.model.skeleton import find_layers
from lema.model.weight_names import NameMap, grouped
from lema.storage import GlobalBinaryIndex
from lema.storage.header import DTYPE_BITS, TensorRecord
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import AssembledRecord, Move
from lema.storage.tensorfile import TensorSpec, read_pieces

__all__ = ["PublishedForm", "visit_order"]

PLAIN = ("F64", "F32", "F16", "BF16")  # of tensors that are not quantised
Values = Callable[[str], Tensor]
"""Name of a tensor of the model -> its value, in the type that is written."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the files."""

    name: str
    dtype: torch.dtype | None  # None: as it is stored
    shape: tuple[int, ...]
    record: TensorRecord | None = None  # where it is stored under this name
    # The tensors of the model whose elements it holds, and which go where in it.
    moves: tuple[tuple[str, Move], ...] = ()
    # the tensors of the model that it is made of by `revert_weight_conversion`
    group: tuple[str, ...] = ()
    tensor_name: str = ""  # the tensor of the model that it is, under whichever name

    @property
    def owners(self) -> tuple[str, ...]:
        """The tensors of the model that it has values of."""
        if self.tensor_name:
            return (self.tensor_name,)
        return self.group or tuple(dict.fromkeys(name for name, _ in self.moves))

    @property
    def spec(self) -> TensorSpec:
        """Its name, type and shape, as a file is told."""
        if self.dtype is None:
            assert self.record is not None, self.name
            return self.name, self.record.dtype, self.shape
        return self.name, stored_name(self.name, self.dtype), self.shape


class PublishedForm:
    """How a model is written. `names`: where its tensors are in the files of `index`; without one,
    they are in the model itself. `dtypes`: what each is written as. `assembled`: the tensors of the
    model that are written as they are in memory; None: the published form. `left_out` are tensors
    of a quantised source that cannot be copied, `unread` those that no class reads."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: NameMap,
        index: GlobalBinaryIndex | None,
        dtypes: Mapping[str, torch.dtype],
        assembled: Collection[str] | None = None,
    ) -> None:
        self._model = model
        self._state: dict[str, Tensor] = model.state_dict()
        self._records = names.stored | {
            name: names.stored[source] for name, source in names.tied.items()
        }
        self._dtypes = dtypes
        expanded = _expanded(names, index, self._state)
        repeated = _repeated(model, expanded, index)
        named = {name: record for name, record in names.stored.items() if name not in expanded}
        tensors = [
            *_stored(named, index, dtypes),
            *_reverted(model, sorted(expanded - repeated), dtypes),
        ]
        alone = list(_reverted(model, sorted({*names.tied, *repeated}), dtypes))
        self.left_out: list[str] = []
        self.unread = [record.name for stored in names.unused for record in records_of(stored)]
        copied_records: list[TensorRecord] = []
        if assembled is not None:
            tensors, alone = (self._assembled(part, assembled) for part in (tensors, alone))
            tensors += [
                self._in_memory(name) for name in names.unstored_buffers if name in assembled
            ]
        elif index is not None:
            copied_records, self.left_out = _copied_records(names, index)
        self._alone = {tensor.name for tensor in alone}
        order = {name: position for position, name in enumerate(visit_order(model))}
        tensors = sorted(tensors + alone, key=lambda tensor: _visit_key(tensor, order))
        tensors += [
            FileTensor(record.name, None, record.shape, record) for record in copied_records
        ]
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._group: tuple[str, ...] = ()
        self._converted: dict[str, Tensor] = {}  # of that group

    def _assembled(self, tensors: Sequence[FileTensor], names: Collection[str]) -> list[FileTensor]:
        """Return tensors of files, with those put together that hold nothing but some tensors of
        the model.
        """
        free = {owner for tensor in tensors for owner in tensor.owners} & set(names)
        while (
            stuck := {
                name
                for tensor in tensors
                if not free.issuperset(tensor.owners)
                for name in tensor.owners
            }
            & free
        ):
            free -= stuck
        left = [tensor for tensor in tensors if free.isdisjoint(tensor.owners)]
        return left + [self._in_memory(name) for name in sorted(free)]

    def _in_memory(self, name: str) -> FileTensor:
        return FileTensor(
            name, self._dtypes[name], tuple(self._state[name].shape), tensor_name=name
        )

    @property
    def file_names(self) -> dict[str, str]:
        """The tensors of the model that are each one tensor of the files, of the same shape, by
        what that is called.
        """
        names = {
            tensor.tensor_name: tensor.name
            for tensor in self.tensors.values()
            if tensor.tensor_name
        }
        for tensor in self.tensors.values():
            if len(tensor.moves) == 1 and tensor.shape == tuple(
                self._state[tensor.owners[0]].shape
            ):
                _, move = tensor.moves[0]
                names |= {tensor.owners[0]: tensor.name} if move.is_contiguous else {}
        return names

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model, in the type that is written."""
        # of a model in memory, or as the model makes it
        if (record := self._records.get(name)) is None:
            return self._state[name].detach().to("cpu", self._dtypes[name])
        return read_tensor(record, self._dtypes[name])

    def copied(self, name: str) -> TensorRecord | None:
        """Return the stored tensor that one of the files is, but for its type; None: it is made
        of others.
        """
        tensor = self.tensors[name]
        record = self._records.get(tensor.tensor_name) if tensor.tensor_name else tensor.record
        return record if isinstance(record, TensorRecord) and tensor.dtype is not None else None

    def specs(self, *, parted: bool = False) -> list[TensorSpec]:
        """Return what is written, in the order of a forward pass. `parted`: tied tensors that are
        stored once are no longer one, and each is written for itself."""
        return [
            tensor.spec
            for name, tensor in self.tensors.items()
            if parted or name not in self._alone
        ]

    def owner(self, name: str) -> str:
        """Return the first tensor of the model that one of the files has values of; empty: none."""
        return next(iter(self.tensors[name].owners), "")

    def pieces(
        self,
        name: str,
        changed: Callable[[str], bool] = lambda _: False,
        values: Values | None = None,
    ) -> Iterable[memoryview]:
        """Return the bytes of one tensor of the files. `changed`: whether a tensor of the model has
        other values than the stored ones, which `values` returns then."""
        tensor = self.tensors[name]
        now = (
            {}
            if values is None
            else {owner: values(owner) for owner in tensor.owners if changed(owner)}
        )
        if tensor.group:
            return [bytes_of(self._reverted(tensor, now))]
        if tensor.tensor_name:
            record = self._records.get(tensor.tensor_name)
            if now or record is None or tensor.dtype is None:
                return [bytes_of(now[tensor.tensor_name] if now else self.read(tensor.tensor_name))]
            return cast_pieces(record, tensor.dtype)
        assert tensor.record is not None, tensor.name
        if tensor.dtype is None:
            return read_pieces(tensor.record)
        if not now:
            return cast_pieces(tensor.record, tensor.dtype)
        covered = sum(move.count for owner, move in tensor.moves if owner in now) == prod(
            tensor.shape
        )
        buffer = (
            torch.empty(tensor.shape, dtype=tensor.dtype)
            if covered
            else read_tensor(tensor.record, tensor.dtype)
        )
        for owner, move in tensor.moves:
            if owner in now:
                _copy(now[owner].to(tensor.dtype), buffer, move)
        return [bytes_of(buffer)]

    def _reverted(self, tensor: FileTensor, now: Mapping[str, Tensor]) -> Tensor:
        if tensor.group != self._group:
            self._converted = {}  # so that two groups are never in memory at once
            state = {name: now[name] if name in now else self.read(name) for name in tensor.group}
            self._converted = loading.revert_weight_conversion(self._model, state)
            self._group = tensor.group
        return self._converted.pop(tensor.name).to(tensor.dtype)

    def sentences(self) -> Iterator[str]:
        """Yield a sentence on what is left out for each reason."""
        if self.left_out:
            what = f"{len(self.left_out)} tensors on disk are quantised and not read by the model"
            yield (
                f"{what}; what is written is not quantised, so they are left out: "
                f"{grouped(self.left_out)}"
            )
        if self.unread:
            what = f"{len(self.unread)} tensors on disk are left out, because no class reads them"
            yield f"{what}: {grouped(self.unread)}"


def visit_order(model: PreTrainedModel) -> list[str]:
    """The names of the model's state dict in the order of a forward pass: before the layers, each
    layer, after them. `ModelError`: the model has no single stack of decoder layers."""
    layers_name, layers = find_layers(model)
    names = list(model.state_dict())
    inside = [
        name for i in range(len(layers)) for name in names if name.startswith(f"{layers_name}.{i}.")
    ]
    in_layers = set(inside)
    first = next((position for position, name in enumerate(names) if name in in_layers), len(names))
    return names[:first] + inside + [name for name in names[first:] if name not in in_layers]


def _expanded(
    names: NameMap, index: GlobalBinaryIndex | None, state: Mapping[str, Tensor]
) -> set[str]:
    """Return the tensors of the model that have no published name in the files."""
    if index is None:
        return set(state)
    return {
        name
        for name, record in names.stored.items()
        if index.assembled or isinstance(record, QuantizedRecord)
    }


def _repeated(
    model: PreTrainedModel, expanded: Collection[str], index: GlobalBinaryIndex | None
) -> set[str]:
    """Return the tied tensors that are there under each of their names, as in memory and in
    assembled files.
    """
    state: dict[str, Tensor] = model.state_dict()
    pairs = model.all_tied_weights_keys.items()
    if index is None:
        return {
            name for name, source in pairs if state[name].data_ptr() == state[source].data_ptr()
        }
    return {name for name, _ in pairs if name in expanded} if index.assembled else set()


def _stored(
    stored: Mapping[str, Stored], index: GlobalBinaryIndex | None, dtypes: Mapping[str, torch.dtype]
) -> list[FileTensor]:
    """Return the tensors of the files under their names."""
    if index is None:
        return []
    moves = _moves_of(stored, index)
    return [
        FileTensor(name, dtypes[parts[0][0]], index[name].shape, index[name], tuple(parts))
        for name, parts in moves.items()
    ]


def _copied_records(
    names: NameMap, index: GlobalBinaryIndex
) -> tuple[list[TensorRecord], list[str]]:
    """Return the tensors of the files that the model does not read and that are copied, and the
    names of those that cannot be, because they are quantised."""
    read = {record.name for stored in names.stored.values() for record in records_of(stored)}
    unread = {record.name for stored in names.unused for record in records_of(stored)}
    packed = (
        {_module(record) for record in index.values() if record.dtype not in PLAIN}
        if names.quantized
        else set()
    )
    expanded = {_module(index[name]) for name in read}
    copied = [record for name, record in index.items() if name not in read and name not in unread]
    left_out = [record.name for record in copied if _module(record) in packed - expanded]
    return [record for record in copied if _module(record) not in packed], left_out


def _moves_of(
    stored: Mapping[str, Stored], index: GlobalBinaryIndex
) -> dict[str, list[tuple[str, Move]]]:
    """Return, by stored tensor, the tensors of the model that its elements go to, and how they
    come back.
    """
    moves: dict[str, list[tuple[str, Move]]] = {}
    for name, record in stored.items():
        if isinstance(record, AssembledRecord):
            for piece in record.pieces:
                # A piece may be a part of the tensor in the file that it names.
                move = piece.move
                dims = tuple((size, write, read) for size, read, write in move.dims)
                begin = _begin(piece.record, index)
                moves.setdefault(piece.record.name, []).append(
                    (name, Move(move.write, move.read + begin, dims))
                )
        elif isinstance(record, TensorRecord):
            dims = ((prod(record.shape), 1, 1),)
            moves.setdefault(record.name, []).append((name, Move(0, _begin(record, index), dims)))
    return moves


def _begin(record: TensorRecord, index: GlobalBinaryIndex) -> int:
    """Return where a part of a stored tensor begins in it, in elements."""
    return (record.offset - index[record.name].offset) * 8 // DTYPE_BITS[record.dtype]


def _copy(source: Tensor, target: Tensor, move: Move) -> None:
    """Copy elements of one tensor to their places in another, both contiguous."""
    sizes = [size for size, _, _ in move.dims]
    flat = source.contiguous()  # which may be a view into memory with others
    begin = int(flat.storage_offset()) + move.read
    read = flat.as_strided(sizes, [read for _, read, _ in move.dims], begin)
    begin = int(target.storage_offset()) + move.write
    target.as_strided(sizes, [write for _, _, write in move.dims], begin).copy_(read)


def _reverted(
    model: PreTrainedModel, names: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> Iterator[FileTensor]:
    """Yield what `revert_weight_conversion` makes of tensors of the model, in groups that it
    converts together.
    """
    if not names:
        return
    state: dict[str, Tensor] = model.state_dict()
    reverse = [
        conversion.reverse_transform()
        for conversion in get_model_conversion_mapping(model, add_legacy=False)[::-1]
    ]
    converters = [
        conversion for conversion in reverse if isinstance(conversion, loading.WeightConverter)
    ]
    targets = {name: loading.rename_source_key(name, [], converters) for name in state}
    # All at once, because some renamings depend on which names came before.
    renamed = {
        name: torch.empty_like(state[name], dtype=dtypes[name], device="meta")
        for name, (_, pattern) in targets.items()
        if pattern is None
    }
    names_by_id = {id(tensor): name for name, tensor in renamed.items()}
    for name, tensor in loading.revert_weight_conversion(model, renamed).items():
        if names_by_id[id(tensor)] in names:
            yield FileTensor(
                name, tensor.dtype, tuple(tensor.shape), tensor_name=names_by_id[id(tensor)]
            )
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in renamed:
            groups.setdefault(targets[name][0], []).append(name)
    for group in groups.values():
        group_tensors = {
            name: torch.empty_like(state[name], dtype=dtypes[name], device="meta") for name in group
        }
        for name, tensor in loading.revert_weight_conversion(model, group_tensors).items():
            yield FileTensor(name, tensor.dtype, tuple(tensor.shape), group=tuple(group))


def _module(record: TensorRecord) -> str:
    return record.name.rpartition(".")[0]


def _visit_key(tensor: FileTensor, order: Mapping[str, int]) -> tuple[int, int]:
    first = min(tensor.owners, key=order.__getitem__)
    return order[first], min((move.read for name, move in tensor.moves if name == first), default=0)
