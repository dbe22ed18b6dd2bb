"""Adapters of stacked experts: PEFT's numbers without the sum `W + B A`, and no gradient of a
frozen expert.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import compare, difference, micro_batches, opened, write_model
from parity import draw_b, trained
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from smallrun import streamed_logits, whole_logits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.integrations import moe

import lema
from lema import LemaModel
from lema.model.experts import LowRankSum, UnmergedWrapper, multiply_unmerged
from lema.plan.blueprint import draw_up
from lema.plan.planner import opened_planner

NUM_EXPERTS = 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Plain, of experts that are narrower than the dense layers, and transposed with biases and an
# activation of their own.
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=48),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        num_experts=NUM_EXPERTS,
        moe_intermediate_size=24,
        intermediate_size=48,
        mlp_only_layers=[0],
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=24),
}
ADAPTED: dict[str, Any] = {"lora_target_parameters": None}  # the default
pytestmark = pytest.mark.filterwarnings(
    "ignore:PEFT does not adapt these linear modules",
    "ignore:.*_pattern keys",
    "ignore:.*is_gradient_checkpointing.*",
)


def shallow(kind: str) -> PreTrainedConfig:
    """A model of two layers, for what depth says nothing of."""
    return type(CONFIGS[kind]).from_dict(
        {**CONFIGS[kind].to_dict(), "num_hidden_layers": 2, "layer_types": None}
    )


class Made(TorchDispatchMode):
    """Notes the shapes of all that is made, but for views and for what is written into what was
    there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        there = {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self.shapes |= {
            tuple(one.shape) for one in tensors if one.untyped_storage()._cdata not in there
        }
        return made


def as_peft(model: torch.nn.Module) -> None:
    """Undo `multiply_unmerged`."""
    for part in model.modules():
        if isinstance(part, ParamWrapper):
            part.__class__ = ParamWrapper


def made_like_experts(model: LemaModel) -> set[tuple[int, ...]]:
    """Take a step; return the shapes of what it makes that are those of a stacked weight, either
    way round.
    """
    weights = {tuple(one.shape) for one in model.skeleton.parameters() if one.ndim == 3}
    assert weights
    draw_b(model.lora_manager)
    with Made() as made:
        model.adapter.loss(micro_batches()[:1]).backward()
    return made.shapes & (
        weights | {(experts, columns, rows) for experts, rows, columns in weights}
    )


@pytest.mark.covered(1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_pefts_but_for_the_order_of_additions(kind: str, tmp_path: Path) -> None:
    """With the default targets: what PEFT trains by `target_parameters` is among them. An odd
    rank, and recomputed.
    """
    found = compare(CONFIGS[kind], tmp_path, lora_rank=3, lora_use_rslora=True, **ADAPTED)
    experts = [name for name in found.gradients if ".experts." in name]
    sparse = 8 if kind != "qwen3_moe" else 7
    assert len(experts) == sparse * 2 * 2
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 5e-6 and not found.idle_layers
    assert max(found.gradients[name] for name in experts) > 0  # or PEFT's own way was taken


@pytest.mark.covered(1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_in_float64_nothing_is_left_of_the_difference(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PEFT's own model, in both ways, in each of the implementations of experts that
    `transformers` has.
    """
    # torch has no grouped product in float64
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float64)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=parameters)
    peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    draw_b(peft)
    ids = micro_batches()[0]["input_ids"]
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        found = []
        for way in (as_peft, multiply_unmerged):
            way(model)
            loss = peft(input_ids=ids, labels=ids).loss
            found.append([loss, *torch.autograd.grad(loss, [*trained(peft).values()])])
        assert all(difference(one, other) < 1e-12 for one, other in zip(*found, strict=True))
        assert any(difference(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_so_is_one_that_keeps_its_graph_with_ranks_that_differ(tmp_path: Path) -> None:
    patterns = {
        "lora_rank_pattern": {"experts.down_proj": 5},
        "lora_alpha_pattern": {r".*\.gate_up_proj": 3},
    }
    found = compare(
        CONFIGS["gpt_oss"], tmp_path, gradient_checkpointing=False, **patterns, **ADAPTED
    )
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 5e-6
    assert any(".experts." in name for name in found.gradients)


def test_nothing_as_large_as_the_experts_is_made(tmp_path: Path) -> None:
    directory = write_model(shallow("mixtral"), tmp_path)
    with opened(directory, **ADAPTED) as model:
        assert not made_like_experts(model)
    with opened(directory, **ADAPTED) as model:
        as_peft(model.skeleton)
        assert made_like_experts(model)


@pytest.mark.parametrize("adapted", [True, False])
def test_no_frozen_expert_gets_a_gradient_where_torch_has_no_grouped_product(
    adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = None
    directory = write_model(shallow("gpt_oss"), tmp_path)
    for grouped in (True, False):
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_, grouped=grouped: grouped)
        with opened(directory, **ADAPTED if adapted else {}) as model:
            assert not made_like_experts(model)
            gradients = {
                name: one.grad
                for name, one in model.lora_manager.named_parameters()
                if one.requires_grad
            }
        expected = expected or gradients
        assert any(".experts." in name for name in gradients) == adapted
        for name, one in gradients.items():
            torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-7)


def test_what_is_saved_is_pefts(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path / "base")
    ids = micro_batches()[0]["input_ids"]
    with opened(directory, **ADAPTED) as model:
        draw_b(model.lora_manager)
        said = streamed_logits(model, ids)
        with model.lora_manager.disable_adapter():
            bare = streamed_logits(model, ids)
        model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert torch.equal(bare, whole_logits(base, ids))
    whole = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert difference(said, whole_logits(whole, ids)) <= 1e-6
    assert not torch.allclose(said, bare, atol=1e-3)


def test_several_adapters_are_those_of_peft(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["mixtral"], tmp_path)
    ids = micro_batches()[0]["input_ids"]
    config = LoraConfig(
        r=3,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    config.task_type = "CAUSAL_LM"
    streamed = lema.streamed(directory, config, device="cpu")
    whole = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config)
    for model in (streamed, whole):
        draw_b(model.eval())
        model.add_adapter("second", config)
        model.set_adapter("second")
        draw_b(model)
    whole.load_state_dict(
        {name: one for name, one in streamed.state_dict().items() if "lora_" in name}, strict=False
    )
    found = []
    for active in ("second", "default", ["default", "second"]):
        for model in (streamed, whole):
            model.base_model.set_adapter(active)
        with torch.no_grad():
            found.append(streamed(input_ids=ids).logits)
            assert difference(found[-1], whole(input_ids=ids).logits) <= 2e-6
    assert not any(torch.equal(found[0], other) for other in found[1:])
    for model in (streamed, whole):
        model.delete_adapter("second")
        model.base_model.set_adapter("default")
    with torch.no_grad():
        assert torch.equal(streamed(input_ids=ids).logits, found[1])
    streamed.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_plan_looks_at_a_model_as_it_runs(compiled: bool, tmp_path: Path) -> None:
    """Compiled layers are PEFT's, though others would be; what a plan of the same settings draws
    up is as they are.
    """
    named = {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts.down_proj"]}
    with opened(
        write_model(shallow("mixtral"), tmp_path), torch_compile=compiled, **named
    ) as model:
        demand = model.opened.demand()
        drawn = draw_up(model.config)
        for one in (model.skeleton, drawn.model):
            kinds = {type(part) for part in one.modules() if isinstance(part, ParamWrapper)}
            assert kinds == {ParamWrapper if compiled else UnmergedWrapper}
        assert opened_planner(model.config, drawn, model.backend).demand().layers == demand.layers


@pytest.fixture(scope="module")
def factors() -> tuple[Tensor, LowRankSum]:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, 5)
    left = torch.randn(4, 6, 2)
    right = torch.randn(4, 2, 5)
    return weight + 3.0 * left @ right, LowRankSum(weight, left, right, 3.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: torch.bmm(torch.ones(4, 3, 6), weight),
        lambda weight: torch.ones(4, 3, 6) @ weight,
        lambda weight: torch.bmm(weight, torch.ones(4, 5, 3)),
        lambda weight: torch.nn.functional.linear(torch.ones(3, 5), weight[2], torch.ones(6)),
        lambda weight: torch.nn.functional.linear(torch.ones(3, 5), weight[2], bias=torch.ones(6)),
        lambda weight: torch.ones(3, 5) @ weight[1].transpose(0, 1),
        lambda weight: torch.ones(3, 5) @ weight[1].transpose(dim0=-1, dim1=0),
        lambda weight: torch.bmm(
            torch.ones(2, 3, 5), weight[torch.tensor([3, 0])].transpose(-1, -2)
        ),
    ],
)
def test_a_sum_multiplies_as_the_tensor_does_and_is_not_formed(
    use: Any, factors: tuple[Tensor, LowRankSum], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, apart = factors
    monkeypatch.delattr(LowRankSum, "formed")
    torch.testing.assert_close(use(apart), use(whole))


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.sum(0),
        lambda weight: weight.transpose(0, 1),
        lambda weight: torch.einsum("eoi->o", weight),
        lambda weight: torch.cat([weight, weight]),
        lambda weight: weight @ torch.ones(5),
        lambda weight: torch.matmul(weight, torch.ones(5)),
        lambda weight: torch.matmul(torch.ones(6), weight),
        lambda weight: torch.mm(torch.ones(3, 6), weight[0], out=torch.empty(3, 5)),
        lambda weight: torch.nn.functional.linear(weight[1], torch.ones(7, 5)),
        lambda weight: torch.nn.functional.linear(
            torch.ones(3, 5), weight=weight[1], bias=torch.ones(6)
        ),
        lambda weight: [one.sum() for one in weight],
    ],
)
def test_whatever_else_is_asked_of_it_is_answered_by_the_sum(
    use: Any, factors: tuple[Tensor, LowRankSum]
) -> None:
    whole, apart = factors
    torch.testing.assert_close(use(apart), use(whole))
    # another adapter, which takes the first away
    two = LowRankSum(apart, apart.left, apart.right, -3.0)
    torch.testing.assert_close(use(two), use(apart.weight))
