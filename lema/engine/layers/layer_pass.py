"""A pass: rows go up through the layers, and gradients come down, as one autograd function.

Autograd knows nothing of the graphs inside, whose weights are leased only while their layer runs.
A training step forms its loss and the gradients of its top layer at the end of the way up
(`lema.engine.layers.top`), so that weights are leased twice. A caller who forms a loss of his own
gets the last layer's outputs, and gives their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lema.engine.engine import Engine
from lema.engine.head.gradients import check_not_freed
from lema.engine.layers.chunked import ChunkedLayer
from lema.engine.layers.chunked_experts import ChunkedExpertLayer
from lema.engine.layers.experts import ExpertLayer
from lema.engine.layers.layer import Layer, SavedLayer
from lema.engine.layers.reference_rows import ReferenceRows
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import NOTHING, Saving
from lema.engine.layers.top import Top
from lema.engine.layers.whole import WholeLayer
from lema.engine.trained_weights import OuterGradients, differentiated_again
from lema.errors import ConfigError
from lema.model.flow import LayerCall

__all__ = ["LayerPass", "layers_of"]

_Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""The shape and the dtype of a hidden state."""


@dataclass(eq=False)
class _StartDown:
    """The gradients with which a way down begins.

    Args:
        hidden: of each micro-batch, that of the last layer's output.
        of_routers: of each layer, of each micro-batch, those of what its routers made.
    """

    hidden: list[Tensor | None]
    of_routers: dict[int, list[list[Tensor | None]]]

    def scale(self, factor: Tensor, *, inplace: bool) -> None:
        """Multiply them; `inplace`: those of hidden states, which may be in host memory."""
        if inplace:
            for gradient in self.hidden:
                if gradient is not None:
                    gradient.mul_(factor.to(gradient))
        else:
            self.hidden = [_scaled(gradient, factor) for gradient in self.hidden]
        self.of_routers = {
            number: [[_scaled(gradient, factor) for gradient in row] for row in rows]
            for number, rows in self.of_routers.items()
        }


def layers_of(engine: Engine, *, in_chunks: bool = False) -> tuple[Layer[Any], ...]:
    """Return the layers of a model, each of its kind; `in_chunks`: sequences go through them in
    chunks.
    """
    ordinary = ChunkedLayer if in_chunks else WholeLayer
    in_groups = ChunkedExpertLayer if in_chunks else ExpertLayer
    return tuple(
        (in_groups if number in engine.stream.groups else ordinary)(engine, number)
        for number in range(engine.split.num_layers)
    )


class LayerPass:
    """One pass of some rows through some layers.

    Args:
        engine: the objects that every layer works with.
        layers: those that the rows go through here, from the lowest up.
        rows: the rows, in front of the first of them.
        lowest: the lowest layer that gradients reach; None: they reach none of these.
        saving: what the step keeps of the layers.
        reference_rows: extra rows that go through each layer under the same lease; None: there are
            none.
        top: what forms the loss at the end of the way up; None: the pass makes the hidden states.
        outer: the parameters whose gradients the caller's graph gets from this function; None:
            all are added to `.grad`.
        end_first: called when the first layer is done.
    """

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[Layer[Any]],
        rows: Rows,
        *,
        lowest: int | None = None,
        saving: Saving = NOTHING,
        reference_rows: ReferenceRows | None = None,
        top: Top | None = None,
        outer: OuterGradients | None = None,
        end_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._layers = layers
        self._rows = rows
        self._lowest = lowest
        self._saving = saving
        self._reference_rows = reference_rows
        self._top = top
        self._outer = outer
        self._end_first = end_first
        # of each layer that gradients reach: what its backward wants, and of each micro-batch what
        # its output, and what its routers made of it, look like
        self._saved: dict[int, tuple[SavedLayer, list[list[_Kind]]]] = {}
        self._start: _StartDown | None = None

    def up(self, needs_grad: Sequence[bool] = ()) -> Iterator[int]:
        """Take the rows through the layers; yield the number of each that is done. `needs_grad`:
        of each micro-batch, whether its hidden state before the first layer needs a gradient.
        """
        engine = self._engine
        rows = self._rows
        extra = self._reference_rows
        for layer in self._layers:
            number = layer.number
            with engine.leased(number, "forward") as lease:
                if extra is not None:
                    extra.begin(number, rows.states)
                if self._lowest is None or number < self._lowest:
                    layer.run(lease, rows)
                else:
                    # an output needs a gradient as soon as the pass has come to what trains
                    needs = [True] * len(rows.states) if self._saved else needs_grad
                    saved = layer.forward(lease, rows, needs, self._saving)
                    calls = rows.calls[number]
                    kinds = [
                        [(output.shape, output.dtype) for output in (state, *_differentiable(call))]
                        for state, call in zip(rows.states, calls, strict=True)
                    ]
                    self._saved[number] = saved, kinds
                if extra is not None:
                    extra.run(layer, lease)
            if layer is self._layers[0]:
                self._end_first()
            yield number

    def hidden_states(self) -> list[Tensor]:
        """Return each micro-batch's output of the last layer, `[batch, sequence, hidden]`. Autograd
        calls the way down for their gradients, if they have any; what routers of the layers made,
        where somebody asks, is differentiated by way of this pass as well.
        """
        if self._lowest is None or not any(layer.number >= self._lowest for layer in self._layers):
            with torch.no_grad():
                for _ in self.up():
                    pass
            return self._rows.take()
        anchor = self._engine.anchor
        outputs: tuple[Tensor, ...] = _UpAndDown.apply(self, anchor, *self._inputs())  # type: ignore[no-untyped-call] # torch's is
        received: tuple[Tensor, ...] = _HandOver.apply(self, *outputs)  # type: ignore[no-untyped-call] # torch's is
        logits = iter(received[len(self._rows) :])
        for layer in self._layers:
            for call in self._rows.calls[layer.number]:
                if call.routers:
                    call.routers[:] = [
                        next(logits) if output.requires_grad else output for output in call.routers
                    ]
        return [*received[: len(self._rows)]]

    def loss(self) -> Tensor:
        """Return the loss of the step, an fp32 scalar. Autograd calls the way down for its
        gradient.
        """
        value: Tensor = _UpAndDown.apply(self, self._engine.anchor, *self._inputs())  # type: ignore[no-untyped-call] # torch's is
        return value

    def _inputs(self) -> list[Tensor | None]:
        """Return what autograd is given. It would hold on to the states until the pass has ended,
        so those that need no gradient are not among them."""
        parameters = () if self._outer is None else self._outer.parameters
        states = (state if state.requires_grad else None for state in self._rows.states)
        return [*states, *parameters]

    def walk_up(self, needs_grad: Sequence[bool]) -> Tensor | tuple[Tensor, ...]:
        """Take the rows up; return the loss, or hidden states and what routers made.

        Args:
            needs_grad: of each input of the pass, whether it needs a gradient.
        """
        needs = needs_grad[: len(self._rows)]
        for _ in self.up(needs):
            pass
        if self._top is not None:
            return self._form_loss(self._top, [True] * len(self._rows) if self._saved else needs)
        logits = [
            output.detach()
            for layer in self._layers
            for call in self._rows.calls[layer.number]
            for output in _differentiable(call)
        ]
        # Handed over, because they refer to this pass from now on, and a circle would keep them.
        return (*self._rows.take(), *logits)

    def _form_loss(self, top: Top, needs_grad: Sequence[bool]) -> Tensor:
        self._end_first()
        graphs = self._saving.graphs
        if graphs is not None:
            # because the top layer, the head and the loss need the room on the device
            graphs.end_forward()
        formed = top.forward(self._rows, needs_grad)
        if graphs is not None:
            graphs.expect(self._layers[-1].number)
        self._rows.take()
        of_routers: dict[int, list[list[Tensor | None]]] = {
            layer.number: [
                [by[output] for output in _differentiable(call)]
                for call, by in zip(self._rows.calls[layer.number], formed.routers, strict=True)
            ]
            for layer in self._layers
            if formed.routers
        }
        self._start = _StartDown(formed.inputs, of_routers)
        return formed.value

    def receive(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take the gradients of what this pass has made, and return what stands for them: autograd
        would hold them until the way down has ended, and each layer's are let go of on it. None:
        nothing was made of an output.
        """
        logits = iter(gradients[len(self._rows) :])
        of_routers = {
            number: [[next(logits) for _ in of_batch[1:]] for of_batch in kinds]
            for number, (_, kinds) in self._saved.items()
        }
        self._start = _StartDown([*gradients[: len(self._rows)]], of_routers)
        return [
            None if gradient is None else gradient.new_zeros(()).expand(gradient.shape)
            for gradient in gradients
        ]

    def walk_down(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Take gradients down; return those of the inputs of the pass.

        Args:
            gradients: that of the loss, or what stands for those of hidden states.

        Raises:
            ConfigError: the gradients of a loss are wanted twice.
        """
        start = self._start
        if start is None:
            what = "a loss whose gradients were formed with it is differentiated again"
            raise ConfigError(what, where="backward", how="form the loss once more")
        self._start = None
        if self._top is not None:
            start.scale(self._top.backward(gradients[0]), inplace=self._rows.pool is not None)
        return self._down(start.hidden, start.of_routers)

    def _down(
        self,
        gradients: list[Tensor | None],
        of_routers: dict[int, list[list[Tensor | None]]],
    ) -> list[Tensor | None]:
        """Take gradients of the last layer's outputs down through the layers; return those of the
        pass's inputs.

        Args:
            gradients: of each micro-batch.
            of_routers: of each layer, of each micro-batch, those of what its routers made.
        """
        engine = self._engine
        again = differentiated_again()
        outer = self._outer
        with nullcontext() if outer is None else outer.collected():
            for layer in reversed(self._layers):
                number = layer.number
                if number not in self._saved:
                    gradients = [None] * len(gradients)
                    break
                saved, kinds = self._saved[number]
                if not again:
                    del self._saved[number]
                logits = of_routers.pop(number, None) or [[]] * len(gradients)
                if all(gradient is None for gradient in chain(gradients, *logits)):
                    continue  # nothing was made of what this layer and those above have made
                arrived = [
                    [
                        _filled(gradient, kind, engine.backend.device)
                        for gradient, kind in zip((state, *more), of_batch, strict=True)
                    ]
                    for state, more, of_batch in zip(gradients, logits, kinds, strict=True)
                ]
                gradients.clear()
                # put back below, because recomputing draws what the forward drew
                state = engine.backend.rng_state()
                with engine.leased(number, "backward") as lease:
                    gradients = layer.backward(lease, saved, arrived, again=again)
                del arrived
                engine.backend.set_rng_state(state)
                if engine.observes:
                    self._rows.synchronize(gradients)
                engine.observe(number, gradients)
                engine.trained.end(number, saved.leaves)
                del saved
        return [*gradients, *(() if outer is None else outer.handed_over())]


class _HandOver(torch.autograd.Function):
    """Hands what a pass has made to the caller's graph, and the gradients there to the pass."""

    @staticmethod
    def forward(ctx: Any, layer_pass: LayerPass, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.layer_pass = layer_pass
        ctx.set_materialize_grads(False)  # a layer above all gradients has none
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.layer_pass.receive(gradients)


class _UpAndDown(torch.autograd.Function):
    """A pass as autograd sees it. `anchor` requires grad, should nothing else that it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        layer_pass: LayerPass,
        anchor: Tensor,  # noqa: ARG004 - autograd looks at it
        *inputs: Tensor | None,  # noqa: ARG004 - the rows have them
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.layer_pass = layer_pass
        ctx.freed = False
        ctx.set_materialize_grads(False)
        return layer_pass.walk_up(ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        check_not_freed(ctx)
        formed = ctx.layer_pass.walk_down(gradients)
        needed = zip(formed, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient if needs else None for gradient, needs in needed)


def _filled(gradient: Tensor | None, kind: _Kind, device: torch.device) -> Tensor:
    """Return the gradient of an output, which is zero where nothing was made of that."""
    shape, dtype = kind
    return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    return None if gradient is None else gradient * factor.to(gradient.dtype)


def _differentiable(call: LayerCall) -> list[Tensor]:
    """Return what a layer's routers made, where somebody asks, as far as it has a gradient."""
    return [output for output in call.routers or () if output.requires_grad]
