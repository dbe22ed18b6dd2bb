"""The answers of a model to a chat, one at a time, streamed as they are made."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lema.data.chat.pictures import Picture
from lema.data.files import Row
from lema.data.forms import num_positions
from lema.data.prompts import Prompt, fitting, prompt_ids, prompt_of
from lema.errors import ConfigError, DataError
from lema.plan.inference.capacity import TextPlan
from lema.train.inference.texts import completions, plan_of
from lema.train.model import LemaModel
from lema_tools.chat.conversation import Conversation
from lema_tools.generation.images import in_place, reading_of
from lema_tools.generation.stream import ShownText

__all__ = ["Answer", "Answers"]

MOST_NEW = 512  # tokens of an answer, unless asked for
MESSAGE = "message"  # where its images are from
LEAST_PLANNED = 1024  # tokens; memory is planned for chats of so many at first


@dataclass(frozen=True)
class Answer:
    """An answer, and how many of the oldest messages it was made without."""

    text: str
    left_out: int
    tokens: tuple[int, ...] = ()


class Answers:
    """Makes answers. Keys and values of earlier turns are not kept: each answer reads the whole
    chat again, because the template may write earlier turns in another way by then.

    Args:
        model: answers, with its adapter if it has one.
        options: those of `transformers`' `generate`, and `stop_strings`.
        max_new_tokens: of an answer; None: 512, or half of the model's positions.
        keys_values: where keys and values wait, "device" or "host".
        seed: of sampling; each answer begins with the next number.
    """

    def __init__(
        self,
        model: LemaModel,
        options: Mapping[str, Any],
        *,
        max_new_tokens: int | None,
        keys_values: Any,
        seed: int,
    ) -> None:
        self.model = model
        self._options = dict(options)
        self._keys_values = keys_values
        self._seed = seed
        self._reading = reading_of(model, [Row({}, MESSAGE, 1)])
        self._planned = 0  # tokens of the longest chat that memory is planned for
        text_config = model.skeleton.config.get_text_config()
        self._positions = num_positions(text_config, model.config)
        half = (self._positions or 2 * MOST_NEW) // 2
        self._max_new_tokens = max_new_tokens or min(MOST_NEW, max(1, half))

    def check_system(self, text: str, where: str) -> None:
        """Make sure that chats may begin with a system message.

        Args:
            text: the message.
            where: it was given, for the error.

        Raises:
            ConfigError: the chat template takes no system message, or leaves it out, or with the
                message no other would fit.
        """
        how = "write it into the first message instead"
        asked = [{"role": "user", "content": "a"}]
        messages = [{"role": "system", "content": text}, *asked]
        rows = [Row({"messages": turns}, where, 1) for turns in (messages, asked)]
        try:
            ids = prompt_ids(rows[0], self.model.tokenizer, form="chat")
        except DataError as error:
            what = f"the chat template does not take this system message: {error.what}"
            raise ConfigError(what, where=where, how=how) from error
        if ids == prompt_ids(rows[1], self.model.tokenizer, form="chat"):
            raise ConfigError("the chat template leaves a system message out", where=where, how=how)
        needed = len(ids) + self._max_new_tokens
        if self._positions is not None and needed > self._positions:
            what = (
                f"with {len(ids):,} tokens of the system message and {self._max_new_tokens:,} of "
                f"an answer, no message fits the {self._positions:,} positions of the model"
            )
            raise ConfigError(what, where=where, how="shorten it, or lower --max-new-tokens")

    @property
    def sees(self) -> bool:
        """Whether the model is open for images."""
        return self._reading is not None

    def image(self, path: str) -> str:
        """Make sure that an image can be shown; return its whole path, or its URL.

        Raises:
            ConfigError: there is no path, or the model is open for text alone.
            DataError: the image cannot be used.
        """
        if not path:
            raise ConfigError("there is no path", where="/image", how="write /image PATH")
        if self._reading is None:
            how = "begin the chat without --set modalities=text, for a model that sees images"
            what = "the model was opened for text alone"
            raise ConfigError(what, where="/image", how=how)
        whole = in_place(path)
        self._reading.pictures(Row({}, MESSAGE, 1), [Picture(whole, "/image")])
        return whole

    def answer(
        self,
        conversation: Conversation,
        stopped: threading.Event,
        show: Callable[[str], object],
        *,
        of_base: bool = False,
    ) -> Answer:
        """Answer the last message of a chat.

        Args:
            conversation: ends with a message of the user.
            stopped: ends the answer after the token that is being made, once it is set.
            show: is called with each part of the text as it is made, and a line's end.
            of_base: leave the adapter out.

        Returns:
            The answer, as far as it was made.

        Raises:
            DataError: the message alone is too long for the model, or the template refuses it.
            MemoryLimitError: its keys and values do not fit.
        """
        prompt, left_out = self._prompt(conversation)
        self._plan(prompt.ids)
        shown = ShownText(self.model.tokenizer, self._options.get("stop_strings") or (), show)
        options = {
            **self._options,
            "streamer": shown,
            "stopping_criteria": [lambda *_, **__: _all_ended(stopped)],
        }
        adapter = self.model.lora_manager
        leaving = nullcontext() if adapter is None or not of_base else adapter.disable_adapter()
        number = sum(message["role"] == "user" for message in conversation.turns)
        with leaving:
            ((completion,),) = completions(
                self.model,
                [prompt.ids],
                self._max_new_tokens,
                1,
                options,
                images=[prompt.images],
                keys_values=self._keys_values,
                seed=self._seed + number,
            )
        return Answer(completion.text, left_out, completion.tokens)

    def _prompt(self, conversation: Conversation) -> tuple[Prompt, int]:
        """Return a chat as the model is given it, without its oldest turns where it is too long
        with them, and how many messages were left out."""
        left_out = 0
        while True:
            messages = conversation.messages(left_out)
            row = Row({"messages": messages}, MESSAGE, len(conversation.turns))
            prompt = prompt_of(row, self.model.tokenizer, form="chat", reading=self._reading)
            needed = len(prompt.ids) + self._max_new_tokens
            if self._positions is None or needed <= self._positions:
                return prompt, left_out
            if left_out + 2 >= len(conversation.turns):
                config = self.model.skeleton.config.get_text_config()
                ids = [prompt.ids]
                # which refuses it
                fitting([row], ids, self._max_new_tokens, config, self.model.config)
                raise DataError("the message is too long for the model", where=row.origin)
            left_out += 2

    def _plan(self, ids: Sequence[int]) -> None:
        """Spend memory on chats of this length; for some room to grow where there is room."""
        if len(ids) <= self._planned:
            return
        most = (self._positions or 1 << 30) - self._max_new_tokens
        length = max(LEAST_PLANNED, 1 << (len(ids) - 1).bit_length())
        for tokens in dict.fromkeys((max(len(ids), min(length, most)), len(ids))):
            if self._fits(tokens, last=tokens == len(ids)) is not None:
                self._planned = tokens
                return
        self._planned = len(ids)

    def _fits(self, tokens: int, *, last: bool) -> TextPlan | None:
        """Plan for a chat of so many tokens; None: there is no room, and it is not the `last` to
        be tried."""
        from lema.errors import MemoryLimitError

        try:
            return plan_of(
                self.model,
                [[0] * tokens],
                self._max_new_tokens,
                1,
                self._keys_values,
                choose=True,
            )
        except MemoryLimitError:
            if last:
                raise
            return None


def _all_ended(stopped: threading.Event) -> torch.Tensor:
    return torch.tensor([stopped.is_set()])
