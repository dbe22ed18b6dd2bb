"""What the doctor says of installed packages: those that a test installed for its own length."""

import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from installed import installed
from packaging.requirements import Requirement

from lema.backend import Finding, Level
from lema.backend.findings import PAIRS, Pair, Stub, known_bad, stubs
from lema_tools.doctor.machine import versions


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in versions()}


def test_every_package_that_lema_requires_is_told_and_fits_here() -> None:
    told = found()
    for text in requires("lema-lora") or []:
        requirement = Requirement(text)
        if requirement.marker is None:
            finding = told[requirement.name.replace("_", "-").lower()]
            assert finding.level is Level.OK
            assert finding.facts == {
                "installed": version(requirement.name),
                "wanted": str(requirement.specifier),
                "required": True,
            }
    assert told["torchao"].facts["required"] is False
    assert told["lema"].facts["installed"] == version("lema-lora")
    assert "pytest" not in told
    assert told["pairs"].level is Level.OK


def test_a_package_out_of_range_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, "peft", {}, {}, version="0.4"):
        finding = found()["peft"]
    assert (finding.level, finding.facts["installed"]) == (Level.PROBLEM, "0.4")
    assert finding.how.startswith('pip install "peft')


def test_an_optional_package_out_of_range_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, "torchao", {}, {}, version="0.17"):
        finding = found()["torchao"]
    assert finding.level is Level.WARNING
    assert finding.how == 'pip install "lema-lora[quantize]"'


def test_a_missing_package_is_a_problem_if_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = [
        "no-such-package>=3",
        "no-such-extra; extra == 'plot'",
        "no-such-tool; extra == 'dev'",
        "torch>=2.8",
    ]
    site = tmp_path / "site"
    metadata = site / "lema_lora-1.0.dist-info" / "METADATA"
    with installed(site, monkeypatch, "lema-lora", {}, {}, requires=needs):
        extras = "Requires-Python: >=3.11\nProvides-Extra: plot\nProvides-Extra: dev\n"
        metadata.write_text(metadata.read_text() + extras)
        told = found()
    assert told["no-such-package"].level is Level.PROBLEM
    assert told["no-such-package"].facts["installed"] is None
    assert told["no-such-extra"].level is Level.NOTE
    assert told["no-such-extra"].how == 'pip install "lema-lora[plot]"'
    assert "no-such-tool" not in told


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    assert found()["python"].level is Level.PROBLEM


# Known to be bad


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.first} with {pair.second}")
def test_a_known_pair_has_its_source_and_is_not_installed_here(pair: Pair) -> None:
    assert pair.source.startswith("https://")
    assert pair.how
    assert not list(known_bad([pair], "versions"))


def test_a_pair_is_bad_only_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(
        "one-of-two>=2", "torch>=2.8", Level.PROBLEM, "it breaks", "mend it", "https://example.org"
    )
    assert not list(known_bad([pair], "s"))
    with installed(tmp_path / "old", monkeypatch, "one-of-two", {}, {}, version="1.9"):
        assert not list(known_bad([pair], "s"))
    with installed(tmp_path / "new", monkeypatch, "one-of-two", {}, {}, version="2.0.dev1+local"):
        assert not list(known_bad([pair], "s"))  # a development version of 2.0 comes before it
    with installed(tmp_path / "newest", monkeypatch, "one-of-two", {}, {}, version="2.1+local"):
        (finding,) = known_bad([pair], "s")
    assert (finding.key, finding.level) == ("s.one-of-two_and_torch", Level.PROBLEM)
    assert (finding.how, finding.source) == ("mend it", "https://example.org")
    assert finding.facts["other"] == f"torch {version('torch')}"


def test_an_old_torchao_stops_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(tmp_path, monkeypatch, "torchao", {}, {}, version="0.15.0"):
        told = found()
    assert told["peft and torchao"].level is Level.PROBLEM
    assert "pairs" not in told


STUB = Stub(
    "kept-name",
    "1.0",
    "kept_name",
    "NOT THIS ONE",
    "is a stand-in",
    "uninstall it",
    "https://example.org",
)


@pytest.mark.parametrize(
    ("installed_version", "source", "recognised"),
    [
        ("1.0", "", True),
        ("1.1", "raise ImportError('NOT THIS ONE. Look elsewhere.')", True),
        ("2.0", "answer = 42", False),
    ],
)
def test_a_stub_is_recognised_and_not_imported(
    installed_version: str,
    source: str,
    recognised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with installed(
        tmp_path, monkeypatch, "kept-name", {}, {"kept_name": source}, version=installed_version
    ):
        told = list(stubs([STUB], "s"))
        assert "kept_name" not in sys.modules
    assert bool(told) is recognised
    for finding in told:
        assert (finding.level, finding.how) == (Level.WARNING, "uninstall it")


def test_a_stub_that_is_not_installed_is_not_told() -> None:
    assert not list(stubs([STUB], "s"))


# Releases that tests ran with


def test_a_release_that_no_tests_ran_with_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found()["tested"].facts["transformers"] == "5.17, 5.20, 5.24"
    with installed(tmp_path, monkeypatch, "peft", {}, {}, version="0.22.9"):
        told = found()
    assert (told["tested"].level, told["peft"].level) == (Level.NOTE, Level.OK)
    assert "not tested with peft 0.22.9 (tests ran with 0.20, 0.21)" in told["tested"].what
