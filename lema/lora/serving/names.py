"""What published files call the modules of a model that have a matrix of their own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading

from lema.lora.merge import OWN, WRAPPED
from lema.lora.serving.experts import WEIGHT

__all__ = ["published_modules"]


def published_modules(model: PreTrainedModel) -> dict[str, str]:
    """Return what published files call each module with a matrix of its own, by its name in the
    model; a module whose matrix they have in another form is left out.

    Args:
        model: with or without adapters; its weights may be on `meta`.
    """
    weights = {
        WRAPPED.sub("", name): torch.empty_like(parameter, device="meta")
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.endswith(WEIGHT) and parameter.ndim == 2 and not OWN.search(name)
    }
    names_by_id = {id(tensor): name for name, tensor in weights.items()}
    published = dict[str, str]()
    for name, tensor in loading.revert_weight_conversion(model, dict(weights)).items():
        if (model_name := names_by_id.get(id(tensor))) is not None and name.endswith(WEIGHT):
            published[model_name.removesuffix(WEIGHT)] = name.removesuffix(WEIGHT)
    return published
