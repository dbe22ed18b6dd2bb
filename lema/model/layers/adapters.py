"""Which of several adapters modules compute with.

PEFT's own `set_adapter` and `disable_adapter` also say of every adapter whether it trains, by which
the engine goes. So what is set here is only which of them a forward takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

__all__ = ["computing_with"]


@contextmanager
def computing_with(name: str | None, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute with the adapter of this name, or without any (None), in a `with` block.
    Gradients that are formed in it go to the adapters that require them."""
    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    wrapped = [
        submodule
        for module in modules
        for submodule in module.modules()
        if isinstance(submodule, wrappers)
    ]
    before = [(wrapper._disable_adapters, wrapper._active_adapter) for wrapper in wrapped]
    try:
        for wrapper in wrapped:
            if name is None:
                wrapper._disable_adapters = True
            else:
                wrapper._active_adapter = [name]
        yield
    finally:
        for wrapper, (disabled, active) in zip(wrapped, before, strict=True):
            wrapper._disable_adapters = disabled
            wrapper._active_adapter = active
