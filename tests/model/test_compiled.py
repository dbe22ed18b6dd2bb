"""Compiled layers: one graph for all that are alike, the same numbers, and nothing left uncompiled
unsaid.

The compiler here is the one that runs the traced graphs with torch's own kernels: what it makes is
bitwise what runs without it, so every difference is a fault of ours. The compiler that makes
kernels of its own is run once, as `slow`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    all_gradients,
    assert_same,
    draw_b,
    relative_difference,
    streamed_model,
    streamed_step,
)
from tiny import Checkpoint, micro_batches
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3NextConfig

from lema import LemaModel
from lema.model.layers.compiled import CompiledLayers
from lema.model.layers.kinds import compare_layers
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]
ALIKE = (12, 12, 12)  # lengths of micro-batches
UNLIKE = (12, 9, 14)


@pytest.fixture(autouse=True)
def _own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "aot_eager")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step_of_both(checkpoint: Checkpoint, batches: Any, **settings: Any) -> LemaModel:
    """Take a step compiled and one that is not, and hold them to be bitwise one; return the
    compiled model, closed.
    """
    outcomes = []
    for compiled in (False, True):
        with streamed_model(checkpoint, torch_compile=compiled, **settings) as model:
            draw_b(model.lora_manager)
            streamed_step(model, batches)
            outcomes.append(streamed_step(model, batches))  # what the first step learnt is used
    assert_same(outcomes[1], outcomes[0])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_graph_serves_every_layer_bitwise(
    checkpoint_of: CheckpointOf, recompute: bool, dtype: str
) -> None:
    batches = micro_batches(3, lengths=ALIKE)
    model = step_of_both(
        checkpoint_of("llama"),
        batches,
        gradient_checkpointing=recompute,
        dtype=dtype,
        prefetch_depth=1,
    )
    assert len(model.split.compiled.kinds) == 12
    assert model.split.compiled.compilations == 1


@pytest.mark.exhaustive
def test_evaluation_takes_one_graph_more(checkpoint_of: CheckpointOf) -> None:
    batches = micro_batches(2, lengths=ALIKE)
    values = []
    for compiled in (False, True):
        with streamed_model(
            checkpoint_of("llama"), torch_compile=compiled, gradient_checkpointing=True
        ) as model:
            draw_b(model.lora_manager)
            streamed_step(model, batches)
            model.skeleton.eval()
            values += [model.adapter.evaluate(batches)[0] for _ in range(2)]
    assert model.split.compiled.compilations == 2
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_lengths_that_vary_take_one_graph_more(
    checkpoint_of: CheckpointOf, recompute: bool
) -> None:
    """The graph for every length is made at the second; the first length may be run by either
    from then on.
    """
    batches = micro_batches(3, lengths=UNLIKE)
    model = step_of_both(checkpoint_of("llama"), batches, gradient_checkpointing=recompute)
    assert model.split.compiled.compilations == 2


@pytest.mark.exhaustive  # inductor takes half a minute for both
def test_two_kinds_of_layers_take_two_graphs(checkpoint_of: CheckpointOf) -> None:
    batches = micro_batches(2, lengths=ALIKE)
    with streamed_model(
        checkpoint_of("gemma2"), torch_compile=True, attn_implementation="eager"
    ) as model:
        streamed_step(model, batches)
        assert model.split.compiled.kinds == (0, 1) * 6  # every other layer attends to a window
        assert model.split.compiled.compilations == 2
    step_of_both(
        checkpoint_of("gemma2"), batches, gradient_checkpointing=True, attn_implementation="eager"
    )


@pytest.mark.slow
def test_a_kind_that_does_not_compile_leaves_the_others_alone(tmp_path: Path) -> None:
    """The backward that torch traces of these layers with a state fails, in torch."""
    batches = micro_batches(2, lengths=ALIKE)
    with said("model.layers.0 is not compiled, like the 5 of its kind: RuntimeError: view size"):
        model = step_of_both(
            hybrid(tmp_path),
            batches,
            gradient_checkpointing=True,
            lora_target_modules=["o_proj", "out_proj"],
        )
    assert model.split.compiled.kinds == (0, 0, 0, 1) * 2
    assert [model.split.compiles(layer) for layer in range(8)] == [False, False, False, True] * 2


@pytest.mark.exhaustive
def test_some_layers_kept_and_some_recomputed(checkpoint_of: CheckpointOf) -> None:
    batches = micro_batches(3, padding=True, lengths=UNLIKE)
    step_of_both(
        checkpoint_of("qwen3"),
        batches,
        gradient_checkpointing=True,
        spent={"saved": frozenset({2, 5})},
    )


@pytest.mark.slow
def test_a_layer_that_computes_with_its_number_is_not_taken_for_another() -> None:
    layers = [Numbered(number) for number in range(12)]
    compiled = CompiledLayers(layers, "stack", CpuBackend())
    state = torch.ones(1, 2, 2)
    assert set(compiled.kinds) == {0}
    # it makes eight graphs of one function
    with said("stack.8 is not compiled: torch.compile failed on it"):
        found = [compiled.call(index, {}, (state,), {}) for index in range(12)]
    assert compiled.compilations == 8
    assert all(torch.equal(one, layer(state)) for one, layer in zip(found, layers, strict=True))


def test_gradients_reach_the_layer_that_was_called() -> None:
    layers = [Numbered(0) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.name = f"stack.{number}.inner"
    compiled = CompiledLayers(layers, "stack", CpuBackend())
    compiled.call(2, {}, (torch.ones(1, 2, 2),), {}).sum().backward()
    assert [layer.inner.weight.grad is not None for layer in layers] == [False, False, True, False]
    assert compiled.compilations == 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_that_draw_are_left_as_they_are(
    checkpoint_of: CheckpointOf, recompute: bool
) -> None:
    with said("model.layers.0 is not compiled, like the 11 of its kind: it draws random numbers"):
        step_of_both(
            checkpoint_of("llama"),
            micro_batches(2),
            lora_dropout=0.1,
            gradient_checkpointing=recompute,
        )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_an_error_of_the_compiler_is_said_and_nothing_else_changes(
    checkpoint_of: CheckpointOf, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "no such compiler")
    with said("model.layers.0 is not compiled, like the 11 of its kind: .*no such"):
        step_of_both(checkpoint_of("llama"), micro_batches(2), gradient_checkpointing=recompute)


@pytest.mark.slow
def test_a_layer_with_a_hook_is_left_as_it_is(checkpoint_of: CheckpointOf) -> None:
    outcomes = []
    calls = []
    for compiled in (False, True):
        with streamed_model(
            checkpoint_of("llama"), torch_compile=compiled, gradient_checkpointing=True
        ) as model:
            draw_b(model.lora_manager)
            model.skeleton.model.layers[3].mlp.register_forward_hook(
                lambda *_, compiled=compiled: calls.append(compiled)
            )
            with (
                said("model.layers.3 is not compiled: a module in it has a hook")
                if compiled
                else nullcontext()
            ):
                outcomes.append(streamed_step(model, micro_batches(1)))
    assert_same(outcomes[1], outcomes[0])
    assert calls.count(True) == calls.count(False) > 0
    assert model.split.compiled.compilations == 1


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_kernels_of_its_own_stay_near(
    checkpoint_of: CheckpointOf, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "inductor")
    outcomes = []
    for compiled in (False, True):
        with streamed_model(
            checkpoint_of("llama"), torch_compile=compiled, gradient_checkpointing=recompute
        ) as model:
            draw_b(model.lora_manager)
            outcomes += [streamed_step(model, micro_batches(3, padding=True))]
    assert torch.allclose(outcomes[1].loss, outcomes[0].loss, rtol=1e-5)
    assert relative_difference(all_gradients(outcomes[1]), all_gradients(outcomes[0])) < 1e-5
    assert model.split.compiled.compilations == 2


class Numbered(nn.Module):
    def __init__(self, number: int, **more: Any) -> None:
        super().__init__()
        self.number = number
        self.name = f"stack.{number}.inner"
        self.inner = nn.Linear(2, 2)
        self.settings = {"eps": 1e-6}
        vars(self).update(more)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * (self.number + 1)


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ([{}] * 4, (0, 0, 0, 0)),
        ([{"window": 2}, {"window": 3}, {"window": 2}, {"window": 3}], (0, 1, 0, 1)),
        ([{"flag": 0}, {"flag": 1}, {"flag": 0}, {"flag": 1}], (0, 1, 0, 1)),
        ([{"flag": 0}, {"flag": 1}], (0, 1)),
        ([{"settings": {"eps": one}} for one in (1e-6, 1e-6, 1e-5)], (0, 0, 1)),
        ([{"table": torch.full((2,), one)} for one in (0.0, 0.0, 1.0)], (0, 0, 1)),
        ([{"call": lambda: 0}, {"call": lambda: 0}], (0, 1)),
        ([{"name": one} for one in ("stack.0.inner", "stack.1.inner", "stack.1.inner")], (0, 0, 1)),
    ],
)
def test_layers_are_alike_but_for_how_they_are_called(
    more: list[dict[str, Any]], kinds: tuple[int, ...]
) -> None:
    layers = [Numbered(number, **one) for number, one in enumerate(more)]
    if len(layers) == 2:
        for layer in layers:
            layer.number = 5  # of two, nothing says that they are counted
    found, labels = compare_layers(layers, "stack")
    assert found == kinds
    if len(layers) > 2:
        assert ("", "number") in labels


def test_tensors_tell_kinds_apart() -> None:
    layers = [Numbered(number) for number in range(6)]
    layers[1].inner = nn.Linear(2, 3)
    layers[2].inner = nn.Linear(2, 2, bias=False)
    layers[3].inner.weight.requires_grad_(False)
    layers[4].inner.to(torch.bfloat16)
    layers[5].inner = nn.Bilinear(2, 2, 2)
    assert compare_layers(layers, "stack")[0] == (0, 1, 2, 3, 4, 5)


def said(words: str) -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match=words)


def hybrid(directory: Path) -> Checkpoint:
    """Write a model in which every fourth layer attends, and the others have a state."""
    config = Qwen3NextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=0,
        mlp_only_layers=list(range(8)),
        pad_token_id=0,
    )
    return _written(config, directory)


def _written(config: PreTrainedConfig, directory: Path) -> Checkpoint:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory / "published")
    return Checkpoint(None, directory / "published", directory / "published")
