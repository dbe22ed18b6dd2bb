"""The benchmark of `auto` treats its arms alike: the same steps of each, in turns, the first of
a turn not counted.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def auto() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import auto

        yield auto


def test_arms_go_in_turns_and_none_is_always_first(auto: ModuleType) -> None:
    arms = ["auto", "again", "one", "two", "three"]
    rounds = [auto.in_turn(arms, number) for number in range(len(arms))]
    assert all(sorted(order) == sorted(arms) for order in rounds)
    assert sorted(order[0] for order in rounds) == sorted(arms)
    assert len({tuple(order) for order in rounds}) == len(arms)


def test_the_first_step_of_a_turn_is_not_counted(
    auto: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, taken=0)

    def step() -> None:
        clock.taken += 1
        clock.now += 100.0 if clock.taken == 1 else 1.0

    monkeypatch.setattr(auto, "cpu_seconds", lambda: 2 * clock.now)
    monkeypatch.setattr(auto.time, "perf_counter", lambda: clock.now)
    assert auto.turn(step, 3) == ([2.0] * 3, [1.0] * 3)
    assert clock.taken == 4


def test_all_that_are_compared_take_the_same_steps_after_the_grid_is_narrowed(
    auto: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of the grid choose who is compared and count for nothing else."""
    asked = Namespace(arms=6, finalists=2, rounds=3, steps=4)
    turns = list[str]()
    made = dict[str, Any]()

    class Pipe:
        def __init__(self, name: str) -> None:
            self.name = name
            self.count = 0
            self.turns = 0

        def send(self, count: int) -> None:
            self.count = count

        def recv(self) -> tuple[list[float], list[float]]:
            turns.append(self.name)
            self.turns += 1
            # Who did best in the grid does worse afterwards.
            seconds = (
                9.0
                if len(self.name) > 10 and self.turns > 1
                else 5.0
                if "auto" in self.name
                else len(made)
            )
            return [seconds] * self.count, [seconds] * self.count

    def opened(name: str, _model: str, settings: dict[str, Any], _learnt: Any) -> Any:
        if settings.get("prefetch_depth") == 4:
            return None
        process = SimpleNamespace(join=lambda: None)
        made[name] = auto.Arm(
            name, process, Pipe(name), name.removesuffix(" again"), 1.0, auto.Learnt()
        )
        return made[name]

    monkeypatch.setattr(auto, "opened", opened)
    told = auto.compared("model", {"device_memory": 1, "max_length": 64, "batch_size": 8}, asked)
    assert told["arms"] + told["refused"] == 6 and told["refused"] > 0
    finalists = [name for name, arm in made.items() if len(arm.cpu) == 3 * 4]
    assert len(finalists) == 2 + 2 and {"auto", "auto again"} < set(finalists)
    last = turns[-3 * 4 :]
    assert all(sorted(last[first : first + 4]) == sorted(finalists) for first in range(0, 12, 4))
    assert told["best / auto, CPU"] == pytest.approx(9 / 5) and told["again / auto, CPU"] == 1
    assert told["auto s/step"]["median"] == statistics.median(made["auto"].wall)


def test_a_part_of_the_grid_has_every_value_of_every_setting(auto: ModuleType) -> None:
    some = list(auto.configurations(6))
    assert {name: {one[name] for one in some} for name in auto.GRID} == {
        name: {*v} for name, v in auto.GRID.items()
    }
    assert len({tuple(one.items()) for one in auto.configurations(36)}) == 36
