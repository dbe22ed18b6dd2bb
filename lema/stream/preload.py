"""Layers that are read once: through host memory onto the device, or into host memory to stay
there.

The processes of one machine keep one copy in host memory: each reads its share of the layers into
memory that all see. Where the device computes in host memory, that memory is then made read-only,
so that nothing can write to a layer that other processes compute with.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from lema.backend import Backend, Replicas, SlotLayout, Upload
from lema.backend.hostmemory import read_only
from lema.errors import NonFiniteError, ReadError
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.slotlayout import upload_to
from lema.stream.workers import Ticket

__all__ = ["fill"]

TOGETHER = 2  # layers being read at once: the disk is not idle while one that has arrived is copied


def fill(
    residents: Collection[int],
    host_cached: Collection[int],
    layers: Sequence[LayerBytes],
    backend: Backend,
    reader: LayerReader,
    *,
    shared: bool,
    layouts: Sequence[SlotLayout],
    loaded_layers: Mapping[int, Tensor] = {},
) -> tuple[dict[int, Upload], dict[int, Tensor]]:
    """Read the layers that stay; return the uploads of those on the device, and the others' host
    memory by layer. All processes call this, with the same layers. `layouts` say where the bytes of
    each layer's buffer go in a slot. If `shared`, all processes keep the same bytes, so that those
    of a machine need them once; else the `loaded_layers` are not read again. `ReadError`:
    reading failed, here or in another process; `NonFiniteError`: a weight is NaN or infinite, here
    or in another process."""
    if not residents and not host_cached:
        return {}, {}
    replicas = backend.replicas
    cached = sorted(host_cached)
    uploads = dict[int, Upload]()
    shared = shared and bool(cached) and replicas.local_size > 1
    memory, host = _host_memory(cached, layers, backend, loaded_layers, shared=shared)
    to_read = (
        cached[replicas.local_rank :: replicas.local_size]
        if shared
        else [layer for layer in cached if layer not in loaded_layers]
    )
    failure = None
    try:
        temporary = _read_layers(
            sorted(residents),
            layers,
            reader,
            lambda layer: backend.host_buffer(layers[layer].nbytes),
        )
        for layer, buffer in temporary:
            uploads[layer] = upload_to(
                backend.device_slots(buffer.numel(), 1), buffer, layouts[layer]
            )
            uploads[layer].wait()
            # because the buffer goes here, and the copy may still be reading it
            backend.synchronize()
            del buffer  # because the next one is made before this name is given to it
        for _ in _read_layers(to_read, layers, reader, host.__getitem__):
            pass
    except (ReadError, NonFiniteError) as error:
        failure = error  # not raised yet, because the other processes wait in `_agree`
    _agree(replicas, failure)
    if memory is not None and backend.memory().shared:
        read_only(memory)
    return uploads, host


def _host_memory(
    cached: Sequence[int],
    layers: Sequence[LayerBytes],
    backend: Backend,
    loaded_layers: Mapping[int, Tensor],
    *,
    shared: bool,
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Return the memory that the processes of this machine share, or None, and the host memory by
    layer."""
    if not shared:
        return None, {
            layer: loaded_layers[layer]
            if layer in loaded_layers
            else backend.host_buffer(layers[layer].nbytes)
            for layer in cached
        }
    sizes = [layers[layer].nbytes for layer in cached]
    memory = backend.host_buffer(sum(sizes), backend.replicas.shared_memory(sum(sizes)))
    # each a part of it that begins at a page, as layers are pages
    return memory, dict(zip(cached, memory.split(sizes), strict=True))


def _read_layers(
    layer_indices: Iterable[int],
    layers: Sequence[LayerBytes],
    reader: LayerReader,
    memory: Callable[[int], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Read layers and yield each with its buffer once it is whole, while the next is being read."""
    pending = deque[tuple[int, Tensor, Ticket]]()
    left = deque(layer_indices)
    try:
        while left or pending:
            while left and len(pending) < TOGETHER:
                layer = left.popleft()
                buffer = memory(layer)
                name = layers[layer].called(layer)
                pending.append((layer, buffer, reader.submit(layers[layer], buffer, name=name)))
            pending[0][2].wait()
            # by no name, because what is read next shall find the memory of this one
            yield pending.popleft()[:2]
    finally:
        for _, _, ticket in pending:
            ticket.cancel()  # after a failure, because no thread may read into a buffer that goes


def _agree(replicas: Replicas, failure: ReadError | NonFiniteError | None) -> None:
    """Wait for all processes; raise what failed in any of them."""
    read = isinstance(failure, ReadError)
    failures = replicas.exchange(
        None if failure is None else (read, failure.what, failure.where, failure.how)
    )
    if failure is not None:
        raise failure
    for rank, failed in enumerate(failures):
        if failed is not None:
            read, what, where, how = failed
            raise (ReadError if read else NonFiniteError)(
                f"process {rank}: {what}", where=where, how=how
            )
