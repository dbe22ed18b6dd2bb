"""The device that a process uses, and the error that says why there is none."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch

from lema.errors import BackendUnavailable
from lema_accelerator.kinds import Kind, kind_of

__all__ = ["choose_device", "identity", "starting_error"]

VISIBLE = re.compile(r"VISIBLE_DEVICES$|^ZE_AFFINITY_MASK$")  # the variables that launchers set


def choose_device(device: str) -> torch.device:
    """Return the device that a setting (`"name"` or `"name:1"`) names, as torch knows it, with its
    number.

    Without a number, it is the device numbered like the process's local rank under `torchrun`, else
    the current device.

    Raises:
        BackendUnavailable: it cannot be used; the message says what is missing.
    """
    kind = kind_of(device.partition(":")[0])
    if not (named := re.fullmatch(r"\w+(?::(\d+))?", device)):
        raise BackendUnavailable(
            f"{device!r} is not a {kind.words} device",
            where=f"device: {device}",
            how=f"write device: {kind.name}, or {kind.name}:1 for the second",
        )
    _check_built(device, kind)
    _check_usable(device, kind)
    count = torch.accelerator.device_count()
    number = _number(device, named[1], count)
    if number >= count:
        raise BackendUnavailable(
            f"there is not a {kind.words} device {number}: this process sees {count}",
            where=f"device: {device}",
            how=f"choose a lower number, start fewer processes, or {kind.hint}",
        )
    return torch.device(kind.type, number)


def _check_built(device: str, kind: Kind) -> None:
    accelerator = torch.accelerator.current_accelerator()
    name = None if accelerator is None else accelerator.type
    if name == "cuda" and torch.version.hip is not None:
        name = "rocm"  # whose devices torch calls by the same name
    if name != kind.name:
        here = "" if name is None else f"write device: {name}, which this torch was built with, or "
        raise BackendUnavailable(
            f"this torch ({torch.__version__}) was built without {kind.words}",
            where=f"device: {device}",
            how=f"{here}{kind.build}, or write device: cpu",
        )


def _check_usable(device: str, kind: Kind) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.accelerator.is_available()
    if not usable:
        reason = (
            str(caught[0].message) if caught else starting_error(torch.get_device_module(kind.type))
        )
        raise BackendUnavailable(
            f"no {kind.words} device can be used: {' '.join(reason.split())}",
            where=f"device: {device}",
            how=f"{kind.hint}; or write device: cpu",
        )


def starting_error(module: Any) -> str:
    """Return the error that torch's module of a device raises when it starts."""
    try:
        getattr(module, "init", lambda: None)()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "torch finds none"


def _number(device: str, number: str | None, count: int) -> int:
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    local_rank = os.environ.get("LOCAL_RANK", "")
    if number is not None:
        if processes != "1":
            raise BackendUnavailable(
                f"{processes} processes of this machine cannot share one device",
                where=f"device: {device}",
                how=f"write device: {device.partition(':')[0]}, which gives each process its own",
            )
        return int(number)
    if processes == "1" or not local_rank.isdigit():
        return torch.accelerator.current_device_index()
    # Some launchers show each process its own device alone. Whether that is so here `identity`
    # tells, later.
    return int(local_rank) % count if count == 1 else int(local_rank)


def identity(device: torch.device) -> str | None:
    """Return what tells a device that this process sees alone from others; None: the process
    sees several.
    """
    if torch.accelerator.device_count() > 1:
        return None
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if asked is None else getattr(asked(device), "uuid", None)
    visible = sorted((name, value) for name, value in os.environ.items() if VISIBLE.search(name))
    return str(visible) if uuid is None else str(uuid)
