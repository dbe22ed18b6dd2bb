"""Masks made without a look at values, for a device that has to stop and compute to answer.

`transformers` leaves a mask out where it finds that nothing is masked, and asks the device for that in every forward. A
lazy one would run a graph for each answer, and layers with and without a mask are two graphs, of which the second would
be compiled at the first batch that needs no padding. While something traces it, `transformers` does not ask and makes
the mask. That is what a lazy device does, but `transformers` does not know it for one that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import masking_utils

__all__ = ["values_unread"]


@contextmanager
def values_unread() -> Iterator[None]:
    """Have masks made whatever their values, in a `with` block."""
    module: Any = masking_utils
    before, module.is_tracing = module.is_tracing, _traced
    try:
        yield
    finally:
        module.is_tracing = before


def _traced(tensor: Any = None) -> bool:  # noqa: ARG001 - as the function it stands for
    return True
