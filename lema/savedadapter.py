"""What PEFT writes of an adapter, as tensors by the names in its file, to be compared with what is in the file."""

from __future__ import annotations

from collections.abc import Mapping

from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

__all__ = ["num_trained", "saved_tensors"]


def saved_tensors(model: PeftModel, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the tensors of PEFT's file.

    Args:
        model: with the adapter.
        state: its tensors by their names in it, where these are not its own; None: they are.
    """
    found = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def num_trained(model: PeftModel, whole: Mapping[str, Tensor] | None) -> int:
    """Return how many numbers of a model train; `whole`: the tensors, where processes hold parts of them.

    It is counted from what trains, and not from what PEFT chooses to save: an adapter saved empty is found by it.
    """
    if whole is not None:
        return sum(tensor.numel() for tensor in whole.values())
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
