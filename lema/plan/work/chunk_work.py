"""The memory of a micro-batch that goes through layers in chunks of its sequence, measured on
tensors without values.

Operations are counted as those of whole sequences. What is alive at once is that of the last chunk,
which sees the keys and values of all others, and of what is there for the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lema.config.units import human_bytes
from lema.model import Split
from lema.model.capture import tensors_in
from lema.model.sequence.cache import StatesComplete
from lema.model.sequence.chunks import MOST_IN_HOST, ChunkedRows, most_of_calls
from lema.model.sequence.host_keys import HostKeys, HostStates
from lema.model.sequence.token_inputs import TokenInputs
from lema.plan.work.carrier import CarrierWithoutValues
from lema.plan.work.meter import Tally, without_values
from lema.plan.work.workload import LayerWork, MicroBatch, Workload, fake_weights, grown, learn
from lema.stream.placement import LayerBytes

__all__ = ["ChunkRun", "chunks_note", "in_chunks"]

LARGEST = 4096  # tokens of a chunk that is run without values; of larger ones it is told by smaller
NEAR = 0.01  # of the bytes of a chunk: more is no even growth
KEYS_IN_HOST = "keys and values of a layer wait in host memory, block by block"

Runs: TypeAlias = "dict[MicroBatch, ChunkRun]"
"""What chunks of a model have shown, by the micro-batch."""


def in_chunks(
    work: Workload,
    split: Split,
    layers: Sequence[LayerBytes],
    batch: MicroBatch,
    *,
    rows_on_device: bool = False,
    processes: int = 1,
    runs: Runs | None = None,
) -> Workload:
    """Return what a micro-batch costs that goes through layers in chunks.

    Args:
        work: what it costs as whole sequences, with the operations that grow with their square.
        split: the model, whose layers' weights are on `meta`.
        layers: what they have on the device.
        batch: the micro-batch.
        rows_on_device: whether something needs hidden states of whole rows on the device.
        processes: that divide each row, of which one has such a part of its chunks.
        runs: what chunks of this model have shown; what is run is added.

    Raises:
        ConfigError: the model's layers cannot be cut.
    """
    if batch.chunk is None or not batch.is_cut:
        return work
    runs = {} if runs is None else runs
    if batch not in runs:
        with without_values(split.model), split.tiles.sized(batch.tile):
            learn(split, layers)
            runs[batch] = _run_of(split, layers, work.kinds, batch, runs)
    run = runs[batch]
    # Keys and values are those of whole rows in each process.
    count = math.ceil(batch.length / batch.chunk / processes)
    work = _of_part(work, processes)
    terms = [_of_chunks(kind, count, processes) for kind in run.terms]
    sequence_kinds = split.sequence_kinds()
    windows = [sequence_kinds[work.kinds.index(kind)].window for kind in range(len(work.works))]
    seen = [
        replace(_without_unseen(layer, batch.length, batch.chunk, window), launches=count)
        for layer, window in zip(work.works, windows, strict=True)
    ]
    # All calls, or those of one chunk at a time.
    of_all = count * run.calls
    stored = of_all if of_all <= most_of_calls(work.hidden_bytes) else 0
    on_device = replace(
        work,
        works=tuple(map(_with_rows_on_device, seen, terms)),
        call_bytes=stored + run.calls,
        prelude_bytes=2 * work.hidden_bytes + stored + run.prelude,
    )
    if rows_on_device or batch.settled or batch.forward_only or _trains_outside(split):
        return on_device
    stored = of_all if of_all <= MOST_IN_HOST else 0
    in_host = _in_host(
        on_device, terms, call_bytes=stored + run.calls, prelude_bytes=stored + run.prelude
    )
    return replace(on_device, in_host=in_host)


def _of_chunks(terms: ChunkTerms, count: int, processes: int) -> ChunkTerms:
    """Return what a layer holds of a row whose chunks were run as one.

    Args:
        terms: of one chunk.
        count: chunks of the row, in each of the processes that divide it.
        processes: how many divide it.
    """
    return replace(
        terms,
        states=(count - 1) * terms.states,
        states_flops=(count - 1) * terms.states_flops,
        input_gradient=math.ceil(terms.input_gradient / processes),
        output=math.ceil(terms.output / processes),
    )


def _of_part(work: Workload, processes: int) -> Workload:
    """Return what one of several processes has of a micro-batch whose rows they divide: as many
    tokens as each other one, which attend to as many."""
    if processes == 1:
        return work
    works = tuple(
        replace(
            layer,
            forward=layer.forward // processes,
            recompute=layer.recompute // processes,
            backward=layer.backward // processes,
            square_flops=layer.square_flops // processes,
        )
        for layer in work.works
    )
    return replace(
        work,
        works=works,
        head=replace(work.head, flops=work.head.flops // processes),
        hidden_bytes=math.ceil(work.hidden_bytes / processes),
    )


@dataclass(frozen=True)
class ChunkRun:
    """What chunks of one size take on the device, in bytes."""

    calls: int  # what the layers are given of a chunk beside hidden states
    prelude: int  # the most that is alive at once before the layers
    terms: tuple[ChunkTerms, ...]  # of every kind of layer; states, made again, are of one chunk


def _run_of(
    split: Split,
    layers: Sequence[LayerBytes],
    kinds: Sequence[int],
    batch: MicroBatch,
    runs: Runs,
) -> ChunkRun:
    """Return what the chunks of a micro-batch take, as `runs` have it or are to have it.

    A large chunk takes as many operations as it has tiles of tokens, and each takes time. What it
    takes of memory grows evenly with its tokens and those of the row, so smaller ones of shorter
    rows tell it, unless they show that it does not.
    """
    size = batch.chunk
    assert size is not None
    if batch not in runs and size > LARGEST:
        smaller = [LARGEST // part for part in (4, 2, 1)]
        quarter, half, largest = (
            _run_of(
                *(split, layers, kinds),
                replace(batch, length=math.ceil(batch.length * chunk / size), chunk=chunk),
                runs,
            )
            for chunk in smaller
        )
        expected = grown(quarter, half, 4)
        pairs = zip(expected.terms, largest.terms, strict=True)
        if all(abs(even.chunk - term.chunk) <= NEAR * term.chunk for even, term in pairs):
            runs[batch] = grown(half, largest, 2 * size / LARGEST)
    if batch not in runs:
        runs[batch] = _run(split, layers, kinds, batch, size)
    return runs[batch]


def _run(
    split: Split,
    layers: Sequence[LayerBytes],
    kinds: Sequence[int],
    batch: MicroBatch,
    size: int,
) -> ChunkRun:
    """Run the last chunk of a micro-batch, in chunks of a size, without values."""
    # Whole chunks: the last one sees most, and is to be no smaller than those before it.
    count = math.ceil(batch.length / size)
    # Packs are not looked for, because that is a question about values. Masks are as large.
    inputs = {"input_ids": torch.ones(batch.rows, count * size, dtype=torch.long)}
    rows = split.rows_in_chunks(TokenInputs(inputs), size)
    with Tally(split.parallel, only_memory=True) as tally:
        tally.leave_out([*inputs.values(), *split.model.parameters(), *split.model.buffers()])
        prelude = rows.front(len(rows.spans) - 1)
        peak = tally.peak
    of_calls = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for call in prelude.calls
        for tensor in tensors_in(call.captured_values)
        if tally.counts(tensor)
    }
    terms = tuple(
        _terms(split, kinds.index(kind), layers, rows, batch) for kind in range(max(kinds) + 1)
    )
    return ChunkRun(sum(of_calls.values()), peak, terms)


def _in_host(
    work: Workload, terms: Sequence[ChunkTerms], *, call_bytes: int, prelude_bytes: int
) -> Workload:
    """Return what a micro-batch costs whose hidden states wait in host memory."""
    return replace(
        work,
        works=tuple(map(_with_rows_in_host, work.works, terms)),
        chunk_bytes=max(of_layer.chunk_input for of_layer in terms),
        hidden_bytes=0,
        call_bytes=call_bytes,
        prelude_bytes=prelude_bytes,
    )


def _trains_outside(split: Split) -> bool:
    """Whether a weight outside the layers trains."""
    of_layers = {id(parameter) for parameter in split.layers.parameters()}
    return any(
        parameter.requires_grad and id(parameter) not in of_layers
        for parameter in split.model.parameters()
    )


def chunks_note(batch: MicroBatch, work: Workload | None) -> str | None:
    """Say how rows go through layers, and what a layer keeps of one; None: they are not cut.

    Args:
        batch: the micro-batch.
        work: what it costs; None: it cannot be told.
    """
    if batch.chunk is None:
        return None
    if not batch.is_cut:
        return f"sequence_chunk: no row has more than {batch.chunk:,} tokens, so none is cut"
    count = math.ceil(batch.length / batch.chunk)
    note = (
        f"sequence_chunk: a row of {batch.length:,} tokens goes through each layer in {count:,} "
        f"chunks of {batch.chunk:,}"
    )
    if work is None:
        return note
    sizes = {
        "keys and values": max(layer.keys_values_bytes for layer in work.works),
        "states between chunks": max(layer.handed_on_bytes for layer in work.works),
    }
    parts = [f"{human_bytes(size // batch.rows)} of {what}" for what, size in sizes.items() if size]
    note = f"{note}; one layer keeps at most {' and '.join(parts)} of it"
    return f"{note}; {KEYS_IN_HOST}" if work.paged_bytes else note


@dataclass(frozen=True)
class ChunkTerms:
    """Bytes on the device in the backward of a layer, of one micro-batch in chunks.

    Each term is one holder of memory: what leaves the device is taken out of `in_backward`, and
    nothing else changes.
    """

    chunk: int  # what the last chunk's forward and backward take beside the others
    keys_values: int  # of the whole row
    key_gradients: int  # the sums of their gradients
    states: int  # that chunks have handed on
    states_flops: int  # operations by which the backward makes keys, values and states again
    input_gradient: int  # of the whole row, put together of those of chunks
    output: int  # of the whole row, in the forward
    chunk_input: int  # of the part of a layer's input that one chunk is
    pages: int = 0  # of keys and values, after the forward, where they wait in host memory
    # where they do: keys and values of the whole row, and the sums of their gradients
    in_host: tuple[int, int] = (0, 0)

    @property
    def in_backward(self) -> int:
        """Bytes in the backward."""
        return (
            self.chunk + self.keys_values + self.key_gradients + self.states + self.input_gradient
        )

    @property
    def after_forward(self) -> int:
        """Bytes after the forward, the output included."""
        return self.keys_values + self.pages + self.states + self.output

    @property
    def at_top(self) -> int:
        """Bytes more in the backward of the top layer: what it is given and the gradient of what it
        has made are both there."""
        return self.output


def _with_rows_on_device(work: LayerWork, terms: ChunkTerms) -> LayerWork:
    """Return a layer's work in chunks, with hidden states of whole rows on the device."""
    return replace(
        work,
        working_bytes=terms.in_backward,
        forward_bytes=terms.after_forward,
        top_bytes=terms.at_top,
        product_bytes=0,
        product_flops=0,
        keys_values_bytes=terms.keys_values + terms.in_host[0],
        key_gradient_bytes=terms.key_gradients + terms.in_host[1],
        paged_bytes=sum(terms.in_host),
        handed_on_bytes=terms.states,
        chunk_bytes=terms.chunk,
        recompute=work.recompute + terms.states_flops,
    )


def _with_rows_in_host(work: LayerWork, terms: ChunkTerms) -> LayerWork:
    """Return the same with a few chunks of them on the device, which are counted elsewhere; nothing
    is put together there."""
    return replace(
        work,
        working_bytes=terms.in_backward - terms.input_gradient,
        forward_bytes=terms.after_forward - terms.output,
        top_bytes=0,
    )


def _without_unseen(work: LayerWork, length: int, chunk: int, window: int | None) -> LayerWork:
    """Return a layer's work without the operations of attention to tokens that no token of a chunk
    sees: later ones, and those before the window."""
    seen = (length + chunk) / 2
    if window is not None:
        seen = min(seen, window + chunk)
    unseen = (1 - seen / length) * work.square_flops
    # Of these each run has two products for each of the backward's four.
    once = round(unseen / 4)
    return replace(
        work,
        forward=max(0, work.forward - once),
        recompute=max(0, work.recompute - once),
        backward=max(0, work.backward - 2 * once),
        square_flops=work.square_flops - round(unseen),
    )


def _terms(
    split: Split, index: int, layers: Sequence[LayerBytes], rows: ChunkedRows, batch: MicroBatch
) -> ChunkTerms:
    """Return what a layer holds of `rows`, of which the tokens of the micro-batch count for what it
    holds of a whole row; states are those of one chunk."""
    layer = split.layers[index]
    weights = fake_weights(layers[index])
    parameters = list(layer.parameters())
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    before, last = range(len(rows.spans))[-2:]
    run_tokens = rows.spans[last].stop
    states = rows.states(index, HostKeys(CarrierWithoutValues()) if batch.host_keys else None)
    with Tally(split.parallel, only_memory=True) as tally:
        tally.leave_out([*parameters, *weights.values(), *layer.buffers()])
        tally.leave_out([parameter.grad for parameter in parameters])

        def run(chunk: int, layer_input: Tensor, *, stops: bool = False) -> Tensor:
            call = rows.front(chunk).calls[index]
            with rows.cache.holding(index, rows.spans[chunk], states, stops=stops):
                return split.run_layer(index, weights, call, layer_input, compiled=False)

        hidden = _hidden(rows)
        part = hidden[:, rows.spans[before].slice]
        with torch.no_grad():
            run(before, part)
        of_one_chunk = states.handed_on_bytes
        after_forward = states.nbytes - of_one_chunk
        keys_values = 0 if batch.host_keys else after_forward
        tally.restart_peak()
        leaf = hidden[:, rows.spans[last].slice].detach().requires_grad_()
        with torch.enable_grad():
            output = run(last, leaf)
        torch.autograd.backward([output], [torch.empty_like(output)])
        in_host = states.host_bytes if isinstance(states, HostStates) else (0, 0)
        key_gradients = 0
        if not batch.host_keys:
            key_gradients = states.nbytes - states.handed_on_bytes - keys_values
        peak = tally.peak
        flops = -tally.flops
        if rows.cache.kinds[index].keeps:
            with torch.no_grad(), suppress(StatesComplete):
                run(before, part, stops=True)
        flops += tally.flops
    for parameter in parameters:
        parameter.grad = None
    terms = ChunkTerms(
        chunk=peak - hidden.nbytes - keys_values - key_gradients - of_one_chunk,
        keys_values=keys_values,
        key_gradients=key_gradients,
        states=of_one_chunk,
        states_flops=flops,
        input_gradient=hidden.nbytes,
        output=hidden.nbytes,
        chunk_input=hidden[:, rows.spans[0].slice].nbytes,
        pages=after_forward - keys_values,
        in_host=in_host,
    )
    return _of_length(terms, batch.length, run_tokens)


def _of_length(terms: ChunkTerms, length: int, run_tokens: int) -> ChunkTerms:
    """Return what a layer holds of rows of a length, of what it does of rows of `run_tokens`."""
    keys_values, key_gradients = terms.in_host
    return replace(
        terms,
        keys_values=terms.keys_values * length // run_tokens,
        key_gradients=terms.key_gradients * length // run_tokens,
        input_gradient=terms.input_gradient * length // run_tokens,
        output=terms.output * length // run_tokens,
        in_host=(keys_values * length // run_tokens, key_gradients * length // run_tokens),
    )


def _hidden(rows: ChunkedRows) -> Tensor:
    """Return what a layer is given, without values."""
    state = rows.front(0).hidden
    return torch.empty(state.shape[0], rows.length, *state.shape[2:], dtype=state.dtype)
