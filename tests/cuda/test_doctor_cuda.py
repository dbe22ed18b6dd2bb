"""What the doctor says of NVIDIA devices, told by files, a command and versions that a test
wrote.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from installed import installed

from lema.backend import Level
from lema_cuda.doctor import (
    ARCHITECTURES,
    DRIVERS,
    _flash_attention,
    _quantizer,
    attention,
    doctor,
    environment,
    fused_kernels,
    kernels,
    memory,
    runtime,
)
from lema_cuda.installeddriver import COLUMNS, driver, driver_version, system_management


def root_with(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  384.98  Thu Oct 26 15:16:01 PDT 2017",
            "384.98",
            False,
        ),
        (
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  525.60.11  Release "
                "Build  (builder@localhost)"
            ),
            "525.60.11",
            True,
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build",
            "595.71.05",
            True,
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  35.3.1  Release Build",
            "35.3.1",
            True,
        ),
    ],
)
def test_the_driver_is_told_from_every_form_of_its_file(
    text: str, version: str, is_open: bool, tmp_path: Path
) -> None:
    root_with(
        tmp_path,
        {"proc/driver/nvidia/version": text + "\nGCC version:  gcc version 12.2.0 (GCC) \n"},
    )
    found = driver(tmp_path)
    assert (driver_version(tmp_path), found.level) == (version, Level.OK)
    assert found.facts["open_module"] is is_open


def test_the_driver_is_told_by_its_module_too(tmp_path: Path) -> None:
    assert (
        driver_version(root_with(tmp_path, {"sys/module/nvidia/version": "580.65.06\n"}))
        == "580.65.06"
    )


@pytest.mark.parametrize(
    ("vendor", "kind", "level"),
    [
        ("0x10de", "0x030200", Level.WARNING),
        ("0x10de", "0x040300", Level.NOTE),
        ("0x1002", "0x030000", Level.NOTE),
    ],
)
def test_no_driver_is_said_plainly_and_warned_of_where_a_device_is(
    vendor: str, kind: str, level: Level, tmp_path: Path
) -> None:
    root_with(
        tmp_path,
        {"sys/bus/pci/devices/0/vendor": vendor + "\n", "sys/bus/pci/devices/0/class": kind + "\n"},
    )
    found = driver(tmp_path)
    assert (found.level, found.facts["driver"]) == (level, None)
    assert "no NVIDIA driver is loaded" in found.what.replace("No", "no")


@pytest.mark.parametrize(
    ("built", "installed_driver", "level"),
    [
        ("13.0", "580.65.06", Level.OK),
        ("13.0", "575.57.08", Level.WARNING),
        ("12.8", "525.60.11", Level.OK),
        ("12.8", "470.223.02", Level.WARNING),
        ("12.6", "610.43.02", Level.OK),
        ("14.1", "610.43.02", Level.OK),  # nothing is known of it
        ("12.6", "35.3.1", Level.OK),  # numbered in another way
        ("13.0", None, Level.NOTE),
        (None, None, Level.NOTE),
        (None, "580.65.06", Level.WARNING),
    ],
)
def test_the_driver_is_held_against_the_cuda_of_torch(
    built: str | None, installed_driver: str | None, level: Level
) -> None:
    found = runtime(built, installed_driver)
    assert found.level is level
    assert found.facts["built_with"] == built
    if built is not None and level is Level.WARNING:
        assert found.source == DRIVERS


@pytest.mark.parametrize(
    ("capability", "built_for", "level"),
    [
        ((9, 0), ["sm_75", "sm_80", "sm_90"], Level.OK),
        ((8, 9), ["sm_80", "sm_86"], Level.OK),  # kernels of an older minor version run
        ((8, 0), ["sm_86"], Level.WARNING),  # of a newer one do not
        ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], Level.WARNING),
        ((12, 0), ["sm_90", "sm_100"], Level.WARNING),
        ((12, 0), ["sm_90", "compute_90"], Level.OK),  # compiled when it is needed
        ((12, 1), ["sm_120"], Level.OK),
        ((9, 0), ["sm_90a"], Level.OK),
        ((10, 0), ["sm_90a"], Level.WARNING),
        ((7, 5), ["sm_75"], Level.NOTE),  # no bfloat16
        ((9, 0), [], Level.WARNING),
    ],
)
def test_kernels_are_held_against_the_device(
    capability: tuple[int, int], built_for: list[str], level: Level
) -> None:
    found = kernels(0, capability, built_for)
    assert found.level is level
    assert (found.source == ARCHITECTURES) is (level is Level.WARNING)


def test_memory_that_others_use_is_noted() -> None:
    assert memory(0, "some device", 95, 100).level is Level.OK
    found = memory(1, "some device", 40, 100)
    assert (found.name, found.level) == ("memory 1", Level.NOTE)
    assert (found.facts["free_bytes"], found.facts["total_bytes"]) == (40, 100)


@pytest.mark.parametrize(
    ("version", "capabilities", "told"),
    [
        ("2.13.0+cu130", [(9, 0)], True),
        ("2.11.0", [(8, 0), (9, 0)], True),
        ("2.10.1", [(9, 0)], False),
        ("2.13.0", [(8, 0), (12, 0)], False),
        ("2.13.0", [], False),
    ],
)
def test_attention_that_gives_no_numbers_is_told_to_be_off(
    version: str, capabilities: list[tuple[int, int]], told: bool
) -> None:
    found = list(attention(version, capabilities))
    assert bool(found) is told
    assert all(
        finding.level is Level.NOTE and "switches it off" in finding.what for finding in found
    )
    assert all(finding.source for finding in found)


def quantizer(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let a package be installed that has libraries for CUDA 12 and 13."""
    for version in ("121", "126", "130"):
        (directory / f"libbitsandbytes_cuda{version}.so").touch()
    package = SimpleNamespace(submodule_search_locations=[str(directory)])
    monkeypatch.setattr("lema_cuda.doctor.find_spec", lambda name: package)
    monkeypatch.setattr("lema_cuda.doctor.installed_version", lambda name: "0.50.0")


def test_the_quantiser_needs_a_library_for_this_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quantizer(monkeypatch, tmp_path)
    (good,) = _quantizer("12.9")  # it takes one of an earlier minor version
    (bad,) = _quantizer("99.0")
    assert (good.level, bad.level) == (Level.OK, Level.WARNING)


@pytest.mark.parametrize(
    ("source", "level"),
    [("", Level.OK), ("raise ImportError('undefined symbol: _ZN3c105ErrorC2')", Level.WARNING)],
)
def test_attention_built_for_another_torch_is_warned_of(
    source: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(
        tmp_path, monkeypatch, "flash-attn", {}, {"flash_attn_2_cuda": source}, version="2.8.3"
    ):
        (found,) = _flash_attention()
    assert found.level is level
    assert found.facts["installed"] == "2.8.3"


# nvidia-smi


def command(directory: Path, script: str) -> str:
    file = directory / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_devices_are_told_by_nvidia_smi_whatever_torch_can_do(tmp_path: Path) -> None:
    line = "NVIDIA H200, 580.65.06, 143771, 4, Enabled, Enabled, 5, 16, 16"
    narrow = "Tesla T4, 580.65.06, 15360, [N/A], Disabled, [N/A], 3, 8, 16"
    script = (
        f'[ "$1" = "--query-gpu={",".join(COLUMNS)}" ] || exit 3\necho "{line}"\necho "{narrow}"'
    )
    wide, slow = system_management(command(tmp_path, script))
    assert (wide.key, wide.level) == ("cuda.nvidia-smi_0", Level.OK)
    assert wide.facts == {
        "name": "NVIDIA H200",
        "driver": "580.65.06",
        "total_bytes": 143771 << 20,
        "used_bytes": 4 << 20,
        "persistence": "Enabled",
        "ecc": "Enabled",
        "link_generation": "5",
        "link_width": "16",
        "link_width_max": "16",
    }
    assert (slow.name, slow.level, slow.facts["used_bytes"]) == ("nvidia-smi 1", Level.NOTE, None)
    assert "8 of the 16 lanes" in slow.what


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "version mismatch",
        ),
        ("exec sleep 60", "does not answer"),
    ],
)
def test_an_nvidia_smi_that_fails_is_a_warning(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in script:
        monkeypatch.setattr("lema_cuda.installeddriver.PATIENCE", 0.05)
    (found,) = system_management(command(tmp_path, script))
    assert found.level is Level.WARNING
    assert words in found.what


def test_no_nvidia_smi_is_no_finding(tmp_path: Path) -> None:
    assert not list(system_management(str(tmp_path / "none")))


def test_variables_are_told_with_what_they_do() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "0",
        "HOME": "/",
    }
    assert {finding.name: finding.level for finding in environment(given)} == {
        "CUDA_VISIBLE_DEVICES": Level.OK,
        "CUDA_LAUNCH_BLOCKING": Level.WARNING,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is said without a device")
def test_without_a_device_nothing_is_a_problem() -> None:
    found = list(doctor())
    assert {"driver", "runtime"} <= {finding.name for finding in found}
    assert all(finding.level is not Level.PROBLEM for finding in found)


def pretend(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Let torch say that it was built with CUDA and sees two devices, or none."""
    monkeypatch.setattr("lema_cuda.doctor.driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    told = {
        "is_available": lambda: available,
        "device_count": lambda: 2,
        "get_device_properties": lambda number: SimpleNamespace(
            name=f"board {number}", major=9, minor=0
        ),
        "mem_get_info": lambda number: (100 - 50 * number, 100),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
    }
    for name, said in told.items():
        monkeypatch.setattr(torch.cuda, name, said)


def test_every_device_that_torch_sees_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, available=True)
    quantizer(monkeypatch, tmp_path)
    found = {finding.name: finding for finding in doctor()}
    assert {
        "runtime",
        "bitsandbytes",
        "memory 0",
        "kernels 0",
        "memory 1",
        "kernels 1",
        "attention",
    } <= set(found)
    assert "liger-kernel" in found
    assert (found["memory 0"].level, found["memory 1"].level) == (Level.OK, Level.NOTE)
    assert "board 1" in found["memory 1"].what
    assert found["runtime"].level is Level.OK


def test_a_driver_that_torch_cannot_use_is_warned_of_with_torchs_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    pretend(monkeypatch, available=False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = {finding.name: finding for finding in doctor()}
    assert found["torch sees"].level is Level.WARNING
    assert "is too old." in found["torch sees"].what
    assert "memory 0" not in found


def test_kernels_for_fast_arithmetic_are_told_installed_or_not() -> None:
    assert (
        fused_kernels("0.8.5").level is Level.OK
        and "liger-kernel 0.8.5" in fused_kernels("0.8.5").what
    )
    assert (
        fused_kernels(None).level is Level.NOTE and "lema-lora[kernels]" in fused_kernels(None).how
    )


@pytest.mark.cuda
def test_a_device_is_told_as_a_whole() -> None:
    found = {finding.name: finding for finding in doctor()}
    assert {"driver", "runtime", "memory 0", "kernels 0"} <= set(found)
    assert found["runtime"].level is Level.OK
    assert found["kernels 0"].level in (Level.OK, Level.NOTE)
    free, total = (found["memory 0"].facts[f"{kind}_bytes"] for kind in ("free", "total"))
    assert isinstance(free, int)
    assert isinstance(total, int)
    assert 0 < free <= total
