"""Libraries that warn, when they are imported, of kernels nobody asked for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hush", "hushed"]


CHATTY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def hush() -> None:
    """Let them log errors only, for the rest of the process."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def hushed() -> Iterator[None]:
    """Let them log errors only, for the length of a `with` block."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    hush()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
