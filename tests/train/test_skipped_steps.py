"""A step whose loss or gradient is not finite is dropped where that is allowed: counted, told,
and without a trace.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fulltraining import opened as full
from safetensors.torch import load_file
from smallrun import adapter_of, batch, opened, same, settings, token_rows, write_model
from tiny import Checkpoint, micro_batches
from torch import Tensor

from lema import LemaModel, LemaTrainer
from lema.data import Batches
from lema.engine import StreamedModel
from lema.engine.optim import make_schedule
from lema.errors import NonFiniteError
from lema.train.metrics import read_metrics

ROWS = token_rows(16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@contextmanager
def spoilt(
    model: LemaModel, trainer: LemaTrainer, steps: set[int], kind: str, layer: int = 3
) -> Iterator[None]:
    """Have the loss, or a gradient, of some steps of a trainer (counted from 1) be NaN."""

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        if trainer.global_step + 1 not in steps:
            return output
        if kind == "loss":
            return output * torch.nan
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)
        return output

    handle = model.skeleton.get_submodule(
        f"model.layers.{layer}.input_layernorm"
    ).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_finite(output: Path) -> int:
    """No checkpoint holds a number that is none; return how many there are."""
    found = list(output.glob("checkpoint-*"))
    for directory in found:
        files = list(directory.glob("*.safetensors"))
        assert len(files) > 1  # the adapter and the optimizer's state
        for file in files:
            for name, tensor in load_file(file).items():
                assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), name
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dropout"), [("loss", 0.0), ("gradient", 0.2)])
def test_fit_goes_on_as_if_the_batch_had_not_been_in_the_data(
    kind: str, dropout: float, llama: Path, tmp_path: Path
) -> None:
    changes = {
        "lora_dropout": dropout,
        "shuffle": False,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "save_steps": 1,
        "save_total_limit": None,
    }
    config = settings(llama, tmp_path / "out", max_skipped_steps=1, **changes)
    with opened(config) as model:
        trainer = model.get_trainer()
        with (
            spoilt(model, trainer, {2}, kind),
            pytest.warns(UserWarning, match="step 2 was dropped, 1 of at most 1"),
        ):
            trainer.fit(ROWS)
        found = adapter_of(model.skeleton)
        assert (trainer.global_step, trainer.skipped_steps) == (4, 1)
    with opened(settings(llama, tmp_path / "other", **changes)) as model:
        trainer = model.get_trainer()
        trainer.follow(make_schedule(trainer.ready(), model.config, 4))
        torch.manual_seed(config.seed)
        batches = Batches(ROWS, 4, shuffle=False)
        for number in range(batches.steps_per_epoch):
            if number == 1:  # what dropout drew for it was drawn
                before = adapter_of(model.skeleton)
                rates = trainer.schedule.get_last_lr()  # type: ignore[union-attr]
                with pytest.raises(NonFiniteError), spoilt(model, trainer, {2}, kind):
                    trainer.accumulate(batches.micro_batches([number]))
                assert (
                    same(adapter_of(model.skeleton), before)
                    and trainer.schedule.get_last_lr() == rates
                )  # type: ignore[union-attr]
                continue
            trainer.accumulate(batches.micro_batches([number]))
        assert same(adapter_of(model.skeleton), found)
    (row,) = [
        row
        for row in read_metrics(tmp_path / "out" / "metrics.jsonl")
        if row.get("event") == "skipped"
    ]
    assert (row["step"], row["skipped"], row["rows"]) == (2, 1, [4, 5, 6, 7])
    assert "model.layers.3" in row["at"] and row["why"].startswith(
        "the loss is" if kind == "loss" else "a gradient"
    )
    assert [
        one["step"] for one in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in one
    ] == [1, 3, 4]
    assert assert_finite(tmp_path / "out") == 4


@pytest.mark.slow
def test_one_more_than_the_limit_ends_the_run_and_the_count_is_resumed(
    llama: Path, tmp_path: Path
) -> None:
    kind = "gradient"
    config = settings(llama, tmp_path, max_skipped_steps=2, save_steps=1, shuffle=False)
    with opened(config) as model:
        trainer = model.get_trainer()
        with (
            spoilt(model, trainer, {1, 3, 4}, kind),
            pytest.warns(UserWarning, match="was dropped"),
            pytest.raises(
                NonFiniteError, match=r"the optimizer made no step|the loss is nan"
            ) as caught,
        ):
            trainer.fit(ROWS)
        assert "2 steps were dropped before this one (max_skipped_steps)" in caught.value.how
        assert "step 4, rows [12, 13, 14, 15] of the data" in caught.value.where
        assert caught.value.exit_code == 5
        assert (trainer.global_step, trainer.skipped_steps, trainer.accumulation_step) == (3, 2, 0)
    assert assert_finite(tmp_path) == 3
    with opened(config) as model:
        trainer = model.get_trainer()
        with (
            spoilt(model, trainer, {4}, kind),
            pytest.raises(NonFiniteError, match=r"not finite|the loss is nan"),
        ):
            trainer.fit(ROWS, resume=True)
        assert trainer.skipped_steps == 2
        assert (trainer.fit(ROWS)["train_loss"], trainer.global_step) == (
            pytest.approx(6, abs=3),
            4,
        )


@pytest.mark.slow
def test_a_step_is_dropped_whole_if_any_of_its_passes_is_at_fault(
    llama: Path, tmp_path: Path
) -> None:
    with opened(
        settings(llama, tmp_path, gradient_accumulation_steps=2, max_skipped_steps=5)
    ) as model:
        trainer = model.get_trainer()
        before = adapter_of(model.skeleton)
        for faulty in ((1,), (2,), (1, 2)):
            with pytest.warns(UserWarning, match="was dropped") as told:
                for number in (1, 2):
                    with spoilt(
                        model,
                        trainer,
                        {trainer.global_step + 1} if number in faulty else set(),
                        "loss",
                    ):
                        trainer.train_step(batch(number))
            assert len([one for one in told if "dropped" in str(one.message)]) == 1
            assert trainer.accumulation_step == 0 and all(
                one.grad is None for one in model.get_trainable_parameters()
            )
        assert (trainer.global_step, trainer.skipped_steps) == (3, 3)
        assert same(adapter_of(model.skeleton), before) and not trainer.ready().state
        trainer.train_step(batch(1))
        trainer.train_step(batch(2))
        found = adapter_of(model.skeleton)
    with opened(settings(llama, tmp_path, gradient_accumulation_steps=2)) as model:
        trainer = model.get_trainer()
        trainer.train_step(batch(1))
        trainer.train_step(batch(2))
        assert same(adapter_of(model.skeleton), found)


def test_an_overflow_of_scaled_gradients_is_none_of_these(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, dtype="float16", max_skipped_steps=1)) as model:
        trainer = model.get_trainer()
        scale = trainer.ready() and trainer.scaler.get_scale()
        with spoilt(model, trainer, {1}, "gradient"):
            trainer.train_step(batch(1))
        assert (trainer.skipped_steps, trainer.global_step, trainer.scaler.get_scale()) == (
            0,
            1,
            scale / 2,
        )
        with (
            spoilt(model, trainer, {2}, "loss"),
            pytest.warns(UserWarning, match="step 2 was dropped"),
        ):
            trainer.train_step(batch(1))
        trainer.train_step(batch(1))
        assert (trainer.skipped_steps, trainer.global_step) == (1, 3)


class Spoiling:
    """Multiplies the losses of some calls, counted from 1, with NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
        count = itertools.count(1)
        loss = StreamedModel.loss

        def called(model: StreamedModel, *arguments: Any, **options: Any) -> Tensor:
            found = loss(model, *arguments, **options)
            return found * torch.nan if next(count) in calls else found

        monkeypatch.setattr(StreamedModel, "loss", called)


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [None, 0.5])
def test_weights_go_on_as_if_the_step_had_not_been(
    clipped: float | None,
    checkpoint_of: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_of("llama")
    found = []
    for faulty in (True, False):
        changes = {"max_grad_norm": clipped, "max_skipped_steps": 1}
        with monkeypatch.context() as patch, full(checkpoint, **changes) as (_, training):
            if faulty:
                Spoiling(patch, 2)
            training.accumulate(micro_batches(2))
            if faulty:
                with pytest.warns(UserWarning, match="step 2 was dropped"):
                    assert math.isnan(
                        training.accumulate(micro_batches(2), where=", rows 1 and 2").loss
                    )
                assert (
                    training.dropped is not None
                    and "step 2, rows 1 and 2" in training.dropped.where
                )
                training.save_checkpoint(tmp_path / "saved")
                training.guard.skipped = training.global_step = 0
                training.restore(tmp_path / "saved")
                assert (training.skipped_steps, training.global_step) == (1, 2)
            training.accumulate(micro_batches(3))
            assert training.dropped is None
            found.append(
                {name: master.detach().clone() for name, master in training.masters.items()}
            )
    assert same(*found)


@pytest.mark.parametrize("clipped", [None, 0.5])
def test_a_gradient_of_weights_is_dropped_only_where_nothing_was_stepped(
    clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    with full(checkpoint_of("llama"), max_grad_norm=clipped, max_skipped_steps=1) as (
        model,
        training,
    ):
        before = {name: master.detach().clone() for name, master in training.masters.items()}

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        handle = model.skeleton.get_submodule(
            "model.layers.6.post_attention_layernorm"
        ).register_forward_hook(hook)
        if clipped is None:
            with pytest.raises(NonFiniteError, match=r"gradient of model\.layers\.6") as caught:
                training.accumulate(micro_batches(2))
            assert training.skipped_steps == 0 and "already updated" in caught.value.where
            return
        with pytest.warns(UserWarning, match="step 1 was dropped"):
            training.accumulate(micro_batches(2))
        assert training.dropped is not None and ": model.layers.6" in training.dropped.where
        assert same(before, {name: master.detach() for name, master in training.masters.items()})
        with pytest.raises(NonFiniteError):
            training.accumulate(micro_batches(2))
        handle.remove()
        training.accumulate(micro_batches(2))
        assert (training.global_step, training.skipped_steps) == (2, 1)


def test_the_layer_that_hands_nan_down_is_named_though_the_weights_of_another_have_it(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    """Of layer 6 only what lies above the fault trains, and has gradients that are finite."""

    def chosen(name: str) -> bool:
        return ".layers." in name and (".layers.6." not in name or ".mlp." in name)

    for clipped in (None, 0.5):
        with full(checkpoint_of("llama"), chosen=chosen, max_grad_norm=clipped) as (
            model,
            training,
        ):

            def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(lambda gradient: gradient * torch.nan)

            model.skeleton.get_submodule("model.layers.6.input_layernorm").register_forward_hook(
                hook
            )
            with pytest.raises(NonFiniteError, match=r"gradient of model\.layers\.5") as caught:
                training.accumulate(micro_batches(2))
            assert caught.value.where.endswith("; first non-finite gradient: model.layers.6")
