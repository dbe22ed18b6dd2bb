"""Any accelerator that torch knows: streams copy layers into slots, or the device computes in
host memory itself.
"""

from lema_accelerator.backend import AcceleratorBackend

__all__ = ["AcceleratorBackend"]
