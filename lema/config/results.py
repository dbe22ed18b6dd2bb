"""Settings for measuring, for the files that a run keeps, and for reports."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from lema.config.problems import Problem
from lema.config.settings import Refused, Reported, Settings, Silent
from lema.config.types import Count, Location, Name, Reports, RetainedCount

__all__ = ["OF_PLAIN_RUNS", "ResultSettings"]

# What belongs to a run of one stage.
OF_PLAIN_RUNS = (
    *("eval_on_start", "eval_prompts", "eval_prompts_max_new_tokens", "early_stopping_patience"),
    *(
        "early_stopping_threshold",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "max_train_samples", "max_eval_samples"),
    *("neftune_noise_alpha", "label_smoothing_factor"),
)


class ResultSettings(Settings):
    """Evaluation, the best step, checkpoints, reports and what is published, by `transformers`'
    names.
    """

    eval_steps: Silent[Count | None] = None
    """Optimizer steps between evaluations; None: at the end of each epoch."""
    eval_on_start: Silent[bool] = False
    """Evaluate before the first step, too."""
    eval_prompts: Silent[Location | list[Name] | None] = None
    """Prompts that the model continues after each evaluation, printed and written to samples.jsonl:
    texts, or a file as `lema generate --prompts` takes it. Where the rows are chats, a text is a
    message of the user."""
    eval_prompts_max_new_tokens: Silent[Count] = 64
    """Most new tokens per prompt; always the most likely ones."""
    early_stopping_patience: Reported[Count | None] = None
    """Evaluations without improvement after which the run ends; None: it does not end early."""
    early_stopping_threshold: Reported[Annotated[float, Field(ge=0)]] = 0.0
    """An evaluation must be better than the best one by this much to count as an improvement."""
    load_best_model_at_end: Silent[bool] = False
    """Save a checkpoint after each evaluation that is the best so far, and leave that adapter in
    `output_dir`.
    """
    metric_for_best_model: Refused[Name | None] = None
    """The metric to compare: `eval_loss`, `eval_perplexity`, or a metric of the objective; None:
    eval_loss.
    """
    greater_is_better: Refused[bool | None] = None
    """Whether a larger value is better; None: false for a loss or a perplexity, true for other
    metrics.
    """
    stop_when_dead: Silent[bool] = True
    """End a run after 20 steps, one after the other, in which nothing was learnt: with gradients of
    norm 0, the loss of equal probabilities or beyond, having been lower, or a learning rate of 0. A
    warning tells so at once."""
    logging_steps: Silent[Count] = 1
    """Optimizer steps between lines of metrics.jsonl."""
    overwrite_output_dir: Silent[bool] = False
    """Allow a new run to replace an adapter, or the metrics of another run, in `output_dir`, but
    never checkpoints.
    """
    save_total_limit: Silent[RetainedCount | None] = 3
    """How many of the newest checkpoints to keep, at least 2. The best one is kept, too. None:
    all.
    """
    report_to: Silent[Reports] = Field(default_factory=list)
    """Where else to report: "tensorboard", "wandb", ..., by `transformers`' names; "all"
    installed ones; "none".
    """
    run_name: Silent[Name | None] = None
    """Name of the run in those reports."""
    disable_tqdm: Silent[bool] = False
    """Show no progress bar in `LemaTrainer.fit`. `lema train` has its own bar."""
    lora_serving: Silent[Literal["vllm", "sglang"] | None] = None
    """The server that the adapter is for. What its release in docs/serving.md does not take is
    refused before the training begins; None: nothing is asked.
    """
    push_to_hub: Silent[bool] = False
    """Upload adapter, card and tokenizer when the run has ended, with the token of `hf auth
    login` or HF_TOKEN.
    """
    hub_model_id: Silent[Name | None] = None
    """The repository, as org/name; None: your own, with the name of `output_dir`."""
    hub_private_repo: Silent[bool | None] = None
    """Whether a new repository is private; None: the default of your organisation."""

    @property
    def best_by(self) -> tuple[str, bool]:
        """What evaluations are compared by, and whether more of it is better."""
        metric = self.metric_for_best_model or "eval_loss"
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        more = self.greater_is_better
        return name, not name.endswith(("loss", "perplexity")) if more is None else more

    def disagreements(self) -> Iterator[Problem]:
        """Yield what says nothing without another setting."""
        yield from super().disagreements()
        if self.early_stopping_threshold and not self.early_stopping_patience:
            what = "early_stopping_threshold has no effect without early_stopping_patience"
            yield Problem(
                "early_stopping_threshold",
                what,
                "set early_stopping_patience, too, or leave it out",
            )
        for name in ("hub_model_id", "hub_private_repo"):
            if getattr(self, name) is not None and not self.push_to_hub:
                what = f"{name} has no effect without push_to_hub"
                yield Problem(name, what, "set push_to_hub: true, or leave it out")
