"""The input embeddings and the head of a model with their rows, one of each word, divided over a group.

Each rank looks up the words it has. Their vectors, summed over the ranks, are those of the whole table, bit for bit. Of
the head's logits each rank makes those of its words, and all are gathered, unless a loss is made of them: then each
rank finds, of every token, the largest of its logits, the sum of their exponentials and the target's logit. These three
numbers are exchanged, and no more (Megatron-LM's cross-entropy, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).
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
    """Which words of a vocabulary this rank has.

    Args:
        comm: the group.
        size: how many words there are.

    Attributes:
        each: how many a rank has; the last ones may have fewer.
        first: the first of this rank's.
        apart: whether the head returns the logits of this rank's words alone, and vectors are not asked for.
    """

    def __init__(self, comm: Comm, size: int) -> None:
        self.comm, self.size = comm, size
        self.layout = embedding(comm.size, size)
        self.each = -(-size // comm.size)
        self.first = comm.rank * self.each
        self.apart = False

    @property
    def is_enough(self) -> bool:
        """Whether there are words for every rank."""
        return self.each * (self.comm.size - 1) < self.size

    def held(self, whole: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a weight, or of a bias, without padding."""
        rows = shard(whole.detach(), self.layout, self.comm.rank)[: min(self.each, self.size - self.first)]
        return nn.Parameter(rows, requires_grad=whole.requires_grad)

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of words among this rank's, any place for those of others, and which are this rank's."""
        at = ids - self.first
        return at.clamp(0, min(self.each, self.size - self.first) - 1), (at >= 0) & (at < self.each)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, *, reduction: str, ignore_index: int = -100, label_smoothing: float = 0.0
    ) -> Tensor:
        """Return what torch's `cross_entropy` of all words' logits does, given those of this rank's words.

        Args:
            logits: `[..., words of this rank]`, of any precision; the loss is in fp32.
            targets: `[...]`, the same on every rank.
            reduction: `sum` or `none`.
            ignore_index: the target of what has no loss.
            label_smoothing: the part of each target that is spread over all words.
        """
        assert reduction in ("sum", "none"), f"a loss is not reduced by {reduction!r} over ranks"
        flat, asked = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        losses: Tensor = _CrossEntropy.apply(flat, asked, self, label_smoothing)  # type: ignore[no-untyped-call]
        losses = torch.where(asked == ignore_index, 0.0, losses)
        return losses.sum() if reduction == "sum" else losses

    @contextmanager
    def left_apart(self) -> Iterator[None]:
        """Let the head return the logits of this rank's words alone, in a `with` block. What embeddings return in it is
        thrown away, so that other ranks are not asked for it."""
        self.apart = True
        try:
            yield
        finally:
            self.apart = False


def words_of(module: nn.Module | None) -> Words | None:
    """Return how the words of embeddings or a head lie over ranks; None: they are whole."""
    return getattr(module, "words", None)


def divide_words(model: nn.Module, names: Collection[str], comm: Comm) -> None:
    """Let embeddings and a head have this rank's rows of their weights, in place; weights that are tied stay one. Where
    there are too few words for every rank to have one, they stay whole.

    Args:
        model: the model.
        names: of the weights, of modules `nn.Embedding` that take nothing but ids, or `nn.Linear`.
        comm: the group.
    """
    shared: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the whole ones, whose `id` is theirs till the end
    vocabularies: dict[int, Words] = {}
    for name in sorted(names):
        module = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(module, nn.Linear | nn.Embedding), f"{name} is of a {type(module).__name__}"
        words = vocabularies.setdefault(module.weight.shape[0], Words(comm, module.weight.shape[0]))
        if not words.is_enough:
            continue
        whole = module.weight
        assert isinstance(whole, nn.Parameter)
        module.weight = shared.setdefault(id(whole), (whole, words.held(whole)))[1]
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # the id whose row gets no gradient, which would mean another row here
        elif module.bias is not None:
            module.bias = words.held(module.bias)
        # Methods of this one module, because models ask of what class their embeddings are, and have classes of their
        # own that scale them; a copy of the module has methods of its own.
        module.words = words  # type: ignore[assignment]
        module.parts = MethodType(_parts, module)  # type: ignore[assignment]
        module.forward = MethodType(_vectors if isinstance(module, nn.Embedding) else _logits, module)  # type: ignore[method-assign]


def _parts(module: Any) -> dict[str, Part]:
    part = sharded_part(module.words.layout, module.words.size, module.words.comm)
    return {name: part for name, _ in module.named_parameters(recurse=False)}


def _vectors(module: Any, input: Tensor) -> Tensor:
    """Return the vectors of token ids, as the module's own class makes them."""
    at, mine = module.words.here(input)
    vectors: Tensor = type(module).forward(module, at)
    # Chosen and not multiplied, because a row of another word may not be finite.
    mine_alone = torch.where(mine.unsqueeze(-1), vectors, 0.0)
    return mine_alone if module.words.apart else reduce_from_group(mine_alone, module.words.comm)


def _logits(module: Any, input: Tensor) -> Tensor:
    """Return the logits of all words, or of this rank's."""
    if has_torch_function((input,)):  # one step for those who follow tensors through the model
        followed: Tensor = handle_torch_function(_logits, (input,), module, input)
        return followed
    words: Words = module.words
    made = linear(copy_to_group(input, words.comm), module.weight, module.bias)
    if words.apart:
        return made
    return gather_from_group(pad(made, (0, words.each - made.shape[-1])), words.comm)[..., : words.size]


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token, `[tokens]` in fp32, of this rank's logits, `[tokens, words]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, words: Words, smoothing: float) -> Tensor:
        at, inside = words.here(targets)
        at = at.unsqueeze(-1)
        most = logits.amax(-1).float()
        # Of numbers of two precisions torch makes fp32: no copy of the logits is needed.
        total = torch.sub(logits, most.unsqueeze(-1)).exp_().sum(-1)
        hit = torch.where(inside, logits.gather(-1, at).squeeze(-1).float(), 0.0)
        found = [most, total, hit] + ([logits.sum(-1, dtype=torch.float32)] if smoothing else [])
        every = words.comm.all_gather(torch.stack(found).unsqueeze(0), 0).unbind(1)  # each [ranks, tokens]
        most = every[0].amax(0)
        total = (every[1] * (every[0] - most).exp()).sum(0).log()
        # The difference first, because the sum's logarithm and the largest logit may be of very different sizes.
        losses = total - (every[2].sum(0) - most)
        if smoothing:
            mean = every[3].sum(0) / words.size
            losses = losses * (1 - smoothing) + (total - (mean - most)) * smoothing
        ctx.save_for_backward(logits, at, inside, most + total)
        ctx.smoothing, ctx.size = smoothing, words.size
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, at, inside, norm = ctx.saved_tensors
        found = torch.sub(logits, norm.unsqueeze(-1)).exp_()  # softmax
        if ctx.smoothing:
            found.sub_(ctx.smoothing / ctx.size)
        found.scatter_add_(-1, at, inside.unsqueeze(-1) * (ctx.smoothing - 1.0))
        return found.mul_(gradients[0].unsqueeze(-1)).to(logits.dtype), None, None, None
