"""Which device a process uses, and what is said where there is none: of every kind of
accelerator.
"""

import warnings
from collections.abc import Callable
from platform import node
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lema.backend import BackendOptions, load, torchrun
from lema.backend.group import Alone
from lema.backend.torchrun import refuse_sharing
from lema.errors import BackendUnavailable, ConfigError
from lema_accelerator import AcceleratorBackend
from lema_accelerator.device import choose_device, identity
from lema_accelerator.kinds import KINDS


def machine(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Have torch find two devices of CUDA, or what `changes` says, whatever it was built with."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"):
        patch.delenv(name, raising=False)
    accelerator = changes.pop("accelerator", "cuda")
    patch.setattr(torch.version, "hip", changes.pop("hip", None))
    answers: dict[str, Any] = {
        "current_accelerator": lambda: None if accelerator is None else torch.device(accelerator),
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device_index": lambda: 1,
    }
    module = SimpleNamespace(init=changes.pop("init", lambda: None))
    patch.setattr(torch, "get_device_module", lambda device: module)
    for name, answer in {**answers, **changes}.items():
        patch.setattr(torch.accelerator, name, answer)


def refuse(message: str) -> Callable[[], None]:
    def init() -> None:
        raise RuntimeError(message)

    return init


def warn(message: str) -> Callable[[], bool]:
    def is_available() -> bool:
        warnings.warn(message, stacklevel=1)
        return False

    return is_available


@pytest.mark.parametrize(
    ("device", "changes", "what", "how"),
    [
        (
            "cuda",
            {"accelerator": None},
            r"this torch \(.*\) was built without CUDA",
            "install a CUDA build",
        ),
        (
            "cuda",
            {"hip": "7.0"},
            "was built without CUDA",
            "write device: rocm, which this torch was built with",
        ),
        ("rocm", {}, "was built without ROCm", "write device: cuda"),
        (
            "cuda",
            {
                "is_available": lambda: False,
                "init": refuse("Found no NVIDIA driver\n on your system."),
            },
            "no CUDA device can be used: Found no NVIDIA driver on your system.",
            "nvidia-smi",
        ),
        (
            "cuda",
            {
                "is_available": warn("The NVIDIA driver is too old"),
                "init": refuse("it cannot begin"),
            },
            "no CUDA device can be used: The NVIDIA driver is too old",
            "the driver is new enough",
        ),
        (
            "cuda",
            {"is_available": lambda: False},
            "no CUDA device can be used: torch finds none",
            "CUDA_VISIBLE",
        ),
        (
            "rocm",
            {"hip": "7.0", "is_available": lambda: False},
            "no ROCm device can be used",
            "HIP_VISIBLE_DEVICES",
        ),
        (
            "xpu",
            {"accelerator": "xpu", "is_available": lambda: False},
            "no XPU device can be used",
            "ZE_AFFINITY",
        ),
        ("cuda:2", {}, "there is not a CUDA device 2: this process sees 2", "lower number"),
        ("cuda:first", {}, "'cuda:first' is not a CUDA device", "cuda:1"),
        ("cuda:-1", {}, "'cuda:-1' is not a CUDA device", "cuda:1"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], what: str, how: str
) -> None:
    machine(monkeypatch, **changes)
    with pytest.raises(BackendUnavailable, match=what) as caught:
        choose_device(device)
    assert how in caught.value.how
    assert caught.value.where == f"device: {device}"


@pytest.mark.parametrize("name", [*KINDS, "unheard"])
def test_a_device_that_torch_was_not_built_for_is_refused_with_the_way_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, accelerator=None)
    with pytest.raises(BackendUnavailable, match="was built without") as caught:
        AcceleratorBackend(name)
    assert caught.value.where == f"device: {name}"
    assert "write device: cpu" in caught.value.how
    assert name not in KINDS or KINDS[name].build in caught.value.how


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="this torch has an accelerator"
)
@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "npu", "mps"])
def test_every_kind_is_installed_and_says_what_it_lacks(name: str) -> None:
    with pytest.raises(BackendUnavailable, match="was built without"):
        load(name)


def test_layers_are_not_divided() -> None:
    with pytest.raises(ConfigError, match="the xpu backend gives each process whole layers"):
        AcceleratorBackend("xpu", BackendOptions(tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("name", "kind", "hip"), [("rocm", "cuda", "7.0"), ("cuda", "cuda", None), ("xpu", "xpu", None)]
)
def test_torch_knows_a_device_by_its_own_name(
    name: str, kind: str, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, accelerator=kind, hip=hip)
    assert choose_device(name) == torch.device(kind, 1)
    assert choose_device(f"{name}:0") == torch.device(kind, 0)


@pytest.mark.parametrize(
    ("device", "environment", "count", "number"),
    [
        ("cuda", {}, 2, 1),
        ("cuda:0", {}, 2, 0),
        ("cuda", {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 2, 0),
        ("cuda", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 2, 1),
        ("cuda:0", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 2, 0),
        # a launcher shows each process its own
        (
            "cuda",
            {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"},
            1,
            0,
        ),
    ],
)
def test_each_process_has_its_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    environment: dict[str, str],
    count: int,
    number: int,
) -> None:
    machine(monkeypatch, device_count=lambda: count)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_device(device) == torch.device("cuda", number)


def test_processes_of_one_machine_cannot_share_a_device_or_have_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(
        BackendUnavailable, match="4 processes of this machine cannot share one device"
    ):
        choose_device("cuda:0")
    with pytest.raises(
        BackendUnavailable, match="there is not a CUDA device 3: this process sees 2"
    ):
        choose_device("cuda")


class Processes(Alone):
    """Some processes; the others have said already what they say."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.num_processes = self.local_size = 1 + len(others)

    def everyone(self, value: Any) -> list[Any]:
        return [*self.others, value]


def seen_by(
    monkeypatch: pytest.MonkeyPatch, count: int, uuid: str | None, visible: str
) -> str | None:
    machine(monkeypatch, device_count=lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if uuid is not None:
        module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return identity(torch.device("cuda", 0))


@pytest.mark.parametrize("uuid", [None, "GPU-1"])
def test_processes_that_see_one_device_each_may_not_see_the_same(
    uuid: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = seen_by(monkeypatch, 1, uuid, "0")
    same = seen_by(monkeypatch, 1, uuid, "0")
    other = seen_by(monkeypatch, 1, uuid and "GPU-2", "1")
    refuse_sharing(Alone(), lambda: mine)
    refuse_sharing(Processes((node(), other)), lambda: mine)
    refuse_sharing(Processes(("another machine", same)), lambda: mine)
    with pytest.raises(
        BackendUnavailable, match="2 processes of this machine cannot share one device"
    ):
        refuse_sharing(Processes((node(), same)), lambda: mine)


def test_processes_that_see_several_devices_have_chosen_by_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seen_by(monkeypatch, 2, "GPU-1", "0,1") is None
    refuse_sharing(Processes((node(), None)), lambda: None)


def test_who_is_refused_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    joined = torchrun.Joined(Processes((node(), "GPU-1")), None, lambda: left.append("left"))
    monkeypatch.setattr(torchrun, "join_in_parts", lambda carrier, parts: joined)
    with pytest.raises(BackendUnavailable, match="cannot share one device"):
        torchrun.join("gloo", lambda: "GPU-1")
    assert left == ["left"]
    torchrun.join("gloo", lambda: "GPU-2")
    torchrun.join("gloo")
    assert left == ["left"]


def test_the_library_between_devices_is_the_one_that_torch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setattr(
        torch.distributed.Backend, "default_device_backend_map", known | {"npu": "hccl"}
    )
    libraries = {kind: torchrun.carriers(kind) for kind in ("cuda", "xpu", "npu", "second")}
    assert libraries == {
        "cuda": "cpu:gloo,cuda:nccl",
        "xpu": "cpu:gloo,xpu:xccl",
        "npu": "cpu:gloo,npu:hccl",
        "second": "gloo",
    }
