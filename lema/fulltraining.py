"""Training a model's own weights while its layers stream: masters and optimizer state in host memory.

The weights of the layers stay in host memory, from where they stream. Each layer's gradients are complete after its one
visit in the backward (`lema.trainedweights`); without clipping the layer is stepped at once, so that gradients of one
layer exist at a time; with it, when the norm of all is known. What is stepped is the memory that the next lease reads:
in fp32 the streamed weights are the masters, in half precision they are rounded from masters in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lema.config import LemaConfig
from lema.errors import ConfigError
from lema.optim import make_optimizer
from lema.streamed import StreamedModel
from lema.trainedweights import Leaves, TrainedWeights

__all__ = ["FullTraining"]


class FullTraining:
    """Trains weights of a streamed model, in one process.

    Args:
        model: the streamed model; its layers are all kept in host memory.
        config: the optimizer's settings, and `max_grad_norm`.
        chosen: says of a parameter's name in the model whether it trains.

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
        groups = [[self._named(layer, own) for own in names] for layer, names in by_layer.items()]
        groups.append([name for name in order if name not in self._names])
        # One per layer: a layer may be stepped as soon as its backward is over.
        self._optimizers = [
            make_optimizer([self.masters[name] for name in names], config) if names else None for names in groups
        ]
        self._of_layer = dict(zip(by_layer, self._optimizers, strict=False))
        self._last = True

    def step(self, passes: Sequence[Sequence[Mapping[str, Tensor]]], num_tokens: int | None = None) -> Tensor:
        """Take one optimizer step; return the loss of all its passes, an fp32 scalar.

        Args:
            passes: the micro-batches of each pass over the layers.
            num_tokens: trained tokens of all; needed where there are several passes.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._model.backend.device)
        for number, micro_batches in enumerate(passes):
            self._last = number == len(passes) - 1
            loss = self._model.loss(micro_batches, num_tokens=num_tokens)
            loss.backward()
            total = total + loss.detach()
        if self._config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), self._config.max_grad_norm)
            for layer in self._of_layer:
                self._step_layer(layer)
        if (outside := self._optimizers[-1]) is not None:
            outside.step()
            outside.zero_grad()
        self._model.backend.end_step()
        return total

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers: of each layer that trains, and of what lies outside the layers."""
        return [optimizer for optimizer in self._optimizers if optimizer is not None]

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
        optimizer = self._of_layer[layer]
        assert optimizer is not None
        with self._model.stream.rewritten(layer):
            optimizer.step()
            optimizer.zero_grad()
            for name, (number, _) in self._names.items():
                if number == layer and self.masters[name].dtype != self._streamed[name].dtype:
                    self._streamed[name].copy_(self.masters[name].detach())

    def _named(self, layer: int, own: str) -> str:
        return f"{self._layers_name}{layer}.{own}"

    def _stored(self, layer: int, own: str) -> Tensor:
        return self._model.stream.stored(layer)[own]

    def _master(self, name: str) -> nn.Parameter:
        if name not in self._names:
            return self._model.split.model.get_parameter(name)
        return nn.Parameter(self._streamed[name].float())  # the same memory where it is fp32 already

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
        if self._model.backend.replicas.size > 1:
            raise ConfigError("weights of streamed layers train in one process only", how="start one process")
