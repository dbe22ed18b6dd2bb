"""`lema train`: from a config to an adapter on disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from lema.config import LemaConfig
from lema.data import TokenDataset, longest_row, needs_tokenizer, prepare_data
from lema.data.mixture import Source
from lema.data.packed import PackedTokens
from lema.data.sampling import Style
from lema.errors import ConfigError, Stopped
from lema.metrics import human_bytes
from lema.model import LemaModel
from lema.phasefile import PhaseFile
from lema.phases import run_phases
from lema.replicate import first_alone
from lema.stop import StopOnSignal
from lema.trace import NO_TRACE, NoTrace

__all__ = ["load_data", "read_data", "train", "train_phases"]


def train(
    config: LemaConfig,
    *,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    console: Console | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
) -> dict[str, Any]:
    """Train as the config says and save the adapter to `output_dir`.

    Args:
        config: with `train_data`.
        resume: go on from the newest checkpoint in `output_dir`.
        callbacks: `transformers.TrainerCallback`s.
        console: what to print on; None: standard output.
        trust_remote_code: run code that comes with the model.
        trace: records what is read, uploaded and computed, and when.

    Returns:
        What `LemaTrainer.fit` returns.

    Raises:
        Stopped: SIGINT or SIGTERM came; a checkpoint of the last step was saved.
        LemaError: of the kind that says what is wrong; its `exit_code` is the command line's.
    """
    shown = console or Console(highlight=False)

    def out(line: str) -> None:  # one line is one record, whatever the terminal's width, and a path may hold brackets
        shown.print(line, soft_wrap=True, markup=False, emoji=False)

    with closing(LemaModel(config, trust_remote_code=trust_remote_code, trace=trace)) as model:
        replicas = model.backend.replicas
        shown.quiet = shown.quiet or replicas.rank > 0
        if replicas.size > 1:
            out(f"{replicas.size} processes, each with its share of every batch")
        train_data, eval_data = load_data(model)
        out(f"training data: {train_data.counts}")
        if eval_data is not None:
            out(f"evaluation data: {eval_data.counts}")
        model.initialize_lora()
        trained = sum(parameter.numel() for parameter in model.get_trainable_parameters())
        out(
            f"{model.split.num_layers} layers ({model.allocation.summary()}), "
            f"{human_bytes(model.gbi.nbytes)} of weights; {trained:,} adapter parameters"
        )
        with StopOnSignal() as stop:
            trainer = model.get_trainer(callbacks=[*(() if replicas.rank else callbacks), stop])
            result = trainer.fit(train_data, eval_data, resume=resume)
        if (stopped := stop.agreed(replicas)) is not None:
            raise Stopped(
                f"stopped by {stopped[0]} after step {stopped[1]}",
                where=str(trainer.checkpoints()[-1]),
                how="go on from there with --resume",
            )
        if not result:
            out("nothing was left to train: the run had come to its end")
        first_alone(replicas, lambda: model.save_pretrained(config.output_dir))
        out(f"adapter: {config.output_dir}")
    return result


def train_phases(file: PhaseFile, *, resume: bool = False, console: Console | None = None) -> Path:
    """Train as a file of phases says; return the directory that the last phase ends with.

    Args:
        file: what it says.
        resume: go on where an earlier run in `output_dir` stopped.
        console: what to print on; None: standard output.

    Raises:
        Stopped: SIGINT or SIGTERM came; a checkpoint of the last step was written.
        LemaError: of the kind that says what is wrong.
    """
    shown, plan = console or Console(highlight=False), file.plan
    used = {one.full_name: one.style for phase in plan.phases for one in phase.mixture}
    with closing(LemaModel(LemaConfig(**{**file.config.to_dict(), "max_length": plan.block_size}))) as model:

        def rows(files: dict[str, Any], split: str) -> dict[str, Source]:
            found: dict[str, Source] = {}
            for name in used.keys() & files.keys():
                if used[name] is Style.PMD:
                    vocabulary = getattr(model.skeleton.config, "vocab_size", None)
                    found[name] = PackedTokens(Path(files[name]) / f"{split}.bin", plan.block_size, vocabulary)
                else:
                    found[name] = read_data(model, files[name])
                    shown.print(f"{name}: {found[name].counts}", soft_wrap=True, markup=False)  # type: ignore[attr-defined]
            return found

        sources = rows(file.datasets, "train")
        held_out = rows(file.held_out, "val") or None
    for index, boundary in enumerate(plan.boundaries()):
        steps = boundary.stop_step - boundary.first_step
        rates = [plan.learning_rate(index, step) for step in (0, steps - 1)]
        shown.print(
            f"{boundary.name}: {plan.phases[index].trains}, steps {boundary.first_step + 1:,} to "
            f"{boundary.stop_step:,}, {boundary.stop_token - boundary.first_token:,} tokens, learning rate "
            f"{rates[0]:.3g} at its first step, {rates[1]:.3g} at its last",
            soft_wrap=True,
            markup=False,
        )
    for warning in plan.warnings():
        shown.print(f"note: {warning}", soft_wrap=True, markup=False)

    def told(row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            shown.print(f"{row['phase']}: loss on what was held out {row['eval_loss']:.4f}", markup=False)
        elif row["step"] % file.config.logging_steps == 0:
            shown.print(f"step {row['step']} ({row['phase']}): loss {row['loss']:.4f}", markup=False)

    with StopOnSignal() as stop:
        end = run_phases(
            file.config,
            plan,
            sources,
            held_out=held_out,
            resume=resume,
            on_step=told,
            stop=lambda: None if stop.received is None else stop.received.name,
        )
    shown.print(f"the last phase ended in {end}", soft_wrap=True, markup=False)
    return end


def load_data(model: LemaModel) -> tuple[TokenDataset, TokenDataset | None]:
    """Read the training and evaluation data the model's config names.

    Raises:
        ConfigError: the config names no training data, or rows longer than the model's positions.
        DataError: the data is missing or malformed.
    """
    config = model.config
    if not config.train_data:
        raise ConfigError("the config names no training data", where="train_data", how="give a file or a list of files")
    train_data = read_data(model, config.train_data)
    if config.eval_data:
        return train_data, read_data(model, config.eval_data)
    if config.eval_split:
        return train_data.split(config.eval_split, config.seed)
    return train_data, None


def read_data(model: LemaModel, paths: str | list[str]) -> TokenDataset:
    """Read and tokenise data files with the model's tokenizer and the config's limits.

    Raises:
        ConfigError: `max_length` is more than the model's positions.
        DataError: the data is missing or malformed.
    """
    config = model.config
    return prepare_data(
        paths,
        model.tokenizer if needs_tokenizer(paths) else None,
        max_length=longest_row(config.max_length, getattr(model.skeleton.config, "max_position_embeddings", None)),
        overlong=config.overlong,
        vocab_size=getattr(model.skeleton.config, "vocab_size", None),
    )
