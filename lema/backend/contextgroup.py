"""The processes that divide the sequence of each row between them, and what they send each other.

A process needs the keys and values of other processes' tokens, and hands on the state of a
recurrence. The gradients of both go back (context parallelism; the gathering of keys and values is
that of https://arxiv.org/abs/2407.21783, section 3.3.2). Bytes are carried as they are, and sums
are made here in the order of ranks, so that all processes round alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lema.backend.protocols import Replicas
from lema.backend.torchrun import PATIENCE, gather_objects, others_there
from lema.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Carried", "ContextGroup", "check_dividing", "join_context"]

Carried: TypeAlias = Literal["keys and values", "their gradients", "states", "gradients of states"]
"""What processes send each other of a layer."""

SETTING = "context_parallel_size"
NUM_DIMENSIONS = 6  # of a state, at most
# messages to one process that it need not have taken before the next is sent
MOST_PENDING = 8


class ContextGroup:
    """The processes that divide rows, as one of them sees them.

    Args:
        rank: this process's place among them.
        ranks: their places among all processes.
        exchange: returns the plain data of each of them, in rank order.
        group: of `torch.distributed`; None: all processes.

    Attributes:
        exchange: returns the plain data of each of them, in rank order.
        rank: this process's place among them.
        size: how many they are.
        sent: bytes that this process has sent so far, to all others together.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        exchange: Callable[[object], list[Any]],
        group: ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.exchange = exchange
        self._ranks = list(ranks)
        self._group = group
        self.sent: dict[Carried, int] = {}
        self._pending = deque[tuple[Any, Tensor, Tensor]]()
        # what has come and was not asked for yet, by sender and number
        self._arrived: dict[tuple[int, int], deque[Tensor]] = {}

    def gather(self, part: Tensor, what: Carried | None = None) -> list[Tensor]:
        """Return every process's tensor, in rank order; all have one shape and dtype. `what` it is
        counted as; None: it is not.
        """
        sent = _bytes_of(part)
        parts = sent.new_empty(self.size, sent.numel())
        with others_there():
            _all_gather(parts.view(-1), sent, group=self._group)
        if what is not None:
            self._count(what, sent.numel() * (self.size - 1))
        return [row.view(part.dtype).view(part.shape) for row in parts]

    def sum_scattered(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of what all processes have for this one.

        Args:
            parts: for each process, in rank order, a tensor of its size, the same in all processes.
        """
        received = torch.empty(
            self.size,
            parts[self.rank].numel(),
            dtype=parts[self.rank].dtype,
            device=parts[self.rank].device,
        )
        sent = torch.cat([part.reshape(-1) for part in parts])
        width = sent.element_size()
        dist: Any = torch.distributed
        with others_there():
            dist.all_to_all_single(
                received.view(-1).view(torch.uint8),
                sent.view(torch.uint8),
                [row.numel() * width for row in received],
                [part.numel() * width for part in parts],
                group=self._group,
            )
        self._count("their gradients", sent.nbytes - parts[self.rank].nbytes)
        total = received[0].clone()
        for row in received[1:]:
            total += row
        return total.view(parts[self.rank].shape)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every process's tensor, in rank order."""
        return torch.stack(self.gather(tensor)).sum(0)

    def send(self, tensor: Tensor, to: int, number: int, what: Carried) -> None:
        """Send a tensor to the process of rank `to`, which asks for it by its `number`; go on
        before it has arrived.
        """
        dist: Any = torch.distributed
        # of its own, because it is under way while the layer goes on
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert sent.dim() <= NUM_DIMENSIONS, "a state has more dimensions than a message says"
        about = [number, _DTYPES.index(sent.dtype), sent.dim(), *sent.shape]
        header = torch.zeros(3 + NUM_DIMENSIONS, dtype=torch.long)
        header[: len(about)] = torch.tensor(about)
        with others_there():
            for message in (header, _bytes_of(sent)):
                work = dist.isend(message, self._ranks[to], group=self._group)
                self._pending.append((work, message, sent))
            while len(self._pending) > MOST_PENDING:
                self._pending.popleft()[0].wait()
        self._count(what, sent.nbytes)

    def receive(self, sender: int, number: int, device: torch.device) -> Tensor:
        """Return the next tensor that the process of rank `sender` sends by this `number`."""
        waiting = self._arrived.setdefault((sender, number), deque())
        while not waiting:
            arrived, tensor = self._next_from(sender, device)
            self._arrived.setdefault((sender, arrived), deque()).append(tensor)
        return waiting.popleft()

    def _next_from(self, sender: int, device: torch.device) -> tuple[int, Tensor]:
        dist: Any = torch.distributed
        header = torch.zeros(3 + NUM_DIMENSIONS, dtype=torch.long)
        with others_there():
            dist.recv(header, self._ranks[sender], group=self._group)
            number, dtype, num_dimensions, *shape = header.tolist()
            tensor = torch.empty(shape[:num_dimensions], dtype=_DTYPES[dtype], device=device)
            dist.recv(_bytes_of(tensor), self._ranks[sender], group=self._group)
        return number, tensor

    def _count(self, what: Carried, nbytes: int) -> None:
        self.sent[what] = self.sent.get(what, 0) + nbytes


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def _all_gather(parts: Tensor, part: Tensor, *, group: ProcessGroup | None) -> None:
    dist: Any = torch.distributed
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(parts, part, group=group)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def check_dividing(replicas: Replicas, size: int | None) -> None:
    """Refuse processes that cannot be divided into groups of `size`, each of which divides rows.

    Args:
        replicas: all processes, each with a whole copy of the model.
        size: how many are to divide a row; None: rows are not divided.

    Raises:
        ConfigError: it is so.
    """
    if size is None:
        return
    count = replicas.num_processes
    if count != replicas.size:
        what = "rows are not divided where several processes hold one copy of the model"
        raise ConfigError(what, where=SETTING, how="leave out tensor_parallel_size")
    if count % size:
        what = f"{count} process{'' if count == 1 else 'es'} cannot divide rows in groups of {size}"
        how = f"start a multiple of {size} processes: torchrun --nproc-per-node {size} -m lema ..."
        raise ConfigError(what, where=f"{SETTING}: {size}", how=how)


def join_context(replicas: Replicas, size: int) -> ContextGroup:
    """Return the processes that divide rows with this one: `size` whose ranks follow each other.
    All processes call this.

    Args:
        replicas: all processes, each with a whole copy of the model.
        size: how many divide a row.

    Raises:
        ConfigError: they cannot be divided into such groups.
    """
    check_dividing(replicas, size)
    count = replicas.size
    first = replicas.rank // size * size
    ranks = range(first, first + size)
    if count == size:
        return ContextGroup(replicas.rank, ranks, replicas.exchange)
    dist: Any = torch.distributed
    # every group is made in each process, in the same order
    everyone = [list(range(start, start + size)) for start in range(0, count, size)]
    devices = [dist.new_group(members, timeout=PATIENCE) for members in everyone]
    hosts = [dist.new_group(members, timeout=PATIENCE, backend="gloo") for members in everyone]
    number = first // size
    exchange = partial(gather_objects, size=size, hosts=hosts[number])
    return ContextGroup(replicas.rank - first, ranks, exchange, devices[number])
