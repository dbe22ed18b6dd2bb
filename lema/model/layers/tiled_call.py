"""One call of a module in tiles of tokens.

The forward runs the module tile by tile without a graph. The backward runs it again, a tile at a
time, and differentiates each tile before the next one. Gradients of the module's own tensors are
added up in the order of tiles.

What the backward needs is saved by a node of its own in the graph (`_Saved`), before the first tile
runs. So where a layer is recomputed and nothing after the module is needed, the recomputation ends
there, and multiplies nothing in the tiles (`lema.engine.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lema.backend import Backend
from lema.model.capture import draws
from lema.model.layers.adapters import adapters_now
from lema.model.shared_inputs import sharing_now, unwatched
from lema.model.weight_names import adapted_by_parameter, restored_parameters

__all__ = ["CallForm", "TiledCall", "TokenArguments"]

Contexts = Callable[[], AbstractContextManager[object]]
# What arguments that are the same for all tokens may be.
PLAIN = (int, float, str, torch.dtype, torch.device, type(None))


class _TensorArgument:
    """Stands for a tensor among arguments."""


@dataclass(frozen=True)
class CallForm:
    """The arguments of a call without its tensors, which are of tokens: `[rows, sequence, ...]` or
    `[tokens, ...]`."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    leading: torch.Size  # the dimensions of tokens

    @property
    def count(self) -> int:
        """How many tokens there are."""
        return self.leading.numel()

    def with_tensors(
        self, tensors: Sequence[Tensor]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments with these tensors."""
        following = iter(tensors)

        def put(value: object) -> object:
            return next(following) if isinstance(value, _TensorArgument) else value

        args = tuple(map(put, self.args))
        return args, {name: put(value) for name, value in self.kwargs.items()}

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor of all tokens as `[tokens, ...]`."""
        return tensor.reshape(self.count, *tensor.shape[len(self.leading) :])

    def tile(self, flat: Tensor, tokens: slice) -> Tensor:
        """Return some tokens of `[tokens, ...]`, with as many dimensions as the call has."""
        part = flat[tokens]
        return part.unsqueeze(0) if len(self.leading) == 2 else part

    def spans(self, size: int) -> Iterator[slice]:
        """Yield the tiles."""
        for start in range(0, self.count, size):
            yield slice(start, min(start + size, self.count))


@dataclass(frozen=True)
class TokenArguments:
    """The arguments of a call whose tensors all have the same tokens, and in which nothing else
    could differ between them."""

    form: CallForm
    tensors: Sequence[Tensor]  # in the order of the arguments

    @classmethod
    def of(cls, args: tuple[object, ...], kwargs: Mapping[str, object]) -> TokenArguments | None:
        """Return a call's arguments; None: they are of another kind."""
        values = [*args, *kwargs.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors or tensors[0].dim() not in (2, 3) or not tensors[0].is_floating_point():
            return None
        leading = tensors[0].shape[:-1]
        if any(tensor.shape[: len(leading)] != leading for tensor in tensors):
            return None
        if not all(isinstance(value, (Tensor, *PLAIN)) for value in values):
            return None

        def without_tensor(value: object) -> object:
            return _TensorArgument() if isinstance(value, Tensor) else value

        named = {name: without_tensor(value) for name, value in kwargs.items()}
        return cls(CallForm(tuple(map(without_tensor, args)), named, leading), tensors)


@dataclass(frozen=True)
class _Surroundings:
    """How a module computes apart from its tensors, as it was when this was made: under which
    autocast, with which adapters, and with which linears that multiply together."""

    autocast: Contexts
    adapters: Contexts
    sharing: Contexts
    adapted: Sequence[nn.Module]

    @classmethod
    def of(cls, module: nn.Module, device: str) -> _Surroundings:
        """Return those of now."""
        enabled = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)
        cached = torch.is_autocast_cache_enabled()

        def autocast() -> AbstractContextManager[object]:
            return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)

        adapted = adapted_by_parameter(module)
        return cls(autocast, adapters_now(module), sharing_now(), adapted)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have them once more in a `with` block."""
        restored = restored_parameters(self.adapted)
        with self.autocast(), self.adapters(), self.sharing(), restored:
            yield


class _Sums:
    """Gradients of a module's tensors, added up over tiles, in single precision at least."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._totals: list[Tensor | None] = [None] * len(tensors)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add those of a tile."""
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._totals[number]
            if total is None:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                # a copy, because autograd may hand one tensor out twice, and this is written into
                self._totals[number] = gradient.to(dtype, copy=True)
            else:
                total += gradient

    def taken(self) -> list[Tensor | None]:
        """Return the sums, in the types of the tensors."""
        return [
            None if total is None else total.to(tensor.dtype)
            for tensor, total in zip(self._tensors, self._totals, strict=True)
        ]


@dataclass(frozen=True)
class TiledCall:
    """One call of a module that works token by token, in tiles. It holds no tensor of the call,
    because the graph holds it."""

    module: nn.Module
    form: CallForm
    size: int  # tokens of a tile
    backend: Backend  # whose generator draws for dropout
    names: Sequence[str]  # of the module's tensors
    # The generator's state before the first tile; None: nothing is drawn. It is enough, because
    # the backward runs tiles in the order of the forward.
    drawn: Tensor | None
    surroundings: _Surroundings
    saving: _Saving

    @classmethod
    def run(
        cls,
        module: nn.Module,
        forward: Callable[..., Tensor],
        arguments: TokenArguments,
        size: int,
        backend: Backend,
    ) -> Tensor:
        """Return what a module makes of all tokens.

        Args:
            module: the module, with the tensors that it has in this call.
            forward: the module's own.
            arguments: of the call.
            size: tokens of a tile.
            backend: the device.
        """
        named = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        device = arguments.tensors[0].device.type
        call = cls(
            module,
            arguments.form,
            size,
            backend,
            [*named],
            backend.rng_state() if draws(module) else None,
            _Surroundings.of(module, device),
            _Saving([]),
        )
        tensors = [*arguments.tensors, *named.values()]
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return call.outputs(forward, arguments.tensors)
        mark = _Saved.apply(call.saving, *tensors)  # type: ignore[no-untyped-call] # torch's is
        output: Tensor = _Tiled.apply(mark, call, forward, arguments.tensors, *tensors)  # type: ignore[no-untyped-call] # torch's is
        return output

    @torch.no_grad()
    def outputs(self, forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Run the tiles without a graph; return what they make, put together."""
        flat = list(map(self.form.flat, inputs))
        output = None
        for span in self.form.spans(self.size):
            args, kwargs = self.form.with_tensors([self.form.tile(tensor, span) for tensor in flat])
            with unwatched():
                part = forward(*args, **kwargs)
            width = part.shape[len(self.form.leading) :]
            if output is None:
                output = part.new_empty(*self.form.leading, *width)
            self.form.flat(output)[span] = part.reshape(-1, *width)
            # before the next one, whose memory would be another
            del part, args, kwargs
        assert output is not None, "a call has no tokens"
        return output

    def gradients(self, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Run the tiles again, and differentiate each.

        Args:
            gradient: of what the module made.
            needs: of each saved tensor, of tokens or of the module, whether its gradient is asked
                for.
        """
        saved = self.saving.tensors
        num_inputs = len(saved) - len(self.names)
        inputs = [self.form.flat(tensor) for tensor in saved[:num_inputs]]
        leaves = [
            tensor.detach().requires_grad_(asked)
            for tensor, asked in zip(saved[num_inputs:], needs[num_inputs:], strict=True)
        ]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = _Sums(trained)
        input_gradients = [
            torch.zeros_like(tensor) if asked else None
            for tensor, asked in zip(inputs, needs, strict=False)
        ]
        by_token = self.form.flat(gradient)
        named = dict(zip(self.names, leaves, strict=True))
        after = None if self.drawn is None else self.backend.rng_state()
        if self.drawn is not None:
            self.backend.set_rng_state(self.drawn)
        for span in self.form.spans(self.size):
            parts = [
                self.form.tile(tensor, span).detach().requires_grad_(total is not None)
                for tensor, total in zip(inputs, input_gradients, strict=True)
            ]
            args, kwargs = self.form.with_tensors(parts)
            with self.surroundings.again(), torch.enable_grad():
                output = torch.func.functional_call(
                    self.module, named, args, kwargs, tie_weights=False
                )
            asked_inputs = [part for part in parts if part.requires_grad]
            formed = torch.autograd.grad(
                output,
                [*asked_inputs, *trained],
                self.form.tile(by_token, span),
                allow_unused=True,
            )
            totals = [total for total in input_gradients if total is not None]
            for total, part in zip(totals, formed, strict=False):
                if part is not None:
                    total[span] = part.reshape(total[span].shape)
            sums.add(formed[len(totals) :])
            del output, formed, args, kwargs, parts, asked_inputs
        if after is not None:
            self.backend.set_rng_state(after)
        of_inputs = [
            None if total is None else total.view(tensor.shape)
            for total, tensor in zip(input_gradients, saved, strict=False)
        ]
        of_trained = iter(sums.taken())
        return of_inputs + [next(of_trained) if leaf.requires_grad else None for leaf in leaves]


@dataclass(frozen=True)
class _Saving:
    """The node of a graph that has the tensors which a backward in tiles needs."""

    nodes: list[_SavedContext]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, as the graph has saved them."""
        return self.nodes[0].saved_tensors


class _SavedContext(Protocol):
    """What the graph knows of `_Saved`."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Return what was saved."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors."""


class _Saved(torch.autograd.Function):
    """Saves what a backward in tiles needs; returns a tensor without elements, by which the graph
    knows that it does."""

    @staticmethod
    def forward(ctx: _SavedContext, saving: _Saving, *tensors: Tensor) -> Tensor:
        saving.nodes.append(ctx)
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: _SavedContext, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _TiledContext(Protocol):
    """What the backward of `_Tiled` knows of its forward."""

    needs_input_grad: tuple[bool, ...]

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether gradients that there are none of are zeros."""


class _Tiled(torch.autograd.Function):
    """A module in tiles."""

    @staticmethod
    def forward(
        ctx: _TiledContext,
        mark: Tensor,  # noqa: ARG004 - it has the tensors stay in the graph
        call: TiledCall,
        forward: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        *_: Tensor,
    ) -> Tensor:
        ctx.tiled = call  # type: ignore[attr-defined] # autograd keeps it
        ctx.set_materialize_grads(False)
        return call.outputs(forward, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _TiledContext, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[4:]
        if gradient is None:
            return (None,) * (4 + len(needs))
        of_inputs = ctx.tiled.gradients(gradient, needs)  # type: ignore[attr-defined] # as above
        return None, None, None, None, *of_inputs
