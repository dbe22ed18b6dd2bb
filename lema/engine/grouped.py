"""Visits of layers whose experts are leased in groups: what is no expert, then each group for all micro-batches.

Every micro-batch runs through the layer as far as it goes without the experts' result, and waits there
(`lema.model.flow.Suspended`). Then each group of experts is leased in turn, and adds what it makes of the tokens that
are routed to it. In the backward the same groups come the other way round, between two parts of each micro-batch's
backward; what each keeps of the layer waits on the device until then. docs/internals/experts.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lema.activations.kept import StepBoundaries
from lema.model import Split
from lema.model.capture import tensors_in
from lema.model.experts import ExpertGroup
from lema.model.flow import LayerCall, Suspended
from lema.stream import LayerStream, Lease

if TYPE_CHECKING:
    from lema.engine.visit import Engine, Turn, Way

__all__ = ["GroupedVisit", "call_in_groups", "through_groups", "top_in_groups"]

Sums = dict[nn.Parameter, Tensor]
_Given = tuple[torch.dtype | None, Sequence[Tensor]]  # the dtype of products, and what experts are given


@dataclass(eq=False)
class _Routed:
    """One micro-batch at the experts of a layer. The pairs of a token and an expert are in the order of groups, then of
    the experts' places among the token's own, so that of one group and place each token comes once, and what is added
    to it is added in one order on every device."""

    autocast: torch.dtype | None  # as the layer's call has it
    given: tuple[Tensor, Tensor, Tensor]  # hidden states [tokens, hidden], experts and weights [tokens, of each token]
    pairs: Sequence[Tensor]  # of each group, where in the experts, flat
    counts: Sequence[Sequence[int]]  # of each group, how many pairs there are of each place

    @classmethod
    def of(cls, given: _Given, groups: Sequence[ExpertGroup]) -> _Routed:
        hidden, chosen, weights = (one.detach() for one in given[1])
        ends, places = torch.tensor([group.end for group in groups], device=chosen.device), chosen.shape[1]
        group = torch.bucketize(chosen, ends, right=True)
        key = (group * places + torch.arange(places, device=chosen.device)).flatten()
        counts = torch.bincount(key, minlength=(len(groups) + 1) * places).view(-1, places).tolist()[: len(groups)]
        order = key.argsort(stable=True).split([sum(one) for one in counts] + [len(key) - sum(map(sum, counts))])
        return cls(given[0], (hidden, chosen, weights), order[: len(groups)], counts)

    def of_group(self, number: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the tokens of a group's pairs, and the pairs as experts are given them."""
        hidden, chosen, weights = self.given
        pairs = self.pairs[number]
        tokens = pairs // chosen.shape[1]
        return tokens, (hidden[tokens], chosen.flatten()[pairs, None], weights.flatten()[pairs, None])

    def sums(self) -> Tensor:
        """Return zeros to add to, as wide as the hidden states and no narrower than fp32."""
        hidden = self.given[0]
        return torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))

    def add(self, sums: Tensor, number: int, tokens: Tensor, made: Tensor) -> None:
        """Add what was made of a group's pairs to the sums of their tokens."""
        for at, rows in zip(tokens.split(self.counts[number]), made.split(self.counts[number]), strict=True):
            sums.index_add_(0, at, rows.to(sums.dtype))


@contextmanager
def _group(stream: LayerStream, lease: Lease, group: ExpertGroup, way: Way) -> Iterator[Mapping[str, Tensor]]:
    """Lease a group of a layer that is on lease; yields the weights of both."""
    span = stream.trace.span(way, f"layer {lease.layer}, experts {group.first} to {group.end - 1}")
    with stream.lease(group.number) as own, span:
        yield {**lease.weights, **own.weights}


@torch.no_grad()
def _results(
    split: Split, stream: LayerStream, lease: Lease, given: Sequence[_Given], way: Way = "forward"
) -> list[Tensor]:
    """Return what the experts of a layer make of what they are given of each micro-batch, `[tokens, hidden]`."""
    groups = split.groups[lease.layer]
    routed = [_Routed.of(one, groups) for one in given]
    sums = [one.sums() for one in routed]
    for number, group in enumerate(groups):
        with _group(stream, lease, group, way) as weights:
            for one, total in zip(routed, sums, strict=True):
                if len(one.pairs[number]):
                    tokens, pairs = one.of_group(number)
                    with split.autocast(one.autocast):
                        made = split.run_experts(lease.layer, weights, group, pairs)
                    one.add(total, number, tokens, made)
    return [total.to(one.given[0].dtype) for total, one in zip(sums, routed, strict=True)]


def _differentiated(
    split: Split, stream: LayerStream, lease: Lease, given: Sequence[_Given], gradients: Sequence[Tensor], sums: Sums
) -> list[tuple[Tensor, Tensor]]:
    """Return of each micro-batch the gradients of what the experts were given: hidden states, and weights of experts;
    `gradients` are those of the experts' results. Those of the experts' adapters are added to `sums`."""
    experts, groups = split.experts_of(lease.layer), split.groups[lease.layer]
    assert experts is not None
    trained = [one for one in experts.outer.parameters() if one.requires_grad]
    routed = [_Routed.of(one, groups) for one in given]
    found = [(one.sums(), torch.zeros_like(one.given[2])) for one in routed]
    for number in reversed(range(len(groups))):
        with _group(stream, lease, groups[number], "backward") as weights:
            for one, gradient, (by_hidden, by_weights) in zip(routed, gradients, found, strict=True):
                if not len(one.pairs[number]):
                    continue
                tokens, (hidden, chosen, factors) = one.of_group(number)
                hidden, factors = hidden.requires_grad_(), factors.requires_grad_()
                with torch.enable_grad(), split.autocast(one.autocast):
                    made = split.run_experts(lease.layer, weights, groups[number], (hidden, chosen, factors))
                wanted = [hidden, factors, *trained]
                formed = torch.autograd.grad(made, wanted, gradient[tokens], allow_unused=True)
                one.add(by_hidden, number, tokens, formed[0])
                by_weights.view(-1)[one.pairs[number]] = formed[1].flatten()
                for parameter, by in zip(trained, formed[2:], strict=True):
                    if by is not None:
                        sums[parameter] = sums[parameter].add_(by) if parameter in sums else by
    return [(hidden.to(one.given[0].dtype), factors) for (hidden, factors), one in zip(found, routed, strict=True)]


def call_in_groups(
    split: Split, stream: LayerStream, lease: Lease, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer's own forward as `Split.call_layer` does, its experts in groups; no gradient is formed."""
    half = split.suspended(lease.layer, lambda: split.call_layer(lease.layer, lease.weights, args, kwargs))
    return half.resume(_results(split, stream, lease, [(None, half.given)])[0])


def _half(engine: Engine, lease: Lease, call: LayerCall, hidden: Tensor) -> Suspended:
    def run() -> Tensor:
        return engine.split.run_layer(lease.layer, lease.weights, call, hidden, compiled=False)

    return engine.split.suspended(lease.layer, run)


def _resumed(engine: Engine, call: LayerCall, half: Suspended, result: Tensor) -> Tensor:
    """Return what the layer returns, given its experts' result."""
    engine.backend.set_rng_state(half.drawn)
    with engine.split.autocast(call.autocast):
        output: Tensor = half.resume(result)
    return output


def through_groups(engine: Engine, lease: Lease, calls: Sequence[LayerCall], hidden: Iterable[Tensor]) -> list[Tensor]:
    """Run every micro-batch through a layer that is on lease, and whose experts are leased in groups here. Nothing of a
    graph is kept; that there is one says of what routers make whether it will have a gradient."""
    halves = list[Suspended]()
    for call, state in zip(calls, hidden, strict=True):
        engine.stop.poll()
        with saved_tensors_hooks(lambda _: None, _forgotten), torch.set_grad_enabled(call.routers is not None):
            halves.append(_half(engine, lease, call, state))
    after = engine.backend.rng_state()
    given = [(call.autocast, half.given) for call, half in zip(calls, halves, strict=True)]
    results = _results(engine.split, engine.stream, lease, given)
    outputs = []
    for index, (call, half) in enumerate(zip(calls, halves, strict=True)):
        with torch.no_grad():
            outputs.append(_resumed(engine, call, half, results[index]))
        results[index] = halves[index] = given[index] = None  # type: ignore[call-overload] # it is done with
    engine.backend.set_rng_state(after)
    return outputs


def _forgotten(_: None) -> Tensor:
    raise AssertionError("a graph is differentiated that kept nothing")


@dataclass(eq=False)
class GroupedVisit:
    """One layer, forward and backward, over all micro-batches of a step, its experts leased in groups."""

    _engine: Engine
    _layer: int
    _calls: Sequence[LayerCall]
    _boundaries: StepBoundaries
    _states: list[Tensor] = field(default_factory=list)  # the generator's, before each micro-batch
    _needs: Sequence[bool] = ()
    _routers: bool = False  # whether somebody asks what routers make

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer, as `lema.engine.visit` has it."""
        engine, layer, calls = self._engine, self._layer, self._calls
        self._needs, self._routers = needs_grad, calls[0].routers is not None

        def given() -> Iterator[Tensor]:
            for index, (state, needs) in enumerate(zip(hidden, needs_grad, strict=True)):
                self._states.append(engine.generator_state())
                yield self._boundaries.keep(layer, index, state).detach().requires_grad_(needs and self._routers)

        with engine.leased(layer, "forward") as lease:
            outputs = through_groups(engine, lease, calls, given())
        return tuple(
            one.detach()
            for output, call in zip(outputs, calls, strict=True)
            for one in (output, *(made for made in call.routers or () if made.requires_grad))
        )

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are added to `.grad`."""
        engine, layer, calls = self._engine, self._layer, self._calls
        after, each = engine.backend.rng_state(), len(gradients) // len(calls)
        with engine.leased(layer, "backward") as lease:
            inputs, halves, routers = list[Tensor](), list[Suspended](), list[list[Tensor]]()
            for index, call in enumerate(calls):
                engine.stop.poll()
                call.routers = [] if self._routers else None
                engine.backend.set_rng_state(self._states[index])
                with self._boundaries.kept(layer, index) as boundary, torch.enable_grad():
                    # A copy, because the graph waits for its experts longer than a boundary is kept here.
                    inputs.append(boundary.detach().clone().requires_grad_(self._needs[index]))
                    halves.append(_half(engine, lease, call, inputs[-1]))
                routers.append([one for one in call.routers or () if one.requires_grad])
                call.routers = None
            given = [(call.autocast, half.given) for call, half in zip(calls, halves, strict=True)]
            backwards = [_Backward(engine, call, half) for call, half in zip(calls, halves, strict=True)]
            looked = [one.looks_at_result() for one in backwards]
            if any(looked):
                results = _results(engine.split, engine.stream, lease, given, "backward")
                for one, result in zip(backwards, results, strict=True):
                    one.made_of(result)
            results = [one.begin(gradients[index * each]) for index, one in enumerate(backwards)]
            adapters: Sums = {}
            found = _differentiated(engine.split, engine.stream, lease, given, results, adapters)
            del given, halves
            for index, one in enumerate(backwards):
                roots = dict(zip(routers[index], gradients[index * each + 1 : (index + 1) * each], strict=True))
                roots |= one.ends(*found[index])
                torch.autograd.backward([*roots], [*roots.values()])
                backwards[index] = found[index] = None  # type: ignore[call-overload] # this micro-batch is done
            torch.autograd.backward([*adapters], [*adapters.values()])  # adds to .grad
        engine.backend.set_rng_state(after)
        of_inputs = [one.grad for one in inputs]
        engine.look(layer, of_inputs)
        return of_inputs


@dataclass(eq=False)
class _Backward:
    """The backward of one micro-batch through a layer, which stops at its experts and goes on behind them."""

    _engine: Engine
    _call: LayerCall
    _half: Suspended
    _result: Tensor = field(init=False)  # of the experts, without a graph
    output: Tensor = field(init=False)  # of the layer
    _gradient: Tensor = field(init=False)  # of that

    def made_of(self, result: Tensor) -> Tensor:
        """Make what the layer returns of its experts' result, with a graph; return it."""
        self._result = result.detach().requires_grad_()
        with torch.enable_grad():
            # A copy, because models add to their experts' result in place.
            self.output = _resumed(self._engine, self._call, self._half, self._result.clone())
        return self.output

    def looks_at_result(self) -> bool:
        """Make what the layer returns of a result of zeros, which is as good unless the backward looks at its values;
        return whether it does."""
        with self._half.looking() as looked:
            self.made_of(torch.zeros_like(self._half.given[0]))
        return bool(looked)

    def begin(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the experts' result, given that of what the layer returns."""
        self._gradient = gradient
        (found,) = torch.autograd.grad(self.output, [self._result], gradient, retain_graph=True)
        return found

    def ends(self, by_hidden: Tensor, by_weights: Tensor) -> dict[Tensor, Tensor]:
        """Return all that is differentiated in the end, with gradients: of what the experts were given these."""
        hidden, _, weights = self._half.given
        found = {hidden: by_hidden, weights: by_weights, self.output: self._gradient}
        return {one: by for one, by in found.items() if one.requires_grad}


def top_in_groups(
    engine: Engine,
    lease: Lease,
    calls: Sequence[LayerCall],
    turn: Turn,
    hidden: Sequence[Tensor],
    needs_grad: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], list[list[tuple[Tensor, Tensor | None]]]]:
    """Run all micro-batches through the top layer, the head and the loss, and back; return the loss, the gradients of
    what was given, and what else has gradients, with these, of each micro-batch."""
    top = engine.split.num_layers - 1
    leaves = [state.detach().requires_grad_(needs) for state, needs in zip(hidden, needs_grad, strict=True)]
    halves = list[Suspended]()
    for call, leaf in zip(calls, leaves, strict=True):
        engine.stop.poll()
        with torch.enable_grad():
            halves.append(_half(engine, lease, call, leaf))
    after = engine.backend.rng_state()
    given = [(call.autocast, half.given) for call, half in zip(calls, halves, strict=True)]
    results = _results(engine.split, engine.stream, lease, given)
    backwards, shares = [_Backward(engine, *both) for both in zip(calls, halves, strict=True)], list[Tensor]()
    routed, below = list[dict[Tensor, Tensor]](), list[list[Tensor | None]]()
    for index, (call, one) in enumerate(zip(calls, backwards, strict=True)):
        engine.stop.poll()
        output = one.made_of(results[index])
        engine.backend.set_rng_state(after)
        with engine.retry.at("in the head and the loss"):
            value, gradient = turn(index, output.detach())
        after = engine.backend.rng_state()
        engine.look(top + 1, [gradient])
        others = dict[Tensor, Tensor | None]()
        if engine.routers is not None:
            share, others = engine.routers.turn(index)
            value = value + share
        routed.append({made: by for made in call.routers or () if (by := others.pop(made)) is not None})
        below.append([*others.values()])
        shares.append(value)
        results[index] = one.begin(gradient)
    adapters: Sums = {}
    found = _differentiated(engine.split, engine.stream, lease, given, results, adapters)
    inputs, formed = list[Tensor | None](), list[list[tuple[Tensor, Tensor | None]]]()
    for index, (call, leaf) in enumerate(zip(calls, leaves, strict=True)):
        roots = routed[index] | backwards[index].ends(*found[index])
        needs = leaf.requires_grad
        own = [tensor for tensor in tensors_in(call.own) if tensor.requires_grad]
        wanted: list[Tensor] = [*[leaf] * needs, *engine.adapters_of(top), *own]
        each = torch.autograd.grad([*roots], wanted, [*roots.values()], allow_unused=True) if wanted else ()
        engine.look(top, each[:needs])
        inputs += [each[0] if needs else None, *below[index]]
        pairs: Iterator[tuple[Tensor, Tensor | None]] = zip(wanted, each, strict=True)
        formed.append(list(pairs)[needs:])
        backwards[index] = found[index] = None  # type: ignore[call-overload] # this micro-batch is done with them
    engine.backend.set_rng_state(after)
    formed.append([*adapters.items()])
    return torch.stack(shares).sum(), inputs, formed
