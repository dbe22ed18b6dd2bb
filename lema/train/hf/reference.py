"""The reference of TRL's `GRPOTrainer` without a pass of its own.

TRL takes all completions through the model once more, with the adapter that training began with,
and keeps their log-probabilities for the loss. Here they go through each layer together with those
that train, under the same lease, when the loss is formed: no weight is read for them. What comes
after the layers is TRL's own code, which is called a second time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lema.model.layers.adapters import computing_with
from lema.train.hf.peftmodel import StreamedPeftModel
from lema.train.reference import REFERENCE

if TYPE_CHECKING:

    class Below:
        """TRL's trainer, which may not be installed."""

        accelerator: Any
        beta: float
        model: Any
        ref_model: Any

        def __init__(self, *args: object, **kwargs: object) -> None: ...
else:
    Below = object

__all__ = ["TRAINER", "ReferenceMixin"]

TRAINER = "GRPOTrainer"  # whose loss, and nothing before it, looks at the reference
LOGPS = "ref_per_token_logps"  # TRL's name for them, in what a loss is computed of


class ReferenceMixin(Below):
    """Has the KL term of TRL's `GRPOTrainer` cost no pass over the weights of a streamed model."""

    _compared: dict[str, Any] | None = None  # what a loss is being computed of

    def _generate_and_score_completions(self, inputs: object) -> dict[str, Any]:
        trainer: Any = super()
        if not self._has_reference() or not self._streamed().stack.takes_reference:
            completions: dict[str, Any] = trainer._generate_and_score_completions(inputs)
            return completions
        beta = self.beta
        self.beta = 0.0  # so that TRL leaves out its pass
        try:
            completions = trainer._generate_and_score_completions(inputs)
        finally:
            self.beta = beta
        return completions

    def _compute_loss(
        self, model: object, inputs: dict[str, Any], *args: object, **kwargs: object
    ) -> object:
        # Trainers for preferences have a method of this name, with more arguments.
        self._compared = inputs if self._has_reference() and LOGPS not in inputs else None
        try:
            trainer: Any = super()
            loss: object = trainer._compute_loss(model, inputs, *args, **kwargs)
            return loss
        finally:
            self._compared = None

    def _get_per_token_logps_and_entropies(
        self,
        model: object,
        input_ids: Tensor,
        attention_mask: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Any, ...]:
        trainer: Any = super()
        inputs = self._compared
        if inputs is None:
            numbers: tuple[Any, ...] = trainer._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, *args, **kwargs
            )
            return numbers
        self._compared = None
        streamed = self._streamed()
        adapter = REFERENCE if REFERENCE in streamed.peft_config else None  # as TRL has it
        with streamed.stack.compared(partial(computing_with, adapter)) as continued:
            numbers = trainer._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, *args, **kwargs
            )
        kwargs |= {"compute_entropy": False, "compute_aux_loss": False}
        with continued:
            of_reference = trainer._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, *args, **kwargs
            )
        inputs[LOGPS] = of_reference[0]
        return numbers

    def _has_reference(self) -> bool:
        """Whether a loss compares with a reference that is in the model, and is the first to do
        so. In TRL's other trainers, rewards are computed of it.
        """
        is_first = any(base.__name__ == TRAINER for base in type(self).__mro__)
        return is_first and self.beta != 0.0 and self.ref_model is None

    def _streamed(self) -> StreamedPeftModel:
        model: StreamedPeftModel = self.accelerator.unwrap_model(self.model)
        return model
