"""`lema train`: from a config to an adapter on disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from lema.backend.group import first_alone
from lema.backend.trace import NO_TRACE, NoTrace
from lema.config import LemaConfig
from lema.config.printing import line_printer
from lema.config.units import human_bytes
from lema.errors import ConfigError
from lema.train.batch import read_data
from lema.train.model import LemaModel
from lema.train.stop import STOP_FILE, StopOnSignal

__all__ = ["load_data", "train"]

Rows: TypeAlias = Any
"""A `TokenDataset`; for an objective of examples, a `PreferenceDataset`."""


def train(
    config: LemaConfig,
    *,
    resume: bool = False,
    weights_only: bool = False,
    callbacks: Sequence[Any] = (),
    console: Console | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
) -> dict[str, Any]:
    """Train as the config says and save the adapter to `output_dir`; return what `LemaTrainer.fit` returns.

    Args:
        config: with `train_data`.
        resume: go on from the newest checkpoint in `output_dir` that is sound.
        weights_only: with `resume`: of the checkpoint, take adapters, generators and step, and an empty optimizer.
        callbacks: `transformers.TrainerCallback`s.
        console: what to print on; None: standard output.
        trust_remote_code: run code that comes with the model.
        trace: records what is read, uploaded and computed, and when.

    Raises:
        Stopped: SIGINT, SIGTERM or SIGUSR1 came, or a file `stop` into `output_dir`; the last whole step is saved.
        LemaError: of the kind that says what is wrong; its `exit_code` is the command line's.
    """
    shown = console or Console(highlight=False)
    out = line_printer(shown)
    with closing(LemaModel(config, trust_remote_code=trust_remote_code, trace=trace)) as model:
        replicas = model.backend.replicas
        shown.quiet = shown.quiet or not replicas.first
        if replicas.size > 1:
            held = model.backend.parallel.size
            each = "each" if held == 1 else f"each {held} of them"
            out(f"{replicas.num_processes} processes, {each} with its share of every batch")
        train_data, eval_data = load_data(model)
        out("\n".join((f"training data: {train_data.counts}", *train_data.notes)))
        if eval_data is not None:
            out(f"evaluation data: {eval_data.counts}")
        model.initialize_lora()
        if getattr(model.skeleton.config.get_text_config(), "router_aux_loss_coef", None):
            out("the routers' auxiliary loss is left out of the training loss, where TRL adds it by default")
        out(
            f"{model.split.num_layers} layers ({model.allocation.summary()}), "
            f"{human_bytes(model.gbi.nbytes)} of weights; {model.num_adapter_parameters:,} adapter parameters; "
            f"device {model.backend.device}"
        )
        with StopOnSignal(Path(config.output_dir) / STOP_FILE) as stop:
            trainer = model.get_trainer(callbacks=callbacks if replicas.first else ())
            how: dict[str, Any] = {"resume": resume, "weights_only": weights_only, "say": out, "stop": stop.why}
            result = trainer.fit(train_data, eval_data, **how)
            if not result:
                out("nothing was left to train: the run had come to its end")
            if model.backend.parallel.size > 1:  # each has a part of it
                model.save_pretrained(config.output_dir)
            else:
                first_alone(replicas, lambda: model.save_pretrained(config.output_dir))
        out(f"adapter: {config.output_dir}")
    return result


def load_data(model: LemaModel) -> tuple[Rows, Rows | None]:
    """Read the training and evaluation data that the config names; `ConfigError` where it names none, else as
    `read_data`.
    """
    config = model.config
    if not config.train_data:
        raise ConfigError("the config names no training data", where="train_data", how="give a file or a list of files")
    train_data = read_data(config, model.files, config.train_data)
    if config.eval_data:
        return train_data, read_data(config, model.files, config.eval_data)
    if config.eval_split:
        first, second = train_data.split(config.eval_split, config.seed)
        return first, second
    return train_data, None
