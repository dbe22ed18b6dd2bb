"""Settings of what a run measures on its way, what of it is kept, and where it is told."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from lema.config.problems import Problem
from lema.config.settings import Refused, Said, Settings, Silent
from lema.config.types import Count, Kept, Location, Name, Reports

__all__ = ["OF_PLAIN_RUNS", "ResultSettings"]

# What belongs to a run of one stage.
OF_PLAIN_RUNS = (
    *("eval_on_start", "eval_prompts", "eval_prompts_max_new_tokens", "early_stopping_patience"),
    *("early_stopping_threshold", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "max_train_samples", "max_eval_samples"),
    *("neftune_noise_alpha", "label_smoothing_factor"),
)


class ResultSettings(Settings):
    """Evaluation, the best step, checkpoints, reports and what is published, by `transformers`' names."""

    eval_steps: Silent[Count | None] = None
    """Optimizer steps between evaluations; None: at the end of each epoch."""
    eval_on_start: Silent[bool] = False
    """Evaluate before the first step, too."""
    eval_prompts: Silent[Location | list[Name] | None] = None
    """Prompts that are continued after each evaluation, printed and written to samples.jsonl: texts, or a file of them
    as `lema generate --prompts` takes it."""
    eval_prompts_max_new_tokens: Silent[Count] = 64
    """Tokens to add to each, at most; always the likeliest."""
    early_stopping_patience: Said[Count | None] = None
    """The run ends after so many evaluations that were no better than the best before; None: it does not."""
    early_stopping_threshold: Said[Annotated[float, Field(ge=0)]] = 0.0
    """What an evaluation has to be better by, to count as better."""
    load_best_model_at_end: Silent[bool] = False
    """Save a checkpoint after each evaluation that is the best so far, and leave that adapter in `output_dir`."""
    metric_for_best_model: Refused[Name | None] = None
    """What is compared: `eval_loss`, `eval_perplexity`, or what else an objective measures; None: eval_loss."""
    greater_is_better: Refused[bool | None] = None
    """Whether more of it is better; None: not of a loss or a perplexity."""
    logging_steps: Silent[Count] = 1
    """Optimizer steps between lines of metrics.jsonl."""
    overwrite_output_dir: Silent[bool] = False
    """Let a run that begins replace an adapter, or metrics of another run, in `output_dir`; checkpoints never."""
    save_total_limit: Silent[Kept | None] = None
    """Checkpoints to keep, the newest, 2 or more, and besides them the best; None: all."""
    report_to: Silent[Reports] = Field(default_factory=list)
    """Where else to report: "tensorboard", "wandb", ..., by `transformers`' names; "all" that is installed, "none"."""
    run_name: Silent[Name | None] = None
    """Name of the run in those reports."""
    disable_tqdm: Silent[bool] = False
    """Show no bar in `LemaTrainer.fit`; `lema train` has its own."""
    push_to_hub: Silent[bool] = False
    """Upload adapter, card and tokenizer when the run has ended; the token is that of `hf auth login`, or HF_TOKEN."""
    hub_model_id: Silent[Name | None] = None
    """The repository for that, as org/name; None: your own of the name of `output_dir`."""
    hub_private_repo: Silent[bool | None] = None
    """Whether it is private, if it is made now; None: as your organisation has it."""

    @property
    def best_by(self) -> tuple[str, bool]:
        """What evaluations are compared by, and whether more of it is better."""
        given = self.metric_for_best_model or "eval_loss"
        name = given if given.startswith("eval_") else f"eval_{given}"
        more = self.greater_is_better
        return name, not name.endswith(("loss", "perplexity")) if more is None else more

    def disagreements(self) -> Iterator[Problem]:
        """Yield what says nothing without another setting."""
        yield from super().disagreements()
        if self.early_stopping_threshold and not self.early_stopping_patience:
            what = "early_stopping_threshold says nothing without early_stopping_patience"
            yield Problem("early_stopping_threshold", what, "set that too, or leave it out")
        for name in ("hub_model_id", "hub_private_repo"):
            if getattr(self, name) is not None and not self.push_to_hub:
                what = f"{name} says nothing without push_to_hub"
                yield Problem(name, what, "set push_to_hub: true, or leave it out")
