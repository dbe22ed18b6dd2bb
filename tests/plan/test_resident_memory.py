"""`strategy: resident` on a device that computes in host memory: layers that fill all of it
leave the run no room.
"""

from pathlib import Path
from typing import Any

import pytest

from lema import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan import Allocation
from lema.plan.allocate import allocated
from lema.plan.cost import Demand, LayerCost, Speeds

LAYER = LayerCost(slot_bytes=100, read_bytes=100, upload_bytes=100)
BESIDE = 30 + 20 + 10  # of what trains, of a micro-batch, of an expanded layer


def spent(available: int, **settings: Any) -> Allocation:
    config = LemaConfig(
        str(Path("model")),
        device="cpu",
        **{"strategy": "resident", "device_memory": None, **settings},
    )
    demand = Demand(
        (LAYER,) * 5,
        adapter_bytes=30,
        working_bytes=20,
        expanded_bytes=10,
        outside_bytes=7,
        shared=True,
    )
    return allocated(config, demand, Speeds(1.0), 10_000, 10_000, available)


def test_layers_that_stay_in_memory_leave_room_for_what_is_computed() -> None:
    assert spent(500 + BESIDE).host_cached == frozenset(range(5))
    with pytest.raises(MemoryLimitError, match="500 bytes of host memory are needed"):
        spent(500 + BESIDE - 1)


def test_layers_that_stream_go_by_what_streaming_needs() -> None:
    assert not spent(500, strategy="streaming").host_cached


def test_a_limit_of_the_settings_is_what_it_says() -> None:
    assert spent(10_000, host_memory=500).host_cached == frozenset(range(5))
