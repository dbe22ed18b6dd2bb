"""PEFT's files of an adapter, read by the names of the model's parameters."""

from __future__ import annotations

import re
from typing import Any

from peft.utils import load_peft_weights
from torch import Tensor

__all__ = ["read_adapter"]

FACTOR = re.compile(r"\.(lora_(?:embedding_)?[AB])(?=\.|$)")
MAGNITUDE = re.compile(r"\.lora_magnitude_vector$")


def read_adapter(model_id: str, adapter_name: str, **kwargs: Any) -> dict[str, Tensor]:
    """Return the whole parameters of a PEFT directory or hub id, on the host, by their names in
    a model.
    """
    state = load_peft_weights(model_id, device="cpu", **kwargs)
    renamed = {
        MAGNITUDE.sub(rf"\g<0>.{adapter_name}.weight", name): tensor
        for name, tensor in state.items()
    }
    return {FACTOR.sub(rf".\1.{adapter_name}", name): tensor for name, tensor in renamed.items()}
