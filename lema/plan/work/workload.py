"""The cost of one micro-batch in each kind of layer and in the head, measured on tensors without
values.

No formula here knows an architecture. A layer of every kind runs forward and backward as the engine
runs it, under `FakeTensorMode`, in which only shapes and dtypes are computed, while live bytes and
multiplications are counted. No byte of a weight is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from lema.backend import Exchange, Parallel, load
from lema.engine.head.cut import HeadCut
from lema.engine.head.loss import blocks
from lema.engine.head.pieces import PiecedHead, piece_passes
from lema.engine.skip_matmuls import AdaptedLinears
from lema.errors import LemaError, ModelError
from lema.model import Split
from lema.model.capture import tensors_in
from lema.model.flow import LayerCall, Prelude
from lema.plan.work.meter import Tally, without_values
from lema.stream import Lease
from lema.stream.placement import LayerBytes

__all__ = ["MicroBatch", "Workload", "calls_of", "grown", "long_head_in_pieces", "measure"]

FEW_CHUNKS = 4  # of the loss
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)

Description = TypeVar("Description")


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed at once, all of one length."""

    rows: int
    length: int
    # how many times as many rows go through the layers beside them, forward alone
    forward_only: int = 0
    # whether the top layer runs twice, because the loss is known only once all rows are
    settled: bool = False
    # whether each is a pack of several, so layers get a mask that says which token sees which
    packed: bool = False
    # tokens that go through a layer at once; None: all of a row
    chunk: int | None = None
    # whether keys and values of the layer at work wait in host memory between chunks
    host_keys: bool = False
    # tokens of which modules that work token by token run at once; None: all
    tile: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return self.rows * self.length

    @property
    def is_cut(self) -> bool:
        """Whether its rows go through layers in chunks."""
        return self.chunk is not None and self.length > self.chunk

    def inputs(self) -> dict[str, Tensor]:
        """Return what the model is given."""
        ids = torch.ones(self.rows, self.length, dtype=torch.long)
        return {"input_ids": ids, "position_ids": ids - 1} if self.packed else {"input_ids": ids}


@dataclass(frozen=True)
class LayerWork:
    """One micro-batch in one layer."""

    forward: int  # floating-point operations of the forward
    recompute: int  # of running it again, as far as the backward needs it
    backward: int  # of the backward alone
    saved_bytes: int  # what the backward needs, weights and the layer's inputs excepted
    working_bytes: int  # the most that is alive at once in forward and backward
    forward_bytes: int  # what is alive after the forward, its output included
    # the gradients of the adapters in the layer; those of its own weights are counted apart
    gradient_bytes: int
    exchanges: tuple[Exchange, ...]  # of the forward, of running it again, and of the backward
    reduced: Exchange  # of gradients that each process has a part of, once in a step
    # of the products by frozen weights that running it again needs; 0 under another autocast
    product_bytes: int
    product_flops: int  # of these products
    # what waits for the layer's experts in the backward, where these are leased in groups
    waiting_bytes: int = 0
    # keys and values of whole sequences, where these go through the layer in chunks
    keys_values_bytes: int = 0
    # states that chunks hand on to the next ones, of all chunks
    handed_on_bytes: int = 0
    key_gradient_bytes: int = 0  # the sums of gradients of these keys and values
    # of keys, values and sums what waits in host memory, in whole pages
    paged_bytes: int = 0
    chunk_bytes: int = 0  # what one chunk takes beside them, forward and backward
    top_bytes: int = 0  # more than `working_bytes`, in the top layer's backward
    square_flops: int = 0  # of all operations, those that grow with the square of a row's length
    launches: int = 1  # how often the layer is called on parts of the micro-batch

    def at_once(self, times: float) -> int:
        """Return the most that is alive at once in the layer, of so many micro-batches: of experts
        in groups all wait while one is worked on."""
        return round(max(times, 1.0) * self.waiting_bytes) + self.working_bytes


@dataclass(frozen=True)
class HeadWork:
    """The head and the loss, forward and backward, of one micro-batch."""

    flops: int  # floating-point operations; 0: nobody asks for them, where the head is in pieces
    working_bytes: int  # the most that is alive at once; logits are those of one chunk
    exchange: Exchange  # with that of putting together what the layers have made
    # what waits while other micro-batches are worked on, where the head is in pieces
    waiting_bytes: int = 0


@dataclass(frozen=True)
class Workload:
    """What one micro-batch costs."""

    kinds: tuple[int, ...]  # for each layer, which of `works` is its own
    works: tuple[LayerWork, ...]  # of every kind of layer
    head: HeadWork  # after the layers
    hidden_bytes: (
        int  # of the hidden state, with what else goes from layer to layer, where that is largest
    )
    call_bytes: int  # of what else the layers are given, such as masks and rotary tables
    prelude_bytes: int  # the most that is alive at once before the layers
    state_bytes: int  # of the generator's state, kept for each layer that is recomputed
    starts_below: bool  # whether something before the layers trains
    entered: Exchange  # before the layers
    # the head and the loss in pieces of the vocabulary; None: they are not asked for
    pieces: HeadWork | None = None
    # the same in device memory, where hidden states wait in host memory but for a few chunks of a
    # row, as inputs of layers do; None: they are whole on the device in any case
    in_host: Workload | None = None
    chunk_bytes: int = 0  # of the largest of these chunks; they are not in what layers take

    def of(self, layer: int) -> LayerWork:
        """Return what a layer costs."""
        return self.works[self.kinds[layer]]

    @property
    def paged_bytes(self) -> int:
        """Bytes of host memory for keys, values and gradients of the layer with most of them."""
        return max(work.paged_bytes for work in self.works)

    def working_bytes(self, times: float) -> int:
        """Return the most that so many micro-batches need at once beside adapters and gradients,
        before, in or after the layers.
        """
        # The graph of the top layer, and the gradient of its output, wait while the head is
        # computed.
        top = self.of(len(self.kinds) - 1).forward_bytes + self.hidden_bytes
        return self.most(top + self.head.working_bytes, times)

    def in_pieces(self, times: float) -> int:
        """Return the same where the head is in pieces: so many micro-batches go through a piece
        before the next one.
        """
        assert self.pieces is not None
        # Less the hidden states, because those of all micro-batches are counted twice elsewhere.
        waiting_bytes = (max(times, 1.0) - 1) * (self.pieces.waiting_bytes - self.hidden_bytes)
        return self.most(round(self.pieces.working_bytes + waiting_bytes), times)

    def most(self, head_bytes: int, times: float) -> int:
        """Return the most that so many micro-batches need anywhere, given what the turn takes with
        the gradients of adapters, if any.
        """
        # These are not there yet at the turn, because they come on the way down.
        to_come = sum(self.of(layer).gradient_bytes for layer in range(len(self.kinds)))
        top = self.of(len(self.kinds) - 1)
        at_head = head_bytes - to_come + round(max(times, 1.0) * top.waiting_bytes)
        at_top = top.at_once(times) + top.top_bytes
        return max(
            self.prelude_bytes, at_head, at_top, *(work.at_once(times) for work in self.works)
        )


def measure(
    model: PreTrainedModel,
    layers: Sequence[LayerBytes],
    batch: MicroBatch,
    loss_chunk_tokens: int,
    trained: Sequence[Collection[str]] = (),
    parallel: Parallel | None = None,
    head: HeadCut | None = None,
    measured: Workload | None = None,
    split: Split | None = None,
) -> Workload:
    """Run one micro-batch through one layer of each kind, and through the head, on tensors without
    values.

    The model, with the decoder layers' weights on `meta`, is left as it was. Logits exist for
    `loss_chunk_tokens` at a time. `trained` are, of each layer, the weights of its own that train;
    empty: none do, in any. `parallel` are the processes that its layers have been divided among;
    None: they are whole. The `head` is given where it may be cut into pieces, and what is
    `measured` of this micro-batch if the head alone is another: then layers are not run again. The
    model's `split` learns what layers return once, however many micro-batches are run. Raises
    `ModelError` where the model cannot be streamed, or what it computes depends on values.
    """
    # which were made without values in another call, and mean nothing in this
    if split is None or split.keeps_tensors:
        cast = None if split is None else split.cast
        split = Split(model, load("cpu"), parallel=parallel, cast=cast)
    trained = trained or [()] * len(layers)
    kinds = cost_kinds(split, layers, trained)
    with without_values(model), split.tiles.sized(batch.tile):
        try:
            work = _measure(split, layers, kinds, batch, loss_chunk_tokens, trained, head, measured)
            if batch.tile is not None and batch.tokens > batch.tile:
                split.tiles.check_any(real=False)
            return work
        except (*VALUES_NEEDED, LemaError) as error:
            if isinstance(error.__cause__ or error, VALUES_NEEDED):
                raise ModelError(
                    (
                        "this model's computation depends on values, so its memory is not "
                        "known from its config"
                    ),
                    where=type(model).__name__,
                    how="train a few steps and watch their memory; training needs no plan",
                ) from error
            raise


def cost_kinds(
    split: Split, layers: Sequence[LayerBytes], weights: Sequence[Collection[str]] = ()
) -> tuple[int, ...]:
    """Number the kinds of layers that cost alike: of the same modules, with tensors of the same
    shapes and types.

    `lema.model.layers.kinds` tells more layers apart, because there one layer's graph stands for
    another's. Here every kind is measured for seconds, so attributes that cost nothing do not
    count: by these, 26 of 170 types of models have more kinds. How weights are stored on disk
    counts, and which of them (`weights` of each layer) train.
    """
    kind_numbers: dict[Any, int] = {}
    kinds = []
    for layer, stored, trained_names in zip(
        split.layers, layers, weights or [()] * len(layers), strict=True
    ):
        modules = tuple((name, type(module)) for name, module in layer.named_modules())
        trained = tuple(
            (name, parameter.shape)
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad
        )
        tensors = sorted(
            str((tensor.name, tensor.dtype, tensor.shape)) for tensor in stored.tensors
        )
        expanded = sorted(
            str((expansion.library, expansion.target.name, expansion.target.shape))
            for expansion in stored.expansions
        )
        kind = (modules, trained, tuple(tensors), tuple(expanded), tuple(sorted(trained_names)))
        kinds.append(kind_numbers.setdefault(kind, len(kind_numbers)))
    return tuple(kinds)


def calls_of(
    split: Split,
    layers: Sequence[LayerBytes],
    batch: MicroBatch,
    trained: Sequence[Any] = (),
    loaded_layers: Collection[int] = (),
) -> tuple[tuple[int, ...], tuple[LayerCall, ...], list[Tensor]]:
    """Return one layer of each kind (as `one_of_each`), the calls of all, and the inputs of each
    layer and of the head: tensors without values. `trained` are names of weights, of each layer."""
    kinds = cost_kinds(split, layers, trained)
    with without_values(split.model):
        learn(split, layers)
        prelude = split.prelude(batch.inputs(), {})
        layer_inputs = given_of(split, layers, prelude)
    return one_of_each(kinds, layer_inputs, loaded_layers), prelude.calls, layer_inputs


def given_of(split: Split, layers: Sequence[LayerBytes], prelude: Prelude) -> list[Tensor]:
    """Return what each layer is given, and then the head: more than the hidden state where
    layers hand on more.
    """
    hidden = prelude.hidden.detach()
    (entered,) = split.enter([hidden])
    if all(call.left is None for call in prelude.calls):
        return [entered] * len(layers) + [hidden]
    layer_inputs = [entered]
    with torch.no_grad(), Tally():  # which knows more shapes
        for index, (layer, call) in enumerate(zip(layers, prelude.calls, strict=True)):
            layer_inputs.append(split.run_layer(index, fake_weights(layer), call, layer_inputs[-1]))
    return layer_inputs


def one_of_each(
    kinds: Sequence[int], layer_inputs: Sequence[Tensor], loaded_layers: Collection[int] = ()
) -> tuple[int, ...]:
    """Return one layer of each kind: of its own the first that is given most, and of equal ones
    one of the `loaded_layers`.
    """
    ranked = sorted(
        range(len(kinds)),
        key=lambda index: (-layer_inputs[index].nbytes, index not in loaded_layers),
    )
    return tuple(
        next(index for index in ranked if kinds[index] == kind) for kind in range(max(kinds) + 1)
    )


def fake_weights(layer: LayerBytes) -> dict[str, Tensor]:
    """Return a layer's weights as its lease would, without values."""
    tensors = (*layer.tensors, *(expansion.target for expansion in layer.expansions))
    return {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors}


def _measure(
    split: Split,
    layers: Sequence[LayerBytes],
    kinds: tuple[int, ...],
    batch: MicroBatch,
    chunk_tokens: int,
    trained: Sequence[Collection[str]],
    head: HeadCut | None,
    measured: Workload | None,
) -> Workload:
    inputs = batch.inputs()
    learn(split, layers)
    with Tally(split.parallel) as tally:
        tally.leave_out([*inputs.values(), *split.model.parameters(), *split.model.buffers()])
        inside = f"{split.layers_name}."
        parameters = split.model.named_parameters()
        outside_trains = any(
            parameter.requires_grad and not name.startswith(inside)
            for name, parameter in parameters
        )
        prelude = split.prelude(inputs, {}, differentiate=outside_trains)
        begun = tally.exchanged
    call_tensors = {
        id(tensor): tensor for call in prelude.calls for tensor in tensors_in(call.captured_values)
    }
    entered, *_, hidden = states = given_of(split, layers, prelude)
    works = tuple(
        layer_work(
            split,
            index,
            layers[index],
            prelude.calls[index],
            states[index : index + 2],
            trained[index],
        )
        for index in (one_of_each(kinds, states) if measured is None else ())
    )
    # The last layer puts the parts of several processes together, and the gradient of the whole is
    # there as well.
    gathered_bytes = 2 * hidden.nbytes - entered.nbytes if entered.nbytes < hidden.nbytes else 0
    return Workload(
        kinds,
        works if measured is None else measured.works,
        _head_work(split, entered, hidden, chunk_tokens, gathered_bytes),
        max(state.nbytes for state in states[:-1]),
        sum(
            tensor.untyped_storage().nbytes()
            for tensor in call_tensors.values()
            if tally.counts(tensor)
        ),
        tally.peak,
        load("cpu").rng_state().nbytes,
        prelude.hidden.requires_grad,
        begun,
        None
        if head is None or head.module is None
        else _pieces_work(split, hidden, chunk_tokens, head, layers),
    )


def learn(split: Split, layers: Sequence[LayerBytes]) -> None:
    """Let the split see what layers return, on a few tokens without values."""
    few = {"input_ids": torch.ones(1, math.lcm(8, split.parallel.size), dtype=torch.long)}
    if not split.has_learned(few):
        with Tally():  # which knows more shapes
            split.prelude(few, fake_weights(layers[0]))


def layer_work(
    split: Split,
    index: int,
    stored: LayerBytes,
    call: LayerCall,
    states: Sequence[Tensor],
    trained: Collection[str],
) -> LayerWork:
    """Run one micro-batch through a layer, forward and backward, without values; return what that
    costs. `states` look like what the layer is given and like what it returns; `trained` are the
    names of the layer's own weights that train."""
    layer = split.layers[index]
    weights = fake_weights(stored)
    layer_input = torch.empty_like(states[0]).requires_grad_()
    gradient = torch.empty_like(states[1])
    parameters = list(layer.parameters())
    _allocate_gradients(parameters, weights, trained)
    saved = dict[int, int]()
    linears = AdaptedLinears(layer)
    products = linears.products(lambda output: output.to("meta"))  # which takes no memory
    with Tally(split.parallel) as tally:
        layer_tensors = [*parameters, *weights.values()]
        tally.leave_out([layer_input, gradient, *layer_tensors, *layer.buffers()])
        tally.leave_out(tensors_in(call.captured_values))
        tally.leave_out([tensor.grad for tensor in layer_tensors])

        def pack(tensor: Tensor) -> Tensor:
            if tally.counts(tensor):
                tally.save(tensor)
                saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, linears.watched(saved.__len__, products) as last:
            output = split.run_layer(index, weights, call, layer_input)
        products.drop(last, len(saved))
        forward = tally.flops
        forward_bytes = tally.live
        sent = tally.exchanged
        torch.autograd.backward(output, gradient)
    exchanges = sent, tally.exchanged_to_saved, tally.exchanged.plus(sent, -1)
    split.parallel.reduce_gradients(parameters)
    reduced = tally.exchanged.plus(sent, -1).plus(exchanges[2], -1)
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    for parameter in parameters:
        parameter.grad = None
    keeps_products = (call.autocast or split.cast) == split.dtype
    return LayerWork(
        forward=forward,
        recompute=tally.flops_to_saved(),
        backward=tally.flops - forward,
        saved_bytes=sum(saved.values()),
        working_bytes=tally.peak,
        forward_bytes=forward_bytes,
        gradient_bytes=gradients,
        exchanges=exchanges,
        reduced=reduced,
        product_bytes=products.nbytes if keeps_products else 0,
        product_flops=products.flops if keeps_products else 0,
    )


def _allocate_gradients(
    parameters: Iterable[Tensor], weights: Mapping[str, Tensor], trained: Collection[str]
) -> None:
    """Give what trains of a layer the gradients that are counted elsewhere: with the adapters, and
    with those of the layer's own weights."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    for name in trained:
        weights[name].requires_grad_().grad = torch.empty_like(weights[name])


def _head_work(
    split: Split, entered: Tensor, hidden: Tensor, chunk_tokens: int, gathered_bytes: int
) -> HeadWork:
    """Run one chunk, cut as `lema.engine.head.loss` cuts it, and take as many as there are beside
    `gathered_bytes` bytes. The last layer makes what has the shape of what `entered` the first,
    before that of all processes is one."""
    rows, length = hidden.shape[:2]
    block = (min(rows, max(1, chunk_tokens // length)), min(length, chunk_tokens))
    leaf = torch.empty_like(hidden[: block[0], : block[1]]).requires_grad_()
    target = torch.zeros(block, dtype=torch.long)
    with Tally(split.parallel) as tally:
        tally.leave_out([leaf, target, *split.model.parameters(), *split.model.buffers()])
        with torch.enable_grad():
            value = split.parallel.cross_entropy(partial(split.head, leaf), target, reduction="sum")
        torch.autograd.grad(value, leaf)
    chunk_exchange = tally.exchanged
    tokens = rows * length
    part = math.prod(block)
    split.parallel.leave_layers(entered)
    # The last chunk may be a part of one, with as many collectives and fewer bytes.
    count = chunk_exchange.count * sum(1 for _ in blocks(rows, length, chunk_tokens))
    sent = tally.exchanged.plus(chunk_exchange, -1).plus(
        Exchange(count, chunk_exchange.nbytes * tokens // part)
    )
    return HeadWork(tally.flops * tokens // part, tally.peak + gathered_bytes, sent)


@dataclass(frozen=True)
class _Chunks:
    """The loss of one micro-batch whose tokens all train, as far as pieces of the head ask for
    it.
    """

    tokens: tuple[int, int]
    chunk_tokens: int
    scale = 1.0
    num_tokens = 1

    def blocks_to_form(self, _: int) -> Iterator[tuple[slice, slice, Tensor]]:
        targets = torch.zeros(self.tokens, dtype=torch.long)
        for rows, columns in blocks(*self.tokens, self.chunk_tokens):
            yield rows, columns, targets[rows, columns]

    def store_logits(self, *_: object) -> None: ...  # nobody asks for logits


@dataclass(frozen=True)
class _Leases:
    """Leases of weights without values, by the numbers of their layers."""

    weights: dict[int, dict[str, Tensor]]

    @contextmanager
    def lease(self, layer: int) -> Iterator[Lease]:
        yield Lease(layer, torch.empty(0), self.weights[layer])


def long_head_in_pieces(
    split: Split,
    layers: Sequence[LayerBytes],
    batch: MicroBatch,
    chunk_tokens: int,
    head: HeadCut,
) -> HeadWork:
    """Return what a micro-batch of long rows takes in the head in pieces, as `measure` tells of
    shorter ones.

    Args:
        split: the model, whose layers' weights are on `meta`.
        layers: what they have on the device.
        batch: the micro-batch.
        chunk_tokens: of which logits exist at once.
        head: that is cut into pieces.
    """
    with without_values(split.model):
        learn(split, layers)
        state = split.prelude(replace(batch, length=PREFIX).inputs(), {}).hidden
        shape = batch.rows, batch.length, *state.shape[2:]
        hidden = torch.empty(shape, dtype=state.dtype)
        return _pieces_work(split, hidden, chunk_tokens, head, layers, num_chunks=1)


PREFIX = 8  # tokens, by which the form of a hidden state is seen


def _pieces_work(
    split: Split,
    hidden: Tensor,
    chunk_tokens: int,
    head: HeadCut,
    layers: Sequence[LayerBytes],
    *,
    num_chunks: int = FEW_CHUNKS,
) -> HeadWork:
    """Run the head and the loss of a micro-batch through a few pieces, at which there is as much
    as at all of them; of a long row only a few chunks, because what waits of each is alike."""
    few = num_chunks * chunk_tokens
    if hidden.shape[0] > 1 or hidden.shape[1] <= 2 * few:
        return _run_pieces(split, hidden, chunk_tokens, head, layers)
    first, second = (
        _run_pieces(split, torch.empty_like(hidden[:, :length]), chunk_tokens, head, layers)
        for length in (few, 2 * few)
    )
    longer = (hidden.shape[1] - few) / few
    more = second.working_bytes - first.working_bytes
    waiting = second.waiting_bytes - first.waiting_bytes
    return replace(
        first,
        working_bytes=first.working_bytes + round(longer * more),
        waiting_bytes=first.waiting_bytes + round(longer * waiting),
    )


def _run_pieces(
    split: Split, hidden: Tensor, chunk_tokens: int, head: HeadCut, layers: Sequence[LayerBytes]
) -> HeadWork:
    """Run the head and the loss of some tokens through a few pieces."""
    assert head.module is not None
    spans = head.spans(layers)
    # All are of one size but for the last, so that between it and the second nothing new is alive.
    few = {0, 1, len(spans) - 1}
    few_spans = [span for at, span in enumerate(spans) if at in few]
    pieced = PiecedHead(split, load("cpu"), head.module, few_spans)
    pieces = head.pieces(layers)
    stream = _Leases(
        dict(
            enumerate(
                (fake_weights(piece) for at, piece in enumerate(pieces) if at in few), len(layers)
            )
        )
    )
    leaf = torch.empty_like(hidden)
    # stands for `LossChunks`
    chunks: Any = _Chunks((hidden.shape[0], hidden.shape[1]), chunk_tokens)
    with Tally() as tally:
        tally.leave_out(
            [leaf, *split.model.parameters(), *split.model.buffers(), *tensors_in(stream.weights)]
        )
        head_inputs = pieced.inputs(leaf)
        waiting_bytes = pieced.waiting_bytes(head_inputs)
        del head_inputs
        piece_passes(pieced, stream.lease, chunks, [leaf], differentiate=True)
    return HeadWork(0, tally.peak, Exchange(), waiting_bytes)


def grown(first: Description, second: Description, factor: float) -> Description:
    """Return every number of a description of rows that are `factor` times as many, or as long, as
    those of `first`. `second` describes twice as many, or as long ones; numbers grow evenly."""
    start: Any = first
    double: Any = second
    result: Any = start
    if isinstance(start, tuple):
        result = tuple(grown(*pair, factor) for pair in zip(start, double, strict=True))
    elif is_dataclass(start):
        kind: Any = type(start)
        result = kind(
            *(
                grown(getattr(start, part.name), getattr(double, part.name), factor)
                for part in fields(start)
            )
        )
    elif type(start) is int:
        result = round(start + (factor - 1) * (double - start))
    description: Description = result
    return description
