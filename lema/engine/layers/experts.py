"""A layer whose experts are leased in groups: what is no expert, then each group for all
micro-batches.

Every micro-batch runs through the layer as far as it goes without the experts' result, and waits
there (`lema.model.flow.Suspended`). Then each group of experts is leased in turn, and adds what it
makes of the tokens that are routed to it. In the backward the same groups come the other way round,
between two parts of each micro-batch's backward; what each keeps of the layer waits on the device
until then, or is let go and made again (`Engine.runs_again`). docs/internals/experts.md has the
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lema.activations.stepstore import StepBoundaries
from lema.engine.engine import Direction, Engine
from lema.engine.layers.layer import LossAndGrad, TopGradients
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.trained_weights import Leaves
from lema.model import Split
from lema.model.capture import tensors_in
from lema.model.experts import ExpertInputs, NarrowedExperts, Routed
from lema.model.flow import LayerCall, Suspended
from lema.stream import LayerStream, Lease
from lema.stream.schedule import ExpertGroup

__all__ = [
    "ExpertGroups",
    "ExpertLayer",
    "SavedInputs",
    "Sums",
    "call_in_groups",
    "resumed",
]

Sums = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of experts of one layer, which is on lease; `at` says where memory runs out, if
    somebody asks.
    """

    split: Split
    stream: LayerStream
    lease: Lease
    at: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

    @contextmanager
    def _leased(self, group: ExpertGroup, direction: Direction) -> Iterator[NarrowedExperts]:
        """Lease a group; yields the layer's experts as those of the group."""
        name = self.stream.name_of(group.number)
        layer = self.lease.layer
        span = self.stream.trace.span(direction, name)
        experts = self.split.experts_of(layer)
        assert experts is not None
        with (
            self.at(f"in the {direction} of {name}"),
            self.stream.lease(group.number) as group_lease,
            span,
        ):
            weights = self.split.renamed(layer, {**self.lease.weights, **group_lease.weights})
            with experts.narrowed(weights, group) as narrowed:
                yield narrowed

    @torch.no_grad()
    def results(
        self, expert_inputs: Sequence[ExpertInputs], direction: Direction = "forward"
    ) -> list[Tensor]:
        """Return the experts' outputs for their inputs from each micro-batch, `[tokens,
        hidden]`.
        """
        groups = self.stream.groups[self.lease.layer]
        routed = [Routed.of(inputs, groups) for inputs in expert_inputs]
        sums = [routing.sums() for routing in routed]
        for number, group in enumerate(groups):
            with self._leased(group, direction) as experts:
                for routing, total in zip(routed, sums, strict=True):
                    for pairs in routing.of_group(number):
                        with self.split.autocast(routing.autocast):
                            output = experts.run(routing.arguments(pairs))
                        routing.add(total, pairs, output)
        for index, routing in enumerate(routed):  # one by one, because a sum may be twice as wide
            sums[index] = sums[index].to(routing.inputs[0].dtype)
        return sums

    def differentiated(
        self, expert_inputs: Sequence[ExpertInputs], gradients: Sequence[Tensor], sums: Sums
    ) -> list[tuple[Tensor, Tensor]]:
        """Return of each micro-batch the gradients of what the experts were given: hidden states,
        and weights of experts; `gradients` are those of the experts' results. Those of the experts'
        adapters are added to `sums`."""
        groups = self.stream.groups[self.lease.layer]
        routed = [Routed.of(inputs, groups) for inputs in expert_inputs]
        by_hidden = [routing.sums() for routing in routed]
        by_weights = [torch.zeros_like(routing.inputs[2]) for routing in routed]
        for number in reversed(range(len(groups))):
            with self._leased(groups[number], "backward") as experts:
                adapted = [
                    leaf_and_sum
                    for adapter_factors in experts.factors
                    for leaf_and_sum in adapter_factors.sums(sums)
                ]
                leaves = [leaf for leaf, _ in adapted]
                trained = experts.trained()
                for routing, gradient, states, factors in zip(
                    routed, gradients, by_hidden, by_weights, strict=True
                ):
                    for pairs in routing.of_group(number):
                        hidden, chosen, expert_weights = routing.arguments(pairs)
                        grad_inputs = [hidden.requires_grad_(), expert_weights.requires_grad_()]
                        with torch.enable_grad(), self.split.autocast(routing.autocast):
                            output = experts.run((hidden, chosen, expert_weights))
                        formed = torch.autograd.grad(
                            output,
                            [*grad_inputs, *leaves, *trained],
                            gradient.index_select(0, pairs.tokens),
                            allow_unused=True,
                        )
                        # because the next pairs are run while these would still be named
                        del output, hidden, grad_inputs
                        routing.add(states, pairs, formed[0])
                        factors.view(-1)[pairs.pairs] = formed[1].flatten()
                        for (_, total), by in zip(adapted, formed[2:], strict=False):
                            if by is not None:
                                total.add_(by[:, : total.shape[1], : total.shape[2]])
                        for parameter, by in zip(trained, formed[2 + len(leaves) :], strict=True):
                            if by is not None:
                                summed = sums.get(parameter)
                                sums[parameter] = by if summed is None else summed.add_(by)
                        del formed
        for index, routing in enumerate(routed):
            by_hidden[index] = by_hidden[index].to(routing.inputs[0].dtype)
        return list(zip(by_hidden, by_weights, strict=True))


def waiting_bytes(
    layer_input: Tensor, expert_inputs: Sequence[Tensor], *, reads_values: bool
) -> int:
    """Return the bytes of a micro-batch that wait in the backward while groups of a layer's experts
    are leased, without those of its graph.

    Args:
        layer_input: what the layer is given.
        expert_inputs: what the experts are given: hidden states, the numbers of the experts that
            are chosen for each token, and their factors.
        reads_values: whether the backward looks at what the experts make.
    """
    hidden, chosen, factors = expert_inputs
    # Hidden states, the gradient of what the experts make of them, and that if it is looked at;
    # gradients of hidden states are added up in single precision.
    sums = hidden.numel() * torch.promote_types(hidden.dtype, torch.float32).itemsize
    states = layer_input.nbytes + (2 + reads_values) * hidden.nbytes + sums
    # of pairs of a token and an expert their order, and the gradients of their factors
    return states + 2 * (chosen.nbytes + factors.nbytes)


def call_in_groups(
    split: Split, stream: LayerStream, lease: Lease, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer's own forward as `Split.call_layer` does, its experts in groups; no gradient
    is formed.
    """
    half = split.suspended(
        lease.layer, lambda: split.call_layer(lease.layer, lease.weights, args, kwargs)
    )
    return half.resume(ExpertGroups(split, stream, lease).results([(None, half.expert_inputs)])[0])


@dataclass(eq=False)
class SavedInputs:
    """What the layer keeps of a step: its inputs, in boundaries, and what runs it again."""

    calls: Sequence[LayerCall]
    boundaries: StepBoundaries
    needs_grad: Sequence[bool]
    asks_routers: bool  # whether somebody asks what routers make
    states: list[Tensor] = field(default_factory=list)  # the generator's, before each micro-batch
    leaves: Leaves = field(default_factory=dict)


class ExpertLayer:
    """A layer whose experts are leased in groups while it is on lease itself.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self.number = number
        self._engine = engine

    def _groups(self, lease: Lease) -> ExpertGroups:
        engine = self._engine
        return ExpertGroups(engine.split, engine.stream, lease, engine.retry.at)

    @torch.no_grad()
    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""
        states = (rows.state(index) for index in range(len(rows.states)))
        outputs = self._through_groups(lease, rows.calls[self.number], states)
        rows.put([rows.stored(index, output) for index, output in enumerate(outputs)])

    @torch.no_grad()
    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch, without a graph."""
        weights = {**lease.weights, **leaves}
        return self._engine.split.run_layer(self.number, weights, call, state)

    def forward(
        self, lease: Lease, rows: Rows, needs_grad: Sequence[bool], saving: Saving
    ) -> SavedInputs:
        """Take a step's rows through the layer; see `lema.engine.layers.layer.Layer`."""
        engine = self._engine
        number = self.number
        calls = rows.calls[number]
        boundaries = saving.boundaries_of(number)
        assert boundaries is not None, "a layer in groups keeps its graph"
        asks_routers = calls[0].routers is not None
        saved = SavedInputs(calls, boundaries, needs_grad, asks_routers)

        def layer_inputs() -> Iterator[Tensor]:
            for index, (state, needs) in enumerate(zip(rows.states, needs_grad, strict=True)):
                saved.states.append(engine.generator_state())
                layer_input = boundaries.keep(number, index, state)
                yield layer_input.detach().requires_grad_(needs and asks_routers)

        outputs = self._through_groups(lease, calls, layer_inputs())
        rows.put([output.detach() for output in outputs])
        for call in calls:
            if call.routers:
                call.routers[:] = [
                    logits.detach().requires_grad_(logits.requires_grad) for logits in call.routers
                ]
        return saved

    def _through_groups(
        self, lease: Lease, calls: Sequence[LayerCall], hidden: Iterable[Tensor]
    ) -> list[Tensor]:
        """Run every micro-batch through the layer. Nothing of a graph is kept; that there is one
        says of what routers make whether it will have a gradient.
        """
        engine = self._engine
        halves = list[Suspended]()
        for call, state in zip(calls, hidden, strict=True):
            engine.stop.poll()
            with (
                saved_tensors_hooks(lambda _: None, _forgotten),
                torch.set_grad_enabled(call.routers is not None),
            ):
                halves.append(_half(engine, lease, call, state))
        after = engine.backend.rng_state()
        expert_inputs = [
            (call.autocast, half.expert_inputs) for call, half in zip(calls, halves, strict=True)
        ]
        results = self._groups(lease).results(expert_inputs)
        outputs = []
        for index, (call, half) in enumerate(zip(calls, halves, strict=True)):
            with torch.no_grad():
                outputs.append(resumed(engine, call.autocast, half, results[index]))
            results[index] = halves[index] = expert_inputs[index] = None  # type: ignore[call-overload] # it is done with
        engine.backend.set_rng_state(after)
        return outputs

    def backward(
        self,
        lease: Lease,
        saved: SavedInputs,
        gradients: Sequence[Sequence[Tensor]],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; see
        `lema.engine.layers.layer.Layer`.
        """
        groups = self._groups(lease)
        parts = self._parts(lease, saved, again=again)
        reads_values = any(part.reads_values for part in parts)
        expert_inputs = [part.expert_inputs for part in parts]
        results = list[Tensor]()
        values: list[Any] = (
            groups.results(expert_inputs, "backward") if reads_values else [None] * len(parts)
        )
        for index, part in enumerate(parts):
            results.append(part.begin(gradients[index][0], values[index]))
            values[index] = None
        adapters: Sums = {}
        expert_gradients = groups.differentiated(expert_inputs, results, adapters)
        del expert_inputs
        input_gradients = list[Tensor | None]()
        for index in range(len(parts)):
            part = parts.pop(0)
            results[index] = torch.empty(0)
            roots = part.roots(*expert_gradients.pop(0), gradients[index][1:])
            torch.autograd.backward([*roots], [*roots.values()])
            input_gradients.append(part.input.grad)
            del part, roots
        for parameter in [*adapters]:  # one by one, because each is copied
            torch.autograd.backward([parameter], [adapters.pop(parameter)])  # adds to .grad
        return input_gradients

    def _parts(self, lease: Lease, saved: SavedInputs, *, again: bool) -> list[_Part]:
        """Run each micro-batch again as far as its experts."""
        parts = list[_Part]()
        for index, (call, state) in enumerate(zip(saved.calls, saved.states, strict=True)):
            with saved.boundaries.fetch(self.number, index, again=again) as boundary:
                # A copy, because the layer waits for its experts longer than a boundary is kept
                # here.
                copied = boundary.detach().clone().requires_grad_(saved.needs_grad[index])
                part = _Part(self._engine, lease, call, copied, state, saved.asks_routers)
                parts.append(part)
                part.run()
                part.probe()
                if self._engine.runs_again:
                    part.let_go()
            call.ask_routers(False)
        return parts

    def differentiate(
        self,
        lease: Lease,
        leaves: Leaves,  # noqa: ARG002 - weights of such a layer do not train
        rows: Rows,
        needs_grad: Sequence[bool],
        loss_and_grad: LossAndGrad,
        *,
        sums: Sized = (),  # noqa: ARG002 - a pass in groups is not attempted again in parts
        states: Sequence[Tensor] | None = None,
    ) -> TopGradients:
        """Take a step's rows through the top layer, the head and the loss, and back; see
        `lema.engine.layers.layer.Layer`.
        """
        assert states is None, "a layer in groups goes through the layers with rows of a reference"
        engine = self._engine
        calls = rows.calls[self.number]
        parts = list[_Part]()
        after = engine.backend.rng_state()
        groups = self._groups(lease)
        for call, state, needs in zip(calls, rows.states, needs_grad, strict=True):
            leaf = state.detach().requires_grad_(needs)
            drawn = engine.generator_state()
            parts.append(_Part(engine, lease, call, leaf, drawn, call.routers is not None))
            parts[-1].run()
            after = engine.backend.rng_state()
            if engine.runs_again:
                parts[-1].probe()
                parts[-1].let_go()
                # because a look draws the part after the experts again
                engine.backend.set_rng_state(after)
        results = groups.results([part.expert_inputs for part in parts])
        values = list[Tensor]()
        below = list[dict[Tensor, Tensor | None]]()
        top_logits = list[list[Tensor]]()
        for index, (call, part) in enumerate(zip(calls, parts, strict=True)):
            engine.stop.poll()
            output = part.made_of(results[index])
            engine.backend.set_rng_state(after)
            with engine.retry.at("in the head and the loss"):
                value, gradient = loss_and_grad(index, output.detach())
            after = engine.backend.rng_state()
            engine.observe(self.number + 1, [gradient])
            router_gradients = dict[Tensor, Tensor | None]()
            if engine.routers is not None:
                share, router_gradients = engine.routers.loss_and_grad(index)
                value = value + share
            top_logits.append(
                [
                    by
                    for logits in call.routers or ()
                    if (by := router_gradients.pop(logits)) is not None
                ]
            )
            below.append(router_gradients)
            values.append(value)
            results[index] = part.begin(gradient)
            del output, gradient
        formed = TopGradients(torch.stack(values).sum(), routers=below)
        adapters: Sums = {}
        expert_inputs = [part.expert_inputs for part in parts]
        expert_gradients = groups.differentiated(expert_inputs, results, adapters)
        del expert_inputs
        for index, call in enumerate(calls):
            part = parts.pop(0)
            results[index] = torch.empty(0)
            roots = part.roots(*expert_gradients.pop(0), top_logits[index])
            self._end_part(part, call, roots, formed)
            del part, roots
        engine.backend.set_rng_state(after)
        formed.weights.append([*adapters.items()])
        return formed

    def _end_part(
        self, part: _Part, call: LayerCall, roots: dict[Tensor, Tensor], formed: TopGradients
    ) -> None:
        """Differentiate one micro-batch of the top layer in the end, and add what is formed."""
        needs = part.input.requires_grad
        call_tensors = [
            tensor for tensor in tensors_in(call.captured_values) if tensor.requires_grad
        ]
        adapters = self._engine.adapters_of(self.number)
        grad_inputs: list[Tensor] = [*[part.input] * needs, *adapters, *call_tensors]
        gradients = (
            torch.autograd.grad([*roots], grad_inputs, [*roots.values()], allow_unused=True)
            if grad_inputs
            else ()
        )
        self._engine.observe(self.number, gradients[:needs])
        formed.inputs.append(gradients[0] if needs else None)
        pairs: Iterator[tuple[Tensor, Tensor | None]] = zip(grad_inputs, gradients, strict=True)
        formed.weights.append(list(pairs)[needs:])


def _half(engine: Engine, lease: Lease, call: LayerCall, hidden: Tensor) -> Suspended:
    def run() -> Tensor:
        return engine.split.run_layer(lease.layer, lease.weights, call, hidden, compiled=False)

    return engine.split.suspended(lease.layer, run)


def resumed(
    engine: Engine, autocast: torch.dtype | None, half: Suspended, result: Tensor
) -> Tensor:
    """Return what the layer returns, given its experts' result."""
    engine.backend.set_rng_state(half.drawn)
    with engine.split.autocast(autocast):
        output: Tensor = half.resume(result)
    return output


def _forgotten(_: None) -> Tensor:
    raise AssertionError("a graph is differentiated that kept nothing")


@dataclass(eq=False)
class _Part:
    """One micro-batch in the backward of a layer, which stops at the experts and goes on behind
    them. What comes before them has a graph, which waits; or is let go, and made again at the end
    by another run."""

    _engine: Engine
    _lease: Lease
    _call: LayerCall
    input: Tensor  # of the layer
    _state: Tensor  # the generator's, before the layer
    _asks: bool  # whether somebody asks what routers make
    expert_inputs: ExpertInputs = field(init=False)  # to the experts
    routers: list[Tensor] = field(default_factory=list)  # their outputs that have a gradient
    reads_values: bool = False  # whether the backward looks at the values of the experts' result
    output: Tensor | None = None  # of the layer
    _half: Suspended | None = None
    _result: Tensor | None = None  # of the experts, without a graph
    _gradient: Tensor = field(init=False)  # of the output
    _again: bool = False  # whether the graph is freed and made again

    def run(self) -> None:
        """Run the layer as far as its experts."""
        call = self._call
        self._engine.stop.poll()
        self._engine.backend.set_rng_state(self._state)
        call.ask_routers(self._asks)
        with torch.enable_grad():
            self._half = _half(self._engine, self._lease, call, self.input)
        self.expert_inputs = call.autocast, self._half.expert_inputs
        self.routers = [logits for logits in call.routers or () if logits.requires_grad]

    def probe(self) -> None:
        """Make what the layer returns of a result of zeros, which is as good unless the backward
        looks at its values; note whether it does."""
        assert self._half is not None
        with self._half.looking() as observed:
            self.made_of(torch.zeros_like(self._half.expert_inputs[0]))
        self.reads_values = bool(observed)

    def let_go(self) -> None:
        """Free the graph of the part before the experts."""
        assert self._half is not None
        self._again = True
        self._half = self._half.detached()
        router_logits = self._call.routers or []
        router_logits[:] = [
            logits.detach().requires_grad_(logits.requires_grad) for logits in router_logits
        ]
        self.expert_inputs = (self._call.autocast, self._half.expert_inputs)
        self.routers = []
        self.output = self._result = None

    def made_of(self, result: Tensor) -> Tensor:
        """Make what the layer returns of its experts' result, with a graph; return it."""
        assert self._half is not None
        self._result = result.detach().requires_grad_()
        with torch.enable_grad():
            # A copy, because models add to their experts' result in place.
            self.output = resumed(
                self._engine, self._call.autocast, self._half, self._result.clone()
            )
        return self.output

    def begin(self, gradient: Tensor, result: Tensor | None = None) -> Tensor:
        """Return the gradient of the experts' result, given that of what the layer returns. The
        `result` is where its values are wanted and not there yet."""
        if result is not None or self.output is None:
            self.made_of(torch.zeros_like(self.expert_inputs[1][0]) if result is None else result)
        assert self.output is not None and self._result is not None
        self._gradient = gradient
        (result_gradient,) = torch.autograd.grad(
            self.output, [self._result], gradient, retain_graph=not self._again
        )
        if self._again:  # only the experts' inputs are needed, or only their result
            self._half = self.output = None
            self._result = self._result if self.reads_values else None
        return result_gradient

    def roots(
        self, by_hidden: Tensor, by_weights: Tensor, routers: Sequence[Tensor]
    ) -> dict[Tensor, Tensor]:
        """Return all that is differentiated in the end, with gradients: of what the experts were
        given, and of what routers made, these."""
        if self._again:
            self.run()
            self.made_of(
                torch.zeros_like(self.expert_inputs[1][0]) if self._result is None else self._result
            )
        self._call.ask_routers(False)
        hidden, _, weights = self.expert_inputs[1]
        assert self.output is not None
        gradients = {hidden: by_hidden, weights: by_weights, self.output: self._gradient}
        roots = dict(zip(self.routers, routers, strict=True))
        return roots | {tensor: by for tensor, by in gradients.items() if tensor.requires_grad}
