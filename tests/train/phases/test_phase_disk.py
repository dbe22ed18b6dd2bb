"""Checkpoints of phases on disk: what is in them, what a full disk costs, and that one run
writes at a time.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import Disk
from phaseruns import FULL, LORA, SOURCES, STEP, assert_same, plan_of
from transformers import TrainerState

from lema import LemaConfig
from lema.errors import ConfigError, DiskFull, Stopped
from lema.storage import GlobalBinaryIndex
from lema.storage import diskspace as freespace
from lema.storage.locks import run_lock
from lema.storage.manifest import check_manifest
from lema.storage.verify import base_fingerprint
from lema.train.phases import rows as phaserows
from lema.train.phases.run import run_phases


@pytest.mark.slow
def test_a_checkpoint_of_either_kind_says_what_it_is_of(
    config_of: Callable[..., LemaConfig],
) -> None:
    config = config_of(save_steps=0)
    run_phases(config, plan_of({**FULL, "tokens": STEP}, {**LORA, "tokens": 2 * STEP}), SOURCES)
    out = Path(config.output_dir)
    ends = {
        "full": (out / "whole" / "checkpoint-1", 1),
        "adapters": (out / "adapters" / "checkpoint-2", 3),
    }
    for kind, (end, steps) in ends.items():
        check_manifest(end)
        assert {path.suffix for path in end.iterdir()} <= {".json", ".safetensors", ".md"}
        state = json.loads((end / "state.json").read_text())
        assert (
            state["kind"] == kind and {"config", "versions", "generators", "scaler"} <= state.keys()
        )
        base = config.model_name_or_path if kind == "full" else out / "whole" / "model"
        assert state["base"] == base_fingerprint(GlobalBinaryIndex(str(base)))
        callbacks = TrainerState.load_from_json(str(end / "trainer_state.json"))
        assert callbacks.global_step == steps and [
            row["step"] for row in callbacks.log_history
        ] == [*range(1, steps + 1)]
        assert json.loads((end / "lema_config.json").read_text())["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FULL, LORA], ids=["full", "lora"])
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(
    kind: dict[str, Any], config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is that checkpoint named the best, which it would have been."""
    plan = plan_of({**kind, "tokens": 3 * STEP, "name": "one"})
    disk = Disk(2)
    expected = run_phases(config_of("straight", save_steps=0), plan, SOURCES)
    losses = iter([3.0, 2.0, 2.5])
    found = {"eval_perplexity": 1.0, "eval_tokens": 1}
    monkeypatch.setattr(
        phaserows, "evaluate", lambda *_, **__: {"eval_loss": next(losses), **found}
    )
    monkeypatch.setattr(freespace, "free_bytes", disk.free)
    with pytest.warns(
        UserWarning, match="no checkpoint after step 2 of phase one: the disk is too full"
    ):
        end = run_phases(config_of(eval_steps=1), plan, SOURCES, held_out=SOURCES, callbacks=[disk])
    assert_same(end, expected)
    place = end.parent
    assert disk.saved == [1, 3] and sorted(one.name for one in place.glob("*checkpoint*")) == [
        "checkpoint-1",
        end.name,
    ]
    assert json.loads((place / "best.json").read_text())["checkpoint"] == end.name


def test_without_room_for_the_end_of_a_phase_the_run_fails(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(2)
    config = config_of()
    monkeypatch.setattr(freespace, "free_bytes", disk.free)
    with pytest.raises(DiskFull, match="too full"):
        run_phases(config, plan_of({**LORA, "tokens": 2 * STEP}), SOURCES, callbacks=[disk])
    place = Path(config.output_dir) / "adapters"
    assert [path.name for path in place.iterdir()] == ["checkpoint-1"]
    with pytest.raises(DiskFull, match="too full for 2"):
        # nor does it begin
        run_phases(config_of("other"), plan_of({**FULL, "tokens": 2 * STEP}), SOURCES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["stop", "at_layer"])
def test_stopped_on_a_full_disk_a_run_says_both_and_goes_on_from_the_checkpoint_before(
    asked: str, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(2, 3)
    config = config_of()
    plan = plan_of({**LORA, "tokens": 4 * STEP})
    with monkeypatch.context() as full:
        full.setattr(freespace, "free_bytes", disk.free)
        with (
            pytest.warns(UserWarning, match="no checkpoint after step 2"),
            pytest.raises(
                DiskFull, match=r"stopped by a test after step .*, which is not saved: "
            ) as caught,
        ):
            run_phases(
                config,
                plan,
                SOURCES,
                callbacks=[disk],
                **{asked: lambda: "a test" if disk.now == 3 else None},
            )
    assert isinstance(caught.value.__cause__, Stopped)
    place = Path(config.output_dir) / "adapters"
    assert [path.name for path in place.glob("*checkpoint*")] == ["checkpoint-1"]
    end = run_phases(config, plan, SOURCES, resume=True)
    assert_same(end, run_phases(config_of("straight"), plan, SOURCES))


def test_one_run_of_phases_writes_to_a_directory(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of()
    plan = plan_of({**LORA, "tokens": STEP})
    place = Path(config.output_dir) / "adapters"
    with (
        run_lock(Path(config.output_dir)),
        pytest.raises(ConfigError, match="another run writes to this directory"),
    ):
        run_phases(config, plan, SOURCES)
    (place / ".checkpoint-1.0123abcd.part").mkdir(parents=True)
    run_phases(config, plan, SOURCES)
    assert not list(place.glob(".*")) and not (Path(config.output_dir) / ".lock").exists()
