"""The layer-major pass: every micro-batch of a step goes through a layer before the next layer is
leased.

So weights are transferred twice per optimizer step, however many micro-batches it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lema.activations.chunks.cuts import Cuts
from lema.activations.chunks.hostpool import HostPool
from lema.activations.hoststates import HostStates
from lema.backend import Backend
from lema.backend.interrupt import Interrupt, Leaving, Stop
from lema.backend.watchdog import Watchdog
from lema.config import LemaConfig
from lema.data.media.rows import RowMedia
from lema.engine.engine import Engine
from lema.engine.frozen_prefix import PrefixCache
from lema.engine.head.gradients import EmbedHead
from lema.engine.head.loss import LossChunks
from lema.engine.head.objectives import LossSettings, Measured, Objective
from lema.engine.head.pieces import PiecedHead, piece_passes
from lema.engine.head.routers import router_loss_of
from lema.engine.head.rows import RowLoss
from lema.engine.layers.chunk_visit import cuts_of
from lema.engine.layers.chunked import check_cuts, check_plain
from lema.engine.layers.image_rows import front_of_images
from lema.engine.layers.layer_pass import LayerPass, layers_of
from lema.engine.layers.reference_rows import ReferenceRows, StartingAdapter, reference_rows_of
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Activations, Saving
from lema.engine.layers.top import HeadInPieces, Top, TopLayer
from lema.engine.oom import OomRetry, Shortage
from lema.engine.padding import Padding, cut
from lema.engine.step_inputs import MicroBatches, StepInputs
from lema.engine.trained_weights import TrainedWeights
from lema.errors import ConfigError
from lema.model import Split
from lema.model.flow import LayerCall, Prelude
from lema.model.inputs import IMAGES, model_inputs
from lema.model.layers.tiles import TILES
from lema.model.sequence.division import RowDivision
from lema.model.sequence.host_keys import HostKeys
from lema.stream import LayerStream, Lease, StreamCounters

__all__ = ["StreamedModel"]


class StreamedModel:
    """A model whose decoder layers are leased from a stream, one visit after the other.

    Args:
        activations: what steps keep of their layers; None: boundary activations, on the device.
        loss_chunk_tokens: logits exist for this many tokens at a time.
        head: the head, where its weight is leased in pieces after the layers; None: it is on the
            device.
        runs_again: whether what comes before experts in groups is run twice in a backward.
        advise: returns the settings that would help where device memory runs out.
        loss: what a step is trained by.
        reference: the adapter of the model that an objective compares with; None: that model has no
            adapter.
        sequence_chunk: tokens of a sequence that go through a layer at once; None: all.
        division: how processes divide rows; None: each has rows of its own.
        host_keys: as in `Engine`.
        tile_tokens: tokens of which modules that work token by token run at once; None: all.

    Attributes:
        engine: the objects that the layers of a pass work with.
        layers: the decoder layers, each of its kind.
        sequence_chunk: tokens of a sequence that go through a layer at once; None: all.
        prefix: keeps the hidden states that layers below the lowest trained one make, in a run that
            repeats batches.
        watchdog: reports a pass that comes to no next layer in time; None: there is none.
        step_inputs: brings micro-batches to the device, and makes their loss.
        measured: what the objective has measured in the last pass, or the loss of routers
            (`Engine.routers`).
    """

    def __init__(
        self,
        split: Split,
        stream: LayerStream,
        backend: Backend,
        *,
        activations: Activations | None = None,
        loss_chunk_tokens: int = 1024,
        padding: Padding | None = None,
        head: PiecedHead | None = None,
        runs_again: bool = False,
        advise: Callable[[Shortage], str] | None = None,
        loss: LossSettings | None = None,
        reference: StartingAdapter | None = None,
        sequence_chunk: int | None = None,
        division: RowDivision | None = None,
        host_keys: HostKeys | None = None,
        tile_tokens: int | None = None,
    ) -> None:
        self.head = head
        self.activations = activations or Activations(split, backend, stream.trace)
        self.step_inputs = StepInputs(
            split,
            backend,
            loss or LossSettings(),
            padding or Padding(),
            loss_chunk_tokens,
            division,
        )
        advice = {} if advise is None else {"advise": advise}
        recomputes = self.activations.recompute
        retry = OomRetry(
            stream,
            backend,
            split.state,
            recomputes=recomputes,
            together=division is not None,
            **advice,
        )
        self.engine = Engine(
            split, stream, backend, runs_again=runs_again, retry=retry, host_keys=host_keys
        )
        self.sequence_chunk = sequence_chunk
        in_chunks = sequence_chunk is not None or division is not None
        self.layers = layers_of(self.engine, in_chunks=in_chunks)
        if in_chunks:
            check_cuts(self.engine)
        split.tiles.resize(tile_tokens)
        if tile_tokens is not None:
            check_plain(self.engine, "MLPs do not run in tiles", TILES)
        self._away = HostStates(backend)
        self.prefix: PrefixCache | None = None
        self.watchdog: Watchdog | None = None
        self.reference = reference
        self.measured: Measured = {}
        # whether something before the layers trains; learnt from a step
        self.starts_below: bool | None = None

    @property
    def split(self) -> Split:
        """The model in its parts."""
        return self.engine.split

    @property
    def stream(self) -> LayerStream:
        """The layers' weights."""
        return self.engine.stream

    @property
    def division(self) -> RowDivision | None:
        """How processes divide rows; None: each has rows of its own."""
        return self.step_inputs.division

    @property
    def num_dividing(self) -> int:
        """How many processes divide each row; 1: they do not."""
        return 1 if self.division is None else self.division.group.size

    @property
    def meets(self) -> bool:
        """Whether processes with copies of their own meet within a pass, because they put layers
        together of parts, or rows. None of them can then leave it, or begin again, by itself.
        """
        return self.division is not None or self.engine.stream.sharded

    @property
    def backend(self) -> Backend:
        """The device."""
        return self.engine.backend

    @property
    def retry(self) -> OomRetry:
        """What attempts again, with less at once, where device memory ran out."""
        return self.engine.retry

    @property
    def padding(self) -> Padding:
        """What gives rows the shapes that the device is to see."""
        return self.step_inputs.padding

    @property
    def objective(self) -> Objective | None:
        """What the loss of rows is; None: the cross-entropy of tokens. A loop of one's own may set
        it.
        """
        return self.step_inputs.objective

    @objective.setter
    def objective(self, objective: Objective | None) -> None:
        self.step_inputs.train_by(objective)

    @property
    def shifts_labels(self) -> bool:
        """Whether a position is trained on the label of the next one."""
        return self.step_inputs.shifts_labels

    def close(self) -> None:
        """Give back the memory and the files in which activations wait."""
        self.activations.close()

    @property
    def counters(self) -> StreamCounters:
        """What streaming has cost so far, and the bytes of activations that left the device."""
        return replace(self.stream.counters, bytes_offloaded=self.activations.bytes_out)

    def add_router_loss(self, config: LemaConfig, directory: Path, unable: str = "") -> None:
        """Add the loss of the model's routers to its steps, where it is asked for; the arguments
        and errors are those of `router_loss_of`.
        """
        num_parts = self.backend.parallel.size
        routers = router_loss_of(self.split, config, directory, num_parts, unable)
        if routers is not None:
            self.engine.add_router_loss(routers)

    def train_weights(self, trained: TrainedWeights) -> None:
        """Let weights of the layers train, from the next step on. `ConfigError`: compiled layers
        hand no gradients.
        """
        if self.split.compiled is not None:
            raise ConfigError(
                "weights of compiled layers cannot train",
                where="torch_compile",
                how="set it to false",
            )
        self.engine.train_weights(trained)

    @property
    def stop(self) -> Interrupt:
        """The interrupt that is asked before each layer and micro-batch whether the run is to
        stop.
        """
        return self.engine.stop

    @contextmanager
    def interruptible(self, stop: Stop) -> Iterator[None]:
        """Let `stop` end a run at a layer or micro-batch within `Interrupt.opened`; all
        processes do this, or none.
        """
        # those that divide rows leave as those do that hold a copy together
        division = self.division
        copies = self.backend.parallel.size > 1 or division is not None
        leaving: Leaving = "as a copy" if copies else "alone"
        interrupt = Interrupt(
            stop,
            self.backend.replicas,
            "together" if self.stream.sharded else leaving,
            None if division is None else division.group.exchange,
        )
        with self.engine.stopping(interrupt):
            yield

    @contextmanager
    def watched_by(self, watchdog: Watchdog) -> Iterator[None]:
        """Have a watchdog see the passes of a `with` block."""
        self.watchdog = watchdog
        try:
            yield
        finally:
            self.watchdog = None

    def patient(self, what: str) -> AbstractContextManager[None]:
        """Give the watchdog, if there is one, more patience for what the `with` block does
        beside the layers.
        """
        return nullcontext() if self.watchdog is None else self.watchdog.patient(what)

    @contextmanager
    def caching(self, prefix: PrefixCache) -> Iterator[None]:
        """Keep the outputs of frozen layers for each batch of a `with` block."""
        self.prefix = prefix
        try:
            yield
        finally:
            self.prefix = None

    def trained_outside(self) -> list[nn.Parameter]:
        """Return the trainable parameters outside the decoder layers."""
        inside = f"{self.split.layers_name}."
        named = self.split.model.named_parameters()
        return [p for name, p in named if p.requires_grad and not name.startswith(inside)]

    @property
    def lowest_trained(self) -> int:
        """The lowest layer that gradients reach: nothing below it is visited by the backward."""
        if self.starts_below:
            return 0
        trained = (layer for layer in range(self.split.num_layers) if self.engine.trains(layer))
        return next(trained, self.split.num_layers - 1)

    def announce_step(self, micro_batches: MicroBatches | None = None) -> None:
        """Announce the leases of one training step, so that its first layers are read before it
        starts. With `prefix`, the step's micro-batches say which layers it leaves out."""
        first = 0 if micro_batches is None else self._first_layer(self.retry.cut(micro_batches))
        self.stream.announce(self.stream.training_order(self.lowest_trained, first))

    def _first_layer(self, micro_batches: MicroBatches) -> int:
        inputs = [model_inputs(batch) for batch in micro_batches]
        return self.prefix.layer if self.prefix is not None and self.prefix.holds(inputs) else 0

    def loss(
        self,
        micro_batches: MicroBatches,
        *,
        num_tokens: int | None = None,
        scale: float | Tensor = 1.0,
        logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the cross-entropy of a step, averaged over all its trained tokens; call
        `.backward()` on it. With an `objective` it is that one's loss: the mean over the batches of
        the step, which the micro-batches say of their rows (`lema.data.preference`), and in each of
        them over its examples. `micro_batches`: each with `input_ids` and `labels`, int64 `[batch,
        sequence]`, and `attention_mask` where something is padded. Labels are not shifted; -100 is
        not trained. In host memory they are looked at without waiting for the device. `num_tokens`:
        divide the summed loss by this instead (gradient accumulation over several calls). `scale`:
        gradients are formed of `scale` times the loss (for half-precision gradients); the gradient
        that arrives from above is divided by it. `logits`: a list to which the logits `[batch,
        sequence, vocabulary]` of every micro-batch are appended."""
        device_batches, chunks = self.step_inputs.prepare(
            micro_batches, num_tokens=num_tokens, scale=scale, logits=logits
        )
        if not self.stream.announced:
            self.announce_step(micro_batches)
        start = self._first_layer(micro_batches)
        drawn_before = self.engine.generator_state()
        around: list[dict[str, Any]] | None = None if self.prefix is None else []
        # The first layer is leased before the prelude and kept for its turn, because the prelude
        # may need its weights.
        with ExitStack() as first_lease:
            first = first_lease.enter_context(
                nullcontext() if start else self._first_lease(device_batches)
            )
            outside = self.trained_outside()
            pool = self._pool(device_batches, chunks, trains_outside=bool(outside))
            hidden, calls = self.prelude(
                device_batches, first, differentiate=bool(outside), around=around, pool=pool
            )
            start = self._checked_start(start, micro_batches, around)
            embed_head = EmbedHead(self.backend, chunks, hidden, calls, outside)
            if self.engine.routers is not None:
                self.engine.routers.begin(embed_head.loss, calls, device_batches)
            hidden = self.split.enter(embed_head.start(self.engine.anchor))
            self.starts_below = embed_head.reach_below
            # a head in pieces comes after all layers, any other is computed with the top layer
            end = self.split.num_layers - (self.head is None)
            lowest = self.lowest_trained
            cuts = None if pool is None else _cuts_of(calls[lowest:end], lowest, hidden)
            saving = self.step_saving(hidden, lowest, end, cuts=cuts)
            reference_rows = reference_rows_of(
                self, chunks, micro_batches, device_batches, calls, first
            )
            rows = Rows(calls, list(hidden), pool=pool)
            del hidden
            if self.prefix is not None:
                start = self._through_prefix(
                    self.prefix,
                    rows,
                    start,
                    micro_batches,
                    around or (),
                    drawn_before,
                    reference_rows,
                    first_lease.close,
                )
            loss = LayerPass(
                self.engine,
                self.layers[start:end],
                rows,
                lowest=self.lowest_trained,
                saving=saving,
                reference_rows=reference_rows,
                top=self._top(embed_head, reference_rows),
                end_first=first_lease.close,
            ).loss()
        self._measure(embed_head.loss)
        if logits:  # there are none of a loss of rows, or of parts of rows
            cut(logits, micro_batches)
        return loss

    def _pool(
        self, batches: MicroBatches, loss: LossChunks | RowLoss, *, trains_outside: bool
    ) -> HostPool | None:
        """Return room in host memory for a step's hidden states, where sequences go through layers
        in chunks and boundaries do not wait on the device; None: hidden states are there whole.
        So they are as well where something else is computed with all of a row at once."""
        size = self.sequence_chunk
        uncut = (
            size is None
            or all(batch["input_ids"].shape[1] <= size for batch in batches)
            or self.activations.arena.tier == "device"
        )
        readers = (self.head, self.prefix, self.division)
        elsewhere = self.stream.groups or any(reader is not None for reader in readers)
        if uncut or trains_outside or elsewhere or not isinstance(loss, LossChunks):
            return None
        return self.activations.pool

    def _checked_start(
        self,
        start: int,
        micro_batches: MicroBatches,
        around: Sequence[Mapping[str, Any]] | None,
    ) -> int:
        """Return the layer with which a step begins: 0, unless the prefix has kept what the layers
        below make of the micro-batches, with the same `around` them.
        """
        inputs = [model_inputs(batch) for batch in micro_batches]
        if not start or self.prefix is None or self.prefix.fits(inputs, around or ()):
            return start
        # what was announced, because the layers below are needed all the same
        self.stream.cancel()
        self.announce_step()
        return 0

    def _through_prefix(
        self,
        prefix: PrefixCache,
        rows: Rows,
        start: int,
        micro_batches: MicroBatches,
        around: Sequence[Mapping[str, Any]],
        drawn_before: Tensor,
        reference_rows: ReferenceRows | None,
        end_first: Callable[[], None],
    ) -> int:
        """Take rows to the layer up to which a prefix keeps what the layers make, and keep that; or
        fetch it. Return the number of that layer.
        """
        inputs = [model_inputs(batch) for batch in micro_batches]
        if start:
            rows.put(list(prefix.fetch(inputs)))
            return start
        below = self.layers[: prefix.layer]
        prefix_pass = LayerPass(
            self.engine, below, rows, reference_rows=reference_rows, end_first=end_first
        )
        for _ in prefix_pass.up():
            pass
        received = [call.received for call in rows.calls[prefix.layer]]
        prefix.keep(
            inputs,
            rows.states,
            around,
            lowest=self.lowest_trained,
            drawn=not torch.equal(drawn_before, self.backend.rng_state()),
            handed_on=any(between is not None and between.more for between in received),
            stateful=any(map(self.split.state.layers.keeps, range(prefix.layer))),
        )
        return prefix.layer

    def _top(self, embed_head: EmbedHead, reference_rows: ReferenceRows | None) -> Top:
        """Return what forms the loss of a step behind the layers below."""
        if self.head is None:
            return TopLayer(self.engine, self.layers[-1], embed_head, reference_rows)
        loss = embed_head.loss
        assert isinstance(loss, LossChunks), "the head is whole for a loss of rows"
        return HeadInPieces(self.engine, self.head, loss)

    def _measure(self, loss: LossChunks | RowLoss) -> None:
        """Keep what a step has measured."""
        if self.engine.routers is not None:
            self.measured = self.engine.routers.end()
        if isinstance(loss, RowLoss):
            self.measured = loss.measured

    def join_idle(self, *, training: bool = True) -> None:
        """Take part in a step, or an evaluation, in which this process has no rows, for the
        processes that have some. `ConfigError`: the others may visit layers in an order that this
        process cannot know yet."""
        stream = self.stream
        self.measured = {}
        if (
            training
            and self.stream.sharded
            and self.starts_below is None
            and self.trained_outside()
        ):
            what = (
                "this process has no rows in the first step, so it does not know which layers "
                "get gradients"
            )
            how = "give every process rows: lower micro_batch_size, or start fewer processes"
            raise ConfigError(what, where="shard_weights", how=how)
        if not training:
            stream.cancel()  # as an evaluation does
        stream.join_idle(
            stream.training_order(self.lowest_trained) if training else stream.forward_order()
        )

    @torch.no_grad()
    def evaluate(
        self, micro_batches: MicroBatches, logits: list[Tensor] | None = None
    ) -> tuple[Tensor, int]:
        """Return the mean cross-entropy of the trained tokens (fp32 scalar) and how many they are.
        With an `objective`: its loss of the batch, and the number of examples that it is the mean
        of. Where `logits` are wanted no row is divided over processes."""
        run = partial(self._evaluate, logits)
        return self.retry.run_pass(run, micro_batches, outputs=logits, purpose="evaluation")

    def _evaluate(
        self, logits: list[Tensor] | None, micro_batches: MicroBatches
    ) -> tuple[Tensor, int]:
        divided = logits is None and self.division is not None
        device_batches, chunks = self.step_inputs.prepare(
            micro_batches, divided=divided, logits=logits
        )
        self._announce_forward()
        with ExitStack() as first_lease:
            first = first_lease.enter_context(self._first_lease(device_batches))
            entered, calls = self.prelude(device_batches, first, divided=divided)
            reference_rows = reference_rows_of(
                self, chunks, micro_batches, device_batches, calls, first
            )
            rows = Rows(calls, list(self.split.enter(entered)))
            del entered
            hidden = LayerPass(
                self.engine,
                self.layers,
                rows,
                reference_rows=reference_rows,
                end_first=first_lease.close,
            ).hidden_states()
        if isinstance(chunks, RowLoss):
            assert reference_rows is not None, "a loss of rows has an objective"
            value = reference_rows.evaluated(chunks, hidden)
            self.measured = chunks.measured
            return value, chunks.num_examples
        with self.retry.at("in the head and the loss"):
            if self.head is None:
                values = [chunks.forward(index, state) for index, state in enumerate(hidden)]
            else:
                values, _ = piece_passes(
                    self.head, self.stream.lease, chunks, hidden, differentiate=False
                )
        if logits:
            cut(logits, micro_batches)
        value = torch.stack(values).sum()
        if divided and self.division is not None:
            return self.division.group.sum(value), chunks.num_tokens
        return value, chunks.trained_tokens

    def hidden_states(
        self, micro_batches: MicroBatches, *, on_host: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the hidden states of each micro-batch, before the first layer and after each; none
        has a graph. If `on_host` they wait in host memory between layers, as
        `lema.activations.hoststates` has them."""
        away = self._away if on_host and not self.backend.memory().shared else None
        device_batches = self.step_inputs.to_device(self.retry.cut(micro_batches))
        self._announce_forward()
        with ExitStack() as first_lease:
            first = first_lease.enter_context(self._first_lease(device_batches))
            hidden, calls = self.prelude(device_batches, first, away=away)
            yield hidden
            entered = self.split.enter(hidden) if away is None else hidden
            rows = Rows(calls, list(entered), host=away)
            del hidden, entered
            for _ in LayerPass(self.engine, self.layers, rows, end_first=first_lease.close).up():
                yield tuple(rows.states)
        if away is not None:
            away.end_forward()

    def _announce_forward(self) -> None:
        """Announce the leases of a pass that has no way down."""
        self.stream.cancel()
        self.stream.announce(self.stream.forward_order())

    def _first_lease(self, micro_batches: MicroBatches) -> AbstractContextManager[Lease | None]:
        """Lease the first layer if the prelude needs its weights, which on a lazy device it does
        not.
        """
        has_learned = self.split.has_learned(model_inputs(micro_batches[0]))
        return nullcontext() if has_learned else self.stream.lease(0)

    def prelude(
        self,
        micro_batches: MicroBatches,
        first: Lease | None,
        *,
        differentiate: bool = False,
        away: HostStates | None = None,
        around: list[dict[str, Any]] | None = None,
        pool: HostPool | None = None,
        divided: bool = True,
    ) -> tuple[tuple[Any, ...], list[list[LayerCall]]]:
        """Return each micro-batch's hidden state before the layers, and per layer the call of each
        micro-batch. States that go `away` do so as each is made, as the first layer is given them;
        those of rows in chunks lie in `pool`. `around` receives, as JSON types, what the modules
        before the layers keep after each. `divided`: of rows that processes divide, this one's
        parts."""
        hidden: list[Any] = []
        preludes = []
        weights = {} if first is None else first.weights  # used once; None: they have been
        with (
            self.retry.at("before the layers"),
            nullcontext() if self.head is None else self.head.standing_in(),
        ):
            for number, batch in enumerate(micro_batches):
                prelude = self._prelude_of(
                    batch, weights, differentiate=differentiate, pool=pool, divided=divided
                )
                state = prelude.hidden
                hidden.append(
                    state if away is None else away.keep(number, *self.split.enter([state]))
                )
                preludes.append(prelude.calls)
                if around is not None:
                    around.append(self.split.state.around())
        calls = [
            [batch_calls[layer] for batch_calls in preludes]
            for layer in range(self.split.num_layers)
        ]
        return tuple(hidden), calls

    def _prelude_of(
        self,
        batch: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        *,
        differentiate: bool,
        pool: HostPool | None = None,
        divided: bool,
    ) -> Prelude:
        """Run one micro-batch up to the layers; in chunks, if it is longer than one."""
        inputs = model_inputs(batch)
        images: Any = batch.get(IMAGES)
        if images is not None:
            return front_of_images(
                self.split,
                inputs,
                partial(self._image_inputs, images),
                weights,
                lengths=images.lengths,
                size=self.sequence_chunk,
                differentiate=differentiate,
                allocate=None if pool is None else pool.take,
            )
        size: int | RowDivision | None = self.division if divided else None
        size = size or self.sequence_chunk
        uncut = isinstance(size, int) and batch["input_ids"].shape[1] <= size
        if size is None or uncut:
            return self.split.prelude(inputs, weights, differentiate=differentiate)
        take = None if pool is None else pool.take_zeros
        return self.split.prelude_in_chunks(
            inputs, weights, size, differentiate=differentiate, allocate=take
        )

    def _image_inputs(self, images: RowMedia, ids: Tensor) -> dict[str, Tensor]:
        """Return what the model is given of images besides the tokens, on the device."""
        inputs = images.inputs(ids)
        return {name: value.to(self.backend.device) for name, value in inputs.items()}

    def step_saving(
        self,
        hidden: Sequence[Tensor],
        lowest: int,
        end: int,
        budget: int = 0,
        *,
        cuts: Mapping[tuple[int, int], Cuts] | None = None,
    ) -> Saving:
        """Return what a step keeps of its layers; the arguments are those of `Activations.step`."""
        size = self.sequence_chunk
        long = size is not None and any(state.shape[1] > size for state in hidden)
        in_chunks = long or self.division is not None
        with self.retry.at("for the inputs of layers that wait for the backward"):
            return self.activations.step(
                hidden, lowest, end, budget, in_chunks=in_chunks, cuts=cuts
            )


def _cuts_of(
    calls: Sequence[Sequence[LayerCall]], first: int, hidden: Sequence[Tensor]
) -> Mapping[tuple[int, int], Cuts]:
    """Return the chunks of the inputs of layers, by layer and micro-batch.

    Args:
        calls: of each layer, the call of each micro-batch.
        first: the number of the first layer.
        hidden: of each micro-batch, its hidden state before the layers.
    """
    return {
        (layer, index): cuts_of(call, hidden[index].shape[1])
        for layer, of_layer in enumerate(calls, start=first)
        for index, call in enumerate(of_layer)
    }
