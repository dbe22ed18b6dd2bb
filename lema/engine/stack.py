"""The stack of layers as the model's own forward calls it: one differentiable function, for any
caller of the model.

A trainer calls the model, or the part of it that holds the layers, and differentiates what it makes
of the result. So the forward of the module that holds the layers is replaced. It cuts its rows into
micro-batches, by length and each as wide as its longest row, notes the calls of the layers for each
(`Split.prelude`), takes all of them through one leased layer after the other by the passes that
every step of LEMA is made of, and lets the model's own code go on from there (`Split.finish`), with
rows as they came. What comes before and after the layers, and its graph, is the model's own.

Each forward with a graph is a step of its own, whose boundaries wait for its backward. So several
may wait at once, and a forward without a graph may come between the two.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import count, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

from lema.config.units import human_bytes
from lema.data.batches import dealt
from lema.engine.generation import leased_forwards
from lema.engine.generation.prefill import Prefill
from lema.engine.head.gradients import EmbedHead
from lema.engine.layers.call_chunks import (
    CACHES,
    CallChunks,
    autocast_dtype,
    check_hooks,
    shape_of,
)
from lema.engine.layers.layer_pass import LayerPass
from lema.engine.layers.reference_rows import ReferenceRows
from lema.engine.layers.row_cuts import Cut, RowCuts
from lema.engine.layers.rows import ComputeAs, Rows
from lema.engine.layers.saving import Saving
from lema.engine.streamed import StreamedModel
from lema.engine.trained_weights import AskedGradients, OuterGradients, adapter_leaves
from lema.errors import ConfigError
from lema.model.capture import draws, named_arguments
from lema.model.flow import LayerCall, Prelude
from lema.model.layers.routing import RowChoices
from lema.model.sequence.chunks import ChunkedCall
from lema.model.sequence.states import Span
from lema.model.state.hooks import aside, hooks_of
from lema.stream.schedule import fetched_per_step, in_parts

__all__ = ["LayerStack", "StackCall"]

# What a model collects of its layers by hooks, which see them run more than once, or not at all.
COLLECTED = ("output_hidden_states", "output_attentions")
ROUTED = "output_router_logits"  # is answered here, because a loss may be formed of it
CHOICES = "replaying"  # is said where routers cannot be told what to choose
LEARNING_TOKENS = 8


@dataclass(frozen=True)
class StackCall:
    """One call of the module that holds the layers: its micro-batches before their first layer."""

    arguments: Mapping[str, Any]
    preludes: tuple[Prelude, ...]
    differentiated: bool  # whether its result is to have a graph
    inputs_differentiated: bool  # whether something that it was given has a graph
    # What trains in the layers as it is called, by `id`, and whether the model is in training mode.
    trained: tuple[bool, frozenset[int]]
    cuts: tuple[Cut, ...]
    routed: bool  # whether outputs of routers are requested
    # The same call as a reference computes it, whose rows go through the layers under the same
    # leases; None: there is none.
    reference: StackCall | None = None
    compute_as: ComputeAs | None = None  # of a reference: how it computes

    def in_rows(self) -> Rows:
        """Return the rows of a reference, in front of the first layer."""
        calls = [*zip(*(prelude.calls for prelude in self.preludes), strict=True)]
        hidden = [prelude.hidden for prelude in self.preludes]
        # Not compiled, because that would be another graph of each layer.
        return Rows(calls, hidden, compute_as=self.compute_as, compiled=False)

    @property
    def seen(self) -> list[tuple[list[int], Span]]:
        """Which tokens of which rows are computed: not those that were cut off, nor padding that
        is in no chunk."""
        spans = [
            _span_of(prelude.calls[0], cut)
            for cut, prelude in zip(self.cuts, self.preludes, strict=True)
        ]
        return [(cut.rows, span) for cut, span in zip(self.cuts, spans, strict=True)]

    def joins(self, call: StackCall) -> bool:
        """Whether both can be run at once."""
        return (self.differentiated, self.trained, self.routed) == (
            call.differentiated,
            call.trained,
            call.routed,
        )

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return what micro-batches made, `[batch, sequence, hidden]`, as the call's rows; zeros
        where cut.
        """
        if len(outputs) == 1:
            return outputs[0]
        batch = torch.cat(
            [
                pad(output, (0, 0, 0, cut.width - cut.end))
                for cut, output in zip(self.cuts, outputs, strict=True)
            ]
        )
        rows = [row for cut in self.cuts for row in cut.rows]
        return (
            batch if rows == sorted(rows) else batch[sorted(range(len(rows)), key=rows.__getitem__)]
        )

    def router_logits(self) -> tuple[Tensor, ...]:
        """Return what the routers of all layers made, each `[batch * sequence, experts]` or as it
        has it; zeros where cut, which the attention mask leaves out of the loss."""
        logits = []
        for layer in zip(*(prelude.calls for prelude in self.preludes), strict=True):
            for parts in zip(*(call.routers or () for call in layer), strict=True):
                reshaped = (
                    part.reshape(len(cut.rows), cut.end, -1)
                    for part, cut in zip(parts, self.cuts, strict=True)
                )
                batch_logits = self.joined([*reshaped])
                logits.append(batch_logits.flatten(0, 1) if parts[0].dim() == 2 else batch_logits)
            for call in layer:
                call.drop_routers()  # because the backward does not need it
        return tuple(logits)

    def choose(self, choices: RowChoices) -> None:
        """Have routers choose the experts that the next rows of the choices name, also those of a
        reference. `ConfigError`: they were told before, by a block within this one.
        """
        if self.preludes[0].calls[0].choices is not None:
            what = "choices of experts are replayed already, and a token has one of them"
            raise ConfigError(what, where=CHOICES, how="leave one of the two blocks out")
        size = sum(len(cut.rows) for cut in self.cuts)
        rows = choices.next_rows(size, self.cuts[0].width)
        for computed in filter(None, (self, self.reference)):
            for cut, prelude in zip(computed.cuts, computed.preludes, strict=True):
                of_cut = rows[cut.rows, : cut.end]
                for layer, call in enumerate(prelude.calls):
                    call.choose(of_cut[:, :, layer].flatten(0, 1))


def _span_of(call: LayerCall, cut: Cut) -> Span:
    """Return the tokens of a micro-batch that a call of a layer computes."""
    if isinstance(call, ChunkedCall):
        return Span(call.spans[0].start, call.spans[-1].stop)
    return Span(0, cut.end)


def _check_unseen(seen: Sequence[tuple[list[int], Span]], gradient: Tensor | None) -> None:
    """Refuse a loss that counts positions that were not computed.

    Args:
        seen: which tokens of which rows were.
        gradient: of what the layers made, `[batch, sequence, hidden]`; None: nothing was made of
            that.
    """
    if gradient is None:
        return
    width = gradient.shape[1]
    unseen = [
        gradient[rows, part].abs().gt(0).any()
        for rows, span in seen
        for part in (slice(span.start), slice(span.stop, None))
        if (span.start if part.stop is not None else width - span.stop)
    ]
    if unseen and bool(torch.stack(unseen).any()):
        what = (
            "the loss counts masked tokens at the beginning or the end of rows, which were not "
            "computed"
        )
        how = (
            "give them the label -100, or remove micro_batch_size and sequence_chunk, so that "
            "batches are computed whole"
        )
        raise ConfigError(what, where="labels", how=how)


@dataclass(eq=False)
class _Step:
    """A forward that waits for its backward."""

    backward: tuple[int, ...]  # the leases of its backward
    trained: tuple[bool, frozenset[int]]
    asked: AskedGradients | None  # takes gradients where a caller asks for them
    written: int  # how often what trains had been written to
    done: bool = False  # whether that has begun
    task: int = -1  # autograd's number of it

    def begin(self, task: int) -> None:
        """Note that its backward has begun, as autograd's task of this number."""
        self.done = True
        self.task = task


class _Steps:
    """The forwards whose graph somebody still holds, in their order."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[_Step, int] = WeakKeyDictionary()
        self._count = count()

    def add(self, step: _Step) -> None:
        """Add the newest."""
        self._numbers[step] = next(self._count)

    def newest_waiting(self) -> _Step | None:
        """Return the newest that waits for its backward; None: none does."""
        waiting = [step for step in self._numbers if not step.done]
        return max(waiting, key=self._numbers.__getitem__, default=None)


@dataclass(frozen=True, eq=False)
class _Start:
    """Where the graph of some calls begins.

    Args:
        hidden: the hidden state of each micro-batch before the first layer.
        below: whether something before the layers trains.
        outer: returns, of some parameters, what hands their gradients to the caller's graph.
        asked: takes gradients where a caller asks for them; None: nobody can.
    """

    hidden: tuple[Tensor, ...]
    below: bool
    outer: Callable[[list[nn.Parameter]], OuterGradients]
    asked: AskedGradients | None = None


class LayerStack:
    """Has a model's layers streamed whenever the module that holds them is called, until it is
    taken out. `streamed`: the model. It is driven as before as well: its own passes go by this
    object. `rows`: of a micro-batch, at most; None: all rows of a call. `budget`: returns the bytes
    that the top layer's activations may take while a trainer computes the head and its loss, which
    spare recomputing it; None: it is recomputed like the others. `images_inside`: whether the
    module that holds the layers is given images, and not only what towers make of them. Its
    attribute `supply`: returns the last layer's output `[batch, sequence, hidden]` for a call, and
    that of its reference, if it has one. A trainer that knows more calls that belong together
    replaces it, and has `run` run them all at once."""

    def __init__(
        self,
        streamed: StreamedModel,
        rows: int | None = None,
        budget: Callable[[], int] | None = None,
        *,
        images_inside: bool = False,
    ) -> None:
        self.streamed = streamed
        self.rows = rows
        self._budget = budget
        self._images_inside = images_inside
        split = streamed.split
        self._forward: Callable[..., Any] = self._owner.forward
        self._steps = _Steps()
        # leases announced for the next pass, and how many stream
        self._ahead: tuple[tuple[int, ...], int] = ((), 0)
        self._version: int | None = None  # of an adapter's values at the last backward
        self._gradient_sums: dict[nn.Parameter, Tensor] | None = None
        # because the caller wraps the model in DistributedDataParallel
        if streamed.backend.replicas.size > 1:
            if streamed.stream.groups:
                what = "experts cannot be leased in groups if several processes call the model"
                raise ConfigError(what, where="experts_per_slot", how="set it to null")
            self._gradient_sums = {}
            streamed.engine.train_weights(adapter_leaves(split.layers, self._gradient_sums))
        self._replays = 0  # blocks in which routers are told what to choose
        self.warns = True  # of weights that are streamed once for each batch of an optimizer step
        self.supply: Callable[[StackCall], Sequence[Tensor]] = lambda call: self.run([call])[0]

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self._owner.forward = forward

    @property
    def _owner(self) -> nn.Module:
        """The module that holds the layers."""
        return self.streamed.split.owner

    @cached_property
    def _prefill(self) -> Prefill | None:
        """Takes long prompts through the layers in chunks; None: they go at once."""
        streamed = self.streamed
        size = streamed.sequence_chunk
        return None if size is None else Prefill(streamed.engine, size, streamed.layers)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @contextmanager
    def supplied_by(self, supply: Callable[[StackCall], Sequence[Tensor]]) -> Iterator[None]:
        """Have `supply` return the layers' outputs of the calls in a `with` block."""
        before = self.supply
        self.supply = supply
        try:
            yield
        finally:
            self.supply = before

    @contextmanager
    def replaying(self, choices: Tensor) -> Iterator[None]:
        """Have routers choose the experts they are told to in a `with` block; see
        `StreamedPeftModel.replaying`.
        """
        split = self.streamed.split
        if split.lazy or split.compiles(0):
            what = "compiled layers cannot be told which experts to choose"
            raise ConfigError(what, where=CHOICES, how="set torch_compile to false")
        rows = RowChoices(choices, split.num_layers)
        supply = self.supply

        def supply_chosen(call: StackCall) -> Sequence[Tensor]:
            call.choose(rows)
            return supply(call)

        self._replays += 1
        try:
            with self.supplied_by(supply_chosen):
                yield
                rows.check_taken()
        finally:
            self._replays -= 1

    @property
    def takes_reference(self) -> bool:
        """Whether rows of a reference can go through the layers under the leases of those that
        train.
        """
        state = self.streamed.split.state
        layers = range(self.streamed.split.num_layers)
        # Experts in groups are leased for some rows at a time, and what layers keep from call to
        # call, as what their hooks do, goes by the order of the calls.
        return not self.streamed.stream.groups and not any(
            state.layers.keeps(layer) or state.hooks.of(layer) is not None for layer in layers
        )

    @contextmanager
    def compared(self, compute_as: ComputeAs) -> Iterator[AbstractContextManager[None]]:
        """Have the rows of calls in a `with` block go through each layer once more under the same
        lease, as a reference computes them. Yields the context in which the same calls, made again,
        go on from what the last layer made of the reference's rows; they have no graph.

        Args:
            compute_as: has modules compute as the reference does.
        """
        supply = self.supply
        outputs: list[Tensor] = []

        def supply_both(call: StackCall) -> list[Tensor]:
            # What a loss of routers is formed of is not asked of a reference.
            arguments = {name: value for name, value in call.arguments.items() if name != ROUTED}
            with self._computing(compute_as):
                reference = self._noted(arguments, differentiated=False)
            reference = replace(reference, compute_as=compute_as)
            output, of_reference = supply(replace(call, reference=reference))
            outputs.append(of_reference)
            return [output]

        @contextmanager
        def continued() -> Iterator[None]:
            with self._computing(compute_as), self.supplied_by(lambda _: [outputs.pop(0)]):
                yield

        with self.supplied_by(supply_both):
            yield continued()

    @contextmanager
    def _computing(self, compute_as: ComputeAs) -> Iterator[None]:
        """Have all that is outside the layers compute as a reference does, without a graph and
        without the loss of routers.
        """
        with torch.no_grad(), self._without_routers(), compute_as([self.streamed.split.model]):
            yield

    def take_out(self) -> None:
        """Restore the model."""
        self._owner.__dict__.pop("forward", None)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        split = self.streamed.split
        # because a pass of the engine replaces the layers while it is here
        if "forward" in vars(split.layers[0]):
            return self._forward(*args, **kwargs)
        arguments = self._named(args, kwargs)
        if arguments.get("input_ids") is None and arguments.get("inputs_embeds") is None:
            return self._forward(**arguments)  # which says so before it comes to its layers
        differentiated = torch.is_grad_enabled()
        if collected := [name for name in COLLECTED if self._asked(name, arguments)]:
            what = (
                f"{collected[0]} is asked for, and layers that stream leave nothing behind but "
                "their result"
            )
            raise ConfigError(
                what,
                where=f"{split.layers_name} of {type(split.model).__name__}",
                how="leave it out",
            )
        if self._asked(ROUTED, arguments) and (split.lazy or split.compiles(0)):
            what = "compiled layers do not return the outputs of their routers"
            how = "set router_aux_loss_coef to 0.0"
            raise ConfigError(what, where=ROUTED, how=how)
        cache_name = next((name for name in CACHES if arguments.get(name) is not None), None)
        if (cache_name or self._asked("use_cache", arguments)) and not differentiated:
            prefill = None if self._asked(ROUTED, arguments) else self._prefill
            if prefill is not None and prefill.takes(arguments, uses_cache=True):
                self._learn()
                self._ahead = ((), 0)  # because what is announced is another pass
                return prefill.run(self._forward, arguments)
            with (
                split.autocast(self._ambient()),
                split.replaced(leased_forwards(split, self.streamed.stream)),
            ):
                return self._forward(**arguments)
        if cache_name:
            what = "a forward with gradients got a cache of keys and values"
            how = "remove the cache, or call the model under torch.no_grad()"
            raise ConfigError(what, where=cache_name, how=how)
        takes_more = any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in self._signature.parameters.values()
        )
        if takes_more or "use_cache" in self._signature.parameters:
            arguments["use_cache"] = False
        call = self._noted(arguments, differentiated=differentiated)
        output = self.supply(call)[0]
        chunks = self._chunks(arguments)
        if chunks is None:
            result = split.finish(output, partial(self._forward, **arguments))
        else:
            result = chunks.finish(output)
        if call.routed:
            result.router_logits = call.router_logits()
        return result

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return named_arguments(self._signature, args, kwargs)

    def _asked(self, name: str, arguments: Mapping[str, Any]) -> bool:
        asked = arguments.get(name)
        return bool(getattr(self._owner.config, name, False) if asked is None else asked)

    def _noted(self, arguments: Mapping[str, Any], *, differentiated: bool) -> StackCall:
        """Run the model's own code before the layers, for each micro-batch of a call."""
        streamed = self.streamed
        split = self.streamed.split
        inputs = differentiated and any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(arguments)
        )
        differentiate = differentiated and (inputs or bool(streamed.trained_outside()))
        ambient = self._ambient()
        routed = self._asked(ROUTED, arguments)
        few = self._learn()
        cuts = self._cuts(arguments)
        if RowCuts(arguments, cuts).ambiguous:
            size = sum(len(cut.rows) for cut in cuts)
            cuts = (Cut([*range(size)], cuts[0].width, cuts[0].width),)
        before = split.state.mark()
        drawn = streamed.backend.rng_state()
        preludes = tuple(self._preludes(arguments, cuts, few, differentiate=differentiate))
        if any(cut.end < cut.width for cut in cuts) and split.state.outer.changed_names():
            # Because what is kept, as a rotary table, may go by the longest row of the whole call.
            split.state.put_back(before)
            streamed.backend.set_rng_state(drawn)
            cuts = tuple(cut._replace(end=cut.width) for cut in cuts)
            preludes = tuple(self._preludes(arguments, cuts, few, differentiate=differentiate))
        hooks = [split.state.hooks.inside(layer) for layer in range(split.num_layers)]
        for cut, prelude in zip(cuts, preludes, strict=True):
            for layer_hooks, call in zip(hooks, prelude.calls, strict=True):
                hooks_here = (
                    layer_hooks
                    if layer_hooks is None or len(cuts) == 1
                    else layer_hooks.of_rows(cut.rows)
                )
                if isinstance(call, ChunkedCall):
                    check_hooks(hooks_here)
                call.call_as(ambient, hooks_here)
                call.ask_routers(routed)
        return StackCall(arguments, preludes, differentiated, inputs, self._trained(), cuts, routed)

    def _learn(self) -> dict[str, Tensor]:
        """See what layers return, if that is not known; return a few tokens."""
        streamed = self.streamed
        split = streamed.split
        device = streamed.backend.device
        few = {"input_ids": torch.ones(1, LEARNING_TOKENS, dtype=torch.long, device=device)}
        if not split.has_learned(few):
            # restored, because these few tokens are not training data
            state = streamed.backend.rng_state()
            self._ahead = ((), 0)  # because what was announced does not begin with a lease for this
            with (
                streamed.stream.lease(0) as first,
                self._without_routers(),
                aside(split.model.modules()),
            ):
                split.prelude(few, first.weights)
            streamed.backend.set_rng_state(state)
        return few

    def _preludes(
        self,
        arguments: Mapping[str, Any],
        cuts: Sequence[Cut],
        few: Mapping[str, Tensor],
        *,
        differentiate: bool,
    ) -> Iterator[Prelude]:
        """Run the model's own code before the layers for each of the micro-batches that a call
        is cut into.
        """
        row_cuts = RowCuts(arguments, cuts, images_inside=self._images_inside)
        part = arguments
        split = self.streamed.split
        outer_hooks = hooks_of(split.state.outer.modules) if len(cuts) > 1 else None
        for cut in cuts:
            if len(cuts) > 1:
                part = row_cuts.of(cut)
            run = partial(self._forward, **part)
            with nullcontext() if outer_hooks is None else outer_hooks.of_rows(cut.rows).standing():
                chunks = self._chunks(part)
                if chunks is None:
                    prelude = split.prelude(few, {}, differentiate=differentiate, run=run)
                else:
                    prelude = chunks.prelude(differentiate=differentiate, shares=self._shares())
            yield prelude

    def _shares(self) -> bool:
        """Whether tokens with which all rows of a micro-batch begin may be computed once: no row
        draws or is told anything of its own there."""
        return not self._replays and not draws(self.streamed.split.model)

    def _chunks(self, arguments: Mapping[str, Any]) -> CallChunks | None:
        """Return the chunks of a call with these arguments; None: its rows are no longer than
        one."""
        size = self.streamed.sequence_chunk
        if size is None or shape_of(arguments)[1] <= size:
            return None
        streamed = self.streamed
        device = streamed.backend.device
        return CallChunks(streamed.split, self._forward, arguments, size, device)

    @contextmanager
    def _without_routers(self) -> Iterator[None]:
        """Turn off the config's request for routers' outputs: the model would form their loss
        outside the layers.
        """
        config = self._owner.config
        asked = getattr(config, ROUTED, None)
        if asked:
            setattr(config, ROUTED, False)
        try:
            yield
        finally:
            if asked:
                setattr(config, ROUTED, asked)

    def _ambient(self) -> torch.dtype | None:
        """Return the dtype of products where the model is called; None: none is set."""
        return autocast_dtype(self.streamed.backend.device.type)

    def _cuts(self, arguments: Mapping[str, Any]) -> tuple[Cut, ...]:
        """Return the micro-batches of a call, as its attention mask `[batch, sequence]` has the
        lengths of its rows.
        """
        size, width = shape_of(arguments)
        mask = arguments.get("attention_mask")
        lengths = [width] * size
        if self.rows is None or size <= self.rows:
            # whole, because numbers are then those of the whole model
            return (Cut([*range(size)], width, width),)
        if (
            isinstance(mask, Tensor)
            and mask.shape == (size, width)
            and arguments.get("cache_position") is None
        ):
            lengths = (
                ((mask != 0) * torch.arange(1, width + 1, device=mask.device)).amax(dim=1).tolist()
            )
        return tuple(
            Cut(rows, lengths[rows[0]] or width, width)
            for rows in dealt(lengths, at_once=self.rows)
        )

    def _trained(self) -> tuple[bool, frozenset[int]]:
        split = self.streamed.split
        engine = self.streamed.engine
        layers = range(split.num_layers)
        return split.model.training, frozenset(
            id(parameter) for layer in layers for parameter in engine.adapters_of(layer)
        )

    def _times_written(self) -> int:
        """Return how often values of what trains in the layers were changed in place; autograd
        looks at the same.
        """
        return sum(
            parameter._version
            for parameter in self.streamed.split.layers.parameters()
            if parameter.requires_grad
        )

    def run(self, calls: Sequence[StackCall]) -> list[list[Tensor]]:
        """Take the micro-batches of several calls through the layers at once; return the last
        layer's output of each, and that of its reference, if it has one. The calls were made with
        the same adapters, and all with a graph or all without."""
        streamed = self.streamed
        split = self.streamed.split
        top = split.num_layers - 1
        preludes = [prelude for call in calls for prelude in call.preludes]
        per_layer = [[prelude.calls[layer] for prelude in preludes] for layer in range(top + 1)]
        hidden = tuple(prelude.hidden for prelude in preludes)
        differentiated = calls[0].differentiated
        start = self._started(calls, per_layer, hidden) if differentiated else None
        # a trainer may make the embeddings' output require a gradient that is not needed
        below = start is not None and (
            start.below or any(call.inputs_differentiated for call in calls)
        )
        hidden = tuple(
            state if below else state.detach()
            for state in (hidden if start is None else start.hidden)
        )
        layers = range(top + 1) if differentiated else ()
        lowest = 0 if below else next(filter(streamed.engine.trains, layers), top + 1)
        step = None
        if start is not None and lowest <= top:
            down = in_parts(range(top, lowest - 1, -1), streamed.stream.parts, down=True)
            step = _Step(down, calls[0].trained, start.asked, self._times_written())
            self._warn_of_accumulation(lowest)
            self._steps.add(step)
        up = streamed.stream.forward_order()
        self._announce(up, self._awaited() or up)
        # None in the first step, because what the trainer's head needs is seen only then.
        budget = (
            0
            if self._budget is None or self._version is None or step is None
            else max(0, self._budget())
        )
        hidden = split.enter(hidden)
        saving = streamed.step_saving(hidden, lowest, top + 1, budget)
        rows = Rows(per_layer, list(hidden))
        del hidden
        outer = None if start is None else start.outer
        extra = [None if call.reference is None else call.reference.in_rows() for call in calls]
        reference_rows = ReferenceRows(
            streamed.engine, None, None, [*filter(None, extra)], -1, outside=False
        )
        states = iter(self._through_layers(rows, lowest, saving, outer, reference_rows))
        if saving.graphs is not None:
            saving.graphs.end_forward()
            saving.graphs.expect(top)
        results = []
        for call, of_reference in zip(calls, extra, strict=True):
            output = call.joined([next(states) for _ in call.preludes])
            if step is not None:
                output.register_hook(partial(_check_unseen, call.seen))
                output.register_hook(lambda _: self._begin_backward(step))
            results.append([output])
            if call.reference is not None and of_reference is not None:
                results[-1].append(call.reference.joined(of_reference.take()))
        return results

    def _started(
        self,
        calls: Sequence[StackCall],
        per_layer: Sequence[Sequence[LayerCall]],
        hidden: Sequence[Tensor],
    ) -> _Start:
        """Return where the graph of some calls begins, before their first layer."""
        one_graph = any(call.inputs_differentiated and len(call.preludes) > 1 for call in calls)
        streamed = self.streamed
        anchor = streamed.engine.anchor
        outside = streamed.trained_outside()
        layers = streamed.split.layers
        adapters = [parameter for parameter in layers.parameters() if parameter.requires_grad]
        sums = self._gradient_sums
        asked = None if sums is not None else AskedGradients(anchor, [*adapters, *outside])

        def outer(parameters: Iterable[nn.Parameter]) -> OuterGradients:
            """Return the gradients of some of the parameters, as the caller's graph gets them."""
            if sums is not None:
                return OuterGradients([*parameters], sums)
            assert asked is not None
            return asked.of(parameters)

        start = EmbedHead(streamed.backend, None, hidden, per_layer, outside, outer(outside))
        states = start.start(anchor, one_graph=one_graph)
        return _Start(states, start.reach_below, outer, asked)

    def _through_layers(
        self,
        rows: Rows,
        lowest: int,
        saving: Saving,
        outer: Callable[[list[nn.Parameter]], OuterGradients] | None,
        reference_rows: ReferenceRows,
    ) -> list[Tensor]:
        """Take rows through all layers in one pass, or in several where layers have hooks, which
        are called between two of them; return what the last layer makes. `reference_rows` go the
        same way.
        """
        streamed = self.streamed
        split = streamed.split
        hooks = [
            split.state.hooks.of(layer, split.extra_outputs, frozen=layer < lowest)
            for layer in range(split.num_layers)
        ]
        begins = [
            layer
            for layer in range(split.num_layers)
            if layer == 0 or hooks[layer] is not None or hooks[layer - 1] is not None
        ]
        for begin, end in pairwise([*begins, split.num_layers]):
            layer_hooks = hooks[begin]
            calls = rows.calls
            if layer_hooks is not None:
                if reference_rows.all:
                    raise layer_hooks.refusal("the rows of a reference go through the layer, too")
                if any(isinstance(call, ChunkedCall) for call in calls[begin]):
                    check_hooks(layer_hooks)
                of_layer, states = layer_hooks.before(calls[begin], rows.take())
                calls = [*calls[:begin], of_layer, *calls[end:]]
                rows = Rows(calls, list(states))
                del states
            layers = streamed.layers[begin:end]
            adapters = [p for layer in layers for p in streamed.engine.adapters_of(layer.number)]
            hidden = LayerPass(
                streamed.engine,
                layers,
                rows,
                lowest=lowest,
                saving=saving,
                reference_rows=reference_rows,
                outer=None if outer is None else outer(adapters),
            ).hidden_states()
            rows = Rows(calls, hidden if layer_hooks is None else list(layer_hooks.after(hidden)))
            del hidden
        return rows.take()

    def _begin_backward(self, step: _Step) -> None:
        """Make sure that a backward is that of its forward, and say what is leased in it, and
        after it.
        """
        task = torch._C._current_graph_task_id()
        if step.task == task:
            return  # of calls that were run at once, each comes by
        if torch.is_grad_enabled():
            what = (
                "derivatives of gradients are asked for (create_graph), and gradients of "
                "streamed layers have no graph"
            )
            raise ConfigError(what, where="backward", how="remove create_graph")
        if step.asked is not None and step.asked.hooked and step.asked.asked():
            what = (
                "gradients are asked for (torch.autograd.grad) of a model that has hooks on "
                "parameters that train"
            )
            raise ConfigError(
                what, where="backward", how="remove the hooks, or call backward and read .grad"
            )
        if self._trained() != step.trained:
            what = (
                "between a forward and its backward, the adapters or the training mode of the "
                "model changed"
            )
            how = "run the backward while the same adapter is active, and in the same mode"
            raise ConfigError(what, where="backward", how=how)
        if self._times_written() != step.written:
            what = "between a forward and its backward, values of the adapters changed"
            raise ConfigError(
                what, where="backward", how="run the backward before the optimizer's step"
            )
        step.begin(task)
        self._version = self._adapter_version()[1]
        self._announce(step.backward, self._awaited() or self.streamed.stream.forward_order())

    def _awaited(self) -> tuple[int, ...]:
        """Return the leases of the backward that is most likely the next: of the last forward
        that waits for one.
        """
        step = self._steps.newest_waiting()
        return () if step is None else step.backward

    def _announce(self, now: tuple[int, ...], later: tuple[int, ...]) -> None:
        """Announce the leases of the pass that begins and those of the next pass, if not yet
        announced.
        """
        stream = self.streamed.stream
        if self._ahead != (now, stream.announced):
            stream.cancel()
            stream.announce(now)
        before = stream.announced
        stream.announce(later)
        self._ahead = later, stream.announced - before

    def _adapter_version(self) -> tuple[bool, int]:
        """Return whether an adapter has a gradient, and how often its values were written."""
        for layer in range(self.streamed.split.num_layers):
            for parameter in self.streamed.engine.adapters_of(layer):
                return parameter.grad is not None, parameter._version
        return False, 0

    def _warn_of_accumulation(self, lowest: int) -> None:
        """Warn, once, where gradients are added to those of a backward before, since each batch
        streams everything.
        """
        pending, version = self._adapter_version()
        if not (
            self.warns
            and pending
            and version == self._version
            and self.streamed.split.model.training
        ):
            return
        self.warns = False
        stream = self.streamed.stream
        layers = fetched_per_step(len(stream.layers), stream.num_slots, stream.residents, lowest)
        nbytes = human_bytes(sum(stream.layers[layer].nbytes for layer in layers))
        warnings.warn(
            "gradients are accumulated over several batches, and each batch streams "
            f"{nbytes} of weights once more. "
            "Have one batch of all rows instead (a larger per_device_train_batch_size, "
            "gradient_accumulation_steps=1, "
            "and micro_batch_size for the rows computed at once), or put "
            "lema.StreamingMixin before your trainer",
            stacklevel=2,
        )
