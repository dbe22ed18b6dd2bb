"""The collectives that parallel layers need from the processes that share them; all are out of
place.

`C10dComm` goes through `torch.distributed` (gloo, nccl, native Trainium), `XlaComm` through
`torch_xla`, `Solo` is one process. Every process of a group makes the same calls in the same order,
and sums have the same bits on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lema.backend import Exchange
from lema.errors import ConfigError, DataError

__all__ = ["C10dComm", "Comm", "Counted", "Solo", "XlaComm", "comm_of"]

Groups = tuple[tuple[int, ...], ...]


class Comm(Protocol):
    """The processes that share one layer."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """How many processes the group has."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim` in rank order."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share along `dim` of the sum over the group."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source` of the group."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group; `parts` are ranks of the group, and cover it."""


def share(tensor: Tensor, dim: int, comm: Comm) -> Tensor:
    """Return this rank's equal share of a tensor that is whole on every rank.

    Raises:
        DataError: it cannot be cut into equal shares.
    """
    length = tensor.shape[dim]
    if length % comm.size:
        raise DataError(
            f"{length} positions cannot be cut into {comm.size} equal shares",
            where=f"dimension {dim} of a tensor of shape {list(tensor.shape)}",
            how=f"pad sequences to a multiple of {comm.size}, or turn sequence parallelism off",
        )
    return tensor.narrow(dim, comm.rank * (length // comm.size), length // comm.size)


class Solo:
    """The group of a single process."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:  # noqa: ARG002 - one rank alone
        """Return the tensor itself."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:  # noqa: ARG002 - one rank alone
        """Return the tensor itself."""
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - one rank alone
        """Return the tensor itself."""
        return tensor

    def barrier(self) -> None:
        """Do nothing: there is no other process."""

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:  # noqa: ARG002 - one rank alone
        """Return the same process."""
        return self


class C10dComm:
    """A group of `torch.distributed`.

    Args:
        group: the process group; None: all processes.
    """

    def __init__(self, group: Any = None) -> None:
        dist: Any = torch.distributed
        self._dist = dist
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._scatters = dist.get_backend(group) != "gloo"  # gloo does not have it in every version
        self._parts: dict[Groups, Comm] = {}

    def __deepcopy__(self, memo: Any) -> C10dComm:
        return self  # copies of a layer use the same processes

    @classmethod
    def over(cls, groups: Sequence[Sequence[int]]) -> C10dComm:
        """Return this process's group of several that cover all processes; every process passes
        all of them.
        """
        dist: Any = torch.distributed
        process_groups = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
        return cls(next(group for ranks, group in process_groups if dist.get_rank() in ranks))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group; it is formed once for each element, so that all ranks
        get the same bits.
        """
        if tensor.is_meta:  # the layer is only traced for its shapes
            return tensor
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim` in rank order."""
        if tensor.is_meta:
            return torch.cat([tensor] * self.size, dim)
        mine = tensor.detach().contiguous()
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        self._dist.all_gather(gathered, mine, group=self.group)
        return torch.cat(gathered, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share along `dim` of the sum over the group."""
        mine = share(tensor.detach(), dim, self)
        if tensor.is_meta:
            return mine
        if not self._scatters:
            return share(self.all_reduce(tensor), dim, self).contiguous()
        total = torch.empty_like(mine, memory_format=torch.contiguous_format)
        parts = [part.contiguous() for part in tensor.detach().chunk(self.size, dim)]
        self._dist.reduce_scatter(total, parts, group=self.group)
        return total

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source` of the group."""
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._dist.broadcast(received, group=self.group, group_src=source)
        return received

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._dist.barrier(group=self.group)

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group; all processes call it, those of other groups
        too.
        """
        key = tuple(tuple(part) for part in parts)
        if key not in self._parts:
            mine = self._dist.get_process_group_ranks(self.group or self._dist.group.WORLD)
            groups_by_rank: list[Any] = [None] * self._dist.get_world_size()
            self._dist.all_gather_object(groups_by_rank, tuple(mine))
            groups = sorted(set(groups_by_rank))
            self._parts[key] = C10dComm.over(
                [[group[rank] for rank in part] for group in groups for part in key]
            )
        return self._parts[key]


class XlaComm:
    """A group of `torch_xla`; collectives belong to a graph that is the same on every rank.

    Args:
        groups: the replica groups of all ranks, as ordinals; they cover them.
        xm: `torch_xla.core.xla_model`.
        ordinal: of this process among all.

    Raises:
        ConfigError: this process is in none of the groups.
    """

    def __init__(self, groups: Sequence[Sequence[int]], xm: Any, ordinal: int) -> None:
        self._groups = [list(group) for group in groups]
        self._xm = xm
        self._ordinal = ordinal
        mine = next((group for group in self._groups if ordinal in group), None)
        if mine is None:
            raise ConfigError(
                f"rank {ordinal} is in none of the groups {self._groups}",
                how="name every rank once",
            )
        self.rank = mine.index(ordinal)
        self.size = len(mine)
        self._parts: dict[Groups, Comm] = {}

    def __deepcopy__(self, memo: Any) -> XlaComm:
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group."""
        total: Tensor = self._xm.all_reduce(
            self._xm.REDUCE_SUM, tensor, groups=self._groups, pin_layout=False
        )
        return total

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim` in rank order."""
        gathered: Tensor = self._xm.all_gather(
            tensor, dim=dim % tensor.dim(), groups=self._groups, pin_layout=False
        )
        return gathered

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share along `dim` of the sum over the group."""
        share(tensor, dim, self)  # raises if it cannot be cut
        total: Tensor = self._xm.reduce_scatter(
            self._xm.REDUCE_SUM,
            tensor,
            scale=1.0,
            scatter_dim=dim % tensor.dim(),
            shard_count=self.size,
            groups=self._groups,
            pin_layout=False,
        )
        return total

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of rank `source`, by a sum with zeros of the others: all ranks build
        the same graph.
        """
        mine = torch.tensor(self.rank == source, device=tensor.device)
        return self.all_reduce(torch.where(mine, tensor, torch.zeros_like(tensor)))

    def barrier(self) -> None:
        """Wait until every process, of the other groups too, is here."""
        self._xm.rendezvous("lema")

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group; the groups of all ranks are known to each."""
        key = tuple(tuple(part) for part in parts)
        if key not in self._parts:
            groups = [[group[rank] for rank in part] for group in self._groups for part in key]
            self._parts[key] = XlaComm(groups, self._xm, self._ordinal)
        return self._parts[key]


class Counted:
    """A group that counts the bytes that its collectives exchange, and those of its parts.

    For `n` bytes over `T` processes, a ring sends `2 (T-1)/T n` in an all-reduce, and `(T-1)/T n`
    in an all-gather or a reduce-scatter, which is the least that is possible (Patarasuk and Yuan
    2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        comm: the group.
        root: the count that it adds to; None: a new one.
    """

    def __init__(self, comm: Comm, root: Counted | None = None) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._root = root or self
        self._parts: dict[Groups, Comm] = {}
        self.exchanged = Exchange()

    def __deepcopy__(self, memo: Any) -> Counted:
        return self

    def _sends(self, nbytes: int) -> None:
        self._root.exchanged = self._root.exchanged.plus(Exchange(int(self.size > 1), nbytes))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group."""
        self._sends(2 * tensor.nbytes * (self.size - 1) // self.size)
        return self._comm.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim` in rank order."""
        self._sends(tensor.nbytes * (self.size - 1))
        return self._comm.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share along `dim` of the sum over the group."""
        self._sends(tensor.nbytes * (self.size - 1) // self.size)
        return self._comm.reduce_scatter(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source` of the group, which goes from one to the next."""
        self._sends(tensor.nbytes)
        return self._comm.broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._comm.barrier()

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group; the same one each time."""
        key = tuple(tuple(part) for part in parts)
        if key not in self._parts:
            self._parts[key] = Counted(self._comm.split(parts), self._root)
        return self._parts[key]


def comm_of(group: Any = None) -> Comm:
    """Return the group that a layer's argument `tensor_model_parallel_group` means.

    Args:
        group: a `Comm`; a process group of `torch.distributed`; None: all processes that were
            joined, or this one.
    """
    dist: Any = torch.distributed
    if group is None:
        return C10dComm() if dist.is_available() and dist.is_initialized() else Solo()
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return C10dComm(group)
    comm: Comm = group
    return comm
