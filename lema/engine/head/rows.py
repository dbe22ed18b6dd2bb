"""A loss of rows: it is known once the log-probabilities of all rows of a pass are, and so are its gradients.

The head runs once. Beside each token's log-probability it gives that one's gradient by the hidden state, which takes as
much memory as the hidden states. The objective then only scales it, because the head works on each position by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lema.backend import Parallel
from lema.data.preference import EXAMPLE, Of
from lema.engine.head.loss import IGNORED, LossChunks, blocks, targets_of
from lema.engine.head.objectives import Measured, Objective, Scored, merged
from lema.errors import DataError
from lema.model.state.graph import leaves

__all__ = ["RowLoss", "mismatched_of", "row_targets"]

MISMATCHED = "mismatched_"  # how the names of what KTO's KL term is estimated from begin
ADVANTAGES, OLD_LOGPS = "advantages", "old_logps"


def row_targets(batch: Mapping[str, Tensor], objective: Objective) -> Tensor:
    """Return the tokens of `[rows, sequence]` whose log-probabilities are wanted, -100 elsewhere; shifted."""
    labels = batch["labels"]
    if objective.prompts:
        seen = batch.get("attention_mask")
        ids = batch["input_ids"] if seen is None else batch["input_ids"].masked_fill(seen == 0, IGNORED)
        labels = torch.where(batch[EXAMPLE][:, Of.LABEL, None] == 1, ids, labels)
    return targets_of(labels)


def mismatched_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of a micro-batch with other rows' completions, as a micro-batch."""
    found = {name.removeprefix(MISMATCHED): one for name, one in batch.items() if name.startswith(MISMATCHED)}
    if not found:
        how = "read the data with objective: kto"
        raise DataError("a batch for the KL term of KTO has no mismatched completions", where="batch", how=how)
    return found


class RowLoss:
    """The loss of one pass as an objective makes it of its rows; `head`, `chunk_tokens`, `scale` and `parallel` are as
    of `LossChunks`, `batches` the micro-batches, in host memory, and `targets` what `row_targets` returns of each, on
    the device. `measured` is what the objective has measured, once it is settled. `DataError`: no token of the pass is
    trained, or a batch lacks what the objective needs."""

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
        self._head, self._objective, self._batches = head, objective, batches
        self.targets: Sequence[Tensor] = targets
        self._chunk_tokens, self.scale = chunk_tokens, scale
        known = [row_targets(batch, objective) for batch in batches]
        chunks = LossChunks(head, targets, chunk_tokens, known=known, parallel=parallel)
        self._blocks, self._cross_entropy = chunks.blocks_to_form, chunks.cross_entropy
        self._known = [one.cpu().numpy() for one in known]
        wanted = ADVANTAGES if objective.advantages else EXAMPLE
        if not all(wanted in batch for batch in batches):
            how = "read the data with the run's objective, or add what `lema.data.preference` requires"
            raise DataError(f"a batch lacks what the objective needs of its rows: {wanted}", how=how)
        said = [batch[EXAMPLE].cpu() for batch in batches if EXAMPLE in batch]
        self._about = torch.cat(said).numpy() if len(said) == len(batches) else self._one_batch()
        self._coefficients: list[Tensor] = []
        # None: not requested, or processes divide the vocabulary, and none has all words of a token.
        divided = parallel is not None and parallel.size > 1
        wanted_means = not (objective.advantages or divided)
        self._means = [torch.zeros(one.shape, device=one.device) for one in targets] if wanted_means else None
        self.measured: Measured = {}

    @property
    def num_examples(self) -> int:
        """Examples of the batches of this pass, in all processes."""
        counts = {int(row[Of.BATCH]): int(row[Of.EXAMPLES]) for row in self._about}
        return sum(counts.values())

    def _one_batch(self) -> npt.NDArray[np.int64]:
        """Mark rows without a description as one batch, of this process."""
        rows, tokens = sum(map(len, self._known)), sum(int((one != IGNORED).sum()) for one in self._known)
        about = np.zeros((rows, len(Of)), dtype=np.int64)
        about[:, Of.PLACE] = np.arange(rows)
        about[:, Of.LABEL], about[:, Of.BATCHES] = 1, 1
        about[:, Of.EXAMPLES], about[:, Of.TOKENS] = rows, tokens
        return about

    def forward(self, hidden: Tensor, targets: Tensor, index: int | None = None) -> Tensor:
        """Return the log-probabilities of `targets` `[rows, tokens]`, 0 where there is none, from the last hidden.
        `index`: the micro-batch, if this is the model that is measured, and not its reference."""
        with torch.no_grad():
            logps = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
            for rows, columns in blocks(len(targets), targets.shape[1], self._chunk_tokens):
                place = None if index is None else (index, rows, columns)
                logps[rows, columns] = self._logps(hidden[rows, columns], targets[rows, columns], place)
        return logps

    def backward(
        self,
        index: int,
        hidden: Tensor,
        choose: Callable[[frozenset[int]], Sequence[nn.Parameter]],
        sums: dict[nn.Parameter, Tensor],  # noqa: ARG002 - they are formed once the loss is known
    ) -> tuple[Tensor, Tensor]:
        """Return micro-batch `index`'s log-probabilities, and the gradient of each by its place in `hidden`."""
        logps = torch.zeros(self.targets[index].shape, dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden)
        for rows, columns, target in self._blocks(index):
            leaf = hidden[rows, columns].detach().requires_grad_()
            with torch.enable_grad():
                found = self._logps(leaf, target, (index, rows, columns))
                choose(leaves([found]))
                (gradient[rows, columns],) = torch.autograd.grad(found.sum(), leaf)
            logps[rows, columns] = found.detach()
        return logps, gradient

    def settle(
        self,
        logps: Sequence[Tensor],
        reference: Sequence[Tensor] | None = None,
        mismatched: Sequence[Sequence[Tensor]] = (),
        *,
        differentiate: bool = True,
    ) -> Tensor:
        """Return this process's share of the loss of the pass, an fp32 scalar; its gradients are formed as well.
        `logps` are of each micro-batch, `reference` are those of the reference, and `mismatched` of each
        micro-batch's mismatched rows, by the model and by the reference; none: not asked for."""
        given = [one.detach().requires_grad_(differentiate) for one in logps]
        with torch.set_grad_enabled(differentiate):
            whole, total = _side_by_side(given), torch.zeros((), device=logps[0].device)
            self.measured = {}
            for number in dict.fromkeys(int(one) for one in self._about[:, Of.BATCH]):
                scored, share = self._batch(number, whole, reference, mismatched)
                loss, measured = self._objective.score(scored)
                total = total + loss * share
                merged(measured, self.measured)
        if differentiate:
            self._coefficients = list(torch.autograd.grad(total, given))
        return total.detach()

    def scaled(self, index: int, gradient: Tensor) -> Tensor:
        """Return the gradient of `scale` times the loss, given what `backward` returned for a micro-batch."""
        factor = (self._coefficients[index] * self.scale).unsqueeze(-1)
        # In fp32, because a coefficient of a half would lose digits before it is used.
        return (gradient.float() * factor).to(gradient.dtype)

    def values(self, index: int, hidden: Tensor) -> Iterator[Tensor]:
        """Yield what, differentiated by the parameters of the head, gives the gradients of `scale` times the loss."""
        for rows, columns, target in self._blocks(index):
            with torch.enable_grad():
                logps = self._logps(hidden[rows, columns].detach(), target)
                value = (logps * self._coefficients[index][rows, columns]).sum() * self.scale
            yield value

    def _logps(self, hidden: Tensor, targets: Tensor, place: tuple[int, slice, slice] | None = None) -> Tensor:
        def head() -> Tensor:
            logits = self._head(hidden)
            if place is not None and self._means is not None:
                self._means[place[0]][place[1:]] = logits.detach().mean(dim=-1, dtype=torch.float32)
            return logits

        return -self._cross_entropy(head, targets, reduction="none").view(targets.shape)

    def _batch(
        self, number: int, logps: Tensor, reference: Sequence[Tensor] | None, mismatched: Sequence[Sequence[Tensor]]
    ) -> tuple[Scored, float]:
        """Return the rows of one batch of the pass, and the share of its loss in that of the pass."""
        device, about = logps.device, self._about
        places = np.flatnonzero(about[:, Of.BATCH] == number)
        own = about[places]
        at = torch.from_numpy(places).to(device)
        order = np.argsort(own[:, Of.PLACE], kind="stable")
        # By their place in the batch, because the parts of a pair may lie in different micro-batches.
        sides = [torch.from_numpy(order[own[order, Of.LABEL] == label]).to(device) for label in (1, 0)]
        labels = _side_by_side([targets_of(batch["labels"]) for batch in self._batches], IGNORED)
        old = [targets_like(batch[OLD_LOGPS]) for batch in self._batches if OLD_LOGPS in batch]
        advantages = [batch[ADVANTAGES] for batch in self._batches if ADVANTAGES in batch]
        if advantages and advantages[0].dim() > 1:  # of each token
            advantages = [_side_by_side([targets_like(one) for one in advantages])]
        sums = [torch.cat([one.sum(dim=1) for one in each])[at] for each in mismatched]
        scored = Scored(
            logps[at],
            (labels != IGNORED).to(device)[at],
            sides[0],
            sides[1],
            num_examples=int(own[0, Of.EXAMPLES]),
            num_tokens=int(own[0, Of.WHOLE if self._objective.prompts else Of.TOKENS]),
            reference=None if reference is None else _side_by_side(reference)[at],
            mismatched=(sums[0], sums[1]) if sums else None,
            advantages=torch.cat(advantages).to(device)[at] if advantages else None,
            old_logps=_side_by_side(old).to(device)[at] if old else None,
            mean_logits=None if self._means is None else _side_by_side(self._means)[at],
        )
        return scored, 1.0 / int(own[0, Of.BATCHES])


def targets_like(values: Tensor) -> Tensor:
    """Shift values `[rows, sequence]` that stand on their tokens as `targets_of` shifts labels."""
    return pad(values, (0, 1))[..., 1:]


def _side_by_side(parts: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Return rows of several lengths as one tensor, each made longer with `value`; differentiable."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=value) for part in parts])
