"""Functions of the C library that this process runs with."""

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["c_function"]


def c_function(name: str) -> Callable[..., Any] | None:
    """Return a function, which sets `ctypes.get_errno`; None: this system's library has none of
    that name, or, as on Windows, is not to be found among what the process has loaded."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows loads libraries by name alone
        return None
    return getattr(library, name, None)
