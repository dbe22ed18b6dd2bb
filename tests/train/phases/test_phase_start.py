"""A run of phases begins anywhere: at a checkpoint of either kind that lies elsewhere, or with a
plain model.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from phaseruns import FULL, LORA, SOURCES, STEP, assert_same, logged, plan_of, two, weights

from lema import LemaConfig
from lema.errors import ConfigError, LemaError
from lema.train.phases.paths import PhasePaths, find_start
from lema.train.phases.run import run_phases


@dataclass(frozen=True)
class Straight:
    """A run that was not stopped, and where it ended."""

    place: Path
    end: Path


@pytest.fixture
def straight(config_of: Callable[..., LemaConfig]) -> Straight:
    config = config_of("straight")
    return Straight(Path(config.output_dir), run_phases(config, two(), SOURCES))


@pytest.mark.slow
def test_from_anywhere_it_ends_as_the_run_that_was_not_stopped(
    straight: Straight, config_of: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for phase, step in (("whole", 1), ("whole", 2), ("adapters", 1)):
        shutil.copytree(
            straight.place / phase / f"checkpoint-{step}", elsewhere / phase / f"checkpoint-{step}"
        )
    shutil.copytree(straight.place / "whole" / "model", tmp_path / "plain")
    places: dict[str, Path] = {
        "in the midst of the weights": elsewhere / "whole" / "checkpoint-1",
        "at the boundary, without the model": elsewhere / "whole" / "checkpoint-2",
        "at the boundary, with the model beside it": straight.place / "whole" / "checkpoint-2",
        "in the midst of the adapters": elsewhere / "adapters" / "checkpoint-1",
        "a plain model": tmp_path / "plain",
    }
    for number, (name, path) in enumerate(places.items()):
        config = config_of(f"from-{number}")
        end = run_phases(config, two(), SOURCES, start=path)
        assert_same(end, straight.end)
        phases = ["whole", "adapters"][0 if number < 1 else 1 :]
        for phase in phases:
            theirs = logged(straight.place, "loss", phase)
            mine = logged(Path(config.output_dir), "loss", phase)
            assert mine == theirs[len(theirs) - len(mine) :] and mine, name
    # What was begun so goes on without being told where it began.
    assert run_phases(config, two(), SOURCES, resume=True) == end


@pytest.mark.slow
def test_another_micro_batch_size_goes_on_from_a_checkpoint(
    straight: Straight, config_of: Callable[..., LemaConfig]
) -> None:
    for phase in ("whole", "adapters"):
        path = straight.place / phase / "checkpoint-1"
        end = run_phases(config_of(f"other-{phase}"), two(micro_batch_size=1), SOURCES, start=path)
        found = weights(end)
        expected = weights(straight.end)
        for name in expected:
            assert float((found[name] - expected[name]).abs().max()) < 1e-3, name


@pytest.mark.slow
def test_what_is_no_beginning_is_refused_in_words(
    straight: Straight, config_of: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    def refused(path: Path, plan: Any = None) -> str:
        places = PhasePaths(tmp_path / "new", plan or two())
        with pytest.raises(LemaError) as raised:
            find_start(path, places)
        assert raised.value.where and raised.value.how
        return str(raised.value)

    assert "neither" in refused(tmp_path / "nothing")
    assert "such as checkpoint-2" in refused(straight.place / "whole")
    model = straight.place / "whole" / "model"
    checkpoint = straight.place / "adapters" / "checkpoint-1"
    assert "set model_name_or_path" in refused(model, plan_of({**LORA, "tokens": STEP}))
    assert "no phase of the plan trains adapters" in refused(
        model, plan_of({**FULL, "tokens": STEP})
    )
    assert "another plan" in refused(checkpoint, two(4))
    assert "has no such phase" in refused(checkpoint, plan_of({**FULL, "tokens": STEP}))
    moved = tmp_path / "moved" / "adapters" / "checkpoint-1"
    shutil.copytree(checkpoint, moved)
    shutil.move(model, tmp_path / "gone")
    assert "the model that phase whole wrote" in refused(moved)
    (moved.parent.parent / "whole").mkdir()
    shutil.copytree(tmp_path / "gone", moved.parent.parent / "whole" / "model")  # as it was told
    assert find_start(moved, PhasePaths(tmp_path / "new", two())).models == {
        0: moved.parent.parent / "whole" / "model"
    }


@pytest.mark.slow
def test_a_base_that_is_gone_later_is_missed_rather_than_trained_again(
    straight: Straight, config_of: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    config = config_of("begun")
    plain = tmp_path / "plain"
    shutil.copytree(straight.place / "whole" / "model", plain)
    run_phases(config, two(), SOURCES, start=plain)
    shutil.rmtree(plain)
    shutil.rmtree(Path(config.output_dir) / "adapters")
    with pytest.raises(ConfigError, match="holds an adapter, which this run would replace"):
        run_phases(config, two(), SOURCES, resume=True)
    for file in Path(config.output_dir).glob("adapter_*"):
        file.unlink()
    with pytest.raises(ConfigError, match="wrote is missing"):
        run_phases(config, two(), SOURCES, resume=True)
    with pytest.raises(ConfigError, match="has already begun there"):
        run_phases(
            config_of("straight"), two(), SOURCES, start=straight.place / "whole" / "checkpoint-1"
        )
