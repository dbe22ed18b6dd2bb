"""How products in fp32 round: as fp32, or by tensor cores that keep 10 bits of each factor (TF32).

torch keeps this for the whole process, and lets convolutions round as TF32 unless it is told not to. So both are set as
long as a model is open, and put back when it is closed.
"""

from __future__ import annotations

import torch

__all__ = ["ProductPrecision"]

EXACT, TENSOR_CORES = "highest", "high"  # torch's words


class ProductPrecision:
    """The precision of fp32 products from now on, until it is put back: `tf32`, on devices that do that, or fp32."""

    def __init__(self, tf32: bool) -> None:
        self._before: tuple[str, bool] | None = _current()
        self._own = (TENSOR_CORES if tf32 else EXACT, tf32)
        _set(*self._own)

    def put_back(self) -> None:
        """Let products round as before, once; what somebody else has set meanwhile stays."""
        if self._before is not None and _current() == self._own:
            _set(*self._before)
        self._before = None


def _current() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def _set(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
