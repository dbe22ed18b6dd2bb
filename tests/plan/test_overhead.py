"""A plan counts the device memory that is taken beside tensors as a backend tells it, or none
where it tells none.
"""

from pathlib import Path

import pytest
from smallrun import settings, write_model

from lema import LemaModel
from lema.errors import MemoryLimitError
from lema.plan.cost import Allocation, Demand, LayerCost, Overhead
from lema.plan.memory import device_parts
from lema.plan.plan import plan_with
from lema_cpu import CpuBackend

WORKSPACES = 70_000
BLOCK = 4096


class Taking(CpuBackend):
    """A device whose libraries take memory for themselves, and whose allocator rounds."""

    allocation_granularity = BLOCK

    def workspace_bytes(self) -> int:
        return WORKSPACES


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def planned(llama: Path, place: Path, backend: CpuBackend, limit: int | None) -> dict[str, int]:
    """Return the parts of device memory that a run is planned to take."""
    model = LemaModel(settings(llama, place, device_memory=limit, max_length=16), backend=backend)
    try:
        model.initialize_lora()
        parts = plan_with(model.planner).memory.device
        assert limit is None or sum(parts.values()) <= limit
        return parts
    finally:
        model.close()


def test_libraries_and_rounding_are_a_part_of_the_plan(llama: Path, tmp_path: Path) -> None:
    plain, taking = (
        planned(llama, tmp_path, backend, 10**6) for backend in (CpuBackend(), Taking())
    )
    assert plain["workspaces"] == 0
    assert taking["workspaces"] > WORKSPACES
    without = (planned(llama, tmp_path, backend, None) for backend in (CpuBackend(), Taking()))
    plain, taking = (parts | {"workspaces": 0} for parts in without)
    assert plain == taking, "nothing else changes"


def test_a_limit_that_leaves_no_room_for_libraries_is_refused(llama: Path, tmp_path: Path) -> None:
    class Large(CpuBackend):
        def workspace_bytes(self) -> int:
            return 10**6

    with pytest.raises(MemoryLimitError):
        planned(llama, tmp_path, Large(), 10**6)


def test_each_tensor_of_more_than_a_block_is_rounded_up_and_each_other_part_by_a_block() -> None:
    layers = tuple(LayerCost(size, size, size) for size in (100, 260, 250, 260))
    demand = Demand(layers, outside_bytes=10, working_bytes=20, overhead=Overhead(7, 128))
    parts = device_parts(demand, Allocation(2, residents=frozenset({0, 2})))
    slots = 2 * (384 - 260)
    residents = 256 - 250  # the other is less than a block, and shares one
    # outside, working, boundaries, saved
    assert parts["workspaces"] == 7 + slots + residents + 4 * 128
