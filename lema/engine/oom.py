"""Recovery when device memory runs out: which errors count as that, and what is given up until the work fits.

The forward of one micro-batch through one layer depends on its input and the generator alone, so it is tried again on
the spot, with one slot fewer for weights. A pass that adds to gradients is begun again from its start, with fewer slots
or with micro-batches of half the rows. Every micro-batch's loss is weighted by the trained tokens of the whole step, so
the mathematics are those of larger ones. What was given up stays given up, and a message says so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from lema.backend import Backend
from lema.engine.loss import split_batch
from lema.errors import MemoryLimitError, is_out_of_memory
from lema.stream import LayerStream

__all__ = ["Room", "Shortage"]


T = TypeVar("T")
MicroBatches = Sequence[Mapping[str, Tensor]]
Purpose = Literal["training", "evaluation"]
PLACE = "ran out of device memory "  # how the note on an error begins that says where

GENERAL_ADVICE = (
    "set gradient_checkpointing: true or boundary_activations: host, or lower max_length, loss_chunk_tokens or "
    "lora_rank; `lema plan` shows what takes how much"
)


@dataclass(frozen=True)
class Shortage:
    """The work that did not fit.

    Attributes:
        place: in which layer, or before them or after.
        rows: of the largest micro-batch.
        length: tokens of the longest row.
        slots: for weights.
    """

    place: str
    rows: int
    length: int
    slots: int


class Room:
    """What fits on the device, as far as a run has found out.

    Args:
        stream: whose slots can be given up.
        backend: the device.

    Attributes:
        recomputes: whether activations are recomputed; if not, that is a way out to speak of.
        place: where a pass is, as `at` was told last.
        advise: says which settings would make room for what does not fit; set by who can tell.
    """

    def __init__(self, stream: LayerStream, backend: Backend) -> None:
        self._stream, self._backend = stream, backend
        self.recomputes = True
        self.place = ""
        self.advise: Callable[[Shortage], str] = lambda _: GENERAL_ADVICE
        self._rows: dict[Purpose, int] = {}  # of the largest micro-batch, where the settings' own did not fit
        self._given_up = _GivenUp()
        self._passes = 0  # under way

    @property
    def _alone(self) -> bool:
        """Whether no other process takes part in a pass; else nothing can be tried again here, and nothing is."""
        return not self._stream.sharded

    def parts(self, micro_batches: MicroBatches, purpose: Purpose = "training") -> list[Mapping[str, Tensor]]:
        """Return the micro-batches, those cut that have more rows than fit."""
        rows = self._rows.get(purpose)
        if rows is None:
            return list(micro_batches)
        return [part for one in micro_batches for part in (split_batch(one, rows) if _rows_of(one) > rows else [one])]

    def fitted(
        self,
        micro_batches: MicroBatches,
        run: Callable[[list[Mapping[str, Tensor]]], T],
        *,
        parameters: Sequence[nn.Parameter] = (),
        made: list[Any] | None = None,
        purpose: Purpose = "training",
    ) -> T:
        """Return what `run` returns, given the micro-batches; where memory runs out, make room and begin again.

        Gradients, the generator and `made` are first put back as they were.

        Args:
            micro_batches: of one pass.
            run: takes them, or smaller ones, through the model; no other process may take part in that.
            parameters: whose gradients it adds to.
            made: a list that it appends to.
            purpose: what fits is remembered by it.

        Raises:
            MemoryLimitError: one row does not fit beside one slot.
        """
        state, count = self._backend.rng_state(), len(made or ())
        with self.once("before the pass"):
            before = [None if one.grad is None else one.grad.clone() for one in parameters if self._alone]
        while True:
            parts = self.parts(micro_batches, purpose)
            self._passes += 1
            try:
                found = run(parts)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._stream.cancel()
                self._make_room(error, parts, purpose)
            finally:
                self._passes -= 1
            # Not in the `except` block: until it ends, the error holds what it interrupted; in a cycle, even longer.
            _put_back(parameters, before)
            if made is not None:
                del made[count:]
            gc.collect()
            self._backend.set_rng_state(state)
        self._say()
        return found

    def tried(self, place: str, run: Callable[[], T], state: Tensor, again: Callable[[], bool] = lambda: True) -> T:
        """Return what `run` returns; where memory runs out, call it again with a slot fewer, while there is one.

        Args:
            place: where, as `at` has it.
            run: leaves nothing behind where it fails.
            state: of the generator, from which it begins.
            again: whether it can be called again after all.
        """
        while True:
            try:
                with self.at(place):
                    found = run()
                break
            except RuntimeError as error:
                if not (is_out_of_memory(error) and again() and self._shrink(error, 1)):
                    raise
            gc.collect()
            self._backend.set_rng_state(state)
        if not self._passes:
            self._say()
        return found

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Have an error that leaves the `with` block, if memory ran out, say where: in the innermost such block."""
        self.place = place
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error) and not _place_of(error):
                error.add_note(f"{PLACE}{place}")
            raise

    @contextmanager
    def once(self, place: str) -> Iterator[None]:
        """Run a `with` block that cannot be run again.

        Raises:
            MemoryLimitError: memory ran out in it.
        """
        try:
            with self.at(place):
                yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._refusal(error, ()) from _let_go(error)

    def _make_room(self, error: RuntimeError, parts: MicroBatches, purpose: Purpose) -> None:
        """Give up about half of what there is: slots beside the one in use, then rows of micro-batches."""
        if self._shrink(error, max(1, self._stream.num_slots // 2)):
            return
        rows = max(map(_rows_of, parts), default=1)
        if rows == 1 or not self._alone:
            raise self._refusal(error, parts) from _let_go(error)
        self._rows[purpose] = -(-rows // 2)
        self._given_up.note(error, "rows", rows, self._rows[purpose])

    def _shrink(self, error: RuntimeError, count: int) -> bool:
        """Give up as many as `count` slots; return whether there was one."""
        before = self._stream.num_slots
        gone = sum(1 for _ in range(count) if self._alone and self._stream.shrink())
        if gone:
            self._given_up.note(error, "slots", before, self._stream.num_slots)
        return bool(gone)

    def _refusal(self, error: RuntimeError, parts: MicroBatches) -> MemoryLimitError:
        shapes = [tuple(part["input_ids"].shape) for part in parts]
        short = Shortage(
            _place_of(error) or "somewhere between the layers",
            max((rows for rows, _ in shapes), default=0),
            max((length for _, length in shapes), default=0),
            self._stream.num_slots,
        )
        what = f"the device's memory is too small: {_reason(error)}"
        if parts:
            what += f"; {_count(short.rows, 'row')} of {_count(short.length, 'token')} at once beside "
            what += f"{_count(short.slots, 'layer slot')} do not fit"
        if not self._alone:
            what += ", and with shard_weights no process can begin again alone"
        self._given_up = _GivenUp()
        return MemoryLimitError(what, where=short.place, how=self.advise(short))

    def _say(self) -> None:
        """Warn of what was given up since this was last called, if anything was."""
        given_up, self._given_up = self._given_up, _GivenUp()
        if not given_up.changes:
            return
        settings, now = [], []
        if change := given_up.changes.get("slots"):
            settings.append(f"prefetch_depth: {max(1, change[1] - 1)}")
            now.append(f"{_count(change[1], 'layer slot')} instead of {change[0]}")
        if change := given_up.changes.get("rows"):
            settings.append(f"micro_batch_size: {change[1]}")
            now.append(f"micro-batches of at most {_count(change[1], 'row')} instead of {change[0]}")
        if not self.recomputes:
            settings.append("gradient_checkpointing: true (the others may then not be needed)")
        warnings.warn(
            f"device memory ran out {given_up.place}; from here on there are {' and '.join(now)}, which changes no "
            f"mathematics. To begin so, write into the config {', '.join(settings)}; or set device_memory to what "
            "there is, and what is kept on the device is chosen to fit it, as `lema plan` shows",
            stacklevel=3,
        )


class _GivenUp:
    """What was given up and has not been said: of what how much there was and is, and where memory ran out first."""

    def __init__(self) -> None:
        self.place = ""
        self.changes: dict[str, tuple[int, int]] = {}

    def note(self, error: RuntimeError, what: str, before: int, after: int) -> None:
        self.place = self.place or _place_of(error) or "between the layers"
        self.changes[what] = self.changes.get(what, (before,))[0], after


def _let_go(error: RuntimeError) -> RuntimeError:
    """Free what the functions that an error has left had in hand: whoever keeps the error would keep tensors."""
    one: BaseException | None = error
    while one is not None:
        clear_frames(one.__traceback__)
        one = one.__context__
    return error


def _put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Give parameters the gradients they had."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            parameter.grad = None
        else:
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)  # no memory is taken for it


def _place_of(error: BaseException) -> str:
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(PLACE) for note in notes if note.startswith(PLACE)), "")


def _reason(error: BaseException) -> str:
    """Return the first sentence or two of what the device said."""
    return str(error).partition("\n")[0][:200].rstrip(". ")


def _rows_of(micro_batch: Mapping[str, Tensor]) -> int:
    return len(micro_batch["input_ids"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
