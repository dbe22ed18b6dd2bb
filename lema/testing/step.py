"""One training step twice, on the same device: streamed, and of the whole model with `transformers` and PEFT alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lema.backend import Backend
from lema.config import LemaConfig
from lema.convert.prepare import prepare
from lema.engine.head.loss import trained_tokens
from lema.lora.attach import lora_config
from lema.train import LemaModel

__all__ = ["publish", "steps_of_both"]

RANK, ALPHA = 4, 8


def publish(config: PreTrainedConfig, directory: Path) -> Path:
    """Write a random model of `config` as the hub has it, and beside it as it streams; return the first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(directory / "published")
    prepare(model, directory / "streamed")
    return directory / "published"


def steps_of_both(
    backend: Backend, published: Path, recompute: bool, dropout: float, num_batches: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what is compared, its streamed value and that of the whole model: loss, gradients, adapters after AdamW.
    The step has `num_batches` micro-batches of the model that `publish` wrote; the backend is closed at the end.
    """
    sizes = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": dropout}
    streamed = str(published.with_name("streamed"))
    settings = LemaConfig(streamed, device=backend.name, gradient_checkpointing=recompute, **sizes)
    with closing(LemaModel(settings, backend=backend)) as model:
        model.initialize_lora()
        assert model.lora_manager is not None
        model.lora_manager.train()
        whole = _whole_model(published, dropout, backend.device)
        streamed_adapter, whole_adapter = _adapter(model.lora_manager), _adapter(whole)
        assert streamed_adapter.keys() == whole_adapter.keys()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # because B is zero at first, which leaves A without a gradient
            for name, parameter in streamed_adapter.items():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
                whole_adapter[name].copy_(parameter)
        batches = _batches(whole.config.vocab_size, num_batches)
        state = backend.rng_state()
        expected = _whole_loss(whole, batches, backend.device)
        backend.set_rng_state(state)
        loss = model.adapter.loss(batches)
        torch.autograd.backward(loss)
        yield "the loss", loss.detach(), expected
        for name, parameter in streamed_adapter.items():
            wanted = whole_adapter[name].grad
            assert parameter.grad is not None and wanted is not None, f"{name} has no gradient"
            yield f"the gradient of {name}", parameter.grad, wanted
        for adapter in (streamed_adapter, whole_adapter):
            torch.optim.AdamW(list(adapter.values())).step()
        backend.end_step()
        backend.synchronize()
        for name, parameter in streamed_adapter.items():
            yield f"{name} after the step", parameter.detach(), whole_adapter[name].detach()


def _whole_model(published: Path, dropout: float, device: torch.device) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(published)
    assert isinstance(base, PreTrainedModel)
    model = get_peft_model(base, lora_config(base, rank=RANK, alpha=ALPHA, dropout=dropout, targets=None))
    assert isinstance(model, PeftModel)
    return model.to(device).train()


def _adapter(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _batches(vocabulary: int, count: int) -> list[dict[str, Tensor]]:
    """Draw micro-batches of different lengths, each with tokens that are not trained."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for index in range(count):
        tokens = torch.randint(1, vocabulary, (2, 12 + 5 * index), generator=generator)
        labels = tokens.clone()
        labels[0, :4] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def _whole_loss(model: PeftModel, batches: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    """Run the whole model over the micro-batches, gradients accumulated; return the mean over all trained tokens."""
    options = {} if len(batches) == 1 else {"num_items_in_batch": trained_tokens(batches)}
    total = torch.zeros((), device=device)
    for batch in batches:
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}, **options).loss
        loss.backward()
        total = total + loss.detach()
    return total
