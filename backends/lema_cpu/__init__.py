"""The reference backend: host memory is device memory, and a host buffer *is* the slot."""

from lema_cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
