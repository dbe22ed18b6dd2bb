"""Tiny checkpoints, and what the whole model makes of them: each is made once per run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import linuxalone
import pickles
import pytest
import slowlist

if TYPE_CHECKING:
    from parity import Outcome
    from tiny import Checkpoint

# torch and transformers take seconds to import: only the tests that need them pay.


TESTS = Path(__file__).parent
# `tox -e portable`: tests/support/othersystem.py
OTHER_SYSTEM = bool(os.environ.get("OTHER_SYSTEM"))
# `2/12`: the second of twelve parts of the slow tests; all of them without it
SLOW_PART = os.environ.get("SLOW_PART")

# Modules that take longest, the longest first: begun last, one of them would leave the other
# processes of `-n` without work. Each takes over half a minute; docs/internals/tests.md has the
# seconds.
LONGEST = (
    "model/test_every_type",
    "neuron/test_divided",
    "engine/test_oom",
    "cli/test_demo",
    "faults/test_faults",
    "neuron/test_launch",
    "plan/test_plan_workload",
    "activations/test_streamed_offload",
    "activations/test_activations_benchmark",
    "train/phases/test_phase_run",
    "train/test_preference_runs",
    "engine/test_parity_matrix",
    "engine/test_oom_offloading",
    "train/test_stop_processes",
    "train/test_replicas",
    "neuron/test_neuron_ranks",
    "cuda/test_benchmark_gpu",
    "model/test_compiled",
    "train/test_sharded",
    "engine/test_head_pieces",
    "model/test_coverage_page",
    "engine/test_limits",
    "model/test_every_type_trained",
    "engine/test_parity",
    "train/full/test_stop_full",
    "engine/test_recompute",
    "engine/test_parity_steps",
    "engine/test_parity_trained",
    "convert/test_quantize_streamed",
    "plan/test_plan_cli",
    "house/test_supply_chain",
    "cuda/test_cuda_late",
    "activations/test_offload_setting",
    "activations/test_mixin",
    "train/phases/test_lora_trainer",
    "train/phases/test_phase_processes",
    "model/test_row_tables",
    "house/test_readme",
    "engine/test_parity_adapters",
    "train/test_nonfinite_processes",
    "train/full/test_full_training",
)

SLOW_CASES = 1  # of a slow test that has no `covered` of its own, in the session of `tox`


def pytest_configure() -> None:
    pickles.watch()
    # A shell ignores Ctrl-C in what it runs in the background, and a program that it is ignored in
    # leaves it so.
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = str(TESTS / "support" / "watching")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if watching not in given:  # it is there already in a process that pytest has started
        os.environ["PYTHONPATH"] = os.pathsep.join([watching, *filter(None, given)])


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for a run of all tests; none beside pytest's own where files or folders are
    named.
    """
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else min(2, os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at which markers a run asks for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest modules, and take a few cases of tests that have too many.

    Of a `covered` test those that are not taken are exhaustive; of what is left of a `sampled` one
    they are slow, and exhaustive where it is not `covered` as well. Slow tests that say nothing of
    their own have one case. Tests of `tests/slow.txt` are slow too, with all cases that they would
    have had in the default run.
    """
    if OTHER_SYSTEM:
        alone = [
            item
            for item in items
            if linuxalone.holds(item.path.relative_to(TESTS), item.name.partition("[")[0])
        ]
        config.hook.pytest_deselected(items=alone)
        items[:] = [item for item in items if item not in alone]
    place = {TESTS / f"{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
    leave_out(items, "covered", pytest.mark.exhaustive)
    leave_out(
        [item for item in items if item.get_closest_marker("exhaustive") is None],
        "sampled",
        pytest.mark.slow,
    )
    unsaid = [
        item
        for item in items
        if not any(map(item.get_closest_marker, ("covered", "whole", "exhaustive")))
    ]
    unsaid = [item for item in unsaid if item.get_closest_marker("slow") is not None]
    for item in unsaid:
        sampled = item.get_closest_marker("sampled") is not None
        item.add_marker(pytest.mark.exhaustive if sampled else pytest.mark.covered(SLOW_CASES))
    leave_out(unsaid, "covered", pytest.mark.exhaustive)
    if not any(".py" in name for name in config.args):  # a file that is named is run as it is
        slowlist.mark_listed(items)
    if SLOW_PART:
        chosen = slowlist.in_part(items, SLOW_PART)
        config.hook.pytest_deselected(
            items=sorted({*items} - {*chosen}, key=lambda item: item.nodeid)
        )
        items[:] = chosen


@pytest.hookimpl(tryfirst=True)  # before fixtures, which open models too
def pytest_runtest_setup() -> None:
    """Have every processor compute in half precision as it is asked to: tests that say how fast
    one is say it.
    """
    if "torch" in sys.modules:
        from lema_cpu import products

        products.has_instructions = lambda _: True


def leave_out(items: list[pytest.Item], marker: str, mark: pytest.MarkDecorator) -> None:
    """Mark all cases of a test but so many, evenly spaced, as its `marker` says; or, where it
    says none, pairs.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    counts: dict[str, tuple[int, ...]] = {}
    for item in items:
        if (found := item.get_closest_marker(marker)) is not None:
            test = item.nodeid.partition("[")[0]
            cases[test].append(item)
            counts[test] = found.args
    for test, every in cases.items():
        if counts[test]:
            (count,) = counts[test]
            kept = {number * len(every) // count for number in range(count)}
        else:
            kept = pairs(every)
        for number, item in enumerate(every):
            if number not in kept:
                item.add_marker(mark)


def pairs(every: list[pytest.Item]) -> set[int]:
    """Choose cases that have every pair of values of two parameters: each the one that has most
    still to do.
    """
    values = [
        sorted((name, repr(value)) for name, value in item.callspec.params.items())
        for item in every
    ]
    of_each = [frozenset(combinations(one, 2)) for one in values]
    wanted = frozenset().union(*of_each)
    kept = set()
    while wanted:
        best = max(range(len(every)), key=lambda number: len(of_each[number] & wanted))
        wanted -= of_each[best]
        kept.add(best)
    return kept


@pytest.fixture(autouse=True, scope="module")
def _libraries_are_not_collected() -> None:
    """Have the garbage collector leave alone what is there before a module's first test: libraries,
    and what is shared.

    A full collection looks through all of them for half a second or more, and a step that is taken
    again after memory ran out asks for one each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_unpickled() -> Iterator[None]:
    """Fail a test by whose end LEMA has read a file through pickle, in it or in what was set up
    for it.
    """
    yield
    if told := pickles.found():
        pytest.fail("\n".join(told), pytrace=False)


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the curve of the loss undrawn, which takes as long as a step or two, but where a
    test looks at it.
    """
    if "lema.train.events" in sys.modules and request.node.get_closest_marker("picture") is None:
        monkeypatch.setattr("lema.train.events.plot_loss", lambda *_: False)


@pytest.fixture(scope="module")
def fast_disk() -> Iterator[None]:
    """Nothing waits for the disk, in tests that do not ask what a loss of power leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, as it is published, for the tests of one module."""
    from smallrun import write_model

    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Write (once) the tiny checkpoint of an architecture: `(name, tied=False, dropout=0.0,
    dtype="float32")`.
    """
    import torch
    from tiny import write_checkpoint

    @cache
    def write(
        name: str, tied: bool = False, dropout: float = 0.0, dtype: str = "float32"
    ) -> Checkpoint:
        directory = tmp_path_factory.mktemp(name)
        return write_checkpoint(
            name, directory, tied=tied, dropout=dropout, dtype=getattr(torch, dtype)
        )

    return write


@pytest.fixture(scope="session")
def outcome_of(checkpoint_of: Callable[..., Checkpoint]) -> Callable[..., Outcome]:
    """Take (once) a step of the whole model: `(name, tied, dropout, count, padding,
    targets=None)`.
    """
    from parity import draw_b, layers_of, whole_model, whole_step
    from tiny import micro_batches

    @cache
    def take(
        name: str,
        tied: bool,
        dropout: float,
        count: int,
        padding: bool,
        targets: tuple[str, ...] | None = None,
    ) -> Outcome:
        checkpoint = checkpoint_of(name, tied, dropout)
        model = whole_model(checkpoint, dropout=dropout, targets=targets)
        draw_b(model)
        # At one micro-batch a layer-major pass draws in the order of any other.
        layers = layers_of(model, checkpoint) if dropout and count > 1 else None
        return whole_step(model, micro_batches(count, padding=padding), layer_major=layers)

    return take
