"""A device that is not the CPU, made on the CPU: `device.cpp`, compiled once, and its module for
torch.

`install` makes torch know the device `second` for the rest of the process, where it then is torch's
accelerator. So tests that use it run in processes of their own: those marked `seconddevice`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "second"
# Of the backend that LEMA finds by `device: second`, for this process; for others it goes to
# PYTHONPATH, with the folder above this one.
INSTALLED = Path(__file__).with_name("installed")
SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).parents[3] / "build" / "seconddevice"  # which git ignores


class NoCompiler(RuntimeError):
    """There is no C++ compiler on this machine."""


def build() -> Path:
    """Return the compiled extension, for this torch and source; compile it if it is not there,
    which takes half a minute. Several processes may call this at once.

    Raises:
        NoCompiler: there is no compiler.
    """
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoCompiler("the second device needs a C++ compiler: install g++, or name one in CXX")
    version = f"{torch.__version__} {sys.version_info[:2]} {compiler}"
    digest = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    library = BUILD / f"device-{digest}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            unfinished = library.with_suffix(f".{os.getpid()}")
            command = [
                compiler,
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                "-w",
                str(SOURCE),
                "-o",
                str(unfinished),
            ]
            command += [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            command += [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the second device does not compile:\n{done.stderr[-4000:]}")
            unfinished.rename(library)
    return library


def built_or_skipped() -> Path:
    """Return the compiled extension, for a test. Where nothing compiles it the test is skipped, but
    not in continuous integration."""
    import pytest

    try:
        return build()
    except NoCompiler as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@cache
def install() -> SecondDevice:
    """Make torch know the device, and return what tests set and ask of it."""
    import torch

    library = build()
    sys.path.append(str(INSTALLED))
    torch.ops.load_library(str(library))
    second = SecondDevice(ctypes.CDLL(str(library)))
    torch.utils.rename_privateuse1_backend(NAME)
    second.begin()
    torch._register_device_module(NAME, _module(second))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    return second


class SecondDevice:
    """What tests set and ask of the device; the counts are of the process.

    Args:
        library: the compiled extension.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("used", "peak", "limit"):
            getattr(library, f"second_{name}").restype = ctypes.c_size_t
        for name in ("kernels", "host_waits", "host_synchronizations", "unaligned_products"):
            getattr(library, f"second_{name}").restype = ctypes.c_long
        library.second_waits.restype = ctypes.c_char_p

    def begin(self) -> None:
        """Register the allocator and the hooks; once."""
        self._library.second_begin()

    @property
    def used(self) -> int:
        """Bytes that tensors on the device have."""
        return int(self._library.second_used())

    @property
    def peak(self) -> int:
        """The most bytes that tensors had since `reset_peak`."""
        return int(self._library.second_peak())

    @property
    def kernels(self) -> int:
        """How many kernels have run."""
        return int(self._library.second_kernels())

    @property
    def host_waits(self) -> int:
        """How often the host waited for the device, in copies and in kernels whose results it
        needs.
        """
        return int(self._library.second_host_waits())

    @property
    def host_synchronizations(self) -> int:
        """How often a thread waited for an event that had not happened, a stream, or the device."""
        return int(self._library.second_host_synchronizations())

    @property
    def unaligned_products(self) -> int:
        """How many matrices of products began at an address that 16 does not divide."""
        return int(self._library.second_unaligned_products())

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory, so that copies from and to it are late."""
        self._library.second_register(ctypes.c_size_t(address), ctypes.c_size_t(nbytes))

    def unregister(self, address: int) -> None:
        """Unlock it. A copy that is still under way with it is told as an error by the next
        kernel.
        """
        self._library.second_unregister(ctypes.c_size_t(address))

    def waits(self) -> dict[str, int]:
        """Return how often the host waited, by what for."""
        text = self._library.second_waits().decode()
        return {
            name: int(count)
            for name, count in (entry.split("=") for entry in text.split(";") if entry)
        }

    def forget_waits(self) -> None:
        """Count from zero."""
        self._library.second_forget_waits()

    def reset_peak(self) -> None:
        """Let the peak be what is used now."""
        self._library.second_reset_peak()

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """Let the device have so many bytes."""
        before = int(self._library.second_limit())
        self._library.second_set_limit(ctypes.c_size_t(nbytes))
        try:
            yield
        finally:
            self._library.second_set_limit(ctypes.c_size_t(before))

    @contextmanager
    def course(self, seed: int | None = None, *, order_checked: bool = True) -> Iterator[None]:
        """Let streams run when chance will have it, by `seed`; None: as late as can be, as outside
        of this context. Where the order is not checked, work that does not wait for what it depends
        on takes wrong numbers."""
        self._library.second_set_course(ctypes.c_long(-1 if seed is None else seed))
        self._library.second_check_order(order_checked)
        try:
            yield
        finally:
            self._library.second_set_course(ctypes.c_long(-1))
            self._library.second_check_order(True)


class _Runtime:
    """What a driver of locked memory calls of CUDA's runtime library, by its names."""

    def __init__(self, second: SecondDevice) -> None:
        self._second = second

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._second.register(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._second.unregister(address)
        return 0


def _module(second: SecondDevice) -> ModuleType:
    """Return what torch looks for in `torch.second`."""
    import torch

    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # kernels draw from the CPU's generator
    module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.cudart = lambda: _Runtime(second)
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.memory_allocated = lambda device=None: second.used
    module.max_memory_allocated = lambda device=None: second.peak
    module.reset_peak_memory_stats = lambda device=None: second.reset_peak()
    module.empty_cache = lambda: None
    return module
