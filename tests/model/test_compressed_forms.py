"""Integers of compressed-tensors with zero points, by channel, or in groups of inputs that are
not neighbours.
"""

import json
from pathlib import Path

import pytest
import torch
from compressedforms import FILE, FORMS, compressed, write_compressed
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from publishedforms import dequantized, write_published
from quantized import LINEARS, NUM_LAYERS
from safetensors.torch import load_file, save_file
from tiny import micro_batches
from tinyconfig import tiny_config
from torch import Tensor

from lema.convert.prepare import prepare
from lema.convert.tensors import read_tensor
from lema.errors import ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.model.weight_names import NameMap, map_names
from lema.storage import GlobalBinaryIndex

OTHERS = [name for name, form in FORMS.items() if not form.ordered]


def names_of(directory: Path) -> NameMap:
    return map_names(
        meta_model(read_config(directory), torch.float32), GlobalBinaryIndex(directory)
    )


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_codes_stand_for(form: str, tmp_path: Path) -> None:
    checkpoint = write_compressed(FORMS[form], tmp_path, num_layers=1)
    names = names_of(checkpoint.streamed)
    whole = load_file(checkpoint.published / FILE)
    assert len(names.quantized) == LINEARS
    assert not names.unused
    for name, weight in whole.items():
        assert torch.equal(read_tensor(names.stored[name], torch.float32), weight), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", OTHERS)
def test_they_are_what_transformers_loads(form: str, tmp_path: Path) -> None:
    checkpoint = write_compressed(FORMS[form], tmp_path, num_layers=1)
    whole = load_file(checkpoint.published / FILE)
    loaded = dequantized(checkpoint.streamed).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("form", ["int4, groups", "int8, channels", "int4, numbered groups"])
def test_a_step_is_that_of_the_whole_model(form: str, tmp_path: Path) -> None:
    checkpoint = write_compressed(FORMS[form], tmp_path, NUM_LAYERS)
    whole = whole_model(checkpoint)
    batches = micro_batches(3, padding=True)
    draw_b(whole)
    with streamed_model(checkpoint, dtype="float32") as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.parametrize("form", ["int4, channels", "int4, numbered groups"])
def test_it_is_prepared_as_what_it_expands_to(form: str, tmp_path: Path) -> None:
    checkpoint = write_compressed(FORMS[form], tmp_path, num_layers=2)
    written = load_file(prepare(checkpoint.streamed, tmp_path / "out").path / FILE)
    whole = load_file(checkpoint.published / FILE)
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], weight) for name, weight in whole.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form", ["int4, groups", "int4, numbered groups", "int4, channels, symmetric"]
)
def test_experts_that_are_stored_one_by_one_are_expanded_and_merged(
    form: str, tmp_path: Path
) -> None:
    """transformers does not expand zero points of experts; the weights are those of the codes
    all the same.
    """
    directory = write_published(tiny_config("qwen3_moe"), "bf16", tmp_path / "published")
    stored = dict[str, Tensor]()
    plain = dict[str, Tensor]()
    for name, weight in load_file(directory / FILE).items():
        made, plain[name] = (
            compressed(name, weight, FORMS[form])
            if "proj.weight" in name
            else ({name: weight}, weight)
        )
        stored |= made
    save_file(plain, directory / FILE, {"format": "pt"})
    expected = dequantized(directory).state_dict()
    save_file(
        {name: one.contiguous() for name, one in stored.items()}, directory / FILE, {"format": "pt"}
    )
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = FORMS[form].quantization_config
    (directory / "config.json").write_text(json.dumps(config))
    names = names_of(directory)
    assert any(name.endswith("experts.gate_up_proj") for name in names.quantized)
    assert names.stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(read_tensor(names.stored[name], torch.float32), weight), name


@pytest.mark.parametrize("part", ["packed", "scale", "shape", "zero_point"])
def test_a_part_that_is_missing_is_named(part: str, tmp_path: Path) -> None:
    small = write_compressed(FORMS["int4, groups"], tmp_path, num_layers=1).streamed
    stored = load_file(small / FILE)
    del stored[f"model.layers.0.mlp.up_proj.weight_{part}"]
    save_file(stored, small / FILE, {"format": "pt"})
    with pytest.raises(
        WeightsError, match=rf"up_proj.weight: .*(weight_{part} is missing|has no scales|'weight)"
    ):
        names_of(small)


def test_numbers_of_groups_that_are_missing_are_named(tmp_path: Path) -> None:
    small = write_compressed(FORMS["int4, numbered groups"], tmp_path, num_layers=1).streamed
    stored = load_file(small / FILE)
    del stored["model.layers.0.mlp.up_proj.weight_g_idx"]
    save_file(stored, small / FILE, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"up_proj.weight: .*weight_g_idx is missing"):
        names_of(small)


def test_codes_of_another_width_are_refused(tmp_path: Path) -> None:
    small = write_compressed(FORMS["int4, groups"], tmp_path, num_layers=1).streamed
    file = small / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    file.write_text(json.dumps(config))
    with pytest.raises(
        WeightsError, match=r"weight_packed is \[64, 8\], which is not \[64, 64\] with 8 bits"
    ):
        names_of(small)


def test_inputs_that_would_have_to_be_rotated_are_refused(tmp_path: Path) -> None:
    small = write_compressed(FORMS["int4, groups"], tmp_path, num_layers=1).streamed
    file = small / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["transform_config"] = {
        "config_groups": {"u": {"type": "hadamard"}}
    }
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"its inputs rotated \(transform_config\)"):
        names_of(small)
