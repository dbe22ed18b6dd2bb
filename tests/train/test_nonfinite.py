"""NaN and infinity stop a step before the optimizer does anything, and are named by the layer
where they began.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smallrun import (
    NUM_LAYERS,
    VOCABULARY,
    adapter_of,
    assert_steps_as_a_new_one,
    batch,
    opened,
    settings,
    token_rows,
    write_model,
)
from torch import Tensor

from lema.engine.optim import make_schedule
from lema.errors import DataError, NonFiniteError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def first_step(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter after the first step of a trainer to which nothing has happened."""
    with opened(settings(llama, tmp_path_factory.mktemp("first"))) as model:
        model.get_trainer().train_step(batch(1))
        return adapter_of(model.skeleton)


def poisoned_copy(
    model: Path, directory: Path, name: str, change: Callable[[Tensor], None]
) -> Path:
    """Copy a model and change one of its tensors."""
    shutil.copytree(model, directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            change(tensors[name])
            save_file(tensors, file, {"format": "pt"})
            return directory
    raise AssertionError(f"there is no {name}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("layer", "value"), [(0, "nan"), (5, "nan"), (NUM_LAYERS - 1, "inf")])
def test_a_weight_that_is_not_finite_is_named_by_its_layer(
    llama: Path, layer: int, value: str, recompute: bool, tmp_path: Path
) -> None:
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    spoilt = poisoned_copy(
        llama, tmp_path / "spoilt", name, lambda tensor: tensor[3, 2].fill_(float(value))
    )
    changes = {"gradient_checkpointing": recompute, "save_steps": 1, "check_base_weights": False}
    with opened(settings(spoilt, tmp_path / "out", **changes)) as model:
        trainer = model.get_trainer()
        before = adapter_of(model.skeleton)
        with pytest.raises(NonFiniteError) as caught:
            trainer.train_step(batch(1))
        assert caught.value.where.endswith(f"first non-finite output: model.layers.{layer}")
        assert "step 1; the optimizer made no step" in caught.value.where
        assert (trainer.global_step, trainer.accumulation_step, len(trainer.ready().state)) == (
            0,
            0,
            0,
        )
        assert all(
            torch.equal(tensor, before[key]) for key, tensor in adapter_of(model.skeleton).items()
        )
        assert all(parameter.grad is None for parameter in model.get_trainable_parameters())
    assert not (tmp_path / "out").exists()


def test_after_a_token_without_finite_embedding_a_good_step_is_as_if_nothing_had_been(
    llama: Path, first_step: dict[str, Tensor], tmp_path: Path
) -> None:
    good = batch(1)
    bad = batch(2)
    token = next(token for token in range(1, VOCABULARY) if not (good["input_ids"] == token).any())
    bad["input_ids"][1, 4] = token
    spoilt = poisoned_copy(
        llama,
        tmp_path / "spoilt",
        "model.embed_tokens.weight",
        lambda tensor: tensor[token].fill_(torch.nan),
    )
    with opened(settings(spoilt, tmp_path / "out", check_base_weights=False)) as model:
        trainer = model.get_trainer()
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            trainer.train_step(bad)
        assert caught.value.where.endswith("the embeddings")
        assert_steps_as_a_new_one(trainer, first_step)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
@pytest.mark.parametrize("layer", [2, NUM_LAYERS - 1])
def test_a_gradient_that_is_not_finite_is_named_by_its_layer(
    llama: Path,
    layer: int,
    matrix: str,
    recompute: bool,
    first_step: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    with opened(settings(llama, tmp_path, gradient_checkpointing=recompute)) as model:
        trainer = model.get_trainer()
        place = f"model.layers.{layer}.self_attn.v_proj.{matrix}.default"
        hook = model.skeleton.get_submodule(place).register_forward_hook(infinite_gradient)
        before = adapter_of(model.skeleton)
        with pytest.raises(
            NonFiniteError, match="a gradient is not finite; the optimizer made no step"
        ) as caught:
            trainer.train_step(batch(1))
        assert caught.value.where.startswith(
            f"step 1; first non-finite gradient: model.layers.{layer}.self_attn.v_proj.lora_"
        )
        assert (trainer.global_step, len(trainer.ready().state)) == (0, 0)
        assert all(
            torch.equal(tensor, before[key]) for key, tensor in adapter_of(model.skeleton).items()
        )
        hook.remove()
        assert_steps_as_a_new_one(trainer, first_step)


def infinite_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> None:
    """What a module returns is finite, what flows back into it is not."""
    if output.requires_grad:
        output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


def test_a_failure_in_the_second_batch_of_a_step_drops_the_first(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, gradient_accumulation_steps=2)) as model:
        trainer = model.get_trainer()
        trainer.train_step(batch(5))
        with pytest.raises(DataError):
            trainer.train_step(torch.full((2, 6), 5), torch.full((2, 6), -100))
        assert trainer.accumulation_step == 0
        assert all(parameter.grad is None for parameter in model.get_trainable_parameters())


def test_evaluation_names_the_rows_and_the_layer(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    spoilt = poisoned_copy(
        llama, tmp_path / "spoilt", name, lambda tensor: tensor[0, 0].fill_(torch.nan)
    )
    with opened(settings(spoilt, tmp_path, batch_size=2, check_base_weights=False)) as model:
        trainer = model.get_trainer()
        trainer.ready()
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            trainer.evaluate(token_rows(3))
        assert "evaluation, rows [0, 1] of the data" in caught.value.where
        assert "model.layers.3" in caught.value.where
        assert model.skeleton.training


@pytest.mark.slow
def test_half_precision_skips_a_step_that_overflows_and_gives_up_when_all_do(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, dtype="float16")) as model:
        trainer = model.get_trainer()
        trainer.follow(make_schedule(trainer.ready(), model.config, 10))
        hook = model.skeleton.get_submodule(
            "model.layers.2.mlp.up_proj.lora_A.default"
        ).register_forward_hook(infinite_gradient)
        before = adapter_of(model.skeleton)
        scale = trainer.scaler.get_scale()
        rates = trainer.schedule.get_last_lr()
        trainer.train_step(batch(1))
        assert trainer.scaler.get_scale() == scale / 2
        assert all(
            torch.equal(tensor, before[key]) for key, tensor in adapter_of(model.skeleton).items()
        )
        # a step that was skipped is none of the schedule's
        assert trainer.schedule.get_last_lr() == rates
        with pytest.raises(NonFiniteError, match="a gradient is not finite") as caught:
            for _ in range(40):
                trainer.train_step(batch(1))
        assert ": model.layers.2." in caught.value.where
        hook.remove()
        trainer.train_step(batch(1))
        assert not torch.equal(
            adapter_of(model.skeleton)[next(iter(before))], before[next(iter(before))]
        )
