"""What the modules around the decoder layers keep from call to call, such as a rotary embedding's
table.

LEMA runs a model's own forward more often than the whole model would be run: to learn from it, and
again for the head. Only the run before the layers, on the inputs of a micro-batch, leaves its state
on the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from torch import nn
from transformers import PreTrainedModel

from lema.model.state.snapshot import Snapshot, rehearsed

__all__ = ["OuterState"]


class OuterState:
    """What the modules of a model outside its decoder layers keep, without those that read no
    tokens.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        self._model = model
        self._layers = layers
        self._modules: list[nn.Module] | None = None
        self._first: Snapshot | None = None  # before the first call
        self._last: Snapshot | None = None
        self._restored: dict[nn.Module, set[str]] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules outside the layers."""
        if self._modules is None:
            self._modules = list(dict.fromkeys(self._walk(self._model)))
        return self._modules

    def forget(self) -> None:
        """Look the modules up again, because adapters were attached or taken off."""
        self._modules = self._last = None

    def begin(self) -> None:
        """Note what the modules hold before the first call, with which what is saved is
        compared.
        """
        if self._first is None:
            self._first = self.now()

    def changed_names(self) -> dict[nn.Module, set[str]]:
        """Return the modules that calls have changed, with the names of what they hold."""
        changed = {module: set(names) for module, names in self._restored.items()}
        for module, names in ({} if self._first is None else self._first.changed()).items():
            changed.setdefault(module, set()).update(names)
        return changed

    def restored(self, module: nn.Module, names: Iterable[str]) -> None:
        """Note that a module holds under these names what calls of an earlier run have changed."""
        self._restored.setdefault(module, set()).update(names)

    def now(self) -> Snapshot:
        """Return what the modules hold now: what was seen last, if nothing has changed since."""
        if self._last is None or self._last.changed():
            self._last = Snapshot(self.modules)
        return self._last

    def learning(self) -> AbstractContextManager[Snapshot]:
        """Put back, after a `with` block, what a run on a few tokens changes: around the layers,
        and in the lowest.
        """
        return rehearsed([*self.modules, *self._layers[0].modules()])

    def _walk(self, module: nn.Module) -> Iterator[nn.Module]:
        if module is self._layers:
            return
        yield module
        inside = module is not self._model and isinstance(module, PreTrainedModel)
        if not inside or module.main_input_name == "input_ids":
            for child in module.children():
                yield from self._walk(child)
