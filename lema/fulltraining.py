"""Training a model's own weights while its layers stream: masters and optimizer state in host memory.

The weights of the layers stay in host memory, from where they stream. Each layer's gradients are complete after its one
visit in the backward (`lema.trainedweights`); without clipping the layer is stepped at once, so that gradients of one
layer exist at a time; with it, when the norm of all is known. What is stepped is the memory that the next lease reads:
in fp32 the streamed weights are the masters, in half precision they are rounded from masters in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lema.checkpoint import read_state, restore_optimizer, restore_own, states_of_all, write_checkpoint
from lema.config import LemaConfig
from lema.errors import AdapterError, ConfigError, NonFiniteError
from lema.nonfinite import non_finite_loss
from lema.optim import make_optimizer
from lema.streamed import StreamedModel
from lema.trainedweights import Leaves, TrainedWeights

__all__ = ["FullTraining"]

MASTERS = "masters.safetensors"
KIND = "full"  # of training, as a checkpoint says it


class FullTraining:
    """Trains weights of a streamed model, in one process.

    Args:
        model: the streamed model; its layers are all kept in host memory.
        config: the optimizer's settings, and `max_grad_norm`.
        chosen: says of a parameter's name in the model whether it trains.

    Attributes:
        masters: what trains, by its name in the model: in host memory those of the layers.
        optimizer: over them.
        global_step: optimizer steps taken.

    Raises:
        ConfigError: a layer that trains is not in host memory, nothing trains, or there are several processes.
    """

    def __init__(
        self, model: StreamedModel, config: LemaConfig, chosen: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._model, self._config = model, config
        self._layers_name = f"{model.split.layers_name}."
        self._names: dict[str, tuple[int, str]] = {}  # of layers' weights: the layer, and the name in it
        order: list[str] = []
        for name, parameter in model.split.model.named_parameters(remove_duplicate=True):
            inside = name.startswith(self._layers_name)
            parameter.requires_grad_(chosen(name) and not inside)
            if chosen(name):
                order.append(name)
                if inside:
                    number, _, own = name.removeprefix(self._layers_name).partition(".")
                    self._names[name] = int(number), own
        self._check(order)
        self._streamed = {name: self._stored(*place) for name, place in self._names.items()}
        self.masters = {name: self._master(name) for name in order}
        by_layer: dict[int, list[str]] = {}
        for layer, own in self._names.values():
            by_layer.setdefault(layer, []).append(own)
        model.train_weights(TrainedWeights(by_layer, self._done, self._begun))
        self._by_layer = {layer: [self._named(layer, own) for own in names] for layer, names in by_layer.items()}
        self.optimizer = make_optimizer(self.masters.values(), config)
        self.global_step = 0
        self._last = True

    def step(self, passes: Sequence[Sequence[Mapping[str, Tensor]]], num_tokens: int | None = None) -> Tensor:
        """Take one optimizer step; return the loss of all its passes, an fp32 scalar.

        Args:
            passes: the micro-batches of each pass over the layers.
            num_tokens: trained tokens of all; needed where there are several passes.

        Raises:
            NonFiniteError: the loss is NaN or infinite, or, where gradients are clipped, their norm.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._model.backend.device)
        for number, micro_batches in enumerate(passes):
            self._last = number == len(passes) - 1
            loss = self._model.loss(micro_batches, num_tokens=num_tokens)
            if not math.isfinite(value := float(loss.detach())):  # asked first: the backward steps layers already
                place = f"step {self.global_step + 1}; no weight was stepped"
                raise non_finite_loss(self._model, micro_batches, value, place)
            loss.backward()
            total = total + loss.detach()
        if self._config.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.masters.values(), self._config.max_grad_norm)
            if not math.isfinite(float(norm)):
                raise NonFiniteError(
                    f"the norm of the gradients is {float(norm)}",
                    where=f"step {self.global_step + 1}; no weight was stepped",
                    how="lower learning_rate, or look at the rows of this step",
                )
            for layer in self._by_layer:
                self._step_layer(layer)
        self.optimizer.step()  # what lies outside the layers: nothing else has a gradient any more
        self.optimizer.zero_grad()
        self._model.backend.end_step()
        self.global_step += 1
        return total

    def save_checkpoint(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write masters, optimizer, generators and step: whole, or not at all.

        Args:
            directory: its name; replaced if it is there.
            extra: further JSON state, for the caller's own use.

        Raises:
            DiskError: it could not be written.
        """

        def write_files(part: Path) -> None:
            save_file({name: master.detach().cpu() for name, master in self.masters.items()}, part / MASTERS)

        state = {
            "kind": KIND,
            "global_step": self.global_step,
            "schedule": None,
            "scaler": {},
            **states_of_all(self._model.backend),
            "extra": dict(extra or {}),
        }
        write_checkpoint(Path(directory), self.optimizer, state, write_files)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote; return its `extra`.

        Raises:
            AdapterError: it is damaged, of another kind of training, or of other weights.
        """
        path = Path(directory)
        state = read_state(path)
        if (kind := state.get("kind", "adapters")) != KIND:
            raise AdapterError(
                f"this is a checkpoint of {kind}, not of weights",
                where=str(path),
                how="name one of this kind of training",
            )
        try:
            saved = load_file(path / MASTERS)
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"the weights cannot be read: {error}", where=str(path / MASTERS)) from error
        shapes = {name: master.shape for name, master in self.masters.items()}
        if {name: tensor.shape for name, tensor in saved.items()} != shapes:
            other = next(iter(shapes.keys() ^ saved.keys()), "of other shapes")
            raise AdapterError(
                f"other weights were trained there: {other}", where=str(path / MASTERS), how="train the same selection"
            )
        with ExitStack() as stack, torch.no_grad():
            for layer in self._by_layer:
                stack.enter_context(self._model.stream.rewritten(layer))
            for name, master in self.masters.items():
                master.copy_(saved[name])
                self._round(name)
        restore_optimizer(self.optimizer, path, state["optimizer"])
        restore_own(self._model.backend, state, self._config.seed)
        self.global_step = int(state["global_step"])
        return dict(state["extra"])

    def _done(self, layer: int, gradients: Leaves) -> None:
        for own, gradient in gradients.items():
            master = self.masters[self._named(layer, own)]
            master.grad = gradient.to(device=master.device, dtype=master.dtype)
        if self._last and self._config.max_grad_norm is None:
            self._step_layer(layer)

    def _begun(self, layer: int, own: str) -> Tensor | None:
        gradient = self.masters[self._named(layer, own)].grad
        return None if gradient is None else gradient.to(self._streamed[self._named(layer, own)].dtype)

    def _step_layer(self, layer: int) -> None:
        """Step one layer and give the stream what it has become."""
        names = self._by_layer[layer]
        mine = {id(self.masters[name]) for name in names}
        others = [master for master in self.masters.values() if master.grad is not None and id(master) not in mine]
        waiting = [master.grad for master in others]
        for master in others:
            master.grad = None  # the optimizer leaves out what has none
        with self._model.stream.rewritten(layer):
            self.optimizer.step()
            for name in names:
                self.masters[name].grad = None
                self._round(name)
        for master, gradient in zip(others, waiting, strict=True):
            master.grad = gradient

    @torch.no_grad()
    def _round(self, name: str) -> None:
        """Have the streamed copy of a master be what that is now, where it is a copy."""
        streamed = self._streamed.get(name)
        if streamed is not None and streamed.dtype != self.masters[name].dtype:
            streamed.copy_(self.masters[name])

    def _named(self, layer: int, own: str) -> str:
        return f"{self._layers_name}{layer}.{own}"

    def _stored(self, layer: int, own: str) -> Tensor:
        return self._model.stream.stored(layer)[own]

    def _master(self, name: str) -> nn.Parameter:
        if name not in self._names:
            return self._of(name)
        return nn.Parameter(self._streamed[name].float())  # the same memory where it is fp32 already

    def _of(self, name: str) -> nn.Parameter:
        return self._model.split.model.get_parameter(name)

    def _check(self, chosen: Sequence[str]) -> None:
        stream = self._model.stream
        if not chosen:
            raise ConfigError("no weight is chosen to be trained")
        if missing := {layer for layer, _ in self._names.values()} - stream.host_cached:
            raise ConfigError(
                f"layer {min(missing)} trains, and its weights are not kept in host memory",
                where="strategy",
                how="use strategy: resident, without device_memory",
            )
        in_host = [name for name in chosen if name not in self._names and self._of(name).is_meta]
        if in_host:
            raise ConfigError(
                f"{in_host[0]} trains, and is not on the device", where="host_embeddings", how="set it to false"
            )
        if quantised := {layer for layer, _ in self._names.values() if stream.layers[layer].expansions}:
            raise ConfigError(
                f"layer {min(quantised)} is stored quantised, and such weights do not train",
                where="model_name_or_path",
                how="train adapters, or open the model as it was before it was quantised",
            )
        if self._model.backend.replicas.size > 1:
            raise ConfigError("weights of streamed layers train in one process only", how="start one process")
