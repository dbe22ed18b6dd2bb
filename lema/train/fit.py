"""One call of `LemaTrainer.fit`: a run over one data set, measured in epochs or steps, as the loop drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch.optim.lr_scheduler import LRScheduler

from lema.backend.collectives import check_alike, first_alone
from lema.backend.interrupt import Stop
from lema.engine.frozen_prefix import PrefixCache
from lema.errors import AdapterError, ConfigError
from lema.train.batch import packed
from lema.train.checkpoint import checkpoints
from lema.train.checkpoint.format import PREFIX, TRAINER_STATE, Writer, forget_old_checkpoints
from lema.train.checkpoint.resume import check_same_run, newest_sound, past_log, say_changed
from lema.train.evaluate import evaluate, passes_of_rows
from lema.train.events import Position, RunEvents
from lema.train.loop import Drawn, Pending, RunLoop
from lema.train.metrics import METRICS_NAME, cut_back
from lema.train.sampler import StepSampler
from lema.train.steps import Steps

__all__ = ["PlainRun", "save_step"]


Say = Callable[[str], None]


def save_step(steps: Steps, extra: Mapping[str, Any] | None = None, writers: Sequence[Writer] = ()) -> None:
    """Write `checkpoint-<global_step>` into `output_dir`, then delete what `save_total_limit` says is too old."""
    output = Path(steps.config.output_dir)
    directory, keep = output / f"{PREFIX}{steps.global_step}", steps.config.save_total_limit
    steps.save_checkpoint(directory, extra, writers)
    first_alone(steps.model.backend.replicas, lambda: forget_old_checkpoints(output, directory, keep))


class PlainRun:
    """The one stage of a plain run; see `lema.train.loop.Stage`.

    Args:
        steps: what trains, perhaps after some steps.
        dataset: rows with `input_ids` and `labels`.
        eval_dataset: the same to evaluate on; None: there is no evaluation.
        say: called with what there is to say of rows that were joined into packs.
    """

    trains: str | None = None

    def __init__(self, steps: Steps, dataset: Any, eval_dataset: Any, say: Say = print) -> None:
        self.steps, self._config = steps, steps.config
        self._output = Path(steps.config.output_dir)
        self._replicas = steps.model.backend.replicas
        rows = packed(dataset, steps.model, steps.config, say if self._replicas.first else lambda _: None)
        self._sampler = StepSampler(rows, steps.config, self._replicas)
        self._eval_dataset = packed(eval_dataset, steps.model, steps.config, checked=True)
        self.evaluates = eval_dataset is not None
        self._past: dict[str, Any] = {}  # what an earlier process logged and found best
        self.schedule: LRScheduler  # from `train` on
        self.num_steps = self._sampler.num_steps
        self.done = steps.global_step
        self.best: dict[str, Any] | None = None
        self.eval_loss: float | None = None
        self.pending: Pending | None = None
        self.unlogged: Sequence[Any] = (0.0, 0)
        self.saved: int | None = None
        if self._replicas.num_processes > 1:
            data = {f"data: {name}": one for name, one in self._sampler.about.items()}
            check_alike(self._replicas, self._config.to_dict() | data)

    def begin(self, *, weights_only: bool = False) -> None:
        """Begin, or go on from the step that `steps` is at.

        Raises:
            ConfigError: checkpoints of another run are in `output_dir`, or no step is left; or `weights_only` is set,
                and no checkpoint is gone on from.
        """
        if self.done == 0 and checkpoints(self._output):
            raise ConfigError(
                "the output directory holds checkpoints of an earlier run",
                where=str(self._output),
                how="go on from the newest with --resume (resume=True), or choose another output_dir",
            )
        if self.done >= self.num_steps:
            raise ConfigError(
                f"nothing is left to train: this trainer is at step {self.done} of {self.num_steps}",
                where="fit",
                how="raise num_train_epochs or max_steps, or begin again with a new trainer",
            )
        if weights_only:
            raise ConfigError(
                "weights alone are taken of a checkpoint that is gone on from",
                where="weights_only",
                how="set resume (--resume) too, or leave it out",
            )

    def resume(self, restore: Callable[[Path], Mapping[str, Any]], say: Say, *, weights_only: bool = False) -> None:
        """Go on from the newest sound checkpoint in `output_dir`, which `restore` takes up, returning its `extra`.

        With `weights_only` it leaves the optimizer out. What is gone on from is said.

        Raises:
            AdapterError: there is none; ConfigError: it is of another run.
        """
        steps, found = self.steps, checkpoints(self._output)
        say = say if self._replicas.first else lambda _: None
        if not found:
            raise AdapterError(
                "there is no checkpoint to resume from",
                where=str(self._output),
                how="leave --resume out to begin a new run",
            )
        path = first_alone(self._replicas, lambda: newest_sound(found, say, weights_only=weights_only))
        adapter = steps.module if isinstance(steps.module, PeftModel) else None
        changed = check_same_run(path, self._config, adapter, self._sampler.about)
        self._take_up(restore(path), path, whole=not weights_only)
        steps.take_settings({one.name for one in changed})
        say(f"resuming from {path} (step {self.done} of {self.num_steps})")
        if weights_only:
            say("of this checkpoint the weights are taken, and not the optimizer: its moments begin empty")
        say_changed(changed, say)

    def _take_up(self, extra: Mapping[str, Any], path: Path, *, whole: bool) -> None:
        """Go on with what a checkpoint says of the run, `whole` with all that is in it."""
        self.done = self.steps.global_step
        self.unlogged = extra.get("window", (0.0, 0))  # a checkpoint that `train_step` wrote has none
        self.pending = extra.get("left")
        self.saved = self.done if whole else None
        self._past = past_log(path / TRAINER_STATE)
        if self._past.get("best_metric") is not None:
            self.best = {"step": self._past["best_global_step"], "eval_loss": self._past["best_metric"]}
        if self._replicas.first and (self.done < self.num_steps or self.pending is not None):
            cut_back(self._output / METRICS_NAME, self._past.get("log_history", ()), self.done)

    def train(self, schedule: LRScheduler, callbacks: Sequence[Any], stop: Stop | None) -> dict[str, Any]:
        """Take the steps that are left; return what was measured over them, and last on what is evaluated on."""
        self.schedule = schedule
        options: dict[str, Any] = {"num_epochs": self._sampler.num_epochs, "evaluates": self.evaluates}
        events = RunEvents(self._config, self.num_steps, self._replicas, callbacks, **options)
        events.state.log_history = self._past.get("log_history", [])
        with events, self._prefix_kept():
            loop = RunLoop(self, events, at_layer=stop)
            loop.run()
            if summary := events.summary():
                events.log(summary)
            events.end()
        events.draw()
        return summary | loop.last_eval

    @contextmanager
    def _prefix_kept(self) -> Iterator[None]:
        """Keep what frozen layers make of each batch, if that is asked for and a batch comes a second time."""
        config, model = self._config, self.steps.model
        if not config.cache_frozen_prefix or not self._sampler.repeats:
            yield
            return
        num_tokens = self._sampler.tokens_of_an_epoch()
        directory = Path(config.offload_dir or config.output_dir)
        prefix = PrefixCache(model.backend, model.lowest_trained, directory, num_tokens, model.stream.trace)
        with closing(prefix) as model.prefix:
            try:
                yield
            finally:
                model.prefix = None

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps."""
        epoch, ends = self._sampler.epoch(done), self._sampler.ends_epoch(done)
        where = self._output / f"{PREFIX}{done}"
        return Position(done, epoch, {"step": done, "epoch": epoch}, f"step {done}", where, ends)

    def draw(self, step: int) -> Drawn:
        """Return the rows of a step, counted from 0."""
        rows = self._sampler.rows(step)
        return Drawn(self._sampler.micro_batches(step), f", rows {rows} of the data", {"rows": rows})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the data set to evaluate on."""
        return evaluate(self.steps.model, passes_of_rows(self._eval_dataset, self._config, self._replicas))

    def save(self, events: RunEvents, pending: Pending | None) -> None:
        """Write `checkpoint-<step>`, and forget those that are too old."""
        position, data = self._sampler.position(self.done), self._sampler.about
        extra = {"data": data, "position": position, "window": events.unlogged, "left": pending}
        save_step(self.steps, extra, [events.save_state])
