"""The threads that torch computes with: no more than this process may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lema.backend.host.processors import usable_threads

__all__ = ["VARIABLES", "limit_threads", "one_thread"]

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which a user says how many there are


def limit_threads(variables: Mapping[str, str] = os.environ) -> None:
    """Have torch compute with as many threads as the affinity and the control groups of this
    process leave it, if that is fewer than it has; what the environment says stays."""
    if any(variables.get(name) for name in VARIABLES):
        return
    usable = usable_threads()
    if usable < torch.get_num_threads():
        torch.set_num_threads(usable)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread in a `with` block: several wait for each other at the end
    of each operation, which takes longer than small ones themselves, most of all where other
    processes take the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
