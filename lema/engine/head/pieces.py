"""The head and the loss, with the product by the head's weight formed piece by piece of the
vocabulary.

Each piece is leased as a layer is, and every micro-batch goes through it before the next piece. A
first pass over the pieces finds, of each token, the largest logit, the sum of the exponentials and
the target's logit, as online softmax does (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867). A second, back from the last piece, forms each piece's part of
softmax less target, and with it a part of the gradient of what the product is given. What comes
before the product and after it is the model's own code. Loss and gradients are those of the whole
head but for rounding, because sums over the vocabulary are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import InitVar, dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lema.backend import Backend
from lema.engine.head.loss import IGNORED, LossChunks
from lema.model import Split
from lema.model.capture import replaced
from lema.stream import Lease

__all__ = ["PiecedHead", "piece_passes"]

LOWEST = torch.finfo(torch.float32).min
MADE_UP = 3  # rows of a weight that stands for the head's while the model is taken apart
OfLayer: TypeAlias = Callable[[int], AbstractContextManager[Lease]]
"""Holds a layer's weights, or a piece's by the numbers that follow, for the length of a `with`
block.
"""


class _Reached(Exception):
    """Stops the model's forward at the product."""


class PiecedHead:
    """The model's own head, of whose weight there is one piece at a time. The rows of each piece
    are in `spans`, `(first, end)`; they are leased after the layers, by the numbers that follow.
    `module` has its weight on `meta`."""

    def __init__(
        self, split: Split, backend: Backend, module: nn.Linear, spans: Sequence[tuple[int, int]]
    ) -> None:
        self.backend = backend
        self._split = split
        self._module = module
        self.spans = tuple(spans)
        self._width = module.in_features  # width of the head's input, before norms and the like
        self._dtype = module.weight.dtype

    def standing_in(
        self, product: Callable[[Tensor], Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Have the head return what `product` makes of its input in a `with` block; None: a few
        logits by a weight that is made up, which tell the parts of the model from each other."""
        return replaced({self._module: product or _made_up})

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return the product's input, `[rows, tokens, width]`, from the last layer's output;
        differentiable.
        """
        captured: list[Tensor] = []

        def stop(inputs: Tensor) -> Tensor:
            captured.append(inputs)
            raise _Reached

        with self.standing_in(stop), suppress(_Reached):
            self._split.head(hidden)
        self._width = hidden.shape[-1]
        self._dtype = hidden.dtype
        return captured[0]

    def waiting_bytes(self, inputs: Tensor) -> int:
        """Return the bytes of a micro-batch's `inputs` and of their gradient, which wait while
        other micro-batches go through a piece."""
        return inputs.numel() * (inputs.element_size() + torch.float32.itemsize)

    def product(self, inputs: Tensor, weight: Tensor, span: tuple[int, int]) -> Tensor:
        """Return the product by one piece, as the head itself returns it."""
        bias = self._module.bias
        with self._split.autocast():
            return linear(inputs, weight, None if bias is None else bias[slice(*span)])

    def logits(self, inputs: Tensor, weight: Tensor, span: tuple[int, int]) -> Tensor:
        """Return the model's logits of one piece `[rows, tokens, words]`; differentiable."""
        product = self.product(inputs, weight, span)
        # The hidden state is empty here, because the part before the product is thrown away.
        nothing = torch.zeros((), dtype=self._dtype, device=inputs.device).expand(
            *inputs.shape[:2], self._width
        )
        with self.standing_in(lambda _: product):
            return self._split.head(nothing)

    def leased(
        self, lease: OfLayer, order: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Lease the pieces one after the other, each until the next one is requested; yield
        numbers and weights.
        """
        for piece in range(len(self.spans)) if order is None else order:
            with lease(self._split.num_layers + piece) as leased:
                yield piece, leased.weights["weight"]

    def finite(self, lease: OfLayer, hidden: Sequence[Tensor]) -> bool:
        """Whether all logits of the last layer's outputs are finite."""
        inputs = [self.inputs(state) for state in hidden]
        all_finite = True
        for piece, weight in self.leased(lease):
            # all are leased, because other processes may send their parts
            for state in inputs if all_finite else ():
                all_finite = all_finite and bool(
                    self.logits(state, weight, self.spans[piece]).isfinite().all()
                )
        return all_finite


def _made_up(inputs: Tensor) -> Tensor:
    numbers = torch.arange(MADE_UP * inputs.shape[-1], device=inputs.device) % 17 - 8
    return linear(inputs, (numbers / 64).to(inputs.dtype).view(MADE_UP, inputs.shape[-1]))


@dataclass
class _Block:
    """Some tokens of a micro-batch, and what the passes have found of them so far."""

    index: int  # of the micro-batch
    token_span: tuple[slice, slice]  # rows and columns in it
    inputs: Tensor  # the product's input, `[rows, tokens, width]`
    targets: Tensor  # int64 `[tokens]`
    differentiate: InitVar[bool]

    def __post_init__(self, differentiate: bool) -> None:
        nothing = torch.zeros(self.targets.shape, dtype=torch.float32, device=self.inputs.device)
        self.most = nothing + LOWEST  # the largest logit of each token
        self.total = nothing  # the sum of the exponentials of its logits less that
        self.hit = nothing  # its target's logit
        gradient = (
            torch.zeros(self.inputs.shape, dtype=torch.float32, device=self.inputs.device)
            if differentiate
            else None
        )
        self.gradient = gradient  # of `given`; None: it is not wanted

    def see(self, logits: Tensor, first: int) -> None:
        """Take note of a piece's logits `[rows, tokens, words]`, of the words from `first` on."""
        flat = logits.float().flatten(0, 1)
        most = torch.maximum(self.most, flat.amax(-1))
        self.total = self.total * (self.most - most).exp() + (flat - most[:, None]).exp_().sum(-1)
        self.most = most
        at, inside = self._at(first, flat.shape[-1])
        self.hit = torch.where(inside, flat.gather(-1, at).squeeze(-1), self.hit)

    def drop_inputs(self) -> None:
        """Let go of the product's input, because nothing wants it any more, and its memory is
        wanted.
        """
        self.inputs = self.targets

    def take_gradient(self) -> Tensor:
        """Hand the gradient of the product's input over."""
        assert self.gradient is not None, "the gradient is not wanted, or was handed over"
        gradient = self.gradient
        self.gradient = None
        return gradient

    def loss(self) -> Tensor:
        """Return the sum of the cross-entropies of the tokens that train."""
        # The difference first, because the sum's logarithm and the largest logit may be of very
        # different sizes.
        losses = self.total.log() - (self.hit - self.most)
        return torch.where(self.targets == IGNORED, 0.0, losses).sum()

    def by_logits(self, logits: Tensor, first: int, scale: float | Tensor) -> Tensor:
        """Return the gradient of `scale` times the loss by a piece's logits, shaped as they are,
        in fp32.
        """
        flat = logits.detach().float().flatten(0, 1)
        gradient = (flat - self.most[:, None]).exp_().div_(self.total[:, None])
        at, inside = self._at(first, flat.shape[-1])
        gradient.scatter_add_(-1, at, -inside[:, None].to(gradient.dtype))
        return (
            gradient.masked_fill_((self.targets == IGNORED)[:, None], 0.0)
            .mul_(scale)
            .view(logits.shape)
        )

    def _at(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Return where in a piece each token's target is, `[tokens, 1]`, and whether it is in
        there at all.
        """
        at = self.targets - first
        return at.clamp(0, size - 1)[:, None], (at >= 0) & (at < size)


@torch.no_grad()
def piece_passes(
    head: PiecedHead,
    lease: OfLayer,
    chunks: LossChunks,
    hidden: Sequence[Tensor],
    *,
    differentiate: bool,
    poll: Callable[[], None] = lambda: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Take every micro-batch's last output of the layers through the pieces, and back where it is
    differentiated. Return each one's share of the loss, fp32, and the gradients of `hidden`, of
    `chunks.scale` times the loss. `poll` is called before each micro-batch in each piece; what it
    raises ends the passes."""
    began = head.backend.rng_state()
    blocks = [
        _Block(
            index,
            (rows, columns),
            head.inputs(state[rows, columns]),
            targets.reshape(-1),
            differentiate,
        )
        for index, state in enumerate(hidden)
        for rows, columns, targets in chunks.blocks_to_form(index)
    ]
    order = list(range(len(head.spans)))
    back = order[-2::-1] if differentiate else []
    for number, (piece, weight) in enumerate(head.leased(lease, order + back)):
        span = head.spans[piece]
        up = number < len(order)
        down = differentiate and number >= len(order) - 1
        for block in blocks if up else ():
            poll()
            logits = head.logits(block.inputs, weight, span)
            chunks.store_logits(
                block.index, logits, (*block.token_span, slice(*span)), head.spans[-1][1]
            )
            block.see(logits, span[0])
            del logits  # because the next block's would otherwise exist at the same time
        for block in blocks if down else ():
            poll()
            _back(head, block, weight, span, chunks.scale / chunks.num_tokens)
        del weight  # because the lease ends where the next begins
    values = [torch.zeros((), dtype=torch.float32, device=state.device) for state in hidden]
    for block in blocks:
        values[block.index] = values[block.index] + block.loss() / chunks.num_tokens
    if not differentiate:
        return values, []
    for block in blocks:
        block.drop_inputs()
    after = head.backend.rng_state()
    # because the part before the product runs again, and may draw
    head.backend.set_rng_state(began)
    gradients = [_by_hidden(head, index, state, blocks) for index, state in enumerate(hidden)]
    head.backend.set_rng_state(after)
    return values, gradients


def _back(
    head: PiecedHead, block: _Block, weight: Tensor, span: tuple[int, int], scale: float | Tensor
) -> None:
    """Add a piece's part to the gradient of what the product was given."""
    assert block.gradient is not None
    with torch.enable_grad():
        leaf = block.inputs.detach().requires_grad_()
        logits = head.logits(leaf, weight, span)
        by_logits = block.by_logits(logits, span[0], scale).to(logits.dtype)
    # Added in fp32, because the parts are many, and in half precision each sum would be rounded.
    block.gradient.add_(torch.autograd.grad(logits, leaf, by_logits)[0])


def _by_hidden(head: PiecedHead, index: int, hidden: Tensor, blocks: Sequence[_Block]) -> Tensor:
    """Return the gradient of a micro-batch's hidden state, given those of what the product was
    given.
    """
    gradient = torch.zeros_like(hidden)
    for block in blocks:
        if block.index == index and block.gradient is not None:
            with torch.enable_grad():
                leaf = hidden[block.token_span].detach().requires_grad_()
                inputs = head.inputs(leaf)
            gradient[block.token_span] = torch.autograd.grad(
                inputs, leaf, block.take_gradient().to(inputs.dtype)
            )[0]
    return gradient
