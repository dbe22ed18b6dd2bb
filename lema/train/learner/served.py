"""Whether a server takes the adapters of a learner, told before they train."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Self

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from lema.lora.serving.checks import PublishedNames, check_served, published_names
from lema.lora.serving.experts import WEIGHT
from lema.lora.serving.servers import ServerName

__all__ = ["Served"]


@dataclass(frozen=True, eq=False)
class Served:
    """What a server takes of the adapters of one model.

    Args:
        server: the server.
        model: the model without adapters and without weights, of its own: another thread may ask
            while adapters come and go.
        names: what published files call its modules.
    """

    server: ServerName
    model: PreTrainedModel
    names: PublishedNames

    @classmethod
    def of(cls, server: ServerName, model: PreTrainedModel, lora: LoraConfig) -> Self:
        """Return what a server takes of a model's adapters.

        Args:
            server: the server.
            model: the model, which has no adapters yet.
            lora: PEFT's of some adapter of it.
        """
        tensors: dict[int, object] = {
            id(buffer): buffer.detach().to("meta") for buffer in model.buffers()
        }
        for parameter in model.parameters():
            tensors[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), False)
        bare: PreTrainedModel = deepcopy(model, tensors)
        return cls(server, bare, published_names(bare, lora))

    def check(self, lora: LoraConfig) -> None:
        """Make sure that the server takes an adapter of linears, named in full. `ConfigError`: it
        does not; all that it does not take is named.
        """
        adapted = [f"{name}{WEIGHT}" for name in lora.target_modules or ()]
        names = replace(self.names, adapted=sorted(adapted))
        check_served(self.server, self.model, lora, names, where="lora_config")
