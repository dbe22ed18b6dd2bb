"""Every form models are published in is read: each kind of operation `transformers` has, and
layouts of the past.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from roundtrip import assert_same, from_pretrained, published, roundtrip
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from torch import Tensor
from transformers import (
    AutoConfig,
    BertConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    Inkling2LoopDequantizeExperts,
    Interleave,
    LayerPairCollapse,
    PermuteForRope,
    PrefixChange,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from lema.convert.prepare import prepare, prepare_monolithic_safetensors
from lema.errors import WeightsError
from lema.storage import GlobalBinaryIndex
from lema.storage.index import SINGLE_NAME

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        **(SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": False} | changes)
    )


def mixtral() -> MixtralConfig:
    return MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=5, tie_word_embeddings=False
    )


GATE_UP = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
QKV = [f"self_attn.{name}_proj.weight" for name in "qkv"]

# What is published -> what is in memory; one of each kind that transformers' table has, on a model
# that all can build.
TRANSFORMS: dict[str, tuple[WeightTransform, str]] = {
    "Concatenate": (
        WeightConverter(
            ["embed_tokens.first.weight", "embed_tokens.second.weight"],
            "embed_tokens.weight",
            [Concatenate()],
        ),
        "model.embed_tokens.second.weight",
    ),
    "Chunk": (
        WeightConverter("mlp.both.weight", GATE_UP, [Chunk(dim=0)]),
        "model.layers.2.mlp.both.weight",
    ),
    "Split": (
        WeightConverter("qkv_proj.weight", QKV, [Split(dim=0)]),
        "model.layers.2.qkv_proj.weight",
    ),
    "Interleave": (
        WeightConverter("mlp.w13.weight", GATE_UP, [Interleave(dim=0), Chunk(dim=0)]),
        "model.layers.0.mlp.w13.weight",
    ),
    "Transpose": (
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        "model.layers.0.mlp.down.weight",
    ),
    "PermuteForRope": (
        WeightConverter("attention.wq.weight", "self_attn.q_proj.weight", [PermuteForRope()]),
        "model.layers.1.attention.wq.weight",
    ),
    "Chunk and PermuteForRope": (
        WeightConverter(
            "in_proj.weight",
            QKV,
            [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
        ),
        "model.layers.1.in_proj.weight",
    ),
    "ErnieFuseAndSplitTextVisionExperts": (
        WeightConverter(
            ["mlp.rows.*.left", "mlp.rows.*.right"], GATE_UP, [ErnieFuseAndSplitTextVisionExperts()]
        ),
        "model.layers.2.mlp.rows.47.right",
    ),
    "WeightRenaming": (WeightRenaming("ln_1", "input_layernorm"), "model.layers.0.ln_1.weight"),
    "GroupWeightRename": (
        GroupWeightRename(
            [r"layers.(\d+).norm0", r"layers.(\d+).norm1"],
            [r"layers.\1.input_layernorm", r"layers.\1.post_attention_layernorm"],
        ),
        "model.layers.2.norm1.weight",
    ),
    "Inkling2IndexOffsetWeightRename": (
        Inkling2IndexOffsetWeightRename(
            r"norms.(\d+).weight", r"layers.\1.input_layernorm.weight", offset=-1
        ),
        "model.norms.3.weight",
    ),
}
# What these give is a range of a stored tensor each, which is read like any tensor.
RANGES = {"Chunk", "Split"}
# Of these a model of the kind that needs them is published below.
ELSEWHERE = {
    "Inkling2LoopDequantizeExperts",
    "Inkling2LoopMergeMessageQueries",
    "Inkling2UnpadVocab",
    "LayerPairCollapse",
    "MergeModulelist",
    "PrefixChange",
}


@pytest.fixture
def published_as(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tell transformers how the models below are published."""

    def tell(transform: WeightTransform, model: str = "LlamaForCausalLM") -> None:
        get_checkpoint_conversion_mapping("legacy")  # fills the table
        monkeypatch.setitem(
            conversion_mapping._checkpoint_conversion_mapping_cache, model, [transform]
        )

    return tell


@pytest.mark.sampled(11)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_each_kind_of_operation_is_done_as_by_from_pretrained(
    tmp_path: Path, published_as: Callable[..., None], kind: str, dtype: torch.dtype
) -> None:
    transform, stored_name = TRANSFORMS[kind]
    published_as(transform)
    done = roundtrip(llama(num_key_value_heads=4 if "Chunk and" in kind else 2), tmp_path, dtype)
    index = GlobalBinaryIndex(done.published)
    assert stored_name in index and set(index) != set(done.expected)
    operations = transform.operations if isinstance(transform, WeightConverter) else []
    assert done.operations == {type(operation).__name__ for operation in operations}
    assert bool(done.prepared.notes()) == bool(done.operations - RANGES)


def test_the_table_of_transformers_has_no_kind_that_is_not_tried_here() -> None:
    get_checkpoint_conversion_mapping("legacy")
    known = set(TRANSFORMS) | ELSEWHERE
    for transforms in conversion_mapping._checkpoint_conversion_mapping_cache.values():
        for transform in transforms:
            steps = transform.operations if isinstance(transform, WeightConverter) else [transform]
            assert {type(step).__name__ for step in steps} <= known


@pytest.mark.parametrize("turned", [(), (1,), (0, 1, 2)])
def test_a_tensor_is_turned_over_only_where_its_shape_says_so(
    tmp_path: Path, published_as: Callable[..., None], turned: tuple[int, ...]
) -> None:
    published_as(
        WeightConverter("down_proj.weight", "down_proj.weight", [Transpose(0, 1, check_dims=True)])
    )
    source = published(llama(), tmp_path / "model")
    names = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in turned}
    edit(
        source,
        lambda tensors: {
            name: t.t().contiguous() if name in names else t for name, t in tensors.items()
        },
    )
    assert_prepared_as_loaded(source, tmp_path / "out")


def edit(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / SINGLE_NAME
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def renamed(pattern: str, replacement: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {
        re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()
    }


def assert_prepared_as_loaded(source: Path, out: Path) -> None:
    expected = from_pretrained(source).state_dict()
    assert_same(load_file(prepare(source, out.with_suffix(".safetensors")).weights), expected)
    assert_same(from_pretrained(prepare(source, out).path).state_dict(), expected)


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    done = roundtrip(mixtral(), tmp_path)
    assert done.operations == {"MergeModulelist", "Concatenate"}
    assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in GlobalBinaryIndex(
        done.published
    )
    assert done.prepared.notes() == [
        (
            "6 tensors rearranged: model.layers.*.mlp.experts.gate_up_proj (3), "
            "model.layers.*.mlp.experts.down_proj (3)"
        )
    ]


def test_a_prefix_of_the_whole_of_which_the_model_is_a_part(
    tmp_path: Path, published_as: Callable[..., None]
) -> None:
    published_as(PrefixChange(prefix_to_remove="language_model", model_prefix="model"))
    source = published(llama(), tmp_path / "model")
    edit(source, renamed(r"^model\.", "model.language_model."))
    assert "model.language_model.norm.weight" in GlobalBinaryIndex(source)
    assert_prepared_as_loaded(source, tmp_path / "out")


def in_pairs(name: str) -> str:
    """Name a tensor as checkpoints do that count attention and MLP of a layer as two layers."""
    name = re.sub(
        r"layers\.(\d+)\.self_attn", lambda found: f"layers.{2 * int(found[1])}.mixer", name
    )
    return re.sub(
        r"layers\.(\d+)\.mlp", lambda found: f"layers.{2 * int(found[1]) + 1}.mixer", name
    )


def test_layers_stored_as_a_pair_of_layers_each(
    tmp_path: Path, published_as: Callable[..., None]
) -> None:
    published_as(LayerPairCollapse())
    source = published(llama(), tmp_path / "model")
    edit(source, lambda tensors: {in_pairs(name): tensor for name, tensor in tensors.items()})
    assert "model.layers.5.mixer.up_proj.weight" in GlobalBinaryIndex(source)
    assert_prepared_as_loaded(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "operation"),
    [
        ("inkling2_text", "Inkling2UnpadVocab"),
        ("inkling2_loop_text", "Inkling2LoopMergeMessageQueries"),
    ],
)
def test_conversions_that_one_type_of_model_has(
    tmp_path: Path, model_type: str, operation: str
) -> None:
    assert operation in roundtrip(tiny_config(model_type), tmp_path).operations


@pytest.mark.parametrize("form", ["MXFP8", "NVFP4"])
def test_quantised_experts_that_the_table_dequantises(
    tmp_path: Path, published_as: Callable[..., None], form: str
) -> None:
    parts = [
        f"mlp.experts.w2_weight{part}"
        for part in ("", "_scale", "_amax", "_outer_scale_denominator")
    ]
    given = WeightConverter(parts, "mlp.experts.down_proj", [Inkling2LoopDequantizeExperts()])
    published_as(given, "mixtral")
    config = MixtralConfig(
        **SIZES | {"intermediate_size": 64}, num_key_value_heads=2, num_local_experts=5
    )
    source = published(config, tmp_path / "model", torch.bfloat16)
    made = torch.Generator().manual_seed(0)

    def quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(parts[0]):
            return {name: weight}
        experts, rows, columns = weight.shape
        if form == "MXFP8":
            scale = torch.randint(
                120, 130, (experts, rows, columns // 32), generator=made, dtype=torch.uint8
            )
            return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale": scale}
        codes = torch.randint(
            0, 256, (experts, rows, columns // 2), generator=made, dtype=torch.uint8
        )
        scale = torch.rand(experts, rows, columns // 16, generator=made).to(torch.float8_e4m3fn)
        amax = torch.rand(experts, generator=made)
        denominator = torch.tensor(2688.0)
        more = {
            "_scale": scale,
            "_amax": amax,
            "_outer_scale_denominator": denominator.expand(experts).contiguous(),
        }
        return {name: codes, **{name + part: tensor for part, tensor in more.items()}}

    edit(
        source,
        lambda tensors: {
            k: v for name, one in tensors.items() for k, v in quantized(name, one).items()
        },
    )
    assert f"model.layers.2.{parts[0]}_scale" in GlobalBinaryIndex(source)
    assert_prepared_as_loaded(source, tmp_path / "out")


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "gptj", "opt", "llama", "gpt_neox", "mpt"])
def test_a_base_model_saved_without_the_prefix_it_has_in_the_whole(
    tmp_path: Path, model_type: str
) -> None:
    sizes = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
    }
    more = {
        "vocab_size": 48,
        "tie_word_embeddings": True,
        "rotary_dim": 4,
        "ffn_dim": 24,
        "word_embed_proj_dim": 16,
    }
    source = published(AutoConfig.for_model(model_type, **sizes, **more), tmp_path / "model")
    prefix = from_pretrained(source).base_model_prefix
    edit(source, renamed(rf"^{prefix}\.", ""))
    assert not any(name.startswith(f"{prefix}.") for name in GlobalBinaryIndex(source))
    assert_prepared_as_loaded(source, tmp_path / "out")


def test_norms_named_as_they_were_in_the_first_models(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, is_decoder=True, max_position_embeddings=32)
    source = published(config, tmp_path / "model")
    edit(source, renamed(r"LayerNorm\.weight$", "LayerNorm.gamma"))
    edit(source, renamed(r"LayerNorm\.bias$", "LayerNorm.beta"))
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in GlobalBinaryIndex(source)
    assert_prepared_as_loaded(source, tmp_path / "out")


def with_extra_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As models with a layer that predicts several tokens are published: one layer more than the
    model has.
    """
    last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    return tensors | {
        name.replace(".layers.2.", ".layers.3."): tensor + 1 for name, tensor in last.items()
    }


@pytest.mark.parametrize("config", [llama, mixtral])
def test_a_layer_more_than_the_model_has_is_left_out_of_one_file_and_named(
    tmp_path: Path, config: Callable[[], PreTrainedConfig]
) -> None:
    source = published(config(), tmp_path / "model")
    edit(source, with_extra_layer)
    prepared = prepare(source, tmp_path / "one.safetensors")
    assert_same(load_file(prepared.weights), from_pretrained(source).state_dict())
    (note,) = [
        note
        for note in prepared.notes()
        if "left out, because the model does not have them" in note
    ]
    extra = [name for name in GlobalBinaryIndex(source) if ".layers.3." in name]
    assert (
        note.startswith(f"{len(extra)} tensors left out")
        and "model.layers.*.input_layernorm.weight" in note
    )
    with pytest.warns(UserWarning, match=f"{len(extra)} tensors on disk are not used") as caught:
        prepare_monolithic_safetensors(source, tmp_path / "again.safetensors")
    assert caught[0].filename == __file__


def test_a_layer_that_transformers_knows_of_is_left_out_of_one_file_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = published(mixtral(), tmp_path / "model")
    edit(source, with_extra_layer)
    monkeypatch.setattr(
        MixtralForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"]
    )
    prepare(source, tmp_path / "out.safetensors")
    prepared = prepare(source, tmp_path / "again.safetensors")
    assert_same(load_file(prepared.weights), from_pretrained(source).state_dict())
    assert [note.split(":")[0] for note in prepared.notes()] == [
        "6 tensors rearranged",
        "22 tensors left out, because transformers does not load them into this type",
    ]


def test_a_layer_that_transformers_knows_of_stays_in_a_directory_and_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = published(mixtral(), tmp_path / "model")
    original = shapes_of(source)
    edit(source, with_extra_layer)
    dropped = prepare(source, tmp_path / "dropped")
    assert shapes_of(dropped.path) == original
    assert [note.split(":")[0] for note in dropped.notes()] == [
        "22 tensors left out, because no class reads them"
    ]
    monkeypatch.setattr(
        MixtralForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"]
    )
    assert shapes_of(prepare(source, tmp_path / "out").path) == shapes_of(source) != original


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: record.shape for name, record in GlobalBinaryIndex(directory).items()}


def test_a_base_model_without_its_head_is_refused(tmp_path: Path) -> None:
    source = published(llama(), tmp_path / "model")
    edit(
        source, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    )
    with pytest.raises(WeightsError, match=r"1 missing:\n  - lm_head\.weight"):
        prepare(source, tmp_path / "out")
