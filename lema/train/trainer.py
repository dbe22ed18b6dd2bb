"""Trains adapters, one step after the other: micro-batches, accumulation, guards, clipping,
optimizer, checkpoints.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.backend.interrupt import Stop
from lema.config import LemaConfig
from lema.data import TokenDataset
from lema.data.preference import PreferenceDataset
from lema.engine import StreamedModel
from lema.engine.head.loss import split_batch
from lema.engine.optim import (
    check_optimizer,
    make_optimizer,
    make_schedule,
    own_share,
    set_rates,
    set_update,
)
from lema.engine.padding import side_by_side
from lema.errors import AdapterError, ConfigError, NonFiniteError
from lema.lora import save_adapter
from lema.lora.base import Base, base_of, check_base, write_base
from lema.lora.class_names import class_names
from lema.lora.consent import save_settings
from lema.lora.files import check_same_adapter, load_weights
from lema.model.files import ModelFiles
from lema.model.partition import whole_adapter
from lema.storage import GlobalBinaryIndex
from lema.storage.locks import one_run
from lema.storage.verify import BaseFiles
from lema.stream import LayerStream
from lema.train.batch import Dataset, as_batch, as_rows, packed
from lema.train.checkpoint.format import (
    Writer,
    about_run,
    check_savable,
    nbytes_of,
    optimizer_state,
    read_state,
    restore_optimizer,
    write_checkpoint,
)
from lema.train.checkpoint.resume import (
    SCHEDULE,
    UPDATE,
    check_sound,
    newest_settings,
    restore_own,
    states_of_all,
)
from lema.train.evaluate import evaluate, passes_of_rows
from lema.train.health.nonfinite import worst
from lema.train.health.stepguard import StepGuard
from lema.train.health.watchdog import watched
from lema.train.plain.run import begun, leave, resumed, save_step, train_stage
from lema.train.plain.stage import plain_data, plain_policy
from lema.train.reference import reference_writers, restore_reference
from lema.train.stage import Stage
from lema.train.steps import (
    StepResult,
    check_free_bytes_for,
    count_tokens,
    no_event,
    read_measured,
)
from lema.train.update import FollowedSchedule, StepCount, Update, loss_of_all, read_numbers

__all__ = ["LemaTrainer"]


class LemaTrainer:
    """Trains the adapters of a streamed model.

    `LemaModel.get_trainer` makes one.

    Args:
        config: the settings of the run.
        model_adapter: the streamed model, `LemaModel.adapter`.
        gbi: the index of the model's weights.
        lora_manager: PEFT's model with the adapters; None: the trainer can only evaluate.
        optimizer: has the adapters' parameters; None: AdamW with the settings of the config.
        memory_manager: the model's stream of layers; None: that of `model_adapter`.
        callbacks: `transformers.TrainerCallback`s, which `fit` calls.
        files: the model's directory, whose tokenizer tokenises data that are not token ids; None:
            all data are token ids.

    Raises:
        ConfigError: `memory_manager` is another model's, or the optimizer does not fit.
    """

    def __init__(
        self,
        config: LemaConfig,
        model_adapter: StreamedModel,
        gbi: GlobalBinaryIndex,
        lora_manager: PeftModel | None = None,
        optimizer: Optimizer | None = None,
        memory_manager: LayerStream | None = None,
        *,
        callbacks: Sequence[Any] = (),
        files: ModelFiles | None = None,
    ) -> None:
        if memory_manager is not None and memory_manager is not model_adapter.stream:
            raise ConfigError(
                "memory_manager is not the stream of model_adapter", how="leave it out"
            )
        self.config = config
        self.model = model_adapter
        self.gbi = gbi
        self.peft_model = lora_manager
        self.files = files
        self.callbacks = list(callbacks)
        self.optimizer = optimizer
        self._makes_optimizer = optimizer is None
        if optimizer is not None and lora_manager is not None:
            check_optimizer(optimizer, self._parameters())
            if config.shard_optimizer and type(optimizer) is not torch.optim.AdamW:
                what = (
                    f"the state of {type(optimizer).__name__} may belong to several parameters "
                    "together"
                )
                raise ConfigError(
                    what, where="shard_optimizer", how="give torch.optim.AdamW, or set it to false"
                )
        self.guard = StepGuard(model_adapter, config.max_skipped_steps)
        self.update = Update(model_adapter, config.max_grad_norm, sharded=config.shard_optimizer)
        self._count = StepCount()
        self._rates = FollowedSchedule()

    @property
    def memory(self) -> LayerStream:
        """The model's stream of layers."""
        return self.model.stream

    @property
    def backend(self) -> Backend:
        """The model's device."""
        return self.model.backend

    @property
    def module(self) -> PeftModel | None:
        """What callbacks see as the model."""
        return self.peft_model

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of half-precision gradients; it is idle for other dtypes."""
        return self.update.scaler

    @property
    def global_step(self) -> int:
        """Optimizer steps that were taken or dropped."""
        return self._count.global_step

    @property
    def accumulation_step(self) -> int:
        """Passes of the step under way whose gradients have been added up."""
        return self._count.passes

    @property
    def skipped_steps(self) -> int:
        """Steps that were dropped, for a loss or a gradient that was not finite."""
        return self.guard.skipped

    @property
    def schedule(self) -> LRScheduler | None:
        """The schedule of the learning rate; None: there is none yet."""
        return self._rates.schedule

    @schedule.setter
    def schedule(self, schedule: LRScheduler | None) -> None:
        self._rates.replace(schedule)

    def train_step(
        self,
        inputs: Tensor | Mapping[str, Any],
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """Train on one batch, and step the optimizer after every `gradient_accumulation_steps`
        batches.

        Args:
            inputs: token ids, int64 `[batch, sequence]`, or a mapping that also has the other two
                arguments, and the values that the model's objective needs for its rows.
            labels: `[batch, sequence]`, not shifted, -100 for tokens that are not trained on; None:
                all but padding.
            attention_mask: `[batch, sequence]`, 0 for padding.

        Returns:
            The logits `[batch, sequence, vocabulary]` and the mean cross-entropy of the trained
            tokens. An objective of rows returns its loss and no logits.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite, and the step may not be
                dropped.
            DataError: no token is trained on, or the batch is malformed.
            ConfigError: a checkpoint is due, but another run writes to `output_dir` (the step is
                done).
        """
        batch = as_batch(
            inputs,
            labels,
            attention_mask,
            self.model.split.model.config.get_text_config(),
            self.files,
        )
        logits = list[Tensor]()
        micro_batches = split_batch(batch, self.config.micro_batch_size)
        result = self.accumulate(
            micro_batches, self.config.gradient_accumulation_steps, logits=logits
        )
        if (
            self.accumulation_step == 0
            and self.config.save_steps
            and self.global_step % self.config.save_steps == 0
        ):
            # the caller's loop has no other
            with one_run(self.backend.replicas, Path(self.config.output_dir)):
                save_step(self)
        return side_by_side(logits, batch["input_ids"].shape[1]), result.loss

    def accumulate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_passes: int = 1,
        *,
        more: bool = False,
        following: Sequence[Mapping[str, Tensor]] | None = None,
        logits: list[Tensor] | None = None,
        where: str = "",
        on_event: Callable[[str], None] = no_event,
    ) -> StepResult:
        """Add the gradients of one layer-major pass; the last pass of a step steps the optimizer.

        The device is waited for once, when all of the pass is queued, for the loss and the
        gradients' norm. The order of calls is that of `lema.train.steps.Steps.accumulate`.

        Args:
            micro_batches: each has `input_ids` and `labels`, int64 `[batch, sequence]`, and what
                the objective needs.
            num_passes: passes of a step.
            more: whether another pass follows, whose reading begins early.
            following: the micro-batches of that pass, if they are known.
            logits: receives the logits of each micro-batch, `[batch, sequence, vocabulary]`.
            where: is added to the step in messages.
            on_event: is called with `"on_pre_optimizer_step"` once the gradients are whole, and
                with `"on_optimizer_step"` before they are dropped.

        Returns:
            The loss, the counts of tokens, and the norm of the gradients of a step that has ended.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite, and the step may not be
                dropped.
            Stopped: the run is to stop; no gradient of this step is left.
        """
        optimizer = self.ready()
        replicas = self.backend.replicas
        location = f"step {self.global_step + 1}{where}"
        trained, tokens = count_tokens(micro_batches, self.model)
        divisor = self._count.begin_pass(trained)
        try:
            self.guard.begin_pass(micro_batches, divisor)
            # all processes leave it together, before their gradients are added up
            with self.model.stop.opened():
                announce = partial(self.model.announce_step, following) if more else lambda: None
                loss = self.update.accumulate(
                    self._parameters(), micro_batches, divisor, logits, announce
                )
            self._count.end_pass()
            norm = None
            if self.accumulation_step == num_passes:
                factor = self._count.factor if trained else 1.0
                with self.model.retry.once("while the gradients of the step are summed"):
                    norm = self.update.finish(optimizer, self._parameters(), factor)
            mine, length = read_numbers(loss, norm, self.update.size)
            mine = worst(replicas, mine)
            value = loss_of_all(replicas, mine) * (self._count.divisor / trained)
            if not math.isfinite(value):
                untaken = f"{location}; the optimizer made no step"
                self.guard.refuse(partial(self.guard.non_finite_loss, value, mine, untaken))
            if norm is not None and length is not None:
                dropped = self._step_or_drop(optimizer, norm, length, location, on_event)
                if dropped is not None:
                    return StepResult(value, trained, tokens, None, dropped)
        except BaseException:
            self._forget()
            raise
        return StepResult(value, trained, tokens, length, measured=read_measured(self.model))

    def _step_or_drop(
        self,
        optimizer: Optimizer,
        norm: Tensor,
        length: float,
        location: str,
        on_event: Callable[[str], None],
    ) -> NonFiniteError | None:
        """End a step with the gradients' `norm`, `length` on the host; return why it is dropped,
        None: it is taken.
        """
        if self.update.fails(length):
            again = partial(self.update.accumulate, self._parameters())
            self.guard.refuse(
                lambda: self.guard.non_finite_gradient(location, again, self._drop_gradients)
            )
        if (dropped := self.guard.fault) is not None:
            self.update.drop()
            self._end_step()
            self.guard.drop(dropped, self.global_step)
            return dropped
        with self.memory.trace.span("optimizer", f"step {self.global_step + 1}"):
            with self.model.retry.once("in the optimizer's step"):
                stepped = self.update.step(optimizer, self._parameters(), norm, length, on_event)
            if stepped:
                self._rates.step()
            self._end_step()
        return None

    def fit(
        self,
        dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        resume: bool = False,
        weights_only: bool = False,
        say: Callable[[str], None] = print,
        stop: Stop | None = None,
    ) -> dict[str, Any]:
        """Train for the epochs or steps of the config, and save the adapter with card and
        tokenizer.

        They are in `output_dir`. A trainer that has already made steps, or loaded a checkpoint,
        continues at its `global_step`.

        Args:
            dataset: rows with `input_ids` and `labels`; rows of text, prompts or messages; or
                files.
            eval_dataset: data of the same kinds to evaluate every `eval_steps`, or after each
                epoch.
            resume: continue from the newest valid checkpoint in `output_dir`, and report newer
                damaged ones.
            weights_only: with `resume`: take adapters, generators and step from the checkpoint, and
                an empty optimizer.
            say: is called with each line about the resumed checkpoint and the kept adapter.
            stop: is called before each layer, and returns the reason to stop, or None. The current
                step or evaluation is abandoned, and the last whole step is saved. Either all
                processes have it, or none.

        Returns:
            The last log: `train_loss`, ..., and, if evaluated, `eval_loss`, its best value, and
            `best_step`.

        Raises:
            Stopped: `stop` returned a reason.
            ConfigError: another run writes to `output_dir`.
            DiskFull: there is no space for two checkpoints, or for the last one at the end of the
                run.
        """
        with one_run(self.backend.replicas, Path(self.config.output_dir)):
            if self.files is not None and not isinstance(dataset, TokenDataset | PreferenceDataset):
                then = (
                    newest_settings(Path(self.config.output_dir)).get("template_date")
                    if resume
                    else None
                )
                self.config = first_alone(
                    self.backend.replicas, partial(self.files.dated, self.config, then)
                )
            rows = as_rows(dataset, self.config, self.files, say)
            if self.files is not None:
                self.files.note_rows(rows)
            eval_rows = None
            if eval_dataset is not None:
                eval_rows = as_rows(eval_dataset, self.config, self.files, say)
            report = say if self.backend.replicas.first else no_event
            data = plain_data(self, rows, eval_rows, report)
            optimizer = self.ready()
            if self.global_step == 0:  # each process draws its own dropout
                torch.manual_seed(self.config.seed + self.backend.replicas.rank)
            if resume:
                restore = partial(self.restore, weights_only=weights_only)
                progress = resumed(data, self, restore, report, weights_only=weights_only)
            else:
                progress = begun(data, self.global_step, weights_only=weights_only)
            if self.config.save_steps or self.config.load_best_model_at_end:
                check_savable(optimizer, self.backend.parallel.size)
                self.require_room(1 if resume else 2)
            if self.schedule is None:
                taken = self.global_step - self.skipped_steps
                self.follow(make_schedule(optimizer, self.config, data.num_steps, taken))
            stage = Stage(self, data, plain_policy(self.config), progress)
            schedule = cast(LRScheduler, self.schedule)
            result = train_stage(stage, data, schedule, self.callbacks, stop)
            first_alone(self.backend.replicas, self._base_files.check)
            leave(stage, data, result, self._base, self.files, report)
            return result

    def require_room(self, count: int) -> None:
        """Raise `DiskFull`, in every process, if `output_dir` has no space for this many
        checkpoints.
        """
        optimizer = self.ready()
        adapters = nbytes_of(self._parameters())
        reference = self.model.reference
        tensors = (
            tensor
            for state in optimizer.state.values()
            for tensor in state.values()
            if torch.is_tensor(tensor)
        )
        moments = nbytes_of(tensors)
        if (not moments or self.update.over) and isinstance(
            optimizer, torch.optim.Adam | torch.optim.AdamW
        ):
            # which there are after its first step, in all processes together
            moments = 2 * adapters
        adapters += 0 if reference is None else reference.nbytes
        check_free_bytes_for(
            count, adapters + moments, Path(self.config.output_dir), self.backend.replicas
        )

    def evaluate(self, dataset: Dataset) -> dict[str, float]:
        """Return `eval_loss`, `eval_perplexity` and `eval_tokens` of a data set, as
        `lema.train.evaluate` does.
        """
        rows = packed(as_rows(dataset, self.config, self.files, no_event), self.model, self.config)
        with watched(self.model, self.config):
            passes = passes_of_rows(rows, self.config, self.backend.replicas, self.model.padding)
            return evaluate(self.model, passes)

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        """Write a checkpoint that `load_checkpoint` and `PeftModel.from_pretrained` read.

        It replaces one of that name. It does not contain batches of a step that is not complete.
        All processes call this, and the first one writes.

        Args:
            directory: must be on a disk that all processes see.
            extra: further state of the caller, which JSON can hold.
            writers: add further files; each is called with the directory.

        Raises:
            DiskFull: there is no space. As after all of these, the earlier one of that name is
                still there, and every process raises the error.
            DiskError: the checkpoint cannot be written.
            NonFiniteError: a value that would be saved is NaN or infinite.
            ConfigError: the optimizer's state is more than tensors and JSON types.
        """
        about = {
            "global_step": self.global_step,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
            "extra": dict(extra or {}),
        }
        adapters = self._adapters()
        parallel = self.backend.parallel
        config = self.config
        reference = self.model.reference
        saved_optimizer = optimizer_state(self.ready(), parallel, self.update.over)
        adapter_state = whole_adapter(adapters, parallel)
        states = states_of_all(self.backend, self.model.split.state)
        state = {
            **about_run(config, "adapters", self._base.fingerprint, self.model.split.dtype),
            **states,
            **about,
        }
        written = class_names(adapters.get_base_model()).num_forms * (1 + (reference is not None))
        nbytes = (
            nbytes_of(self._parameters() if adapter_state is None else adapter_state.values())
            * written
        )
        adapter = partial(
            save_adapter,
            adapters,
            base=self._base.name,
            revision=self._base.revision,
            consolidated=adapter_state,
        )
        every: list[Writer] = [
            lambda _: self._base_files.check(),
            adapter,
            partial(save_settings, config),
            partial(write_base, base=self._base),
            *([] if self.files is None else [self.files.write_rendering]),
            *reference_writers(reference, adapters, self._base, parallel),
            *writers,
        ]
        write = partial(write_checkpoint, Path(directory), saved_optimizer, state, every, nbytes)
        first_alone(self.backend.replicas, write)

    def load_checkpoint(
        self, directory: str | Path, *, weights_only: bool = False
    ) -> dict[str, Any]:
        """Restore adapters, optimizer, schedule, generators and step.

        Args:
            directory: the checkpoint.
            weights_only: begin with an empty optimizer, whose saved state may be missing or
                damaged.

        Returns:
            The saved `extra`.

        Raises:
            AdapterError: the checkpoint is damaged, or of another optimizer or model.
            ConfigError: the checkpoint is of another adapter.
        """
        check_sound(Path(directory), weights_only=weights_only)
        return self.restore(directory, weights_only=weights_only)

    def restore(self, directory: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Do the same as `load_checkpoint` for a checkpoint whose files have been checked.

        Args:
            directory: the checkpoint, whose files were compared with its manifest.
            weights_only: begin with an empty optimizer.

        Returns:
            The saved `extra`.

        Raises:
            AdapterError: the state is damaged, or of another optimizer or model.
            ConfigError: the checkpoint is of another adapter.
        """
        path = Path(directory)
        optimizer = self.ready()
        adapters = self._adapters()
        state = read_state(path)
        check_same_adapter(adapters, path)
        # because the numbers of a run may not change within it
        check_base(path, self.gbi, exact=True)
        arguments = adapters, path, self.model.split.layers_name, self.backend.parallel
        restore_reference(self.model.reference, *arguments)
        load_weights(*arguments)
        if not weights_only:
            local_indices = (
                None if self.update.over is None else own_share(optimizer, self.update.over)
            )
            restore_optimizer(
                optimizer, path, state["optimizer"], self.backend.parallel, local_indices
            )
        try:
            self._rates.restore(state["schedule"], optimizer)
            self.scaler.load_state_dict(state["scaler"])
            restore_own(self.backend, state, self.config.seed, self.model.split.state)
            self._forget()
            self._count.restore(int(state["global_step"]))
            self.guard.restore(int(state["skipped_steps"]))
            return dict(state["extra"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise AdapterError(
                f"the checkpoint's state is damaged: {error!r}", where=str(path)
            ) from error

    def take_settings(self, changed: Collection[str]) -> None:
        """Apply the settings with these names from the next step on. Objects that the caller
        made do not change.
        """
        if self._makes_optimizer and not UPDATE.isdisjoint(changed):
            set_update(self.ready(), self.config)
            if self.schedule is not None:
                set_rates(self.ready(), self.schedule.get_last_lr())
        if not SCHEDULE.isdisjoint(changed):
            self._rates.forget_saved()  # the one that is made next follows the config alone

    def follow(self, schedule: LRScheduler) -> None:
        """Let the learning rate follow `schedule`, from its position in the loaded checkpoint."""
        self._rates.follow(schedule, self.ready())

    @cached_property
    def _base(self) -> Base:
        return base_of(self.config, self.gbi, self._base_files, self.model.split.dtype)

    @cached_property
    def _base_files(self) -> BaseFiles:
        return BaseFiles(self.gbi, self.model.stream.unchanged)

    def _adapters(self) -> PeftModel:
        if self.peft_model is None:
            raise ConfigError(
                "there is no adapter to train", how="call initialize_lora() before get_trainer()"
            )
        return self.peft_model

    def ready(self) -> Optimizer:
        """Return the optimizer, created if necessary, with the model in training mode."""
        self._adapters().train()
        if self.optimizer is None:
            self._base_files  # noqa: B018 - now, because what is saved says on which files the run began
            optimizer = make_optimizer(
                self._parameters(), self.config, self.peft_model, replicas=self.update.over
            )
            self.optimizer = optimizer
        return self.optimizer

    def drop_optimizer(self) -> None:
        """Have the next step make another optimizer, whose moments begin empty."""
        self.optimizer = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._adapters().parameters() if parameter.requires_grad]

    def _end_step(self) -> None:
        self._drop_gradients()
        self.backend.end_step()
        self._count.end_step()
        self.guard.begin_step()

    def _forget(self) -> None:
        self._count.begin_step()
        self.guard.begin_step()
        self.update.forget()
        self.memory.cancel()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():  # also those that the user's optimizer leaves out
            parameter.grad = None
