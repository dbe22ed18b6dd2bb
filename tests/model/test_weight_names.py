"""Every name on disk goes where `from_pretrained` sends it, and whatever does not fit is named,
all at once.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from lema.errors import ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.model.weight_names import checkpoint_dtype, grouped, map_names, match_names, target_dtypes
from lema.storage import GlobalBinaryIndex
from lema.storage.index import SINGLE_NAME
from lema.storage.slices import AssembledRecord


def llama(**changes: object) -> LlamaConfig:
    settings = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**(settings | heads | {"tie_word_embeddings": False} | changes))


def gpt2() -> GPT2Config:
    return GPT2Config(
        vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )


def mixtral() -> MixtralConfig:
    settings = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return MixtralConfig(
        **settings, num_attention_heads=2, num_key_value_heads=1, num_local_experts=3
    )


def saved(config: PreTrainedConfig, directory: Path, **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, **options)
    return model


def skeleton(directory: Path) -> PreTrainedModel:
    return meta_model(read_config(directory))


def stored_values(model: PreTrainedModel, index: GlobalBinaryIndex) -> dict[str, torch.Tensor]:
    files = {file: load_file(file) for file in index.files}
    return {
        name: files[record.file][record.name] for name, record in match_names(model, index).items()
    }


def edit(directory: Path, change: "dict[str, torch.Tensor | None]") -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    tensors = load_file(directory / SINGLE_NAME) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / SINGLE_NAME, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["2KB", "1GB"])
def test_every_tensor_is_matched_with_its_bytes(tmp_path: Path, tied: bool, shard: str) -> None:
    model = saved(llama(tie_word_embeddings=tied), tmp_path, max_shard_size=shard)
    index = GlobalBinaryIndex(tmp_path)
    bare = skeleton(tmp_path)
    assert (len(index.files) > 1) == (shard == "2KB")
    values = stored_values(bare, index)
    expected = model.state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())
    assert not map_names(bare, index).rearranged


def test_a_tie_is_filled_from_whichever_name_is_stored(tmp_path: Path) -> None:
    model = saved(llama(tie_word_embeddings=True), tmp_path)
    embedding = model.get_input_embeddings().weight.detach()
    edit(tmp_path, {"model.embed_tokens.weight": None, "lm_head.weight": embedding.clone()})
    names = map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))
    assert names.tied == {"model.embed_tokens.weight": "lm_head.weight"}


@pytest.mark.parametrize("stored_prefix", ["", "transformer."])
def test_the_base_model_prefix_may_be_absent(tmp_path: Path, stored_prefix: str) -> None:
    model = saved(gpt2(), tmp_path)
    plain = {
        name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / SINGLE_NAME).items()
    }
    save_file(
        {stored_prefix + name: value for name, value in plain.items()}, tmp_path / SINGLE_NAME
    )
    values = stored_values(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))
    expected = model.state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())


def test_a_base_model_saved_with_the_prefix_of_its_head_matches(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    head = load_file(tmp_path / SINGLE_NAME)["lm_head.weight"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path).model
    save_file(
        base.state_dict() | {"lm_head.weight": head},
        tmp_path / SINGLE_NAME,
        metadata={"format": "pt"},
    )
    assert "layers.0.mlp.up_proj.weight" in GlobalBinaryIndex(tmp_path)
    names = match_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))
    assert names["model.layers.0.mlp.up_proj.weight"].name == "layers.0.mlp.up_proj.weight"


def test_tensors_the_library_ignores_are_ignored_and_named(tmp_path: Path) -> None:
    saved(gpt2(), tmp_path)
    edit(tmp_path, {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)})
    names = map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))
    assert [record.name for record in names.ignored] == ["transformer.h.0.attn.bias"]


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    edit(
        tmp_path,
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)},
    )
    assert len(map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path)).ignored) == 2


def test_tensors_the_model_has_no_place_for_are_named_in_a_warning(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    extra = {
        f"model.layers.{2 + i}.mlp.{part}_proj.weight": torch.ones(2)
        for i in range(3)
        for part in ("up", "down")
    }
    edit(tmp_path, extra | {"vision.patch.weight": torch.ones(2)})
    index = GlobalBinaryIndex(tmp_path)
    bare = skeleton(tmp_path)
    assert {record.name for record in map_names(bare, index).unused} == {
        *extra,
        "vision.patch.weight",
    }
    with pytest.warns(UserWarning, match="7 tensors on disk are not used") as caught:
        names = match_names(bare, index)
    assert names.keys() == bare.state_dict().keys()
    assert str(caught[0].message).endswith(
        "model.layers.*.mlp.down_proj.weight (3), model.layers.*.mlp.up_proj.weight (3), "
        "vision.patch.weight"
    )
    assert caught[0].filename == __file__


def test_many_names_are_written_in_few() -> None:
    assert (
        grouped(["a.0.w1", "a.1.w1", "a.10.w1", "a.0.w2", "0", "b"]) == "a.*.w1 (3), a.*.w2, *, b"
    )
    assert grouped([f"{letter}.weight" for letter in "abcdefghijk"]).endswith(
        "h.weight and 3 more kinds"
    )


def test_a_missing_tensor_is_an_error_even_where_the_library_draws_it_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama(), tmp_path)
    edit(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["up_proj"])
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    with pytest.raises(
        WeightsError, match=r"1 missing:\n  - model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))


def test_missing_extra_and_misshapen_tensors_are_all_named_at_once(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    edit(
        tmp_path,
        {
            "model.layers.0.mlp.up_proj.weight": None,
            "model.norm.weight": None,
            "model.layers.7.mlp.up_proj.weight": torch.ones(12, 8),
            "vision.weight": torch.ones(2),
            "lm_head.weight": torch.ones(31, 8),
            "model.layers.1.mlp.down_proj.weight": torch.ones(12, 8),
        },
    )
    with pytest.raises(WeightsError, match="does not fit the model") as caught:
        match_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))
    for line in (
        "2 missing:\n  - model.layers.0.mlp.up_proj.weight\n  - model.norm.weight",
        (
            "2 not used:\n  - model.layers.7.mlp.up_proj.weight in model.safetensors\n  - "
            "vision.weight in"
        ),
        "2 of another shape:",
        "lm_head.weight: [32, 8] in the model, [31, 8] in model.safetensors as lm_head.weight",
        "model.layers.1.mlp.down_proj.weight: [8, 12] in the model, [12, 8] in",
    ):
        assert line in str(caught.value)


def test_two_stored_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    saved(gpt2(), tmp_path)
    edit(tmp_path, {"ln_f.weight": torch.ones(8)})
    with pytest.raises(
        WeightsError,
        match=r"transformer\.ln_f\.weight: as ln_f\.weight in .* and as transformer\.ln_f",
    ):
        map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))


def test_a_tensor_stored_both_fused_and_by_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama(), tmp_path)
    get_checkpoint_conversion_mapping("legacy")  # fills the table
    fused = WeightConverter(
        "mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]
    )
    monkeypatch.setitem(
        conversion_mapping._checkpoint_conversion_mapping_cache, "LlamaForCausalLM", [fused]
    )
    gate = load_file(tmp_path / SINGLE_NAME)["model.layers.0.mlp.gate_proj.weight"]
    edit(
        tmp_path,
        {
            "model.layers.0.mlp.gate_proj.weight": None,
            "model.layers.0.mlp.both.weight": gate.repeat(2, 1),
        },
    )
    with pytest.raises(
        WeightsError,
        match=r"twice .*\n.*layers\.0\.mlp\.up_proj\.weight: as .* and in 1 tensors in model",
    ):
        map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))


def test_experts_stored_one_by_one_are_assembled(tmp_path: Path) -> None:
    saved(mixtral(), tmp_path)
    index = GlobalBinaryIndex(tmp_path)
    bare = skeleton(tmp_path)
    assert map_names(bare, index).rearranged
    fused = {
        name: one
        for name, one in match_names(bare, index).items()
        if isinstance(one, AssembledRecord)
    }
    assert fused.keys() == {
        f"model.layers.{i}.mlp.experts.{part}"
        for i in range(2)
        for part in ("gate_up_proj", "down_proj")
    }
    assert set(map_names(bare, index).rearranged) == fused.keys()
    assert all(piece.move.is_contiguous for one in fused.values() for piece in one.pieces)
    gate_up = fused["model.layers.1.mlp.experts.gate_up_proj"]
    stored = "model.layers.1.block_sparse_moe.experts"
    assert gate_up.nbytes == sum(
        index[f"{stored}.{i}.{w}.weight"].nbytes for i in range(3) for w in ("w1", "w3")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w3.weight": None},
            r"gate_up_proj: cannot be made of 5 tensors .*\n?.*w3\.weight, number 2 is missing",
        ),
        (
            {"w2.weight": torch.ones(12, 8)},
            r"experts\.down_proj: cannot be made of 3 tensors in model\.safetensors",
        ),
    ],
)
def test_experts_that_do_not_fuse_are_named_before_any_is_read(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    saved(mixtral(), tmp_path)
    prefix = "model.layers.1.block_sparse_moe.experts.2."
    edit(tmp_path, {prefix + name: value for name, value in change.items()})
    with pytest.raises(WeightsError, match=message):
        map_names(skeleton(tmp_path), GlobalBinaryIndex(tmp_path))


def test_whole_numbers_are_no_weights_and_fractions_of_any_type_are(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bare = skeleton(tmp_path)
    name = "model.norm.weight"
    for dtype in (torch.int32, torch.bool):
        save_file({**tensors, name: tensors[name].to(dtype)}, file)
        with pytest.raises(WeightsError, match=f"of a type that the model cannot use:\n.*{name}"):
            map_names(bare, GlobalBinaryIndex(tmp_path))
    # floating types are cast, as from_pretrained does
    for dtype in (
        torch.float64,
        torch.bfloat16,
    ):
        save_file({**tensors, name: tensors[name].to(dtype)}, file)
        assert map_names(bare, GlobalBinaryIndex(tmp_path))
    half = {other: tensor.bfloat16() for other, tensor in tensors.items()}
    save_file({**half, name: tensors[name].half()}, file)
    assert map_names(bare, GlobalBinaryIndex(tmp_path))


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    bare = skeleton(tmp_path)
    bare.config.quantization_config = {"quant_method": "aqlm"}
    with pytest.raises(
        ModelError, match="quantised by the method 'aqlm', whose weights transformers cannot expand"
    ):
        map_names(bare, GlobalBinaryIndex(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_dtype_is_that_of_from_pretrained(tmp_path: Path, dtype: torch.dtype) -> None:
    AutoModelForCausalLM.from_config(llama(), dtype=dtype).save_pretrained(tmp_path)
    index = GlobalBinaryIndex(tmp_path)
    config = read_config(tmp_path)
    assert (
        checkpoint_dtype(config, index)
        == AutoModelForCausalLM.from_pretrained(tmp_path).dtype
        == dtype
    )
    config.dtype = None
    assert checkpoint_dtype(config, index) == dtype


def test_modules_the_library_keeps_wide_stay_wide() -> None:
    bare = meta_model(llama(), torch.bfloat16)
    assert set(target_dtypes(bare).values()) == {torch.bfloat16}
    bare._keep_in_fp32_modules_strict = {"input_layernorm"}
    wide = {name for name, dtype in target_dtypes(bare).items() if dtype == torch.float32}
    assert wide == {f"model.layers.{i}.input_layernorm.weight" for i in range(2)}
