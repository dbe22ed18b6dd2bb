"""Settings of how many tokens a step and a micro-batch have, and of rows that are drawn by length or in shares."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lema.config.problems import Problem
from lema.config.settings import OfData, Refused, Settings, Silent
from lema.config.types import Name, StepTokens, Tokens

if TYPE_CHECKING:
    from lema.config.lemaconfig import LemaConfig

__all__ = ["BatchSettings", "disagreements_of_batches"]


class BatchSettings(Settings):
    """Steps and micro-batches in tokens, where rows are of many lengths; and which rows an epoch draws."""

    tokens_per_step: Refused[StepTokens | None] = None
    """Tokens of an optimizer step, such as 16k, in place of `batch_size`: it takes the next rows until one more would
    pass that, and one at least. auto: as many as hide reading behind computing, by the plan."""
    micro_batch_tokens: Silent[Tokens | None] = None
    """Tokens computed at once, in place of `micro_batch_size`: rows times the longest of them, which fairseq calls
    max_tokens; with dropout others draw otherwise. None: of `batch_size` as `micro_batch_size` says, of
    `tokens_per_step` as many as one row may have."""
    group_by_length: Refused[bool] = False
    """Draw rows so that those of a step are about equally long, as `transformers` does: in each 50 steps' rows, drawn
    at random, the longest come first."""
    mixture: OfData[dict[Name, float] | None] = None
    """The shares of the rows that data sets by name have in an epoch; None: each has its rows once."""

    @property
    def counts_tokens(self) -> bool:
        """Whether a micro-batch has so many tokens, not so many rows."""
        return self.tokens_per_step is not None or self.micro_batch_tokens is not None


def disagreements_of_batches(config: "LemaConfig") -> Iterator[Problem]:
    """Yield which of these settings contradict others: two that say how much is computed, for one."""
    in_rows = ("batch_size", "gradient_accumulation_steps", "micro_batch_size")
    for name, rows in (("tokens_per_step", in_rows), ("micro_batch_tokens", in_rows[2:])):
        if getattr(config, name) is None:
            continue
        for one in rows:
            if getattr(config, one) != type(config).model_fields[one].default:
                yield Problem(one, f"{name} says how many tokens, and {one} how many rows", "leave one of them out")
        if config.objective != "sft":
            what = f"objective: {config.objective} counts examples, not tokens"
            yield Problem(name, what, "leave it out, and set batch_size or micro_batch_size")
    if config.group_by_length and not config.shuffle:
        what = "shuffle: false keeps the rows in the order of the data"
        yield Problem("group_by_length", what, "leave one of them out")
    if config.group_by_length and config.packing:
        yield Problem("group_by_length", "packs are about equally long as it is", "leave it out")
    if config.mixture is not None:
        if not isinstance(config.train_data, dict) or config.train_data.keys() != config.mixture.keys():
            what = "it gives shares to the data sets that train_data names, and these are others"
            yield Problem("mixture", what, "write train_data: {one: FILES, other: FILES}")
        if config.objective != "sft":
            yield Problem("mixture", f"objective: {config.objective} takes no shares of data sets", "leave it out")
