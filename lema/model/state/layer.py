"""What the modules of one decoder layer keep from call to call, such as a counter or the state of a recurrence.

A layer runs for each micro-batch once, in their order, and what it leaves is there for the next one, as in the whole
model. Where it runs for a micro-batch again, to be recomputed, it finds what the first run found, and leaves no trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lema.errors import ModelError
from lema.model.state.graph import leaves
from lema.model.state.snapshot import Look, Snapshot, has_state

__all__ = ["LayerState"]

Changed: TypeAlias = Mapping[nn.Module, Collection[str]]

ADAPTERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)  # keep nothing from call to call, and are switched on and off


class LayerState:
    """What the modules of one layer keep. It is looked at again only after it has changed, so that a layer that keeps
    nothing costs a comparison of references in each run.

    Args:
        layer: the layer, adapters attached or not.
        name: what it is called in the model.

    Attributes:
        kept: the modules that calls have changed, with the names of what they hold.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name
        self._last: Snapshot | None = None
        self._unwritten: dict[int, Tensor] | None = None  # tensors that the first call did not write into
        # Of tensors that are held without the graph that they had: where it ends now, and what made them.
        self._cut: MutableMapping[Tensor, tuple[Tensor, Any]] = WeakIdKeyDictionary()
        self.kept: dict[nn.Module, set[str]] = {}

    def forget(self) -> None:
        """Look at the modules again, because adapters were attached or taken off."""
        self._last = None

    def now(self) -> Snapshot:
        """Return what the modules hold now: what was seen last, if nothing has changed since."""
        if self._last is None or self._last.changed():
            look = Look(parameters=False, unwritten=self._unwritten or {})
            self._last = Snapshot((one for one in self._layer.modules() if not isinstance(one, ADAPTERS)), look)
        return self._last

    def first(self, run: Callable[[], Any], given: Any) -> tuple[Any, Snapshot, Changed, set[int]]:
        """Run the layer for a micro-batch for the first time. A run that fails leaves no trace. Nothing has changed
        since `now` was asked, but by runs.

        Args:
            run: runs the layer.
            given: what it is given: tensors whose memory is used for other things later, in nested containers.

        Returns:
            What `run` returns; what the layer held before; what it has changed; and the `id` of what that is under
            names that no call had changed before.

        Raises:
            ModelError: the layer keeps what cannot be reproduced.
        """
        before = self._last or self.now()
        try:
            made = run()
        except BaseException:
            before.restore()
            raise
        self._check_graph(made)
        changed = before.changed()
        if changed:
            self._settle(before, changed, given)
        if self._unwritten is None:
            self._unwritten = before.forget_unwritten()
        if changed:
            self.now()
        new = {module: names - self.kept.get(module, set()) for module, names in changed.items()}
        if not any(new.values()):
            return made, before, changed, set()
        for module, names in new.items():
            self.kept.setdefault(module, set()).update(names)
        return made, before, changed, before.parts(new) | self.now().parts(new)

    def again(self, held: Snapshot, run: Callable[[], Any]) -> Any:
        """Run the layer once more for a micro-batch, for whose first run it `held` this; return what that returns.
        Nothing has changed since `now` was asked, but by runs."""
        now = self._last or self.now()
        if held is now:  # then no call has changed anything
            return run()
        held.restore()
        try:
            made = run()
            self._check_graph(made)
            return made
        finally:
            now.restore()

    def refusal(self, why: str, changed: Changed | None = None) -> ModelError:
        """Return the error of what is kept, or has `changed`, and cannot be reproduced."""
        held = (self.kept if changed is None else changed).items()
        kept = [f"{type(module).__name__}.{name}" for module, names in held for name in sorted(names)]
        what = f"this model cannot be streamed layer by layer: a layer keeps {', '.join(kept)} from call to call, {why}"
        return ModelError(what, where=self._name, how="have it keep nothing, or train it whole with another library")

    def _check_graph(self, made: Any) -> None:
        """Refuse a result whose graph goes on to what an earlier call has left, whose graph is gone."""
        if self._cut and torch.is_grad_enabled():
            made = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
            if leaves(made) & {id(end) for end, _ in self._cut.values()}:
                raise self.refusal("and differentiates through it, although the step that made it is over")

    def _settle(self, before: Snapshot, changed: Changed, given: Any) -> None:
        """Have what a call has left refer to no graph, and to no memory that is used again."""
        if before.uncopied():
            raise self.refusal("and wrote into it for the first time only after other calls", changed)
        there = {id(one) for one in before.tensors()}
        borrowed = {_storage(one) for one in tree_leaves(given) if isinstance(one, Tensor)}
        settled: dict[int, Tensor] = {}

        def settle(one: Tensor) -> Tensor:
            is_cut = one in self._cut and self._cut[one][1] is one.grad_fn
            if isinstance(one, nn.Parameter) or is_cut or not (one.requires_grad or _storage(one) in borrowed):
                return one
            if id(one) in there:
                raise self.refusal("and writes into it with a graph, without torch.no_grad()", changed)
            if id(one) not in settled:
                end = one.detach().requires_grad_(one.requires_grad)
                with torch.enable_grad():
                    settled[id(one)] = own = end.clone()
                if own.requires_grad:
                    self._cut[own] = end, own.grad_fn
            return settled[id(one)]

        for module, names in changed.items():
            for name in names:
                holder = module._buffers if name in module._buffers else vars(module)
                if name in holder:
                    holder[name] = _replaced(holder[name], settle, set())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _replaced(value: Any, change: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    """Return a value with every tensor that it holds changed; containers stay the objects that they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple(_replaced(one, change, seen) for one in value)
    if id(value) in seen:
        return value
    seen.add(id(value))
    owner: Any = value
    if not isinstance(value, dict | list | deque):
        owner = vars(value) if has_state(value) else {}
    for place in range(len(owner)) if isinstance(owner, list | deque) else [*owner]:
        owner[place] = _replaced(owner[place], change, seen)
    return value
