"""A causal language model in three parts: the prelude before the decoder layers, the layers, and
the head after them.

All three are the model's own code: its forward is run with every layer's `forward` replaced by a
recorder. The prelude and the head take that forward as a function (`Run`), because a trainer may
call a part of the model alone. The first chapters of docs/internals/engine.md tell how.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lema.backend import Backend, Parallel
from lema.backend.registry import has_addresses
from lema.compat import cache_argument
from lema.errors import ConfigError, ModelError, is_out_of_memory
from lema.model import capture
from lema.model.capture import PASSED_THROUGH_THE_MODEL, replaced, values_unread, without_values
from lema.model.experts import (
    LayerExperts,
    form_no_frozen_gradients,
)
from lema.model.flow import CannotCut, LayerCall, Prelude, Suspended, Tape, find_cut
from lema.model.layers.adapters import computing_with
from lema.model.layers.attached import AttachedLayers
from lema.model.layers.compiled import CompiledLayers
from lema.model.layers.routing import replayed
from lema.model.layers.tiles import TokenTiles
from lema.model.row_tables import RowTables
from lema.model.sequence.cache import LayerKind, SequenceCache, kinds_of
from lema.model.sequence.chunks import Allocate, ChunkedRows
from lema.model.sequence.division import RowDivision
from lema.model.sequence.token_inputs import TokenInputs
from lema.model.skeleton import find_layers, main_dtype, scores_texts
from lema.model.state.hooks import aside
from lema.model.state.model import ModelState
from lema.model.weight_names import restored_parameters, stored_name

__all__ = ["NO_CACHE", "Learned", "ModelCall", "Run", "Split"]

Run = Callable[[], Any]
"""A forward of the model's own, or of the part of it that holds the layers, on inputs that it
knows.
"""

ModelCall = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Calls a model, or the part of it that holds the layers, on tokens and with options."""

LEARNING_TOKENS = 8
NO_CACHE: Mapping[str, Any] = {"use_cache": False}
OUT_OF_ORDER = "it does not run its layers once each, in their order"


@dataclass(frozen=True)
class Learned:
    """What running a model on a few tokens has shown of it.

    Attributes:
        extra_outputs: what layers return after the hidden state, as layer 0 did; None: it is bare.
        mark_absent: whether a None among it has a placeholder, because it may be a tensor in
            another layer.
        cuts: the number of the head's input, by whether the model trains, because some models
            differ between the two.
    """

    extra_outputs: tuple[Any, ...] | None = None
    mark_absent: bool = True
    cuts: Mapping[bool, int] = field(default_factory=dict)


NOTHING_LEARNED = Learned()


class _LayerReached(Exception):
    """Stops the model's forward once enough is recorded."""


def _stop() -> Tensor:
    raise _LayerReached


class Split:
    """The parts of one model. The layers' weights are given at each call; all others are the
    model's own. `model`: the model, adapters attached or not; every parameter outside the decoder
    layers is real. `parallel`: the processes that hold the model together; None: the backend's.
    `lazy`: whether the device compiles what is run on it, and its tensors have no addresses. It is
    then not asked for values, because each answer would be a graph to compile. `tables`: the
    embeddings that are looked up row by row; None: all are whole. `cast`: the dtype that
    inputs and weights are cast to for products; None: their own. `learned`: what another split
    of this model has seen of it. `fast`: whether LoRA linears that read one input multiply
    together, which `ConfigError` refuses where modules are divided or compiled."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        *,
        compiled: bool = False,
        parallel: Parallel | None = None,
        tables: RowTables | None = None,
        learned: Learned = NOTHING_LEARNED,
        fast: bool = False,
        cast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.parallel = parallel or backend.parallel
        layers_name, self.layers = find_layers(model)
        self._backend = backend
        self.dtype = main_dtype(model)
        self.cast = cast or self.dtype
        self.lazy = not has_addresses(backend.device)
        self._scores = scores_texts(model)
        self.learned = learned
        self.tables = tables
        if fast and (self.lazy or self.parallel.size > 1):
            what = (
                "the device compiles what is run on it"
                if self.lazy
                else "several processes hold the model together"
            )
            raise ConfigError(
                f"fast does not work if {what}", where="arithmetic", how="set it to exact"
            )
        self.state = ModelState(model, self.layers, layers_name)
        self.attached = AttachedLayers(
            self.layers, layers_name, backend, compiled=compiled, fast=fast
        )
        form_no_frozen_gradients()

    @property
    def layers_name(self) -> str:
        """What the decoder layers are called in the model."""
        return self.attached.name

    @property
    def tiles(self) -> TokenTiles:
        """What of the layers runs in tiles of tokens."""
        return self.attached.tiles

    @property
    def owner(self) -> nn.Module:
        """The module that holds the layers."""
        return self.model.get_submodule(self.layers_name.rpartition(".")[0])

    @property
    def keeps_tensors(self) -> bool:
        """Whether layers return other tensors than the hidden state: those of layer 0 are kept."""
        return any(isinstance(output, Tensor) for output in self.extra_outputs or ())

    @property
    def extra_outputs(self) -> tuple[Any, ...] | None:
        """What layers return after the hidden state, as layer 0 did on a few tokens; None: the
        hidden state is bare.
        """
        return self.learned.extra_outputs

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def prelude(
        self,
        batch: Mapping[str, Tensor],
        first_layer_weights: Mapping[str, Tensor],
        *,
        differentiate: bool = False,
        run: Run | None = None,
        more: Mapping[str, Tensor] | None = None,
    ) -> Prelude:
        """Run the model up to its layers. `batch`: `input_ids`, int64 `[batch, sequence]`, and what
        else the model's forward takes. `first_layer_weights`: of layer 0, by name; used once, to
        learn what a layer returns. `differentiate`: let the hidden state keep its graph, where
        something before the layers trains. `run`: what to run; None: the model on `batch`, and on
        `more`, such as pixels."""
        if more is None:
            self._begin(batch, first_layer_weights)
        else:
            self._begin_with_text(batch, first_layer_weights)
            batch = {**batch, **more}
        return self._front(run or partial(self._logits, batch), differentiate=differentiate)

    def owner_call(
        self,
        batch: Mapping[str, Any],
        first_layer_weights: Mapping[str, Tensor],
        *,
        differentiate: bool = False,
    ) -> dict[str, Any]:
        """Run the model up to the module that holds the layers; return the arguments with which it
        calls that, by name. The parameters are those of `prelude`; the batch has images."""
        self._begin_with_text(batch, first_layer_weights)
        signature = inspect.signature(self.owner.forward)
        arguments: dict[str, Any] = {}

        def record(*args: object, **kwargs: object) -> NoReturn:
            arguments.update(capture.named_arguments(signature, args, kwargs))
            raise _LayerReached

        with (
            torch.set_grad_enabled(differentiate),
            self._unread(),
            replaced({self.owner: record}),
            suppress(_LayerReached),
        ):
            self._logits(batch)
        return arguments

    def prelude_in_chunks(
        self,
        batch: Mapping[str, Tensor],
        first_layer_weights: Mapping[str, Tensor],
        size: int | RowDivision,
        *,
        differentiate: bool = False,
        allocate: Allocate | None = None,
    ) -> Prelude:
        """Run the model up to its layers, as `prelude` does, `size` tokens at a time, or the
        chunks that this process has of a division; the calls are `ChunkedCall`. Tokens with which
        all rows begin are computed once, if no row draws anything of its own. `allocate`: makes
        room for the hidden state; None: it is on the device. `ConfigError`: the model, or the
        batch, cannot be cut."""
        self._begin(batch, first_layer_weights)
        inputs = TokenInputs(batch)
        rows = self.rows_in_chunks(inputs, size, shares=not capture.draws(self.model))
        return rows.prelude(differentiate=differentiate, allocate=allocate)

    def rows_in_chunks(
        self,
        inputs: TokenInputs,
        size: int | RowDivision,
        call: ModelCall | None = None,
        *,
        leaves_out_padding: bool = False,
        shares: bool = False,
    ) -> ChunkedRows:
        """Return the chunks of a micro-batch. `ConfigError`: it cannot be cut.

        Args:
            inputs: of the micro-batch.
            size: tokens of a chunk, or how processes divide its rows.
            call: calls the part of the model that holds the layers; None: the whole model.
            leaves_out_padding: as in `ChunkedRows`.
            shares: as in `ChunkedRows`.
        """
        front = partial(self._chunk_front, call or self._logits)
        return ChunkedRows(
            self.model,
            self.layers,
            front,
            inputs,
            size,
            leaves_out_padding=leaves_out_padding,
            shares=shares,
        )

    def sequence_kinds(self) -> list[LayerKind]:
        """Return what each layer keeps of a sequence. `ConfigError`: it is not known."""
        return kinds_of(DynamicCache(config=self.model.config).layers, self.num_layers)

    def _chunk_front(
        self,
        call: ModelCall,
        batch: Mapping[str, Any],
        cache: SequenceCache | None,
        *,
        differentiate: bool = False,
        again: bool = False,
    ) -> Prelude:
        """Run the model up to its layers on one chunk; see `lema.model.sequence.chunks.Front`."""
        name = cache_argument(self.model.base_model if self._scores else self.model)
        options = NO_CACHE if cache is None else {"use_cache": True, name: cache}
        run = partial(call, batch, options)
        if not again:
            return self._front(run, differentiate=differentiate)
        drawn = self._backend.rng_state()
        outer_state = self.state.outer.now()
        with aside(self.state.outer.modules):
            prelude = self._front(run)
        self._backend.set_rng_state(drawn)
        outer_state.restore()
        return prelude

    def _begin(
        self, batch: Mapping[str, Tensor], first_layer_weights: Mapping[str, Tensor]
    ) -> None:
        """Learn from a few tokens of the first batch what the model is like."""
        self.state.outer.begin()
        if self.model.training not in self.learned.cuts:
            with self.state.outer.learning(), aside(self.model.modules()):
                self._learn(self._few(batch), first_layer_weights)

    def _begin_with_text(
        self, batch: Mapping[str, Any], first_layer_weights: Mapping[str, Tensor]
    ) -> None:
        """Learn what the model is like from tokens that stand for no image."""
        ids = batch["input_ids"][:1, :LEARNING_TOKENS]
        self._begin({"input_ids": torch.ones_like(ids)}, first_layer_weights)

    def _front(self, run: Run, *, differentiate: bool = False) -> Prelude:
        """Run the model up to its layers."""
        # Stopped where the head begins, because it needs what the layers make, and nothing has run
        # them yet.
        tape = Tape(self.learned.cuts[self.model.training], _stop)
        with torch.set_grad_enabled(differentiate), self._unread(), suppress(_LayerReached):
            self._followed(tape, run, Tensor.detach)
            raise self._refusal(OUT_OF_ORDER)
        return Prelude(tape.hidden, tape.tied())

    def _logits(self, batch: Mapping[str, Any], options: Mapping[str, Any] = NO_CACHE) -> Tensor:
        """Run the whole model; of one that scores texts its base, because a score is none of each
        token, and its head is run by the caller of the model."""
        with self.autocast():
            if self._scores:
                last: Tensor = self.model.base_model(**batch, **options)[0]
                return last[..., :1]
            logits: Tensor = self.model(**batch, **options).logits
        return logits

    def _followed(self, tape: Tape, run: Run, make: Callable[[Tensor], Tensor]) -> Any:
        """Run the model's own forward with its layers replaced: each returns what `make` makes of
        the hidden state that it is given, and of what layer 0 has returned besides. Returns what it
        returns."""

        learned = self.learned

        def recorder(index: int) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                with torch._C.DisableTorchFunction():
                    if index != len(tape.calls):
                        raise self._refusal(OUT_OF_ORDER)
                    if (hidden := tape.called(args, kwargs)) is None:
                        raise self._refusal(
                            f"the hidden state changes between layers {index - 1} and {index}"
                        )
                    # A tensor stands for None too, because it may be one in another layer.
                    absent = torch.empty(0, dtype=torch.long) if learned.mark_absent else None
                    items = [
                        hidden,
                        *(absent if item is None else item for item in learned.extra_outputs or ()),
                    ]
                    returned = tape.returned(
                        tuple(
                            make(output) if isinstance(output, Tensor) else output
                            for output in items
                        )
                    )
                return returned[0] if learned.extra_outputs is None else returned

            return record

        forwards = [recorder(index) for index in range(self.num_layers)]
        with self.replaced(forwards), aside(self.layers), tape:
            return run()

    def has_learned(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether `prelude` needs no weights: once it is known what layers return, on a lazy device
        from their shapes. A model whose forward looks at values is examined as on other devices,
        which finds what cannot be split."""
        if not self.lazy or self.model.training in self.learned.cuts:
            return self.model.training in self.learned.cuts
        device = self._backend.device
        before = self.learned
        few = {name: (value.shape, value.dtype) for name, value in self._few(batch).items()}
        try:
            with without_values(self.model, self.layers, device):
                parameters = {
                    stored_name(name): parameter
                    for name, parameter in self.layers[0].named_parameters()
                    if parameter.is_meta
                }
                weights = {
                    name: torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    for name, parameter in parameters.items()
                }
                shapes = {
                    name: torch.ones(shape, dtype=dtype, device=device)
                    for name, (shape, dtype) in few.items()
                }
                self._learn(shapes, weights)
        except (ModelError, *PASSED_THROUGH_THE_MODEL):
            self.learned = replace(before, extra_outputs=None)
            return False
        if (outputs := self.extra_outputs) is not None:
            stand_ins = tuple(capture.stand_in(output, device) for output in outputs)
            self.learned = replace(self.learned, extra_outputs=stand_ins)
        return True

    def _few(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a few tokens of a batch; of processes that hold a layer together each may have
        its part of them.
        """
        few = math.lcm(LEARNING_TOKENS, self.parallel.size)
        return {name: value[:1, :few] for name, value in batch.items()}

    def _unread(self) -> AbstractContextManager[Any]:
        """Return the context in which the model's own forward asks a lazy device for nothing, and
        no other device for what the host knows."""
        if self.lazy:
            return values_unread()
        asked = self.tables is not None and self._backend.device.type != "cpu"
        return (
            self.tables.copies.answering() if asked and self.tables is not None else nullcontext()
        )

    @property
    def compiled(self) -> CompiledLayers | None:
        """The layers as they are compiled; None: they are not."""
        return self.attached.compiled

    def compiles(self, index: int) -> bool:
        """Whether `run_layer` runs a layer compiled, as far as is known: its first run may show
        that it cannot.
        """
        return self.compiled is not None and self.compiled.compiles(index)

    def run_layer(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        call: LayerCall,
        hidden: Tensor,
        *,
        compiled: bool = True,
    ) -> Tensor:
        """Run one layer on `hidden`, `[batch, sequence, hidden]`, with the weights given; returns
        the same shape. `compiled` false: not compiled, even where it could be. Of processes that
        hold a layer together each may have its part of the sequence, from `enter` on, until the
        last layer has put the parts together."""
        parallel = self.parallel
        graphs = self.compiled if compiled else None

        def layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            same_lists = capture.lists_in(args, kwargs)

            def forward() -> Any:
                out: Any = NotImplemented
                if graphs is not None:
                    out = graphs.call(index, self.renamed(index, weights), args, kwargs)
                return (
                    self.call_layer(index, weights, args, kwargs) if out is NotImplemented else out
                )

            if capture.has_values(hidden):
                out = self.state.layers.run(index, call, forward, (args, kwargs, weights))
            else:
                out = forward()
            if not same_lists():
                raise self._refusal(f"layer {index} passes something to later layers in a list")
            return out

        inside = nullcontext() if call.hooks is None else call.hooks.standing()
        choosing = (
            nullcontext()
            if call.choices is None
            else replayed(self.layers[index], index, self.experts_of(index), call.choices)
        )
        adapted = (
            nullcontext()
            if call.adapter is None
            else computing_with(call.adapter, [self.layers[index]])
        )
        with self.autocast(call.autocast), capture.routed(call.routers), inside, choosing, adapted:
            if graphs is not None and torch.is_grad_enabled() and not hidden.requires_grad:
                # so that one graph serves all layers: the lowest needs none
                hidden = hidden.detach().requires_grad_()
            output = call.run(hidden, layer)
        return parallel.leave_layers(output) if index == self.num_layers - 1 else output

    def enter(self, hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what this process gives its first layer of each micro-batch's hidden state;
        differentiable.
        """
        return tuple(self.parallel.enter_layers(state) for state in hidden)

    def call_layer(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call one layer's own forward, even while it is replaced, with the weights given;
        returns what it returns.
        """
        layer = self.layers[index]
        with replaced({layer: None}), aside([layer]):
            # Nothing is tied within a layer; looking for it would walk the modules at every call.
            tensors = self.renamed(index, weights)
            names = self.attached.names(index)
            stored = names.buffers(tensors)
            together = self.attached.inputs_shared(index, tensors, args, kwargs)
            tiled: AbstractContextManager[None] = nullcontext()
            if self.tiles.size is not None:
                tiled = self.tiles.used(index, next(capture.tensors_in([args, kwargs]), None))
            with restored_parameters(names.adapted), together, tiled:
                out = torch.func.functional_call(layer, tensors, args, kwargs, tie_weights=False)
        for name, buffer in stored.items():
            if tensors[name] is not buffer or buffer._version:
                raise self._refusal(
                    f"layer {index} writes into its {name}, which is read from its file at "
                    "each visit"
                )
        return out

    def experts_of(self, index: int) -> LayerExperts | None:
        """Return the experts of a layer; None: it has none whose weights may be leased in
        groups.
        """
        return self.attached.experts(index)

    def suspended(self, index: int, run: Callable[[], Any]) -> Suspended:
        """Have `run` run a layer without its experts and what needs their result. `ModelError`:
        that cannot be.
        """
        experts = self.experts_of(index)
        suspended = Suspended(self._backend.rng_state)
        assert experts is not None
        try:
            # experts in groups run on few tokens at once as they are
            untiled = self.tiles.sized(None)
            with untiled, replaced({experts.module: suspended.reached}), suspended.tape:
                output = run()
            if any(
                suspended.tape.number(tensor) is not None
                for tensor in self.state.layers.tensors(index)
            ):
                raise self.state.layers.refusal(
                    index, "which is made of its experts' result, and they run in groups"
                )
            suspended.returned(output)
        except ValueError as error:
            raise self._refusal(
                f"layer {index} has no experts to lease in groups, because {error}"
            ) from error
        return suspended

    def head(
        self, hidden: Tensor, batch: Mapping[str, Tensor] | None = None, cut: int | None = None
    ) -> Tensor:
        """Return the logits `[rows, tokens, vocabulary]` of the last layer's output `[rows, tokens,
        hidden]`. The part of the forward before the head runs on `batch`, or on placeholder tokens,
        and its result is thrown away. `cut` is the number of what is given to the head; None: as
        was seen in the first batch."""
        has_lookups = batch is not None
        if batch is None:
            # Any token but padding, because padding could be masked.
            placeholder = int(getattr(self.model.config, "pad_token_id", None) == 0)
            with self._unread():
                ids = torch.full(
                    hidden.shape[:2], placeholder, dtype=torch.long, device=hidden.device
                )
            batch = {"input_ids": ids}
        logits: Tensor = self.finish(
            hidden, partial(self._logits, batch), cut, has_lookups=has_lookups
        )
        return logits

    def finish(
        self, hidden: Tensor, run: Run, cut: int | None = None, *, has_lookups: bool = False
    ) -> Any:
        """Return what `run` returns if the last layer's output is `hidden`; what it does before
        that is thrown away. The generator, and what modules keep from call to call, are put back
        before the head begins: what it draws is what the whole model would draw. `cut` is as in
        `head`; `has_lookups`: embeddings are looked up all the same."""
        state = self._backend.rng_state()
        outer_state = self.state.outer.now()
        entered = list[Tensor]()

        def enter() -> Tensor:
            self._backend.set_rng_state(state)
            outer_state.restore()
            put_back()
            entered.append(hidden)
            return hidden

        tables = (
            nullcontext() if has_lookups or self.tables is None else self.tables.without_lookups()
        )
        tape = Tape(self.learned.cuts[self.model.training] if cut is None else cut, enter)
        with tables, self._unread(), aside(self.state.outer.modules) as put_back:
            returned = self._followed(tape, run, Tensor.detach)
        assert entered, "the head did not get the output of the layers"
        return returned

    def _learn(self, few: Mapping[str, Tensor], first_layer_weights: Mapping[str, Tensor]) -> None:
        """Run layer 0 for real on a few tokens, to see what layers return; then see whether the
        model can be split.
        """
        state = self._backend.rng_state()

        def run(*args: Any, **kwargs: Any) -> Any:
            if args:
                args = self.parallel.enter_layers(args[0]), *args[1:]
            else:
                kwargs["hidden_states"] = self.parallel.enter_layers(kwargs["hidden_states"])
            experts = self.experts_of(0)
            stand_in = {}
            if experts is not None and not set(experts.weights) <= first_layer_weights.keys():
                # they are leased in groups
                stand_in = {experts.module: lambda hidden, *_: torch.zeros_like(hidden)}
            with replaced(stand_in):
                out = self.call_layer(0, first_layer_weights, args, kwargs)
            outputs = None if isinstance(out, Tensor) else tuple(out[1:])
            self.learned = replace(self.learned, extra_outputs=outputs)
            raise _LayerReached

        try:
            with (
                torch.no_grad(),
                self.autocast(),
                self.replaced([run] * self.num_layers),
                suppress(_LayerReached),
            ):
                self.model(**few, use_cache=False)
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            raise self._refusal(f"it does not run on only a few token ids: {error}") from error
        try:
            self._check(few)
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            # None stays None, because the code may compute with other results of layers than the
            # hidden state.
            self.learned = replace(self.learned, mark_absent=False)
            try:
                self._check(few)
            except PASSED_THROUGH_THE_MODEL as again:
                if is_out_of_memory(again):
                    raise
                raise self._refusal(
                    f"its forward fails on only a few token ids: {again}"
                ) from again
        self._backend.set_rng_state(state)

    def _check(self, few: Mapping[str, Tensor]) -> None:
        """Make sure that the model is a prelude, layers one after the other, and a head; find where
        that begins. `ModelError`: a layer's output cannot be followed, or the head needs all tokens
        at once."""
        tape = Tape(keep=True)
        with torch.enable_grad():  # because the graphs say what depends on what layers return
            logits = self._followed(tape, partial(self._logits, few), capture.as_leaf)
        if len(tape.calls) != self.num_layers:
            raise self._refusal(OUT_OF_ORDER)
        enough = partial(
            self._is_enough, few=few, shape=logits.shape, top=tape.calls[-1].returns[0]
        )
        try:
            cut = find_cut(tape, logits, enough)
        except CannotCut as error:
            raise self._refusal(str(error)) from error
        cuts = {**self.learned.cuts, self.model.training: cut}
        self.learned = replace(self.learned, cuts=cuts)

    def _is_enough(
        self, cut: int, hidden: Tensor, few: Mapping[str, Tensor], shape: torch.Size, top: int
    ) -> bool:
        """Whether the head gives logits of this shape for `hidden` alone, token by token.
        What has their shape and comes after `top`, the last layer's output, may be logits already,
        before they are capped or scaled."""
        if (
            hidden.dim() != 3
            or hidden.shape[:2] != shape[:2]
            or (hidden.shape == shape and cut != top)
        ):
            return False
        try:
            with torch.no_grad(), capture.without_dropout(self.model):
                expected = self.head(hidden, few, cut)
                parts = [self.head(hidden[:, :1], cut=cut), self.head(hidden[:, 1:], cut=cut)]
                alone = [self.head(hidden, cut=cut), torch.cat(parts, dim=1)]
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            return False
        return all(capture.alike(logits, expected) for logits in alone)

    def _refusal(self, why: str) -> ModelError:
        source = self.model.config.name_or_path
        where = f"{self.layers_name} of {type(self.model).__name__}"
        what = f"this model cannot be streamed layer by layer: {why}"
        how = "`lema models` lists the types that stream"
        return ModelError(what, where=f"{source}: {where}" if source else where, how=how)

    def renamed(self, index: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name the weights as the layer does now."""
        return self.attached.names(index).renamed(weights)

    def adapters_changed(self) -> None:
        """Forget the layers' names and compiled forms, because adapters were attached or taken off.
        Those of experts multiply apart from here on, also for another `Split` of this model."""
        self.state.forget()
        self.attached = self.attached.renewed()

    def autocast(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """Return the context in which this model computes products, or with weights of another
        dtype.
        """
        return self._backend.autocast(dtype or self.cast)

    def replaced(self, forwards: Sequence[Callable[..., Any]]) -> AbstractContextManager[None]:
        """Replace the layers' `forward` for the length of a `with` block."""
        self.state.layers.pause()
        return replaced(dict(zip(self.layers, forwards, strict=True)))
