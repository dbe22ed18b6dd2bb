"""The backend of `device: second`: that of every accelerator which torch knows, with nothing of
its own.
"""

from __future__ import annotations

from typing import ClassVar

import seconddevice
from lema.backend import BackendOptions
from lema_accelerator import AcceleratorBackend


class SecondBackend(AcceleratorBackend):
    """The second device, which begins to exist when this is opened for the first time."""

    proven: ClassVar = {seconddevice.NAME: "a device of the tests, computed by the CPU"}

    def __init__(
        self,
        device: str = seconddevice.NAME,
        options: BackendOptions | None = None,
        *,
        unified: bool | None = None,
    ) -> None:
        seconddevice.install()
        super().__init__(device, options, unified=unified)
