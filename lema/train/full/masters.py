"""Master weights in fp32, optimizer moments and waiting gradients of full training, and the memory
they lie in.

Everything lies in host memory. A weight that streams in fp32 is its own master; any other is
rounded from its master. What a limit of host memory does not hold of separate masters, moments and
waiting gradients of whole layers lies in one nameless file that is mapped into memory. The
optimizer can step a part of all this in a thread behind the backward.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lema.backend import Download
from lema.backend.group import sum_gradients
from lema.backend.hostmemory import memory_left
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.engine import StreamedModel
from lema.errors import ConfigError
from lema.plan.work.trainable_bytes import (
    TrainableBytes,
    masters_in_files,
    trainable_bytes,
)
from lema.train.full.memory import MasterBytes, MasterMemory

__all__ = ["MOMENTS", "BackgroundStep", "GradientOffload", "Masters", "settings_of", "step_part"]

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW calls them


class Masters:
    """What trains of a streamed model, by its name in the model; `chosen` says of a name whether it
    does.

    Attributes:
        by_name: the masters, fp32, in the order of the model.
        weights: what these are rounded to: in host memory what streams, on the device what lies
            outside.
        by_layer: of each layer that trains, the names, each with that in the layer; `outside` has
            the other names.
        memory: where masters, moments and waiting gradients lie.

    Raises `ConfigError` where nothing trains, or a weight that cannot; `MemoryLimitError` where
    `host_memory` does not hold what has to lie in memory, `DiskError` where the disk does not hold
    the rest.
    """

    def __init__(
        self, model: StreamedModel, config: LemaConfig, chosen: Callable[[str], bool]
    ) -> None:
        self._model = model
        prefix = f"{model.split.layers_name}."
        # of layers' weights: the layer, and the name in it
        self._layer_keys: dict[str, tuple[int, str]] = {}
        order: list[str] = []
        for name, parameter in model.split.model.named_parameters(remove_duplicate=True):
            inside = name.startswith(prefix)
            trains = chosen(name)
            parameter.requires_grad_(trains and not inside)
            if trains:
                order.append(name)
                if inside:
                    number, _, key = name.removeprefix(prefix).partition(".")
                    self._layer_keys[name] = int(number), key
        self.outside = tuple(name for name in order if name not in self._layer_keys)
        self.by_layer: dict[int, dict[str, str]] = {}
        for name, (layer, key) in sorted(self._layer_keys.items(), key=lambda item: item[1][0]):
            self.by_layer.setdefault(layer, {})[name] = key
        self._check(order)
        # they share the streamed weights, and none may write to them
        if model.backend.replicas.local_size > 1:
            model.stream.make_private(self.by_layer)
        stored = {layer: model.stream.stored(layer) for layer in self.by_layer}
        self.weights = {
            name: model.split.model.get_parameter(name).detach() for name in self.outside
        }
        self.weights |= {
            name: stored[layer][key] for name, (layer, key) in self._layer_keys.items()
        }
        self._nbytes = MasterBytes(
            {layer: self._bytes(names) for layer, names in self.by_layer.items()},
            self._bytes(self.outside),
            clipped=config.max_grad_norm is not None,
            # what is on the device is the host's, too
            in_host=model.backend.memory().shared and model.backend.device.type == "cpu",
        )
        self.memory = MasterMemory(
            self._nbytes.by_layer,
            masters_in_files(self._nbytes.movable, *self._limits(config)),
            Path(config.offload_dir or config.output_dir),
            sum(self.weights[name].nbytes for name in self._layer_keys),
        )
        self.by_name = {name: self._master(name) for name in order}
        self._moments = {
            name: [self._taken(name, torch.float32).zero_() for _ in MOMENTS] for name in order
        }
        self._waiting: dict[str, Tensor] = {}
        if self._nbytes.clipped:
            for layer in self.by_layer:
                self.waiting(layer)

    def waiting(self, layer: int) -> dict[str, Tensor]:
        """Return the memory in which gradients of a layer wait: by name, in the type of its
        weights.
        """
        names = self.by_layer[layer]
        # each at a multiple of its size
        for name in sorted(names, key=lambda name: -self.weights[name].itemsize):
            if name not in self._waiting:
                self._waiting[name] = self._taken(name, self.weights[name].dtype)
        return {name: self._waiting[name] for name in names}

    @torch.no_grad()
    def attach(self, optimizer: Optimizer) -> None:
        """Give an AdamW over the masters empty moments, which lie where they have their place."""
        for name, master in self.by_name.items():
            for moment in self._moments[name]:
                moment.zero_()
            pairs = zip(MOMENTS, self._moments[name], strict=True)
            optimizer.state[master] = {"step": torch.zeros((), dtype=torch.float32), **dict(pairs)}

    @torch.no_grad()
    def round(self, names: Iterable[str]) -> None:
        """Have the weights be what their masters are now, to the nearest, where they are not the
        same memory.
        """
        for name in names:
            master = self.by_name[name]
            weight = self.weights[name]
            if master.data_ptr() != weight.data_ptr():
                weight.copy_(master)

    def close(self) -> None:
        """Release the file; its space is freed when it has no tensors any more."""
        self.memory.close()

    def _master(self, name: str) -> nn.Parameter:
        weight = self.weights[name]
        inside = name in self._layer_keys
        # in host memory: it is its own master
        if weight.dtype == torch.float32 and (inside or self._nbytes.in_host):
            return nn.Parameter(weight) if inside else self._model.split.model.get_parameter(name)
        return nn.Parameter(self._taken(name, torch.float32).copy_(weight))

    def _bytes(self, names: Iterable[str]) -> TrainableBytes:
        return trainable_bytes(
            (name, self.weights[name].numel(), self.weights[name].dtype) for name in names
        )

    def _limits(self, config: LemaConfig) -> tuple[int, int]:
        """Return what is in host memory in any case, and the limit."""
        stream = self._model.stream
        host = psutil.virtual_memory()
        streamed = sum(stream.layers[layer].nbytes for layer in stream.host_cached)
        if self._model.backend.memory().shared:  # what lies outside the layers, too
            streamed += sum(
                parameter.nbytes
                for parameter in self._model.split.model.parameters()
                if not parameter.is_meta
            )
        there = streamed + self._nbytes.unmovable
        if config.host_memory is not None:
            return there, parse_memory(config.host_memory, host.total)
        left = memory_left()
        return there, streamed + (host.available if left is None else min(host.available, left))

    def _taken(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return memory of a layer, shaped as a weight."""
        layer = self._layer_keys[name][0] if name in self._layer_keys else None
        return self.memory.take(layer, self.weights[name].shape, dtype)

    def _check(self, chosen: Sequence[str]) -> None:
        stream = self._model.stream
        in_layers = self.by_layer.keys()
        if not chosen:
            raise ConfigError("no weight is chosen to be trained")
        if self._model.backend.parallel.size > 1:
            what = "weights of layers that several processes hold together cannot train"
            how = "train adapters, or let each process hold whole layers"
            raise ConfigError(what, where="tensor_parallel_size", how=how)
        if stream.sharded:
            what = "weights that are divided among processes cannot train"
            raise ConfigError(what, where="shard_weights", how="set it to false")
        if missing := in_layers - stream.host_cached:
            what = f"layer {min(missing)} trains, and its weights are not kept in host memory"
            raise ConfigError(
                what, where="strategy", how="use strategy: resident, without device_memory"
            )
        if absent := [
            name for name in self.outside if self._model.split.model.get_parameter(name).is_meta
        ]:
            what = f"{absent[0]} trains, and is not on the device"
            raise ConfigError(what, where="embeddings", how="set it to device")
        if quantised := {layer for layer in in_layers if stream.layers[layer].expansions}:
            what = f"layer {min(quantised)} is stored quantised, and quantised weights cannot train"
            how = "train adapters, or use the model before quantisation"
            raise ConfigError(what, where="model_name_or_path", how=how)


def step_part(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Step some of an optimizer's parameters, as its own `step` would that found no gradient of
    the others.
    """
    parameter_ids = {id(parameter) for parameter in parameters}
    part = copy.copy(optimizer)  # the state is the same object
    part.param_groups = [
        {
            **group,
            "params": [
                parameter for parameter in group["params"] if id(parameter) in parameter_ids
            ],
        }
        for group in optimizer.param_groups
    ]
    part.step()


def settings_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same parameter groups, with no state."""
    bare = copy.copy(optimizer)
    bare.state = defaultdict(dict)
    return bare


class BackgroundStep:
    """One piece of work at a time, in a thread of its own, behind what its caller does
    meanwhile.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start `work` when earlier work has ended; if that failed, raise its error instead."""
        self.wait()
        self._future = self._pool.submit(_done, [work])

    def wait(self) -> None:
        """Block until all work has ended; raise its error, once."""
        if (error := self.failure()) is not None:
            raise error

    def failure(self) -> BaseException | None:
        """Block until all work has ended; return its error, which `wait` then does not raise
        again.
        """
        future = self._future
        self._future = None
        return None if future is None else future.exception()

    def close(self) -> None:
        """Wait for running work, raise its error, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=True)


def _done(pending_work: list[Callable[[], None]]) -> None:
    """Do the work; free its objects before reporting that it is done."""
    pending_work.pop()()


class GradientOffload:
    """Copies the gradients of one layer at a time to host memory; `masters` is where those wait
    that are kept.
    """

    def __init__(self, model: StreamedModel, masters: Masters) -> None:
        self._backend = model.backend
        self._masters = masters
        # A gradient is, where it is formed.
        self._in_host = model.backend.memory().shared and model.backend.device.type == "cpu"
        self._passing: Tensor | None = None
        self._downloads: list[Download] = []  # under way

    def begin(
        self, layer: int, gradients: dict[str, Tensor], *, retained: bool
    ) -> tuple[dict[str, Tensor], Sequence[Download]]:
        """Return where gradients of a layer are in host memory, by name, once the downloads have
        landed. They are in `retained` where they have their place, or gone when the next layer
        comes; the one before has been stepped."""
        self.let_go()
        if self._in_host and not retained:
            return gradients, ()
        targets = self._masters.waiting(layer) if retained else self._one_layer(gradients)
        for name, gradient in gradients.items():
            self._downloads.append(self._backend.download(gradient.contiguous(), targets[name]))
        return {name: targets[name] for name in gradients}, tuple(self._downloads)

    def let_go(self) -> None:
        """Let the device have the memory of gradients that leave it, once they have."""
        for download in self._downloads:
            download.release()
        self._downloads = []

    def summed(self, layer: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's gradients, added up over all processes."""
        backend = self._backend
        if backend.replicas.size == 1:
            return gradients
        parameters = {}
        for name in self._masters.by_layer[layer]:
            weight = self._masters.weights[name]
            gradient = gradients.get(name)
            tensor = (
                torch.empty_like(weight, device=backend.device) if gradient is None else gradient
            )
            parameters[name] = nn.Parameter(tensor, requires_grad=False)
            parameters[name].grad = gradient
        sum_gradients(backend.replicas, list(parameters.values()))
        return {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }

    def _one_layer(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._passing is None:
            sizes = (
                sum(self._masters.weights[name].nbytes for name in names)
                for names in self._masters.by_layer.values()
            )
            self._passing = self._backend.host_buffer(max(sizes))
        targets = {}
        start = 0
        for name, gradient in sorted(gradients.items(), key=lambda item: -item[1].itemsize):
            piece = self._passing[start : start + gradient.nbytes]
            targets[name] = piece.view(gradient.dtype).view(gradient.shape)
            start = start + gradient.nbytes
        return targets
