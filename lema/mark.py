"""The end of a step, as a run goes back to it when it is stopped in the midst of what comes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from transformers import TrainerState

from lema.backend import Backend
from lema.generators import Generators

__all__ = ["Mark"]


@dataclass(frozen=True)
class Mark:
    """What changes between the end of a step and the end of the next, but for what only an optimizer's step changes.

    Attributes:
        generators: where they were.
        fields: of the `TrainerState`, in which callbacks may write at any time.
        num_logged: how many lines its log had; it is long, and not copied.
        left: what was still to be done after the step, as a checkpoint keeps it; None: nothing.
    """

    generators: Generators
    fields: Mapping[str, Any]
    num_logged: int
    left: Mapping[str, Any] | None

    @classmethod
    def of(cls, backend: Backend, state: TrainerState, left: Mapping[str, Any] | None = None) -> Self:
        """Return what to go back to, if it is to be to this moment."""
        return cls(Generators.now(backend), dict(vars(state)), len(state.log_history), left)

    def put_back(self, backend: Backend, state: TrainerState) -> None:
        """Go back."""
        self.generators.put_back(backend)
        vars(state).update(self.fields)
        del state.log_history[self.num_logged :]
