"""GPTQ and AWQ checkpoints train as published: bitwise PEFT on the weights that a slow reader of
the packing finds.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packedforms import AWQ, FORMS, GPTQ, PackedForm, expanded, packed, write_packed
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from peft import PeftModel
from publishedforms import write_published
from safetensors.torch import load_file, save_file
from tiny import micro_batches, write_checkpoint
from tinyconfig import tiny_config
from transformers import AutoModelForCausalLM

from lema.convert import merge_adapter
from lema.convert.prepare import prepare
from lema.convert.tensors import read_tensor
from lema.errors import ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.model.quantizers import awq, gptq
from lema.model.weight_names import NameMap, map_names
from lema.storage import GlobalBinaryIndex

FILE = "model.safetensors"


def names_of(directory: Path) -> NameMap:
    return map_names(
        meta_model(read_config(directory), torch.float32), GlobalBinaryIndex(directory)
    )


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_a_slow_reader_finds(form: str, tmp_path: Path) -> None:
    checkpoint = write_packed(FORMS[form], tmp_path, num_hidden_layers=1)
    names = names_of(checkpoint.streamed)
    whole = load_file(checkpoint.published / FILE)
    assert len(names.quantized) == 7
    assert not names.unused
    for name, weight in whole.items():
        found = read_tensor(names.stored[name], torch.float32)
        assert torch.equal(found, weight), name
        # the bytes of codes, with their scales, are what is stored in a slot
        if name in names.quantized:
            assert names.stored[name].nbytes < weight.numel() * (FORMS[form].bits / 8 + 0.3)


@pytest.mark.parametrize(
    "form", [GPTQ, replace(GPTQ, bits=8), AWQ], ids=["gptq", "gptq, 8 bits", "awq"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_last_group_may_have_fewer_inputs(form: PackedForm, dtype: torch.dtype) -> None:
    form = replace(form, group_size=64, numbered=False)
    parts = {
        name.rpartition(".")[2]: one
        for name, one in packed("weight", torch.randn(64, 128), form).items()
    }
    expand = {"gptq": gptq.GPTQ, "awq": awq.AWQ}[form.method].expand
    settings = SimpleNamespace(group_size=64, desc_act=False, format="gptq")
    fewer = 96 if form.method == "awq" else 96 * form.bits // 32
    whole = expand(parts, settings, dtype)
    assert torch.equal(
        expand({**parts, "qweight": parts["qweight"][:fewer]}, settings, dtype), whole[:, :96]
    )


@pytest.mark.parametrize(
    "form", ["gptq, groups of 32, desc_act", "gptq, groups of 128", "awq, groups of 128"]
)
def test_a_step_is_that_of_the_whole_model(form: str, tmp_path: Path) -> None:
    checkpoint = write_packed(FORMS[form], tmp_path, intermediate_size=128)
    whole = whole_model(checkpoint)
    batches = micro_batches(3, padding=True)
    draw_b(whole)
    with streamed_model(checkpoint, dtype="float32") as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.parametrize("form", ["gptq, groups of 32, desc_act", "awq, groups of 32"])
def test_it_is_prepared_as_what_it_expands_to(form: str, tmp_path: Path) -> None:
    checkpoint = write_packed(FORMS[form], tmp_path, num_hidden_layers=2)
    out = prepare(checkpoint.streamed, tmp_path / "out").path
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    written = load_file(out / "model.safetensors")
    whole = load_file(checkpoint.published / FILE)
    assert written.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(written[name], weight.to(written[name].dtype)), name


def test_a_zero_point_of_zero_is_counted_over_whole_words(tmp_path: Path) -> None:
    """GPTQModel subtracts one from each code of a word of zero points at once, and so borrows
    from the next.
    """
    checkpoint = write_packed(replace(GPTQ, less_one=False), tmp_path, num_hidden_layers=1)
    stored = load_file(checkpoint.streamed / FILE)
    whole = load_file(checkpoint.published / FILE)
    name = "model.layers.0.mlp.up_proj"
    words = stored[f"{name}.qzeros"]
    words[0, 0] = 0x70003210  # the codes of eight outputs, the lowest bits first; four are zero
    form = replace(GPTQ, less_one=False)
    whole |= {
        one: weight.float()
        for one, weight in expanded(stored, form).items()
        if one.startswith(name)
    }
    for other in [one for one in stored if one.endswith("qzeros")]:
        stored[other] -= 0x11111111
    save_file(stored, checkpoint.streamed / FILE, {"format": "pt"})
    edit_settings(checkpoint.streamed, checkpoint_format="gptq")
    records = names_of(checkpoint.streamed).stored
    for one in ("up_proj", "down_proj"):
        weight = f"model.layers.0.mlp.{one}.weight"
        assert torch.equal(read_tensor(records[weight], torch.float32), whole[weight])


def edit_settings(directory: Path, **changes: Any) -> None:
    """Change what a config says of how weights are quantised."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("form", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_experts_that_are_stored_one_by_one_are_expanded_and_merged(
    form: PackedForm, tmp_path: Path
) -> None:
    form = replace(form, group_size=32, desc_act=form.method == "gptq")
    published = write_published(tiny_config("qwen3_moe"), "bf16", tmp_path / "published")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(published / FILE).items():
        stored |= packed(name, weight, form) if name.endswith("proj.weight") else {name: weight}
    whole = shutil.copytree(published, tmp_path / "whole")
    save_file(expanded(stored, form), whole / FILE, {"format": "pt"})
    save_file(
        {name: one.contiguous() for name, one in stored.items()}, published / FILE, {"format": "pt"}
    )
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(
        json.dumps(config | {"quantization_config": form.quantization_config})
    )
    expected = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).state_dict()
    names = names_of(published)
    assert any(name.endswith("experts.gate_up_proj") for name in names.quantized)
    assert names.stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(read_tensor(names.stored[name], torch.float32), weight), name


@pytest.mark.parametrize(
    ("form", "part", "message"),
    [
        (GPTQ, "scales", "has no scales"),
        (GPTQ, "qzeros", "qzeros is missing"),
        (GPTQ, "qweight", "has no scales|qweight is missing"),
        (replace(GPTQ, desc_act=True), "g_idx", "g_idx is missing"),
        (AWQ, "scales", "has no scales"),
        (AWQ, "qzeros", "qzeros is missing"),
    ],
)
def test_a_part_that_is_missing_is_named(
    form: PackedForm, part: str, message: str, tmp_path: Path
) -> None:
    streamed = write_packed(form, tmp_path, num_hidden_layers=1).streamed
    stored = load_file(streamed / FILE)
    del stored[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(stored, streamed / FILE, {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"mlp.up_proj.weight: .*({message})"):
        names_of(streamed)


def test_modules_may_have_other_bits_and_groups_than_the_model(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` and AutoRound's `extra_config` say which; what is stored tells the
    same.
    """
    streamed = write_packed(GPTQ, tmp_path, num_hidden_layers=1).streamed
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(streamed / FILE)
    own = replace(GPTQ, bits=8, group_size=32, desc_act=True)
    parts = packed(name, torch.randn(256, 128), own)
    save_file(
        {key: one.contiguous() for key, one in (stored | parts).items()},
        streamed / FILE,
        {"format": "pt"},
    )
    found = read_tensor(names_of(streamed).stored[name], torch.float32)
    assert torch.equal(found, expanded(parts, own)[name].float())


def test_a_module_that_keeps_its_weight_transposed_is_refused(tmp_path: Path) -> None:
    """What is packed is [outputs, inputs], and GPT-2's modules want the other."""
    published = write_checkpoint("gpt2", tmp_path).published
    for file in published.glob("*.safetensors"):
        stored: dict[str, torch.Tensor] = {}
        for name, weight in load_file(file).items():
            is_packed = name.endswith("c_proj.weight")
            stored |= (
                packed(name, weight.t(), replace(GPTQ, group_size=-1))
                if is_packed
                else {name: weight}
            )
        save_file({name: one.contiguous() for name, one in stored.items()}, file, {"format": "pt"})
    (published / "model.safetensors.index.json").unlink()
    weights = {
        name: one
        for file in published.glob("*.safetensors")
        for name, one in load_file(file).items()
    }
    for file in published.glob("*.safetensors"):
        file.unlink()
    save_file(weights, published / FILE, {"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(
        json.dumps(config | {"quantization_config": GPTQ.quantization_config})
    )
    with pytest.raises(
        WeightsError, match=r"c_proj.weight: .*the module keeps its weight as \[inputs, outputs\]"
    ):
        names_of(published)


def test_a_merged_model_has_the_expanded_weights_with_the_adapter(tmp_path: Path) -> None:
    checkpoint = write_packed(FORMS["gptq, groups of 32, desc_act"], tmp_path, num_hidden_layers=2)
    with streamed_model(checkpoint, lora_target_modules=["q_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
    out = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_words_of_another_width_are_refused(tmp_path: Path) -> None:
    streamed = write_packed(GPTQ, tmp_path, num_hidden_layers=1).streamed
    stored = load_file(streamed / FILE)
    stored["model.layers.0.mlp.up_proj.qweight"] = stored[
        "model.layers.0.mlp.up_proj.qweight"
    ].view(torch.int16)
    save_file(stored, streamed / FILE, {"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"qweight is torch.int16, and words of 32 bits are expanded"
    ):
        names_of(streamed)


@pytest.mark.parametrize("form", [GPTQ, AWQ], ids=["gptq", "awq"])
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_parts_that_do_not_fit_each_other_are_refused(
    form: PackedForm, part: str, tmp_path: Path
) -> None:
    streamed = write_packed(form, tmp_path, num_hidden_layers=1).streamed
    stored = load_file(streamed / FILE)
    name = f"model.layers.0.mlp.up_proj.{part}"
    stored[name] = stored[name][:, 8:].contiguous()
    save_file(stored, streamed / FILE, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"mlp.up_proj.weight: cannot be made of"):
        names_of(streamed)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        (GPTQ, {"checkpoint_format": "marlin"}, "as 'gptq' in the format 'marlin' with 4 bits"),
        (GPTQ, {"bits": 3}, "as 'gptq' in the format 'gptq' with 3 bits"),
        (AWQ, {"version": "gemv"}, "as 'awq' in the format 'gemv' with 4 bits"),
        (AWQ, {"bits": 8}, "as 'awq' in the format 'gemm' with 8 bits"),
        (GPTQ, {"rotation": "hadamard"}, r"its inputs rotated \(rotation\)"),
        (
            FORMS["auto-round, as gptq"],
            {"rotation_config": {"kind": "x"}},
            r"its inputs rotated \(rotation_config\)",
        ),
        (
            FORMS["auto-round, as awq"],
            {"packing_format": "auto_round:llm_compressor"},
            "AutoRound with the packing",
        ),
        (
            FORMS["auto-round, as awq"],
            {"data_type": "mx_fp"},
            "AutoRound with the packing .* of 'mx_fp'",
        ),
    ],
)
def test_what_is_packed_otherwise_is_refused(
    form: PackedForm, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    streamed = write_packed(form, tmp_path, num_hidden_layers=1).streamed
    edit_settings(streamed, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        names_of(streamed)
    assert "the unquantised model" in str(caught.value)


def test_settings_for_who_quantises_need_no_library_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Optimum writes which modules were to be quantised; what is stored tells the same."""
    streamed = write_packed(replace(GPTQ, desc_act=True), tmp_path, num_hidden_layers=1).streamed
    edit_settings(
        streamed, modules_in_block_to_quantize=[["self_attn.q_proj"]], dataset="ptb", damp_percent=0
    )
    assert len(names_of(streamed).quantized) == 7
    assert not caplog.records
