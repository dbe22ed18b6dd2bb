"""Routers choose the experts that they are told to, and nothing else changes: losses and gradients
are those of the whole model whose routers were written by hand to choose the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import STREAMED
from handwrittenrouters import FACTORS, choose, softmax_of_all
from parity import draw_b
from peft import LoraConfig, get_peft_model
from publishedclass import publish
from tinyconfig import tiny_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import lema
from lema.errors import ConfigError
from lema.model import meta_model
from lema.model.experts import layer_experts
from lema.model.layers.routing import FREE, replayed

LAYERS = 8
EXPERTS = 6
CHOSEN = 2
ROWS = 4
WIDTH = 11
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        norm_topk_prob=True,
        mlp_only_layers=[2],
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=EXPERTS,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=EXPERTS, sliding_window=5
    ),
}
DENSE = {"qwen3_moe": [2], "deepseek_v3": [0]}  # layers without experts


def drawn_choices(model_type: str, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    """Choices that no router would make, `[rows, width, layers, experts of each token]`; zeros of
    layers without experts, as a server has it."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(rows, width, LAYERS, EXPERTS, generator=generator)
    choices = scores.argsort(dim=-1)[..., :CHOSEN].contiguous()
    choices[:, :, DENSE.get(model_type, [])] = 0
    return choices


def rows_of(width: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 96, (ROWS, width), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def lora() -> LoraConfig:
    return LoraConfig(
        r=4, target_modules=r".*self_attn\.(q_proj|q_b_proj|o_proj)", task_type="CAUSAL_LM"
    )


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def streamed(directory: Path, **settings: Any) -> Any:
    model = lema.streamed(directory, lora(), device="cpu", seed=42, **settings)
    draw_b(model)
    return model.train()


def whole(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(42)
    model = get_peft_model(model, lora())
    draw_b(model)
    return model.train()


@pytest.fixture(params=CONFIGS)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name: str = request.param
    return name, publish(name, tmp_path / "model", CONFIGS[name]())


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": False}])
def test_gradients_are_those_of_a_whole_model_that_chooses_the_same(
    published: tuple[str, Path], settings: dict[str, Any]
) -> None:
    name, directory = published
    choices = drawn_choices(name)
    reference = whole(directory)
    free = float(reference(**rows_of()).loss.detach())
    choose(reference, FACTORS[name], choices)
    expected = reference(**rows_of()).loss
    expected.backward()
    assert abs(float(expected.detach()) - free) > 1e-4
    model = streamed(directory, **settings)
    with model.replaying(choices):
        loss = model(**rows_of()).loss
    loss.backward()
    assert torch.equal(loss, expected)
    found = gradients(model)
    by_name = gradients(reference)
    assert len(found) == len(by_name) >= 2 * LAYERS
    assert all(torch.equal(found[key], by_name[key]) for key in found)
    # outside the block routers choose themselves again
    model.zero_grad()
    assert float(model(**rows_of()).loss.detach()) == free
    model.close()


def test_the_example_of_the_page_runs(published: tuple[str, Path]) -> None:
    name, directory = published
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- replaying example -->\n```python\n(.*?)```", page, re.DOTALL)
    model = streamed(directory)
    rows = rows_of()
    given = {"rows": rows["input_ids"], "mask": rows["attention_mask"], "labels": rows["labels"]}
    exec(text, {"model": model, "choices": drawn_choices(name), **given})
    assert len(gradients(model)) >= 2 * LAYERS
    model.close()


def test_experts_in_groups_and_micro_batches_take_their_own_rows(
    published: tuple[str, Path],
) -> None:
    name, directory = published
    choices = drawn_choices(name)
    reference = whole(directory)
    choose(reference, FACTORS[name], choices)
    expected = reference(**rows_of()).loss
    expected.backward()
    by_name = gradients(reference)
    for settings in ({"micro_batch_size": 1}, {"experts_per_slot": 2, "micro_batch_size": 2}):
        model = streamed(directory, **settings)
        with model.replaying(choices.to(torch.uint8)):
            loss = model(**rows_of()).loss
        loss.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        for key, gradient in gradients(model).items():
            assert torch.allclose(gradient, by_name[key], rtol=1e-4, atol=1e-7), key
        model.close()


def test_where_nothing_is_told_a_router_chooses_itself(published: tuple[str, Path]) -> None:
    name, directory = published
    model = streamed(directory)
    with torch.no_grad():
        free = model(**rows_of(), use_cache=False).logits
        choices = drawn_choices(name)
        with model.replaying(torch.full_like(choices, FREE)):
            assert torch.equal(model(**rows_of(), use_cache=False).logits, free)
        choices[:, 4:] = FREE  # causal: what comes later changes nothing before
        with model.replaying(choices):
            told = model(**rows_of(), use_cache=False).logits
    assert not torch.equal(told[:, 1:4], free[:, 1:4])
    model.close()


def test_calls_take_rows_one_after_the_other(published: tuple[str, Path]) -> None:
    name, directory = published
    choices = drawn_choices(name)
    model = streamed(directory)
    rows = rows_of()
    with torch.no_grad():
        with model.replaying(choices):
            at_once = model(**rows, use_cache=False).logits
        with model.replaying(choices):
            parts = [
                model(
                    **{key: value[begin : begin + 2] for key, value in rows.items()},
                    use_cache=False,
                ).logits
                for begin in (0, 2)
            ]
    assert torch.allclose(torch.cat(parts), at_once, atol=1e-5)
    model.close()


@pytest.mark.parametrize("published", ["mixtral"], indirect=True)
def test_choices_that_do_not_fit_are_refused(published: tuple[str, Path]) -> None:
    name, directory = published
    choices = drawn_choices(name)
    rows = rows_of()
    model = streamed(directory)

    def call(told: Tensor, **more: Any) -> None:
        with model.replaying(told):
            model(**rows, **more)

    for told, message in (
        (choices[:, :, :-1], "8 layers"),
        (choices.float(), "not integers"),
        (choices.tolist(), "choices are a list"),
        (choices.bool(), "not integers"),
        (choices[:3], "choices are left for 3"),
        (choices[:, :-1], "4 rows of 11 tokens"),
        (torch.cat([choices, choices]), "4 rows of choices belong to no call"),
        (choices + EXPERTS - 1, r"there are experts 0 to 5"),
        (choices.where(choices > 0, -2), r"a choice is -2"),
        (choices[..., [0, 0]], r"the experts of token 0 in layer 0 are \[(\d), \1\]"),
        (torch.cat([choices[..., :1], choices[..., :1] * 0 + FREE], dim=-1), "or -1 in all places"),
        (torch.cat([choices, choices[..., :1] * 0 + EXPERTS], dim=-1), "does not choose 3 of"),
        (drawn_choices(name)[..., :1] + 1, "does not choose 1 of"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(told)
    with torch.no_grad(), pytest.raises(ConfigError, match="4 rows of choices belong to no call"):
        call(choices, use_cache=True)
    with model.replaying(choices):
        with pytest.raises(ConfigError, match="replayed already"):
            call(choices)
        model(**rows)  # the block that was refused has taken nothing
    model.close()


@pytest.mark.parametrize("published", ["mixtral"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_integers_of_every_type_are_taken(published: tuple[str, Path], dtype: torch.dtype) -> None:
    name, directory = published
    choices = drawn_choices(name)
    choices[:, 0] = 0  # as a server has it where it told nothing
    model = streamed(directory)

    def loss_of(choices: Tensor) -> float:
        with model.replaying(choices):
            return float(model(**rows_of()).loss.detach())

    found = loss_of(choices.to(dtype))
    choices[:, 0] = FREE
    assert found == loss_of(choices)
    model.close()


def test_the_first_expert_is_a_choice_where_a_token_has_one(tmp_path: Path) -> None:
    config = MixtralConfig(**{**SIZES, "num_experts_per_tok": 1}, num_local_experts=EXPERTS)
    directory = publish("mixtral", tmp_path / "model", config)
    choices = torch.zeros(ROWS, WIDTH, LAYERS, 1, dtype=torch.int32)
    reference = whole(directory)
    free = float(reference(**rows_of()).loss.detach())
    choose(reference, softmax_of_all, choices.long())
    expected = reference(**rows_of()).loss
    model = streamed(directory)
    with model.replaying(choices):
        loss = model(**rows_of()).loss
    assert torch.equal(loss, expected)
    assert float(loss.detach()) != free
    model.close()


def test_a_dense_model_is_not_told_anything(tmp_path: Path) -> None:
    model = lema.streamed(publish("llama", tmp_path / "model"), lora(), device="cpu")
    layers = len(model.opened.split.layers)
    choices = torch.arange(CHOSEN).expand(ROWS, WIDTH, layers, CHOSEN)
    with pytest.raises(ConfigError, match="has no experts"), model.replaying(choices):
        model(**rows_of())
    with model.replaying(torch.zeros_like(choices)):
        model(**rows_of())
    model.close()


# Types whose routers choose in another way, or in two places.
OTHERS = {"jetmoe", "phimoe", "zaya"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of many types, some of which are announced as old
def test_every_type_is_told_or_refused() -> None:
    """What the experts of every type receive is what was told."""
    told = set[str]()
    refused = set[str]()
    for model_type in STREAMED:
        skeleton = meta_model(tiny_config(model_type), torch.float32)
        model = type(skeleton)._from_config(skeleton.config, dtype=torch.float32).eval()
        layers = [
            module
            for name, module in model.named_modules()
            if name.rpartition(".")[0].endswith(("layers", ".h", "blocks"))
            and name.rpartition(".")[2].isdigit()
        ]
        for layer in layers:
            experts = layer_experts(layer)
            if experts is None:
                continue
            try:
                assert torch.equal(*received(model, layer, experts)), model_type
                told.add(model_type)
            except ConfigError:
                refused.add(model_type)
    assert refused - told == OTHERS - {"jetmoe"}  # whose experts are in no module of their own
    assert refused & told == {"deepseek_v4"}  # some of its layers choose by a table of tokens
    assert len(told) >= 50


def received(model: Any, layer: Any, experts: Any) -> tuple[Tensor, Tensor]:
    """What the experts of a layer are given, and what its router was told."""
    width = recorded(model, layer, experts, None)[0].shape[-1]
    generator = torch.Generator().manual_seed(5)
    choices = torch.rand(14, experts.count, generator=generator).argsort(dim=-1)[:, :width]
    return recorded(model, layer, experts, choices)[0].long(), choices


def recorded(model: Any, layer: Any, experts: Any, choices: Tensor | None) -> list[Tensor]:
    given = list[Tensor]()
    hook = experts.module.register_forward_pre_hook(lambda _, args: given.append(args[1]))
    forward = layer.forward

    def replaying(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if choices is None else replayed(layer, 0, experts, choices):
            return forward(*args, **kwargs)

    layer.forward = replaying
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 17).view(2, 7))
    finally:
        del layer.forward
        hook.remove()
    return given
