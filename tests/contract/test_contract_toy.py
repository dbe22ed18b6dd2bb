"""A backend by a third party: installed, found, listed, and held to the same contract."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from installed import installed, installed_project
from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Backend, available, load
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.errors import BackendUnavailable
from lema.testing import BackendContract

TOY = Path(__file__).with_name("toy")

UNPLUGGED = """
from lema.errors import BackendUnavailable
def open_backend(device, options):
    raise BackendUnavailable("no board is plugged in", where=device, how="plug one in")
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed_project(tmp_path / "site", monkeypatch, TOY):
        yield


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One backend without its hardware, one without its library, one without its class, one that
    is no backend.
    """
    modules = {
        "unplugged": UNPLUGGED,
        "unlinked": "import a_library_nobody_has",
        "hollow": "class Hollow: pass",
    }
    points = {
        "unplugged": "unplugged:open_backend",
        "unlinked": "unlinked:Backend",
        "renamed": "hollow:Filled",
        "hollow": "hollow:make",
    }
    modules["hollow"] += "\ndef make(device, options): return Hollow()\n"
    with installed(tmp_path / "broken", monkeypatch, "broken-backends", points, modules):
        yield


@pytest.mark.usefixtures("toy")
class TestToy(BackendContract):
    def backend(self) -> Backend:
        return load("toy")

    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=8,
        )


@pytest.mark.usefixtures("toy")
def test_an_installed_backend_is_found_by_its_name() -> None:
    assert load("toy").name == "toy"
    assert load("toy:3").opened_as == "toy:3"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("toy", "broken")
def test_available_backends_are_listed_and_so_is_what_others_lack() -> None:
    listed = {info.name: info for info in available()}
    assert listed["cpu"].ok and listed["toy"].ok
    assert listed["toy"].source == "toy_backend:ToyBackend"
    assert listed["unplugged"].reason == "no board is plugged in"
    assert "a_library_nobody_has" in (listed["unlinked"].reason or "")
    assert "Filled" in (listed["renamed"].reason or "")
    assert "does not implement lema.backend.protocols.Backend" in (listed["hollow"].reason or "")


@pytest.mark.usefixtures("toy", "broken")
def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "toy  ok" in lines and "cpu  ok" in lines
    assert "unplugged  unavailable: no board is plugged in" in lines


@pytest.mark.usefixtures("toy")
def test_a_name_nobody_installed_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(BackendUnavailable, match="no backend named 'tyo' is installed") as caught:
        load("tyo:1")
    assert "toy" in caught.value.how and "cpu" in caught.value.how
    assert caught.value.where == "device: tyo:1"


def test_without_the_package_there_is_no_such_backend() -> None:
    assert "toy" not in {info.name for info in available()}
    with pytest.raises(BackendUnavailable, match="no backend named 'toy'"):
        load("toy")


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unplugged", "no board is plugged in"),
        ("unlinked", "cannot be imported: No module named 'a_library_nobody_has'"),
        ("renamed", "cannot be imported"),
        ("hollow", "does not implement"),
    ],
)
def test_a_backend_that_cannot_run_here_says_what_is_missing(name: str, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason):
        load(name)


def test_no_backend_is_imported_but_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        modules = {"intruder": "raise RuntimeError('imported without being asked for')"}
        stack.enter_context(
            installed(
                tmp_path / "site",
                monkeypatch,
                "intruder",
                {"intruder": "intruder:Backend"},
                modules,
            )
        )
        assert load("cpu").name == "cpu"
        with pytest.raises(RuntimeError, match="imported without being asked for"):
            load("intruder")
