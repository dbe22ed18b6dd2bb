"""The CUDA device that a process uses, and the error that says why there is none."""

from __future__ import annotations

import os
import re
import warnings

import torch

from lema.errors import BackendUnavailable

__all__ = ["choose_device"]


def choose_device(device: str) -> torch.device:
    """Return the device that `"cuda"` or `"cuda:N"` names, with its number.

    Without a number, it is the device numbered like the process's local rank under `torchrun`, else the current device.

    Raises:
        BackendUnavailable: it cannot be used; the message says what is missing.
    """
    if not (named := re.fullmatch(r"cuda(?::(\d+))?", device)):
        raise BackendUnavailable(
            f"{device!r} is not a CUDA device",
            where=f"device: {device}",
            how="write device: cuda, or cuda:1 for the second",
        )
    _check_usable(device)
    number = _number(device, named[1])
    if number >= (count := torch.cuda.device_count()):
        raise BackendUnavailable(
            f"there is not a CUDA device {number}: this process sees {count}",
            where=_where(device),
            how="choose a lower number, start fewer processes, or check CUDA_VISIBLE_DEVICES",
        )
    _check_kernels(device, number)
    return torch.device("cuda", number)


def _check_usable(device: str) -> None:
    if not torch.backends.cuda.is_built():
        raise BackendUnavailable(
            f"this torch ({torch.__version__}) was built without CUDA",
            where=_where(device),
            how="install a CUDA build of torch (its version ends in +cu and CUDA's version; "
            "https://pytorch.org/get-started/locally has the command), or write device: cpu",
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        raise BackendUnavailable(
            f"no CUDA device can be used: {_reason([str(one.message) for one in said])}",
            where=_where(device),
            how="check that `nvidia-smi` lists a device, that the driver is new enough for CUDA "
            f"{torch.version.cuda}, and CUDA_VISIBLE_DEVICES; or write device: cpu",
        )


def _reason(said: list[str]) -> str:
    """Return the text of torch's warning, or else of the error that torch raises when it starts."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = [*said, str(error)]
    return " ".join(said[0].split()) if said else "torch finds none"


def _number(device: str, given: str | None) -> int:
    processes, place = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("LOCAL_RANK", "")
    if given is not None:
        if processes != "1":
            raise BackendUnavailable(
                f"{processes} processes of this machine cannot share one device",
                where=_where(device),
                how="write device: cuda, which gives each process its own",
            )
        return int(given)
    return int(place) if processes != "1" and place.isdigit() else torch.cuda.current_device()


def _check_kernels(device: str, number: int) -> None:
    """Refuse a device older than any that this torch has kernels for."""
    known = [divmod(int(found[1]), 10) for name in torch.cuda.get_arch_list() if (found := re.match(r"sm_(\d+)", name))]
    has = torch.cuda.get_device_capability(number)
    if known and has < min(known):
        least = min(known)
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name(number)} has compute capability {has[0]}.{has[1]}, and this torch "
            f"({torch.__version__}) has kernels from {least[0]}.{least[1]} on",
            where=_where(device),
            how="install a torch that was built for it (an older CUDA's), or use another device",
        )


def _where(device: str) -> str:
    return f"device: {device}"
