"""Host memory of layers that outlives a model: what was read once is not read again, however often
a model is opened.

Reading 16 GB and locking its pages takes about as long as the steps of a row of gpu.py take, and a
row opens its model anew, because another cap or another number of micro-batches is another plan.
Layers that are the same bytes of the same files (see gpu_repeated.py) are one memory here, too: a
copy to the device takes as long from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lema.backend import Backend
from lema.stream import stream
from lema.stream.placement import LayerBytes

__all__ = ["HostWeights", "keep_host_weights"]


class HostWeights:
    """Stands in the place of `lema.stream.preload.fill`, and calls it for those layers that it does
    not hold.

    Args:
        fill: reads layers into host memory; see there.
        backend: whose host memory is kept. The plan has streams too, on a device that only keeps
            time.
    """

    def __init__(self, fill: Callable[..., Any], backend: Backend) -> None:
        self._fill = fill
        self._backend = backend
        self._memory: dict[Hashable, Tensor] = {}

    def __call__(
        self,
        residents: Collection[int],
        host_cached: Collection[int],
        layers: Sequence[LayerBytes],
        backend: Backend,
        *arguments: Any,
        loaded_layers: Mapping[int, Tensor] = {},
        **options: Any,
    ) -> tuple[Any, dict[int, Tensor]]:
        """Return what `fill` returns. Memory of `loaded_layers`, for a moment, is not kept,
        because it is used anew.
        """
        if backend is not self._backend or loaded_layers:
            uploads, host = self._fill(
                residents,
                host_cached,
                layers,
                backend,
                *arguments,
                loaded_layers=loaded_layers,
                **options,
            )
            return uploads, host
        sources = {number: _source(layers[number]) for number in host_cached}
        unread = {
            source: number for number, source in sources.items() if source not in self._memory
        }
        uploads, read = self._fill(
            residents, set(unread.values()), layers, backend, *arguments, **options
        )
        self._memory.update({source: read[number] for source, number in unread.items()})
        return uploads, {number: self._memory[source] for number, source in sources.items()}


def keep_host_weights(backend: Backend) -> None:
    """Have every model that this process opens on a backend from now on keep its host memory."""
    if not isinstance(stream.fill, HostWeights):
        stream.fill = HostWeights(stream.fill, backend)


def _source(layer: LayerBytes) -> Hashable:
    """Return what tells two layers apart in memory: which bytes of which files go where."""
    cast = (
        (
            cast.record.file,
            cast.record.offset,
            cast.record.nbytes,
            cast.target.offset,
            cast.target.dtype,
            cast.move,
        )
        for cast in layer.casts
    )
    return layer.nbytes, layer.runs, tuple(cast)
