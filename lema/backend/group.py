"""The group of one process, for runs without `torchrun`, and the messages between data-parallel
processes.

`Alone` and `SingleProcess` answer all that is asked of larger groups. Of several processes each
works on its share of a batch, with the loss divided by the tokens of all. So the sum of their
gradients is the gradient of one process with the whole batch, except for the order of the additions
(https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lema.backend.hostmemory import anonymous
from lema.backend.protocols import Exchange, Gathering, Replicas, Upload
from lema.errors import ConfigError, LemaError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "Alone",
    "Downloaded",
    "SingleProcess",
    "check_alike",
    "first_alone",
    "share_of",
    "sum_gradients",
]


class Alone:
    """The `Replicas` of a single process."""

    rank = local_rank = 0
    size = local_size = 1
    first = True
    num_processes = 1

    def sum(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def gather(self, upload: Upload, target: Tensor) -> Gathering:
        target.copy_(upload.wait())
        upload.release()
        return self

    def wait(self) -> None:
        """The copy is queued."""

    def exchange(self, value: object) -> list[Any]:
        return [value]

    def everyone(self, value: object) -> list[Any]:
        return self.exchange(value)

    def of_copy(self, value: object) -> list[Any]:
        return [value]

    def shared_memory(self, nbytes: int) -> Tensor:
        return anonymous(nbytes)


class Downloaded:
    """The `Download` of a device that copies at once."""

    def release(self) -> None:
        """Nothing reads the source any more."""

    def landed(self) -> None:
        """The bytes are there."""


class SingleProcess:
    """The `Parallel` of a backend that runs in one process: nothing is sharded, nothing is
    reduced.
    """

    rank = 0
    size = 1
    exchanged = Exchange()

    def shard(self, layer: nn.Module, words: Collection[str] = ()) -> None:
        """Leave the layer whole."""

    def cross_entropy(
        self, logits: Callable[[], Tensor], targets: Tensor, **options: Any
    ) -> Tensor:
        from torch.nn.functional import cross_entropy

        full_logits = logits()
        return cross_entropy(
            full_logits.float().view(-1, full_logits.shape[-1]), targets.reshape(-1), **options
        )

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients as they are."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        from torch.nn.utils import get_total_norm

        return get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def enter_layers(self, hidden: Tensor) -> Tensor:
        return hidden

    def leave_layers(self, hidden: Tensor) -> Tensor:
        return hidden


Outcome = TypeVar("Outcome")


def sum_gradients(replicas: Replicas, parameters: Sequence[nn.Parameter]) -> None:
    """Add up every parameter's gradient over all processes, in one message for each dtype. A
    parameter that has none in some process counts there as zeros; one that has none in any keeps
    none, so that the optimizer leaves it alone as it would in one process."""
    if replicas.size == 1:
        return
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        _sum(replicas, [parameter for parameter in parameters if parameter.dtype == dtype])


def _sum(replicas: Replicas, parameters: Sequence[nn.Parameter]) -> None:
    import torch

    there = [parameter.grad is not None for parameter in parameters]
    flags = torch.tensor(there, dtype=parameters[0].dtype).to(
        parameters[0].device, non_blocking=True
    )
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    flat = torch.cat([*(part.reshape(-1) for part in parts), flags])
    for parameter in parameters:
        parameter.grad = None  # before the sum is there, that the two do not add up
    del parts
    replicas.sum(flat)
    sums = flat.split([*(parameter.numel() for parameter in parameters), len(flags)])
    anywhere = there
    # who has a gradient knows that there is one; only who has none must ask the device
    if not all(there):
        anywhere = [mine or count > 0 for mine, count in zip(there, sums[-1].tolist(), strict=True)]
    for parameter, summed, has_gradient in zip(parameters, sums[:-1], anywhere, strict=True):
        if has_gradient:
            parameter.grad = summed.view_as(parameter)


def share_of(replicas: Replicas, dividing: int) -> tuple[int, int]:
    """Return which share of a batch's rows this process has, and how many shares there are.

    Args:
        replicas: the processes.
        dividing: how many of them divide each row, and so have one share together.
    """
    return replicas.rank // dividing, replicas.size // dividing


def first_alone(replicas: Replicas, work: Callable[[], Outcome]) -> Outcome:
    """Have the first process do `work`; return in all processes, when it is done, what it has
    found. Where it fails with a `LemaError`, that is raised in every process."""
    failure: LemaError | None = None
    mine: Any = None
    if replicas.first:
        try:
            mine = work()
        except LemaError as error:
            failure = error
    why = failure and (type(failure), failure.what, failure.where, failure.how)
    (failed, outcome), *_ = replicas.everyone((why, mine))
    if failure is not None:
        raise failure
    if failed is not None:
        kind, what, where, how = failed
        raise kind(what, where=where, how=how)
    first: Outcome = outcome
    return first


def check_alike(replicas: Replicas, about: Mapping[str, Any]) -> None:
    """Make sure that all processes train the same thing: `about` is plain data by the names that a
    user knows it by. Where something differs, every process raises `ConfigError`."""
    first, *peers = replicas.everyone(dict(about))
    for rank, peer in enumerate(peers, 1):
        if differing := sorted(name for name in first if first[name] != peer.get(name)):
            what = f"the processes do not train the same thing: {', '.join(differing)} differ"
            how = "start every process with the same config, data and code"
            raise ConfigError(what, where=f"rank {rank}, compared with rank 0", how=how)
