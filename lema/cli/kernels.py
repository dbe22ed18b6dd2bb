"""Code of the hub that libraries fetch by the package `kernels` and run: a command has none unless
its user names it.

`transformers` takes attention from there where a model's config says so, and bitsandbytes a product
of matrices as soon as it is imported. None of it has a fixed version. So the package is hidden from
all libraries in the process of a command, and the user's own `attn_implementation` brings it back.
"""

import sys
from typing import Any

__all__ = ["allow_kernels", "hide_kernels"]

PACKAGE = "kernels"


def hide_kernels() -> None:
    """Let no library of this process find the package. For a process that is LEMA's own, before
    it imports any.
    """
    sys.modules.setdefault(PACKAGE, None)  # type: ignore[arg-type] # None: Python's own word for "not there"


def allow_kernels(attention: Any) -> None:
    """Let libraries find it again if the attention that the user's own settings name may need
    it.
    """
    from lema.config.acting import LIBRARY_ATTENTION

    if (
        attention is not None
        and attention not in LIBRARY_ATTENTION
        and sys.modules.get(PACKAGE, sys) is None
    ):
        del sys.modules[PACKAGE]
