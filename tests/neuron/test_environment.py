"""Variables are added to, never written over, and setting them twice is setting them once."""

import os
import shlex

import pytest

from lema_neuron.environment import set_variables, variables

GIVEN: list[dict[str, str]] = [
    {},
    {"NEURON_CC_FLAGS": ""},
    {
        "NEURON_CC_FLAGS": "-O1 --cache_dir='/my cache'",
        "MALLOC_ARENA_MAX": "8",
        "PJRT_DEVICE": "CPU",
    },
    {"NEURON_CC_FLAGS": "--model-type unet-inference"},
    {
        "NEURON_CC_FLAGS": "--model-type=generic --auto-cast matmult --retry-failed-compilation",
        "HOME": "/home",
    },
    {"NEURON_CC_FLAGS": "--retry_failed_compilation -O2"},
    {"NEURON_CC_FLAGS": "--internal='not closed"},
]


@pytest.mark.parametrize("runtime", ["xla", "native", "emulated"])
@pytest.mark.parametrize("given", GIVEN)
def test_nothing_that_is_set_is_lost_or_changed(given: dict[str, str], runtime: str) -> None:
    before = dict(given)
    found = variables(given, runtime)  # type: ignore[arg-type]
    assert given == before
    for name, value in found.items():
        if name in given:
            assert (
                name == "NEURON_CC_FLAGS" and value.startswith(given[name]) and value != given[name]
            )
    after = {**given, **found}
    assert variables(after, runtime) == {}  # type: ignore[arg-type]
    assert runtime != "emulated" or not found


def test_what_is_missing_is_appended() -> None:
    assert variables({}, "xla") == {
        "PJRT_DEVICE": "NEURON",
        "MALLOC_ARENA_MAX": "64",
        "NEURON_CC_FLAGS": "--auto-cast=none --model-type=transformer --retry_failed_compilation",
    }
    assert "NEURON_CC_FLAGS" not in variables({}, "native")
    flags = [
        shlex.split(variables(given, "xla").get("NEURON_CC_FLAGS", "")) for given in GIVEN[2:6]
    ]
    assert flags[0] == [
        "-O1",
        "--cache_dir=/my cache",
        "--auto-cast=none",
        "--model-type=transformer",
        "--retry_failed_compilation",
    ]
    assert flags[1] == [
        "--model-type",
        "unet-inference",
        "--auto-cast=none",
        "--retry_failed_compilation",
    ]
    assert flags[2] == []
    assert flags[3] == [
        "--retry_failed_compilation",
        "-O2",
        "--auto-cast=none",
        "--model-type=transformer",
    ]


def test_they_are_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_CC_FLAGS", "MALLOC_ARENA_MAX", "PJRT_DEVICE"):
        monkeypatch.setenv(name, "a value to go back to")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert set_variables("xla").keys() == {"NEURON_CC_FLAGS", "PJRT_DEVICE"}
    assert os.environ["MALLOC_ARENA_MAX"] == "8" and "transformer" in os.environ["NEURON_CC_FLAGS"]
    assert set_variables("xla") == {}
