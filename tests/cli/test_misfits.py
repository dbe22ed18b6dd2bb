"""A torchvision that does not fit torch is named, with how to install one that does, from
whatever imports it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed import installed

from lema.cli import misfits
from lema.cli.misfits import misfit

MISSING = "operator torchvision::nms does not exist"
HALF = "partially initialized module 'torchvision' has no attribute 'extension'"


def wrapped(message: str) -> Exception:
    """Return what transformers makes of an error in an import."""
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'BloomPreTrainedModel'.") from error
    except ModuleNotFoundError as error:
        return error


@pytest.mark.parametrize(
    ("torch", "again"),
    [
        ("2.13.0", 'pip install "torch==2.13.0" torchvision'),
        (
            "2.13.0+cpu",
            (
                'pip install "torch==2.13.0" torchvision --index-url '
                "https://download.pytorch.org/whl/cpu"
            ),
        ),
        (
            "2.13.0+cu130",
            (
                'pip install "torch==2.13.0" torchvision --index-url '
                "https://download.pytorch.org/whl/cu130"
            ),
        ),
    ],
)
@pytest.mark.parametrize("message", [MISSING, HALF])
def test_both_are_named_with_their_versions_and_the_line_that_installs(
    message: str, torch: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misfits, "version", {"torch": torch}.__getitem__)
    with installed(
        tmp_path,
        monkeypatch,
        "torchvision",
        {},
        {},
        version="0.29.1",
        requires=["numpy", "torch==2.14.1"],
    ):
        for error in (RuntimeError(message), wrapped(message)):
            found = misfit(error)
            assert found is not None and found.exit_code == 2
            assert (
                found.what
                == f"torchvision 0.29.1, which needs torch==2.14.1, does not fit torch {torch}"
            )
            assert found.where == str(tmp_path / "torchvision")
            assert found.how.startswith("pip uninstall torchvision, which LEMA does not need;")
            assert found.how.endswith(again)


def test_another_error_or_a_package_that_is_not_installed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, "torchvision", {}, {}, version="0.29.1"):
        assert misfit(RuntimeError("operator aten::nms does not exist")) is None
        assert misfit(ModuleNotFoundError("No module named 'torchvision'")) is None
        circle = RuntimeError("itself")
        circle.__context__ = circle
        assert misfit(circle) is None
        assert misfit(RuntimeError(MISSING)) is not None
    monkeypatch.undo()
    assert misfit(RuntimeError(MISSING)) is None


def test_a_command_ends_in_that_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds the package as it finds a real one, and imports it as it builds its
    models.
    """
    site = tmp_path / "site"
    source = f"raise RuntimeError({MISSING!r})"
    with installed(site, monkeypatch, "torchvision", {}, {"torchvision": source}, version="0.1.2"):
        done = subprocess.run(
            [sys.executable, "-m", "lema", "demo", "demo"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert (
        "error: torchvision 0.1.2 does not fit torch " in done.stderr
        and "Traceback" not in done.stderr
    )
    assert f"where: {site / 'torchvision'}" in done.stderr
    assert "fix:   pip uninstall torchvision" in done.stderr
