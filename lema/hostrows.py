"""Input embeddings that stay in host memory: the device gets the rows of the tokens that are there, and no others.

They are the largest tensor of many models, and a step needs as many of their rows as it has tokens. The rows of a
micro-batch become the embedding's weight while it runs on it, and its tokens their places among them; so the numbers
are those of the whole tensor, whatever else the module does with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend
from lema.errors import ConfigError
from lema.inputs import Inputs

__all__ = ["HostRows", "host_rows_name"]

SETTING = "host_embeddings"


def host_rows_name(model: PreTrainedModel) -> str:
    """Return the name of the input embeddings' weight.

    Raises:
        ConfigError: they cannot stay in host memory.
    """
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, nn.Embedding):
        raise _refusal("the model looks its tokens up in no plain table")
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is embeddings.weight]
    if len(names) != 1:
        raise _refusal("they are the head's weight as well, which is needed whole on the device")
    return names[0]


class HostRows:
    """Looks tokens up in host memory, on behalf of the model's own embeddings.

    Args:
        model: whose input embeddings have their weight on `meta`.
        weight: it, `[vocabulary, hidden]`, in host memory.
        backend: the device.
    """

    def __init__(self, model: PreTrainedModel, weight: Tensor, backend: Backend) -> None:
        self._model, self._weight, self._inputs = model, weight, Inputs(backend)
        module = model.get_input_embeddings()
        assert isinstance(module, nn.Embedding)
        self._module, self._forward = module, module.forward
        self._known: list[tuple[weakref.ref[Tensor], Tensor]] = []  # tokens on the device, and the same in host memory
        self._looked_at = True
        module.forward = self._look_up  # type: ignore[method-assign] # of this module alone: its class stays as it is

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._weight.nbytes

    def check(self) -> None:
        """Make sure that nothing trains the embeddings.

        Raises:
            ConfigError: an adapter, or something beside it, does.
        """
        if self._model.get_input_embeddings() is not self._module or self._module.weight.requires_grad:
            raise _refusal("they are trained, or adapted")

    def remember(self, tokens: Tensor, same: Tensor) -> None:
        """Note what tokens on the device are, for as long as they are there, so that the device need not be asked."""
        self._known = [(ref, one) for ref, one in self._known if ref() is not None]
        self._known.append((weakref.ref(tokens), same))

    @contextmanager
    def nothing_looked_at(self) -> Iterator[None]:
        """Look nothing up for the length of a `with` block: what the embeddings return is thrown away."""
        self._looked_at = False
        try:
            yield
        finally:
            self._looked_at = True

    def _look_up(self, input: Tensor) -> Tensor:
        tokens = input  # torch's name for it
        if not self._module.weight.is_meta:  # somebody gave it values, or pretends to
            return self._forward(tokens)
        if self._looked_at:
            there = next((same for ref, same in self._known if ref() is tokens), None)
            unique, places = torch.unique(tokens.cpu() if there is None else there.cpu(), return_inverse=True)
            (placed,) = self._inputs.place([{"rows": self._weight.index_select(0, unique), "places": places}])
        else:
            row = torch.zeros(1, self._weight.shape[1], dtype=self._weight.dtype, device=tokens.device)
            placed = {"rows": row, "places": torch.zeros_like(tokens)}
        return self._with_weight(placed["rows"], lambda: self._forward(placed["places"]))

    def _with_weight(self, rows: Tensor, run: Callable[[], Any]) -> Tensor:
        absent, padding = self._module._parameters["weight"], self._module.padding_idx
        self._module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        self._module.padding_idx = None  # it says whose row gets no gradient, by a number that means another row here
        try:
            found: Tensor = run()
        finally:
            self._module._parameters["weight"], self._module.padding_idx = absent, padding
        return found


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"the input embeddings cannot stay in host memory: {why}", where=SETTING, how="set it to false")
