"""What `activation_offloading` has a run spend memory on, what a plan says of it; a step moves
what was told.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import LateDevice
from parity import streamed_step
from smallrun import logged, opened, run_fit, settings, token_rows, write_model

from lema import LemaConfig, LemaModel
from lema.cli.tables import rows
from lema.engine.oom import Shortage
from lema.errors import MemoryLimitError
from lema.plan.cost import saved_elsewhere
from lema.plan.machine import PROFILES
from lema.plan.memory import host_parts
from lema.plan.plan import plan_with
from lema.plan.planner import planner_of
from lema.plan.work.step import step_shape
from lema.train.metrics import read_metrics
from lema_cpu import CpuBackend

LENGTH = 96
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 352},
    "mistral": {"hidden_size": 128, "intermediate_size": 352},
    "gpt2": {"n_embd": 128},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("mode", "recompute", "boundaries", "saved_on"),
    [
        (False, True, "device", "device"),
        (True, True, "host", "device"),
        ("legacy", True, "host", "device"),
        ("hidden_states", True, "host", "device"),
        ("disk", True, "disk", "device"),
        (False, False, "device", "device"),
        (True, False, "device", "host"),
        ("legacy", False, "device", "host"),
        ("disk", False, "device", "disk"),
    ],
)
def test_a_mode_says_what_waits_where(
    base: Path, tmp_path: Path, mode: Any, recompute: bool, boundaries: str, saved_on: str
) -> None:
    config = settings(base, tmp_path, activation_offloading=mode, gradient_checkpointing=recompute)
    with opened(config) as model:
        found = model.allocation
        assert (found.boundaries, found.saved_on if found.saved else "device") == (
            boundaries,
            saved_on,
        )
        assert bool(found.saved) is not recompute
        assert model.adapter.activations.arena.tier == boundaries
        assert (model.adapter.activations.graphs is not None) == (saved_on != "device")
    where = {"host": "in host memory", "disk": "on disk"}
    assert found.summary().count("activations") == (saved_on != "device")
    assert all(
        place in found.summary() for place in {where.get(boundaries, ""), where.get(saved_on, "")}
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_a_step_moves_as_many_bytes_as_were_told(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    directory = write_model(tmp_path / "model", name, dtype=dtype, **WIDE[name])
    changes: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 2, "max_length": LENGTH}
    config = settings(
        directory, tmp_path, gradient_checkpointing=False, activation_offloading="disk", **changes
    )
    planner = planner_of(config)
    demand = planner.demand()
    told = sum(saved_elsewhere(demand, planner.allocation(demand)).values())
    ids = torch.randint(1, 290, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    with closing(LemaModel(config, backend=LateDevice())) as model:
        model.initialize_lora()
        model.lora_manager.train()
        streamed_step(model, [{"input_ids": ids, "labels": ids, "attention_mask": mask}] * 3)
        assert step_shape(config, 128).num_rows == 6
        assert 0.9 * told <= model.adapter.activations.graphs.counters.bytes_out <= 1.1 * told


@pytest.mark.slow
def test_host_memory_counts_what_waits_there(base: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"gradient_checkpointing": False, "batch_size": 2, "max_length": 32}
    kept, away = (
        settings(base, tmp_path, activation_offloading=mode, host_memory="200KB", **changes)
        for mode in (False, True)
    )

    def spent(config: LemaConfig) -> Any:
        with closing(LemaModel(config, backend=LateDevice())) as model:
            model.initialize_lora()
            return model.allocation

    assert spent(kept).saved_on == "device"
    with pytest.raises(MemoryLimitError, match="for weights and activations") as caught:
        spent(away)
    assert "activation_offloading: disk" in caught.value.how
    enough = int(caught.value.what.partition(" bytes")[0].replace(",", ""))
    away.host_memory = enough - 1
    with pytest.raises(MemoryLimitError):
        spent(away)
    away.host_memory = enough
    found = spent(away)
    assert (found.saved_on, len(found.saved)) == ("host", 7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, "disk"])
def test_a_plan_says_where_activations_wait(base: Path, tmp_path: Path, mode: Any) -> None:
    config = settings(
        base, tmp_path, activation_offloading=mode, gradient_checkpointing=False, max_length=64
    )
    config.device = "cuda"  # a profile: none is opened
    plans = {}
    for setting in (mode, False):
        config.activation_offloading = setting
        planner = planner_of(config, PROFILES["4090"])
        plans[setting] = plan_with(planner)
    plan = plans[mode]
    without = plans[False]
    place = {True: "host", "disk": "disk"}[mode]
    assert ("a step", "activations wait", f"on the {place}") in list(rows(plan))
    assert ("a step", "layers' inputs wait", "on the device") in list(rows(without))
    total = without.memory.device["saved"] + without.memory.device["boundaries"]
    assert plan.memory.device["saved"] + plan.memory.device["boundaries"] < 0.3 * total
    assert plan.memory.host["saved"] == total
    assert plan.memory.disk["saved"] == total * (mode == "disk")
    assert plan.step.link > without.step.link
    assert (plan.step.disk > without.step.disk) == (mode == "disk")
    assert plan.step.bytes_read == without.step.bytes_read
    assert plan.step.device_peak < without.step.device_peak
    assert plan.to_dict()["allocation"]["saved_on"] == place


@pytest.mark.slow
def test_advice_names_the_setting_that_saves_most(base: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"gradient_checkpointing": False, "batch_size": 4, "max_length": 64}
    for backend, setting in ((CpuBackend(), "disk"), (LateDevice(), "true")):
        with closing(LemaModel(settings(base, tmp_path, **changes), backend=backend)) as model:
            model.initialize_lora()
            said = model.adapter.retry.advise(Shortage("in the forward of layer 2", 4, 64, 3))
        assert f"activation_offloading: {setting} (" in said
        assert "gradient_checkpointing: true (" in said


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_run_reports_what_left_the_device(base: Path, tmp_path: Path, recompute: bool) -> None:
    left = {}
    for mode in (False, "disk"):
        config = settings(
            base, tmp_path / str(mode), activation_offloading=mode, gradient_checkpointing=recompute
        )
        run_fit(config, token_rows(8))
        left[mode] = logged(config, "bytes_offloaded")
        assert len(read_metrics(tmp_path / str(mode) / "metrics.jsonl")) > len(left[mode]) > 1
    assert set(left[False].values()) == {0}
    assert all(nbytes > 1000 for nbytes in left["disk"].values())


def test_host_parts_of_a_device_that_keeps_everything_have_no_activations(
    base: Path, tmp_path: Path
) -> None:
    planner = planner_of(
        settings(base, tmp_path, gradient_checkpointing=False, max_length=32), PROFILES["t4"]
    )
    demand = planner.demand()
    assert host_parts(demand, planner.allocation(demand))["saved"] == 0
