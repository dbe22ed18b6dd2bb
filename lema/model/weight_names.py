"""The names of weights: which tensors on disk become which parameters of the model, by
`transformers`' own rules.

Published names and shapes differ from those in memory: prefixes are added and removed, experts are
stored one by one and fused in memory, a tied head is stored once. `transformers` keeps these rules
in a table per model type and applies them in `from_pretrained`; the same table and the same
functions decide here, name by name, before any weight is read. Adapters wrap modules and so change
the names within a layer; these are mapped too.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.base import HfQuantizer
from transformers.utils.loading_report import LoadStateDictInfo

from lema.compat import dtype_of_files
from lema.errors import ModelError, WeightsError, listed
from lema.model.conversions import Conversion, Misfit
from lema.model.outer_weights import put, read_stored
from lema.model.quantizers.methods import open_quantizer, quantization_settings
from lema.model.skeleton import find_towers, is_in, main_dtype, scores_texts
from lema.storage import GlobalBinaryIndex
from lema.storage.header import TensorRecord
from lema.storage.quantized.formats import fold
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import AssembledRecord
from lema.storage.tensorfile import read_pieces
from lema.stream.placement import DTYPES

SHOWN = 8  # kinds of names in one line


@dataclass
class NameMap:
    """How every tensor of a model is filled from a checkpoint."""

    # In-memory name -> its place on disk: unchanged, assembled from several tensors, or quantised.
    stored: dict[str, Stored] = field(default_factory=dict)
    # in-memory names of tensors that are stored in another form
    rearranged: list[str] = field(default_factory=list)
    # In-memory name that is not stored -> the stored in-memory name it shares its weights with.
    tied: dict[str, str] = field(default_factory=dict)
    # Buffers that the checkpoint need not store; the model's own values stand.
    unstored_buffers: list[str] = field(default_factory=list)
    # tensors on disk that `transformers` says no model needs
    ignored: list[Stored] = field(default_factory=list)
    # Further tensors on disk that the model has no place for; `from_pretrained` warns of them and
    # goes on.
    unused: list[Stored] = field(default_factory=list)

    def leave_to_model(self, buffers: list[str]) -> None:
        """Have the model's own values stand for these buffers."""
        self.unstored_buffers = buffers

    @property
    def quantized(self) -> list[str]:
        """The in-memory names of what is stored quantised."""
        return [name for name, record in self.stored.items() if isinstance(record, QuantizedRecord)]


def match_names(model: PreTrainedModel, index: GlobalBinaryIndex) -> dict[str, Stored]:
    """Find where every tensor of the model is stored. Tied names that are stored once get the same
    record. Buffers the checkpoint need not store have none. Tensors on disk that the model has no
    place for are named in a warning. `ModelError`, `WeightsError`: as `map_names`."""
    names = map_names(model, index)
    warn_of_unused(names, stacklevel=3)
    return names.stored | {name: names.stored[source] for name, source in names.tied.items()}


def map_names(model: PreTrainedModel, index: GlobalBinaryIndex) -> NameMap:
    """Decide for every tensor of the model where it comes from, and for every tensor on disk where
    it goes. A tensor of the model that is not on disk is an error, where `from_pretrained` would
    draw it at random; but for the head that scores texts, which `draw_head` draws. One on disk that
    the model has no place for is no error: published checkpoints carry towers and prediction layers
    of other uses. `ModelError`: the checkpoint is quantised in a form that is not read here;
    `WeightsError`: tensors are missing, stored twice, of another shape or of a type the model
    cannot be loaded from, or scales of quantised ones are; all are named, with those not used."""
    stored = fold(index)
    quantizer = _quantizer(model.config, index, stored)
    state: dict[str, Tensor] = model.state_dict()
    names, conversions, twice = _assign(model, index, stored, state, quantizer)
    misshapen = []
    for conversion in conversions:
        misshapen += _add(names, conversion, model, state, twice)
    misshapen += [
        (
            f"{name}: {list(state[name].shape)} in the model, {list(record.shape)} in "
            f"{record.file.name} as {record.name}"
        )
        for name, record in names.stored.items()
        if tuple(state[name].shape) != record.shape
    ]
    mistyped = list(_mistyped(names, state))
    filled = names.stored.keys() | {conversion.first for conversion in conversions}
    missing = _tie_and_keep(model, names, [name for name in state if name not in filled], filled)
    if missing or twice or misshapen or mistyped:
        complaints = {
            "missing": missing,
            "not used": [f"{record.name} in {record.file.name}" for record in names.unused],
            "stored twice under different names": twice,
            "of another shape": misshapen,
            "of a type that the model cannot use": mistyped,
        }
        wrong = {what: items for what, items in complaints.items() if items}
        report = "".join(
            f"\n{len(entries)} {what}:{listed(entries, 15 // len(wrong) - 2)}"
            for what, entries in wrong.items()
        )
        how = "check that config.json and the weights belong to the same model"
        raise WeightsError(
            f"the checkpoint does not fit the model{report}", where=str(index.path), how=how
        )
    return names


def warn_of_unused(names: NameMap, stacklevel: int) -> None:
    """Warn of tensors on disk that the model has no place for; `stacklevel` as in
    `warnings.warn`.
    """
    if unused := [record.name for record in names.unused]:
        message = (
            f"{len(unused)} tensors on disk are not used, because the model does not have "
            f"them: {grouped(unused)}"
        )
        warnings.warn(message, stacklevel=stacklevel)


def grouped(names: Sequence[str]) -> str:
    """Write many names in few: those that differ only in their numbers as one, with how many
    they are.
    """
    counts = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    shown = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    return ", ".join(shown[:SHOWN]) + (
        f" and {len(shown) - SHOWN} more kinds" if len(shown) > SHOWN else ""
    )


def checkpoint_dtype(
    config: PreTrainedConfig, index: GlobalBinaryIndex, asked: str | torch.dtype | None = None
) -> torch.dtype:
    """Return the dtype that `from_pretrained` gives a model; `transformers` decides it, and the
    quantizer of the checkpoint, if it has one. `asked`: what the caller names, as `from_pretrained`
    takes it; None: nothing.

    `WeightsError`: it can decide on none, because the index names a dtype that torch does not know,
    or the first file has a tensor of a type that `transformers` does not read there. Errors of a
    quantised checkpoint are those of `map_names`.
    """
    files = [str(file) for file in index.files]
    quantizer = _quantizer(config, index, fold(index)) if quantization_settings(config) else None
    try:
        # It writes the dtype to the config, and to those of its parts.
        return dtype_of_files(
            asked or "auto", files, copy.deepcopy(config), index.described, quantizer
        )
    except (AttributeError, TypeError, ValueError) as error:
        what = f"transformers finds no dtype for the model, because its config names none: {error}"
        raise WeightsError(
            what, where=str(index.path), how="name a dtype in config.json, or set dtype"
        ) from error


def _quantizer(
    config: PreTrainedConfig, index: GlobalBinaryIndex, stored: Mapping[str, Stored]
) -> HfQuantizer | None:
    """Return what expands the weights of a checkpoint by operations of `transformers`; None: none
    are quantised, or they are in a format that is expanded here, whose quantizer changes neither
    names nor the dtype of a model."""
    settings = quantization_settings(config)
    expanded_here = any(isinstance(record, QuantizedRecord) for record in stored.values())
    return None if expanded_here or settings is None else open_quantizer(settings, index.path)


def target_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """In-memory name -> dtype `from_pretrained` would give it: the model's, but for the few it
    keeps in float32.
    """
    plan: dict[str, torch.dtype] = model._get_dtype_plan(main_dtype(model))
    state: dict[str, Tensor] = model.state_dict()
    if not plan:
        return {name: tensor.dtype for name, tensor in state.items()}
    search = loading.build_glob_alternation(list(plan))[0].search
    # One width for the whole plan: transformers only ever widens to float32.
    (wide,) = set(plan.values())
    return {name: wide if search(name) else tensor.dtype for name, tensor in state.items()}


class NameRules:
    """The rules of `transformers` that send names in files into a model, as
    `convert_and_load_state_dict_in_model` applies them. `transforms`: those of a type, and of its
    quantizer."""

    def __init__(self, model: PreTrainedModel, transforms: Sequence[Any]) -> None:
        self._model = model
        self._prefix = model.base_model_prefix
        self._state: dict[str, Tensor] = model.state_dict()
        self._renamings = [
            transform for transform in transforms if isinstance(transform, loading.WeightRenaming)
        ]
        self._converters = [
            transform for transform in transforms if isinstance(transform, loading.WeightConverter)
        ]
        self._by_pattern = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        self._tried: dict[Any, Any] = {}

    def target(self, name: str) -> tuple[str, str | None]:
        """Return where a tensor of a file goes, and the pattern of the conversion that it takes
        part in; None: none.
        """
        target, pattern = loading.rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if target not in self._state and name in self._state:
            target, pattern = loading.rename_source_key(name, [], [], self._prefix, self._state)
        return target, pattern

    def conversion(self, target: str, pattern: str) -> Conversion:
        """Return the conversion of a pattern, without sources."""
        return Conversion(target, self._by_pattern[pattern], tried=self._tried)

    def keeps(self, name: str, target: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file, which has the shape of one of the model, becomes that as
        it is.
        """
        there, pattern = self.target(name)
        if pattern is None or there != target:
            return there == target
        record = TensorRecord(name, Path(), 0, prod(shape) * 4, "F32", shape)
        conversion = self.conversion(target, pattern)
        conversion.sources.append((pattern, record))
        try:
            return conversion.records(self._model, torch.float32) == {target: record}
        except Misfit:
            return False


def _assign(
    model: PreTrainedModel,
    index: GlobalBinaryIndex,
    stored: dict[str, Stored],
    state: dict[str, Tensor],
    quantizer: HfQuantizer | None,
) -> tuple[NameMap, list[Conversion], list[str]]:
    """Send every tensor on disk to its name in memory. Returns the map, the conversions that fill
    the rest, and the names that two tensors claim."""
    transforms = (
        [] if index.in_memory_names else get_model_conversion_mapping(model, hf_quantizer=quantizer)
    )
    rules = NameRules(model, transforms)
    names = NameMap()
    conversions = dict[str, Conversion]()
    twice: list[str] = []
    homeless: list[tuple[str, Stored]] = []
    # In the order of transformers, because some renamings depend on it.
    for name in sorted(stored, key=loading.dot_natural_key):
        record = stored[name]
        target, pattern = rules.target(name)
        if target not in state:
            homeless.append((target, record))
        elif target in names.stored or (pattern is None and target in conversions):
            previous = names.stored.get(target) or conversions[target].sources[0][1]
            twice.append(
                f"{target}: as {previous.name} in {previous.file.name} and as {name} in "
                f"{record.file.name}"
            )
        elif pattern is None:
            names.stored[target] = record
        elif not isinstance(record, TensorRecord):
            what = f"{name} is quantised, but must be combined with others into {target}"
            how = "use the unquantised model, with quantize_base: nf4 or another kind"
            raise ModelError(what, where=str(record.file), how=how)
        else:
            conversions.setdefault(target, rules.conversion(target, pattern)).sources.append(
                (pattern, record)
            )
    _, unexpected = _reported_keys(model, unexpected=[target for target, _ in homeless])
    for target, record in homeless:
        (names.unused if target in unexpected else names.ignored).append(record)
    return names, list(conversions.values()), twice


def _reported_keys(
    model: PreTrainedModel, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> tuple[AbstractSet[str], AbstractSet[str]]:
    """Return which of the keys that a checkpoint lacks, or has too many, `transformers`
    complains of.
    """
    report = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(report)
    return report.missing_keys, report.unexpected_keys


def _add(
    names: NameMap,
    conversion: Conversion,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    twice: list[str],
) -> list[str]:
    """Add what comes out of a conversion to the map; return what does not fit the model, and add
    to `twice`.
    """
    try:
        records = conversion.records(model, state[conversion.first].dtype)
    except Misfit as error:
        return [f"{conversion.first}: cannot be made of {conversion.described}: {error}"]
    complaints = []
    for name, record in records.items():
        if name in names.stored:
            previous = names.stored[name]
            twice.append(
                f"{name}: as {previous.name} in {previous.file.name} and in {conversion.described}"
            )
        elif name not in state or tuple(state[name].shape) != record.shape:
            there = list(state[name].shape) if name in state else "not"
            complaints.append(
                f"{name}: {there} in the model, {list(record.shape)} from {conversion.described}"
            )
        else:
            names.stored[name] = record
            if not isinstance(record, TensorRecord):
                names.rearranged.append(name)
    return complaints


def _mistyped(names: NameMap, state: dict[str, Tensor]) -> Iterator[str]:
    """Say which tensors are whole numbers where the model computes with fractions, or the other way
    round. Any floating type is cast to the model's, as `from_pretrained` does, which would cast
    whole numbers as well."""
    plain = [
        (name, record) for name, record in names.stored.items() if isinstance(record, TensorRecord)
    ]
    assembled = [
        (name, record)
        for name, record in names.stored.items()
        if isinstance(record, AssembledRecord)
    ]
    plain += [
        (name, source)
        for name, record in assembled
        for source in {piece.record: None for piece in record.pieces}
    ]
    for name, record in plain:
        stored = DTYPES.get(record.dtype)
        expected = state[name].dtype
        if stored is None or stored.is_floating_point != expected.is_floating_point:
            yield (
                f"{name}: {expected} in the model, {record.dtype} in {record.file.name} as "
                f"{record.name}"
            )


def _tie_and_keep(
    model: PreTrainedModel, names: NameMap, missing: list[str], filled: AbstractSet[str]
) -> list[str]:
    """Tie or part weights, and leave out what the model's own buffers fill; return what is still
    missing.
    """
    _tie(model, names, missing, filled)
    required, _ = _reported_keys(model, missing)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    missing = [name for name in missing if name not in names.tied]
    names.leave_to_model([name for name in missing if name in buffers and name not in required])
    missing = [name for name in missing if name not in names.unstored_buffers]
    if scores_texts(model):
        missing = [name for name in missing if is_in(name, [model.base_model_prefix])]
    towers = find_towers(model) if missing else []
    return [name for name in missing if not is_in(name, towers)]


def _tie(
    model: PreTrainedModel, names: NameMap, missing: list[str], filled: AbstractSet[str]
) -> None:
    """Let `tie_weights` decide which weights are one, called as `from_pretrained` calls it:
    whichever is stored fills the other, and two that are both stored, with different values, are
    two weights from here on, whatever the config says. It compares weights that are loaded, so
    meanwhile each weight is a single element in the weight's shape, and those whose stored values
    are equal are the same element."""
    pairs = model.all_tied_weights_keys
    named = [
        (name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    uses = Counter(parameter_id for _, parameter_id in named)
    # which a model's own rule may part
    as_built = [name for name, parameter_id in named if uses[parameter_id] > 1]
    usual = {
        name: model.get_parameter_or_buffer(name) for name in (*pairs.values(), *pairs, *as_built)
    }
    for name, element in _elements(names, [*usual], target_dtypes(model)).items():
        put(model, name, nn.Parameter(element.expand(usual[name].shape), requires_grad=False))
    absent = {*missing}
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    tied = {name: model.get_parameter_or_buffer(name) for name in usual}
    weights: dict[int, Tensor] = {}  # by `id` of what stands for them
    for name, tensor in tied.items():
        weight = weights.get(id(tensor), usual[name])
        if id(tensor) not in weights and any(weight is earlier for earlier in weights.values()):
            weight = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        weights[id(tensor)] = weight
        put(model, name, weight)
    for name in usual.keys() & {*missing} - absent:
        sources = (source for source in tied if source in filled and tied[source] is tied[name])
        names.tied[name] = next(sources)


def _elements(
    names: NameMap, tied: Sequence[str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return a number for each weight, the same tensor for those whose stored values are equal
    in the model.
    """
    elements: dict[str, Tensor] = {}
    for number, name in enumerate(tied):
        record = names.stored.get(name)
        stored = [earlier for earlier in elements if earlier in names.stored]
        equal = (
            earlier
            for earlier in stored
            if record and _same_values(names.stored[earlier], record, dtypes[earlier])
        )
        elements[name] = elements.get(next(equal, ""), torch.tensor(number))
    return elements


def _same_values(left: Stored, right: Stored, dtype: torch.dtype) -> bool:
    """Whether two stored tensors are equal in a model of that dtype."""
    if left.shape != right.shape:
        return False
    if (
        isinstance(left, TensorRecord)
        and isinstance(right, TensorRecord)
        and left.dtype == right.dtype
    ):
        # A piece of each at a time, because embeddings may be larger than memory; most that differ
        # do so in the first.
        return all(
            first == second
            for first, second in zip(read_pieces(left), read_pieces(right), strict=True)
        )
    return torch.equal(read_stored(left, dtype), read_stored(right, dtype))


# where an adapter keeps the module it wraps
WRAPPED = re.compile(r"\.(base_layer|original_module)\b")


def stored_name(name: str) -> str:
    """Return what a parameter of a layer is called where it is stored, given its name with
    adapters attached.
    """
    return WRAPPED.sub("", name)


def adapted_by_parameter(layer: nn.Module) -> list[nn.Module]:
    """Return the modules in a layer of which a parameter is adapted by itself, as those of
    experts are.
    """
    modules = (part.get_base_layer() for part in layer.modules() if isinstance(part, ParamWrapper))
    return list(dict.fromkeys(modules))


@contextmanager
def restored_parameters(adapted: Iterable[nn.Module]) -> Iterator[None]:
    """Let adapted parameters be their modules' own after a `with` block, in which leased tensors
    stand for them. PEFT parametrizes these, and leaves them as buffers, where a further adapter
    would not find what it is to adapt."""
    before = [(module, {**module._parameters}, {**module._buffers}) for module in adapted]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.clear()  # because the order is the module's
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


class LayerNames:
    """The names in one layer, as its modules are now. `layer`: adapters attached or not. A
    parameter that trains is its own; what is leased in its place is left out, and a leaf that
    stands for it goes by its own name. Its attribute `adapted`: the modules of which a parameter is
    adapted."""

    def __init__(self, layer: nn.Module) -> None:
        parameters = {
            name: name if parameter.is_meta else None
            for name, parameter in layer.named_parameters()
        }
        self._trained = {name for name, now in parameters.items() if now is None}
        owned = parameters | {name: name for name, _ in layer.named_buffers()}
        self._buffers = {
            name for name, buffer in layer.named_buffers() if not isinstance(buffer, nn.Parameter)
        }
        self._now = {stored_name(name): now for name, now in owned.items()}
        wrappers = [
            (name, part) for name, part in layer.named_modules() if isinstance(part, ParamWrapper)
        ]
        self._assigned_names = {
            stored_name(f"{name}.{part.parameter_name}") for name, part in wrappers
        }
        self._assigned_names |= {stored_name(name) for name in self._buffers}
        self.adapted = adapted_by_parameter(layer)

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name weights as the layer does now: an adapter moves those of the modules it wraps."""
        return {
            # An adapted parameter is set to itself when PEFT parametrizes it. `data` counts its
            # changes by itself: else this would count as a change of every weight in the slot. By
            # that it is seen what a call writes, too.
            now: tensor.data if name in self._assigned_names else tensor
            for name, tensor in weights.items()
            if (now := name if tensor.requires_grad and name in self._trained else self._now[name])
            is not None
        }

    def buffers(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers among weights that `renamed` has named; a call writes into none of
        them.
        """
        return {name: weights[name] for name in self._buffers if name in weights}
