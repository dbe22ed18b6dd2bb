"""Blocks of a few keys, so that rows of a dozen tokens have several, and pages of one block."""

import pytest

from lema.model.sequence import attention, host_keys

__all__ = ["BLOCK", "use_small_blocks"]

BLOCK = 4  # keys


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention go over blocks of so few keys, and pages of host memory have one."""
    monkeypatch.setattr(attention, "KEYS", BLOCK)
    monkeypatch.setattr(host_keys, "KEYS", BLOCK)
    monkeypatch.setattr(host_keys, "PAGE_BYTES", 0)
