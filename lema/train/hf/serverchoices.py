"""The experts that a server chose for the rows that a learner learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lema.errors import LemaError
from lema.model.layers.routing import FREE, has_routers
from lema.train.hf.peftmodel import StreamedPeftModel
from lema.train.hf.vllmserver import CHOICES_OPTION

__all__ = ["ServerChoices"]


class ServerChoices:
    """Which experts the server chose for the rows that are being learnt from.

    Args:
        model: that learns.
        note: takes a sentence where a server does not tell.
    """

    def __init__(self, model: StreamedPeftModel, note: Callable[[str], object]) -> None:
        layers = model.opened.split.layers
        self._num_layers = len(layers)
        self._is_mixture = any(has_routers(layer) for layer in layers)
        self._note = note
        # of training and of evaluation: by the tokens of a row
        self._rows: dict[bool, dict[tuple[int, ...], Tensor]] = {True: {}, False: {}}
        self._now = True  # of which rows are being sampled

    def begin(self, *, is_training: bool) -> None:
        """Forget the rows of before: others are sampled."""
        self._now = is_training
        self._rows[is_training] = {}

    def add(self, token_ids: Sequence[int], choices: Tensor | None) -> None:
        """Note what the server told of a row.

        Args:
            token_ids: of the prompt and its completion.
            choices: `[tokens before the last, layers, experts of each]`; None: it does not tell.

        Raises:
            LemaError: it told of other tokens, or of fewer layers.
        """
        if not self._is_mixture:
            return
        if choices is None:
            self._note(
                "the server does not tell which experts it chose, so the learner's routers "
                f"choose themselves; start it with {CHOICES_OPTION}"
            )
            self._is_mixture = False
            return
        if len(choices) != len(token_ids) - 1 or choices.shape[1] < self._num_layers:
            what = (
                f"the server tells choices of experts for {len(choices)} tokens and "
                f"{choices.shape[1]} layers, and the row has {len(token_ids) - 1} tokens before "
                f"its last, and the model {self._num_layers} layers"
            )
            raise LemaError(what, where="replay_choices", how="set it to False")
        self._rows[self._now][tuple(token_ids)] = choices[:, : self._num_layers]

    def of_rows(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Return the choices for rows as the model is given them.

        Args:
            input_ids: `[rows, sequence]`.
            attention_mask: the same; 0 where a row has no token.

        Returns:
            `[rows, sequence, layers, experts of each]`; `FREE` where the server did not tell, as of
            the last token. None: it told nothing of these rows.
        """
        rows = self._rows[True] | self._rows[False]
        if not rows:
            return None
        width = next(iter(rows.values())).shape[-1]
        of_rows = torch.full((*input_ids.shape, self._num_layers, width), FREE, dtype=torch.int32)
        is_token = attention_mask.bool().cpu()
        has_any = False
        for number, ids in enumerate(input_ids.cpu()):
            positions = is_token[number].nonzero().flatten()
            choices = rows.get(tuple(ids[positions].tolist()))
            if choices is not None:
                of_rows[number, positions[:-1]] = choices
                has_any = True
        return of_rows if has_any else None
