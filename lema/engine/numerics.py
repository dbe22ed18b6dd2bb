"""How numbers come out: products in fp32 rounded as fp32 or as TF32, and sums in an order that is
always the same.

torch keeps these switches for the whole process. They are set as long as a model is open, and put
back when it closes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lema.errors import ConfigError

__all__ = ["DeterministicSums", "Numerics", "ProductPrecision", "deterministic_only"]


class Numerics:
    """Torch's switches as the settings of a model ask for them, until they are put back.

    Args:
        tf32: whether products in fp32 may round as TF32, on devices that do that.
        deterministic: whether operations must form the same bits each time, or be refused.
    """

    def __init__(self, tf32: bool, deterministic: bool) -> None:
        self._precision = ProductPrecision(tf32)
        self._sums = DeterministicSums() if deterministic else None

    def put_back(self) -> None:
        """Let numbers come out as before, once; what somebody else has set meanwhile stays."""
        self._precision.put_back()
        if self._sums is not None:
            self._sums.put_back()


EXACT = "highest"
TENSOR_CORES = "high"  # torch's words
FROM_ABOVE = "none"  # of a switch that follows the one above it
OPERATIONS = ("matmul", "conv", "rnn")


class ProductPrecision:
    """The precision of fp32 products from now on, until it is put back: `tf32`, on devices that do
    that, or fp32.

    Torch has two generations of switches. The old ones are one for products and one for
    convolutions, which torch rounds as TF32 unless it is told not to. The new ones,
    `fp32_precision`, form a tree: one for everything, one for each library, one for each of its
    operations. The old ones write to the new ones, but not the other way round, and torch refuses
    to read an old one that a new one contradicts. So the switches above the operations are taken
    out of force, and the operations set by the old ones: then both generations say the same,
    whoever asks.
    """

    def __init__(self, tf32: bool) -> None:
        self._before: _Precision | None = _Precision.now()
        for switch in _above():
            _write(switch, FROM_ABOVE)
        for switch in _operations():
            switch.fp32_precision = FROM_ABOVE
        torch.set_float32_matmul_precision(TENSOR_CORES if tf32 else EXACT)
        torch.backends.cudnn.allow_tf32 = tf32
        self._applied = _Precision.now()

    def put_back(self) -> None:
        """Let products round as before, once; what somebody else has set meanwhile stays."""
        before = self._before
        self._before = None
        if before is None:
            return
        now = _Precision.now()
        if now.operations == self._applied.operations and now.old == self._applied.old:
            before.restore_operations()
        if now.above == self._applied.above:
            before.restore_above()


@dataclass(frozen=True)
class _Precision:
    """What all switches say, each for itself."""

    # of products and of convolutions; None: contradicted by a new switch
    old: tuple[str | None, bool | None]
    above: tuple[str, ...]
    operations: tuple[str, ...]

    @classmethod
    def now(cls) -> _Precision:
        """Read all switches. Those above are out of force meanwhile, because they speak for
        those below.
        """
        above = []
        effective = [switch.fp32_precision for switch in _operations()]
        for switch in _above():
            above.append(switch.fp32_precision)
            _write(switch, FROM_ABOVE)
        alone = [switch.fp32_precision for switch in _operations()]
        pairs = zip(effective, alone, strict=True)
        operations = tuple(FROM_ABOVE if used != setting else setting for used, setting in pairs)
        products = _unless_refused(torch.get_float32_matmul_precision)
        convolutions = _unless_refused(lambda: torch.backends.cudnn.allow_tf32)
        precision = cls((products, convolutions), tuple(above), operations)
        precision.restore_above()
        return precision

    def restore_above(self) -> None:
        """Set the switches for several operations, the widest last, because another's setter may
        set that one too.
        """
        for switch, value in reversed([*zip(_above(), self.above, strict=True)]):
            _write(switch, value)

    def restore_operations(self) -> None:
        """Set the switches of operations, old and new."""
        products, convolutions = self.old
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions
        for switch, value in zip(_operations(), self.operations, strict=True):
            switch.fp32_precision = value


def _above() -> list[Any]:
    """Return what has torch's new switch for several operations, the widest first; without new
    switches nothing.
    """
    return [library for library in _libraries() if hasattr(library, "fp32_precision")]


def _operations() -> list[Any]:
    """Return what has torch's new switch for one operation."""
    switches = [getattr(library, name, None) for library in _libraries() for name in OPERATIONS]
    return [switch for switch in switches if hasattr(switch, "fp32_precision")]


def _libraries() -> list[Any]:
    """Return `torch.backends` and torch's modules for its libraries, by which none needs to be
    named here.
    """
    inside = f"{torch.backends.__name__}."  # asked first, because thousands of modules are loaded
    below = [
        module
        for name, module in sys.modules.items()
        if name.startswith(inside) and name.count(".") == 2
    ]
    return [torch.backends, *below]


def _write(switch: Any, value: str) -> None:
    # because some of torch's setters set the switch for everything
    if switch.fp32_precision != value:
        switch.fp32_precision = value


def _unless_refused(read: Callable[[], Any]) -> Any:
    """Return what an old switch says; None: torch refuses to read it, because a new one
    contradicts it.
    """
    try:
        return read()
    except RuntimeError:
        return None


class DeterministicSums:
    """Torch's deterministic algorithms from now on, until the switches are put back.

    A device adds up many numbers at once, in whatever order they arrive, unless an operation has a
    form that keeps one order. Torch then uses that form, and refuses operations without one. A
    library that tries several algorithms and takes the fastest could take another one next time, so
    it tries none.
    """

    def __init__(self) -> None:
        self._before: Sequence[bool] | None = _deterministic()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        self._applied = _deterministic()

    def put_back(self) -> None:
        """Let torch choose as before, once; what somebody else has set meanwhile stays."""
        before = self._before
        self._before = None
        if before is not None and _deterministic() == self._applied:
            chosen, warns, tries = before
            torch.use_deterministic_algorithms(chosen, warn_only=warns)
            torch.backends.cudnn.benchmark = tries


def _deterministic() -> tuple[bool, bool, bool]:
    chosen = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return chosen, warns, torch.backends.cudnn.benchmark


# what torch says of an operation
REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
# of a library that was used before it was told
NOT_SET_IN_TIME = "Deterministic behavior was enabled"


@contextmanager
def deterministic_only(location: str) -> Iterator[None]:
    """Name the operation that torch refuses in the `with` block, because it has no deterministic
    form.

    Args:
        location: where in the run the block is, as "in the forward of layer 3".

    Raises:
        ConfigError: torch has refused an operation.
    """
    try:
        yield
    except RuntimeError as error:
        if (refusal := _refusal(error, location)) is not None:
            raise refusal from error
        raise


def _refusal(error: RuntimeError, location: str) -> ConfigError | None:
    """Return the error for what torch says of an operation; None: it says something else."""
    refused = partial(ConfigError, where=f"deterministic: true, {location}")
    text = str(error)
    if (named := REFUSED.search(text)) is not None:
        how = (
            "set deterministic: false, and two runs are equal to rounding; or, where attention "
            "or experts use the "
        )
        how += "operation, choose another attn_implementation or experts_implementation"
        return refused(
            f"the operation {named[1]} has no deterministic form on this device", how=how
        )
    if NOT_SET_IN_TIME in text:
        variable = re.search(r"[A-Z_]+=:\S+", text)
        what = (
            "a library of this device was used in this process before it was asked for "
            "deterministic results"
        )
        how = (
            f"start the process with {'the variable' if variable is None else variable[0]} in "
            "its environment"
        )
        return refused(what, how=how)
    return None
