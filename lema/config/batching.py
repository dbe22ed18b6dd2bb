"""Settings of how many tokens a step and a micro-batch have, and of rows that are drawn by
length or in shares.
"""

from collections.abc import Iterator

from lema.config.data.sets import DataFiles
from lema.config.problems import Problem
from lema.config.settings import OfData, Refused, Settings, Silent
from lema.config.types import Name, Packing, StepTokens, Tokens

__all__ = ["BatchSettings", "disagreements_of_batches"]


class BatchSettings(Settings):
    """Settings of steps and micro-batches in tokens, and of the rows that an epoch draws."""

    tokens_per_step: Refused[StepTokens | None] = None
    """Tokens of an optimizer step, such as 16k, instead of `batch_size`. A step takes rows until
    one more would exceed this number, and at least one row. auto: the number from which reading is
    hidden behind computing, by the plan."""
    micro_batch_tokens: Silent[Tokens | None] = None
    """Tokens that are computed at once, instead of `micro_batch_size`: the number of rows times the
    longest row, which fairseq calls max_tokens. It changes results as `micro_batch_size` does.
    None: `micro_batch_size` decides with `batch_size`, and with `tokens_per_step` it is the length
    of the longest allowed row."""
    group_by_length: Refused[bool] = False
    """Draw rows of similar length for a step, as `transformers` does: rows are drawn in groups of
    50 steps, and each group is sorted, the longest first."""
    mixture: OfData[dict[Name, float] | None] = None
    """The share of each named data set in the rows of an epoch; None: every row of every data
    set occurs once.
    """

    @property
    def counts_tokens(self) -> bool:
        """Whether a micro-batch is limited by tokens instead of rows."""
        return self.tokens_per_step is not None or self.micro_batch_tokens is not None


def disagreements_of_batches(
    config: BatchSettings,
    *,
    objective: str,
    shuffle: bool | str,
    packing: Packing,
    train_data: DataFiles | None,
) -> Iterator[Problem]:
    """Yield settings that contradict each other, such as two that limit how much is computed.

    Args:
        config: all settings of the run, those that count rows among them.
        objective: what the run trains on.
        shuffle: whether, or as whom, rows are drawn in a random order.
        packing: whether rows are joined into packs.
        train_data: where the rows are.

    Returns:
        The problems.
    """
    in_rows = ("batch_size", "gradient_accumulation_steps", "micro_batch_size")
    for name, rows in (("tokens_per_step", in_rows), ("micro_batch_tokens", in_rows[2:])):
        if getattr(config, name) is None:
            continue
        for setting in rows:
            if getattr(config, setting) != type(config).model_fields[setting].default:
                yield Problem(
                    setting,
                    f"{name} counts tokens, and {setting} counts rows",
                    "leave one of them out",
                )
        if objective != "sft":
            what = f"objective: {objective} counts examples, not tokens"
            yield Problem(name, what, "leave it out, and set batch_size or micro_batch_size")
    if config.group_by_length and not shuffle:
        what = "shuffle: false keeps the rows in the order of the data"
        yield Problem("group_by_length", what, "leave one of them out")
    if isinstance(shuffle, str):
        for name in ("group_by_length", "tokens_per_step", "micro_batch_tokens"):
            if getattr(config, name):
                what = f"shuffle: {shuffle} takes as many rows for each batch, in its own order"
                yield Problem(name, what, "leave one of them out")
    if config.group_by_length and packing:
        yield Problem("group_by_length", "packs have about the same length already", "leave it out")
    if config.mixture is not None:
        names = train_data.keys() if isinstance(train_data, dict) else None
        if names != config.mixture.keys():
            what = "its names are not those of the data sets in train_data"
            yield Problem("mixture", what, "write train_data: {one: FILES, other: FILES}")
        if objective != "sft":
            yield Problem(
                "mixture", f"objective: {objective} does not allow a mixture", "leave it out"
            )
