"""Which of several adapters modules compute with.

PEFT's own `set_adapter` and `disable_adapter` also say of every adapter whether it trains, by which
the engine goes. So what is set here is only which of them a forward takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

__all__ = ["adapters_now", "computing_with"]

WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def adapters_now(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which a module computes with the adapters with which it does now."""
    now = [
        (wrapper, wrapper._disable_adapters, wrapper._active_adapter)
        for wrapper in module.modules()
        if isinstance(wrapper, WRAPPERS)
    ]

    @contextmanager
    def computing() -> Iterator[None]:
        before = [
            (wrapper, wrapper._disable_adapters, wrapper._active_adapter) for wrapper, *_ in now
        ]
        _set(now)
        try:
            yield
        finally:
            _set(before)

    return computing


def _set(choices: Iterable[tuple[Any, bool, Any]]) -> None:
    for wrapper, disabled, active in choices:
        wrapper._disable_adapters = disabled
        wrapper._active_adapter = active


@contextmanager
def computing_with(name: str | None, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute with the adapter of this name, or without any (None), in a `with` block.
    Gradients that are formed in it go to the adapters that require them."""
    wrapped = [
        submodule
        for module in modules
        for submodule in module.modules()
        if isinstance(submodule, WRAPPERS)
    ]
    before = [(wrapper, wrapper._disable_adapters, wrapper._active_adapter) for wrapper in wrapped]
    try:
        for wrapper in wrapped:
            if name is None:
                wrapper._disable_adapters = True
            else:
                wrapper._active_adapter = [name]
        yield
    finally:
        _set(before)
