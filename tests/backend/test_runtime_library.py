"""The library of a device's driver is found wherever the system names the files that a process has
loaded: below /proc, or through psutil. Where neither does, the device is taken for one that reaches
only what was registered."""

import _ctypes
import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lema_accelerator import driver

NAMES = ["libcudart.so.13", "libamdhip64.so.7", "cudart64_13.dll", "amdhip64_7.dll"]


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    library = driver._library
    library.cache_clear()
    yield
    library.cache_clear()


def reaches_all() -> bool:
    return driver.RuntimeDriver(torch.device("cuda", 0)).reaches_all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("system", ["with /proc", "without /proc"])
def test_it_is_one_of_the_files_that_the_process_has_loaded(
    system: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / one for one in ("libm.so", "xcudart.so", name)]
    maps = tmp_path / "maps"
    if system == "with /proc":
        maps.write_text(
            "".join(f"7f00-7f01 r-xp 0000 fe:00 12    {file}\n" for file in files)
            + "7f02-7f03 rw-p 0 0 0\n"
        )
    monkeypatch.setattr(driver, "MAPS", maps)
    monkeypatch.setattr(
        psutil.Process, "memory_maps", lambda _: [SimpleNamespace(path=str(file)) for file in files]
    )
    shutil.copy(_ctypes.__file__, files[-1])  # any library
    library = ctypes.CDLL(str(files[-1]))
    try:
        found = driver._library()
        assert found is not None
        assert found._handle == library._handle, (
            "the one that is loaded, rather than another of that name"
        )
        assert not reaches_all(), "it has no function that says so"
    finally:
        for handle in (library._handle, library._handle):  # both, or later tests find it
            _ctypes.dlclose(handle)


def test_where_no_system_names_them_only_what_was_registered_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAPS", tmp_path / "maps")
    monkeypatch.delattr(psutil.Process, "memory_maps")  # macOS
    assert driver._library() is None and not reaches_all()
    driver._forget_error(None, 0)


def test_a_library_that_says_so_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(value: int, error: int) -> SimpleNamespace:
        def asked(into: object, attribute: int, device: int) -> int:
            into._obj.value = value  # type: ignore[attr-defined] - of ctypes.byref
            return error if (attribute, device) == (driver.PAGEABLE, 0) else 1

        return SimpleNamespace(cudaDeviceGetAttribute=asked)

    for value, error, expected in ((1, 0, True), (0, 0, False), (1, 1, False)):
        monkeypatch.setattr(
            driver, "_library", lambda value=value, error=error: answer(value, error)
        )
        assert reaches_all() is expected
