"""A model that is open: its skeleton, where its weights are, and the device, made once from its
settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lema.backend import Backend
from lema.backend.trace import NO_TRACE, NoTrace
from lema.config import LemaConfig
from lema.convert.quantized_base import with_quantized_base
from lema.data.forms import beyond_positions, num_positions
from lema.engine.numerics import Numerics
from lema.engine.padding import Padding, padding_of
from lema.errors import ConfigError
from lema.lora.class_names import class_of_modalities, compare_classes
from lema.model import Split, meta_model
from lema.model.computing import Computing, computing_of
from lema.model.files import ModelFiles
from lema.model.outer_weights import StoredTensors, draw_head, layer_bytes
from lema.model.partition import local_records, open_backend
from lema.model.skeleton import compute_fast, find_layers, other_outputs
from lema.model.weight_names import match_names, target_dtypes
from lema.storage import GlobalBinaryIndex
from lema.stream.firstreads import FirstReads
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.weightcheck import BaseGuard
from lema.train.opened.outer import OuterWeights

__all__ = ["OpenedModel", "open_model"]


@dataclass(frozen=True)
class OpenedModel:
    """What opening a model makes, before an adapter is attached and memory is spent on layers."""

    files: ModelFiles  # its directory, opened
    backend: Backend
    gbi: GlobalBinaryIndex  # of its weights
    computing: Computing  # the types of weights and of computing
    skeleton: PreTrainedModel  # its parameters on `meta` but for those outside the layers
    fused: str | None  # what is computed by the device's own kernels
    stored: StoredTensors  # where its weights are, by name in the model without adapters
    outer: OuterWeights  # those outside the decoder layers
    split: Split
    padding: Padding
    trace: NoTrace  # has every read, upload and computation with its time
    scores: bool  # whether it scores texts
    head_generator: Tensor | None  # the generator after the head was drawn; None: it was not
    numerics: Numerics

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self.files.directory

    @property
    def stored_bytes(self) -> int:
        """Bytes of the model's weights on disk, the original of a quantised base included."""
        quantized = self.files.quantized
        return self.gbi.nbytes + (0 if quantized is None else quantized.base_bytes)

    def layers(self) -> list[LayerBytes]:
        """Return the decoder layers as bytes: of processes that hold the model together, this one's
        part of each.
        """
        self.outer.divide(self.split)
        return layer_bytes(
            local_records(self.skeleton, self.stored.records, self.backend.parallel),
            self.stored.dtypes,
            self.split.layers_name,
            self.split.num_layers,
            self.outer.tables.names,
            narrow=self.computing.narrow,
        )

    def close(self, *, keep_backend: bool = False) -> None:
        """Stop reading, and let numbers come out as before. With `keep_backend` the caller
        continues to use the device.
        """
        self.outer.close()
        self.stored.reader.close()
        if self.files.quantized is not None:
            self.files.quantized.release()
        (self.backend.synchronize if keep_backend else self.backend.close)()
        self.numerics.put_back()


def open_model(
    config: LemaConfig,
    *,
    backend: Backend | None = None,
    files: ModelFiles | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
    num_labels: int | None = None,
) -> OpenedModel:
    """Open a model: read its config, the headers of its tensors, and the weights outside its
    decoder layers. The arguments and errors are those of `LemaModel`."""
    files = files or ModelFiles(config, trust_remote_code=trust_remote_code)
    files = with_quantized_base(files, config)
    hf_config = _own_config(files, config)
    backend = backend or open_backend(config)
    gbi = GlobalBinaryIndex(files.weights)
    computing = computing_of(hf_config, gbi, config, backend)
    notes = (*computing.notes, *beyond_positions(hf_config, config))
    _warn_of_config(hf_config, notes if backend.replicas.first else ())
    if scores := num_labels is not None:
        hf_config.num_labels = num_labels
    skeleton = meta_model(
        hf_config,
        computing.dtype,
        config.attn_implementation,
        trust_remote_code=trust_remote_code,
        scores=scores,
        kind=None if scores else class_of_modalities(hf_config, config.modalities),
    )
    compare_classes(skeleton, hf_config, trust_remote_code=trust_remote_code)
    fused = compute_fast(skeleton, config, backend)
    records = match_names(skeleton, gbi)
    guard = BaseGuard(records) if config.check_base_weights else None
    reader = LayerReader(trace=trace, guard=guard, first_reads=FirstReads())
    stored = StoredTensors(records, target_dtypes(skeleton), backend, reader)
    outer = OuterWeights(skeleton, stored, config, backend, find_layers(skeleton)[0])
    return OpenedModel(
        files=files,
        backend=backend,
        gbi=gbi,
        computing=computing,
        skeleton=skeleton,
        fused=fused,
        stored=stored,
        outer=outer,
        split=Split(
            skeleton,
            backend,
            compiled=config.torch_compile,
            fast=config.arithmetic == "fast",
            tables=outer.tables,
            cast=computing.autocast,
        ),
        padding=padding_of(config, backend.parallel.size, num_positions(hf_config, config)),
        trace=trace,
        scores=scores,
        head_generator=draw_head(skeleton, backend.device, config.seed) if scores else None,
        # last: a model that is not opened closes nothing
        numerics=Numerics(config.tf32, config.deterministic),
    )


def _own_config(files: ModelFiles, config: LemaConfig) -> PreTrainedConfig:
    """Return a copy of the model's config, whose type is that of the settings."""
    hf_config = deepcopy(files.config)
    if config.model_type is not None and config.model_type != hf_config.model_type:
        what = f"the model is of type {hf_config.model_type!r}, not {config.model_type!r}"
        where = str(files.directory / "config.json")
        raise ConfigError(what, where=where, how="correct model_type, or remove it")
    return hf_config


def _warn_of_config(hf_config: PreTrainedConfig, notes: Sequence[str]) -> None:
    """Warn of what there is to note on how it is computed, and of outputs that are not made."""
    for note in notes:
        warnings.warn(note, stacklevel=4)
    if ignored_outputs := other_outputs(hf_config):
        what = (
            f"config.json sets {' and '.join(ignored_outputs)}, which changes no number, "
            "and streamed layers do not do"
        )
        warnings.warn(f"{what}: the model returns logits and a loss", stacklevel=4)
