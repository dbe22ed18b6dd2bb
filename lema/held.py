"""What one process holds of a model that several hold together: its part of each tensor, and the whole of it again.

A backend's `Parallel.shard` divides the decoder layers and leaves on each parameter how it lies (`lema.layout`), as its
attribute `parallel_layout`. What has none is whole in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from peft import PeftModel
from torch import Tensor, nn

from lema.errors import ConfigError
from lema.layernames import WRAPPED
from lema.layout import Layout, consolidate, places, shard
from lema.partrecord import PartRecord, part_of
from lema.quantized.records import QuantizedRecord, Stored

if TYPE_CHECKING:
    from lema.backend import Parallel

__all__ = [
    "held_adapter",
    "held_record",
    "held_records",
    "held_tensor",
    "layout_of",
    "layouts_of",
    "whole_adapter",
    "whole_tensor",
]


def layout_of(parameter: Tensor) -> Layout | None:
    """Return how a parameter lies over the processes; None: every one has the whole of it."""
    layout: Layout | None = getattr(parameter, "parallel_layout", None)
    return layout


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    """Return how each parameter that is divided lies, by its name in the model without adapters."""
    named = ((WRAPPED.sub("", name), layout_of(parameter)) for name, parameter in model.named_parameters())
    return {name: layout for name, layout in named if layout is not None}


def held_record(record: Stored, layout: Layout | None, rank: int) -> Stored | PartRecord:
    """Return what of a stored tensor one process reads.

    Raises:
        ConfigError: it is stored quantised, and such a tensor is not divided.
    """
    if layout is None or layout.kind == "replicated":
        return record
    if isinstance(record, QuantizedRecord):
        raise ConfigError(
            f"{record.name} is stored quantised, and would have to be divided among processes",
            where="tensor_parallel_size",
            how="open the model as it was before it was quantised, or give each process the whole of it",
        )
    size = record.shape[layout.dim]
    ranges = [(start, start + length) for start, length in places(layout, size, rank)]
    assert all(stop <= size for _, stop in ranges), f"{record.name} would have to be padded"
    return part_of(record, layout.dim, ranges)


def held_records(model: nn.Module, records: Mapping[str, Stored], parallel: Parallel) -> dict[str, Stored | PartRecord]:
    """Return what one process reads of each stored tensor of a model whose layers have been divided.

    Raises:
        ConfigError: as `held_record`.
    """
    layouts = layouts_of(model)
    return {name: held_record(record, layouts.get(name), parallel.rank) for name, record in records.items()}


def held_tensor(parallel: Parallel, whole: Tensor, layout: Layout | None) -> Tensor:
    """Return this process's part of a tensor."""
    if layout is None or parallel.size == 1:
        return whole
    return shard(whole, layout, parallel.rank)


def whole_tensor(parallel: Parallel, part: Tensor, layout: Layout | None) -> Tensor:
    """Put a tensor together from the parts of all processes, each of which calls this; in host memory.

    Raises:
        DataError: what several processes hold alike is not the same in all of them.
    """
    if parallel.size == 1:
        return part.detach().cpu()
    parts = [one.detach().cpu() for one in parallel.gather(part.detach())]
    return consolidate(parts, layout or Layout("replicated", parallel.size))


def whole_adapter(model: PeftModel, parallel: Parallel) -> dict[str, Tensor] | None:
    """Put everything that trains together, by its name in PEFT's model; every process calls this. None: it is whole.

    Raises:
        DataError: what several processes hold alike is not the same in all of them.
    """
    if parallel.size == 1:
        return None
    return {
        name: whole_tensor(parallel, parameter, layout_of(parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def held_adapter(model: PeftModel, parallel: Parallel, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's parts of an adapter as it is in PEFT's file, by the same names."""
    if parallel.size == 1:
        return dict(saved)
    layouts = {name.replace(".default", ""): layout_of(one) for name, one in model.named_parameters()}
    return {name: held_tensor(parallel, tensor, layouts.get(name)) for name, tensor in saved.items()}
