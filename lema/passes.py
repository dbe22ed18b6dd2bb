"""The passes of a step, kept so that one whose numbers are not finite can be run again, to find where that began."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lema.errors import NonFiniteError
from lema.nonfinite import first_non_finite_gradient, non_finite_gradient, non_finite_loss
from lema.streamed import StreamedModel

__all__ = ["Pass", "Passes"]


@dataclass(frozen=True)
class Pass:
    """A pass of the step under way, as it can be run again.

    Attributes:
        micro_batches: of this process.
        divisor: trained tokens that its loss is divided by.
        state: of the generator, before it.
    """

    micro_batches: Sequence[Mapping[str, Tensor]]
    divisor: int
    state: Tensor


class Passes:
    """Those of the step under way.

    Args:
        model: that they go through.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model, self._begun = model, list[Pass]()

    def begin(self, micro_batches: Sequence[Mapping[str, Tensor]], divisor: int) -> None:
        """Note a pass that is about to begin."""
        self._begun.append(Pass(micro_batches, divisor, self._model.backend.rng_state()))

    def clear(self) -> None:
        """Begin another step."""
        self._begun.clear()

    def non_finite_loss(self, value: float, mine: float, place: str) -> NonFiniteError:
        """Return the error of the last pass, whose loss is not finite; all processes call this.

        Args:
            value: the loss of all processes.
            mine: this one's part of it.
            place: for the error.
        """
        if math.isfinite(mine):
            self._model.accompany(training=False)  # while the other looks for the layer
            return NonFiniteError(f"the loss is {value}", where=f"{place}; it comes from another process")
        backend, last = self._model.backend, self._begun[-1]
        after = backend.rng_state()
        backend.set_rng_state(last.state)  # what dropout drew then is drawn again
        try:
            return non_finite_loss(self._model, last.micro_batches, value, place)
        finally:
            backend.set_rng_state(after)

    def non_finite_gradient(
        self, place: str, again: Callable[[Pass], None], drop_gradients: Callable[[], None]
    ) -> NonFiniteError:
        """Return the error of gradients that are not finite; the passes are run again to find where.

        The generator is then where it was, and the gradients are of no further use. All processes call this.

        Args:
            place: for the error.
            again: runs a pass forward and backward.
            drop_gradients: of what trains.
        """
        backend, stream = self._model.backend, self._model.stream
        after, began = backend.rng_state(), None
        stream.cancel()  # what was announced for the next step
        drop_gradients()
        for one in self._begun:
            backend.set_rng_state(one.state)
            found = first_non_finite_gradient(self._model, partial(again, one))
            began = began or found
            alone = not stream.sharded and backend.parallel.size == 1
            if began is not None and alone:  # else other processes run all passes too
                break
        backend.set_rng_state(after)
        told = backend.replicas.exchange(began)
        if began is None and any(told):
            began = "in another process"
        return non_finite_gradient(place, began)
