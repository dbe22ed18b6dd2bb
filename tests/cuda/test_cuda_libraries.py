"""What cuBLAS is asked for: memory for itself, which plans count, and the same bits each time."""

import os

import pytest

from lema_cuda.libraries import VARIABLE, make_deterministic, workspace_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("capability", "config", "expected"),
    [
        ((9, 0), "", 32 * MIB + 32 * MIB),
        ((12, 0), "", 32 * MIB + 32 * MIB),
        ((8, 0), "", 8 * MIB + 128 * 1024 + MIB),
        ((8, 0), ":4096:8", 32 * MIB + MIB),
        ((8, 0), ":4096:2:16:8", 8 * MIB + 128 * 1024 + MIB),
        ((9, 0), ":16:8", 128 * 1024 + 32 * MIB),
    ],
)
def test_what_the_libraries_of_products_take(
    capability: tuple[int, int], config: str, expected: int
) -> None:
    assert workspace_bytes(capability, config) == expected


@pytest.mark.parametrize("before", [None, ":4096:2:16:8"])
def test_the_variable_is_set_and_put_back(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    undo = make_deterministic()
    assert os.environ[VARIABLE] == ":4096:8"
    undo()
    assert os.environ.get(VARIABLE) == before


@pytest.mark.parametrize("before", [":4096:8", ":16:8"])
def test_a_value_that_is_deterministic_stays(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    monkeypatch.setenv(VARIABLE, before)
    make_deterministic()()
    assert os.environ[VARIABLE] == before


def test_what_somebody_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    undo = make_deterministic()
    monkeypatch.setenv(VARIABLE, ":16:8")
    undo()
    assert os.environ[VARIABLE] == ":16:8"
