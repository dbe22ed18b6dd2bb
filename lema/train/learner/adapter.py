"""One adapter of a learner: what it adapts, and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from lema.errors import AdapterError, ConfigError
from lema.lora.targets import linear_modules, router_modules
from lema.model.skeleton import find_layers

__all__ = ["AdamSettings", "Adapter", "AdapterSpec", "Targets"]

ALPHA = 32  # the adapter's output is scaled by this over its rank, as the Tinker service does
MIXES = ("attn", "attention", "mixer", "mamba", "conv")  # what modules that mix tokens are called
BYTES_PER_PARAMETER = 16  # a value, its gradient and two moments, each in fp32
STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class AdapterSpec:
    """What a caller asks of an adapter.

    Args:
        rank: of its matrices.
        seed: its values are drawn from it, as PEFT draws them.
        train_attn: adapt the linears of the modules that mix tokens: attention, and what models
            have in its place.
        train_mlp: adapt the other linears of the layers, but no routers.
        train_unembed: adapt the head.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class AdamSettings:
    """The parameters of one step of AdamW (https://arxiv.org/abs/1711.05101).

    Args:
        learning_rate: of this step.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: is added to the root of that.
        weight_decay: taken off the values, times the learning rate.
        grad_clip_norm: the norm that gradients are clipped to; 0: they are not.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class Targets:
    """The linears of a model that adapters may adapt, by full name.

    Args:
        attn: those of the modules that mix tokens.
        mlp: the other linears of the layers, but no routers.
        head: the head; None: it is no linear.
        sizes: of each of them, the numbers of inputs and outputs, added up.
    """

    attn: tuple[str, ...]
    mlp: tuple[str, ...]
    head: str | None
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Targets:
        """Return those of a model without adapters."""
        routers = router_modules(model)
        names = [name for name in linear_modules(model) if name not in routers]
        attn = tuple(name for name in names if _mixes_tokens(model, name))
        output = model.get_output_embeddings()
        modules = dict(model.named_modules())
        heads = [name for name, module in modules.items() if module is output]
        head = heads[0] if heads and isinstance(output, nn.Linear) else None
        sizes = {
            name: sum(modules[name].weight.shape)
            for name in (*names, *([] if head is None else [head]))
        }
        return cls(attn, tuple(name for name in names if name not in attn), head, sizes)

    def chosen(self, spec: AdapterSpec) -> list[str]:
        """Return those that an adapter asks for. `ConfigError`: it would adapt nothing."""
        names = [*self.attn * spec.train_attn, *self.mlp * spec.train_mlp]
        if spec.train_unembed and self.head is not None:
            names.append(self.head)
        if not names:
            raise ConfigError(
                "the adapter would adapt nothing", where="lora_config", how="set train_attn"
            )
        return sorted(names)

    def nbytes(self, rank: int) -> int:
        """Bytes of the largest adapter of a rank in fp32, with its gradients and AdamW's two
        moments.
        """
        return BYTES_PER_PARAMETER * rank * sum(self.sizes.values())

    def lora(self, spec: AdapterSpec) -> LoraConfig:
        """Return PEFT's config of an adapter; the errors are those of `chosen`."""
        return LoraConfig(
            r=spec.rank,
            lora_alpha=ALPHA,
            target_modules=self.chosen(spec),
            task_type="CAUSAL_LM",
        )


def _mixes_tokens(model: PreTrainedModel, name: str) -> bool:
    """Whether a linear of the layers belongs to a module that mixes tokens, by what that module, or
    its class, is called.
    """
    layers, _ = find_layers(model)
    inside = name.removeprefix(f"{layers}.").split(".")[1:-1]
    layer = name.split(".")[: layers.count(".") + 2]
    above = [".".join([*layer, *inside[:count]]) for count in range(1, len(inside) + 1)]
    called = (
        f"{path.rpartition('.')[2]} {type(model.get_submodule(path)).__name__}".lower()
        for path in above
    )
    return any(word in title for title in called for word in MIXES)


class Adapter:
    """One adapter of a learner.

    Args:
        name: its name in the model.
        spec: what was asked of it.
        parameters: its parameters, by name without that of the adapter.

    Attributes:
        steps: optimizer steps that were taken.
    """

    def __init__(
        self, name: str, spec: AdapterSpec, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.name = name
        self.spec = spec
        self.parameters = dict(parameters)
        self.steps = 0
        self._optimizer = AdamW(self.parameters.values(), lr=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of its values, gradients and the optimizer's state on the device."""
        return 4 * sum(parameter.nbytes for parameter in self.parameters.values())

    def step(self, settings: AdamSettings) -> float:
        """Take an optimizer step with the gradients that are there, and drop them; return their
        norm, before it was clipped.

        Raises:
            ConfigError: there are no gradients.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            raise ConfigError(
                "there is nothing to step with: no forward_backward since the last step",
                where="optim_step",
                how="call forward_backward before",
            )
        largest = settings.grad_clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), largest))
        for group in self._optimizer.param_groups:
            group.update(
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
        self._optimizer.step()
        self.drop_gradients()
        self.steps += 1
        return norm

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return copies of its values and the optimizer's state in host memory, by name."""
        tensors = {f"value/{name}": value.detach() for name, value in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for kind, tensor in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = tensor
        return {name: tensor.to("cpu").clone().contiguous() for name, tensor in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor], *, steps: int, optimizer: bool) -> None:
        """Take values, and the optimizer's state if `optimizer`, which is new otherwise.

        Raises:
            AdapterError: they are not of an adapter of this rank and these modules; nothing is
                changed then.
        """
        expected = {f"value/{name}": value.shape for name, value in self.parameters.items()}
        values = {name: of.shape for name, of in tensors.items() if name.startswith("value/")}
        if values != expected:
            raise AdapterError(
                "a saved state is of another kind of adapter: rank or modules differ",
                how="make the adapter anew from the state",
            )
        self.drop_gradients()
        self._optimizer.state.clear()
        self.steps = steps if optimizer else 0
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"value/{name}"])
                if optimizer and f"step/{name}" in tensors:
                    self._optimizer.state[parameter] = {
                        kind: self._placed(kind, parameter, tensors[f"{kind}/{name}"])
                        for kind in STATES
                    }

    @staticmethod
    def _placed(kind: str, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        # as AdamW has its count of steps: in host memory
        return tensor.clone() if kind == "step" else tensor.to(parameter.device, copy=True)
