"""NaN that arises in the backward is named by the layer where it arose, whether or not anything
trains there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smallrun import NUM_LAYERS, adapter_of, batch, opened, settings, token_rows, write_model
from torch import Tensor

from lema.errors import NonFiniteError
from lema.train.health.nonfinite import HiddenGradients


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def spoil(model: Any, layer: int, module: str = "input_layernorm", value: float = torch.nan) -> Any:
    """Have the gradient that goes down through a module not be finite; no adapter above it in
    its layer sees that.
    """

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, value))

    return model.skeleton.get_submodule(f"model.layers.{layer}.{module}").register_forward_hook(
        hook
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_each_layer_that_hands_nan_down_is_named_though_its_own_gradients_are_finite(
    llama: Path, recompute: bool, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, gradient_checkpointing=recompute)) as model:
        trainer = model.get_trainer()
        before = adapter_of(model.skeleton)
        for layer in range(1, NUM_LAYERS):
            hook = spoil(model, layer)
            with pytest.raises(NonFiniteError, match="a gradient is not finite") as caught:
                trainer.train_step(batch(1))
            hook.remove()
            assert caught.value.where == f"step 1; first non-finite gradient: model.layers.{layer}"
        # nothing trains below, so nothing is handed down
        hook = spoil(model, 0, "self_attn.v_proj.lora_B.default")
        with pytest.raises(NonFiniteError, match="a gradient is not finite") as caught:
            trainer.train_step(batch(1))
        hook.remove()
        assert ": model.layers.0.self_attn.v_proj." in caught.value.where
        assert all(
            torch.equal(tensor, before[key]) for key, tensor in adapter_of(model.skeleton).items()
        )
        trainer.save_checkpoint(tmp_path / "saved")
        for file in (tmp_path / "saved").glob("*.safetensors"):
            assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())


def test_a_layer_without_adapters_is_named_and_so_is_one_between_others(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, lora_layers_to_transform=[1, 4])) as model:
        for layer in (7, 5, 4, 3, 2):
            hook = spoil(model, layer, value=torch.inf)
            with pytest.raises(NonFiniteError) as caught:
                model.get_trainer().train_step(batch(1))
            hook.remove()
            assert caught.value.where.endswith(f"first non-finite gradient: model.layers.{layer}")


def test_a_head_that_hands_nan_down_is_named(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        model.skeleton.get_submodule("model.norm").register_forward_hook(hook)
        with pytest.raises(NonFiniteError) as caught:
            model.get_trainer().train_step(batch(1))
        assert caught.value.where.endswith("first non-finite gradient: the head and the loss")


def test_the_first_of_the_passes_of_a_step_is_looked_at_too(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, gradient_accumulation_steps=2)) as model:
        trainer = model.get_trainer()
        poison = token_rows(1, 9)[0]["input_ids"][0]
        first = batch(1)
        second = batch(2)
        first["input_ids"][0, 0], second["input_ids"][:] = (
            poison,
            second["input_ids"] % (poison - 1) + 1,
        )
        first["input_ids"][first["input_ids"] == poison] = poison
        rows = torch.cat([first["input_ids"], second["input_ids"]]).tolist()
        seen = list[Tensor]()

        def note(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            # else the head is computed, by tokens that are nobody's
            if all(row in rows for row in args[0].tolist()):
                seen.append(args[0])

        model.skeleton.get_input_embeddings().register_forward_hook(note)

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad and bool((seen[-1] == poison).any()):
                output.register_hook(lambda gradient: gradient * torch.nan)

        model.skeleton.get_submodule("model.layers.6.input_layernorm").register_forward_hook(hook)
        trainer.train_step(first)
        with pytest.raises(NonFiniteError) as caught:
            trainer.train_step(second)
        assert caught.value.where.endswith("first non-finite gradient: model.layers.6")


def test_looking_for_the_layer_draws_the_same_dropout_again(llama: Path, tmp_path: Path) -> None:
    """The gradient is not finite with what dropout drew in the step, and would be with nothing
    it draws afterwards.
    """
    with opened(settings(llama, tmp_path, lora_dropout=0.5)) as model:
        trainer = model.get_trainer()
        trainer.ready()
        drawn: list[Tensor] = []

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            drawn.append(output == 0)
            if torch.equal(drawn[-1], drawn[0]) and output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        place = "model.layers.5.self_attn.q_proj.lora_dropout.default"
        model.skeleton.get_submodule(place).register_forward_hook(hook)
        with pytest.raises(NonFiniteError) as caught:
            trainer.train_step(batch(1))
        assert "model.layers.5" in caught.value.where
        assert len(drawn) >= 4  # forward and recomputation, in the step and in the search
        assert all(torch.equal(one, drawn[0]) for one in drawn)


def test_fit_names_the_rows_of_a_gradient(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, shuffle=False, batch_size=2, save_steps=1)) as model:
        count = iter(range(10_000))
        steps: list[int] = []

        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad and steps:
                output.register_hook(lambda gradient: gradient * torch.nan)

        model.skeleton.get_submodule("model.layers.3.input_layernorm").register_forward_hook(hook)
        trainer = model.get_trainer()
        accumulate = trainer.accumulate

        def second(*args: Any, **options: Any) -> Any:
            if next(count):
                steps.append(1)
            return accumulate(*args, **options)

        trainer.accumulate = second  # type: ignore[method-assign]
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit(token_rows(6))
    assert caught.value.where == (
        "step 2, rows [2, 3] of the data; first non-finite gradient: model.layers.3"
    )
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]


def test_the_range_of_a_gradient_tells_every_kind_of_number() -> None:
    for value, finite in (
        (torch.nan, False),
        (torch.inf, False),
        (-torch.inf, False),
        (3e38, True),
        (0.0, True),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            hidden = HiddenGradients()
            gradient = torch.ones(2, 3, 70, dtype=dtype)
            gradient[1, 2, 66] = value
            hidden.observe(4, [None, gradient])
            hidden.observe(3, [torch.full((2,), torch.nan)] if not finite else [])
            assert hidden.highest() == (None if finite else 4)
