"""Two ways to keep libraries quiet about kernels that no user of LEMA asked for.

PEFT imports bitsandbytes wherever it is installed (`peft.helpers`), and transformers imports torchao with any model
(`transformers.quantizers.quantizer_torchao`). Both log warnings of kernels that they could not load, and torch warns of
how torchao registers its types. LEMA cannot avoid these imports without replacing functions for the whole process, so
it hushes them: while it imports its own modules (`lema.lazy_exports`), or for the process of a command. LEMA itself
imports the two libraries only when a quantised model is read or written.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hush", "hushed"]

CHATTY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def hush() -> None:
    """Let the chatty libraries log errors only, for the rest of the process."""
    for name in CHATTY:
        _set_level(logging.getLogger(name), logging.ERROR)


@contextmanager
def hushed() -> Iterator[None]:
    """Let the chatty libraries log errors only, for the length of a `with` block."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    hush()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            _set_level(logger, level)


def _set_level(logger: logging.Logger, level: int) -> None:
    """Set a level that is another one, because setting it empties a cache of every logger of the process."""
    if logger.level != level:
        logger.setLevel(level)
