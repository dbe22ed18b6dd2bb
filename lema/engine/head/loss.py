"""Cross-entropy in fp32 over chunks of tokens: the logits of a whole step never exist.

The gradient of each chunk is formed as soon as its loss is, then its logits are dropped (as in the
fused linear cross-entropy of https://arxiv.org/abs/2410.10989). One chunk that holds the whole
micro-batch is bitwise the loss of `transformers`; several chunks agree to rounding, because a
matmul over fewer rows may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lema.backend import Parallel, SingleProcess
from lema.data.batches import split_batch
from lema.errors import DataError
from lema.model.state.graph import leaves

__all__ = [
    "IGNORED",
    "LossChunks",
    "attended_tokens",
    "blocks",
    "split_batch",
    "targets_of",
    "trained_tokens",
]

CHUNK_TOKENS = 1024  # the default number of tokens whose logits exist at once
IGNORED = -100  # the label of a token that is not trained, as everywhere in the field


def targets_of(labels: Tensor, *, shifted: bool = True) -> Tensor:
    """Shift labels `[batch, sequence]` so that position t holds the token that t predicts; the last
    predicts none. Not `shifted`, they are so already; see `lema.engine.head.labels`."""
    return pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted else labels


def trained_tokens(batches: Iterable[Mapping[str, Any]], *, shifted: bool = True) -> int:
    """Return how many tokens some batches train: `labels` that some position predicts and that
    are not -100.
    """
    return sum(_count(targets_of(batch["labels"], shifted=shifted)) for batch in batches)


def attended_tokens(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens some batches have, padding not counted."""
    return sum(int(np.count_nonzero(_attended(batch))) for batch in batches)


def _attended(batch: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return what is not 0 where a batch `[batch, sequence]` is no padding."""
    if (mask := batch.get("attention_mask")) is not None:
        return np.asarray(mask.cpu().numpy())
    if "position_ids" not in batch:
        return np.ones(batch["input_ids"].shape, dtype=bool)
    # of packs, in which a row goes on with position 1, and padding not
    positions = batch["position_ids"].cpu().numpy()
    return np.asarray((positions > 0) | (np.pad(positions, ((0, 0), (0, 1)))[:, 1:] == 1))


def _count(targets: Tensor) -> int:
    """Return how many targets are trained; for targets in host memory the device is not asked."""
    return int(np.count_nonzero(targets.cpu().numpy() != IGNORED))


def blocks(batch: int, sequence: int, chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Cut `[batch, sequence]` into blocks: whole rows while they fit in a chunk, else parts of
    one row.
    """
    height = max(1, chunk_tokens // sequence)
    width = sequence if chunk_tokens >= sequence else chunk_tokens
    for row in range(0, batch, height):
        for column in range(0, sequence, width):
            yield slice(row, min(row + height, batch)), slice(column, min(column + width, sequence))


class LossChunks:
    """The loss of one step, token-weighted over all its micro-batches. `DataError`: no token of it
    is trained, and it is divided by no number of tokens given.

    Args:
        head: hidden state `[rows, tokens, hidden]` -> logits `[rows, tokens, vocabulary]`.
        targets: per micro-batch, int64 `[batch, sequence]`, already shifted, on the device.
        chunk_tokens: logits exist for at most this many tokens.
        num_tokens: the loss is the sum over trained tokens divided by this; None: by their number
            in `targets`.
        scale: gradients are those of `scale` times the loss.
        logits: a list to which each micro-batch's logits are appended; None: they are dropped.
        host_targets: `targets` in host memory, where they can be looked at without waiting for the
            device; None: they are.
        dft: weigh each token's loss with its probability (dynamic fine-tuning, arXiv:2508.05629).
        smoothing: the part of each target that is spread over the vocabulary, as `transformers`'
            `LabelSmoother` does.
        parallel: the processes over which the head's vocabulary may be divided.
    """

    at_once = True

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        targets: Sequence[Tensor],
        chunk_tokens: int,
        *,
        num_tokens: int | None = None,
        scale: float | Tensor = 1.0,
        logits: list[Tensor] | None = None,
        host_targets: Sequence[Tensor] | None = None,
        dft: bool = False,
        smoothing: float = 0.0,
        parallel: Parallel | None = None,
    ) -> None:
        # Requested logits are made whole, by each process.
        self.cross_entropy = (
            parallel if parallel and logits is None else SingleProcess()
        ).cross_entropy
        self._dft = dft
        self._smoothing = smoothing
        self._head = head
        self._targets = targets
        self._chunk_tokens = chunk_tokens
        self._logits = logits
        # Counted in host memory where they are there too, because counting on the device would wait
        # for it.
        self._host_targets = targets if host_targets is None else host_targets
        self.scale = scale
        self.trained_tokens = sum(map(_count, self._host_targets))
        if not self.trained_tokens and not num_tokens:
            what = "this step trains on no token: every label is -100"
            raise DataError(
                what, how="check the labels, or max_length if truncation cut the trained part off"
            )
        self.num_tokens = num_tokens or self.trained_tokens

    def forward(self, index: int, hidden: Tensor) -> Tensor:
        """Return micro-batch `index`'s share of the loss, fp32 scalar, of the last layer's
        output `hidden`.
        """
        with torch.no_grad():
            return self._sum(
                self._chunk(index, hidden, rows, columns)[0]
                for rows, columns in self._blocks(index)
            )

    def backward(
        self,
        index: int,
        hidden: Tensor,
        choose: Callable[[frozenset[int]], Sequence[nn.Parameter]],
        sums: dict[nn.Parameter, Tensor],
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return micro-batch `index`'s share of the loss, and the gradient of `scale` times it,
        shaped as `hidden`. Given the leaves of a block's graph, `choose` returns the parameters
        whose gradients are added up in `sums`. `inplace`: the gradient is written over `hidden`,
        which may be in host memory."""
        gradient = hidden if inplace else torch.zeros_like(hidden)
        values = []
        for rows, columns in self._blocks(index):
            with torch.enable_grad():
                value, leaf = self._chunk(index, hidden, rows, columns)
                if inplace and not value.requires_grad:
                    gradient[rows, columns] = 0
                if value.requires_grad:
                    # Chosen by the block's graph, because only that says which parameters the head
                    # used.
                    chosen = choose(leaves([value]))
                    gradient[rows, columns], *parameter_gradients = torch.autograd.grad(
                        value * self.scale, [leaf, *chosen]
                    )
                    for parameter, parameter_gradient in zip(
                        chosen, parameter_gradients, strict=True
                    ):
                        sums[parameter] = (
                            sums[parameter].add_(parameter_gradient)
                            if parameter in sums
                            else parameter_gradient.clone()
                        )
            values.append(value.detach())
        return self._sum(values), gradient

    def values(self, index: int, hidden: Tensor) -> Iterator[Tensor]:
        """Yield `scale` times each block's share of the loss, to be differentiated by the
        parameters of the head.
        """
        for rows, columns, target in self.blocks_to_form(index):
            with torch.enable_grad():
                value = (
                    self._value(partial(self._head, hidden[rows, columns].detach()), target)
                    * self.scale
                )
            yield value

    def _chunk(
        self, index: int, hidden: Tensor, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """Return a block's share of the loss, and the leaf that it depends on unless nothing is
        trained.
        """
        target = self._targets[index][rows, columns]
        block = hidden[rows, columns].to(target.device)
        leaf = block.detach().requires_grad_(torch.is_grad_enabled())
        if self._skipped(index, rows, columns):
            return torch.zeros((), device=target.device), leaf
        return self._value(
            lambda: self.store_logits(index, self._head(leaf), (rows, columns)), target
        ), leaf

    def blocks_to_form(self, index: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the blocks of a micro-batch whose logits are wanted, with their targets."""
        for rows, columns in self._blocks(index):
            if not self._skipped(index, rows, columns):
                yield rows, columns, self._targets[index][rows, columns]

    def _skipped(self, index: int, rows: slice, columns: slice) -> bool:
        return self._logits is None and not _count(self._host_targets[index][rows, columns])

    def _value(self, logits: Callable[[], Tensor], target: Tensor) -> Tensor:
        if self._dft:
            losses = self.cross_entropy(logits, target, reduction="none")
            return (losses * torch.exp(-losses.detach())).sum() / self.num_tokens
        return (
            self.cross_entropy(logits, target, reduction="sum", label_smoothing=self._smoothing)
            / self.num_tokens
        )

    def store_logits(
        self, index: int, block: Tensor, at: tuple[slice, ...], size: int | None = None
    ) -> Tensor:
        """Store logits of a block (rows, columns), and of some words of `size`, for the caller
        who requested them.
        """
        if self._logits is None:
            return block
        if len(self._logits) == index:
            self._logits.append(
                block.new_empty((*self._targets[index].shape, size or block.shape[-1]))
            )
        self._logits[index][at] = block.detach()
        return block

    def _blocks(self, index: int) -> Iterator[tuple[slice, slice]]:
        batch, sequence = self._targets[index].shape
        return blocks(batch, sequence, self._chunk_tokens)

    def _sum(self, values: Iterator[Tensor] | list[Tensor]) -> Tensor:
        return sum(
            values, start=torch.zeros((), dtype=torch.float32, device=self._targets[0].device)
        )
