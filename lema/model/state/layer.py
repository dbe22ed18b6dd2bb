"""What the modules of one decoder layer keep from call to call, such as a counter or the state of a
recurrence.

A layer runs for each micro-batch once, in their order, and what it leaves is there for the next
one, as in the whole model. Where it runs for a micro-batch again, to be recomputed, it finds what
the first run found, and leaves no trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from operator import is_
from typing import Any, TypeAlias, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lema.errors import ModelError
from lema.model.state.graph import leaves
from lema.model.state.snapshot import Snapshot, SnapshotOptions, has_state

__all__ = ["LayerState"]

Changed: TypeAlias = Mapping[nn.Module, Collection[str]]
Output = TypeVar("Output")

# keep nothing from call to call, and are switched on and off
ADAPTERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)


class LayerState:
    """What the modules of one layer keep. It is looked at again only after it has changed, so that
    a layer that keeps nothing costs a comparison of references in each run.

    Args:
        layer: the layer, adapters attached or not.
        name: what it is called in the model.

    Attributes:
        changed_names: the modules that calls have changed, with the names of what they hold.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer = layer
        self._name = name
        self._last: Snapshot | None = None
        # tensors that the first call did not write into
        self._unwritten: dict[int, Tensor] | None = None
        # Of tensors that are held without the graph that they had: where it ends now, and what made
        # them.
        self._cut: MutableMapping[Tensor, tuple[Tensor, Any]] = WeakIdKeyDictionary()
        self.changed_names: dict[nn.Module, set[str]] = {}

    def forget(self) -> None:
        """Look at the modules again, because adapters were attached or taken off."""
        self._last = None

    def now(self) -> Snapshot:
        """Return what the modules hold now: what was seen last, if nothing has changed since."""
        if self._last is None or self._last.changed():
            options = SnapshotOptions(parameters=False, unwritten=self._unwritten or {})
            self._last = Snapshot(
                (module for module in self._layer.modules() if not isinstance(module, ADAPTERS)),
                options,
            )
        return self._last

    def first(
        self, run: Callable[[], Output], inputs: object
    ) -> tuple[Output, Snapshot, Changed, set[int]]:
        """Run the layer for a micro-batch for the first time. A run that fails leaves no trace.
        Nothing has changed since `now` was asked, but by runs.

        Args:
            run: runs the layer.
            inputs: what it is given: tensors whose memory is used for other things later, in nested
                containers.

        Returns:
            What `run` returns; what the layer held before; what it has changed; and the `id` of
            what that is under names that no call had changed before.

        Raises:
            ModelError: the layer keeps what cannot be reproduced.
        """
        before = self._last or self.now()
        try:
            output = run()
        except BaseException:
            before.restore()
            raise
        self._check_graph(output)
        changed = before.changed()
        if changed:
            self._detach_changes(before, changed, inputs)
        if self._unwritten is None:
            self._unwritten = before.forget_unwritten()
        if changed:
            self.now()
        new = {
            module: names - self.changed_names.get(module, set())
            for module, names in changed.items()
        }
        if not any(new.values()):
            return output, before, changed, set()
        for module, names in new.items():
            self.changed_names.setdefault(module, set()).update(names)
        return output, before, changed, before.parts(new) | self.now().parts(new)

    def again(self, snapshot: Snapshot, run: Callable[[], Output]) -> Output:
        """Run the layer once more for a micro-batch, from the `snapshot` taken before its first
        run; return what that returns. Nothing has changed since `now` was asked, but by runs."""
        now = self._last or self.now()
        if snapshot is now:  # then no call has changed anything
            return run()
        snapshot.restore()
        try:
            output = run()
            self._check_graph(output)
            return output
        finally:
            now.restore()

    def refusal(self, why: str, changed: Changed | None = None) -> ModelError:
        """Return the error of what is kept, or has `changed`, and cannot be reproduced."""
        entries = (self.changed_names if changed is None else changed).items()
        attributes = [
            f"{type(module).__name__}.{name}" for module, names in entries for name in sorted(names)
        ]
        what = (
            "this model cannot be streamed layer by layer: a layer keeps "
            f"{', '.join(attributes)} from call to call, {why}"
        )
        return ModelError(
            what,
            where=self._name,
            how="have it keep nothing, or train it whole with another library",
        )

    def _check_graph(self, output: object) -> None:
        """Refuse a result whose graph goes on to what an earlier call has left, whose graph is
        gone.
        """
        if self._cut and torch.is_grad_enabled():
            outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
            if leaves(outputs) & {id(end) for end, _ in self._cut.values()}:
                raise self.refusal(
                    "and differentiates through it, although the step that made it is over"
                )

    def _detach_changes(self, before: Snapshot, changed: Changed, inputs: object) -> None:
        """Have what a call has left refer to no graph, and to no memory that is used again."""
        if before.uncopied():
            raise self.refusal(
                "and wrote into it for the first time only after other calls", changed
            )
        there = {id(tensor) for tensor in before.tensors()}
        borrowed = {
            _storage(tensor) for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)
        }
        detached: dict[int, Tensor] = {}

        def detach(tensor: Tensor) -> Tensor:
            is_cut = tensor in self._cut and self._cut[tensor][1] is tensor.grad_fn
            if (
                isinstance(tensor, nn.Parameter)
                or is_cut
                or not (tensor.requires_grad or _storage(tensor) in borrowed)
            ):
                return tensor
            if id(tensor) in there:
                raise self.refusal(
                    "and writes into it with a graph, without torch.no_grad()", changed
                )
            if id(tensor) not in detached:
                end = tensor.detach().requires_grad_(tensor.requires_grad)
                with torch.enable_grad():
                    detached[id(tensor)] = clone = end.clone()
                if clone.requires_grad:
                    self._cut[clone] = end, clone.grad_fn
            return detached[id(tensor)]

        for module, names in changed.items():
            for name in names:
                holder: dict[str, Any] = (
                    module._buffers if name in module._buffers else vars(module)
                )
                if name in holder:
                    holder[name] = _replaced(holder[name], detach, set())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _replaced(value: object, change: Callable[[Tensor], Tensor], seen: set[int]) -> object:
    """Return a value with every tensor that it holds changed. Containers stay the objects that they
    are, but for those that cannot be written into."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | frozenset):
        items = [_replaced(item, change, seen) for item in value]
        if not all(map(is_, items, value)):
            kind = type(value)
            return (
                kind._make(items)
                if issubclass(kind, tuple) and hasattr(kind, "_make")
                else kind(items)
            )
    if id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, set):
        items = [_replaced(item, change, seen) for item in value]
        if not all(map(is_, items, value)):
            value.clear()
            value.update(items)
        return value
    owner: Any = value
    if not isinstance(value, dict | list | deque):
        owner = vars(value) if has_state(value) else {}
    for key in range(len(owner)) if isinstance(owner, list | deque) else [*owner]:
        owner[key] = _replaced(owner[key], change, seen)
    return value
