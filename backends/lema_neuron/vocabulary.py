"""The input embeddings and the head of a model, divided over a group by their rows, one row for
each word.

Each rank looks up its own words. The sum of the vectors over the ranks is bitwise that of the whole
table. Each rank computes the logits of its words, and these are gathered. For a loss they are not
gathered: for every token each rank finds the largest of its logits, the sum of their exponentials
and the target's logit. The ranks exchange only these three numbers (Megatron-LM's cross-entropy,
Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.overrides import handle_torch_function, has_torch_function

from lema.backend.layout import embedding, shard
from lema_neuron.comm import Comm
from lema_neuron.mappings import copy_to_group, gather_from_group, reduce_from_group
from lema_neuron.shares import Part, sharded_part

__all__ = ["Words", "divide_words", "words_of"]

LOWEST = torch.finfo(torch.float32).min


class Words:
    """The words of a vocabulary that this rank has.

    Args:
        comm: the group.
        size: how many words there are.

    Attributes:
        words_per_rank: how many words a rank has; the last ranks may have fewer.
        first: this rank's first word.
        is_local_only: whether the head returns only the logits of this rank's words, and no vectors
            are needed.
    """

    def __init__(self, comm: Comm, size: int) -> None:
        self.comm = comm
        self.size = size
        self.layout = embedding(comm.size, size)
        self.words_per_rank = -(-size // comm.size)
        self.first = comm.rank * self.words_per_rank
        self.is_local_only = False

    @property
    def is_enough(self) -> bool:
        """Whether there are words for every rank."""
        return self.words_per_rank * (self.comm.size - 1) < self.size

    def local_rows(self, full: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a weight, or of a bias, without padding."""
        rows = shard(full.detach(), self.layout, self.comm.rank)[
            : min(self.words_per_rank, self.size - self.first)
        ]
        return nn.Parameter(rows, requires_grad=full.requires_grad)

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of words in this rank's weight (any row for words of other ranks), and
        which words it has.
        """
        at = ids - self.first
        return at.clamp(0, min(self.words_per_rank, self.size - self.first) - 1), (at >= 0) & (
            at < self.words_per_rank
        )

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        reduction: str,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the same as torch's `cross_entropy` of all words' logits, from the logits of this
        rank's words.

        Args:
            logits: `[..., words of this rank]`, of any precision; the loss is in fp32.
            targets: `[...]`, the same on every rank.
            reduction: `sum` or `none`.
            ignore_index: the target of what has no loss.
            label_smoothing: the part of each target that is spread over all words.
        """
        assert reduction in ("sum", "none"), f"a loss is not reduced by {reduction!r} over ranks"
        flat = logits.reshape(-1, logits.shape[-1])
        asked = targets.reshape(-1)
        losses: Tensor = _CrossEntropy.apply(flat, asked, self, label_smoothing)  # type: ignore[no-untyped-call] # torch's is
        losses = torch.where(asked == ignore_index, 0.0, losses)
        return losses.sum() if reduction == "sum" else losses

    @contextmanager
    def only_local(self) -> Iterator[None]:
        """Make the head return only the logits of this rank's words, in a `with` block. The block
        discards outputs of embeddings, so other ranks need not send them."""
        self.is_local_only = True
        try:
            yield
        finally:
            self.is_local_only = False


def words_of(module: nn.Module | None) -> Words | None:
    """Return how the words of embeddings or a head are divided over ranks; None: they are whole."""
    return getattr(module, "words", None)


def divide_words(model: nn.Module, names: Collection[str], comm: Comm) -> None:
    """Cut the weights of embeddings and a head to this rank's rows, in place; tied weights stay one
    weight. If there are fewer words than ranks, the weights stay whole.

    Args:
        model: the model.
        names: those of the weights, of modules `nn.Embedding` that take only ids, or `nn.Linear`.
        comm: the group.
    """
    # keeps the whole ones, so that each `id` stays unique
    shared: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    vocabularies: dict[int, Words] = {}
    for name in sorted(names):
        module = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(module, nn.Linear | nn.Embedding), (
            f"{name} is of a {type(module).__name__}"
        )
        words = vocabularies.setdefault(module.weight.shape[0], Words(comm, module.weight.shape[0]))
        if not words.is_enough:
            continue
        full = module.weight
        assert isinstance(full, nn.Parameter)
        module.weight = shared.setdefault(id(full), (full, words.local_rows(full)))[1]
        if isinstance(module, nn.Embedding):
            # the id whose row gets no gradient; here it would be another row
            module.padding_idx = None
        elif module.bias is not None:
            module.bias = words.local_rows(module.bias)
        # Methods of this one module, because models check the class of their embeddings, and have
        # their own classes that scale them; a copy of the module has its own methods.
        module.words = words  # type: ignore[assignment] # of this one module
        module.parts = MethodType(_parts, module)  # type: ignore[assignment] # of this one module
        forward = _vectors if isinstance(module, nn.Embedding) else _logits
        module.forward = MethodType(forward, module)  # type: ignore[method-assign] # of this one module


def _parts(module: Any) -> dict[str, Part]:
    part = sharded_part(module.words.layout, module.words.size, module.words.comm)
    return {name: part for name, _ in module.named_parameters(recurse=False)}


def _vectors(module: Any, input: Tensor) -> Tensor:
    """Return the vectors of token ids, as the module's own class makes them."""
    at, mine = module.words.here(input)
    vectors: Tensor = type(module).forward(module, at)
    # Selected instead of multiplied by 0, because a row of another word may not be finite.
    mine_alone = torch.where(mine.unsqueeze(-1), vectors, 0.0)
    return (
        mine_alone
        if module.words.is_local_only
        else reduce_from_group(mine_alone, module.words.comm)
    )


def _logits(module: Any, input: Tensor) -> Tensor:
    """Return the logits of all words, or of this rank's."""
    if has_torch_function((input,)):  # one operation for code that traces tensors through the model
        followed: Tensor = handle_torch_function(_logits, (input,), module, input)
        return followed
    words: Words = module.words
    local_logits = linear(copy_to_group(input, words.comm), module.weight, module.bias)
    if words.is_local_only:
        return local_logits
    return gather_from_group(
        pad(local_logits, (0, words.words_per_rank - local_logits.shape[-1])), words.comm
    )[..., : words.size]


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token, `[tokens]` in fp32, from this rank's logits, `[tokens, words]`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, words: Words, smoothing: float
    ) -> Tensor:
        at, inside = words.here(targets)
        at = at.unsqueeze(-1)
        most = logits.amax(-1).float()
        # torch computes in fp32 if only one operand is in fp32, so no copy of the logits is needed.
        total = torch.sub(logits, most.unsqueeze(-1)).exp_().sum(-1)
        hit = torch.where(inside, logits.gather(-1, at).squeeze(-1).float(), 0.0)
        statistics = [most, total, hit] + (
            [logits.sum(-1, dtype=torch.float32)] if smoothing else []
        )
        # each [ranks, tokens]
        every = words.comm.all_gather(torch.stack(statistics).unsqueeze(0), 0).unbind(1)
        most = every[0].amax(0)
        total = (every[1] * (every[0] - most).exp()).sum(0).log()
        # Subtract first, because the sum's logarithm and the largest logit may have very different
        # sizes.
        losses = total - (every[2].sum(0) - most)
        if smoothing:
            mean = every[3].sum(0) / words.size
            losses = losses * (1 - smoothing) + (total - (mean - most)) * smoothing
        ctx.save_for_backward(logits, at, inside, most + total)
        ctx.smoothing = smoothing
        ctx.size = words.size
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, at, inside, norm = ctx.saved_tensors
        grad = torch.sub(logits, norm.unsqueeze(-1)).exp_()  # softmax
        if ctx.smoothing:
            grad.sub_(ctx.smoothing / ctx.size)
        grad.scatter_add_(-1, at, inside.unsqueeze(-1) * (ctx.smoothing - 1.0))
        return grad.mul_(gradients[0].unsqueeze(-1)).to(logits.dtype), None, None, None
