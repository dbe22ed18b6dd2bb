"""Casts of weights, as autocast makes them of adapters: kept as what they were made of, and made again."""

from __future__ import annotations

from torch import Tensor, nn

from lema.errors import ModelError

__all__ = ["CastWeight"]

CAST = "ToCopyBackward0"  # what autograd calls it


class CastWeight:
    """A cast of a parameter, or a view of one: the parameter alone is held."""

    __slots__ = ("_dtype", "_first", "_parameter", "_shape", "_stride", "_version")

    def __init__(self, parameter: nn.Parameter, view: Tensor) -> None:
        self._parameter, self._version, self._dtype = parameter, parameter._version, view.dtype
        self._shape, self._stride, self._first = view.shape, view.stride(), view.storage_offset()

    @classmethod
    def of(cls, tensor: Tensor) -> CastWeight | None:
        """Return what stands for `tensor`; None: it is no cast of a parameter."""
        whole = tensor if tensor._base is None else tensor._base
        made_by = whole.grad_fn
        if made_by is None or made_by.name() != CAST:
            return None
        parameter = getattr(made_by.next_functions[0][0], "variable", None)
        if not isinstance(parameter, nn.Parameter) or whole.dtype != tensor.dtype:
            return None
        alike = (whole.shape, whole.stride(), whole.storage_offset()) == (parameter.shape, parameter.stride(), 0)
        return cls(parameter, tensor) if alike and whole.device == parameter.device else None

    def unpack(self) -> Tensor:
        """Make it again.

        Raises:
            ModelError: the parameter was written into since.
        """
        if self._parameter._version != self._version:
            raise ModelError("a parameter was written into between a forward and its backward")
        return self._parameter.detach().to(self._dtype).as_strided(self._shape, self._stride, self._first)
