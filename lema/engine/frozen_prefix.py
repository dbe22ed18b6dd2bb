"""What the frozen layers at the bottom make of each micro-batch, kept on disk from one epoch to the next.

Where nothing below a layer trains and nothing there is drawn at random, the same micro-batch arrives at that layer the
same in every epoch, bit for bit. It is known again by its tokens and masks: rows one by one would not do, since the
products of a layer may round otherwise in other company.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from lema.activations.boundaries import as_bytes, placed
from lema.backend import Backend
from lema.backend.trace import NO_TRACE, NoTrace
from lema.errors import ConfigError
from lema.storage.spillfile import OffloadFile, whole_blocks

__all__ = ["PrefixCache"]


NUM_BUFFERS = 3  # hidden states on their way to or from the disk
Key = bytes


class PrefixCache:
    """Hidden states at the input of one layer, by micro-batch.

    Args:
        backend: the device.
        layer: the lowest layer that gradients reach; those below it are what is spared.
        directory: where the file lies, which has no name and ends with this object.
        num_tokens: of all micro-batches that will be kept, padding included.
        trace: records transfers.

    Raises:
        ConfigError: there is no layer to spare.
        DiskError: no file can be made.
    """

    def __init__(
        self, backend: Backend, layer: int, directory: Path, num_tokens: int, trace: NoTrace = NO_TRACE
    ) -> None:
        if layer == 0:
            raise _refusal("gradients reach the lowest layer: there is none below it to be spared")
        self.layer = layer
        self._backend, self._num_tokens = backend, num_tokens
        how = "free some space, set offload_dir to a directory on another disk, or set cache_frozen_prefix: false"
        self._file = OffloadFile(directory, "the output of frozen layers", how, trace)
        self._num_buffers = 0
        self._free: deque[tuple[Tensor, Future[None] | None]] = deque()  # with the write that must end first
        self._places: dict[Key, tuple[int, Tensor, Future[None]]] = {}
        self._end = 0

    def holds(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether every one of these has been kept."""
        return all(_key(batch) in self._places for batch in micro_batches)

    def keep(
        self, micro_batches: Sequence[Mapping[str, Tensor]], hidden: Sequence[Tensor], *, drawn: bool, handed_on: bool
    ) -> None:
        """Keep the hidden states of those micro-batches that are not kept yet.

        Args:
            micro_batches: what arrived.
            hidden: as what it arrives at the layer.
            drawn: whether anything was drawn at random on the way.
            handed_on: whether more than the hidden state arrived.

        Raises:
            ConfigError: it is not the same in every epoch, or not all there is.
            DiskError: the disk has no room for those of all micro-batches, or fails.
        """
        if drawn:
            raise _refusal("the layers below the adapters draw at random (dropout): each epoch they make something new")
        if handed_on:
            raise _refusal("the layers below the adapters hand on more than the hidden state")
        for batch, state in zip(micro_batches, hidden, strict=True):
            if (key := _key(batch)) in self._places:
                continue
            like = torch.empty_like(state, device="meta", requires_grad=False)
            nbytes = whole_blocks(like.nbytes)
            if not self._places:
                self._file.reserve(nbytes * -(-self._num_tokens // batch["input_ids"].numel()))
            # Beyond what was reserved at first, because the last block of each state is not full.
            self._file.reserve(self._end + nbytes)
            buffer = self._buffer(nbytes)
            placed(buffer, like).copy_(state.detach())
            written = self._file.write(as_bytes(buffer[:nbytes]), self._end)
            self._free.append((buffer, written))
            self._places[key] = self._end, like, written
            self._end += nbytes

    def fetch(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
        """Return the hidden states of these, on the device.

        Raises:
            ReadError: one could not be read; DiskError: it could not be written.
        """
        found: list[Tensor] = []
        reads: deque[tuple[Tensor, Tensor, Future[None]]] = deque()
        for batch in micro_batches:
            if len(reads) == NUM_BUFFERS:  # because every buffer is being read into
                found.append(self._arrived(*reads.popleft()))
            offset, like, written = self._places[_key(batch)]
            nbytes = whole_blocks(like.nbytes)
            buffer = self._buffer(nbytes)
            reads.append((buffer, like, self._file.read(as_bytes(buffer[:nbytes]), offset, written.result)))
        while reads:
            found.append(self._arrived(*reads.popleft()))
        return tuple(found)

    def reach(self, lowest: int) -> None:
        """Make sure that gradients reach no layer that is spared.

        Raises:
            ConfigError: they do.
        """
        if lowest < self.layer:
            raise _refusal(f"gradients reach layer {lowest}: what it makes is new in every epoch")

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
        self._places.clear()

    def _arrived(self, buffer: Tensor, like: Tensor, read: Future[None]) -> Tensor:
        read.result()
        state = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._backend.device)
        state.copy_(placed(buffer, like))
        self._free.append((buffer, None))
        return state

    def _buffer(self, nbytes: int) -> Tensor:
        """Return memory that no transfer touches; what failed to be written is raised."""
        if self._num_buffers == NUM_BUFFERS:
            buffer, written = self._free.popleft()
            if written is not None:
                written.result()
            if len(buffer) >= nbytes:
                return buffer
            self._num_buffers -= 1
        self._num_buffers += 1
        return self._backend.host_buffer(nbytes)


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="cache_frozen_prefix", how="set cache_frozen_prefix: false")


def _key(batch: Mapping[str, Tensor]) -> Key:
    """Return what tells a micro-batch from every other: everything in it but its labels."""
    digest = hashlib.sha256()
    for name in sorted(batch.keys() - {"labels"}):
        tensor = batch[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.digest()
