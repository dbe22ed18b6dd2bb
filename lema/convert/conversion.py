"""A model on its way into files in the order in which it is streamed: what is before the layers,
layer by layer, and what is after them.

It says what is written, in sections that are each a run of bytes, and writes any of them. `prepare`
writes all of them into one file, and `lema.convert.quantized_base` a file for each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lema.convert.hubformat import published_skeleton
from lema.convert.published import PublishedForm
from lema.convert.quantize import Quantizer
from lema.convert.readable import read_as_they_are
from lema.convert.tensors import METADATA, write_cast
from lema.errors import ModelError
from lema.lora.class_names import compare_classes
from lema.model import meta_model, read_config
from lema.model.skeleton import find_layers, main_dtype
from lema.model.weight_names import NameMap, checkpoint_dtype, target_dtypes
from lema.storage import GlobalBinaryIndex, TensorFile, resolve_model
from lema.storage.header import DTYPE_BITS
from lema.storage.hub import own_weights
from lema.storage.index import ORIGIN_MARK, SOURCES_MARK, origin_of
from lema.storage.tensorfile import TensorSpec, run_order, tensor_file
from lema.storage.verify import base_fingerprint

__all__ = ["Conversion", "Progress", "Section", "Source", "opened_source"]

Source = str | PathLike[str] | PreTrainedModel
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class OpenedSource:
    """A model that is about to be written."""

    model: PreTrainedModel  # of the class that is published; on `meta`, where it is of files
    dtypes: Mapping[str, torch.dtype]  # what each of its tensors is written as
    rename: Callable[[str], str]  # from its names to those in the class that trains
    # the classes that shall read it, and their names
    readers: Sequence[tuple[PreTrainedModel, Callable[[str], str]]]
    index: GlobalBinaryIndex | None = None
    names: NameMap | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config

    def form(self, *, assembled: bool) -> PublishedForm:
        """Return the form in which it is written."""
        readable = read_as_they_are(self.model, self.readers) if assembled else None
        return PublishedForm(self.model, self.names or NameMap(), self.index, self.dtypes, readable)


def opened_source(source: Source, dtype: torch.dtype | None, trust: bool) -> OpenedSource:
    """Open a model that is to be written. Errors are those of `prepare`.

    Args:
        source: a model in memory, or where one is.
        dtype: what it is written in; None: as `from_pretrained` loads it.
        trust: whether the model's own code may run.
    """
    if isinstance(source, PreTrainedModel):
        return OpenedSource(source, _dtypes_in_memory(source, dtype), str, [(source, str)])
    directory = resolve_model(source)
    index = GlobalBinaryIndex(own_weights(source, directory))
    config = read_config(directory, trust_remote_code=trust)
    chosen = checkpoint_dtype(config, index, dtype)
    model, names, changes = published_skeleton(config, index, chosen, trust_remote_code=trust)
    trains = meta_model(deepcopy(config), chosen, trust_remote_code=trust)
    rename = compare_classes(trains, config, trust_remote_code=trust).in_own
    readers: list[tuple[PreTrainedModel, Callable[[str], str]]] = [(model, str)]
    readers += [] if type(trains) is type(model) else [(trains, rename)]
    state = model.state_dict()
    # What is not loaded is not widened either.
    dtypes = target_dtypes(model) | {name: state[name].dtype for name in names.unstored_buffers}
    return OpenedSource(model, dtypes, rename, readers, index, names, changes)


@dataclass(frozen=True)
class Section:
    """A run of bytes: a decoder layer, or what is before or after the layers."""

    layer: str  # the layer's number; empty: it is none
    names: tuple[str, ...]  # of what is written, in the form in which it is published
    specs: tuple[TensorSpec, ...]  # the tensors of the file, in the order of their bytes

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(prod(shape) * DTYPE_BITS[dtype] // 8 for _, dtype, shape in self.specs)


class Conversion:
    """What is written of a model, and the writing.

    Args:
        source: the model.
        quantize: what the weights of linear modules become; None: they stay as they are.
        assembled: whether tensors that are published in pieces are put together.
        measured: whether it is measured what quantising costs in precision.

    Raises:
        ConfigError: the library that quantises is not installed.
        ModelError: there is nothing to quantise, or the model has no single stack of layers.
    """

    def __init__(
        self,
        source: OpenedSource,
        *,
        quantize: str | None,
        assembled: bool,
        measured: bool = True,
    ) -> None:
        self.source = source
        self.form = source.form(assembled=assembled)
        self.quantizer = (
            None
            if quantize is None
            else Quantizer.of(
                quantize, source.model, source.dtypes, self.form.file_names, measured=measured
            )
        )
        self._assembled = assembled
        self.sections = tuple(self._sections())

    def _sections(self) -> Iterable[Section]:
        prefix = f"{find_layers(self.source.model)[0]}."

        def layer(spec: TensorSpec) -> str:
            owner = self.form.owner(spec[0])
            in_layer = owner.startswith(prefix)
            return owner.removeprefix(prefix).partition(".")[0] if in_layer else ""

        for number, group in groupby(self.form.specs(parted=self._assembled), layer):
            group_specs = tuple(group)
            specs = [part for spec in group_specs for part in self._parts(spec)]
            yield Section(
                number,
                tuple(name for name, _, _ in group_specs),
                tuple(sorted(specs, key=run_order)),
            )

    def _parts(self, spec: TensorSpec) -> list[TensorSpec]:
        return [spec] if self.quantizer is None else self.quantizer.specs(spec)

    @cached_property
    def origin(self) -> dict[str, str]:
        """The entries for the header of a file by which adapters of the source are known to be of
        the file, too; none for a model in memory."""
        if (index := self.source.index) is None:
            return {}
        # each once: what changes nothing adds none
        sources = dict.fromkeys((*index.sources, base_fingerprint(index)))
        return {ORIGIN_MARK: origin_of(index), SOURCES_MARK: " ".join(sources)}

    @cached_property
    def _names(self) -> set[str]:
        return {name for section in self.sections for name in section.names}

    @cached_property
    def _described(self) -> dict[str, str]:
        """What a library says of all tensors in the header of a file."""
        assert self.quantizer is not None
        return self.quantizer.metadata(
            [name for section in self.sections for name in section.names]
        )

    @property
    def changes(self) -> dict[str, Any]:
        """What the `config.json` of what is written says otherwise than that of the source."""
        changes = dict(self.source.changes)
        if (quantizer := self.quantizer) is not None:
            return changes | {
                "quantization_config": quantizer.settings(self.source.rename),
                "dtype": quantizer.dtype,
            }
        # What was quantised is written expanded.
        if self.source.names is not None and self.source.names.quantized:
            changes |= {"quantization_config": None, "dtype": main_dtype(self.source.model)}
        return changes

    def write(
        self, file: Path, sections: Sequence[Section], progress: Progress | None = None
    ) -> None:
        """Write some sections into a file, which appears when it is complete. `progress` is called
        with the bytes that were given to the disk, and how many there are in all. `DiskError`: the
        file cannot be written; other errors are those of `read_tensor`."""
        names = [name for section in sections for name in section.names]
        specs = [spec for section in sections for spec in section.specs]
        metadata = METADATA if self._assembled else {"format": "pt"}
        if self.quantizer is not None:
            # What is said of all tensors is in each file, because a reader of several takes what
            # the last one says.
            elsewhere = self._names - set(names)
            metadata = {
                key: about for key, about in self._described.items() if key not in elsewhere
            }
        with tensor_file(file, specs, metadata | self.origin, progress) as out:
            for name in names:
                self._write(out, name)

    def _write(self, out: TensorFile, name: str) -> None:
        tensor = self.form.tensors[name]
        if self.quantizer is not None and name in self.quantizer.chosen:
            self.quantizer.write(out, name, self.form.read(self.form.owner(name)))
        elif (record := self.form.copied(name)) is not None and tensor.dtype is not None:
            write_cast(out, name, record, tensor.dtype)
        else:
            out.write(name, self.form.pieces(name))


def _dtypes_in_memory(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return what each tensor of a model in memory is written as, or raise `ModelError` where it
    cannot be.
    """
    state = model.state_dict()
    if absent := [name for name, tensor in state.items() if tensor.device.type == "meta"]:
        what = f"{len(absent)} tensors of the model have no weights, {absent[0]} for one"
        how = "load the model without offloading, or give its directory"
        raise ModelError(what, where=type(model).__name__, how=how)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            "the model carries adapters", where=type(model).__name__, how="prepare the base model"
        )
    if dtype is None:
        return {name: tensor.dtype for name, tensor in state.items()}
    return target_dtypes(meta_model(deepcopy(model.config), dtype))
