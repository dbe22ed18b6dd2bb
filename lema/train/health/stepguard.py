"""What becomes of a step whose loss or gradients are not finite, in training of adapters and of
weights alike.

The passes of a step are kept until its numbers are known to be finite, so that a bad step can be
run again to find where that began. The step is dropped then, with a warning, if the run may still
drop one; else the error ends the run.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lema.engine import StreamedModel
from lema.errors import NonFiniteError
from lema.model.state.model import Mark
from lema.train.health.nonfinite import first_non_finite_gradient, non_finite_loss, of_row

__all__ = ["StepGuard"]


@dataclass(frozen=True)
class _Pass:
    """One pass of the step under way, as it can be run again."""

    micro_batches: Sequence[Mapping[str, Tensor]]
    divisor: int  # the trained tokens by which its loss was divided
    generator: Tensor  # the generator's state before it
    mark: Mark  # what modules kept before it


class StepGuard:
    """The guard of the step under way: runs it again, drops it, warns.

    Args:
        model: the model that the steps train.
        limit: how many steps of a run may be dropped, `max_skipped_steps`.

    Attributes:
        skipped: how many were dropped.
        fault: why the step under way is not to be taken; None: nothing was found yet.
        dropped: why the last step was dropped; None: it was not.
    """

    def __init__(self, model: StreamedModel, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._passes: list[_Pass] = []
        self.skipped = 0
        self.fault: NonFiniteError | None = None
        self.dropped: NonFiniteError | None = None

    def begin_step(self) -> None:
        """Begin another step, and forget the passes of the one before."""
        self._passes.clear()
        self.fault = None
        self.dropped = None

    def begin_pass(self, micro_batches: Sequence[Mapping[str, Tensor]], divisor: int) -> None:
        """Note a pass that is about to begin, whose loss is divided by `divisor` tokens."""
        model = self._model
        generator = model.backend.rng_state()
        self._passes.append(_Pass(micro_batches, divisor, generator, model.split.state.mark()))

    def restore(self, skipped: int) -> None:
        """Count on from so many steps that were dropped before a checkpoint."""
        self.skipped = skipped

    def note(self, fault: NonFiniteError) -> NonFiniteError:
        """Note why the step under way is not to be taken, and return that."""
        self.fault = fault
        return fault

    def refuse(self, find: Callable[[], NonFiniteError]) -> None:
        """Have the step under way dropped at its end, for the fault that `find` returns unless one
        is noted; or raise that, where no step may be dropped any more. All processes call this."""
        if self.fault is None and not self.may_drop(fault := self.note(find())):
            raise fault

    def may_drop(self, fault: NonFiniteError) -> bool:
        """Whether the run may drop one more step; if not, `fault` says how many were."""
        if self.skipped < self._limit:
            return True
        if self._limit:
            dropped = f"{self._limit} steps were dropped before this one (max_skipped_steps)"
            fault.explain(f"{dropped}; {fault.how}")
        return False

    def drop(self, fault: NonFiniteError, step: int) -> None:
        """Count a step, itself counted from 1, as dropped, and have the first process warn."""
        self.skipped += 1
        self.dropped = fault
        if self._model.backend.replicas.first:
            what = (
                f"step {step} was dropped, {self.skipped} of at most {self._limit}: {fault.what} "
                f"({fault.where})"
            )
            warnings.warn(what, stacklevel=4)

    def non_finite_loss(self, value: float, mine: float, location: str) -> NonFiniteError:
        """Return the error of the last pass, `mine` being this process's part of `value`; all
        processes call this.
        """
        if all(map(math.isfinite, of_row(self._model, mine))):
            self._model.join_idle(training=False)  # while the other looks for the layer
            return NonFiniteError(
                f"the loss is {value}", where=f"{location}; it comes from another process"
            )
        last = self._passes[-1]
        with self._replayed(last):
            return non_finite_loss(self._model, last.micro_batches, value, location)

    def non_finite_gradient(
        self, location: str, again: Callable[..., object], drop_gradients: Callable[[], None]
    ) -> NonFiniteError:
        """Return the error of gradients that are not finite, and drop them; the passes are run
        `again` to find where. All processes call this; the generator is then where it was."""
        backend = self._model.backend
        stream = self._model.stream
        began = None
        # else other processes run all passes too
        alone = not self._model.meets and backend.parallel.size == 1
        stream.cancel()  # leases announced for the next step
        drop_gradients()
        for run in self._passes:
            if began is None or not alone:
                with self._replayed(run):
                    origin = first_non_finite_gradient(
                        self._model, partial(again, run.micro_batches, run.divisor)
                    )
                began = began or origin
        origins = backend.replicas.exchange(began)
        if began is None and not any(origins):
            what = "the gradients are finite, but their norm is not; the optimizer made no step"
            return NonFiniteError(what, where=location, how="lower learning_rate")
        where = f"{location}; first non-finite gradient: {began or 'in another process'}"
        how = "lower learning_rate, set max_grad_norm, or check the base weights of this layer"
        return NonFiniteError(
            "a gradient is not finite; the optimizer made no step", where=where, how=how
        )

    @contextmanager
    def _replayed(self, run: _Pass) -> Iterator[None]:
        """Have the `with` block draw what dropout drew in a pass, and find what modules kept before
        it; leave no trace.
        """
        backend = self._model.backend
        state = self._model.split.state
        after = backend.rng_state()
        now = state.mark()
        backend.set_rng_state(run.generator)
        state.put_back(run.mark)
        try:
            yield
        finally:
            backend.set_rng_state(after)
            state.put_back(now)
