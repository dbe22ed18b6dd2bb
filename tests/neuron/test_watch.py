"""A rank that waits for others in vain says so, shows where it stands, and ends; one that does
not is left alone.
"""

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from forked import run_program

from lema.errors import LemaError
from lema_neuron.comm import Solo
from lema_neuron.watch import Watch

SOON = timedelta(milliseconds=30)
SOONER = timedelta(milliseconds=20)
NEVER = timedelta(hours=1)


class Stuck(Solo):
    """A group whose collectives return when they are let go."""

    def __init__(self, until: threading.Event) -> None:
        self._until = until

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._until.wait(30), "nobody looked on"
        return tensor


def test_a_collective_that_takes_too_long_is_named_and_others_are_not() -> None:
    told = []
    gone = threading.Event()

    def over(what: str) -> None:
        told.append(what)
        gone.set()

    watch = Watch(SOON, SOONER, over)
    comm = watch.around(Stuck(gone))
    comm.barrier()
    comm.all_reduce(torch.ones(2))
    assert told == ["rank 0 of 1: all_reduce after 0:00:00.030000"]
    watch.step_ended()
    gone.clear()
    comm.split([[0]]).all_reduce(torch.ones(2))
    assert told[1:] == ["rank 0 of 1: all_reduce after 0:00:00.020000"], (
        "the parts of a group are watched, less long"
    )
    watch.close()
    assert not any(one.name == "watch over other ranks" for one in threading.enumerate())


def test_patience_that_shortens_counts_at_once() -> None:
    """The thread that looks on sleeps for as long as it may; it must not sleep that long after
    the first step.
    """
    told = threading.Event()
    watch = Watch(NEVER, SOON, lambda _: told.set())
    comm = watch.around(Stuck(told))
    comm.barrier()
    (looks_on,) = [
        one.ident for one in threading.enumerate() if one.name == "watch over other ranks"
    ]
    while sys._current_frames()[looks_on or 0].f_code.co_name != "wait":
        pass  # it has begun to sleep, for an hour
    watch.step_ended()
    comm.all_reduce(torch.ones(2))
    watch.close()


def test_one_thread_looks_on_and_only_if_something_is_waited_for() -> None:
    before = threading.active_count()
    watch = Watch(NEVER, NEVER)
    assert threading.active_count() == before
    comm = watch.around(Solo())
    for _ in range(50):
        comm.all_reduce(torch.ones(2))
    assert threading.active_count() == before + 1
    watch.close()
    watch.close()
    assert threading.active_count() == before


def test_a_rank_that_has_ended_is_told_in_a_sentence() -> None:
    watch = Watch(NEVER, NEVER)

    def closed() -> None:
        raise RuntimeError("Connection closed by peer")

    def late() -> None:
        raise RuntimeError(
            "unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete"
        )

    def full() -> None:
        raise RuntimeError("device: out of memory")

    with pytest.raises(LemaError, match="another process of this run has ended"):
        watch.waited("all_reduce", closed)
    with pytest.raises(LemaError, match="did not answer in time"):
        watch.waited("all_reduce", late)
    with pytest.raises(RuntimeError, match="out of memory"):  # which has ways out of its own
        watch.waited("all_reduce", full)
    watch.close()


LATE = """
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from lema.errors import LemaError
from lema.backend.torchrun import join_in_parts

replicas = join_in_parts("gloo", 1, timedelta(seconds=1)).replicas
told = Path(sys.argv[1])
if replicas.rank:
    while not told.exists():
        time.sleep(0.05)
else:
    try:
        replicas.exchange(1)
    except LemaError as error:
        told.write_text(str(error))
os._exit(0)
"""


@pytest.mark.slow
def test_hosts_wait_for_each_other_as_long_as_was_said(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    done = run_program(
        [str(tmp_path / "late.py"), str(tmp_path / "told")], 2, tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "did not answer in time" in (tmp_path / "told").read_text()


SCRIPT = """
import threading
from datetime import timedelta

import torch
from lema_neuron.comm import Solo
from lema_neuron.watch import Watch


class Stuck(Solo):
    def all_reduce(self, tensor):
        return nobody_answers()


def nobody_answers():
    threading.Event().wait()


Watch(timedelta(milliseconds=200)).around(Stuck()).all_reduce(torch.ones(2))
"""


def test_the_process_ends_with_the_stacks_of_all_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert (
        "error: other ranks did not answer: rank 0 of 1: all_reduce after 0:00:00.200000"
        in done.stderr
    )
    assert "in nobody_answers" in done.stderr, "the stack of the thread that waits"
