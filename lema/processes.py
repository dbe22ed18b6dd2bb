"""The processes that `torchrun` started, as one group that trains on parts of each batch.

For backends: which library carries what between devices is theirs to say. Small things go from host to host, past the
devices, so that asking for them waits for no device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lema.backend import Alone, Gathering, Replicas, Upload
from lema.errors import BackendUnavailable, LemaError
from lema.hostmemory import mapped

__all__ = ["ProcessGroup", "join"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # that `torchrun` sets
PATIENCE = timedelta(minutes=30)  # one process may be reading weights while the others wait


def join(carrier: str) -> tuple[Replicas, Callable[[], None]]:
    """Join the processes that `torchrun` started; return them, and what leaves them again.

    Args:
        carrier: what `torch.distributed` calls the library that carries tensors between the devices.

    Raises:
        BackendUnavailable: the variables that `torchrun` sets are there in part, or the others cannot be reached.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "WORLD_SIZE" not in given or given["WORLD_SIZE"] == "1":
        return Alone(), lambda: None
    if missing := [name for name in VARIABLES if not given.get(name, "").isdigit()]:
        raise BackendUnavailable(
            f"{', '.join(missing)} should be numbers, as torchrun sets them",
            where="environment",
            how="start the processes with torchrun, or unset WORLD_SIZE",
        )
    rank, size, local_rank, local_size = (int(given[name]) for name in VARIABLES)
    import torch.distributed as dist

    mine = not dist.is_initialized()
    try:
        if mine:
            dist.init_process_group(carrier, timeout=PATIENCE)
        hosts = dist.new_group(backend="gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:  # of torch.distributed: DistError is a RuntimeError
        raise BackendUnavailable(
            f"the {size} processes do not find each other: {error}",
            where=f"rank {rank}",
            how="check MASTER_ADDR and MASTER_PORT, and that every process was started",
        ) from error

    def leave() -> None:
        if mine and dist.is_initialized():
            dist.destroy_process_group()

    return ProcessGroup(rank, size, local_rank, local_size, hosts), leave


class ProcessGroup:
    """`lema.backend.Replicas` over `torch.distributed`.

    Args:
        rank: of this process.
        size: how many there are.
        local_rank: of this process among those of this machine.
        local_size: how many there are of those.
        hosts: a group whose tensors are in host memory.
    """

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int, hosts: Any) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self._hosts = hosts

    def sum(self, tensor: Tensor) -> None:
        """Add up over all processes."""
        with _others_there():
            torch.distributed.all_reduce(tensor)

    def gather(self, upload: Upload, whole: Tensor) -> Gathering:
        """Gather in the background; devices that queue their work do this in a queue of its own."""
        dist: Any = torch.distributed
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        return _Work(gather(whole, upload.wait(), async_op=True), upload)

    def exchange(self, value: Any) -> list[Any]:
        """Gather from host to host."""
        found: list[Any] = [None] * self.size
        with _others_there():
            torch.distributed.all_gather_object(found, value, group=self._hosts)
        return found

    def shared_memory(self, nbytes: int) -> Tensor:
        """Map a file without a name that the first process of each machine makes; it goes with the last of them."""
        machine = self.rank - self.local_rank  # the rank of its first process
        made = os.memfd_create("lema") if self.local_rank == 0 else -1
        if made >= 0:
            os.ftruncate(made, max(nbytes, 1))
        where = self.exchange((os.getpid(), made))
        process, number = where[machine]
        descriptor = made if made >= 0 else os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            memory = mapped(descriptor, nbytes)
            self.exchange(None)  # every process has it open
        finally:
            os.close(descriptor)
        return memory


@contextmanager
def _others_there() -> Iterator[None]:
    """Say what it means when a message finds nobody."""
    try:
        yield
    except RuntimeError as error:
        raise LemaError(
            "another process of this run has ended",
            where=str(error).partition("\n")[0],
            how="its own message, above, says why; start all of them again (--resume goes on from the last checkpoint)",
        ) from error


class _Work:
    """A gathering under way."""

    def __init__(self, work: Any, upload: Upload) -> None:
        self._work, self._upload = work, upload

    def wait(self) -> None:
        self._work.wait()
        self._upload.release()
