"""The same steps twice: on the whole model with `transformers` and `peft` alone, and streamed.
Nothing is tolerated.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from aligned import aligned
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import Checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema_cpu import CpuBackend

SEED = 7  # of the adapters
DRAWS = 11  # of dropout
RANK = 4
ALPHA = 8


@dataclass(frozen=True)
class Outcome:
    """What one step leaves behind: the loss, every adapter gradient by name, the generator's
    state.
    """

    loss: Tensor
    gradients: dict[str, Tensor | None]
    generator: Tensor

    @classmethod
    def of(cls, model: nn.Module, loss: Tensor) -> "Outcome":
        """Collect the gradients of `model` and take them off it."""
        gradients = {name: parameter.grad for name, parameter in trained(model).items()}
        model.zero_grad(set_to_none=True)
        return cls(loss.detach(), gradients, torch.get_rng_state())


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def whole_model(
    checkpoint: Checkpoint,
    *,
    dropout: float = 0.0,
    targets: str | Collection[str] | None = None,
    **options: Any,
) -> PeftModel:
    """Load the whole model and attach an adapter, without a line of ours."""
    base = aligned(AutoModelForCausalLM.from_pretrained(checkpoint.published, **options))
    # a cache lays keys out in another way, and on some processors products round by it
    base.config.use_cache = False
    torch.manual_seed(SEED)
    wanted = checkpoint.architecture.targets if targets is None else targets
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=dropout,
        target_modules=wanted if isinstance(wanted, str) else sorted(wanted),
        fan_in_fan_out=checkpoint.architecture.transposed,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config).train()


@contextmanager
def streamed_model(
    checkpoint: Checkpoint,
    *,
    poison: bool = True,
    spent: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[LemaModel]:
    """Open the model for streaming, with a fresh adapter, in training mode; `spent` says what
    memory is spent on.

    Experts are adapted where `settings` name them, because products with adapted ones round
    otherwise than PEFT's.
    """
    # every layer, though there is room for all
    streams = {
        "device_memory": None,
        "gradient_checkpointing": False,
    }
    drawn = {"lora_rank": RANK, "lora_alpha": ALPHA, "seed": SEED, "lora_target_parameters": []}
    settings = {"device": "cpu", "save_steps": 0} | drawn | streams | settings
    model = LemaModel(
        LemaConfig(str(checkpoint.streamed), **settings), backend=CpuBackend(poison=poison)
    )
    try:
        model.initialize_lora()
        model.lora_manager.train()
        model.spend(replace(model.allocation, **spent or {}))
        yield model
    finally:
        model.close()


def draw_b(model: nn.Module) -> None:
    """Give every B, zero at first, random values, so that no adapter gradient is zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(trained(model).items()):
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)


def accumulate(
    model: PeftModel,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    layer_major: nn.ModuleList | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Accumulate gradients over the micro-batches, divided by all trained tokens of the step;
    return the loss.

    Args:
        model: the whole model.
        micro_batches: a single one is passed to the model as a user would, with nothing said about
            tokens.
        layer_major: the decoder layers, where dropout is to be drawn for all micro-batches of a
            layer before the next.
        autocast: dtype to compute in; None: as the weights are.
        scaler: scales the loss whose gradients are taken.
    """
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    options = {} if len(micro_batches) == 1 else {"num_items_in_batch": tokens}
    states = None if layer_major is None else LayerMajorStates(model, layer_major, micro_batches)
    total = torch.zeros(())
    for index, batch in enumerate(micro_batches):
        with ExitStack() as stack:
            if autocast is not None:
                stack.enter_context(torch.autocast("cpu", autocast))
            if states is not None:
                stack.enter_context(states.given(index))
            loss = model(**batch, **options).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = total + loss.detach()
    if states is not None:
        torch.set_rng_state(states.end)
    return total


def whole_step(
    model: PeftModel, micro_batches: Sequence[Mapping[str, Tensor]], **options: Any
) -> Outcome:
    """Take one step's loss and gradients on the whole model; options as `accumulate`."""
    torch.manual_seed(DRAWS)
    return Outcome.of(model, accumulate(model, micro_batches, **options))


class LayerMajorStates:
    """The generator states of a pass that takes every micro-batch through a layer before the next
    layer.

    What is drawn depends on shapes alone, so a rehearsal finds the states: up to the layers for
    each micro-batch, then each layer for each micro-batch.
    """

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, micro_batches: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._layers = layers
        self._starts: list[Tensor] = []
        self._states: dict[tuple[int, int], Tensor] = {}
        rehearsals = []
        with torch.no_grad():
            for batch in micro_batches:
                self._starts.append(torch.get_rng_state())
                calls, arrived = self._record(model, batch)
                rehearsals.append(calls)
                torch.set_rng_state(arrived)
            for number, layer in enumerate(layers):
                for index, calls in enumerate(rehearsals):
                    self._states[number, index] = torch.get_rng_state()
                    args, kwargs = calls[number]
                    layer(*args, **kwargs)
        self.end = torch.get_rng_state()

    def _record(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[list[Any], Tensor]:
        calls: list[Any] = []
        arrived: list[Tensor] = []

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))
            arrived.append(torch.get_rng_state())

        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
            model(**batch, use_cache=False)
        return calls, arrived[0]

    @contextmanager
    def given(self, index: int) -> Iterator[None]:
        """Give the micro-batch its states for the length of a forward."""

        def give(number: int) -> Any:
            return lambda layer, args: torch.set_rng_state(self._states[number, index])

        torch.set_rng_state(self._starts[index])
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_pre_hook(give(number)).remove)
            yield


def layers_of(model: PeftModel, checkpoint: Checkpoint) -> nn.ModuleList:
    """Return the decoder layers of the whole model."""
    found = model.get_base_model().get_submodule(checkpoint.architecture.layers)
    assert isinstance(found, nn.ModuleList)
    return found


def streamed_step(model: LemaModel, micro_batches: Sequence[Mapping[str, Tensor]]) -> Outcome:
    """Take one step's loss and gradients, streamed."""
    torch.manual_seed(DRAWS)
    loss = model.adapter.loss(micro_batches)
    loss.backward()
    return Outcome.of(model.lora_manager, loss)


def assert_same(streamed: Outcome, whole: Outcome, within: float = 0.0) -> None:
    """Assert that two outcomes are bitwise one, or within a difference: loss, names, every
    gradient, generator.
    """
    assert streamed.gradients.keys() == whole.gradients.keys()
    assert whole.gradients
    loss = (
        torch.equal(streamed.loss, whole.loss)
        or relative_difference(streamed.loss, whole.loss) <= within
    )
    assert loss, f"loss {streamed.loss!r}, not {whole.loss!r}"
    differing = [
        name
        for name, found in streamed.gradients.items()
        if not same(found, whole.gradients[name], within)
    ]
    assert not differing, (
        f"{len(differing)} of {len(whole.gradients)} gradients differ: {differing[:3]} ..."
    )
    assert torch.equal(streamed.generator, whole.generator), (
        "the generator was left in another state"
    )


def same(one: Tensor | None, other: Tensor | None, within: float = 0.0) -> bool:
    """Whether two gradients are there, in fp32, not zero, and bitwise equal or within a relative
    difference.
    """
    assert other is None or other.dtype == torch.float32
    if one is None or other is None or one.dtype != other.dtype or not one.any():
        return False
    return torch.equal(one, other) or relative_difference(one, other) <= within


def all_gradients(outcome: Outcome) -> Tensor:
    """Return every gradient of an outcome in one vector."""
    return torch.cat([gradient.flatten() for _, gradient in sorted(outcome.gradients.items())])


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return how far one tensor is from the other, as a fraction of the other's length."""
    return float((one - other).double().norm() / other.double().norm())
