"""The memory in which masters, moments and waiting gradients lie, and how much of it they need."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lema.backend.hostmemory import anonymous
from lema.plan.work.trainable_bytes import TrainableBytes, outside_bytes, unmovable_bytes
from lema.storage.spillfile import OffloadFile, whole_blocks

__all__ = ["MasterBytes", "MasterMemory"]


@dataclass(frozen=True)
class MasterBytes:
    """The bytes of what trains, by where it may lie."""

    layers: Mapping[int, TrainableBytes]  # of each layer that trains
    outside: TrainableBytes  # of the layers
    clipped: bool  # whether gradients wait until they are clipped
    in_host: bool  # whether what is on the device is in host memory

    @property
    def movable(self) -> dict[int, int]:
        """Bytes of each layer that may lie in a file."""
        return {
            layer: layer_bytes.movable(clipped=self.clipped)
            for layer, layer_bytes in self.layers.items()
        }

    @property
    def unmovable(self) -> int:
        """Bytes that lie in memory in any case."""
        return unmovable_bytes(self.layers.values(), self.outside, shared=self.in_host)

    @property
    def by_layer(self) -> dict[int | None, int]:
        """Bytes of masters, moments and waiting gradients of each layer; None: outside of them."""
        sizes: dict[int | None, int] = {None: outside_bytes(self.outside, shared=self.in_host)}
        sizes.update(self.movable.items())
        return sizes


class MasterMemory:
    """The memory in which masters, moments and waiting gradients lie, layer by layer.

    Args:
        sizes: bytes of each layer; None: of what lies outside the layers.
        mapped: the layers that lie in the file.
        directory: where the file is made, if there is one.
        host_bytes: bytes that are in host memory already.

    Attributes:
        mapped: the layers in the file.
        mapped_bytes: what is taken of the file.
        host_bytes: what is taken of host memory, with what streams.

    Raises:
        DiskError: the disk does not hold the file.
    """

    def __init__(
        self,
        sizes: Mapping[int | None, int],
        mapped: Collection[int],
        directory: Path,
        host_bytes: int,
    ) -> None:
        self.mapped = mapped
        self.mapped_bytes = 0
        self.host_bytes = host_bytes
        self._file: OffloadFile | None = None
        # what is left of each layer's memory
        self._free: dict[int | None, Tensor] = {}
        if mapped:
            what = "masters and moments"
            how = "free some space, set offload_dir, or raise host_memory"
            self._file = OffloadFile(directory, what, how)
            starts = {}
            end = 0
            for layer in sorted(mapped):
                starts[layer] = end
                end = end + whole_blocks(sizes[layer])
            self._file.reserve(end)
            memory = self._file.mapped()
            self._free = {
                layer: memory[start : start + sizes[layer]] for layer, start in starts.items()
            }
        self._free |= {
            layer: anonymous(nbytes) for layer, nbytes in sizes.items() if layer not in self._free
        }

    def take(self, layer: int | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the next memory of a layer, in this shape and type."""
        nbytes = shape.numel() * dtype.itemsize
        buffer = self._free[layer]
        assert len(buffer) >= nbytes, "a layer's room was too small"
        self._free[layer] = buffer[nbytes:]
        if layer in self.mapped:
            self.mapped_bytes += nbytes
        else:
            self.host_bytes += nbytes
        return buffer[:nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Release the file; its space is freed when it has no tensors any more."""
        if self._file is not None:
            self._file.close()
