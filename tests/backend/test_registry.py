"""How a device is chosen where no setting names one."""

from pathlib import Path

import pytest
from installed import installed

from lema.backend import registry
from lema.backend.registry import load, resident_fraction
from lema.config import LemaConfig

MODULE = """
from lema_cpu import CpuBackend
from lema.errors import BackendUnavailable

class Here(CpuBackend):
    name = "aaa"
    last_resort = False
    keeps = 0.25
    def __init__(self, device, options=None):
        super().__init__("cpu", options)

def absent(device, options=None):
    raise BackendUnavailable("its device is not there")
"""


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    registry._chosen.cache_clear()


@pytest.fixture(autouse=True)
def forgotten_afterwards(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(registry._chosen.cache_clear)


def test_the_processor_is_chosen_where_there_is_nothing_else() -> None:
    assert LemaConfig("model").device == "auto"
    assert load("auto").name == "cpu"
    assert resident_fraction("auto") == resident_fraction("cpu")


def test_what_can_run_here_comes_before_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "zzz": "devices_of_a_test:Here",
        "yyy": "devices_of_a_test:absent",
        "aab": "devices_of_a_test:nothing",
    }
    with installed(tmp_path, monkeypatch, "devices", points, {"devices_of_a_test": MODULE}):
        assert load("auto").name == "aaa"  # of its class; the settings call it zzz
        assert resident_fraction("auto") == 0.25
        assert load("cpu").name == "cpu"
