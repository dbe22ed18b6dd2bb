"""The head and the losses of a learner's pass.

The loss of a micro-batch is differentiated as soon as it is formed, chunk by chunk, down to what
the last layer made, so logits of a whole pass never exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lema.engine.engine import Engine
from lema.engine.head.loss import CHUNK_TOKENS, blocks
from lema.errors import NonFiniteError
from lema.model.layers.adapters import computing_with
from lema.train.learner.adapter import Adapter
from lema.train.learner.losses import loss_named
from lema.train.learner.rows import AdapterRows, MicroBatch

__all__ = ["Heads", "Scored"]


@dataclass(frozen=True, eq=False)
class Scored:
    """What a pass has made of one request.

    Args:
        loss: the sum over all tokens of all rows.
        logprobs: of each row, the log-probabilities of its targets, in host memory, of their shape.
        losses: of each row, the loss of each token.
        error: why nothing was made of it, and no gradient formed; None: something was.
    """

    loss: float
    logprobs: Sequence[Tensor]
    losses: Sequence[Tensor]
    error: NonFiniteError | None = None


class Heads:
    """The head and the losses of one pass, one micro-batch after the other.

    Args:
        engine: the model in its parts.
        requests: the requests of the pass.
        adapters: the adapters by name.
        chunk_tokens: logits exist for this many tokens at a time; None: the default.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[AdapterRows],
        adapters: Mapping[str, Adapter],
        chunk_tokens: int | None,
    ) -> None:
        self._adapters = adapters
        inside = f"{engine.split.layers_name}."
        self._inside = inside
        modules = engine.split.model.named_modules()
        self._outside: list[nn.Module] = [
            module
            for name, module in modules
            if not name.startswith(inside) and _is_adapted(module)
        ]
        self._engine = engine
        self._requests = requests
        self._logprobs: list[list[Tensor]] = [[] for _ in requests]
        self._losses: list[list[Tensor]] = [[] for _ in requests]
        self._chunk = chunk_tokens or CHUNK_TOKENS
        # the request whose rows come now, and what its adapter's gradients outside the layers were
        # before, should its loss not be finite
        self._current = -1
        self._before: list[Tensor | None] = []
        self._failed: set[int] = set()

    def _parameters(self, adapter: str) -> list[nn.Parameter]:
        """Return the parameters of an adapter that lie outside the layers, if it trains."""
        named = self._adapters[adapter].parameters if adapter in self._adapters else {}
        return [parameter for path, parameter in named.items() if self._inside not in path]

    def score(self, part: MicroBatch, hidden: Tensor, *, differentiate: bool) -> Tensor:
        """Return the gradient of a micro-batch's loss by the last layer's output `[rows, tokens,
        hidden]`, and keep what was made of its rows.
        """
        request = self._requests[part.request]
        if part.request != self._current:
            self._end_request()
            self._current = part.request
            self._before = [
                None if p.grad is None or not differentiate else p.grad.clone()
                for p in self._parameters(request.adapter)
            ]
        gradient = torch.zeros_like(hidden)
        width = max(len(datum.tokens) for datum in part.data)
        targets, tensors = _padded(part, width, hidden.device)
        logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        losses = torch.zeros_like(logprobs)
        real = _real(part, width, hidden.device)
        loss = loss_named(request.loss)
        options = loss.settled(request.options)
        with (
            self._engine.retry.at("in the head and the loss"),
            computing_with(request.adapter, self._outside),
        ):
            for at in blocks(len(part.data), width, self._chunk):
                leaf = hidden[at].detach().requires_grad_(differentiate)
                with torch.set_grad_enabled(differentiate):
                    of_block = _logprobs(self._engine.split.head(leaf).float(), targets[at])
                    named = {name: tensor[at] for name, tensor in tensors.items()}
                    of_tokens = loss.of_tokens(of_block, named, options)
                    counted = torch.where(_like(real[at], of_tokens), of_tokens, 0.0)
                    value = counted.sum()
                logprobs[at] = of_block.detach()
                losses[at] = counted.detach()
                if differentiate:
                    torch.autograd.backward(value)
                    assert leaf.grad is not None
                    gradient[at] = leaf.grad
        for row, datum in enumerate(part.data):
            size = len(datum.tokens)
            self._logprobs[part.request].append(logprobs[row, :size].cpu())
            self._losses[part.request].append(losses[row, :size].cpu())
        return gradient

    def _end_request(self) -> None:
        """Take the gradients outside the layers back, if the loss of the current request is not
        finite.
        """
        number = self._current
        if number < 0 or all(bool(torch.isfinite(row).all()) for row in self._losses[number]):
            return
        self._failed.add(number)
        parameters = self._parameters(self._requests[number].adapter)
        for parameter, before in zip(parameters, self._before, strict=True):
            parameter.grad = before

    def scored(self, parts: Sequence[MicroBatch], gradients: Sequence[Tensor]) -> list[Scored]:
        """Return what was made of each request; gradients of micro-batches whose request has no
        finite loss become zero.
        """
        self._end_request()
        for part, gradient in zip(parts, gradients, strict=True):
            if part.request in self._failed:
                gradient.zero_()
        outcomes = []
        for number, (logprobs, losses) in enumerate(zip(self._logprobs, self._losses, strict=True)):
            total = float(sum((row.sum() for row in losses), start=torch.zeros(())))
            error = None
            if number in self._failed:
                error = NonFiniteError(
                    "the loss of the request is not finite, so no gradient of it was added",
                    where="forward_backward",
                    how="look at its logprobs and advantages",
                )
            outcomes.append(Scored(total, logprobs, losses, error))
        return outcomes


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of targets `[rows, tokens]`, or `[rows, tokens, candidates]`."""
    if targets.dim() == logits.dim():
        return logits.log_softmax(-1).gather(-1, targets)
    flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -flat.view(targets.shape)


def _padded(part: MicroBatch, width: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the targets and the other tensors of a micro-batch's rows, side by side."""
    shapes = {datum.targets.shape[1:] for datum in part.data}
    most = max((shape[0] for shape in shapes if shape), default=None)
    shape = (len(part.data), width) if most is None else (len(part.data), width, most)
    targets = torch.zeros(shape, dtype=torch.long)
    names = sorted({name for datum in part.data for name in datum.tensors})
    tensors = {name: torch.zeros(shape, dtype=torch.float32) for name in names}
    for name in names:
        if name == "weights" and any(name not in datum.tensors for datum in part.data):
            tensors[name].fill_(1.0)
    for row, datum in enumerate(part.data):
        region = tuple(slice(0, size) for size in datum.targets.shape)
        targets[row][region] = datum.targets
        for name, tensor in datum.tensors.items():
            tensors[name][row][region] = tensor
    return targets.to(device), {name: tensor.to(device) for name, tensor in tensors.items()}


def _real(part: MicroBatch, width: int, device: torch.device) -> Tensor:
    """Return which places of a micro-batch `[rows, tokens]` are no padding."""
    lengths = torch.tensor([len(datum.tokens) for datum in part.data])
    return (torch.arange(width)[None, :] < lengths[:, None]).to(device)


def _like(mask: Tensor, values: Tensor) -> Tensor:
    return mask if mask.dim() == values.dim() else mask.unsqueeze(-1)
