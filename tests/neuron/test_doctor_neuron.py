"""What the doctor says of AWS Trainium: the stand-ins of the public index above all."""

import sys
from pathlib import Path

import pytest
from installed import installed

from lema.backend import Finding, Level
from lema_neuron.doctor import PAIRS, STUBS, built_for, doctor, driver, environment

RAISES = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")'


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor()}


@pytest.mark.parametrize(
    ("name", "version"), [("torch-neuronx", "1.0"), ("neuronx-distributed", "0.1")]
)
def test_the_stand_ins_of_the_public_index_are_recognised_and_not_imported(
    name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = name.replace("-", "_")
    with installed(tmp_path, monkeypatch, name, {}, {module: RAISES}, version=version):
        told = found()
        assert module not in sys.modules
    finding = told[name]
    assert (finding.level, finding.facts) == (Level.WARNING, {"installed": version, "stub": True})
    assert "AWS's own package index" in finding.how
    assert f"{name} build" not in told  # a stand-in is built for no torch


def test_the_real_package_is_no_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    version = ".".join(torch.__version__.split(".")[:2]) + ".3.0"
    with installed(
        tmp_path,
        monkeypatch,
        "torch-neuronx",
        {},
        {"torch_neuronx": "answer = 42"},
        version=version,
    ):
        told = found()
    assert told["torch-neuronx"].level is Level.OK
    assert not {"torch-neuronx build", "torch-neuronx and torch"} & set(told)


@pytest.mark.parametrize(
    ("version", "torch", "warned"),
    [
        ("2.13.3.0", "2.13.0+cpu", False),
        ("2.14.3.0", "2.13.0+cpu", True),
        ("2.9.0.2.13.1", "2.9.1", False),
        ("2.9.0", "2.13.0", True),
        (None, "2.13.0", False),
        ("2.9.0", None, False),
    ],
)
def test_a_package_built_for_another_torch_is_warned_of(
    version: str | None, torch: str | None, warned: bool
) -> None:
    told = list(built_for("torch-neuronx", version, torch))
    assert bool(told) is warned
    for finding in told:
        assert (finding.level, finding.name) == (Level.WARNING, "torch-neuronx build")
        assert version is not None
        assert ".".join(version.split(".")[:2]) in finding.how


def test_the_kind_that_is_no_longer_maintained_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, "torch-neuronx", {}, {}, version="2.9.0.2.13.1"):
        told = found()
    assert told["torch-neuronx and torch"].level is Level.NOTE
    assert told["torch-neuronx build"].level is Level.WARNING  # no torch 2.9 is installed here


def test_every_fact_has_its_source() -> None:
    assert all(one.source.startswith("https://") for one in (*PAIRS, *STUBS))


def test_devices_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert (driver(tmp_path).level, driver(tmp_path).facts["devices"]) == (Level.OK, 0)
    for name in ("neuron0", "neuron1", "neuron_something"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "sys/module/neuron").mkdir(parents=True)
    (tmp_path / "sys/module/neuron/version").write_text("2.31.7.0\n")
    told = driver(tmp_path)
    assert (told.level, told.facts) == (Level.NOTE, {"devices": 2, "driver": "2.31.7.0"})
    assert "LEMA's backend for them" in told.what


def test_variables_that_change_results_are_warned_of() -> None:
    told = {
        finding.name: finding.level
        for finding in environment({"XLA_USE_BF16": "1", "NEURON_CC_FLAGS": "-O1"})
    }
    assert told == {"XLA_USE_BF16": Level.WARNING, "NEURON_CC_FLAGS": Level.OK}
    assert not list(environment({"XLA_USE_BF16": "0"}))


def test_on_a_machine_without_any_of_it_nothing_is_wrong() -> None:
    told = found()
    assert "packages" in told
    assert all(finding.level is Level.OK for finding in told.values())
