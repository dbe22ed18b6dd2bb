"""Where each text of a batch ends: at a token that ends it, at a string it is to stop at, or at
its length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

__all__ = ["Finish", "Generated", "StopCriteria"]

Finish: TypeAlias = Literal["stop", "stop_string", "length"]
"""Why a text ended: at a token that ends texts, at a requested string, or at the requested
number of tokens.
"""


@dataclass(frozen=True)
class Generated:
    """What was made for one prompt."""

    tokens: tuple[int, ...]  # new ones, the one that ends the text among them, padding not
    finish: Finish


class StopCriteria(StoppingCriteria):
    """Sees after each token which texts of a batch have ended, and remembers the new tokens of each
    (`lengths`) and why it ended (`reasons`). Prompts are `width` tokens wide, padding among them. A
    text ends at one of the tokens `stop_tokens` or at one of `strings`, which are looked for in new
    tokens alone. `on_token` is called after each token with how many texts got one."""

    def __init__(
        self,
        width: int,
        rows: int,
        stop_tokens: Collection[int],
        strings: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        on_token: Callable[[int], object],
    ) -> None:
        self._width = width
        self._stop_tokens = frozenset(stop_tokens)
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._on_token = on_token
        self._open = list(range(rows))
        # No token of a text has less than a byte, so a string that has just ended lies in so many
        # of the last ones.
        self._window = max((len(string.encode()) for string in self._strings), default=0) + 1
        self.lengths = [0] * rows
        self.reasons = list[Finish](["length"] * rows)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002 - as in StoppingCriteria
        """Return which texts have ended, bool `[rows]`, of all tokens so far, `[rows, tokens]`."""
        length = input_ids.shape[1] - self._width
        first = max(self._width, input_ids.shape[1] - self._window) if self._strings else -1
        last = input_ids[:, first:].tolist()  # one look at the device for the batch
        self._on_token(len(self._open))
        for row in tuple(self._open):
            self.lengths[row] = length
            if last[row][-1] in self._stop_tokens:
                self.reasons[row] = "stop"
            elif self._strings and self._stopped(last[row]):
                self.reasons[row] = "stop_string"
            else:
                continue
            self._open.remove(row)
        done = torch.ones(len(input_ids), dtype=torch.bool)
        done[self._open] = False
        return done.to(input_ids.device)

    def _stopped(self, tokens: list[int]) -> bool:
        # Special tokens are written too, because people stop at those of chats.
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in self._strings)
