"""Which label a position is trained on: that of the next position, or, in some models, its own.

A causal language model predicts the next token, so `transformers` shifts the labels that it gets.
Decoders that were made to follow an encoder expect labels that are already shifted, and compare
each position with its own. The model itself is asked, by running its forward with labels and
without values, and past its layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lema.model.capture import PASSED_THROUGH_THE_MODEL, past_layers

__all__ = ["shifts_labels"]

FEW_TOKENS = 8
SAME_LABELS = frozenset(
    {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous, Tensor.to, Tensor.long}
)


def shifts_labels(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Whether a model's own loss compares a position with the label of the next one; if not, with
    its own. A model that does not compute a cross-entropy of labels alone is taken to shift them,
    as nearly all do. Warns where it does not, because data that are made for those would train the
    model to repeat its input."""

    def observe(run: Callable[..., Any]) -> bool | None:
        labels = torch.ones(2, FEW_TOKENS, dtype=torch.long)
        targets = _Targets(labels)
        with suppress(*PASSED_THROUGH_THE_MODEL), targets:
            run(input_ids=torch.ones_like(labels), labels=labels)
        return targets.unshifted if targets.compared else None

    if not past_layers(model, layers, observe):
        return True
    warnings.warn(
        f"{type(model).__name__} compares a position with its own label and not with the "
        "next one's, "
        "and is trained so here, as by transformers: give labels that are shifted already",
        stacklevel=3,
    )
    return False


class _Targets(TorchFunctionMode):
    """Follows labels as they were given, until a cross-entropy takes them or something else in
    their place.
    """

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        # the tensors are kept, because an `id` is of those that live
        self._same = {id(labels): labels}
        self.compared = self.unshifted = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is cross_entropy:
            self.compared = True
            self.unshifted |= (
                id(keywords["target"] if "target" in keywords else args[1]) in self._same
            )
        output = func(*args, **keywords)
        if func in SAME_LABELS and id(args[0]) in self._same:
            self._same[id(output)] = output
        return output
