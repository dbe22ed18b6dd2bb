"""The processes that `torchrun` started, as one group that trains on parts of each batch.

This is a part for backends, which decide the library that carries tensors between devices. Plain
data goes from host to host, past the devices, so that asking for it waits for no device.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lema.backend.group import Alone
from lema.backend.host.files import BINARY
from lema.backend.hostmemory import mapped
from lema.backend.protocols import Gathering, Replicas, Upload
from lema.errors import BackendUnavailable, ConfigError, LemaError

__all__ = [
    "Joined",
    "ProcessGroup",
    "carriers",
    "gather_objects",
    "join",
    "join_in_parts",
    "local_processes",
    "others_there",
    "refuse_sharing",
]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # that `torchrun` sets
# a group of torch's own; there are none where torch is built without them
Group: TypeAlias = "torch.distributed.ProcessGroup"
PATIENCE = timedelta(minutes=30)  # one process may be reading weights while the others wait


@dataclass(frozen=True)
class Joined:
    """This process among those that `torchrun` started."""

    # Those that hold the same part of a copy as this one: all, where each process holds a whole
    # copy.
    replicas: Replicas
    # of the processes that hold one copy together, the group between devices; None: there is one
    parts: Any
    leave: Callable[[], None]  # leaves them all again


def carriers(kind: str) -> str:
    """Return the libraries that carry tensors between hosts and between devices of a kind, as
    `join` takes them: what torch has for such devices."""
    backend_by_kind: dict[str, str] = torch.distributed.Backend.default_device_backend_map
    return f"cpu:gloo,{kind}:{backend_by_kind[kind]}" if kind in backend_by_kind else "gloo"


def join(
    carrier: str, identity: Callable[[], str | None] | None = None
) -> tuple[Replicas, Callable[[], None]]:
    """Join the processes that `torchrun` started, each with a whole copy; return them, and a
    function to leave them. `carrier` and errors are as of `join_in_parts`. `identity` tells this
    process's device from others, where the process sees no other: `BackendUnavailable` is raised,
    too, where two processes of one machine have the same."""
    joined = join_in_parts(carrier, 1)
    try:
        if identity is not None:
            refuse_sharing(joined.replicas, identity)
    except BackendUnavailable:
        joined.leave()
        raise
    return joined.replicas, joined.leave


def join_in_parts(carrier: str, parts: int | None, patience: timedelta = PATIENCE) -> Joined:
    """Join the processes that `torchrun` started; `parts` of them hold one copy together (None: all
    do). Those of one copy have ranks that follow each other, so that they are on one machine where
    they can be. `carrier` is what `torch.distributed` calls the library that carries tensors
    between the devices. `BackendUnavailable`: the variables that `torchrun` sets are there in part,
    or the others cannot be reached. `ConfigError`: the processes cannot be divided into such
    groups."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "WORLD_SIZE" not in variables or variables["WORLD_SIZE"] == "1":
        _divide(1, parts)
        return Joined(Alone(), None, lambda: None)
    if missing := [name for name in VARIABLES if not variables.get(name, "").isdigit()]:
        what = f"{', '.join(missing)} should be numbers, as torchrun sets them"
        how = "start the processes with torchrun, or unset WORLD_SIZE"
        raise BackendUnavailable(what, where="environment", how=how)
    rank, size, local_rank, local_size = (int(variables[name]) for name in VARIABLES)
    parts = _divide(size, parts)
    import torch.distributed as dist

    mine = not dist.is_initialized()
    try:
        if mine:
            dist.init_process_group(carrier, timeout=patience)
        hosts = dist.new_group(backend="gloo", timeout=patience)
        groups = _groups(rank, size, parts, patience) if parts > 1 else (None, hosts, None, None)
    except (RuntimeError, ValueError) as error:  # of torch.distributed: DistError is a RuntimeError
        what = f"the {size} processes do not find each other: {error}"
        how = "check MASTER_ADDR and MASTER_PORT, and that every process was started"
        raise BackendUnavailable(what, where=f"rank {rank}", how=how) from error

    def leave() -> None:
        if mine and dist.is_initialized():
            dist.destroy_process_group()

    replicas = ProcessGroup(
        rank // parts,
        size // parts,
        local_rank // parts,
        max(local_size // parts, 1),
        groups[1],
        device_group=groups[0],
        all_hosts=hosts,
        copy_hosts=groups[3],
        first=rank == 0,
    )
    return Joined(replicas, groups[2], leave)


def local_processes() -> int | None:
    """Return how many processes `torchrun` started on this machine; None: it started none."""
    num_local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(num_local) if num_local.isdigit() else None


def refuse_sharing(replicas: Replicas, identity: Callable[[], str | None]) -> None:
    """Refuse that two processes of one machine use one device. All processes call this. `identity`
    tells a device from others; None: the process has chosen one of several by its place.
    `BackendUnavailable`: another process has it."""
    if replicas.num_processes == 1:
        return
    mine = platform.node(), identity()
    if replicas.everyone(mine).count(mine) > 1 and mine[1] is not None:
        what = f"{replicas.local_size} processes of this machine cannot share one device"
        how = "start one process for each device, and let each process see its own, or all of them"
        raise BackendUnavailable(what, where=f"rank {replicas.rank}", how=how)


def _divide(size: int, parts: int | None) -> int:
    if parts is None:
        return size
    if size % parts:
        what = f"{size} process{'' if size == 1 else 'es'} cannot be divided into groups of {parts}"
        how = (
            f"start a multiple of {parts} processes: torchrun --nproc_per_node {parts} -m lema "
            "train ..."
        )
        raise ConfigError(what, where=f"tensor_parallel_size: {parts}", how=how)
    return parts


def _groups(rank: int, size: int, parts: int, patience: timedelta) -> tuple[Any, Any, Any, Any]:
    """Make every group of the grid, in the same order in each process; return this one's, of
    devices and of hosts.
    """
    import torch.distributed as dist

    local_groups: list[Any] = []
    of_replicas = [range(part, size, parts) for part in range(parts)]
    of_copies = [range(start, start + parts) for start in range(0, size, parts)]
    for rows in (of_replicas, of_copies):
        devices = [dist.new_group(list(row), timeout=patience) for row in rows]
        hosts = [dist.new_group(list(row), timeout=patience, backend="gloo") for row in rows]
        index = next(number for number, row in enumerate(rows) if rank in row)
        local_groups += [devices[index], hosts[index]]
    return local_groups[0], local_groups[1], local_groups[2], local_groups[3]


class ProcessGroup:
    """`lema.backend.protocols.Replicas` over `torch.distributed`, for these ranks, the first if
    `first`, or rank 0.

    Of the groups, `hosts` and `all_hosts` (None: `hosts` is of all processes) have tensors in host
    memory, and so has `copy_hosts`, of the processes that hold one copy together; None: this one
    holds a copy alone. `device_group` has tensors on the devices; None: that of all processes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        hosts: Group | None,
        *,
        device_group: Group | None = None,
        all_hosts: Group | None = None,
        copy_hosts: Group | None = None,
        first: bool | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.first = rank == 0 if first is None else first
        self._hosts = hosts
        self._devices = device_group
        self._all_hosts = all_hosts or hosts
        self._copy_hosts = copy_hosts
        self.num_processes: int = torch.distributed.get_world_size()

    def sum(self, tensor: Tensor) -> None:
        with others_there():
            torch.distributed.all_reduce(tensor, group=self._devices)

    def gather(self, upload: Upload, target: Tensor) -> Gathering:
        """Gather in the background; devices that queue their work do this in a queue of its own."""
        dist: Any = torch.distributed
        # its name before torch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return _Work(gather(target, upload.wait(), group=self._devices, async_op=True), upload)

    def exchange(self, value: object) -> list[Any]:
        return gather_objects(value, self.size, self._hosts)

    def everyone(self, value: object) -> list[Any]:
        return gather_objects(value, self.num_processes, self._all_hosts)

    def of_copy(self, value: object) -> list[Any]:
        if self._copy_hosts is None:
            return [value]
        return gather_objects(
            value, torch.distributed.get_world_size(self._copy_hosts), self._copy_hosts
        )

    def shared_memory(self, nbytes: int) -> Tensor:
        """Map a file that the first process of each machine makes; it goes with the last of them.
        Its only name is one of Linux below /proc, or, elsewhere, one among the temporary files,
        until every process has it open."""
        machine = self.rank - self.local_rank  # the rank of its first process
        own_descriptor, name = _shared_file(nbytes) if self.local_rank == 0 else (-1, "")
        where = self.exchange(name)[machine]
        descriptor = own_descriptor if own_descriptor >= 0 else os.open(where, os.O_RDWR | BINARY)
        try:
            memory = mapped(descriptor, nbytes)
            self.exchange(None)  # every process has it open
        finally:
            os.close(descriptor)
            if name and not hasattr(os, "memfd_create"):
                with suppress(
                    PermissionError
                ):  # of Windows, where it stays among the temporary files
                    Path(name).unlink()
        return memory


def _shared_file(nbytes: int) -> tuple[int, str]:
    """Make a file of so many bytes; return its descriptor, and a name by which other processes
    can open it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lema")
        name = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, name = tempfile.mkstemp(prefix="lema-shared-")
    os.ftruncate(descriptor, max(nbytes, 1))
    return descriptor, name


def gather_objects(value: object, size: int, hosts: Group | None) -> list[Any]:
    """Return the value of each of `size` processes of a group, in rank order: plain data, from
    host to host.
    """
    values: list[Any] = [None] * size
    with others_there():
        torch.distributed.all_gather_object(values, value, group=hosts)
    return values


@contextmanager
def others_there() -> Iterator[None]:
    """Turn torch's error of a message that another process does not take, or does not answer,
    into a plain one.
    """
    try:
        yield
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        raise LemaError(
            "another process of this run did not answer in time"
            if late
            else "another process of this run has ended",
            where=str(error).partition("\n")[0],
            how=(
                "its own message above gives the reason; start all again (--resume continues "
                "from the last checkpoint)"
            ),
        ) from error


class _Work:
    def __init__(self, work: torch.distributed.Work, upload: Upload) -> None:
        self._work = work
        self._upload = upload

    def wait(self) -> None:
        self._work.wait()
        self._upload.release()
