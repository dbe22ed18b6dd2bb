"""Retries after the device's memory ran out: attempts, each with less to hold at once.

The forward of one micro-batch through one layer depends on its input and the generator alone, so it
is attempted again on the spot, with one slot for weights fewer. A pass adds to gradients as it
goes, so it is begun again, with fewer slots or with micro-batches of half the rows; each one's loss
is weighted by the trained tokens of the whole step, so that changes no mathematics. What a run gave
up it does not take back, and it says so in a warning.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from lema.backend import Backend
from lema.engine.head.loss import split_batch
from lema.engine.numerics import deterministic_only
from lema.errors import MemoryLimitError, is_out_of_memory
from lema.model.state.attention import supported_only
from lema.model.state.model import ModelState
from lema.stream import LayerStream

__all__ = ["OomRetry", "Shortage"]

MicroBatches = Sequence[Mapping[str, Tensor]]
Purpose = Literal["training", "evaluation"]
T = TypeVar("T")
NOTE_PREFIX = "ran out of device memory "  # how the note on an error begins that says where

GENERAL_ADVICE = (
    "set gradient_checkpointing: true or boundary_activations: host, or lower max_length, "
    "loss_chunk_tokens or "
    "lora_rank; `lema plan` shows what takes how much"
)


@dataclass(frozen=True)
class Shortage:
    """The work that did not fit on the device."""

    location: str  # where memory ran out, as "in the forward of layer 3"
    rows: int  # how many rows the largest micro-batch had
    length: int  # how many tokens the longest row had
    slots: int  # how many layers' weights had a place on the device


class OomRetry:
    """The retries of a run, and what it has given up so far so that its work fits on the device.

    Args:
        stream: the layers' weights, of whose slots there may be fewer.
        backend: the device.
        state: what the modules of the model keep from call to call.
        recomputes: whether activations are recomputed; where they are not, the warning names that
            setting too.
        together: whether other processes take part in every pass.
        advise: returns the settings that would help with a shortage, as the plan knows them.

    Attributes:
        location: where the pass is now, as `at` was given last.
    """

    def __init__(
        self,
        stream: LayerStream,
        backend: Backend,
        state: ModelState,
        *,
        recomputes: bool = True,
        together: bool = False,
        advise: Callable[[Shortage], str] = lambda _: GENERAL_ADVICE,
    ) -> None:
        self._stream = stream
        self._backend = backend
        self._state = state
        self._recomputes = recomputes
        self._together = together
        self.advise = advise
        self.location = ""
        self._cuts = True  # whether smaller micro-batches change no mathematics of training
        # of the largest micro-batch, where the settings' own did not fit
        self._rows: dict[Purpose, int] = {}
        # What was given up since the last warning: how much of it there was and is, and where
        # memory ran out first.
        self._given_up: dict[str, tuple[int, int]] = {}
        self._short_at = ""
        self._passes = 0  # how many are being attempted now, one within the other

    def keep_rows_together(self) -> None:
        """Cut no micro-batch of a training step, because the loss is not a sum over its rows."""
        self._cuts = False

    @property
    def _alone(self) -> bool:
        """Whether no other process takes part in a pass; if one does, this process cannot begin
        again by itself.
        """
        return not (self._together or self._stream.sharded)

    def cut(
        self, micro_batches: MicroBatches, purpose: Purpose = "training"
    ) -> list[Mapping[str, Tensor]]:
        """Return the micro-batches, each with more rows than are known to fit cut into smaller
        ones.
        """
        rows = self._rows.get(purpose)
        if rows is None:
            return list(micro_batches)
        return [
            part
            for micro_batch in micro_batches
            for part in (
                split_batch(micro_batch, rows) if _rows_of(micro_batch) > rows else [micro_batch]
            )
        ]

    def run_pass(
        self,
        run: Callable[[MicroBatches], T],
        micro_batches: MicroBatches,
        *,
        parameters: Sequence[nn.Parameter] = (),
        outputs: list[Any] | None = None,
        purpose: Purpose = "training",
    ) -> T:
        """Return what `run` makes in one pass. Each attempt finds gradients, generator, what
        modules keep from call to call, and `outputs` as the first did. It is given the
        micro-batches, smaller ones where they did not fit; how many rows fit is remembered for each
        `purpose`. It adds to gradients of `parameters`, and to `outputs`. `MemoryLimitError`: one
        row does not fit."""
        state = self._backend.rng_state()
        mark = self._state.mark()
        count = len(outputs or ())
        with self.once("before the pass"):
            before = [
                None if parameter.grad is None else parameter.grad.clone()
                for parameter in parameters
                if self._alone
            ]
        while True:
            parts = self.cut(micro_batches, purpose)
            self._passes += 1
            try:
                with deterministic_only("between the layers"):
                    result = run(parts)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._stream.cancel()
                self._free_memory(error, parts, purpose)
            finally:
                self._passes -= 1
            # Here and not where the error was caught, because until that ends the error holds the
            # tensors of the functions that it interrupted; where it is part of a cycle of
            # references, the collector must find it.
            _put_back(parameters, before)
            if outputs is not None:
                del outputs[count:]
            gc.collect()
            self._backend.set_rng_state(state)
            self._state.put_back(mark)
        self._warn()
        return result

    def run_forward(
        self, location: str, run: Callable[[], T], state: Tensor, sums: Sized = ()
    ) -> T:
        """Return what `run` makes: the forward of one micro-batch through one leased layer, at a
        `location` of the pass. Each attempt begins from the generator's `state`, and one that fails
        must leave none of its tensors in a variable of the caller. `sums` are the sums of gradients
        that attempts add to: once there is one, memory that runs out ends the pass, because an
        addition to a sum cannot be taken back."""
        while True:
            try:
                with self.at(location):
                    output = run()
                break
            except RuntimeError as error:
                if sums or not is_out_of_memory(error) or not self._shrink(error, 1):
                    raise
            # what the error interrupted may be held by a cycle of references, as in `run_pass`
            gc.collect()
            self._backend.set_rng_state(state)
        if not self._passes:
            self._warn()
        return output

    @contextmanager
    def at(self, location: str) -> Iterator[None]:
        """Note on an out-of-memory error that leaves the `with` block where it was, unless an inner
        block noted it. `ConfigError`: the device lacks an operation in the block, or the
        deterministic form that it must have."""
        self.location = location
        try:
            with supported_only(location), deterministic_only(location):
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) and not _location_of(error):
                error.add_note(f"{NOTE_PREFIX}{location}")
            raise

    @contextmanager
    def once(self, location: str) -> Iterator[None]:
        """Attempt once, in the `with` block, what cannot be attempted again. `MemoryLimitError`:
        memory ran out.
        """
        try:
            with self.at(location):
                yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._refusal(error, ()) from _let_go(error)

    def _free_memory(self, error: RuntimeError, parts: MicroBatches, purpose: Purpose) -> None:
        """Give up half of the slots, because one is enough; where there is only one, half of a
        micro-batch's rows.
        """
        if self._shrink(error, max(1, self._stream.num_slots // 2)):
            return
        rows = max(map(_rows_of, parts), default=1)
        if rows == 1 or not self._alone or (purpose == "training" and not self._cuts):
            raise self._refusal(error, parts) from _let_go(error)
        self._rows[purpose] = -(-rows // 2)
        self._note(error, "rows", rows, self._rows[purpose])

    def _shrink(self, error: RuntimeError, count: int) -> bool:
        before = self._stream.num_slots
        gone = sum(1 for _ in range(count) if self._alone and self._stream.shrink())
        if gone:
            self._note(error, "slots", before, self._stream.num_slots)
        return bool(gone)

    def _note(self, error: RuntimeError, what: str, before: int, after: int) -> None:
        self._short_at = self._short_at or _location_of(error) or "between the layers"
        self._given_up[what] = self._given_up.get(what, (before,))[0], after

    def _refusal(self, error: RuntimeError, parts: MicroBatches) -> MemoryLimitError:
        shapes = [tuple(part["input_ids"].shape) for part in parts]
        short = Shortage(
            _location_of(error) or "between the layers",
            max((rows for rows, _ in shapes), default=0),
            max((length for _, length in shapes), default=0),
            self._stream.num_slots,
        )
        reason = str(error).partition("\n")[0][:200].rstrip(". ")
        what = f"the device's memory is too small: {reason}"
        if parts:
            what += (
                f"; {_count(short.rows, 'row')} of {_count(short.length, 'token')} at once next to "
            )
            what += f"{_count(short.slots, 'layer slot')} do not fit"
        if not self._alone:
            setting = "context_parallel_size" if self._together else "shard_weights"
            what += f"; with {setting} a process cannot try again alone"
        self._given_up = {}
        self._short_at = ""
        return MemoryLimitError(what, where=short.location, how=self.advise(short))

    def _warn(self) -> None:
        """Warn of memory savings that the run has made since the last call, if any."""
        if not self._given_up:
            return
        given_up = self._given_up
        location = self._short_at
        self._given_up = {}
        self._short_at = ""
        settings = []
        now = []
        if "slots" in given_up:
            before, after = given_up["slots"]
            settings.append(f"prefetch_depth: {max(1, after - 1)}")
            now.append(f"{_count(after, 'layer slot')} instead of {before}")
        if "rows" in given_up:
            before, after = given_up["rows"]
            settings.append(f"micro_batch_size: {after}")
            now.append(f"micro-batches of at most {_count(after, 'row')} instead of {before}")
        if not self._recomputes:
            settings.append("gradient_checkpointing: true (the others may then not be needed)")
        warnings.warn(
            f"device memory ran out {location}; from here on there are "
            f"{' and '.join(now)}, which changes no "
            f"mathematics. To begin so, write into the config {', '.join(settings)}; or "
            "set device_memory to what "
            "there is, and what is kept on the device is chosen to fit it, as `lema plan` shows",
            stacklevel=3,
        )


def _let_go(error: RuntimeError) -> RuntimeError:
    """Clear the frames that an error has left, because an error that is kept would keep their
    tensors.
    """
    chained: BaseException | None = error
    while chained is not None:
        clear_frames(chained.__traceback__)
        chained = chained.__context__
    return error


def _put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            parameter.grad = None
        else:
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)  # in place, because there may be no memory for another


def _location_of(error: BaseException) -> str:
    notes = getattr(error, "__notes__", ())
    return next(
        (note.removeprefix(NOTE_PREFIX) for note in notes if note.startswith(NOTE_PREFIX)), ""
    )


def _rows_of(micro_batch: Mapping[str, Tensor]) -> int:
    return len(micro_batch["input_ids"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
