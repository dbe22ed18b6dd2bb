"""One NVIDIA GPU, or several through `torchrun`: layers arrive on a stream of their own, in slots that events guard."""

from lema_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
