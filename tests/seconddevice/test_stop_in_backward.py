"""A stop in a backward on a device, whose autograd has a thread of its own, is seen before the
next layer.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from fulltraining import config_of, everything
from peft import LoraConfig
from randomstops import WAYS, Stops
from smallrun import NUM_LAYERS, adapter_of, same, settings, token_rows, write_model
from tiny import Checkpoint, micro_batches
from transformers import Trainer, TrainingArguments

import lema
from lema import LemaModel, StreamingMixin
from lema.backend.interrupt import StopRequested
from lema.engine import StreamedModel
from lema.errors import Stopped
from lema.train.full.training import FullTraining
from lema.train.stop import StopOnSignal

CheckpointOf = Callable[..., Checkpoint]
RUN: dict[str, Any] = {
    "device": "second",
    "max_steps": 3,
    "lora_dropout": 0.1,
    "micro_batch_size": 2,
}
ROWS = token_rows(22)
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


class Arguments(TrainingArguments):
    """Arguments of a trainer on the second device, which transformers does not look for."""

    @property
    def device(self) -> torch.device:
        """The device."""
        _ = super().device  # which sets up the state of the processes
        return torch.device("second", 0)


class Streaming(StreamingMixin, Trainer):
    """transformers' trainer, with its accumulation in one pass over the layers."""


@contextmanager
def killed_in_backward(
    model: StreamedModel, layer: int, number: signal.Signals, which: int = 1
) -> Iterator[list[int]]:
    """Send this process a signal when a layer has been differentiated for the `which`th time; note
    the layers that follow it."""
    after: list[int] = []
    left = which
    differentiated = type(model.engine).leased

    @contextmanager
    def leased(engine: Any, at: int, way: Any) -> Iterator[Any]:
        nonlocal left
        with differentiated(engine, at, way) as lease:
            if left == 0:
                after.append(at)
            if (at, way) == (layer, "backward"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), number)
            yield lease

    patched = pytest.MonkeyPatch()
    patched.setattr(type(model.engine), "leased", leased)
    try:
        yield after
    finally:
        patched.undo()


@pytest.mark.parametrize(
    ("layer", "number", "kept"),
    [(1, signal.SIGTERM, False), (NUM_LAYERS - 2, signal.SIGINT, False), (1, signal.SIGINT, True)],
    ids=["the lowest layers", "the highest layers", "activations that are kept"],
)
def test_a_run_is_stopped_before_the_next_layer_and_goes_on_bitwise(
    tmp_path: Path, layer: int, number: signal.Signals, kept: bool
) -> None:
    directory = write_model(tmp_path / "model")
    adapters = []
    for cut in (False, True):
        config = settings(
            directory, tmp_path / str(cut), **RUN, gradient_checkpointing=not kept, save_steps=1
        )
        for resumed in range(1 + cut):
            model = LemaModel(config)
            model.initialize_lora()
            trainer = model.get_trainer()
            if cut and not resumed:
                with (
                    StopOnSignal() as stop,
                    killed_in_backward(model.adapter, layer, number, which=2) as after,
                    pytest.raises(Stopped, match=f"stopped by {number.name} after step 1"),
                ):
                    trainer.fit(ROWS, stop=stop.why)
                assert after == [], "layers were differentiated after the signal"
            else:
                trainer.fit(ROWS, resume=bool(resumed))
                adapters.append(adapter_of(model.skeleton))
            model.close()
    assert same(*adapters)


def test_a_signal_at_any_time_is_seen_before_the_layer_after_next(tmp_path: Path) -> None:
    draw = random.Random(5)
    stops = Stops(tmp_path, WAYS[3])
    for number in (signal.SIGTERM, signal.SIGINT):
        fault, _ = stops.stopped(number, draw)
        assert fault == ""


def test_training_of_weights_is_stopped_before_the_next_layer(checkpoint_of: CheckpointOf) -> None:
    config = config_of(
        checkpoint_of("llama"), device="second", gradient_checkpointing=True, max_grad_norm=1.0
    )
    model = LemaModel(config)
    model.skeleton.train()
    training = FullTraining(model.adapter, config, everything)
    with (
        StopOnSignal() as stop,
        killed_in_backward(model.adapter, 4, signal.SIGTERM) as after,
        model.adapter.interruptible(stop.why),
        pytest.raises(StopRequested),
    ):
        training.accumulate(micro_batches(2))
    assert after == []
    training.close()
    model.close()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_with_the_mixin_is_interrupted_before_the_next_layer(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int
) -> None:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = lema.streamed(checkpoint_of("llama").streamed, adapters, device="second")
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": []}
    quiet: dict[str, Any] = {
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_accumulation_steps": accumulated,
    }
    rows: Sequence[dict[str, Any]] = [{"input_ids": [*range(3, 9)], "labels": [*range(3, 9)]}] * 2
    arguments = Arguments(str(tmp_path), **options, **quiet)
    monkeypatch.setitem(PartialState._shared_state, "device", arguments.device)
    trainer = Streaming(model, args=arguments, train_dataset=rows)
    with (
        killed_in_backward(model.opened.adapter, 4, signal.SIGINT) as after,
        pytest.raises(KeyboardInterrupt),
    ):
        trainer.train()
    assert after == []
    model.close()
