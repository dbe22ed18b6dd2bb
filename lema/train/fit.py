"""One call of `LemaTrainer.fit`: a run over one data set, measured in epochs or steps, as the
loop drives it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from torch.optim.lr_scheduler import LRScheduler

from lema.backend.group import check_alike, first_alone
from lema.backend.interrupt import Stop
from lema.config import LemaConfig
from lema.data.dataset import Rows, first_rows
from lema.engine.frozen_prefix import PrefixCache
from lema.errors import AdapterError, ConfigError, ReadError
from lema.lora.base import Base
from lema.lora.files import load_weights
from lema.model.files import ModelFiles
from lema.train.batch import packed
from lema.train.checkpoint.card import CARD, make_repository, model_card, upload, write_card
from lema.train.checkpoint.format import (
    PREFIX,
    TRAINER_STATE,
    Writer,
    checkpoints,
    forget_old_checkpoints,
    leave_adapter,
)
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
from lema.train.evaluate import evaluate, passes_of_rows
from lema.train.events import Position, RunEvents, with_bar
from lema.train.health.signs import is_sound
from lema.train.inputs import check_output_dir
from lema.train.loop import Drawn, Pending, RunLoop
from lema.train.metrics import METRICS_NAME, check_unused, cut_metrics, step_of
from lema.train.sampler import StepSampler
from lema.train.steps import Steps

__all__ = ["PlainRun", "check_new", "save_step"]


def check_new(config: LemaConfig) -> None:
    """Refuse, with `ConfigError`, an `output_dir` with what a new run would replace."""
    if checkpoints(Path(config.output_dir)):
        what = "the output directory holds checkpoints of an earlier run"
        how = "continue from the newest with --resume (resume=True), or choose another output_dir"
        raise ConfigError(what, where=config.output_dir, how=how)
    check_unused(config, ("train_loss", "stage"))


def save_step(
    steps: Steps,
    extra: Mapping[str, Any] | None = None,
    writers: Sequence[Writer] = (),
    spared: Sequence[Path] = (),
) -> None:
    """Write `checkpoint-<global_step>` into `output_dir`, then delete those that are too old,
    but for the `spared`.
    """
    output = Path(steps.config.output_dir)
    directory = output / f"{PREFIX}{steps.global_step}"
    keep = steps.config.save_total_limit
    steps.save_checkpoint(directory, extra, writers)
    forget = partial(forget_old_checkpoints, output, directory, keep, spared)
    first_alone(steps.model.backend.replicas, forget)


class PlainRun:
    """The one stage of a plain run, whose `steps` may have taken some already; see
    `lema.train.loop.Stage`.
    """

    trains: str | None = None

    def __init__(
        self,
        steps: Steps,
        dataset: Rows,
        eval_dataset: Rows | None,
        report: Reporter = print,
    ) -> None:
        self.steps = steps
        config = steps.config
        self._replicas = steps.model.backend.replicas
        self._config = config
        self._output = Path(config.output_dir)
        self._report: Reporter = report if self._replicas.first else lambda _: None
        if config.mixture is not None and getattr(dataset, "shares", None) != config.mixture:
            what = "it gives shares to the data sets in train_data, but fit got other rows"
            raise ConfigError(
                what, where="mixture", how="call fit(config.train_data), or remove mixture"
            )
        rows = first_rows(dataset, config.max_train_samples)
        rows = packed(rows, steps.model, config, self._report)
        self._sampler = StepSampler(rows, config, self._replicas, steps.model.padding)
        if config.tokens_per_step is not None:
            self._report(
                f"steps of {config.tokens_per_step:,} tokens at most: {self._sampler.num_steps:,}"
            )
        self._eval_dataset: Rows | None = None
        if eval_dataset is not None:
            eval_rows = first_rows(eval_dataset, config.max_eval_samples)
            self._eval_dataset = packed(eval_rows, steps.model, config, checked=True)
        self.evaluates = eval_dataset is not None
        self._past: dict[str, Any] = {}  # what an earlier process logged and found best
        self.schedule: LRScheduler  # from `train` on
        self.num_steps = self._sampler.num_steps
        self.done = steps.global_step
        self.best: dict[str, Any] | None = None
        self.eval_loss: float | None = None
        self.pending: Pending | None = None
        self.carried: Mapping[str, Any] = {}
        self.saved: int | None = None
        self.sound: int | None = None
        if self._replicas.num_processes > 1:
            data = {
                f"data: {name}": fingerprint for name, fingerprint in self._sampler.about.items()
            }
            check_alike(self._replicas, config.to_dict() | data)

    def begin(self, *, weights_only: bool = False) -> None:
        """Begin, or go on from where `steps` is; `ConfigError` in another run's `output_dir` or
        without steps left.
        """
        check_output_dir(self._config)
        if self.done == 0:
            check_new(self._config)
        if self.done >= self.num_steps:
            what = (
                f"nothing is left to train: this trainer is at step {self.done} of {self.num_steps}"
            )
            how = "raise num_train_epochs or max_steps, or begin again with a new trainer"
            raise ConfigError(what, where="fit", how=how)
        self._check_evaluates()
        if weights_only:
            what = "weights_only needs a checkpoint to resume from"
            raise ConfigError(
                what, where="weights_only", how="set resume (--resume), too, or remove it"
            )

    def resume(
        self, restore: Callable[[Path], Mapping[str, Any]], *, weights_only: bool = False
    ) -> None:
        """Go on from the newest sound checkpoint in `output_dir`, which `restore` takes up,
        returning its `extra`; `AdapterError` where there is none, `ConfigError` where it is of
        another run."""
        self._check_evaluates()
        steps = self.steps
        candidates = checkpoints(self._output)
        report = self._report
        if not candidates:
            what = "there is no checkpoint to resume from"
            raise AdapterError(
                what, where=str(self._output), how="remove --resume to begin a new run"
            )
        path = first_alone(
            self._replicas, lambda: newest_sound(candidates, report, weights_only=weights_only)
        )
        adapter = steps.module if isinstance(steps.module, PeftModel) else None
        changed = check_same_run(
            path, self._config, adapter, self._sampler.about, steps.model.split.dtype
        )
        extra = restore(path)
        self.done = steps.global_step
        self.pending = extra.get("left")
        self.carried = extra
        self.saved = None if weights_only else self.done
        self.sound = self.done if is_sound(extra) else None
        self._past = past_log(path / TRAINER_STATE)
        if self._past.get("best_metric") is not None:
            self.best = {
                "step": self._past["best_global_step"],
                self._config.best_by[0]: self._past["best_metric"],
            }
        keep = self._config.save_total_limit
        spared = [self.best_checkpoint] if self.best_checkpoint else []
        first_alone(
            self._replicas, lambda: forget_old_checkpoints(self._output, path, keep, spared)
        )
        steps.take_settings({change.name for change in changed})
        report(f"resuming from {path} (step {self.done} of {self.num_steps})")
        if self.done >= self.num_steps:
            report("nothing was left to train: the run had taken its last step")
        if weights_only:
            report(
                "LEMA takes the weights of this checkpoint but not its optimizer, whose "
                "moments begin empty"
            )
        report_changes(changed, report)
        report_regrouped(path, self._config, steps.model.split.model, report)

    def _check_evaluates(self) -> None:
        asked = (
            "early_stopping_patience",
            "load_best_model_at_end",
            "eval_on_start",
            "eval_prompts",
        )
        if not self.evaluates and (idle := [name for name in asked if getattr(self._config, name)]):
            what = f"there is nothing to evaluate on, which {' and '.join(idle)} need"
            raise ConfigError(
                what, where=idle[0], how="give eval_data or eval_split (in fit: eval_dataset)"
            )

    def train(
        self, schedule: LRScheduler, callbacks: Sequence[Any], stop: Stop | None
    ) -> dict[str, Any]:
        """Take the steps that are left; return what `LemaTrainer.fit` does. `stop` is asked
        before each layer.
        """
        self.schedule = schedule
        options: dict[str, Any] = {
            "num_epochs": self._sampler.num_epochs,
            "evaluates": self.evaluates,
        }
        if self._config.push_to_hub:
            first_alone(self._replicas, partial(make_repository, self._config))
        shown = with_bar(callbacks, self._config)
        # of a run that begins, no line is there
        last = self.done if self.done or self.carried else -1

        def keep(row: Mapping[str, Any]) -> bool:
            return step_of(row) <= last

        first_alone(
            self._replicas,
            lambda: cut_metrics(self._output / METRICS_NAME, keep, self.carried.get("record")),
        )
        events = RunEvents(self._config, self.num_steps, self._replicas, shown, **options)
        events.state.log_history = self._past.get("log_history", [])
        events.state.stateful_callbacks = self._past.get("stateful_callbacks", {})
        with closing(events), self._cached_prefix():
            loop = RunLoop(self, events, at_layer=stop)
            loop.run()
            if summary := events.summary():
                events.log(summary)
            events.end()
        events.draw()
        best = {
            f"best_{name}": value for name, value in (self.best or {}).items() if name != "only"
        }
        dead = {} if events.signs.verdict is None else {"dead": events.signs.verdict}
        return summary | loop.last_eval | (best if summary else {}) | dead

    def leave(self, result: Mapping[str, Any], base: Base, files: ModelFiles | None) -> None:
        """Leave the adapter, or the best, with card and tokenizer, and upload them."""
        config = self._config
        backend = self.steps.model.backend
        alone = partial(first_alone, self._replicas)
        adapter = cast(PeftModel, self.steps.module)
        reference = self.steps.model.reference
        if config.load_best_model_at_end and self.best is not None:
            self._take_best(adapter)
        writers: list[Writer] = []
        # that of a run that came to its end tells its results
        if result or not (self._output / CARD).exists():
            card = model_card(
                config, base.name, self._data_summary(), {"steps": self.done, **result}
            )
            writers = [partial(write_card, files=files, card=card)]
        leave = partial(
            leave_adapter, self._output, backend, adapter, config, base, reference, writers
        )
        # of several that hold it, each has a part
        leave() if backend.parallel.size > 1 else alone(leave)
        if config.push_to_hub:
            alone(lambda: self._report(f"uploaded: {upload(config)}"))

    def _take_best(self, adapter: PeftModel) -> None:
        """Load the adapter of the best evaluation; if its checkpoint is missing or damaged, the
        last step's stays.
        """
        path = cast(Path, self.best_checkpoint)
        name, _ = self._config.best_by
        best = cast("dict[str, Any]", self.best)
        try:
            first_alone(self._replicas, partial(check_sound, path, weights_only=True))
        except (AdapterError, ReadError) as error:
            lost = (
                f"the best adapter, of step {best['step']}, cannot be kept: {error.what} "
                f"({error.where})"
            )
            report_warning(lost, self._report)
            return
        load_weights(
            adapter, path, self.steps.model.split.layers_name, self.steps.model.backend.parallel
        )
        self._report(
            f"the adapter of step {best['step']} is kept, the best: {name} {best[name]:.4f}"
        )

    def _data_summary(self) -> dict[str, str]:
        config = self._config
        summary = {}
        for name, source, rows in (
            ("training", config.train_data, self._sampler.dataset),
            ("evaluation", config.eval_data, self._eval_dataset),
        ):
            if rows is not None:
                listed = [source] if isinstance(source, str) else source or ()
                files = f"{', '.join(Path(path).name for path in listed)}: " if listed else ""
                summary[name] = f"{files}{getattr(rows, 'counts', None) or f'{len(rows):,} rows'}"
        return summary

    @contextmanager
    def _cached_prefix(self) -> Iterator[None]:
        """Keep the outputs of frozen layers for each batch, if that is requested and a batch
        comes a second time.
        """
        config = self._config
        model = self.steps.model
        if not config.cache_frozen_prefix or not self._sampler.repeats:
            yield
            return
        num_tokens = self._sampler.tokens_of_an_epoch()
        directory = Path(config.offload_dir or config.output_dir)
        prefix = PrefixCache(
            model.backend, model.lowest_trained, directory, num_tokens, model.stream.trace
        )
        with closing(prefix), model.skipping_prefix(prefix):
            yield

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps."""
        epoch = self._sampler.epoch(done)
        is_epoch_end = self._sampler.is_epoch_end(done)
        where = self._output / f"{PREFIX}{done}"
        return Position(done, epoch, self._sampler.row(done), f"step {done}", where, is_epoch_end)

    @property
    def best_checkpoint(self) -> Path | None:
        """Where the checkpoint of the best evaluation is, or would be; None: nothing was
        evaluated.
        """
        return None if self.best is None else self.position(self.best["step"]).checkpoint

    def draw(self, step: int) -> Drawn:
        """Return the rows of a step, counted from 0."""
        rows = self._sampler.rows(step)
        return Drawn(
            self._sampler.micro_batches(step), f", rows {rows} of the data", {"rows": rows}
        )

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the data set to evaluate on."""
        model = self.steps.model
        assert self._eval_dataset is not None, "a run without such rows evaluates nothing"
        return evaluate(
            model, passes_of_rows(self._eval_dataset, self._config, self._replicas, model.padding)
        )

    def save(self, events: RunEvents, pending: Pending | None) -> None:
        """Write `checkpoint-<step>`, and forget those that are too old."""
        position = self._sampler.position(self.done)
        data = self._sampler.about
        extra = {"data": data, "position": position, "left": pending, **events.carried}
        sound = (
            None
            if self.sound is None or not events.signs.steps
            else self.position(self.sound).checkpoint
        )
        save_step(
            self.steps,
            extra,
            [events.save_state],
            [path for path in (self.best_checkpoint, sound) if path],
        )
