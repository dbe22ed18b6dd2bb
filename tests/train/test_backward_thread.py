"""Every backward of a run happens in the thread that asks for it, so that signals are seen
before each layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fulltraining import config_of, everything
from peft import LoraConfig
from tiny import Checkpoint, micro_batches
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer, TrainingArguments

import lema
from lema import LemaConfig, LemaModel, StreamingMixin
from lema.plan.plan import make_plan
from lema.train.full.training import FullTraining

CheckpointOf = Callable[..., Checkpoint]
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


class Streaming(StreamingMixin, Trainer):
    """transformers' trainer, with its accumulation in one pass over the layers."""


@contextmanager
def watched(part: nn.Module) -> Iterator[list[bool]]:
    """Note, whenever a part of a layer is recomputed in a backward, whether autograd may use
    threads of its own.
    """
    seen: list[bool] = []

    def note(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a backward is under way
            seen.append(torch._C._is_multithreading_enabled())

    hook = part.register_forward_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def test_autograd_differentiates_adapters_in_the_thread_of_the_run(
    checkpoint_of: CheckpointOf,
) -> None:
    model = LemaModel(config_of(checkpoint_of("llama"), gradient_checkpointing=True))
    model.initialize_lora()
    with watched(model.split.layers[0].mlp) as seen:
        model.get_trainer().train_step(micro_batches(1)[0]["input_ids"])
    model.close()
    assert seen == [False] * len(seen) != []
    assert torch._C._is_multithreading_enabled()


def test_autograd_differentiates_weights_in_the_thread_of_the_run(
    checkpoint_of: CheckpointOf,
) -> None:
    config = config_of(checkpoint_of("llama"), gradient_checkpointing=True)
    model = LemaModel(config)
    model.skeleton.train()
    training = FullTraining(model.adapter, config, everything)
    with watched(model.split.layers[0].mlp) as seen:
        training.accumulate(micro_batches(1))
    training.close()
    model.close()
    assert seen == [False] * len(seen) != []
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_autograd_differentiates_a_trainers_batches_in_its_thread(
    accumulated: int, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = lema.streamed(
        checkpoint_of("llama").streamed, adapters, device="cpu", micro_batch_size=1
    )
    options: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "report_to": [],
        "use_cpu": True,
    }
    quiet: dict[str, Any] = {
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_accumulation_steps": accumulated,
    }
    rows: Sequence[dict[str, Tensor]] = [
        {"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}
    ] * 2
    trainer = Streaming(
        model, args=TrainingArguments(str(tmp_path), **options, **quiet), train_dataset=rows
    )
    with watched(model.opened.split.layers[0].mlp) as seen:
        trainer.train()
    model.close()
    assert seen == [False] * len(seen) != []
    assert torch._C._is_multithreading_enabled()


def test_what_a_plan_measures_is_differentiated_as_in_a_run(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else workspaces that a library keeps for each thread would stay on the device."""
    seen: list[bool] = []
    backward = torch.autograd.backward
    grad = torch.autograd.grad

    def noting(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def note(roots: Any, *args: Any, **kwargs: Any) -> Any:
            first: Any = roots if isinstance(roots, Tensor) else roots[0]
            if not isinstance(first, FakeTensor) and not getattr(first, "is_meta", False):
                seen.append(torch._C._is_multithreading_enabled())
            return differentiate(roots, *args, **kwargs)

        return note

    monkeypatch.setattr(torch.autograd, "backward", noting(backward))
    monkeypatch.setattr(torch.autograd, "grad", noting(grad))
    config = LemaConfig(
        str(checkpoint_of("llama").streamed), device="cpu", device_memory="auto", max_length=32
    )
    make_plan(config)
    assert seen == [False] * len(seen) != []
