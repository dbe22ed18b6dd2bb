"""One use of memory by an open model: the plan of it, the stream of layers, and the model as the
trainer drives it.

Memory is spent anew where something changes that the plan goes by, as when an adapter is attached.
Then what was made here is dropped whole, and made again whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lema.backend.contextgroup import join_context
from lema.config import LemaConfig
from lema.engine import StreamedModel
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.head.objectives import loss_settings_of, without_dropout
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.reference_rows import StartingAdapter
from lema.engine.layers.saving import Activations
from lema.engine.optim import training_bytes
from lema.model.outer_weights import ExpertParts, expert_parts
from lema.model.sequence.division import RowDivision
from lema.model.sequence.host_keys import HostKeys
from lema.plan import Allocation
from lema.plan.advice import advise
from lema.plan.allocate import whether_recomputed
from lema.plan.blueprint import Blueprint, reference_bytes
from lema.plan.planner import Planner, fitted_planner, opened_planner
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.train.opened.model import OpenedModel
from lema.train.steps import warn_of_no_use

__all__ = ["MemoryUse", "planner_of_opened"]


class MemoryUse:
    """What a model's memory is spent on, and what is in it; each part is made at its first use.

    Args:
        opened: the model, with its adapter if it is to have one.
        config: the settings as they are now.
        num_adapter_parameters: how many parameters the adapter has; 0: there is none.
        reference: the adapter that preference losses compare with.
        choose: is given the settings that the plan has chosen for a training.
        allocation: how memory is used; None: as the plan finds best within the limits.
        planner: the planner, where there is one already; None: it is made at its first use.
    """

    def __init__(
        self,
        opened: OpenedModel,
        config: LemaConfig,
        *,
        num_adapter_parameters: int,
        reference: StartingAdapter | None,
        choose: Callable[[Mapping[str, Any]], None] | None,
        allocation: Allocation | None = None,
        planner: Planner | None = None,
    ) -> None:
        self._opened = opened
        self._config = config
        self._num_adapter_parameters = num_adapter_parameters
        self._reference = reference
        self._choose = choose
        self._allocation = allocation
        self._planner = planner
        self._layers: list[LayerBytes] | None = None
        self._stream: LayerStream | None = None
        self._streamed: StreamedModel | None = None

    @property
    def planner(self) -> Planner:
        """The planner, which finds the best use of memory for the model and the step of its
        settings.
        """
        if self._planner is None:
            self.load_residents()  # because free memory is looked at
            planner = planner_of_opened(self._opened, self._config, self._num_adapter_parameters)
            self._planner = fitted_planner(planner, trains=self._choose is not None)
        return self._planner

    @property
    def allocation(self) -> Allocation:
        """How memory is used within the limits; `MemoryLimitError`: they are too small."""
        if self._allocation is None:
            self._allocation = self.planner.needs().allocation
            if self._choose is not None:
                self._config = self._config.model_copy(update=self.planner.chosen)
                self._choose(self.planner.chosen)
        return self._allocation

    @property
    def stream(self) -> LayerStream:
        """The stream of layers. Each of several processes makes its own, at the same time."""
        if self._stream is None:
            self._stream = self._open_stream()
        return self._stream

    @property
    def streamed(self) -> StreamedModel:
        """The model as the trainer drives it: visits of leased layers."""
        if self._streamed is None:
            self._streamed = self._open_streamed()
        return self._streamed

    @property
    def _parts(self) -> ExpertParts:
        """The layers as they are leased: with experts in groups, if memory is spent so."""
        if self.allocation.experts and self.planner.blueprint.parts is not None:
            return self.planner.blueprint.parts
        if self._layers is None:
            self._layers = self._opened.layers()
        return ExpertParts(tuple(self._layers))

    def head_in_pieces(self) -> PiecedHead | None:
        """Return the head in pieces, which are leased after the layers; None: it is on the
        device.
        """
        opened = self._opened
        return opened.outer.head.pieced(opened.split, opened.backend, self._parts.leased)

    def in_another_way(self, allocation: Allocation) -> MemoryUse:
        """Drop the layers, and return another use of memory by the same planner."""
        self.leave()
        return MemoryUse(
            self._opened,
            self._config,
            num_adapter_parameters=self._num_adapter_parameters,
            reference=self._reference,
            choose=self._choose,
            allocation=allocation,
            planner=self._planner,
        )

    def load_residents(self) -> None:
        """Wait until all layers that stay on the device are there, if they were begun with."""
        if self._stream is not None:
            self._stream.load_residents()

    def leave(self) -> None:
        """Drop the layers; their reader may be used on."""
        if self._stream is not None:
            self._stream.leave()
        if self._streamed is not None:
            self._streamed.close()

    def close(self) -> None:
        """Drop the layers, and stop reading."""
        if self._streamed is not None:
            self._streamed.close()
        if self._stream is not None:
            self._stream.close()

    def _open_stream(self) -> LayerStream:
        opened = self._opened
        allocation = self.allocation
        for name in ("shard_weights", "shard_optimizer"):
            if getattr(self._config, name) and opened.backend.replicas.size == 1:
                warnings.warn(
                    f"{name} does nothing in one process: torchrun starts several", stacklevel=4
                )
        if not allocation.pieces:
            opened.outer.keep_head()
        leased, groups = self._parts.numbered(opened.outer.head.pieces(self._parts.leased))
        return LayerStream(
            leased,
            opened.backend,
            groups=groups,
            prefetch_depth=allocation.slots - 1,
            residents=allocation.residents,
            host_cached=allocation.host_cached,
            sharded=self._config.shard_weights,
            reader=opened.stored.reader,
            trace=opened.trace,
        )

    def _open_streamed(self) -> StreamedModel:
        opened = self._opened
        backend = opened.backend
        stream = self.stream  # first, because it settles where the head is
        config = self._config
        allocation = self.allocation
        warn_of_no_use(config, shared=backend.memory().shared, lazy=opened.split.lazy)
        chunk = config.sequence_chunk
        chunk = self.planner.shape.micro_batch.chunk if chunk == "auto" else chunk
        tile = config.mlp_tile_tokens
        tile = self.planner.shape.micro_batch.tile if tile == "auto" else tile
        recompute = whether_recomputed(config)
        loss = loss_settings_of(config, backend.replicas.size)
        if loss.objective is not None:
            without_dropout(opened.skeleton)
        activations = Activations(
            opened.split,
            backend,
            stream.trace,
            recompute=allocation.recompute if recompute is None else recompute,
            # none where sequences go through layers in chunks, which have no graph to keep
            saved=allocation.saved if chunk is None and not config.cuts_sequences else (),
            products=allocation.products,
            saved_on=allocation.saved_on,
            boundaries=allocation.boundaries,
            offload_dir=Path(config.offload_dir or config.output_dir),
            at_once=config.activation_offloading == "legacy",
        )
        return StreamedModel(
            opened.split,
            stream,
            backend,
            activations=activations,
            loss_chunk_tokens=config.loss_chunk_tokens or CHUNK_TOKENS,
            padding=opened.padding,
            head=self.head_in_pieces(),
            runs_again=allocation.runs_again,
            advise=partial(advise, self.planner, allocation),
            loss=loss,
            reference=self._reference,
            sequence_chunk=chunk,
            division=self._division(chunk),
            host_keys=HostKeys(backend) if self._keys_in_host else None,
            tile_tokens=tile,
        )

    @property
    def _keys_in_host(self) -> bool:
        """Whether keys and values wait in host memory between chunks."""
        keys_values = self._config.keys_values
        if keys_values == "auto":
            return self.planner.shape.micro_batch.host_keys
        return keys_values == "host"

    def _division(self, chunk: int | None) -> RowDivision | None:
        """Return how processes divide rows; None: each has rows of its own, as one that is alone
        has, which may generate and evaluate so.
        """
        config = self._config
        size = config.context_parallel_size
        replicas = self._opened.backend.replicas
        if size is None or replicas.num_processes == 1:
            return None
        return RowDivision(join_context(replicas, size), chunk)


def planner_of_opened(
    opened: OpenedModel, config: LemaConfig, num_adapter_parameters: int
) -> Planner:
    """Return the planner of a model that is open, before anything is chosen."""
    skeleton = opened.skeleton
    split = opened.split
    outer = opened.outer
    layers = opened.layers()  # first, because it divides what lies outside of them
    stored = opened.stored
    blueprint = Blueprint(
        directory=opened.directory,
        model=skeleton,
        layers=layers,
        outside_bytes=outer.nbytes,
        tables=outer.tables,
        head=outer.head,
        adapter_bytes=training_bytes(skeleton, split.layers_name),
        adapter_parameters=num_adapter_parameters,
        stored_bytes=opened.stored_bytes,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        reference_bytes=reference_bytes(config, skeleton),
        cut_experts=partial(
            expert_parts,
            stored.records,
            stored.dtypes,
            split.layers_name,
            split.layers,
            outer.tables.names,
            narrow=opened.computing.narrow,
        ),
        parallel=opened.backend.parallel,
        computing=opened.computing,
    )
    return opened_planner(config, blueprint, opened.backend)
