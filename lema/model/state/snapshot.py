"""What modules hold outside of their parameters, at one moment: buffers, plain attributes, what containers hold.

A rehearsal runs a model's own code to learn from it, and leaves no trace: what the code wrote into modules is put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import eq, is_
from types import ModuleType
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

__all__ = ["Snapshot", "rehearsed"]

# What every module has, and none of it is made by a call, but buffers and modules that are added, and parameters that
# PEFT makes buffers while it parametrizes them.
PERSISTENCE = "_non_persistent_buffers_set"
TORCH = ("_buffers", "_modules", "_parameters", PERSISTENCE)
NOT_KEPT = (vars(nn.Module()).keys() - {*TORCH}) | {"forward", "all_tied_weights_keys", *vars(PreTrainedModel)}
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, Enum)
OPAQUE = (nn.Module, PreTrainedConfig, GenerationConfig, PeftConfig, ModuleType)
STATELESS_MODULES = {
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.SiLU, nn.GELU,
    nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList,
}  # fmt: skip
LIBRARIES = ("torch.", "peft.", "accelerate.")  # whose objects on a module say how it computes, and hold no state
CONTAINERS = (dict, list, set, deque)
ABSENT = object()
_stateless: set[type] = set()  # kinds of values that were found to hold nothing that a call changes


class _Kept:
    """A container, or the attributes of an object, and what was in it."""

    def __init__(self, owner: Any, items: Any) -> None:
        self.owner, self.items = owner, items

    def same(self) -> bool:
        """Whether it holds what it held, in the same order."""
        now: Any = self.owner if isinstance(self.owner, CONTAINERS) else vars(self.owner)
        if len(now) != len(self.items):
            return False
        if isinstance(self.items, dict):
            return all(map(is_, now.values(), self.items.values())) and all(map(eq, now, self.items))
        return all(map(is_, now, self.items))

    def names(self) -> Iterator[str]:
        """Yield what is other than it was, as far as it has names."""
        if self.same():
            return
        now = _items(self.owner)
        if isinstance(self.items, dict):
            for key in {**self.items, **now}:
                if now.get(key, ABSENT) is not self.items.get(key, ABSENT):
                    yield str(key)
        else:
            yield "items"

    def restore(self) -> None:
        """Put back what was in it."""
        owner = self.owner
        if self.same():
            return
        if isinstance(owner, dict | set):
            owner.clear()
            owner.update(self.items)
        elif isinstance(owner, list):
            owner[:] = self.items
        elif isinstance(owner, deque):
            owner.clear()
            owner.extend(self.items)
        else:
            vars(owner).clear()
            vars(owner).update(self.items)


class _Module:
    """What a module holds: its attributes, the containers among them, and the values of tensors."""

    def __init__(self, module: nn.Module, *, values: bool) -> None:
        self.module = module
        self._values = values
        self.attributes = dict(vars(module))
        self._containers: list[tuple[str, _Kept]] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor]] = []
        self._seen: set[int] = set()
        for name, value in self.attributes.items():
            if type(value) not in _stateless and name not in NOT_KEPT:
                self._note(name, value)

    def _note(self, name: str, value: Any) -> None:
        if type(value) in _stateless or id(value) in self._seen:
            return
        if isinstance(value, SIMPLE + OPAQUE):
            _stateless.add(type(value))
            return
        if isinstance(value, Tensor):
            if self._values and _has_values(value) and not isinstance(value, nn.Parameter):
                self._tensors.append((name, value, value._version, value.detach().clone()))
            return
        self._seen.add(id(value))
        if isinstance(value, tuple | frozenset):
            inner: Iterable[tuple[str, Any]] = ((name, item) for item in value)
        elif isinstance(value, CONTAINERS) or _has_state(value):
            items = _items(value)
            self._containers.append((name, _Kept(value, items)))
            if isinstance(items, dict):
                inner = ((str(key) if name in TORCH else f"{name}.{key}", item) for key, item in items.items())
            else:
                inner = ((name, item) for item in items)
        else:
            _stateless.add(type(value))
            return
        for key, item in inner:
            self._note(key, item)

    def changed(self) -> set[str]:
        """Name what is other than it was."""
        found = set(self._replaced())
        for name, kept in self._containers:
            if name != PERSISTENCE:  # which says how a buffer is saved, and its name is among the buffers
                found |= {inner if name in TORCH else name for inner in kept.names()}
        found |= {name for name, tensor, version, _ in self._tensors if tensor._version != version}
        return {name.partition(".")[0] for name in found}  # of what a container holds, the attribute

    def _replaced(self) -> list[str]:
        """Name the attributes that are there no more, or are another object, or were not there."""
        now, then = vars(self.module), self.attributes
        if len(now) == len(then) and all(map(is_, now.values(), then.values())) and all(map(eq, now, then)):
            return []
        names = [name for name in {**then, **now} if now.get(name, ABSENT) is not then.get(name, ABSENT)]
        return [name for name in names if name not in NOT_KEPT]

    def restore(self) -> None:
        """Put back what it held."""
        now = vars(self.module)
        for name in self._replaced():
            if name in self.attributes:
                now[name] = self.attributes[name]
            else:
                del now[name]
        for _, kept in self._containers:
            kept.restore()
        for _, tensor, version, values in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(values)


class Snapshot:
    """What modules hold, but for their parameters and hooks, at the moment when this is made.

    Args:
        modules: the modules, each by itself: what is inside another one is given, too.
        values: whether tensors are copied, so that what is written into them can be put back. Without it only which
            tensors there are is kept: enough where nothing has values.
    """

    def __init__(self, modules: Iterable[nn.Module], *, values: bool = True) -> None:
        self._modules = [_Module(module, values=values) for module in modules if type(module) not in STATELESS_MODULES]

    def changed(self) -> dict[nn.Module, set[str]]:
        """Return the modules that hold something else now, each with the names of what that is."""
        found = ((one.module, one.changed()) for one in self._modules)
        return {module: names for module, names in found if names}

    def only(self, modules: Iterable[nn.Module]) -> Snapshot:
        """Return the part of it that is of these modules."""
        chosen, part = set(modules), Snapshot(())
        part._modules = [one for one in self._modules if one.module in chosen]
        return part

    def restore(self) -> None:
        """Put back what the modules held."""
        for one in self._modules:
            one.restore()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the modules hold this in a `with` block, and what they hold now after it."""
        now = Snapshot([one.module for one in self._modules])
        self.restore()
        try:
            yield
        finally:
            now.restore()


@contextmanager
def rehearsed(modules: Iterable[nn.Module], *, values: bool = True) -> Iterator[Snapshot]:
    """Put back what modules hold at the end of a `with` block, and yield it."""
    before = Snapshot(modules, values=values)
    try:
        yield before
    finally:
        before.restore()


def _items(owner: Any) -> Any:
    if isinstance(owner, dict):
        return dict(owner)
    return list(owner) if isinstance(owner, list | set | deque) else dict(vars(owner))


def _has_state(value: Any) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and not callable(value) and not f"{kind.__module__}.".startswith(LIBRARIES)


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.is_inference())
