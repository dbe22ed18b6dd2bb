"""Training a model's own weights while its layers stream: masters and optimizer state in host
memory.

The weights of the layers stay in host memory, from where they stream. Each layer's gradients are
complete after its one visit in the backward (`lema.engine.layers.whole`). They leave the device,
and in a thread of its own the layer is stepped and rounded while the backward goes on below; so
gradients of two layers exist at a time. Where they are clipped, layers are stepped when the norm of
all is known, and gradients wait in host memory until then.

What is exact: weights in fp32 become, bit for bit, those of the whole model in memory under the
same optimizer. In bfloat16 they become those of a whole model whose gradients (in bfloat16) step
masters in fp32, and whose weights are these masters rounded to the nearest.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lema.backend import Download
from lema.backend.group import sum_gradients
from lema.backend.interrupt import autograd_in_this_thread
from lema.config import LemaConfig
from lema.engine import StreamedModel
from lema.engine.numerics import deterministic_only
from lema.engine.optim import make_optimizer, set_update
from lema.engine.trained_weights import Leaves, TrainedWeights
from lema.errors import ConfigError, NonFiniteError
from lema.storage import GlobalBinaryIndex
from lema.storage.verify import BaseFiles
from lema.train.checkpoint.format import Writer
from lema.train.checkpoint.resume import UPDATE
from lema.train.full.checkpoint import carry_moments, check_full, read_full, write_full
from lema.train.full.masters import BackgroundStep, GradientOffload, Masters, step_part
from lema.train.full.step import FullStep
from lema.train.health.nonfinite import where_began
from lema.train.health.stepguard import StepGuard
from lema.train.steps import (
    StepResult,
    check_free_bytes_for,
    count_tokens,
    no_event,
)
from lema.train.update import loss_of_all

__all__ = ["FullTraining"]


class FullTraining:
    """Trains the weights of a streamed model whose names are `chosen`; its layers that train are
    kept in host memory. Of several processes each has all masters, and its share of every batch.
    Checkpoints keep the fingerprint of `gbi`. Errors are those of `Masters`, and `ConfigError` of
    an optimizer other than AdamW."""

    def __init__(
        self,
        model: StreamedModel,
        config: LemaConfig,
        chosen: Callable[[str], bool] = lambda _: True,
        gbi: GlobalBinaryIndex | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._gbi = gbi
        self._base_files = None if gbi is None else BaseFiles(gbi, model.stream.unchanged)
        self.master_store = Masters(model, config, chosen)
        if config.optim != "adamw_torch":
            what = "weights of the model train only with AdamW, layer by layer"
            raise ConfigError(
                what, where=f"optim: {config.optim}", how="remove optim, or train adapters"
            )
        if config.rope_parameters is not None:
            what = "a model whose weights train keeps the rotary parameters of its config.json"
            how = "leave it out, or write the parameters into that file"
            raise ConfigError(what, where="rope_parameters", how=how)
        self.optimizer = make_optimizer(
            self.masters.values(), config, model.split.model, self.masters
        )
        self.master_store.attach(self.optimizer)
        names_by_layer = {
            layer: list(names.values()) for layer, names in self.master_store.by_layer.items()
        }
        model.train_weights(TrainedWeights(names_by_layer, self._done))
        self.global_step = 0
        self.grad_norm: float | None = None
        self.guard = StepGuard(model, config.max_skipped_steps)
        self._step = FullStep(self.guard, "step 1")
        self._behind = BackgroundStep("lema-optimizer")
        self._offload = GradientOffload(model, self.master_store)

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The masters by the names of their weights, fp32."""
        return self.master_store.by_name

    @property
    def skipped_steps(self) -> int:
        """Steps that were dropped, for a loss or a gradient that was not finite."""
        return self.guard.skipped

    @property
    def dropped(self) -> NonFiniteError | None:
        """Why the last step was dropped; None: it was not."""
        return self.guard.dropped

    @property
    def _clipped(self) -> bool:
        return self.config.max_grad_norm is not None

    @property
    def module(self) -> nn.Module:
        """What callbacks see as the model."""
        return self.model.split.model

    def ready(self) -> Optimizer:
        """Return the optimizer."""
        return self.optimizer

    def accumulate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        more: bool = False,  # noqa: ARG002 - the first layers may not be read before they are stepped
        following: Sequence[Mapping[str, Tensor]] | None = None,  # noqa: ARG002 - the signature of `Steps`
        where: str = "",
        on_event: Callable[[str], None] = no_event,  # noqa: ARG002 - there is no moment at which all gradients exist
    ) -> StepResult:
        """Take one optimizer step, as `lema.train.steps.Steps` says; the loss of one that is
        dropped is NaN. It may be when no weight was updated: without clipping some layers may have
        been."""
        trained, tokens = count_tokens(micro_batches, self.model)
        location = f"step {self.global_step + 1}{where}"
        self.guard.begin_step()
        self._step = FullStep(self.guard, location)
        try:
            operations = deterministic_only("between the layers")
            with (
                autograd_in_this_thread(),
                operations,
                self.model.engine.observing(self._step.hidden.observe),
            ):
                loss = self._pass(micro_batches, trained, location)
                self._finish()
        except BaseException as error:
            if (thread_error := self._forget()) is not None:
                error.add_note(f"also, in the optimizer's thread: {thread_error}")
            if not self._drops(error):
                raise
            loss = math.nan
        self.model.backend.end_step()
        self.global_step += 1
        return StepResult(loss, trained, tokens, self.grad_norm, self.dropped)

    def require_room(self, count: int) -> None:
        """Raise `DiskFull`, in every process, unless `output_dir` has room for so many
        checkpoints.
        """
        # masters, and two moments of each
        nbytes = 3 * sum(master.nbytes for master in self.masters.values())
        check_free_bytes_for(
            count, nbytes, Path(self.config.output_dir), self.model.backend.replicas
        )

    def take_settings(self, changed: Collection[str]) -> None:
        """Let the settings of these names hold from the next step on, as `config` has them now."""
        if not UPDATE.isdisjoint(changed):
            set_update(self.optimizer, self.config)

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        """Write masters, optimizer, generators and step; errors are as `write_full`'s."""
        about = {
            "global_step": self.global_step,
            "skipped_steps": self.skipped_steps,
            "extra": dict(extra or {}),
        }
        backend = self.model.backend
        master_store = self.master_store
        model_state = self.model.split.state
        every: list[Writer] = [lambda _: self._check_base(), *writers]
        write_full(
            Path(directory),
            backend,
            master_store,
            self.optimizer,
            model_state,
            about,
            self.config,
            self._base_files,
            every,
        )

    def restore(self, directory: str | Path) -> dict[str, Any]:
        """Go on from what `save_checkpoint` wrote; return its `extra`, or raise `AdapterError`
        of what does not fit.
        """
        path = Path(directory)
        if self._base_files is not None and self._gbi is not None:
            check_full(path, self._base_files, self._gbi)
        for layer in self.master_store.by_layer:
            self.model.stream.rewrite(layer, lambda: None)
        try:
            model_state = self.model.split.state
            state = read_full(
                path,
                self.model.backend,
                self.master_store,
                self.optimizer,
                self.config.seed,
                model_state,
            )
        finally:
            self.model.stream.flush()
        self.global_step = int(state["global_step"])
        self.guard.restore(int(state["skipped_steps"]))
        return dict(state["extra"])

    def carry_moments(self, directory: str | Path) -> dict[str, Any]:
        """Begin with the moments in a checkpoint of another selection; masters stay. Return its
        `extra`.
        """
        return carry_moments(Path(directory), self.master_store, self.optimizer)

    def _check_base(self) -> None:
        if self._base_files is not None:
            self._base_files.check()

    def close(self) -> None:
        """End the optimizer's thread and let the file go; the model trains its own weights no
        more.
        """
        self._behind.close()
        self.model.train_weights(TrainedWeights({}, lambda *_: None))
        self.master_store.close()

    def _pass(
        self, micro_batches: Sequence[Mapping[str, Tensor]], num_tokens: int, location: str
    ) -> float:
        """Go through the layers, forward and backward; return the loss of all processes, rounded
        to fp32.
        """
        model = self.model
        replicas = self.model.backend.replicas
        alone = bool(micro_batches) or replicas.size == 1
        self.guard.begin_pass(micro_batches, num_tokens)
        with model.stop.opened():
            loss = model.loss(micro_batches, num_tokens=num_tokens) if alone else None
            mine = 0.0 if loss is None else float(loss.detach())
        value = loss_of_all(replicas, mine)
        if not math.isfinite(value):  # asked first, because the backward steps layers already
            untaken = f"{location}; no weight was updated"
            raise self.guard.note(self.guard.non_finite_loss(value, mine, untaken))
        if loss is not None and replicas.size == 1:
            with model.stop.opened():  # until a layer is stepped
                loss.backward()
        # gradients of each layer are added up in it: no process leaves alone
        elif loss is not None:
            loss.backward()
        else:
            for layer in sorted(self.master_store.by_layer, reverse=True):
                self._done(layer, {})
        self._behind.wait()
        return float(torch.tensor(value, dtype=torch.float32))

    def _done(self, layer: int, gradients: Leaves) -> None:
        """Take the gradients of a layer, and go on in the other thread. No computation reads the
        layer any more.
        """
        names = self.master_store.by_layer[layer].items()
        named_gradients = {name: gradients[key].detach() for name, key in names if key in gradients}
        # in every process before what these tell each other, so that what fails fails in all
        self._behind.wait()
        host_gradients, downloads = self._offload.begin(
            layer, self._offload.summed(layer, named_gradients), retained=self._clipped
        )
        if self._clipped:
            self._step.wait(host_gradients)
        else:
            self.model.stop.close()  # a step is taken whole
            self.model.stream.rewrite(layer, self._behind.wait)
        self._behind.begin(partial(self._take, layer, host_gradients, downloads))

    def _take(
        self, layer: int, gradients: dict[str, Tensor], downloads: Sequence[Download]
    ) -> None:
        """Look at the gradients of a layer once they have landed; step it, where nothing is
        clipped.
        """
        for download in downloads:
            download.landed()
        location = f"in the backward of layer {layer}"
        begun = None if self._clipped else "the layers above it are already updated"
        for name, gradient in gradients.items():
            self._step.measure(name, gradient.float(), location, begun)
        if not self._clipped:
            self._step.begin_update()
            self._step_layer(layer, gradients)

    def _drops(self, error: BaseException) -> bool:
        """Whether a step that failed is dropped, and the run goes on; say where gradients began
        not to be finite.
        """
        if (fault := self.guard.fault) is None or fault is not error:
            return False
        step = self._step
        if (name := step.non_finite_name) is not None:
            began = where_began(self.model.split, name, step.hidden.highest())
            fault.locate(f"{fault.where}; first non-finite gradient: {began}")
        if step.has_updated or not self.guard.may_drop(fault):
            return False
        self.grad_norm = None
        self.guard.drop(fault, self.global_step + 1)
        return True

    def _step_layer(
        self, layer: int, gradients: dict[str, Tensor], norm: Tensor | None = None
    ) -> None:
        """Step one layer, and update the streamed copy of its weights."""
        masters = [self.masters[name] for name in gradients]
        with self.model.stream.trace.span("optimizer", f"layer {layer}"):
            for master, gradient in zip(masters, gradients.values(), strict=True):
                master.grad = gradient.float()
            if norm is not None and self.config.max_grad_norm is not None:
                clip_grads_with_norm_(masters, self.config.max_grad_norm, norm)
            step_part(self.optimizer, masters)
            for master in masters:
                master.grad = None
            self.master_store.round(gradients)

    def _finish(self) -> None:
        """Step the rest: all layers if gradients are clipped, and the weights outside of layers."""
        self._offload.let_go()
        stream = self.model.stream
        outside = self.master_store.outside
        parameters = {name: self.model.split.model.get_parameter(name) for name in outside}
        sum_gradients(self.model.backend.replicas, list(parameters.values()))
        begun = (
            None
            if self._clipped or not self.master_store.by_layer
            else "the layers are already updated"
        )
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to("cpu", torch.float32)
                parameter.grad = None
                self._step.measure(name, gradient, "outside the layers", begun)
                self.masters[name].grad = gradient
        norm = self._step.total_norm(self.masters, clipped=self._clipped)
        self._step.begin_update()
        if self.config.max_grad_norm is not None:
            for layer, names in self.master_store.by_layer.items():
                with stream.rewritten(layer):
                    self._step_layer(layer, self._step.waiting(names), norm)
            clip_grads_with_norm_(
                [self.masters[name] for name in outside], self.config.max_grad_norm, norm
            )
        self.optimizer.step()  # what lies outside the layers: nothing else has a gradient any more
        self.optimizer.zero_grad()
        self.master_store.round(outside)
        stream.flush()
        self.grad_norm = float(norm)
        self._step.release()

    def _forget(self) -> BaseException | None:
        """Drop a step that failed: its gradients and announced leases. Return an error that came
        meanwhile.
        """
        failure = self._behind.failure()
        self._offload.let_go()
        self.model.stream.cancel()
        self.model.stream.flush()
        self._step.release()
        for parameter in (
            *self.masters.values(),
            *map(self.model.split.model.get_parameter, self.master_store.outside),
        ):
            parameter.grad = None
        return failure
