"""Whatever is moved, and wherever to: loss and gradients are those of the step that moves
nothing, bit for bit.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from offloadmodels import KINDS, assert_same, checkpointed, ids, step, tiny_model
from torch import Tensor, nn

from lema.activations import OffloadActivations, get_lora_act_offloading_ctx_manager

MODES = (True, "legacy", "hidden_states", "disk")


@cache
def model_and_step(
    kind: str, lora: bool, checkpoint: bool | None
) -> tuple[nn.Module, tuple[Tensor, dict[str, Tensor]]]:
    model = checkpointed(tiny_model(kind, lora=lora), checkpoint)
    return model, step(model)


@pytest.mark.covered
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "checkpoint", [None, True, False], ids=["saved", "reentrant", "checkpointed"]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bitwise_those_without(
    kind: str, lora: bool, mode: Any, checkpoint: bool | None, tmp_path: Path
) -> None:
    model, expected = model_and_step(kind, lora, checkpoint)
    context = get_lora_act_offloading_ctx_manager(
        model, mode=mode, offload_dir=tmp_path if mode == "disk" else None
    )
    assert isinstance(context, OffloadActivations)
    for _ in range(2):
        assert_same(step(model, context), expected)
        assert context.live_bytes == 0
    counters = context.counters
    assert counters.moved == counters.restored > 0 and counters.copies_back > 0
    assert counters.seen == counters.moved + sum(counters.kept.values())
    context.close()
    assert not [
        module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks
    ] or (
        checkpoint
        # what makes the inputs of checkpoints require grad is a hook of the model's own
        is not None
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_half_precision_change_nothing(kind: str, mode: Any, tmp_path: Path) -> None:
    model = tiny_model(kind, dropout=0.1)

    class Autocast:
        def __enter__(self) -> None:
            self.on = torch.autocast("cpu", torch.bfloat16)
            self.on.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.on.__exit__(*error)

    expected = step(model, Autocast())
    context = get_lora_act_offloading_ctx_manager(model, mode=mode, offload_dir=tmp_path)
    with Autocast():
        assert_same(step(model, context), expected)
    assert context.counters.moved > 0 and context.live_bytes == 0  # type: ignore[union-attr]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_batches_of_all_lengths_and_accumulated_gradients(mode: Any, tmp_path: Path) -> None:
    model = tiny_model()
    batches = [ids(number, (2, length)) for number, length in enumerate((24, 7, 40, 13, 40, 24))]

    def train(context: Any = None) -> list[Tensor]:
        model.zero_grad()
        for tokens in batches:
            if context is None:
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            else:
                with context:
                    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = train()
    context = get_lora_act_offloading_ctx_manager(model, mode=mode, offload_dir=tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(train(context), expected, strict=True))
    assert context.live_bytes == 0  # type: ignore[union-attr]
