"""One NVIDIA GPU, or several with `torchrun`: a separate stream copies layers into slots, and
events guard these.
"""

from lema_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
