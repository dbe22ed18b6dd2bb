"""What the step under way of a model's own weights has come to: norms of gradients, gradients that
wait to be clipped, and whether any weight was updated.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lema.errors import NonFiniteError
from lema.train.health.nonfinite import HiddenGradients
from lema.train.health.stepguard import StepGuard

__all__ = ["FullStep"]

LOWER = "lower learning_rate, or check the rows of this step"


class FullStep:
    """One step, from its forward until its last weight is updated or it is given up.

    Args:
        guard: is told why the step cannot be taken.
        location: where it is in the run, for messages.

    Attributes:
        hidden: the gradients of the layers' inputs.
        has_updated: whether any weight was.
        non_finite_name: the weight whose gradient is not finite; None: none was seen.
    """

    def __init__(self, guard: StepGuard, location: str) -> None:
        self._guard = guard
        self._location = location
        self.hidden = HiddenGradients()
        self.has_updated = False
        self.non_finite_name: str | None = None
        self._waiting: dict[str, Tensor] = {}  # gradients, until they are clipped
        self._norms: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, name: str, gradient: Tensor, where: str, updated: str | None) -> None:
        """Keep the norm of a gradient.

        Args:
            name: of its weight.
            gradient: in fp32.
            where: it was formed.
            updated: says which weights were updated before; None: none was.

        Raises:
            NonFiniteError: the norm is not finite.
        """
        norm = torch.linalg.vector_norm(gradient, 2.0)
        if not math.isfinite(float(norm)):
            at = f"{self._location}, {where}; {updated or 'no weight was updated'}"
            after = f"resume from the last checkpoint; {LOWER}; max_grad_norm checks all first"
            what = f"the norm of the gradient of {name} is {float(norm)}"
            self.non_finite_name = name
            raise self._guard.note(NonFiniteError(what, where=at, how=after if updated else LOWER))
        self._norms[name] = norm

    def total_norm(self, names: Iterable[str], *, clipped: bool) -> Tensor:
        """Return the norm of all gradients, which were measured, in the order of `names`.

        Args:
            names: of the weights.
            clipped: whether no weight was updated yet, because gradients are clipped to this norm.

        Raises:
            NonFiniteError: gradients are clipped, and the norm is not finite.
        """
        norms = [self._norms[name] for name in names if name in self._norms]
        # as get_total_norm's
        norm = torch.linalg.vector_norm(torch.stack(norms), 2.0) if norms else torch.zeros(())
        length = float(norm)
        if not math.isfinite(length) and clipped:
            what = f"the norm of the gradients is {length}"
            where = f"{self._location}; no weight was updated"
            raise self._guard.note(NonFiniteError(what, where=where, how=LOWER))
        return norm

    def wait(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep gradients of a layer until they are clipped."""
        self._waiting.update(gradients)

    def waiting(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the gradients of these weights that wait."""
        return {name: self._waiting[name] for name in names if name in self._waiting}

    def begin_update(self) -> None:
        """Note that weights are updated from here on, so that the step cannot be dropped."""
        self.has_updated = True

    def release(self) -> None:
        """Let go of the gradients and their norms."""
        self._waiting.clear()
        self._norms.clear()
