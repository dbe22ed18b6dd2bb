"""Tiny checkpoints, and what the whole model makes of them: each is made once per run."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pickles
import pytest

if TYPE_CHECKING:
    from parity import Outcome
    from tiny import Checkpoint

# torch and transformers take seconds to import: only the tests that need them pay.


def pytest_configure() -> None:
    pickles.watch()
    watching = str(Path(__file__).parent / "support" / "watching")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if watching not in given:  # it is there already in a process that pytest has started
        os.environ["PYTHONPATH"] = os.pathsep.join([watching, *filter(None, given)])


@pytest.hookimpl(tryfirst=True)  # before pytest looks at which markers a run asks for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have a default run take a few cases, evenly spaced, of a test that is `sampled`; the others are slow."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for every in cases.values():
        (count,) = every[0].get_closest_marker("sampled").args  # type: ignore[union-attr] # it has one
        kept = {number * len(every) // count for number in range(count)}
        for number, item in enumerate(every):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nothing_unpickled() -> Iterator[None]:
    """Fail a test by whose end LEMA has read a file through pickle, in it or in what was set up for it."""
    yield
    if told := pickles.found():
        pytest.fail("\n".join(told), pytrace=False)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Write (once) the tiny checkpoint of an architecture: `(name, tied=False, dropout=0.0, dtype="float32")`."""
    import torch
    from tiny import write_checkpoint

    @cache
    def write(name: str, tied: bool = False, dropout: float = 0.0, dtype: str = "float32") -> Checkpoint:
        directory = tmp_path_factory.mktemp(name)
        return write_checkpoint(name, directory, tied=tied, dropout=dropout, dtype=getattr(torch, dtype))

    return write


@pytest.fixture(scope="session")
def outcome_of(checkpoint_of: Callable[..., Checkpoint]) -> Callable[..., Outcome]:
    """Take (once) a step of the whole model: `(name, tied, dropout, count, padding, targets=None)`."""
    from parity import draw_b, layers_of, whole_model, whole_step
    from tiny import micro_batches

    @cache
    def take(
        name: str, tied: bool, dropout: float, count: int, padding: bool, targets: tuple[str, ...] | None = None
    ) -> Outcome:
        checkpoint = checkpoint_of(name, tied, dropout)
        model = whole_model(checkpoint, dropout=dropout, targets=targets)
        draw_b(model)
        # At one micro-batch a layer-major pass draws in the order of any other.
        layers = layers_of(model, checkpoint) if dropout and count > 1 else None
        return whole_step(model, micro_batches(count, padding=padding), layer_major=layers)

    return take
