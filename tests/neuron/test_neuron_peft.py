"""Adapters over parallel layers: what is refused by its name, what is taken from meta, what a
plan must cover.
"""

from typing import Any

import pytest
import torch
from neurondoubles import GQAQKVColumnParallelLinear as Foreign
from neurondoubles import RecordedXm
from neuronmodels import CONFIGS, batch, model_case, whole_model
from peft import IA3Config, LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from lema.errors import ConfigError, DataError, ModelError
from lema_neuron.comm import Solo, XlaComm
from lema_neuron.gradients import mark, part_of, reduce_gradients
from lema_neuron.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from lema_neuron.parallelize import parallelize
from lema_neuron.peft import NeuronLoraLayer, ParallelLinear, get_peft_model
from lema_neuron.peft.lora import NEURON_LORA_MODULES

FOUR = [[0, 1, 2, 3]]


def one_of_four(rank: int = 0) -> XlaComm:
    """A rank whose collectives are not carried out; for what is decided before any."""
    return XlaComm(FOUR, RecordedXm(), rank)


def column(**given: Any) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        8, 16, gather_output=False, tensor_model_parallel_group=Solo(), **given
    )


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("alora_invocation_tokens", {"alora_invocation_tokens": [1]}),
        ("target_parameters", {"target_parameters": ["q_proj.weight"]}),
        ("layer_replication", {"layer_replication": [(0, 2)]}),
        ("trainable_token_indices", {"trainable_token_indices": [1]}),
        *(
            ("init_lora_weights", {"init_lora_weights": how})
            for how in ("pissa", "pissa_niter_4", "olora", "corda")
        ),
        *(
            ("init_lora_weights", {"init_lora_weights": how})
            for how in ("eva", "loftq", "orthogonal", "mica")
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_what_is_not_exact_is_refused_by_its_name(name: str, given: dict[str, Any]) -> None:
    # whose own settings PEFT asks for first
    if given.get("init_lora_weights") in (
        "eva",
        "loftq",
        "corda",
    ):
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        config.init_lora_weights = given["init_lora_weights"]
    else:
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
    model = nn.ModuleDict({"q_proj": column()})
    with pytest.raises(ConfigError, match=name) as raised:
        get_peft_model(model, config)
    assert raised.value.where == name
    with pytest.raises(ConfigError, match=name):
        ParallelLinear(column(), "default", r=2, config=config)
    assert not isinstance(model["q_proj"], NeuronLoraLayer)


def test_magnitudes_are_refused_where_they_do_not_lie_as_the_outputs_do() -> None:
    config = LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    comm = one_of_four()
    gathered = ColumnParallelLinear(8, 16, gather_output=True, tensor_model_parallel_group=comm)
    refused: list[tuple[Any, Any, str]] = [
        (ParallelLinear, gathered, "every rank gets whole"),
        (
            NEURON_LORA_MODULES["embedding"],
            ParallelEmbedding(32, 8, tensor_model_parallel_group=comm),
            "embeddings",
        ),
        (
            NEURON_LORA_MODULES["grouped"],
            GQAQKVColumnParallelLinear(8, [16, 8], tensor_model_parallel_group=comm),
            "q",
        ),
    ]
    for adapted, layer, why in refused:
        with pytest.raises(ConfigError, match=why) as raised:
            adapted(layer, "default", r=2, config=config)
        assert raised.value.where == "use_dora"


def test_other_adapters_mixed_batches_and_inexact_sums_of_adapters_are_refused() -> None:
    model = whole_model("llama", 2, layers=1)
    parallelize(model, Solo())
    with pytest.raises(ConfigError, match="IA3Config"):
        get_peft_model(
            model,
            IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        )
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="mixed"):
        get_peft_model(model, config, mixed=True)
    over: Any = get_peft_model(model, config)
    with pytest.raises(ConfigError, match="several adapters"):
        over.base_model.model.model.layers[0].self_attn.q_proj(
            torch.ones(1, 2, 32), adapter_names=["default"]
        )
    with pytest.raises(ConfigError, match="'svd' is not exact"):
        over.add_weighted_adapter(["default"], [1.0], "sum")
    over.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    over.add_weighted_adapter(["default", "other"], [1.0, 1.0], "sum", "cat")
    assert over.base_model.model.model.layers[0].self_attn.q_proj.lora_A["sum"].weight.shape[0] == 4
    with pytest.raises(ConfigError, match="no parameter nowhere"):
        over.load_adapter_state({"nowhere": torch.ones(1)})


@pytest.mark.parametrize(
    ("targets", "where"),
    [
        ("all-linear", "target_modules: model.layers.0.mlp.experts"),
        (["q_proj", "w1", "w3"], "target_parameters"),
    ],
    ids=["all", "by-old-names"],  # which PEFT turns into target_parameters
)
def test_adapters_of_experts_are_refused(targets: Any, where: str) -> None:
    model = whole_model("mixtral", 4, layers=1)
    parallelize(model, Solo())
    with pytest.raises(ConfigError, match="adapt") as raised:
        get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    assert raised.value.where == where


def test_what_layers_do_not_take_is_refused() -> None:
    comm = one_of_four()
    for make, named in (
        (lambda: column(pad=True), "pad"),
        (lambda: column(keep_master_weight=True), "keep_master_weight"),
        (lambda: column(rank_ordering=[0]), "rank_ordering"),
        (lambda: ColumnParallelLinear(8, 16, sequence_parallel_enabled=True), "gather_output"),
        (lambda: ColumnParallelLinear(8, 18, tensor_model_parallel_group=comm), "18"),
        (
            lambda: RowParallelLinear(8, 16, reduce_output=False, sequence_parallel_enabled=True),
            "reduced",
        ),
        (lambda: ParallelEmbedding(30, 8, tensor_model_parallel_group=comm), "30 ids"),
        (lambda: ParallelEmbedding(32, 8, max_norm=2.0), "max_norm"),
        (lambda: GQAQKVColumnParallelLinear(8, [16, 8], fuse_qkv=True), "fuse_qkv"),
        (
            lambda: GQAQKVColumnParallelLinear(
                8, [16, 8], kv_size_multiplier=3, tensor_model_parallel_group=comm
            ),
            "3",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            make()


def test_layers_draw_their_weights_whole() -> None:
    layer = RowParallelLinear(
        16, 8, input_is_parallel=True, tensor_model_parallel_group=one_of_four(2)
    )
    assert layer.weight.shape == (8, 4)
    torch.manual_seed(3)
    shards = []
    for rank in range(4):
        torch.manual_seed(3)
        shards.append(
            ColumnParallelLinear(8, 16, tensor_model_parallel_group=one_of_four(rank)).weight
        )
    torch.manual_seed(3)
    # drawn whole, and as nn.Linear draws it
    assert torch.equal(torch.cat(shards), nn.Linear(8, 16).weight)


def test_a_foreign_layer_with_copies_must_say_where_they_lie() -> None:
    weights = [torch.ones(16, 8), torch.ones(8, 8), torch.ones(8, 8)]
    layer: Any = Foreign(weights, one_of_four(), copies=2)
    with pytest.raises(ModelError, match="which ranks hold copies"):
        get_peft_model(
            nn.ModuleDict({"qkv_proj": layer}), LoraConfig(r=2, target_modules=["qkv_proj"]), seed=1
        )
    with pytest.raises(ModelError, match="Conv1d"):
        ParallelLinear(nn.Conv1d(2, 2, 1), "default", r=2)


def test_a_plan_must_cover_every_linear() -> None:
    with pytest.raises(ModelError, match="no tensor-parallel plan"):
        config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
        parallelize(AutoModelForCausalLM.from_config(config), one_of_four())
    model = whole_model("llama", 2, layers=1)
    model.model.layers[0].mlp.extra = nn.Linear(32, 32)
    with pytest.raises(ModelError, match="does not cover") as raised:
        parallelize(model, one_of_four())
    assert raised.value.where == "model.layers.0.mlp.extra"
    model = whole_model("llama", 2, layers=1)
    model.config.base_model_tp_plan = {
        **model.config.base_model_tp_plan,
        "layers.*.mlp.up_proj": "sideways",
    }
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(ModelError, match="sideways"):
        parallelize(model, one_of_four())
    with pytest.raises(ConfigError, match="among 3 ranks"):
        parallelize(whole_model("llama", 2, layers=1), XlaComm([[0, 1, 2]], RecordedXm(), 0))


def test_a_model_on_meta_gets_this_ranks_shapes_and_heads() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIGS["qwen3"](num_key_value_heads=2, num_hidden_layers=1)
        )
    parallelize(model, one_of_four(), sequence_parallel=True)
    layer = model.model.layers[0]
    shapes = {name: tuple(one.shape) for name, one in layer.named_parameters() if "proj" in name}
    assert shapes == {
        "self_attn.q_proj.weight": (16, 32),
        "self_attn.k_proj.weight": (8, 32),  # one of two heads, on two ranks
        "self_attn.v_proj.weight": (8, 32),
        "self_attn.o_proj.weight": (32, 16),
        "mlp.gate_proj.weight": (24, 32),
        "mlp.up_proj.weight": (24, 32),
        "mlp.down_proj.weight": (32, 24),
    }
    assert layer.self_attn.num_key_value_groups == 2
    assert all(one.is_meta for one in layer.parameters())
    over = get_peft_model(
        model,
        LoraConfig(r=3, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"),
        low_cpu_mem_usage=True,
    )
    assert all(one.is_meta for name, one in over.named_parameters() if "lora" in name)
    found = {
        name.split("self_attn.")[1]: part_of(one)
        for name, one in over.named_parameters()
        if "lora" in name
    }
    assert {name: (part.tp_grad, part.layout is None) for name, part in found.items()} == {
        "q_proj.lora_A.default.weight": ("sum", True),
        "q_proj.lora_B.default.weight": ("none", False),
        "k_proj.lora_A.default.weight": ("sum", True),
        # over the two ranks that hold the same head
        "k_proj.lora_B.default.weight": (
            "sum",
            False,
        ),
    }


def test_a_gradient_that_nobody_spoke_of_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ModelError, match="does not say how it lies"):
        reduce_gradients([parameter])
    model = whole_model("qwen3", 2, layers=1)
    parallelize(model, Solo())
    mark(model.requires_grad_(False), Solo())
    attention = model.model.layers[0].self_attn
    attention.late = nn.LayerNorm(4)  # inside a block that lies over ranks, and trains
    with pytest.raises(ModelError, match="cannot train inside") as raised:
        mark(model, Solo())
    assert "self_attn.late" in raised.value.where


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    model = whole_model("llama", 2, layers=1)
    parallelize(model, one_of_four(), sequence_parallel=True)
    with pytest.raises(DataError, match="10 positions cannot be cut into 4"):
        model(**{name: one[:, :10] for name, one in batch().items()})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens", "sequence"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_one_rank_computes_bit_for_bit_what_peft_computes(name: str, sequence: bool) -> None:
    measured = model_case(Solo(), name, 2, sequence)
    assert {what for what, far in measured.items() if far} <= {"norm", "clipped"}
    assert len(measured) > 2 * 7 * 8


@pytest.mark.parametrize("rslora", [False, True])
def test_scaling_is_pefts(rslora: bool) -> None:
    layer = ParallelLinear(column(), "default", r=4, lora_alpha=6, use_rslora=rslora)
    assert layer.scaling["default"] == 6 / (2 if rslora else 4)
    other = ParallelLinear(column(), "default", r=4, init_lora_weights="gaussian")
    assert not other.lora_B["default"].weight.any()  # type: ignore[union-attr, operator]
