"""Moves every tensor of a checkpoint to its place in a new file: copied, cast, converted, or taken from the model.

Copying and casting hold a few megabytes. A conversion holds its sources and its results; while results are being
written, a thread makes the next ones, if both together stay within the size of two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.convert.buffers import LargeInScratch, ReadAhead, Scratch
from lema.convert.quantize import Quantizer
from lema.convert.tensors import bytes_of, read_tensor, read_tensors, write_cast
from lema.model.skeleton import find_layers
from lema.model.weight_names import Conversion, NameMap
from lema.storage import TensorFile
from lema.storage.header import TensorRecord

__all__ = ["transfer"]

Origin = TensorRecord | Conversion | Tensor  # on disk as it is, to be made, or in the model itself


def transfer(
    out: TensorFile,
    order: list[str],
    model: PreTrainedModel,
    names: NameMap,
    dtypes: Mapping[str, torch.dtype],
    quantizer: Quantizer | None = None,
) -> None:
    """Write every tensor of a model, which is without weights but has its buffers, in the order of `order`.

    Each of these names was announced to `out`, or the parts that `quantizer` makes of it. `names` say where each tensor
    comes from, and `dtypes` in which type it is written.

    Raises:
        ReadError, ModelError: a tensor could not be read, or is stored in a form no model computes with.
        DiskError: the bytes could not be written.
    """
    plan = _plan(order, names, model.state_dict())
    memory, room = Scratch(), 2 * _largest_layer(model, out)
    conversions = [origin for _, origin in plan if isinstance(origin, Conversion)]
    sizes = {c.first: sum(prod(shape) * dtypes[c.first].itemsize for shape in c.shapes.values()) for c in conversions}

    def read(records: list[TensorRecord], dtype: torch.dtype) -> Iterator[Tensor]:
        for record, tensor in zip(records, read_tensors(records, dtype, memory), strict=True):
            ahead.advance(record.nbytes)
            yield tensor

    def make(conversion: Conversion) -> dict[str, Tensor]:
        with LargeInScratch(memory):
            return conversion.run(model, read, dtypes[conversion.first])

    def both_fit(written: Conversion, made: Conversion) -> bool:
        return sizes[written.first] + 2 * sizes[made.first] <= room  # what is made, and what it is made of

    sources = [record for _, origin in plan for record in _records(origin)]
    with ReadAhead(sources) as ahead, closing(_made_ahead(conversions, make, both_fit)) as made:
        for name, origin in plan:
            if isinstance(origin, TensorRecord):
                if quantizer is not None and name in quantizer.chosen:
                    quantizer.write(out, name, read_tensor(origin, dtypes[name]))
                else:
                    write_cast(out, name, origin, dtypes[name])
                ahead.advance(origin.nbytes)
            elif isinstance(origin, Conversion):
                _write_made(out, next(made), names, dtypes, quantizer)
            else:
                out.write(name, [bytes_of(origin)])


def _plan(order: list[str], names: NameMap, state: Mapping[str, Tensor]) -> list[tuple[str, Origin]]:
    """Say in which order to write what from where; a conversion stands for all that come out of it."""
    plan: list[tuple[str, Origin]] = []
    converted: dict[str, Conversion] = {next(iter(conversion.shapes)): conversion for conversion in names.conversions}
    for name in order:
        stored = names.tied.get(name, name)
        if stored in names.direct:
            origin = names.direct[stored]
            assert isinstance(origin, TensorRecord), f"{name} is quantised, and would be written as it is"
            plan.append((name, origin))
        elif stored in names.kept:
            plan.append((name, state[stored]))
        elif name in converted:
            plan.append((name, converted[name]))
    return plan


def _records(origin: Origin) -> list[TensorRecord]:
    if isinstance(origin, Conversion):
        return [record for _, record in origin.sources]
    return [origin] if isinstance(origin, TensorRecord) else []


def _write_made(
    out: TensorFile,
    made: dict[str, Tensor],
    names: NameMap,
    dtypes: Mapping[str, torch.dtype],
    quantizer: Quantizer | None,
) -> None:
    """Write what came out of a conversion, each also under the names that share its weights, letting go of it then."""
    for key in list(made):
        tensor = made.pop(key)
        for target in (key, *(other for other, stored in names.tied.items() if stored == key)):
            if quantizer is not None and target in quantizer.chosen:
                quantizer.write(out, target, tensor.to(dtypes[target]))
            else:
                out.write(target, [bytes_of(tensor.to(dtypes[target]))])


def _made_ahead(
    conversions: list[Conversion],
    make: Callable[[Conversion], dict[str, Tensor]],
    both_fit: Callable[[Conversion, Conversion], bool],
) -> Generator[dict[str, Tensor]]:
    """Yield what each conversion makes. The next is made while the caller writes the last, if they fit in memory."""
    with ThreadPoolExecutor(1, thread_name_prefix="lema-convert") as pool:
        under_way: Future[dict[str, Tensor]] | None = None
        for number, conversion in enumerate(conversions):
            made = under_way.result() if under_way else make(conversion)
            following = conversions[number + 1 : number + 2]
            under_way = pool.submit(make, *following) if following and both_fit(conversion, *following) else None
            yield made


def _largest_layer(model: PreTrainedModel, out: TensorFile) -> int:
    """Return the bytes of the largest decoder layer, as it is written."""
    layers_name, layers = find_layers(model)
    sizes = [0] * len(layers)
    for name, record in out.records.items():
        if name.startswith(f"{layers_name}."):
            sizes[int(name.removeprefix(f"{layers_name}.").partition(".")[0])] += record.nbytes
    return max(sizes)
