"""`lema train`: from a config to an adapter on disk."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from lema.backend.contextgroup import check_dividing
from lema.backend.trace import NO_TRACE, NoTrace
from lema.compat import untested
from lema.config import LemaConfig
from lema.config.objective import has_reference
from lema.config.printing import line_printer
from lema.config.units import human_bytes, human_count, human_duration
from lema.data.dataset import TokenDataset, first_rows
from lema.data.preference import PreferenceDataset
from lema.data.row_forms import prompt_form_of
from lema.errors import ConfigError
from lema.model.files import ModelFiles, read_data, training_rows
from lema.plan.plan import brief, verdict_of
from lema.plan.planner import Planner, timed
from lema.train.checkpoint.format import checkpoints
from lema.train.checkpoint.resume import adapter_to_begin, as_begun
from lema.train.events import NotePlan
from lema.train.inputs import check_output_dir
from lema.train.model import LemaModel
from lema.train.plain.run import check_new
from lema.train.stop import STOP_FILE, StopOnSignal

__all__ = ["load_data", "train"]

Dataset: TypeAlias = TokenDataset | PreferenceDataset
"""The rows of a run; for an objective of examples, those."""


def train(
    config: LemaConfig,
    *,
    resume: bool = False,
    weights_only: bool = False,
    callbacks: Sequence[Any] = (),
    console: Console | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
    show: Callable[[Planner, Dataset], None] | None = None,
) -> dict[str, Any]:
    """Train with a config, save the adapter to `output_dir`, and return what the run has come to.

    Args:
        config: the settings of the run, with `train_data`.
        resume: continue from the newest valid checkpoint in `output_dir`.
        weights_only: with `resume`: take adapters, generators and step from the checkpoint, and an
            empty optimizer.
        callbacks: `transformers.TrainerCallback`s.
        console: the console to print to; None: standard output.
        trust_remote_code: run the model's own code.
        trace: records every read, upload and computation with its time.
        show: is called with the planner and the data of the run, to show the whole plan instead of
            one sentence.

    Returns:
        The result of `LemaTrainer.fit`: `train_loss`, `train_runtime` in seconds, and the others.

    Raises:
        MemoryLimitError: the run does not fit. It is raised before data and layers are read.
        Stopped: after SIGINT, SIGTERM, SIGUSR1 or a file `stop` in `output_dir`, when the last
            whole step is saved.
        LemaError: anything else; its `exit_code` is that of the command line.

    Example:
        ```python
        from lema import LemaConfig
        from lema.train import train

        result = train(LemaConfig.from_yaml("run.yaml"), resume=True)
        print(result["train_loss"])
        ```
    """
    shown = console or Console(highlight=False)
    out = line_printer(shown)
    saved = checkpoints(Path(config.output_dir)) if resume else []
    check_output_dir(config)
    if not resume:
        check_new(config)  # now, because tokenising takes minutes
    setting_names = sorted(config.model_fields_set)
    config = as_begun(config, saved[-1]) if saved else config
    adapter = adapter_to_begin(config, saved, weights_only=weights_only)
    files = ModelFiles(config, trust_remote_code=trust_remote_code, adapter=adapter)
    with closing(
        LemaModel(config, files=files, trust_remote_code=trust_remote_code, trace=trace)
    ) as model:
        replicas = model.backend.replicas
        shown.quiet = shown.quiet or not replicas.first
        _prepare(model, out)
        model.allocation  # noqa: B018 - now, because what does not fit should be known before any data is read
        model.settle_date()
        train_data, eval_data = load_data(model)
        out("\n".join((f"training data: {train_data.counts}", *train_data.notes)))
        if eval_data is not None:
            out(f"evaluation data: {eval_data.counts}")
        planner = timed(model.planner)
        (show or (lambda *arguments: out(f"plan: {verdict_of(*arguments)}")))(planner, train_data)
        with StopOnSignal(Path(config.output_dir) / STOP_FILE) as stop:
            noted = NotePlan(
                model.config, brief(planner), given=setting_names, used=model.backend.memory().used
            )
            trainer = model.get_trainer(callbacks=[*callbacks, noted] if replicas.first else ())
            for line in _about(model):
                out(line)
            how: dict[str, Any] = {
                "resume": resume,
                "weights_only": weights_only,
                "say": out,
                "stop": stop.why,
            }
            result = trainer.fit(train_data, eval_data, **how)
        chats = prompt_form_of(model.files.row_forms) == "chat"
        for line in _ended(result, trainer.global_step, config, chats=chats):
            out(line)
    return result


def _prepare(model: LemaModel, out: Callable[[str], None]) -> None:
    """Attach the adapter, and let the tokens of a step be known; tell of processes and tokens."""
    replicas = model.backend.replicas
    if replicas.size > 1:
        dividing = model.config.context_parallel_size
        group_size = dividing or model.backend.parallel.size
        participants = "each" if group_size == 1 else f"each {group_size} of them"
        share = "its share of every batch"
        if dividing == replicas.size:
            participants = "each"
            share = "its part of every row"
        elif dividing is not None:
            share += ", of which they divide the rows"
        out(f"{replicas.num_processes} processes, {participants} with {share}")
    check_dividing(replicas, model.config.context_parallel_size)
    model.initialize_lora()
    leaves_chunk = model.config.sequence_chunk == "auto"
    leaves_keys = model.config.keys_values == "auto" and model.config.sequence_chunk is not None
    leaves_tile = model.config.mlp_tile_tokens == "auto"
    if model.settle_tokens():
        tokens = model.config.tokens_per_step
        out(f"tokens_per_step: auto is {tokens:,}, from which reading is hidden behind computing")
    if leaves_chunk:
        model.allocation  # noqa: B018 - which chooses it
        batch = model.planner.shape.micro_batch
        chosen = "none, because they fit as they are" if batch.chunk is None else f"{batch.chunk:,}"
        out(f"sequence_chunk: auto is {chosen}, for rows of {batch.length:,} tokens")
    if leaves_keys:
        model.allocation  # noqa: B018 - as above
        if model.config.keys_values == "host":
            out("keys_values: auto is host, because a step does not fit the device otherwise")
    if leaves_tile:
        model.allocation  # noqa: B018 - which chooses it
        batch = model.planner.shape.micro_batch
        chosen = "none, because a step fits without" if batch.tile is None else f"{batch.tile:,}"
        out(f"mlp_tile_tokens: auto is {chosen}, for micro-batches of {batch.tokens:,} tokens")


def _about(model: LemaModel) -> Iterator[str]:
    """Yield what is trained and where, and that the loss leaves out what the routers add to it
    elsewhere, unless the config says anything of it."""
    adapters = f"{model.num_adapter_parameters:,} adapter parameters; device {model.backend.device}"
    weights = (
        f"{model.split.num_layers} layers ({model.allocation.summary()}), "
        f"{human_bytes(model.gbi.nbytes)}"
    )
    if (quantized := model.files.quantized) is not None:
        weights += f" ({quantized.kind}, made of {human_bytes(quantized.base_bytes)})"
    yield f"{weights} of weights; {adapters}"
    if untested_libraries := untested():
        yield f"not tested with {untested_libraries}"
    if has_reference(model.config.objective):
        yield "reference: " + (
            "the base model" if model.reference is None else "the adapter that the run began with"
        )
    if model.fused is not None:
        yield f"arithmetic: fast: {model.fused}"
    coefficient = getattr(model.skeleton.config.get_text_config(), "router_aux_loss_coef", None)
    if (
        coefficient
        and model.config.router_aux_loss_coef is None
        and model.adapter.engine.routers is None
    ):
        what = "the training loss leaves out the routers' auxiliary loss, which TRL adds by default"
        yield f"{what}; router_aux_loss_coef: {coefficient} adds it here"


def _ended(
    result: Mapping[str, Any], steps: int, config: LemaConfig, *, chats: bool
) -> Iterator[str]:
    """Yield what a run has come to, where its adapter is, and a command that goes on from there:
    one that talks with what was trained on `chats`."""
    directory = shlex.quote(config.output_dir)
    if "train_loss" in result:
        name = config.best_by[0]
        if (dead := result.get("dead")) is not None:
            yield f"ended at step {steps}, but this run may have learnt nothing: {dead}"
            yield f"adapter: {config.output_dir}"
            yield f"next: lema report {directory}"
            return
        rate = human_count(result["train_tokens_per_second"])
        time = human_duration(result["train_runtime"])
        yield (
            f"ended at step {steps} after {time}: mean loss {result['train_loss']:.4f}, {rate} "
            "tokens/s"
        )
        if (step := result.get("best_step")) is not None:
            adapter_note = (
                "whose adapter is kept"
                if config.load_best_model_at_end
                else "the adapter is from the last step"
            )
            yield (
                f"best evaluation: {name} {result[f'best_{name}']:.4f} at step {step}, "
                f"{adapter_note}"
            )
    yield f"adapter: {config.output_dir}"
    yield f"next: lema chat {directory}" if chats else f"next: lema generate {directory} -p TEXT"
    yield f"next: lema report {directory}"


def load_data(model: LemaModel) -> tuple[Dataset, Dataset | None]:
    """Read the data that the config names to train and evaluate on; `ConfigError`: none, else as
    `read_data`.
    """
    config = model.config
    if not config.train_data:
        raise ConfigError(
            "the config names no training data",
            where="train_data",
            how="give a file or a list of files",
        )
    eval_rows: Dataset | None
    rows, eval_rows = training_rows(config, model.files)
    if config.eval_data:
        eval_rows = read_data(config, model.files, config.eval_data)
    return rows, first_rows(eval_rows, config.max_eval_samples)
