"""A loss of rows: it is known once the log-probabilities of all rows of a pass are, and so are its
gradients.

The head runs once. Beside each token's log-probability it gives that one's gradient by the hidden
state, which takes as much memory as the hidden states. The objective then only scales it, because
the head works on each position by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lema.backend import Parallel
from lema.data.preference import EXAMPLE, ExampleColumn
from lema.engine.head.loss import IGNORED, LossChunks, blocks, targets_of
from lema.engine.head.objectives import Measured, Objective, Scored, merged
from lema.errors import DataError
from lema.model.state.graph import leaves

__all__ = ["RowLoss", "mismatched_of", "row_targets"]

MISMATCHED = "mismatched_"  # how the names of what KTO's KL term is estimated from begin
ADVANTAGES = "advantages"
OLD_LOGPS = "old_logps"


def row_targets(batch: Mapping[str, Tensor], objective: Objective) -> Tensor:
    """Return the tokens of `[rows, sequence]` whose log-probabilities are wanted, -100
    elsewhere; shifted.
    """
    labels = batch["labels"]
    if objective.prompts:
        seen = batch.get("attention_mask")
        ids = (
            batch["input_ids"]
            if seen is None
            else batch["input_ids"].masked_fill(seen == 0, IGNORED)
        )
        labels = torch.where(batch[EXAMPLE][:, ExampleColumn.LABEL, None] == 1, ids, labels)
    return targets_of(labels)


def mismatched_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of a micro-batch with other rows' completions, as a micro-batch."""
    mismatched = {
        name.removeprefix(MISMATCHED): tensor
        for name, tensor in batch.items()
        if name.startswith(MISMATCHED)
    }
    if not mismatched:
        how = "read the data with objective: kto"
        raise DataError(
            "a batch for the KL term of KTO has no mismatched completions", where="batch", how=how
        )
    return mismatched


class RowLoss:
    """The loss of one pass as an objective makes it of its rows; `head`, `chunk_tokens`, `scale`
    and `parallel` are as of `LossChunks`, `batches` the micro-batches, in host memory, and
    `targets` what `row_targets` returns of each, on the device. `measured` is what the objective
    has measured, once it is settled. `DataError`: no token of the pass is trained, or a batch lacks
    what the objective needs."""

    at_once = False

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        objective: Objective,
        batches: Sequence[Mapping[str, Tensor]],
        targets: Sequence[Tensor],
        chunk_tokens: int,
        *,
        scale: float | Tensor = 1.0,
        parallel: Parallel | None = None,
    ) -> None:
        self._head = head
        self._objective = objective
        self._batches = batches
        self.targets: Sequence[Tensor] = targets
        self._chunk_tokens = chunk_tokens
        self.scale = scale
        host_targets = [row_targets(batch, objective) for batch in batches]
        self._chunks = LossChunks(
            head, targets, chunk_tokens, host_targets=host_targets, parallel=parallel
        )
        self._host_targets = [target.cpu().numpy() for target in host_targets]
        required = ADVANTAGES if objective.advantages else EXAMPLE
        if not all(required in batch for batch in batches):
            how = (
                "read the data with the run's objective, or add what `lema.data.preference` "
                "requires"
            )
            raise DataError(
                f"a batch lacks what the objective needs of its rows: {required}", how=how
            )
        examples = [batch[EXAMPLE].cpu() for batch in batches if EXAMPLE in batch]
        self._about = (
            torch.cat(examples).numpy() if len(examples) == len(batches) else self._one_batch()
        )
        self._coefficients: list[Tensor] = []
        # None: not requested, or processes divide the vocabulary, and none has all words of a
        # token.
        divided = parallel is not None and parallel.size > 1
        wanted_means = not (objective.advantages or divided)
        self._means = (
            [torch.zeros(target.shape, device=target.device) for target in targets]
            if wanted_means
            else None
        )
        self.measured: Measured = {}

    @property
    def num_examples(self) -> int:
        """Examples of the batches of this pass, in all processes."""
        counts = {
            int(row[ExampleColumn.BATCH]): int(row[ExampleColumn.EXAMPLES]) for row in self._about
        }
        return sum(counts.values())

    def _one_batch(self) -> npt.NDArray[np.int64]:
        """Mark rows without a description as one batch, of this process."""
        rows = sum(map(len, self._host_targets))
        tokens = sum(int((target != IGNORED).sum()) for target in self._host_targets)
        about = np.zeros((rows, len(ExampleColumn)), dtype=np.int64)
        about[:, ExampleColumn.INDEX] = np.arange(rows)
        about[:, ExampleColumn.LABEL] = 1
        about[:, ExampleColumn.BATCHES] = 1
        about[:, ExampleColumn.EXAMPLES] = rows
        about[:, ExampleColumn.TOKENS] = tokens
        return about

    def forward(self, hidden: Tensor, targets: Tensor, index: int | None = None) -> Tensor:
        """Return the log-probabilities of `targets` `[rows, tokens]`, 0 where there is none, from
        the last hidden. `index`: the micro-batch, if this is the model that is measured, and not
        its reference."""
        with torch.no_grad():
            logps = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
            for rows, columns in blocks(len(targets), targets.shape[1], self._chunk_tokens):
                block = None if index is None else (index, rows, columns)
                logps[rows, columns] = self._logps(
                    hidden[rows, columns], targets[rows, columns], block
                )
        return logps

    def backward(
        self,
        index: int,
        hidden: Tensor,
        choose: Callable[[frozenset[int]], Sequence[nn.Parameter]],
        sums: dict[nn.Parameter, Tensor],  # noqa: ARG002 - they are formed once the loss is known
    ) -> tuple[Tensor, Tensor]:
        """Return micro-batch `index`'s log-probabilities, and the gradient of each by its place
        in `hidden`.
        """
        logps = torch.zeros(self.targets[index].shape, dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden)
        for rows, columns, target in self._chunks.blocks_to_form(index):
            leaf = hidden[rows, columns].detach().requires_grad_()
            with torch.enable_grad():
                block_logps = self._logps(leaf, target, (index, rows, columns))
                choose(leaves([block_logps]))
                (gradient[rows, columns],) = torch.autograd.grad(block_logps.sum(), leaf)
            logps[rows, columns] = block_logps.detach()
        return logps, gradient

    def finish(
        self,
        logps: Sequence[Tensor],
        reference: Sequence[Tensor] | None = None,
        mismatched: Sequence[Sequence[Tensor]] = (),
        *,
        differentiate: bool = True,
    ) -> Tensor:
        """Return this process's share of the loss of the pass, an fp32 scalar; its gradients are
        formed as well. `logps` are of each micro-batch, `reference` are those of the reference, and
        `mismatched` of each micro-batch's mismatched rows, by the model and by the reference; none:
        not asked for."""
        logp_leaves = [batch_logps.detach().requires_grad_(differentiate) for batch_logps in logps]
        with torch.set_grad_enabled(differentiate):
            all_logps = _side_by_side(logp_leaves)
            total = torch.zeros((), device=logps[0].device)
            self.measured = {}
            for number in dict.fromkeys(
                int(batch) for batch in self._about[:, ExampleColumn.BATCH]
            ):
                scored, share = self._batch(number, all_logps, reference, mismatched)
                loss, measured = self._objective.score(scored)
                total = total + loss * share
                merged(measured, self.measured)
        if differentiate:
            self._coefficients = list(torch.autograd.grad(total, logp_leaves))
        return total.detach()

    def scaled(self, index: int, gradient: Tensor) -> Tensor:
        """Return the gradient of `scale` times the loss, given what `backward` returned for a
        micro-batch.
        """
        factor = (self._coefficients[index] * self.scale).unsqueeze(-1)
        # In fp32, because a coefficient of a half would lose digits before it is used.
        return (gradient.float() * factor).to(gradient.dtype)

    def values(self, index: int, hidden: Tensor) -> Iterator[Tensor]:
        """Yield what, differentiated by the parameters of the head, gives the gradients of
        `scale` times the loss.
        """
        for rows, columns, target in self._chunks.blocks_to_form(index):
            with torch.enable_grad():
                logps = self._logps(hidden[rows, columns].detach(), target)
                value = (logps * self._coefficients[index][rows, columns]).sum() * self.scale
            yield value

    def _logps(
        self, hidden: Tensor, targets: Tensor, block: tuple[int, slice, slice] | None = None
    ) -> Tensor:
        def head() -> Tensor:
            logits = self._head(hidden)
            if block is not None and self._means is not None:
                self._means[block[0]][block[1:]] = logits.detach().mean(dim=-1, dtype=torch.float32)
            return logits

        return -self._chunks.cross_entropy(head, targets, reduction="none").view(targets.shape)

    def _batch(
        self,
        number: int,
        logps: Tensor,
        reference: Sequence[Tensor] | None,
        mismatched: Sequence[Sequence[Tensor]],
    ) -> tuple[Scored, float]:
        """Return the rows of one batch of the pass, and the share of its loss in that of the
        pass.
        """
        device = logps.device
        about = self._about
        indices = np.flatnonzero(about[:, ExampleColumn.BATCH] == number)
        batch_rows = about[indices]
        at = torch.from_numpy(indices).to(device)
        order = np.argsort(batch_rows[:, ExampleColumn.INDEX], kind="stable")
        # By their place in the batch, because the parts of a pair may lie in different
        # micro-batches.
        sides = [
            torch.from_numpy(order[batch_rows[order, ExampleColumn.LABEL] == label]).to(device)
            for label in (1, 0)
        ]
        labels = _side_by_side([targets_of(batch["labels"]) for batch in self._batches], IGNORED)
        old = [targets_like(batch[OLD_LOGPS]) for batch in self._batches if OLD_LOGPS in batch]
        advantages = [batch[ADVANTAGES] for batch in self._batches if ADVANTAGES in batch]
        if advantages and advantages[0].dim() > 1:  # of each token
            advantages = [_side_by_side([targets_like(advantage) for advantage in advantages])]
        sums = [
            torch.cat([row_logps.sum(dim=1) for row_logps in batch_logps])[at]
            for batch_logps in mismatched
        ]
        scored = Scored(
            logps[at],
            (labels != IGNORED).to(device)[at],
            sides[0],
            sides[1],
            num_examples=int(batch_rows[0, ExampleColumn.EXAMPLES]),
            num_tokens=int(
                batch_rows[
                    0, ExampleColumn.ALL_TOKENS if self._objective.prompts else ExampleColumn.TOKENS
                ]
            ),
            reference=None if reference is None else _side_by_side(reference)[at],
            mismatched=(sums[0], sums[1]) if sums else None,
            advantages=torch.cat(advantages).to(device)[at] if advantages else None,
            old_logps=_side_by_side(old).to(device)[at] if old else None,
            mean_logits=None if self._means is None else _side_by_side(self._means)[at],
        )
        return scored, 1.0 / int(batch_rows[0, ExampleColumn.BATCHES])


def targets_like(values: Tensor) -> Tensor:
    """Shift values `[rows, sequence]` that stand on their tokens as `targets_of` shifts labels."""
    return pad(values, (0, 1))[..., 1:]


def _side_by_side(parts: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Return rows of several lengths as one tensor, each made longer with `value`;
    differentiable.
    """
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=value) for part in parts])
