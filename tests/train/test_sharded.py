"""Several processes that each have a part of every layer, or one copy of what stays in host
memory, compute as one.
"""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import run_program
from quantized import checkpoint, published
from shardedwork import CASES, SOME, checkpoints_in, opened, take
from tiny import write_checkpoint

from lema.backend import Alone
from lema.config import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan import Allocation
from lema.plan.allocate import allocated, of_one_process
from lema.plan.budget import solve
from lema.plan.cost import Demand, LayerCost, Speeds
from lema.plan.memory import device_parts, host_parts
from lema.stream.placement import PAGE

SCRIPT = str(Path(__file__).with_name("shardedwork.py"))


def asked_for_all(request: pytest.FixtureRequest) -> bool:
    return any(
        item.path == request.path and item.name.endswith("all]") for item in request.session.items
    )


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what one process makes of them."""
    place = tmp_path_factory.mktemp("sharded")
    checkpoints = {
        "llama": write_checkpoint("llama", place / "llama"),
        "mixtral": write_checkpoint("mixtral", place / "mixtral"),
        "quantised": checkpoint(published(place / "quantised" / "published"), "int8"),
    }
    expected = {}
    for name in CASES if asked_for_all(request) else (*SOME, "llama"):
        with opened(name, checkpoints[name.partition(",")[0]]) as model:
            expected[name] = take(model)
    (place / "streamed.json").write_text(
        json.dumps({name: str(one.streamed) for name, one in checkpoints.items()})
    )
    torch.save(expected, place / "expected.pt")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(("count", "what"), [(2, "some"), (2, "all"), (4, "some")])
def test_every_process_has_the_numbers_of_one_alone(directory: Path, count: int, what: str) -> None:
    done = run_program([SCRIPT, str(directory), what], count, directory)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
def test_a_read_that_fails_in_one_process_ends_all(directory: Path) -> None:
    done = run_program([SCRIPT, str(directory), "failing"], 2, directory)
    assert done.returncode != 0
    assert "the disk is gone" in done.stderr


@pytest.mark.slow
def test_one_process_says_that_it_has_no_parts(directory: Path) -> None:
    with (
        opened("llama", checkpoints_in(directory)["llama"], shard_weights=True) as model,
        pytest.warns(UserWarning, match="shard_weights does nothing in one process") as said,
    ):
        assert not model.memory.sharded
        assert model.memory and model.adapter
    assert len(said) == 1


WRITES = """
import torch
from lema.backend.hostmemory import anonymous, read_only
memory = anonymous(3 * 4096)
memory.fill_(7)
read_only(memory)
assert int(memory.sum()) == 7 * 3 * 4096
print("read", flush=True)
memory[4096] = 1
"""


@pytest.mark.slow
def test_who_writes_to_memory_that_is_only_read_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES], capture_output=True, text=True, check=False
    )
    assert done.stdout == "read\n"
    assert done.returncode == -signal.SIGSEGV


def demand(*, shared: bool = False) -> Demand:
    layers = tuple(
        LayerCost(size * PAGE, size * PAGE - 99, size * PAGE, forward=1.0) for size in (10, 7, 9, 4)
    )
    return Demand(
        layers, outside_bytes=1000, boundary_bytes=500, micro_boundary_bytes=250, shared=shared
    )


class Several(Alone):
    size = 8
    local_size = 4  # on two machines


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_counts_the_parts_of_one_process(shared: bool) -> None:
    whole = demand(shared=shared)
    allocation = Allocation(2, frozenset({1}), frozenset({0, 2}), "host")
    device = device_parts(whole, allocation)
    host = host_parts(whole, allocation)
    cut = of_one_process(whole, Several(), sharded=True)
    parts = device_parts(cut, allocation)
    in_host = host_parts(cut, allocation)
    assert [layer.upload_bytes for layer in cut.layers] == [
        layer.slot_bytes for layer in cut.layers
    ]
    # rounded up to whole pages
    assert [layer.slot_bytes // PAGE for layer in cut.layers] == [
        2,
        1,
        2,
        1,
    ]
    assert all(
        8 * layer.read_bytes < before.read_bytes + 8
        for layer, before in zip(cut.layers, whole.layers, strict=True)
    )
    assert parts["residents"] == PAGE
    assert parts["gathered"] == 2 * 8 * 2 * PAGE and device["gathered"] == 0
    assert parts["outside"] == device["outside"] == 1000
    # A machine has four parts of each layer that it keeps, and what each of its processes has for
    # itself.
    assert in_host["cached"] == 4 * (2 + 2) * PAGE
    assert in_host["boundaries"] == 4 * host["boundaries"] > 0
    assert cut.fixed_bytes == whole.fixed_bytes + parts["gathered"]


def test_a_plan_counts_once_what_the_processes_of_a_machine_share() -> None:
    whole = demand()
    allocation = Allocation(2, frozenset({1}), frozenset({0, 2}))
    together = of_one_process(whole, Several(), sharded=False)
    alone = host_parts(whole, allocation)
    host = host_parts(together, allocation)
    assert device_parts(together, allocation) == device_parts(whole, allocation)
    assert host["cached"] == alone["cached"] == (10 + 9) * PAGE
    assert host["ring"] == 4 * alone["ring"] > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_kept_in_host_memory_fits_for_all_processes_of_a_machine(sharded: bool) -> None:
    whole = replace(demand(), layers=demand().layers * 4)
    told = of_one_process(whole, Several(), sharded=sharded)
    found = []
    for limit in range(0, 160 * PAGE, PAGE):
        try:
            allocation = solve(told, Speeds(1.0, 10.0), 2, host_limit=limit, host_cache="fill")
        except MemoryLimitError:
            continue
        assert sum(host_parts(told, allocation).values()) <= limit
        found.append(len(allocation.host_cached))
    assert len(set(found)) > 3


def test_one_process_alone_plans_as_ever() -> None:
    assert of_one_process(demand(), Alone(), sharded=True) == demand()
    config = LemaConfig("model", device="cpu", shard_weights=True)
    assert allocated(config, demand(), Speeds(1.0), 10**9, 10**9, 10**9).slots == 3
