"""One call of `LemaTrainer.fit`: a run of one stage over one data set, in epochs or steps.

`begun` and `resumed` say how far the run is, `train_stage` takes the steps that are left, and
`leave` writes what stays when it is over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from torch.optim.lr_scheduler import LRScheduler

from lema.backend.group import first_alone
from lema.backend.interrupt import Stop
from lema.config import LemaConfig
from lema.engine.frozen_prefix import PrefixCache
from lema.errors import AdapterError, ConfigError, ReadError
from lema.lora.base import Base
from lema.lora.files import load_weights
from lema.model.files import ModelFiles
from lema.train.checkpoint.card import CARD, make_repository, model_card, upload, write_card
from lema.train.checkpoint.format import TRAINER_STATE, Writer, leave_adapter
from lema.train.checkpoint.resume import (
    Reporter,
    check_same_run,
    check_sound,
    newest_sound,
    past_log,
    report_changes,
    report_regrouped,
    report_warning,
)
from lema.train.events import RunEvents, with_bar
from lema.train.health.signs import is_sound
from lema.train.inputs import check_output_dir
from lema.train.loop import RunLoop
from lema.train.metrics import check_unused, cut_metrics, step_of
from lema.train.plain.stage import PlainData, PlainPaths
from lema.train.stage import Progress, Stage
from lema.train.steps import Steps

__all__ = ["begun", "check_new", "leave", "resumed", "save_step", "train_stage"]


def check_new(config: LemaConfig) -> None:
    """Refuse, with `ConfigError`, an `output_dir` with what a new run would replace."""
    if PlainPaths.of(config).saved():
        what = "the output directory holds checkpoints of an earlier run"
        how = "continue from the newest with --resume (resume=True), or choose another output_dir"
        raise ConfigError(what, where=config.output_dir, how=how)
    check_unused(config, ("train_loss", "stage"))


def save_step(steps: Steps) -> None:
    """Write `checkpoint-<global_step>` into `output_dir`, then delete those that are too old."""
    paths = PlainPaths.of(steps.config)
    directory = paths.checkpoint(steps.global_step)
    steps.save_checkpoint(directory)
    first_alone(steps.model.backend.replicas, partial(paths.forget_old, directory))


def begun(data: PlainData, done: int, *, weights_only: bool = False) -> Progress:
    """Return how far a run is that no checkpoint is resumed for.

    Args:
        data: its rows.
        done: the steps that its trainer has taken already.
        weights_only: whether the weights of a checkpoint were asked for.

    Raises:
        ConfigError: another run is in `output_dir`, or no step is left.
    """
    config = data.config
    check_output_dir(config)
    if done == 0:
        check_new(config)
    if done >= data.num_steps:
        what = f"nothing is left to train: this trainer is at step {done} of {data.num_steps}"
        how = "raise num_train_epochs or max_steps, or begin again with a new trainer"
        raise ConfigError(what, where="fit", how=how)
    _check_evaluates(data)
    if weights_only:
        what = "weights_only needs a checkpoint to resume from"
        how = "set resume (--resume), too, or remove it"
        raise ConfigError(what, where="weights_only", how=how)
    return Progress(done)


def resumed(
    data: PlainData,
    steps: Steps,
    restore: Callable[[Path], Mapping[str, Any]],
    report: Reporter,
    *,
    weights_only: bool = False,
) -> Progress:
    """Go on from the newest sound checkpoint in `output_dir`, and return how far the run is.

    Args:
        data: its rows.
        steps: what trains.
        restore: takes a checkpoint up, and returns its `extra`.
        report: is called with lines about the checkpoint.
        weights_only: whether only its weights are taken.

    Raises:
        AdapterError: there is no such checkpoint.
        ConfigError: it is of another run.
    """
    _check_evaluates(data)
    config = data.config
    paths = data.paths
    if not (candidates := paths.saved()):
        what = "there is no checkpoint to resume from"
        how = "remove --resume to begin a new run"
        raise AdapterError(what, where=str(paths.directory), how=how)
    path = first_alone(
        data.replicas, lambda: newest_sound(candidates, report, weights_only=weights_only)
    )
    adapter = steps.module if isinstance(steps.module, PeftModel) else None
    changed = check_same_run(path, config, adapter, data.sampler.about, data.model.split.dtype)
    extra = restore(path)
    progress = _progress_of(path, extra, steps.global_step, config, weights_only=weights_only)
    spared = [] if progress.best is None else [progress.best["step"]]
    first_alone(data.replicas, partial(paths.forget_old, path, spared))
    steps.take_settings({change.name for change in changed})
    report(f"resuming from {path} (step {progress.done} of {data.num_steps})")
    if progress.done >= data.num_steps:
        report("nothing was left to train: the run had taken its last step")
    if weights_only:
        report(
            "LEMA takes the weights of this checkpoint but not its optimizer, whose "
            "moments begin empty"
        )
    report_changes(changed, report)
    report_regrouped(path, config, data.model.split.model, report)
    return progress


def _progress_of(
    path: Path, extra: Mapping[str, Any], done: int, config: LemaConfig, *, weights_only: bool
) -> Progress:
    past = past_log(path / TRAINER_STATE)
    best = None
    if past.get("best_metric") is not None:
        best = {"step": past["best_global_step"], config.best_by[0]: past["best_metric"]}
    return Progress(
        done,
        best=best,
        pending=extra.get("left"),
        carried=extra,
        saved=None if weights_only else done,
        sound=done if is_sound(extra) else None,
        past=past,
    )


def _check_evaluates(data: PlainData) -> None:
    asked = (
        "early_stopping_patience",
        "load_best_model_at_end",
        "eval_on_start",
        "eval_prompts",
    )
    if not data.evaluates and (idle := [name for name in asked if getattr(data.config, name)]):
        what = f"there is nothing to evaluate on, which {' and '.join(idle)} need"
        how = "give eval_data or eval_split (in fit: eval_dataset)"
        raise ConfigError(what, where=idle[0], how=how)


def train_stage(
    stage: Stage,
    data: PlainData,
    schedule: LRScheduler,
    callbacks: Sequence[Any],
    stop: Stop | None,
) -> dict[str, Any]:
    """Take the steps that are left of a run.

    Args:
        stage: its one stage.
        data: the stage's rows.
        schedule: of the learning rate, at the stage's step.
        callbacks: `transformers.TrainerCallback`s.
        stop: is asked before each layer; None: nobody is.

    Returns:
        What `LemaTrainer.fit` does.
    """
    config = data.config
    progress = stage.progress
    if config.push_to_hub:
        first_alone(data.replicas, partial(make_repository, config))
    shown = with_bar(callbacks, config)
    # of a run that begins, no line is there
    last = progress.done if progress.done or progress.carried else -1

    def keep(row: Mapping[str, Any]) -> bool:
        return step_of(row) <= last

    record = progress.carried.get("record")
    first_alone(data.replicas, lambda: cut_metrics(data.paths.metrics, keep, record))
    events = RunEvents(
        config,
        data.num_steps,
        data.replicas,
        shown,
        num_epochs=data.sampler.num_epochs,
        evaluates=data.evaluates,
    )
    events.take_past(progress.past)
    with closing(events), _cached_prefix(data):
        loop = RunLoop(stage, schedule, events, at_layer=stop)
        loop.run()
        if summary := events.summary():
            events.log(summary)
        events.end()
    events.draw()
    best = {
        f"best_{name}": value for name, value in (progress.best or {}).items() if name != "only"
    }
    dead = {} if events.signs.verdict is None else {"dead": events.signs.verdict}
    return summary | loop.last_eval | (best if summary else {}) | dead


@contextmanager
def _cached_prefix(data: PlainData) -> Iterator[None]:
    """Keep the outputs of frozen layers for each batch, if that is requested and a batch comes a
    second time.
    """
    config = data.config
    model = data.model
    if not config.cache_frozen_prefix or not data.sampler.repeats:
        yield
        return
    num_tokens = data.sampler.tokens_of_an_epoch()
    directory = Path(config.offload_dir or config.output_dir)
    prefix = PrefixCache(
        model.backend, model.lowest_trained, directory, num_tokens, model.stream.trace
    )
    with closing(prefix), model.caching(prefix):
        yield


def leave(
    stage: Stage,
    data: PlainData,
    result: Mapping[str, Any],
    base: Base,
    files: ModelFiles | None,
    report: Reporter,
) -> None:
    """Leave the adapter, or the best, with card and tokenizer, and upload them.

    Args:
        stage: the one stage of the run, which is over.
        data: the stage's rows.
        result: what `train_stage` returned.
        base: the model that the adapter is for.
        files: the model's directory with the tokenizer; None: there is none.
        report: is called with lines about the adapter.
    """
    config = data.config
    backend = data.model.backend
    alone = partial(first_alone, data.replicas)
    adapter = cast(PeftModel, stage.steps.module)
    output = data.paths.directory
    if config.load_best_model_at_end and stage.progress.best is not None:
        _take_best(data, stage.progress, adapter, report)
    writers: list[Writer] = []
    # that of a run that came to its end tells its results
    if result or not (output / CARD).exists():
        results = {"steps": stage.progress.done, **result}
        card = model_card(config, base.name, data.summary(), results)
        writers = [partial(write_card, files=files, card=card)]
    reference = data.model.reference
    leave_files = partial(leave_adapter, output, backend, adapter, config, base, reference, writers)
    # of several that hold it, each has a part
    leave_files() if backend.parallel.size > 1 else alone(leave_files)
    if config.push_to_hub:
        alone(lambda: report(f"uploaded: {upload(config)}"))


def _take_best(data: PlainData, progress: Progress, adapter: PeftModel, report: Reporter) -> None:
    """Load the adapter of the best evaluation; if its checkpoint is missing or damaged, the last
    step's stays.
    """
    path = cast(Path, data.best_checkpoint(progress))
    name, _ = data.config.best_by
    best = cast("Mapping[str, Any]", progress.best)
    try:
        first_alone(data.replicas, partial(check_sound, path, weights_only=True))
    except (AdapterError, ReadError) as error:
        lost = (
            f"the best adapter, of step {best['step']}, cannot be kept: {error.what} "
            f"({error.where})"
        )
        report_warning(lost, report)
        return
    split = data.model.split
    load_weights(adapter, path, split.layers_name, data.model.backend.parallel)
    report(f"the adapter of step {best['step']} is kept, the best: {name} {best[name]:.4f}")
