"""The load-balancing loss of routers: for each micro-batch, a product of means over all layers.

So it is no sum over layers. Each visit hands on what its routers made, which is small; with that of
the top layer the model's own function forms the loss, and layers get their gradients in the
backward with those of hidden states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.config import LemaConfig
from lema.engine.head.loss import LossChunks
from lema.engine.head.objectives import Measured
from lema.engine.head.rows import RowLoss
from lema.errors import ConfigError
from lema.model import Split
from lema.model.capture import FEW_TOKENS, changed, past_layers
from lema.model.flow import LayerCall
from lema.storage.modelfiles import read_config_file

__all__ = ["RouterLoss", "coefficient_of", "router_loss_of"]

FUNCTION = "load_balancing_loss_func"
SETTING = "router_aux_loss_coef"


class RouterLoss:
    """The model's own loss of its routers, times `coefficient`: of a step the mean over its
    micro-batches, as TRL has it. `ConfigError`: the model has none."""

    def __init__(self, split: Split, coefficient: float) -> None:
        home = sys.modules[type(split.model).__module__]
        self._split = split
        self._coefficient = coefficient
        self._function: Callable[..., Tensor] | None = getattr(home, FUNCTION, None)

        def asked(run: Callable[..., Any]) -> Any:
            from unittest.mock import patch  # here, because it takes a while to import

            with patch.object(home, FUNCTION) as function:
                # This has the model put the hooks in place, too, that record what routers make.
                run(
                    output_router_logits=True,
                    attention_mask=torch.ones(1, FEW_TOKENS, dtype=torch.long),
                )
            return function.call_args and (function.call_args.args[1:], function.call_args.kwargs)

        # The function's other arguments, with a tensor for the mask.
        self._arguments: Any = self._function and past_layers(split.model, split.layers, asked)
        if self._arguments is None:
            what = f"a {type(split.model).__name__} has no load-balancing loss of routers"
            raise ConfigError(what, where=SETTING, how="set it to 0")

    def begin(
        self,
        loss: LossChunks | RowLoss,
        calls: Sequence[Sequence[LayerCall]],
        device_batches: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Have the layers of a step note what their routers make; `calls` are those of each layer,
        `device_batches` the micro-batches. Of the tokens that `loss` is divided by, other passes
        may train some, which weigh as much."""
        assert isinstance(loss, LossChunks), "the loss is of rows"
        self._calls = calls
        self._masks = [batch.get("attention_mask") for batch in device_batches]
        self._weight = loss.trained_tokens / loss.num_tokens
        self._scale = loss.scale
        self._losses: dict[int, Tensor] = {}  # of each micro-batch its loss alone
        for call in chain(*calls):
            call.ask_routers(True)

    def outputs(self, index: int) -> list[Tensor]:
        """Return what the routers have made of a micro-batch, in the layers' order."""
        return [output for layer in self._calls for output in layer[index].routers or ()]

    def loss_and_grad(self, index: int) -> tuple[Tensor, dict[Tensor, Tensor | None]]:
        """Return a micro-batch's share, and its gradients by what the routers made; None: by
        what has no graph.
        """
        outputs = self.outputs(index)
        leaves = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
        grad_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            value = self._value(index, leaves)
            leaf_gradients = (
                torch.autograd.grad(value * self._scale, grad_leaves) if grad_leaves else ()
            )
        gradients = dict(zip(grad_leaves, leaf_gradients, strict=True))
        return value.detach(), {
            output: gradients.get(leaf) for output, leaf in zip(outputs, leaves, strict=True)
        }

    def total(self) -> Tensor:
        """Return the loss of all micro-batches, once the top layer is done; differentiable."""
        return torch.stack(
            [self._value(index, self.outputs(index)) for index in range(len(self._masks))]
        ).sum()

    def _value(self, index: int, outputs: Sequence[Tensor]) -> Tensor:
        mask = self._masks[index]
        arguments, named = changed(
            self._arguments, lambda argument: mask if isinstance(argument, Tensor) else argument
        )
        assert self._function is not None
        with self._split.autocast():
            loss = self._function(tuple(outputs), *arguments, **named)
        self._losses[index] = loss.detach()
        return self._coefficient * loss / len(self._masks) * self._weight

    def end(self) -> Measured:
        """Let go of what the routers made, which the backward does not need; return what is
        measured of the step.
        """
        for call in chain(*self._calls):
            call.ask_routers(False)
        return {"aux_loss": (torch.stack([*self._losses.values()]).sum(), len(self._losses))}


def coefficient_of(split: Split, config: LemaConfig, directory: Path) -> float:
    """Return what the loss of routers is multiplied by: as the settings have it, else the
    config.json in `directory`, whose `output_router_logits` asks for it; 0: nobody does."""
    if config.router_aux_loss_coef is not None:
        return config.router_aux_loss_coef
    file_config = read_config_file(directory)
    asked = any(
        isinstance(section, dict) and section.get("output_router_logits")
        for section in (file_config, *file_config.values())
    )
    return getattr(split.model.config.get_text_config(), SETTING, 0.0) if asked else 0.0


def router_loss_of(
    split: Split, config: LemaConfig, directory: Path, num_parts: int, unable: str = ""
) -> RouterLoss | None:
    """Return a model's loss of its routers, where it is asked for; None: nobody does.

    Args:
        split: the model.
        config: the settings of the run.
        directory: has the model's config.json.
        num_parts: how many processes hold the model together.
        unable: what else is asked for that it does not go with; empty: nothing.

    Raises:
        ConfigError: the model has no such loss, or it does not go with something else.
    """
    if not (coefficient := coefficient_of(split, config, directory)):
        return None
    conflicts = {
        unable: bool(unable),
        f"objective: {config.objective}": config.objective != "sft",
        "torch_compile": config.torch_compile,
        "cache_frozen_prefix": config.cache_frozen_prefix,
        "context_parallel_size": config.context_parallel_size is not None,
        "tensor_parallel_size": num_parts > 1,
        f"device: {config.device}": split.lazy,
    }
    if active := [name for name, value in conflicts.items() if value]:
        what = f"the loss of routers cannot be combined with {active[0]}"
        raise ConfigError(what, where=SETTING, how="set it to 0, or remove the other setting")
    return RouterLoss(split, coefficient)
