"""A model as it would be opened for training, without its weights: skeleton, adapter, and where
every byte lies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lema.backend import Backend, Parallel, SingleProcess, load
from lema.config import LemaConfig
from lema.config.objective import reference_of
from lema.engine.head.cut import HeadCut, open_embed_head
from lema.engine.optim import training_bytes
from lema.lora import inject_lora_params
from lema.lora.attach import configured_lora, unmatched_names
from lema.lora.class_names import class_names, class_of_modalities, compare_classes
from lema.lora.serving.checks import check_served
from lema.model import meta_model, read_config
from lema.model.computing import Computing, computing_of
from lema.model.experts import multiply_unmerged
from lema.model.outer_weights import (
    ExpertParts,
    StoredTensors,
    expert_parts,
    layer_bytes,
    outside_layout,
)
from lema.model.partition import local_records
from lema.model.quantizable import as_quantized, kind_to_quantize
from lema.model.row_tables import RowTables
from lema.model.sequence.rope import set_rope
from lema.model.skeleton import compute_fast, find_layers
from lema.model.split import Split
from lema.model.towers.stacks import unloaded_towers
from lema.model.weight_names import match_names, target_dtypes
from lema.plan.work.trainable_bytes import (
    MASTER_BYTES,
    MOMENT_BYTES,
    TrainedBytes,
    lowest_trained,
    trained_bytes,
)
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.hub import own_weights
from lema.storage.quantized.records import Stored
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader

__all__ = ["Blueprint", "draw_up", "reference_bytes"]


@dataclass(frozen=True)
class Blueprint:
    """What is known of a model before a byte of a weight is read."""

    directory: Path  # the model's
    # parameters on `meta`, but for those of the adapter, which have memory and no values
    model: PreTrainedModel
    layers: Sequence[LayerBytes]  # the decoder layers as bytes
    outside_bytes: int  # of embeddings, final norm and head, on the device
    tables: RowTables  # the embeddings that are looked up row by row
    head: HeadCut  # the head; if it may be cut, `outside_bytes` does not include it
    adapter_bytes: int  # of what trains, with gradients and optimizer state
    adapter_parameters: int  # how many train
    stored_bytes: int  # of the model's files
    parameters: int  # of the model, adapters not counted
    reference_bytes: int = 0  # on the device, of the adapter that a preference loss compares with
    trained: TrainedBytes | None = None  # weights of the model that train instead of an adapter
    # returns layers with so many experts in a group
    cut_experts: Callable[[int], ExpertParts] | None = None
    # the layers with their experts in groups; None: they are whole
    parts: ExpertParts | None = None
    experts: int = 0  # how many are in a group then
    # whether the backward then runs what comes before them twice, so that less waits
    runs_again: bool = False
    # by micro-batch and experts in a group, bytes that wait for these, as far as known
    waiting: dict[Any, Any] = field(default_factory=dict)
    # by rows, length and tokens of a chunk, what chunks take, as far as known
    chunk_runs: dict[Any, Any] = field(default_factory=dict)
    parts_by_size: dict[int, ExpertParts] = field(default_factory=dict)  # what was cut already
    # whether the head is leased in pieces; None: it is not decided
    head_in_pieces: bool | None = None
    pieces: Sequence[LayerBytes] = ()  # the head in pieces that are leased after the layers
    # that hold it together; layers and adapters are one's
    parallel: Parallel = field(default_factory=SingleProcess)
    computing: Computing | None = None  # the types of weights and of computing; None: they are one
    # sentences on names in the adapter's settings that no module bears
    unmatched: Sequence[str] = ()
    splits: list[Split] = field(default_factory=list)  # `split`, after the first request

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype that inputs and weights are cast to for products; None: their own."""
        return None if self.computing is None else self.computing.autocast

    @property
    def split(self) -> Split:
        """The parts of the model, for who runs it without values; one for all blueprints of this
        model.
        """
        if not self.splits:
            split = Split(self.model, load("cpu"), parallel=self.parallel, cast=self.cast)
            self.splits.append(split)
        return self.splits[0]

    @property
    def most_experts(self) -> int:
        """How many stacked experts a layer has, at most."""
        layer_experts = map(self.split.experts_of, range(self.split.num_layers))
        return max((experts.count for experts in layer_experts if experts is not None), default=0)

    def parts_of(self, experts: int) -> ExpertParts:
        """Return the layers with so many experts in a group.

        Raises:
            ConfigError: experts are stored in a form that cannot be cut.
        """
        if experts not in self.parts_by_size:
            assert self.cut_experts is not None
            self.parts_by_size[experts] = self.cut_experts(experts)
        return self.parts_by_size[experts]

    @property
    def leased(self) -> Sequence[LayerBytes]:
        """The layers as they are leased, with groups of experts where they have some."""
        return self.layers if self.parts is None else self.parts.leased

    @property
    def expanded_bytes(self) -> int:
        """Bytes that quantised weights are expanded into: those of a layer, and of a group of
        its experts.
        """
        leased = self.leased
        count = len(self.layers)
        return sum(
            max((layer.expanded_bytes for layer in layers), default=0)
            for layers in (leased[:count], leased[count:])
        )

    @property
    def group_bytes(self) -> dict[int, list[int]]:
        """Bytes of layers whose experts are leased in groups: first those of the rest, then
        those of each group.
        """
        if (parts := self.parts) is None:
            return {}
        return {
            at: [parts.layers[at].nbytes, *(group.nbytes for *_, group in groups)]
            for at, groups in parts.groups.items()
        }

    @property
    def model_bytes(self) -> int:
        """Bytes of all weights in the types in which they are used: the size of the model when
        it is written.
        """
        streamed = sum(layer.nbytes + layer.expanded_bytes for layer in self.layers)
        head_bytes = (
            self.head.nbytes if self.pieces and not self.tables.names & self.head.names else 0
        )
        return self.outside_bytes + self.tables.nbytes + streamed + head_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan tells of the adapter's settings, of the type that is computed in, of the
        embeddings and of the head."""
        computing = () if self.computing is None else self.computing.notes
        head = (self.head.summary(self.pieces),) if self.pieces else self.head.notes
        return (*self.unmatched, *computing, *self.tables.notes, *head)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: of each parameter that trains its value and two moments, in
        fp32; and those of the reference's adapter. Adapters are written under the names of each
        class."""
        forms = class_names(self.model).num_forms if self.trained is None else 1
        return (
            forms * MASTER_BYTES + MOMENT_BYTES
        ) * self.adapter_parameters + forms * self.reference_bytes

    @property
    def names(self) -> Sequence[frozenset[str]]:
        """For each layer, its own weights that train, by their names in it; empty: none train in
        any layer.
        """
        return () if self.trained is None else self.trained.names

    @property
    def lowest_adapted(self) -> int:
        """The lowest layer with something that trains; the top one where none has."""
        if self.trained is not None:
            return self.trained.lowest
        return lowest_trained(find_layers(self.model)[1])


def draw_up(
    config: LemaConfig,
    *,
    backend: Backend | None = None,
    trust_remote_code: bool = False,
    chosen: Callable[[PreTrainedModel], Callable[[str], bool]] | None = None,
    parallel: Parallel | None = None,
    elsewhere: bool = False,
) -> Blueprint:
    """Read a model's config and its tensors' headers, and attach the adapter that the settings ask
    for.

    `backend` is the device that adapters are given memory on; None: the CPU. `elsewhere`: it is
    drawn up for another machine than this one, of which it is not measured which types are fast.
    `chosen`, given the model, returns what says of a parameter's name whether it trains itself;
    None: an adapter is attached instead. `parallel` are the processes that hold the model together,
    of which one's part is drawn up; None: there is one. Raises `ConfigError` and `WeightsError` as
    `LemaModel` does.
    """
    device_here = None if elsewhere else backend or config.device
    opened = _opened(config, trust_remote_code, device_here)
    model = opened.model
    records = opened.records
    computing = opened.computing
    # now, when tied weights are one
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if backend is not None:  # else it plans for a device that is not here
        compute_fast(model, config, backend)
    name, stack = find_layers(model)
    dtypes = target_dtypes(model)
    device = backend or load("cpu")
    parallel = parallel or SingleProcess()
    # a reader that is never asked, and opens nothing
    stored = StoredTensors(records, dtypes, device, LayerReader())
    head, tables = open_embed_head(model, stored, config, parallel, backend or config.device)
    closed, slots = unloaded_towers(model, stored, config)
    outside = outside_layout(model, stored, name, tables.names | head.names, closed)[1]
    trained = None
    outside_bytes = outside.nbytes + outside.expanded_bytes + slots
    if chosen is None:
        whole_bytes, unmatched = _attach(model, config, device, tables, head, parallel.size)
        outside_bytes += whole_bytes
        count = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        if parallel.size > 1:
            words = head.handed_over() | tables.handed_over()
            parallel.shard(model, words)
            records = local_records(model, records, parallel)
            stored = replace(stored, records=records)
            left_out = records.keys() - words
            outside_bytes += outside_layout(model, stored, name, left_out, closed)[1].nbytes
        layers = layer_bytes(
            records, dtypes, name, len(stack), tables.names, narrow=computing.narrow
        )
        adapter = training_bytes(model, name)
    else:
        is_trained = chosen(model)
        unmatched = ()
        outside_bytes += head.keep_whole(tables, "weights of the model train")
        outside_bytes += tables.keep_whole(
            [table_name for table_name in tables.names if is_trained(table_name)]
        )
        layers = layer_bytes(
            records, dtypes, name, len(stack), tables.names, narrow=computing.narrow
        )
        trained = trained_bytes(model, layers, is_trained)
        count = trained.parameters
        adapter = trained.on_device
    embed_head = (outside_bytes, tables, head)
    trains = (adapter, count)
    return Blueprint(
        opened.directory,
        model,
        layers,
        *embed_head,
        *trains,
        opened.stored_bytes,
        parameters,
        reference_bytes=reference_bytes(config, model) if chosen is None else 0,
        trained=trained,
        cut_experts=partial(
            expert_parts, records, dtypes, name, stack, tables.names, narrow=computing.narrow
        ),
        parallel=parallel,
        computing=computing,
        unmatched=unmatched,
    )


def reference_bytes(config: LemaConfig, model: PreTrainedModel) -> int:
    """Return the bytes of what trains in a model if the settings compare with it as it is at the
    start, because then there is a copy; otherwise 0."""
    if reference_of(config) != "adapter":
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class _Files:
    """A model, and what is known of its files."""

    directory: Path
    stored_bytes: int  # of all files, a quantised base besides the original
    model: PreTrainedModel
    records: Mapping[str, Stored]  # where each of its tensors is stored
    computing: Computing  # the types of weights and of computing


def _opened(config: LemaConfig, trusted: bool, device: Backend | str | None) -> _Files:
    """Open a model's config and the headers of its tensors. Of a base that is to be quantised it is
    told where its tensors are to be, whether or not that was done already."""
    name = config.model_name_or_path
    directory = resolve_model(
        name, revision=config.revision, trust_remote_code=trusted, download=False
    )
    hf_config = read_config(directory, trust_remote_code=trusted)
    if config.rope_parameters is not None:
        set_rope(hf_config, config.rope_parameters)
    index = GlobalBinaryIndex(config.gbi_path or own_weights(name, directory))
    computing = computing_of(hf_config, index, config, device)
    model = meta_model(
        hf_config,
        computing.dtype,
        config.attn_implementation,
        trust_remote_code=trusted,
        kind=class_of_modalities(hf_config, config.modalities),
    )
    compare_classes(model, hf_config, trust_remote_code=trusted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training says them, when it begins
        records = match_names(model, index)
    kind = kind_to_quantize(config, hf_config, directory)
    if kind is None:
        return _Files(directory, index.nbytes, model, records, computing)
    stored = {
        name: computing.weights if dtype == computing.dtype else dtype
        for name, dtype in target_dtypes(model).items()
    }
    records = as_quantized(model, records, stored, kind)
    places = {id(record): record for record in records.values()}  # tied tensors share one
    nbytes = index.nbytes + sum(record.nbytes for record in places.values())
    return _Files(directory, nbytes, model, records, computing)


def _attach(
    model: PreTrainedModel,
    config: LemaConfig,
    device: Backend,
    tables: RowTables,
    head: HeadCut,
    parts: int,
) -> tuple[int, Sequence[str]]:
    """Attach the adapter of the settings, of a model that `parts` processes hold together; return
    the bytes of tables and of a head that have to be whole for it, and what is said of names that
    no module bears."""
    with tables.taken_out():
        lora = configured_lora(model, config, parts)
        if config.lora_serving is not None:
            check_served(config.lora_serving, model, lora, where="lora_serving")
        asked = copy(lora)
        inject_lora_params(model, lora, device.device, seed=None)
        touched = tables.touched()
    unmatched = () if config.adapter_name_or_path is not None else unmatched_names(model, asked)
    if not config.torch_compile:  # as `Split.adapters_changed` has it
        multiply_unmerged(model)
    why = head.touched()
    of_head = 0 if why is None else head.keep_whole(tables, why)
    return of_head + tables.keep_whole(tables.names.intersection(touched)), unmatched
