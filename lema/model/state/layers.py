"""What the modules of all decoder layers keep from call to call, and when a model cannot be run
layer by layer for it.

A step takes all micro-batches through one layer before the next one, so what a layer keeps must be
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from lema.errors import ModelError
from lema.model.state.layer import LayerState
from lema.model.state.snapshot import Snapshot, SnapshotOptions

__all__ = ["Journal", "LayerStates", "Noted"]

Output = TypeVar("Output")


class Noted(Protocol):
    """The call of a layer for one micro-batch."""

    snapshot: Snapshot | None
    """What the layer held before its first run for this micro-batch; None: it has not run."""

    def begin(self, snapshot: Snapshot) -> None:
        """Note that the first run is over, and what the layer held before it."""


class Journal:
    """What layers held before each was changed for the first time since this was made."""

    def __init__(self) -> None:
        self.before: dict[int, Snapshot] = {}

    def clear(self) -> dict[int, Snapshot]:
        """Begin anew; return what layers held before."""
        before = self.before
        self.before = {}
        return before


class LayerStates:
    """What the modules of each decoder layer keep.

    Args:
        layers: the model's decoder layers.
        name: what they are called in the model.
        outside: returns the modules outside of the layers.
    """

    def __init__(
        self, layers: nn.ModuleList, name: str, outside: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self._layers = layers
        self._name = name
        self._outside = outside
        self._states: dict[int, LayerState] = {}
        self._journals: WeakSet[Journal] = WeakSet()
        # the layer that ran last, and whose modules nothing else has touched since
        self._running: int | None = None

    def forget(self) -> None:
        """Look the modules up again, because adapters were attached or taken off."""
        self.pause()
        for state in self._states.values():
            state.forget()

    def run(self, index: int, call: Noted, run: Callable[[], Output], inputs: object) -> Output:
        """Run a layer for a micro-batch, by `run`, on `inputs`, tensors in nested containers;
        return what it returns. The first run for a `call` finds what the run before it left; each
        later one finds what the first one found, and leaves no trace. `ModelError`: the layer keeps
        what cannot be reproduced."""
        state = self._state(index)
        if index != self._running:
            self._running = index
            state.now()
        if call.snapshot is not None:
            return state.again(call.snapshot, run)
        output, snapshot, changed, new = state.first(run, inputs)
        call.begin(snapshot)
        if new:
            self._check_own(index, state, new)
        if changed:
            self._changes(index, snapshot)
        return output

    def pause(self) -> None:
        """Look at each layer again before its next run, because other code than that of layers
        may run until then.
        """
        self._running = None

    def keeps(self, index: int) -> bool:
        """Whether a call has changed what a layer holds."""
        return index in self._states and bool(self._states[index].changed_names)

    def refusal(self, index: int, why: str) -> ModelError:
        """Return the error of a layer that keeps what cannot be reproduced."""
        return self._state(index).refusal(why)

    def tensors(self, index: int) -> Sequence[Tensor]:
        """Return the tensors that a layer keeps."""
        return self._state(index).now().tensors() if self.keeps(index) else ()

    def changed_names(self) -> dict[nn.Module, set[str]]:
        """Return the modules that calls have changed, with the names of what they hold."""
        return {
            module: names
            for state in self._states.values()
            for module, names in state.changed_names.items()
        }

    def restored(self, module: nn.Module, names: Iterable[str]) -> None:
        """Note that a module of a layer holds under these names what calls of an earlier run
        have changed.
        """
        self.pause()
        index = next(index for index, layer in enumerate(self._layers) if module in layer.modules())
        self._state(index).changed_names.setdefault(module, set()).update(names)

    def journal(self) -> Journal:
        """Return an empty journal, which is kept as long as it is referred to."""
        journal = Journal()
        self._journals.add(journal)
        return journal

    def put_back(self, journal: Journal) -> None:
        """Let layers hold what they held when a journal was begun, and begin it anew."""
        before = journal.clear()
        self.pause()
        for index, snapshot in before.items():
            self._changes(index, self._state(index).now())
            snapshot.restore()
        journal.clear()

    def _state(self, index: int) -> LayerState:
        if index not in self._states:
            self._states[index] = LayerState(self._layers[index], f"{self._name}.{index}")
        return self._states[index]

    def _changes(self, index: int, snapshot: Snapshot) -> None:
        for journal in self._journals:
            journal.before.setdefault(index, snapshot)

    def _check_own(self, index: int, state: LayerState, changed: set[int]) -> None:
        """Refuse what is held by something else, too, which would see it change in another
        order.
        """
        uncopied = SnapshotOptions(parameters=False, unwritten=None)
        for other_index, layer in enumerate(self._layers):
            if other_index != index and changed & Snapshot(layer.modules(), uncopied).parts():
                raise state.refusal(f"and shares it with {self._name}.{other_index}")
        if changed & Snapshot(self._outside(), uncopied).parts():
            raise state.refusal("and shares it with modules outside of the layers")
