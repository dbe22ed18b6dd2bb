"""What `transformers`' callbacks expect of a trainer: its settings in their words, and the reports asked for."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from lema.config import LemaConfig
from lema.errors import ConfigError

__all__ = ["report_callbacks", "training_arguments"]


def report_callbacks(config: LemaConfig) -> list[Any]:
    """Return a callback for each name in `report_to`.

    Raises:
        ConfigError: a name is unknown, or what it needs is not installed.
    """
    try:
        return [kind() for kind in get_reporting_integration_callbacks(_names(config))]
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"this report cannot be made: {error}",
            where=f"report_to: {', '.join(_names(config))}",
            how="install what it needs, or leave it out of report_to",
        ) from error


def training_arguments(config: LemaConfig, *, evaluates: bool) -> TrainingArguments:
    """Return the settings as callbacks read them.

    Raises:
        ConfigError: they do not go together.
    """
    evaluation = "no" if not evaluates else "steps" if config.eval_steps else "epoch"
    try:
        return TrainingArguments(
            output_dir=config.output_dir,
            run_name=config.run_name,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            lr_scheduler_type=config.lr_scheduler_type,
            max_grad_norm=config.max_grad_norm or 0.0,
            num_train_epochs=config.num_train_epochs,
            max_steps=config.max_steps or -1,
            logging_steps=config.logging_steps,
            eval_strategy=evaluation,
            eval_steps=config.eval_steps,
            metric_for_best_model="eval_loss" if evaluates else None,  # what early stopping asks for
            greater_is_better=False,
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 1,
            save_total_limit=config.save_total_limit,
            report_to=_names(config) or "none",
            seed=config.seed,
            use_cpu=True,  # the device is the backend's business; nothing here may open another
            disable_tqdm=True,
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"these settings do not go together: {error}", how="see the message") from error


def _names(config: LemaConfig) -> list[str]:
    return [config.report_to] if isinstance(config.report_to, str) else list(config.report_to)
