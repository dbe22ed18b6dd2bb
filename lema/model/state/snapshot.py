"""What modules hold outside of their parameters, at one moment: buffers, plain attributes, what
containers hold.

A rehearsal runs a model's own code to learn from it, and leaves no trace: what the code wrote into
modules is put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from operator import eq, is_, itemgetter
from types import ModuleType
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

__all__ = ["Snapshot", "SnapshotOptions", "has_state", "rehearsed"]

# What every module has, and none of it is made by a call, but buffers and modules that are added,
# and parameters that PEFT makes buffers while it parametrizes them.
PERSISTENCE = "_non_persistent_buffers_set"
BUFFERS = "_buffers"
PARAMETERS = "_parameters"
TORCH = (BUFFERS, "_modules", PARAMETERS, PERSISTENCE)
UNRECORDED = (vars(nn.Module()).keys() - {*TORCH}) | {
    "forward",
    "all_tied_weights_keys",
    *vars(PreTrainedModel),
}
SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    Enum,
)
OPAQUE = (nn.Module, PreTrainedConfig, GenerationConfig, PeftConfig, ModuleType)
STATELESS_MODULES = {
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.SiLU, nn.GELU,
    nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList,
}  # fmt: skip
# whose objects on a module say how it computes, and hold no state
LIBRARIES = ("torch.", "peft.", "accelerate.")
CONTAINERS = (dict, list, set, deque)
ABSENT = object()
_stateless: set[type] = set()  # kinds of values that were found to hold nothing that a call changes


@dataclass(frozen=True)
class SnapshotOptions:
    """What a snapshot looks at.

    Attributes:
        values: whether tensors are copied, so that what is written into them can be put back.
            Without it only which tensors there are is kept: enough where nothing has values.
        parameters: whether modules' parameters are put back, too, where a call has made them
            something else.
        unwritten: by `id`, tensors whose values need no copy, because calls were seen not to write
            into them; None: no tensor's do.
    """

    values: bool = True
    parameters: bool = True
    unwritten: Mapping[int, Tensor] | None = field(default_factory=dict)


@dataclass
class _Values:
    """A tensor, and its values at one moment."""

    name: str
    tensor: Tensor
    version: int
    values: Tensor | None  # None: they need no copy

    def drop_values(self) -> None:
        """Need no copy of the values."""
        self.values = None

    def restore(self) -> None:
        """Write the values back, if there is a copy of them."""
        if self.tensor._version != self.version and self.values is not None:
            with torch.no_grad():
                self.tensor.copy_(self.values)
            self.version = self.tensor._version


class _Contents:
    """A container, or the attributes of an object, and what was in it."""

    def __init__(self, owner: object, items: dict[Any, Any] | list[Any]) -> None:
        self.owner: Any = owner
        self.items: Any = items

    def same(self) -> bool:
        """Whether it holds what it held, in the same order."""
        now: Any = self.owner if isinstance(self.owner, CONTAINERS) else vars(self.owner)
        if len(now) != len(self.items):
            return False
        if not now:
            return True
        if isinstance(self.items, dict):
            return all(map(is_, now.values(), self.items.values())) and all(
                map(eq, now, self.items)
            )
        return all(map(is_, now, self.items))

    def names(self) -> Iterator[str]:
        """Yield what is other than it was, as far as it has names."""
        if self.same():
            return
        now: Any = _items(self.owner)
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


class _Buffers(_Contents):
    """The buffers of a module, without parameters: PEFT leaves those among them that it has
    parametrized.
    """

    def __init__(self, owner: dict[str, Any], items: dict[str, Any]) -> None:
        super().__init__(owner, _without_parameters(items))

    def same(self) -> bool:
        """Whether the module has the buffers that it had."""
        if not self.owner and not self.items:
            return True
        now = _without_parameters(self.owner)
        return now.keys() == self.items.keys() and all(
            now[name] is buffer for name, buffer in self.items.items()
        )

    def restore(self) -> None:
        """Put back the buffers, and leave the parameters."""
        if not self.same():
            parameters = {
                name: parameter
                for name, parameter in self.owner.items()
                if isinstance(parameter, nn.Parameter)
            }
            self.owner.clear()
            self.owner.update({**self.items, **parameters})


class _Module:
    """What a module holds: its attributes, the containers among them, and the values of tensors."""

    def __init__(self, module: nn.Module, options: SnapshotOptions) -> None:
        self.module = module
        self._options = options
        self.attributes = dict(vars(module))
        self.containers: list[tuple[str, _Contents]] = []
        self.tensors: list[_Values] = []
        self._seen: set[int] = set()
        for name, value in self.attributes.items():
            if (
                type(value) in _stateless
                or name in UNRECORDED
                or (name == PARAMETERS and not options.parameters)
            ):
                continue
            self._note(name, value)
        recorded = {
            name: value for name, value in self.attributes.items() if name not in UNRECORDED
        }
        self._getter = itemgetter(*recorded)
        self._values = tuple(recorded.values())
        # Of a set of names nothing is told that the buffers do not tell.
        self._to_compare = [contents for name, contents in self.containers if name != PERSISTENCE]

    def same(self) -> bool:
        """Whether it is sure that nothing has changed. This is asked in each run of a layer, so
        it has to be fast.
        """
        now = vars(self.module)
        if len(now) != len(self.attributes):
            return False
        try:
            if not all(map(is_, self._getter(now), self._values)):
                return False
        except KeyError:
            return False
        return all(contents.same() for contents in self._to_compare) and all(
            record.tensor._version == record.version for record in self.tensors
        )

    def _note(self, name: str, value: object) -> None:
        if type(value) in _stateless or id(value) in self._seen:
            return
        if isinstance(value, SIMPLE + OPAQUE):
            _stateless.add(type(value))
            return
        if isinstance(value, Tensor):
            if self._options.values and _has_values(value) and not isinstance(value, nn.Parameter):
                self.tensors.append(_Values(name, value, value._version, self._copied(value)))
            return
        self._seen.add(id(value))
        if isinstance(value, tuple | frozenset):
            inner: Iterable[tuple[str, Any]] = ((name, item) for item in value)
        elif isinstance(value, CONTAINERS) or has_state(value):
            items = _items(value)
            contents = (
                _Buffers(self.module._buffers, items)
                if name == BUFFERS and not self._options.parameters
                else _Contents(value, items)
            )
            self.containers.append((name, contents))
            if isinstance(items, dict):
                inner = (
                    (str(key) if name in TORCH else f"{name}.{key}", item)
                    for key, item in items.items()
                )
            else:
                inner = ((name, item) for item in items)
        else:
            _stateless.add(type(value))
            return
        for key, item in inner:
            self._note(key, item)

    def _copied(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor; None: it needs none."""
        unwritten = self._options.unwritten
        if unwritten is None or id(tensor) in unwritten:
            return None
        copied = tensor.detach().clone()
        # Made in a mode without values, it would be of no use outside of it.
        return None if isinstance(copied, FakeTensor) else copied

    def changed(self) -> set[str]:
        """Name what is other than it was."""
        names = set(self._replaced())
        for name, contents in self.containers:
            # which says how a buffer is saved, and its name is among the buffers
            if name != PERSISTENCE:
                names |= {inner if name in TORCH else name for inner in contents.names()}
        names |= {
            record.name for record in self.tensors if record.tensor._version != record.version
        }
        # of what a container holds, the attribute
        return {name.partition(".")[0] for name in names}

    def parts(self, names: Collection[str] | None) -> Iterator[Any]:
        """Yield the containers and tensors that it held under these names; None: under any."""
        owners = [(name, contents.owner) for name, contents in self.containers if name not in TORCH]
        for name, part in [*owners, *((record.name, record.tensor) for record in self.tensors)]:
            if names is None or name.partition(".")[0] in names:
                yield part

    def _replaced(self) -> list[str]:
        """Name the attributes that are there no more, or are another object, or were not there."""
        now = vars(self.module)
        then = self.attributes
        if (
            len(now) == len(then)
            and all(map(is_, now.values(), then.values()))
            and all(map(eq, now, then))
        ):
            return []
        names = [
            name for name in {**then, **now} if now.get(name, ABSENT) is not then.get(name, ABSENT)
        ]
        return [name for name in names if name not in UNRECORDED]

    def restore(self) -> None:
        """Put back what it held."""
        now = vars(self.module)
        for name in self._replaced():
            if name in self.attributes:
                now[name] = self.attributes[name]
            else:
                del now[name]
        for _, contents in self.containers:
            contents.restore()
        for record in self.tensors:
            record.restore()


EVERYTHING = SnapshotOptions()


class Snapshot:
    """What modules hold, but for their parameters and hooks, at the moment when this is made.

    Args:
        modules: the modules, each by itself: what is inside another one is given, too.
        options: what is looked at.
    """

    def __init__(self, modules: Iterable[nn.Module], options: SnapshotOptions = EVERYTHING) -> None:
        self._modules = [
            _Module(module, options) for module in modules if type(module) not in STATELESS_MODULES
        ]

    def changed(self) -> dict[nn.Module, set[str]]:
        """Return the modules that hold something else now, each with the names of what that is."""
        changes = ((state.module, state.changed()) for state in self._modules if not state.same())
        return {module: names for module, names in changes if names}

    def parts(self, changed: Mapping[nn.Module, Collection[str]] | None = None) -> set[int]:
        """Return the `id` of every module, container and tensor in it; of those under names that
        have `changed`, if these are given."""
        ids = set[int]()
        for state in self._modules:
            if changed is None or state.module in changed:
                ids |= {
                    id(state.module),
                    *map(id, state.parts(None if changed is None else changed[state.module])),
                }
        return ids

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the modules held, but for parameters."""
        return [record.tensor for module in self._modules for record in module.tensors]

    def uncopied(self) -> list[str]:
        """Name the tensors whose values were not copied, and that have been written into since."""
        values = (record for module in self._modules for record in module.tensors)
        return [
            record.name
            for record in values
            if record.values is None and record.tensor._version != record.version
        ]

    def forget_unwritten(self) -> dict[int, Tensor]:
        """Drop the copies of tensors that were not written into since; return these tensors, by
        `id`.
        """
        values = [
            record
            for module in self._modules
            for record in module.tensors
            if record.tensor._version == record.version
        ]
        for record in values:
            record.drop_values()
        return {id(record.tensor): record.tensor for record in values}

    def restore(self) -> None:
        """Put back what the modules held."""
        for state in self._modules:
            if not state.same():
                state.restore()


@contextmanager
def rehearsed(modules: Iterable[nn.Module], *, values: bool = True) -> Iterator[Snapshot]:
    """Put back what modules hold at the end of a `with` block, and yield it."""
    before = Snapshot(modules, SnapshotOptions(values=values))
    try:
        yield before
    finally:
        before.restore()


def _without_parameters(buffers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: buffer for name, buffer in buffers.items() if not isinstance(buffer, nn.Parameter)
    }


def _items(owner: object) -> Any:
    if isinstance(owner, dict):
        return dict(owner)
    return list(owner) if isinstance(owner, list | set | deque) else dict(vars(owner))


def has_state(value: object) -> bool:
    """Whether the attributes of an object may be what a call changes, so that they are looked
    at.
    """
    kind = type(value)
    if isinstance(value, OPAQUE) or _shared_by_copies(value):
        return False
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not f"{kind.__module__}.".startswith(LIBRARIES)
    )


def _shared_by_copies(value: object) -> bool:
    """Whether an object says that copies of what holds it hold the same one, as a group of
    processes does.
    """
    copied = getattr(type(value), "__deepcopy__", None)
    return copied is not None and not isinstance(value, Tensor) and copied(value, {}) is value


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.is_inference())
