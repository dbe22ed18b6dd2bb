"""The processes that train one adapter together, as the core sees them, and the one process that is alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lema.hostmemory import anonymous

if TYPE_CHECKING:
    from torch import Tensor

    from lema.backend import Upload

__all__ = ["Alone", "Gathering", "Replicas"]


class Gathering(Protocol):
    """One layer on its way from the replicas that each hold a part of it."""

    def wait(self) -> None:
        """Compute queued after this call sees the whole; the uploaded part has been released."""


class Replicas(Protocol):
    """The processes that train copies of one adapter, each on its share of every batch (data parallelism).

    Every process makes the same calls in the same order. Where several processes hold one copy together
    (`lema.backend.Parallel`), the replicas of a process are those that hold the same part as it.
    """

    @property
    def rank(self) -> int:
        """This process's place among all."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def local_rank(self) -> int:
        """This process's place among those of this machine."""

    @property
    def local_size(self) -> int:
        """How many of the processes run on this machine."""

    @property
    def first(self) -> bool:
        """Whether this process is the one, of all there are, that writes and reports."""

    @property
    def num_processes(self) -> int:
        """How many processes there are in all."""

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor on the device over all processes, in place; queued like compute. All get the same bits."""

    def gather(self, upload: Upload, whole: Tensor) -> Gathering:
        """Start to put an uploaded part of every process, all of one size, one after the other into `whole`.

        `whole`, uint8 `[size * part]` on the device, is overwritten only after the compute queued so far; the part is
        released once it has been sent.
        """

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value, in rank order: plain data, through the hosts; no device is waited for."""

    def everyone(self, value: Any) -> list[Any]:
        """Likewise, of all processes, also those that hold other parts of a copy; the first one's is first."""

    def of_copy(self, value: Any) -> list[Any]:
        """Likewise, of the processes that hold one copy together with this one."""

    def shared_memory(self, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of zeroed host memory at a page boundary that all processes of this machine share."""


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
