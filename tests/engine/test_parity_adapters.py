"""PEFT's options of where and how LoRA is attached give, streamed, the bits they give on the whole
model; adapters of stacked experts give them but for the order of additions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from parity import (
    ALPHA,
    RANK,
    SEED,
    assert_same,
    draw_b,
    relative_difference,
    streamed_model,
    streamed_step,
    trained,
    whole_step,
)
from peft import LoraConfig, PeftModel, get_peft_model
from smallrun import streamed_logits, whole_logits
from tiny import Checkpoint, micro_batches
from transformers import AutoModelForCausalLM

from lema import LemaModel
from lema.config.peft import SETTING_OF
from lema.convert import merge_adapter
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]
Case = tuple[str, dict[str, Any]]

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

# What PEFT is told, beside rank and alpha; ours is told the same by the names of the settings.
CASES: dict[str, Case] = {
    "a regular expression must match whole names": (
        "llama",
        {"target_modules": r".*\.(q_proj|down_proj)"},
    ),
    "ends of names": (
        "llama",
        {"target_modules": ["self_attn.o_proj", "model.layers.3.mlp.up_proj"]},
    ),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "all-linear, transposed": ("gpt2", {"target_modules": "all-linear"}),
    "modules excluded": (
        "llama",
        {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "k_proj"]},
    ),
    "a regular expression must match whole names excluded": (
        "llama",
        {"target_modules": ATTENTION, "exclude_modules": r".*layers\.[2-5]\..*"},
    ),
    "ranks and alphas": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.[0-6]\.mlp\.up_proj": 6, "v_proj": 3},
            "alpha_pattern": {"v_proj": 5, "up_proj": 2.5},
        },
    ),
    "rsLoRA": (
        "llama",
        {"target_modules": ATTENTION, "use_rslora": True, "rank_pattern": {"v_proj": 3}},
    ),
    "one layer": ("llama", {"target_modules": ATTENTION, "layers_to_transform": 4}),
    "the lowest layer": (
        "gpt2",
        {"target_modules": ["c_attn"], "layers_to_transform": 0, "layers_pattern": "h"},
    ),
    "some layers": (
        "qwen3",
        {
            "target_modules": ["k_proj"],
            "layers_to_transform": [3, 11, 7],
            "layers_pattern": ["layers"],
        },
    ),
    "gaussian values": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "gaussian"}),
    "gaussian values, transposed": (
        "gpt2",
        {"target_modules": ["c_attn"], "init_lora_weights": "gaussian"},
    ),
    "orthogonal values": (
        "llama",
        {"target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
    ),
    "both drawn": ("llama", {"target_modules": ATTENTION, "init_lora_weights": False}),
    "a bias of B": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "lora_bias": True}),
    "a bias of B, drawn": (
        "gpt2",
        {"target_modules": ["c_proj"], "lora_bias": True, "init_lora_weights": False},
    ),
    "experts": ("mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "experts alone": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "experts of some ranks": (
        "mixtral",
        {
            "target_modules": ["o_proj"],
            "target_parameters": EXPERTS,
            "use_rslora": True,
            "init_lora_weights": "gaussian",
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {r".*\.gate_up_proj": 3},
        },
    ),
    "all-linear with the routers": ("mixtral", {"target_modules": "all-linear"}),
    "a router": ("mixtral", {"target_modules": ATTENTION, "target_parameters": ["gate.weight"]}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def by_peft(checkpoint: Checkpoint, options: dict[str, Any], **given: Any) -> PeftModel:
    base = aligned(AutoModelForCausalLM.from_pretrained(checkpoint.published, **given))
    torch.manual_seed(SEED)
    transposed = {"fan_in_fan_out": checkpoint.architecture.transposed}
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **transposed, **options)
    return get_peft_model(base, config).train()


def within(name: str, options: dict[str, Any]) -> float:
    """How far a step may be from PEFT's: stacked experts multiply apart from their adapters, and
    round otherwise.
    """
    experts = any("experts" in one for one in options.get("target_parameters") or ())
    experts |= name == "mixtral" and options["target_modules"] == "all-linear"
    return 5e-6 if experts else 0.0  # of a gradient by itself, eight layers deep


def as_settings(options: dict[str, Any]) -> dict[str, Any]:
    return {SETTING_OF[option]: value for option, value in options.items()}


pytestmark = pytest.mark.filterwarnings(
    # PEFT's, of those that match a parameter
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",
)


@pytest.mark.slow
def test_a_step_is_that_of_the_whole_model(checkpoint_of: CheckpointOf, case: Case) -> None:
    name, options = case
    checkpoint = checkpoint_of(name)
    batches = micro_batches(2, padding=True)
    whole = by_peft(checkpoint, options)
    first = {key: parameter.clone() for key, parameter in trained(whole).items()}
    draw_b(whole)
    for recompute in (True, False):
        with streamed_model(
            checkpoint, gradient_checkpointing=recompute, **as_settings(options)
        ) as model:
            drawn = trained(model.lora_manager)
            assert [*drawn] == [*first]
            assert all(torch.equal(drawn[key], first[key]) for key in first)
            draw_b(model.lora_manager)
            assert_same(
                streamed_step(model, batches), whole_step(whole, batches), within(name, options)
            )


@pytest.mark.slow
@pytest.mark.parametrize("key", ["all-linear, transposed", "ranks and alphas", "a router"])
def test_so_is_a_step_over_half_precision_weights(checkpoint_of: CheckpointOf, key: str) -> None:
    """Experts are not among them, because products with their adapters are not bitwise PEFT's in
    any type.
    """
    name, options = CASES[key]
    checkpoint = checkpoint_of(name, dtype="bfloat16")
    batches = micro_batches(2, padding=True)
    whole = by_peft(checkpoint, options, dtype=torch.bfloat16)
    with streamed_model(checkpoint, **as_settings(options)) as model:
        drawn = trained(model.lora_manager)
        expected = trained(whole)
        assert all(torch.equal(drawn[one], expected[one]) for one in expected)
        draw_b(model.lora_manager)
        draw_b(whole)
        assert_same(
            streamed_step(model, batches), whole_step(whole, batches, autocast=torch.bfloat16)
        )


@pytest.mark.slow
def test_files_say_the_same_to_peft_and_to_us(
    checkpoint_of: CheckpointOf, case: Case, tmp_path: Path
) -> None:
    name, options = case
    checkpoint = checkpoint_of(name)
    ids = micro_batches(1)[0]["input_ids"]
    with streamed_model(checkpoint, **as_settings(options)) as model:
        disturb(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
        values = {key: parameter.clone() for key, parameter in trained(model.lora_manager).items()}
        said = streamed_logits(model, ids)
    whole = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint.published), tmp_path / "adapter"
    )
    assert relative_difference(said, whole_logits(whole, ids)) <= within(name, options)

    again = LemaModel.from_pretrained(tmp_path / "adapter", backend=CpuBackend(poison=True))
    found = trained(again.lora_manager)
    assert [*found] == [*values]
    assert all(torch.equal(found[key], values[key]) for key in values)
    assert torch.equal(streamed_logits(again, ids), said)
    again.save_pretrained(tmp_path / "again")
    assert adapter_config(tmp_path / "again") == adapter_config(tmp_path / "adapter")
    again.close()

    merged = AutoModelForCausalLM.from_pretrained(
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    ).state_dict()
    expected = whole.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(merged[key], expected[key])] == []


def disturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def adapter_config(directory: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in read.items()}
