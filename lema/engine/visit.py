"""Visits: one layer, forward and backward, over all micro-batches of a step, as one autograd function.

The forward of a visit keeps only each micro-batch's input to the layer (its boundary activation). The backward leases
the layer again and recomputes (Chen et al. 2016, https://arxiv.org/abs/1604.06174), one micro-batch at a time. The top
layer, the head and the loss are one visit: the graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lema.activations.hoststates import HostState, HostStates, on_device
from lema.activations.kept import StepBoundaries, StepGraphs
from lema.backend import Backend
from lema.backend.interrupt import NEVER
from lema.engine.beside import Beside, settled
from lema.engine.grouped import GroupedVisit, through_groups, top_in_groups
from lema.engine.head.gradients import EmbedHead, apart, graph_input
from lema.engine.head.routers import RouterLoss
from lema.engine.head.rows import RowLoss
from lema.engine.oom import OomRetry
from lema.engine.recompute import Graph
from lema.engine.skip_matmuls import AdaptedLinears
from lema.engine.trained_weights import AskedGradients, Leaves, TrainedWeights, differentiated_again
from lema.model import Split
from lema.model.capture import tensors_in
from lema.model.flow import LayerCall
from lema.stream import LayerStream, Lease

__all__ = ["Engine", "visit", "visit_frozen", "visit_top"]

Way: TypeAlias = Literal["forward", "backward"]
Turn: TypeAlias = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Makes of a micro-batch's number and the top layer's output its share of the loss, and the gradient of the output."""


class Engine:
    """The objects that every visit works with: the model in its parts, the stream of weights, the device.

    Attributes:
        anchor: requires grad, so that a visit is differentiated even when the lowest hidden state does not.
        retry: attempts again what ran out of device memory.
        outer: stands for the anchor in the graph that the visits are in; inside of them, `anchor` is in the graphs.
        trained: the weights of layers that train themselves.
        gradients: takes what visits that are made now add to `.grad`, where a caller asks for it; None: nobody can.
        routers: the loss of routers, which is added to steps of `visit_top`; None: it is left out.
        runs_again: whether what comes before experts in groups is run twice in a backward, so that no graph waits.
        stop: asked before each micro-batch whether the run is to stop.
        look: called in the backward as soon as gradients of hidden states are formed, with the number of the layer of
            whose inputs they are (the number of layers for the top layer's outputs) and with them, some of them None.
    """

    def __init__(self, split: Split, stream: LayerStream, backend: Backend) -> None:
        self.split, self.stream, self.backend = split, stream, backend
        # Copied, not computed, and no scalar: of a lazy device's graphs it is an input from the first on.
        self.anchor = torch.zeros(1).to(backend.device).requires_grad_()
        self.retry = OomRetry(stream, backend, split.state)
        self.outer = self.anchor
        self.trained = TrainedWeights({}, lambda *_: None)
        self.gradients: AskedGradients | None = None
        self.routers: RouterLoss | None = None
        self.runs_again = False
        self.stop = NEVER
        self._end_visit: Callable[[], None] = getattr(backend, "end_visit", lambda: None)  # a backend may have one
        self.look: Callable[[int, Sequence[Tensor | None]], None] = lambda *_: None
        self._state: Tensor | None = None

    def generator_state(self) -> Tensor:
        """Return the generator's state, in the tensor returned last time if nothing was drawn since. One tensor is
        enough, because without dropout every layer and micro-batch has the same state of kilobytes."""
        state = self.backend.rng_state()
        if self._state is None or not torch.equal(state, self._state):
            self._state = state
        return self._state

    @contextmanager
    def leased(self, layer: int, way: Way) -> Iterator[Lease]:
        """Lease a layer for its visit, which is traced; an error of memory in it says where it was."""
        span = self.stream.trace.span(way, f"layer {layer}")
        with self.retry.at(f"in the {way} of layer {layer}"), self.stream.lease(layer) as lease, span:
            yield lease
        self._end_visit()

    def trains(self, layer: int) -> bool:
        """Whether anything in a layer trains."""
        return self.trained.trains(layer) or bool(self.adapters_of(layer))

    def adapters_of(self, layer: int) -> list[nn.Parameter]:
        """Return the trainable parameters of one layer."""
        return [p for p in self.split.layers[layer].parameters() if p.requires_grad]


def visit(
    engine: Engine,
    layer: int,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    boundaries: StepBoundaries | None,
    graphs: StepGraphs | None = None,
    beside: Beside | None = None,
    room: int = 0,
    products: bool = False,
) -> tuple[Tensor, ...]:
    """Run every micro-batch through a layer, to be differentiated: `[batch, sequence, hidden]` each, in and out.
    `calls` are the layer's other arguments, for each micro-batch. The inputs wait for the backward in `boundaries`, and
    the layer is recomputed there, but for the first micro-batches, whose activations fill `room` bytes; None: all are
    kept, in `graphs` or, without them, on the device. The rows `beside` those that train go through in the same lease.
    `products`: of a layer that is recomputed, the products by frozen weights are kept on the device.
    """
    # Apart, because the graph inside has weights that are on lease only during the two visits.
    visit: _LayerVisit | GroupedVisit
    if layer in engine.split.groups:
        assert boundaries is not None and beside is None, "a layer in parts keeps its graph, or has rows beside"
        visit = GroupedVisit(engine, layer, calls, boundaries)
    else:
        away = graphs if boundaries is None else None
        visit = _LayerVisit(engine, layer, calls, boundaries, away, beside, room, products)
    made = apart(visit.forward, visit.backward, engine.outer, hidden)
    each = len(made) // len(calls)
    for index, call in enumerate(calls):
        more = iter(made[index * each + 1 :])
        if call.routers:  # is differentiated by way of this visit, as the hidden states are
            call.routers[:] = [next(more) if one.requires_grad else one for one in call.routers]
    return made[::each]


@torch.no_grad()
def visit_frozen(
    engine: Engine,
    layer: int,
    calls: Sequence[LayerCall],
    hidden: Sequence[Any],
    beside: Beside | None = None,
    away: HostStates | None = None,
) -> tuple[Any, ...]:
    """Run every micro-batch through a layer that no gradient reaches; arguments as `visit`'s. Hidden states come from
    host memory, and go `away` there; None: they are on the device."""
    outputs, place = list[Any](), f"in the forward of layer {layer}"
    with engine.leased(layer, "forward") as lease:

        def run(index: int) -> Tensor | HostState:
            made = engine.split.run_layer(layer, lease.weights, calls[index], on_device(hidden, index))
            return made if away is None else away.keep(index, made)

        if layer in engine.split.groups:
            made = through_groups(engine, lease, calls, (on_device(hidden, index) for index in range(len(hidden))))
            return tuple(made) if away is None else tuple(away.keep(*one) for one in enumerate(made))
        for index in range(len(calls)):
            engine.stop.poll()
            outputs.append(engine.retry.run_forward(place, partial(run, index), engine.generator_state()))
        if beside is not None:
            beside.through(layer, lease, hidden)
    return tuple(outputs)


def visit_top(
    engine: Engine,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    embed_head: EmbedHead,
    beside: Beside | None = None,
) -> Tensor:
    """Run the top layer, the head and the loss; return the loss of all micro-batches, an fp32 scalar."""
    visit = _TopVisit(engine, calls, embed_head, beside)
    below = [[] if engine.routers is None else engine.routers.made(index) for index in range(len(calls))]
    given = [one for state, made in zip(hidden, below, strict=True) for one in (state, *made)]
    return apart(visit.forward, visit.backward, engine.anchor, given)


@dataclass(eq=False)
class _LayerVisit:
    """One layer, forward and backward, over all micro-batches of a step."""

    _engine: Engine
    _layer: int
    _calls: Sequence[LayerCall]
    _boundaries: StepBoundaries | None
    _away: StepGraphs | None
    _beside: Beside | None
    _room: int
    _products: bool
    _graphs: list[tuple[Graph, list[GradientEdge]]] = field(default_factory=list)
    _boundary: list[Tensor] = field(default_factory=list)  # of the micro-batch whose backward runs
    _found: dict[int, Tensor] = field(default_factory=dict)  # gradients of the inputs
    _leaves: Leaves = field(default_factory=dict)  # for the weights that train

    def __post_init__(self) -> None:
        # No product is skipped where weights are cast for it, because it saves what they were cast to; nor is anything
        # kept, because that would keep the cast weights.
        cast = any(call.autocast not in (None, self._engine.split.dtype) for call in self._calls)
        layer = self._engine.split.layers[self._layer]
        self._linears = None if self._boundaries is None or cast else AdaptedLinears(layer)
        self._room = 0 if cast or self._engine.split.lazy else self._room
        self._asked = self._engine.gradients

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer: `[batch, sequence, hidden]` each, in and out. After each comes what
        its routers made, where somebody asks and it has a graph."""
        engine, layer, outputs = self._engine, self._layer, list[Tensor]()
        with engine.leased(layer, "forward") as lease:
            self._leaves = engine.trained.leaves(layer, lease)
            for index, (state, needs) in enumerate(zip(hidden, needs_grad, strict=True)):
                engine.stop.poll()
                given = state.detach() if self._boundaries is None else self._boundaries.keep(layer, index, state)
                drawn = engine.generator_state()
                run = partial(self._run, lease, index, given, needs=needs, state=drawn)
                outputs += engine.retry.run_forward(f"in the forward of layer {layer}", run, drawn)
            if self._beside is not None:
                self._beside.through(layer, lease, hidden)
        self._beside = None
        return tuple(outputs)

    def _run(self, lease: Lease, index: int, given: Tensor, *, needs: bool, state: Tensor) -> list[Tensor]:
        """Run one micro-batch through the layer, and keep its graph; `state` is the generator's."""
        engine, call, compiled = self._engine, self._calls[index], self._engine.split.compiles(self._layer)
        again = None
        if self._boundaries is not None and not self._room:
            again = self._runner(index, state, needs=needs, compiled=compiled)
        keep = None if self._away is None else self._away.keep(self._layer, index, tensors_in(call.own))
        # Whole where tensors have no address, because no tensor is known for a weight there.
        # And where modules have hooks, which would see values that were not formed.
        whole = compiled or not lease.has_address or call.hooks is not None
        graph = Graph(again, self._linears, products=self._products, whole=whole, keep=keep)
        with graph.built(lease):
            if again is not None:
                given = given.detach().requires_grad_(needs)
            elif needs:
                given = graph_input(engine.anchor, given, self._found, index)
            weights = {**lease.weights, **self._leaves}
            made = _made(engine, self._layer, weights, call, given, compiled=compiled)
        # Edges and not outputs, because these are the next layer's inputs, and kept as such.
        self._graphs.append((graph, [] if again else list(map(get_gradient_edge, made))))
        self._room = max(0, self._room - sum(graph.held.values()))
        return [one.detach() for one in made]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are added to `.grad`."""
        engine, again = self._engine, differentiated_again()
        after = engine.backend.rng_state()  # put back below, because recomputing draws what the forward drew
        each = len(gradients) // len(self._graphs)
        collected = nullcontext() if self._asked is None else self._asked.collected()
        with engine.leased(self._layer, "backward") as lease, collected:
            for name, weight in engine.trained.leaves(self._layer, lease).items():
                self._leaves[name].data = weight.detach()  # the slot of the forward holds another layer now
            for index, (graph, edges) in enumerate(self._graphs):
                engine.stop.poll()
                if self._away is not None:
                    self._away.expect_after(self._layer, index)
                with ExitStack() as stack:
                    if self._boundaries is not None:
                        self._boundary.append(
                            stack.enter_context(self._boundaries.kept(self._layer, index, again=again))
                        )
                        stack.callback(self._boundary.clear)
                    graph.backward(lease, edges, gradients[index * each : (index + 1) * each], again=again)
                if not again:
                    self._graphs[index] = None  # type: ignore[call-overload] # this micro-batch's graph is done with
        engine.backend.set_rng_state(after)
        found = [self._found.get(index) for index in range(len(self._graphs))]
        engine.look(self._layer, found)
        engine.trained.end(self._layer, self._leaves)
        self._found.clear()
        if not again:
            self._leaves = {}
            self._graphs, self._boundaries, self._away = [], None, None
        return found

    def _runner(self, index: int, state: Tensor, *, needs: bool, compiled: bool) -> Callable[[Lease], Sequence[Tensor]]:
        """Return the function that runs a micro-batch through the layer again, from the generator's first `state`. It
        does not refer to the visit, because the visit's graph holds it, and a circle would keep tensors too long."""
        engine, layer, boundary, leaves = self._engine, self._layer, self._boundary, self._leaves
        call, found, asked = self._calls[index], self._found, self._calls[index].routers is not None

        def run(lease: Lease) -> Sequence[Tensor]:
            engine.backend.set_rng_state(state)
            given = boundary[0].detach()
            if needs or not lease.has_address:
                # On a device that compiles graphs also for an input whose gradient is not needed, so that the lowest
                # layer's backward is the graph of the others'.
                given = graph_input(engine.anchor, given, found, index)
            anew = replace(call, routers=[] if asked else None)  # what the first run has noted is looked at no more
            return _made(engine, layer, {**lease.weights, **leaves}, anew, given, compiled=compiled)

        return run


def _made(
    engine: Engine, layer: int, weights: Mapping[str, Tensor], call: LayerCall, given: Tensor, *, compiled: bool
) -> list[Tensor]:
    """Run a layer; return its output, and what its routers made, where somebody asks and it has a graph."""
    output = engine.split.run_layer(layer, weights, call, given, compiled=compiled)
    return [output, *(one for one in call.routers or () if one.requires_grad)]


@dataclass(eq=False)
class _TopVisit:
    """The top layer, the head and the loss: gradients are formed in the forward, handed on in the backward."""

    _engine: Engine
    _calls: Sequence[LayerCall]
    _embed_head: EmbedHead
    _beside: Beside | None
    _inputs: list[Tensor | None] = field(default_factory=list)  # gradients of the inputs
    _others: list[list[tuple[Tensor, Tensor | None]]] = field(default_factory=list)  # what else has one, with that
    _leaves: Leaves = field(default_factory=dict)  # for the weights that train

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> Tensor:
        engine, embed_head = self._engine, self._embed_head
        top, retry = engine.split.num_layers - 1, engine.retry
        place, each = f"in the forward of layer {top}", len(hidden) // len(self._calls)
        hidden, needs_grad = hidden[::each], needs_grad[::each]  # the others are only there to have gradients
        with retry.at(place), engine.stream.lease(top) as lease:
            total = torch.zeros((), dtype=torch.float32, device=engine.backend.device)
            self._leaves = engine.trained.leaves(top, lease)
            turn: Turn = embed_head.turn
            if top in engine.split.groups:
                assert self._beside is None, "a layer in parts has rows beside"
                total, self._inputs, self._others = top_in_groups(engine, lease, self._calls, turn, hidden, needs_grad)
                self._calls = ()
                return total
            states, after = None, None
            if self._beside is not None:
                total, known, states = settled(
                    engine, lease, self._leaves, self._calls, hidden, embed_head, self._beside
                )
                turn, after = _known_turn(embed_head, known), engine.backend.rng_state()
            for index, (call, state) in enumerate(zip(self._calls, hidden, strict=True)):
                engine.stop.poll()
                if states is not None:  # because what dropout drew when the loss was formed is drawn again
                    engine.backend.set_rng_state(states[index])
                needs = needs_grad[index]
                run = partial(_top_layer, engine, lease, self._leaves, call, turn, index, state, needs=needs)
                value, given, others = retry.run_forward(place, run, engine.generator_state(), embed_head.sums)
                total = total + value
                self._inputs += given
                self._others.append(others)
            if after is not None:
                engine.backend.set_rng_state(after)
        self._calls, self._beside = (), None
        return total

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradient of the loss into those of the inputs; those of all else are added to `.grad`."""
        factor = gradients[0] / self._embed_head.loss.scale
        self._embed_head.head_backward(factor)
        for found in self._others:
            pairs = [(leaf, gradient * factor) for leaf, gradient in found if gradient is not None]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])  # adds to .grad, in order
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                leaf.grad *= factor  # 1, but where the loss was changed after it was formed
        self._engine.trained.end(self._engine.split.num_layers - 1, self._leaves)
        scaled = [None if state is None else state * factor.to(state.dtype) for state in self._inputs]
        self._inputs, self._others, self._leaves = [], [], {}
        del self._embed_head
        return scaled


def _top_layer(
    engine: Engine, lease: Lease, leaves: Leaves, call: LayerCall, turn: Turn, index: int, state: Tensor, *, needs: bool
) -> tuple[Tensor, list[Tensor | None], list[tuple[Tensor, Tensor | None]]]:
    """Run one micro-batch through the top layer, the head and the loss, and back; return the loss, the gradients of
    `state`, if it is needed, and of what routers below have made, and what else has a gradient, with that."""
    top, retry, trace = engine.split.num_layers - 1, engine.retry, engine.stream.trace
    leaf = state.detach().requires_grad_(needs)
    with torch.enable_grad(), trace.span("forward", f"layer {top}"):
        output = engine.split.run_layer(top, {**lease.weights, **leaves}, call, leaf)
    with retry.at("in the head and the loss"), trace.span("forward", "head and loss"):
        value, gradient = turn(index, output.detach())
    engine.look(top + 1, [gradient])
    roots, below = {output: gradient}, dict[Tensor, Tensor | None]()
    if engine.routers is not None:
        share, below = engine.routers.turn(index)
        value = value + share
        roots |= {one: by for one in call.routers or () if (by := below.pop(one)) is not None}
    # The gradients are returned and not added, because the one that arrives in the backward may still scale them.
    given = [tensor for tensor in tensors_in(call.own) if tensor.requires_grad]
    wanted: list[Tensor] = [*[leaf] * needs, *engine.adapters_of(top), *given, *leaves.values()]
    with retry.at(f"in the backward of layer {top}"), trace.span("backward", f"layer {top}"):
        found = torch.autograd.grad([*roots], wanted, [*roots.values()], allow_unused=True) if wanted else ()
    pairs: Iterator[tuple[Tensor, Tensor | None]] = zip(wanted, found, strict=True)
    others = list(pairs)[needs:]
    for weight, formed in others[len(others) - len(leaves) :]:
        if formed is not None:  # added as autograd does: the first one is taken as it is
            weight.grad = formed if weight.grad is None else weight.grad.add_(formed)
    engine.look(top, found[:needs])
    return value, [found[0] if needs else None, *below.values()], others[: len(others) - len(leaves)]


def _known_turn(embed_head: EmbedHead, known: list[Tensor]) -> Turn:
    """Return what stands for the head where the loss is formed already, and how it changes is `known` but for a factor.
    An attempt that fails is made again, so nothing is let go before the pass has gone on to the next micro-batch."""
    loss = embed_head.loss
    assert isinstance(loss, RowLoss), "the loss is formed with the head"

    def turn(index: int, output: Tensor) -> tuple[Tensor, Tensor]:
        known[:index] = [torch.empty(0)] * index
        return torch.zeros((), device=output.device), loss.scaled(index, known[index])

    return turn
