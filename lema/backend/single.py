"""The group of one process, for runs without `torchrun`: it answers all that is asked of larger groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lema.backend.hostmemory import anonymous
from lema.backend.protocols import Gathering

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lema.backend.protocols import Upload

__all__ = ["Alone", "Downloaded", "SingleProcess"]


class Alone:
    """The `Replicas` of a single process."""

    rank = local_rank = 0
    size = local_size = 1
    first = True
    num_processes = 1

    def sum(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def gather(self, upload: Upload, whole: Tensor) -> Gathering:
        """Copy the only part there is."""
        whole.copy_(upload.wait())
        upload.release()
        return self

    def wait(self) -> None:
        """The copy is queued."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the one value there is."""
        return [value]

    def everyone(self, value: Any) -> list[Any]:
        """Return what `exchange` does: each copy is held by one process."""
        return self.exchange(value)

    def of_copy(self, value: Any) -> list[Any]:
        """Return the one value there is."""
        return [value]

    def shared_memory(self, nbytes: int) -> Tensor:
        """Return memory of this process."""
        return anonymous(nbytes)


class Downloaded:
    """The `Download` of a device whose copies have ended when they are begun."""

    def release(self) -> None:
        """Nothing reads the source any more."""

    def landed(self) -> None:
        """The bytes are there."""


class SingleProcess:
    """The `Parallel` of a backend that runs in one process: nothing is sharded, nothing is reduced."""

    rank = 0
    size = 1

    def shard(self, layer: nn.Module) -> None:
        """Leave the layer whole."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients as they are."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients."""
        from torch.nn.utils import get_total_norm

        return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the one tensor there is."""
        return [tensor]

    def enter_layers(self, hidden: Tensor) -> Tensor:
        """Return all of it."""
        return hidden

    def leave_layers(self, hidden: Tensor) -> Tensor:
        """Return what there is."""
        return hidden
