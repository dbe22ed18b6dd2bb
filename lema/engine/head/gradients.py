"""Gradients of weights outside the layers, in the embeddings before them and in the norm and head
after them.

They are added to `.grad` in the backward, one micro-batch after the other, as gradient accumulation
on the whole model adds them. The head's are as large as the head, so they are summed as they are
formed with the loss; where a sum would round otherwise than additions to what is in `.grad`
already, the head's graph is formed again in the backward, block by block. A parameter that both
ends use (tied embeddings) gets the sum of its two gradients in one addition, so the head then waits
until the gradients have come down through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lema.backend import Backend
from lema.engine.trained_weights import OuterGradients, differentiated_again
from lema.errors import ConfigError
from lema.model.capture import changed, tensors_in
from lema.model.flow import LayerCall
from lema.model.state.graph import leaves

if TYPE_CHECKING:
    from lema.engine.head.loss import LossChunks
    from lema.engine.head.rows import RowLoss

__all__ = ["EmbedHead", "check_not_freed", "detached", "graph_input"]

Made = TypeVar("Made", Tensor, tuple[Tensor, ...])
Forward: TypeAlias = Callable[[tuple[Tensor, ...], Sequence[bool]], Made]
Backward: TypeAlias = Callable[[tuple[Tensor, ...]], Sequence[Tensor | None]]


class EmbedHead:
    """The embeddings and the head in one step, with the gradients of their parameters. `loss`: the
    head and the loss; None: they are somebody else's, and only the embeddings are looked after.
    `hidden`: each micro-batch's hidden state before the layers, with its graph where something
    there trains. `calls`: of each layer, the call of each micro-batch. An argument with a graph is
    cut off from it: layers add its gradient to `.grad`, from where it goes on at the end. `outer`:
    the parameters whose gradients the caller's graph gets; None: all are added to `.grad`. Its
    attribute `sums`: of each of the head's parameters the gradient, summed over the blocks that the
    loss was formed of so far."""

    def __init__(
        self,
        backend: Backend,
        loss: LossChunks | RowLoss | None,
        hidden: Sequence[Tensor],
        calls: Sequence[Sequence[LayerCall]],
        trained: Collection[nn.Parameter],
        outer: OuterGradients | None = None,
    ) -> None:
        self._loss = loss
        self._backend = backend
        self._hidden = list(hidden)
        self._cut_arguments = [_cut_off(per_layer) for per_layer in zip(*calls, strict=True)]
        self._trained = {id(parameter): parameter for parameter in trained}
        tensors = [
            *hidden,
            *(tensor for arguments in self._cut_arguments for tensor, _ in arguments),
        ]
        self._before = leaves(tensors) & self._trained.keys()
        self._outer = None if outer is None else outer.among(self._before)
        self._after: set[int] = set()
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._sums_complete = loss is None or loss.at_once  # whether all of them are in the sums
        # of the last layer, and the generator state there
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._factor: Tensor | None = None

    @property
    def reach_below(self) -> bool:
        """Whether gradients go on below the layers."""
        return bool(self._before)

    @property
    def loss(self) -> LossChunks | RowLoss:
        """The head and the loss."""
        assert self._loss is not None, "the loss is somebody else's"
        return self._loss

    def start(self, anchor: Tensor, *, one_graph: bool = False) -> tuple[Tensor, ...]:
        """Return the hidden states before the layers; what arrives as their gradients is carried on
        from there. `one_graph`: the micro-batches are parts of what one graph made, as a tower that
        saw the images of all; it is then differentiated once."""
        if not self._before:
            hidden = tuple(self._hidden)
            self._hidden.clear()  # nothing comes back to them
            return hidden
        alone = tuple(state.detach() for state in self._hidden)
        parameters = () if self._outer is None else self._outer.parameters
        backward = partial(self._start_backward, one_graph=one_graph)
        return detached(lambda *_: alone, backward, anchor, parameters)

    def loss_and_grad(
        self, index: int, output: Tensor, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return micro-batch `index`'s share of the loss, and its gradient by the last layer's
        `output`. `inplace`: the gradient is written over that, which no parameter of the head that
        trains needs any more.
        """
        state = self._backend.rng_state()
        options = {"inplace": True} if inplace else {}
        value, gradient = self.loss.backward(
            index, output, self._formed_at_once, self.sums, **options
        )
        if self._after:
            self._outputs[index] = output, state
        return value, gradient

    def _formed_at_once(self, reached: frozenset[int]) -> list[nn.Parameter]:
        """Choose the head's parameters to sum gradients of: all, if nothing will have been added
        before the sum.
        """
        trained_ids = reached & self._trained.keys()
        self._after |= trained_ids
        chosen = [self._trained[key] for key in trained_ids]
        if self._before & self._after or any(parameter.grad is not None for parameter in chosen):
            self._sums_complete = False
        return chosen if self._sums_complete else []

    def head_backward(self, factor: Tensor) -> None:
        """Add the gradients of the head, of `factor` times the loss, unless they wait for those
        before the layers.
        """
        sums = self.sums
        self.sums = {}
        self._factor = factor
        if self._before & self._after:
            return
        if self._sums_complete and all(parameter.grad is None for parameter in sums):
            self._outputs.clear()
            if sums:
                torch.autograd.backward(
                    list(sums), [gradient * factor for gradient in sums.values()]
                )
        for index in sorted(self._outputs):
            self._differentiate(index, [], [])

    def _start_backward(
        self, gradients: Sequence[Tensor], *, one_graph: bool
    ) -> Sequence[Tensor | None]:
        """Add the gradients of the part before the layers, from those of the hidden states."""
        again = differentiated_again()
        outer = self._outer
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        with nullcontext() if outer is None else outer.collected():
            for index, gradient in enumerate(gradients):
                pairs = [
                    (self._hidden[index], gradient),
                    *((tensor, leaf.grad) for tensor, leaf in self._cut_arguments[index]),
                ]
                done = [
                    (tensor, grad)
                    for tensor, grad in pairs
                    if tensor.requires_grad and grad is not None
                ]
                for _, leaf in self._cut_arguments[index]:
                    leaf.grad = None
                if not again:
                    self._hidden[index] = self._hidden[index].detach()
                    self._cut_arguments[index] = []
                if one_graph:
                    roots += [tensor for tensor, _ in done]
                    root_gradients += [grad for _, grad in done]
                    continue
                self._differentiate(
                    index, [tensor for tensor, _ in done], [grad for _, grad in done], again=again
                )
            self._carry_on(roots, root_gradients, again=again)
        return () if outer is None else outer.handed_over()

    def _differentiate(
        self, index: int, roots: list[Tensor], gradients: list[Tensor], *, again: bool = False
    ) -> None:
        """Add the gradients of one micro-batch: of `roots`, and of its head if that is still to be
        done. `again`: the graphs of the roots are kept for another backward."""
        if index in self._outputs:
            output, state = self._outputs.pop(index)
            after = self._backend.rng_state()
            self._backend.set_rng_state(state)
            for value in self.loss.values(index, output):
                assert self._factor is not None
                torch.autograd.backward([*roots, value], [*gradients, self._factor])
                roots = []
                gradients = []
            self._backend.set_rng_state(after)
        self._carry_on(roots, gradients, again=again)

    def _carry_on(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, again: bool
    ) -> None:
        """Differentiate what is before the layers; `again`: its graph is kept."""
        if not roots:
            return
        if self._outer is None:
            torch.autograd.backward(roots, gradients, retain_graph=again)
        else:
            self._outer.differentiate(roots, gradients, again=again)


def _cut_off(calls: Iterable[LayerCall]) -> list[tuple[Tensor, Tensor]]:
    """Cut the arguments of one micro-batch's calls off from their graphs; return those cut, each
    with what replaced it. A tensor that is an argument of several layers stays one."""
    cut: dict[int, tuple[Tensor, Tensor]] = {}

    def off(value: Any) -> Any:
        # No parameter of the model's own code between layers: its gradient is added where that is
        # differentiated.
        if (
            isinstance(value, Tensor)
            and value.requires_grad
            and not isinstance(value, nn.Parameter)
        ):
            return cut.setdefault(id(value), (value, value.detach().requires_grad_()))[1]
        if isinstance(value, Mapping) and not isinstance(value, dict):
            return (
                changed(dict(value), off)
                if any(tensor.requires_grad for tensor in tensors_in(value))
                else value
            )
        return value

    for call in calls:
        after = [
            replace(step, args=changed(step.args, off), kwargs=changed(step.kwargs, off))
            for step in call.after
        ]
        call.take_arguments(changed(call.args, off), changed(call.kwargs, off), after)
    return list(cut.values())


def check_not_freed(ctx: Any) -> None:
    """Refuse, with `ConfigError`, to differentiate a graph that an earlier backward has freed; note
    whether this one frees it. `ctx` is that of an autograd function, and has `freed`.

    By itself autograd only knows that of graphs that save tensors.
    """
    if ctx.freed:
        what = (
            "a graph of streamed layers is differentiated again, and it was freed by an "
            "earlier backward"
        )
        how = "give retain_graph=True to every backward but the last, or add the losses up"
        raise ConfigError(what, where="backward", how=how)
    ctx.freed = not differentiated_again()


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward[Any],
        backward: Backward,
        anchor: Tensor,  # noqa: ARG004 - autograd looks at it
        *inputs: Tensor,
    ) -> Any:
        ctx.own_backward = backward
        ctx.freed = False
        return forward(inputs, ctx.needs_input_grad[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        check_not_freed(ctx)
        return None, None, None, *ctx.own_backward(gradients)


def detached(
    forward: Forward[Made], backward: Backward, anchor: Tensor, inputs: Sequence[Tensor]
) -> Made:
    """Return `forward`'s results for tensors, without a graph; it is told which of them need a
    gradient. Autograd calls `backward` with the gradients of what it made when these are there, for
    the gradients of what it was given. It knows nothing of graphs inside, whose weights may be
    leased only then. `anchor` requires grad, should nothing given do."""
    outputs: Made = _Detached.apply(forward, backward, anchor, *inputs)  # type: ignore[no-untyped-call] # torch's is
    return outputs


def graph_input(
    anchor: Tensor, state: Tensor, input_gradients: dict[int, Tensor], index: int
) -> Tensor:
    """Return a layer's input as its graph sees it: the graph holds nothing of `state`, its gradient
    goes to `input_gradients[index]`, and autograd refuses to have it written into. `anchor`
    requires grad."""

    def backward(gradients: tuple[Tensor, ...]) -> tuple[()]:
        (input_gradients[index],) = gradients
        return ()

    # a view made in there is what autograd guards
    return detached(lambda *_: state.view_as(state), backward, anchor, ())
