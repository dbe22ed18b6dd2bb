"""Gradients of streamed layers on their way to host memory, one layer after the other.

Training a model's own weights while its layers stream: masters and optimizer state in host memory.

The weights of the layers stay in host memory, from where they stream. Each layer's gradients are complete after its one
visit in the backward (`lema.engine.visit`). They leave the device, and in a thread of its own the layer is stepped
and rounded while the backward goes on below; so gradients of two layers exist at a time. Where they are clipped,
layers are stepped when the norm of all is known, and gradients wait in host memory until then.

What is exact: weights in fp32 become, bit for bit, those of the whole model in memory under the same optimizer. In
bfloat16 they become those of a whole model whose gradients (in bfloat16) step masters in fp32, and whose weights are
these masters rounded to the nearest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from lema.backend import Download
from lema.backend.collectives import sum_gradients
from lema.config import LemaConfig
from lema.engine import StreamedModel
from lema.engine.loss import trained_tokens
from lema.engine.optim import make_optimizer
from lema.engine.trained_weights import Leaves, TrainedWeights
from lema.errors import NonFiniteError
from lema.train.full.checkpoint import carry_moments, read_full, write_full
from lema.train.full.masters import Behind, Masters, step_part
from lema.train.guards import HiddenGradients, non_finite_loss

__all__ = ["FullTraining", "Landing"]


class Landing:
    """Brings the gradients of one layer at a time to host memory.

    Args:
        model: the streamed model.
        places: where gradients wait that are kept.
    """

    def __init__(self, model: StreamedModel, places: Masters) -> None:
        self._backend, self._places = model.backend, places
        self._in_host = model.backend.memory().shared  # a gradient is, where it is formed
        self._passing: Tensor | None = None
        self._downloads: list[Download] = []  # under way

    def begin(
        self, layer: int, found: dict[str, Tensor], *, kept: bool
    ) -> tuple[dict[str, Tensor], Sequence[Download]]:
        """Return where gradients of a layer are in host memory, by name, once the downloads have landed.

        Args:
            layer: its number; the one before has been stepped.
            found: the gradients, on the device.
            kept: have them wait where they have their place; else they are gone when the next layer comes.
        """
        self.let_go()
        if self._in_host and not kept:
            return found, ()
        targets = self._places.waiting(layer) if kept else self._one_layer(found)
        for name, gradient in found.items():
            self._downloads.append(self._backend.download(gradient.contiguous(), targets[name]))
        return {name: targets[name] for name in found}, tuple(self._downloads)

    def let_go(self) -> None:
        """Let the device have the memory of gradients that leave it, once they have."""
        for one in self._downloads:
            one.release()
        self._downloads = []

    def _one_layer(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return memory for gradients of one layer at a time."""
        if self._passing is None:
            sizes = (sum(self._places.weight(one).nbytes for one in names) for names in self._places.by_layer.values())
            self._passing = self._backend.host_buffer(max(sizes))
        targets, start = {}, 0
        for name, gradient in sorted(found.items(), key=lambda item: -item[1].itemsize):
            piece = self._passing[start : start + gradient.nbytes]
            targets[name], start = piece.view(gradient.dtype).view(gradient.shape), start + gradient.nbytes
        return targets


class FullTraining:
    """Trains weights of a streamed model. Of several processes each has all masters, and its share of every batch.

    Args:
        model: the streamed model; its layers that train are kept in host memory.
        config: the optimizer's settings, `max_grad_norm`, `host_memory` and where files may lie.
        chosen: says of a parameter's name in the model whether it trains.

    Attributes:
        masters: what trains, by its name in the model: fp32, in host memory.
        optimizer: over them.
        global_step: optimizer steps of the run, those that were dropped among them.
        skipped_steps: how many were dropped, for a loss or a gradient that was not finite.
        dropped: why the last step was dropped; None: it was not.
        grad_norm: of all gradients of the last step, before they were clipped; None: there was none.

    Raises:
        ConfigError: nothing trains, or something that cannot: it is not in host memory, quantised or in float16.
        MemoryLimitError: `host_memory` does not hold what cannot lie in a file.
        DiskError: the disk does not hold the rest.
    """

    def __init__(
        self, model: StreamedModel, config: LemaConfig, chosen: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._model, self._config = model, config
        self._places = Masters(model, config, chosen)
        self.masters = self._places.by_name
        self.optimizer = make_optimizer(self.masters.values(), config)
        self._places.attach(self.optimizer)
        self._layers_name = f"{model.split.layers_name}."
        own = {layer: [self._places.own(name) for name in names] for layer, names in self._places.by_layer.items()}
        model.train_weights(TrainedWeights(own, self._done, self._begun))
        self.global_step = self.skipped_steps = 0
        self.dropped: NonFiniteError | None = None
        self.grad_norm: float | None = None
        self._fault: tuple[NonFiniteError, str | None] | None = None  # of this step, and whose gradient is not finite
        self._where = ""
        self._stepped = False  # whether some weights were, in this step
        self._hidden = HiddenGradients()
        self._behind = Behind("lema-optimizer")
        self._last = True  # of the passes of a step
        self._begun_with: dict[str, Tensor] = {}  # gradients of the passes before
        self._norms: dict[str, Tensor] = {}
        self._clipped = config.max_grad_norm is not None
        self._landing = Landing(model, self._places)

    @property
    def host_bytes(self) -> int:
        """Bytes in memory of what trains: as it streams, masters, moments, gradients that wait for their norm."""
        return self._places.host_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors: masters, and two moments of each."""
        return 3 * sum(master.numel() * master.itemsize for master in self.masters.values())

    @property
    def mapped_bytes(self) -> int:
        """Of masters, moments and waiting gradients, the bytes that lie in a file."""
        return self._places.mapped_bytes

    @property
    def mapped_layers(self) -> frozenset[int]:
        """The layers that have these in the file."""
        return self._places.mapped

    def step(
        self, passes: Sequence[Sequence[Mapping[str, Tensor]]], num_tokens: int | None = None, *, where: str = ""
    ) -> Tensor:
        """Take one optimizer step; return the loss of all its passes and processes, an fp32 scalar.

        Where the loss or a gradient is not finite and no weight was stepped yet, the step is dropped, if
        `max_skipped_steps` lets one more be: `dropped` says why, and the loss is NaN.

        Args:
            passes: the micro-batches of each pass over the layers. Of several processes each gives its share, as many
                passes as the others, some of them empty.
            num_tokens: trained tokens of all; None: they are counted.
            where: which rows these are, for an error.

        Raises:
            NonFiniteError: the loss is NaN or infinite, or the norm of a gradient, and the step is not dropped. Without
                clipping layers may have been stepped by then, as the error says.
        """
        replicas = self._model.backend.replicas
        if num_tokens is None and (len(passes) > 1 or replicas.size > 1):
            num_tokens = sum(replicas.exchange(sum(trained_tokens(one) for one in passes)))
        total = torch.zeros((), dtype=torch.float32, device=self._model.backend.device)
        self._fault, self._stepped, self.dropped, self._where = None, False, None, where
        self._hidden.forget()
        try:
            with self._model.seen_by(self._hidden.look):
                for number, micro_batches in enumerate(passes):
                    self._last = number == len(passes) - 1
                    total = total + self._pass(micro_batches, num_tokens)
                self._finish()
        except BaseException as error:
            if (other := self._forget()) is not None:
                error.add_note(f"besides, in the optimizer's thread: {other}")
            if not self._drops(error):
                raise
            total = torch.full_like(total, math.nan)
        self._model.backend.end_step()
        self.global_step += 1
        return total

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        write_more: Callable[[Path], None] | None = None,
        *,
        base: str | None = None,
    ) -> None:
        """Write masters, optimizer, generators and step: whole, or not at all; of several processes the first does.

        Args:
            directory: its name; replaced if it is there.
            extra: further JSON state, for the caller's own use.
            write_more: writes further files into the directory it is given, before the checkpoint gets its name.
            base: fingerprint of the model that the weights were of at first; None: it is not known.

        Raises:
            DiskError: it could not be written, or does not read back as it was written; what was there before is
                untouched.
            NonFiniteError: a weight or a moment is not finite; likewise.
        """
        about = {
            "global_step": self.global_step,
            "skipped_steps": self.skipped_steps,
            "extra": dict(extra or {}),
        }
        backend, places = self._model.backend, self._places
        write_full(Path(directory), backend, places, self.optimizer, about, self._config, base, write_more)

    def load_checkpoint(self, directory: str | Path, *, carry: bool = False) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote; return its `extra`.

        Args:
            directory: its name.
            carry: it is of another selection of weights of the same model, of which only the optimizer's moments are
                taken: of what trained there, too; those of others are empty. Masters are what the model began with.

        Raises:
            AdapterError: it is damaged, of another kind of training, or of other weights.
        """
        path = Path(directory)
        if carry:
            return carry_moments(path, self._places, self.optimizer)
        for layer in self._places.by_layer:
            self._model.stream.rewrite(layer, lambda: None)
        try:
            state = read_full(path, self._model.backend, self._places, self.optimizer, self._config.seed)
        finally:
            self._model.stream.settle()
        self.global_step = int(state["global_step"])
        self.skipped_steps = int(state.get("skipped_steps", 0))  # earlier versions dropped none
        return dict(state["extra"])

    def close(self) -> None:
        """End the optimizer's thread and let the file go; the model trains its own weights no more."""
        self._behind.close()
        self._model.train_weights(TrainedWeights({}, lambda *_: None))
        self._places.close()

    def _pass(self, micro_batches: Sequence[Mapping[str, Tensor]], num_tokens: int | None) -> Tensor:
        """Run one pass over the layers, forward and backward; return its loss."""
        model, replicas = self._model, self._model.backend.replicas
        place, before = f"{self._place}; no weight was stepped", model.backend.rng_state()
        alone = bool(micro_batches) or replicas.size == 1
        with model.stop.opened():
            loss = model.loss(micro_batches, num_tokens=num_tokens) if alone else None
            mine = 0.0 if loss is None else float(loss.detach())
        value = sum(replicas.exchange(mine))
        if not math.isfinite(value):  # asked first: the backward steps layers already
            if math.isfinite(mine):
                raise self._faulty(
                    NonFiniteError(f"the loss is {value}", where=f"{place}; it comes from another process")
                )
            after = model.backend.rng_state()
            model.backend.set_rng_state(before)  # what dropout drew is drawn again
            error = non_finite_loss(model, micro_batches, value, place)
            model.backend.set_rng_state(after)
            raise self._faulty(error)
        if loss is not None and replicas.size == 1:
            with model.stop.opened():  # until a layer is stepped
                loss.backward()
        elif loss is not None:  # gradients of each layer are added up in it: no process leaves alone
            loss.backward()
        else:
            for layer in sorted(self._places.by_layer, reverse=True):
                begun = {own: self._begun(layer, own) for own in map(self._places.own, self._places.by_layer[layer])}
                self._done(layer, {own: gradient for own, gradient in begun.items() if gradient is not None})
        self._behind.wait()
        return torch.tensor(value, dtype=torch.float32, device=model.backend.device)

    def _done(self, layer: int, gradients: Leaves) -> None:
        """Take the gradients of a layer, and go on in the other thread. No computation reads the layer any more."""
        names = {name: self._places.own(name) for name in self._places.by_layer[layer]}
        found = {name: gradients[own].detach() for name, own in names.items() if own in gradients}
        if not self._last:
            arrived, downloads = self._landing.begin(layer, found, kept=True)
            for one in downloads:
                one.landed()
            self._begun_with.update(arrived)
            return
        self._behind.wait()  # in every process before what these tell each other, so that what fails fails in all
        arrived, downloads = self._landing.begin(layer, self._summed(layer, found), kept=self._clipped)
        if self._clipped:
            self._begun_with.update(arrived)
        else:
            self._model.stop.close()  # a step is taken whole
            self._model.stream.rewrite(layer, self._behind.wait)
        self._behind.begin(partial(self._take, layer, arrived, downloads))

    def _begun(self, layer: int, own: str) -> Tensor | None:
        gradient = self._begun_with.get(f"{self._layers_name}{layer}.{own}")
        return None if gradient is None else gradient.to(self._model.backend.device)

    def _summed(self, layer: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's gradients, added up over all processes."""
        backend = self._model.backend
        if backend.replicas.size == 1:
            return found
        parameters = {}
        for name in self._places.by_layer[layer]:
            weight, gradient = self._places.weight(name), found.get(name)
            held = torch.empty_like(weight, device=backend.device) if gradient is None else gradient
            parameters[name] = nn.Parameter(held, requires_grad=False)
            parameters[name].grad = gradient
        sum_gradients(backend.replicas, list(parameters.values()))
        return {name: one.grad for name, one in parameters.items() if one.grad is not None}

    def _take(self, layer: int, gradients: dict[str, Tensor], downloads: Sequence[Download]) -> None:
        """Look at the gradients of a layer once they have landed; step it, where nothing is clipped."""
        for one in downloads:
            one.landed()
        place = f"in the backward of layer {layer}"
        begun = None if self._clipped else "the layers above it were stepped already"
        for name, gradient in gradients.items():
            self._measure(name, gradient.float(), place, begun)
        if not self._clipped:
            self._stepped = True
            self._step_layer(layer, gradients)

    @torch.no_grad()
    def _measure(self, name: str, gradient: Tensor, place: str, begun: str | None) -> None:
        """Keep the norm of a gradient; `begun` says what was stepped before, if anything was.

        Raises:
            NonFiniteError: it is none.
        """
        norm = torch.linalg.vector_norm(gradient, 2.0)
        if not math.isfinite(float(norm)):
            how = "lower learning_rate, or look at the rows of this step"
            if begun is not None:
                how = (
                    f"resume from the last checkpoint; {how}; with max_grad_norm nothing is stepped before all are seen"
                )
            raise self._faulty(
                NonFiniteError(
                    f"the norm of the gradient of {name} is {float(norm)}",
                    where=f"{self._place}, {place}; {begun or 'no weight was stepped'}",
                    how=how,
                ),
                name,
            )
        self._norms[name] = norm

    @property
    def _place(self) -> str:
        return f"step {self.global_step + 1}{self._where}"

    def _faulty(self, error: NonFiniteError, name: str | None = None) -> NonFiniteError:
        """Note what is wrong with this step; `name` is that of the weight whose gradient is not finite."""
        self._fault = error, name
        return error

    def _drops(self, error: BaseException) -> bool:
        """Whether a step that failed is dropped, and the run goes on; say where gradients began not to be finite."""
        if self._fault is None or self._fault[0] is not error:
            return False
        found, name = self._fault
        if name is not None:
            found.where += f"; first non-finite gradient: {self._began(name)}"
        limit = self._config.max_skipped_steps
        if self._stepped or self.skipped_steps >= limit:
            if limit and not self._stepped:
                found.how = f"{limit} steps were dropped before this one (max_skipped_steps); {found.how}"
            return False
        self.skipped_steps += 1
        self.dropped, self.grad_norm = found, None
        if self._model.backend.replicas.first:
            warnings.warn(
                f"step {self.global_step + 1} was dropped, {self.skipped_steps} of at most {limit}: "
                f"{found.what} ({found.where})",
                stacklevel=3,
            )
        return True

    def _began(self, name: str) -> str:
        """Return where gradients began not to be finite: at a weight, or in a layer above that handed such down."""
        handed_down, layers = self._hidden.highest(), self._model.split.num_layers
        names = [one for one, _ in self._model.split.model.named_parameters()]
        if name.startswith(self._layers_name):
            layer = int(name.removeprefix(self._layers_name).partition(".")[0])
        else:
            above = any(one.startswith(self._layers_name) for one in names[: names.index(name)])
            layer = layers if above else -1
        if handed_down is None or handed_down <= layer:
            return name
        return "the head and the loss" if handed_down == layers else f"{self._layers_name}{handed_down}"

    def _step_layer(self, layer: int, gradients: dict[str, Tensor], norm: Tensor | None = None) -> None:
        """Step one layer and let what streams be what it has become."""
        masters = [self.masters[name] for name in gradients]
        with self._model.stream.trace.span("optimizer", f"layer {layer}"):
            for master, gradient in zip(masters, gradients.values(), strict=True):
                master.grad = gradient.float()
            if norm is not None and self._config.max_grad_norm is not None:
                clip_grads_with_norm_(masters, self._config.max_grad_norm, norm)
            step_part(self.optimizer, masters)
            for master in masters:
                master.grad = None
            self._places.round(gradients)

    def _finish(self) -> None:
        """Step what has not been stepped: all layers where gradients are clipped, and what lies outside them."""
        self._landing.let_go()
        stream, outside = self._model.stream, self._places.outside
        parameters = {name: self._model.split.model.get_parameter(name) for name in outside}
        sum_gradients(self._model.backend.replicas, list(parameters.values()))
        begun = None if self._clipped or not self._places.by_layer else "the layers were stepped already"
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.to("cpu", torch.float32), None
                self._measure(name, gradient, "outside the layers", begun)
                self.masters[name].grad = gradient
        norms = [self._norms[name] for name in self.masters if name in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms), 2.0) if norms else torch.zeros(())  # as get_total_norm's
        length = float(norm)
        if not math.isfinite(length) and self._clipped:
            raise self._faulty(
                NonFiniteError(
                    f"the norm of the gradients is {length}",
                    where=f"{self._place}; no weight was stepped",
                    how="lower learning_rate, or look at the rows of this step",
                )
            )
        self._stepped = True
        if self._config.max_grad_norm is not None:
            for layer, names in self._places.by_layer.items():
                with stream.rewritten(layer):
                    found = {name: self._begun_with[name] for name in names if name in self._begun_with}
                    self._step_layer(layer, found, norm)
            clip_grads_with_norm_([self.masters[name] for name in outside], self._config.max_grad_norm, norm)
        self.optimizer.step()  # what lies outside the layers: nothing else has a gradient any more
        self.optimizer.zero_grad()
        self._places.round(outside)
        stream.settle()
        self.grad_norm = length
        self._begun_with.clear()
        self._norms.clear()

    def _forget(self) -> BaseException | None:
        """Drop a step that failed: its gradients, and what was announced for it. Return what failed meanwhile."""
        failure = self._behind.failure()
        self._landing.let_go()
        self._model.stream.cancel()
        self._model.stream.settle()
        self._begun_with.clear()
        self._norms.clear()
        for name, master in self.masters.items():
            master.grad = None
            if name in self._places.outside:
                self._model.split.model.get_parameter(name).grad = None
        return failure
