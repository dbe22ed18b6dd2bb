"""The words of answers alone, as tokens, and the token that ends each: how axolotl labels chats.

The words of an answer are the tokens that become others where other words stand in their place. The
chat is rendered up to the answer, once as it is and once with a message of other words, and the two
are compared from both ends. What the template writes around the words, such as an empty thought, is
the same in both and is not trained on. The token that ends a turn is trained on where it comes
within three tokens of the words.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lema.data.chat.template import Template
from lema.data.files import Row
from lema.data.forms import IGNORED, num_alike
from lema.storage.modelfiles import library_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Contents"]

DUMMY = "[[dummy_message]]"  # axolotl's, because words that begin like these lose a token
NEAR = 3  # tokens that a template may write between the words and the end of their turn

Messages = Sequence[dict[str, Any]]


@dataclass
class Contents:
    """Chats of one tokenizer and template, labelled by the contents of their answers.

    Args:
        template: writes the chats.
        eot_tokens: the tokens that end a turn; None: the tokenizer's end-of-sequence token.
    """

    template: Template
    eot_tokens: Sequence[str] | None = None

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.template.tokenizer

    @cached_property
    def _end_ids(self) -> tuple[frozenset[int], ...]:
        """The tokens that end a turn, and the one that ends a sequence; each is looked for."""
        eos = self._tokenizer.eos_token_id
        eos_ids = frozenset(() if eos is None else (int(eos),))
        if self.eot_tokens is None:
            return (eos_ids,)
        ids = [self._ids_of(text) for text in self.eot_tokens if text in self.template.text]
        return frozenset(tokens[0] for tokens in ids if len(tokens) == 1), eos_ids

    def tokens(
        self, messages: Messages, answers: Collection[int], row: Row
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat and their labels.

        Args:
            messages: the chat.
            answers: the numbers of the messages to train on.
            row: the chat's row, for errors.

        Returns:
            Its token ids, and as many labels, -100 where nothing is trained on.

        Raises:
            DataError: the template refuses the chat.
        """
        ids = self._rendered(messages, row)
        labels = [IGNORED] * len(ids)
        for number in answers:
            span = self._span(messages, number, row)
            if span is None:
                continue
            start, stop = span
            labels[start:stop] = ids[start:stop]
            for stop_ids in self._end_ids:
                end = next((at for at in range(stop, len(ids)) if ids[at] in stop_ids), None)
                if end is not None and end - stop <= NEAR:
                    labels[end] = ids[end]
        return ids, labels

    def _span(self, messages: Messages, number: int, row: Row) -> tuple[int, int] | None:
        """Return where the words of a message begin and end; None: they are no tokens of their
        own.
        """
        message = messages[number]
        before = messages[:number]
        dummy = {"role": message["role"], "content": DUMMY}
        ids = self._rendered([*before, message], row)
        dummy_ids = self._rendered([*before, dummy], row)
        shorter = min(len(ids), len(dummy_ids))
        start = num_alike(ids, dummy_ids)
        behind = num_alike(ids[::-1], dummy_ids[::-1])
        stop = len(ids) - behind
        return None if start == shorter or behind == shorter or stop <= start else (start, stop)

    def _rendered(self, messages: Messages, row: Row) -> list[int]:
        return self._ids_of(self.template.render(list(messages), row))

    def _ids_of(self, text: str) -> list[int]:
        with library_errors(self._tokenizer.name_or_path):
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
