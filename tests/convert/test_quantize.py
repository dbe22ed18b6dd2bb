"""A quantised directory is in its library's own format: bit for bit what `transformers`
quantises, and loads.
"""

import errno
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from quantized import (
    KINDS,
    LINEARS,
    NUM_LAYERS,
    SIZES,
    but_for_origin,
    expanded_by_the_library,
    prepared,
    published,
)
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, TorchAoConfig

from lema import LemaConfig, LemaModel
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.convert import tensors as rewrite
from lema.convert.prepare import prepare
from lema.convert.tensors import read_tensor
from lema.errors import ConfigError, DiskError, ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.model.weight_names import map_names, match_names
from lema.storage import GlobalBinaryIndex
from lema.storage.index import SINGLE_NAME
from lema.storage.quantized import bitsandbytes as ofbits
from lema.storage.quantized import formats
from lema.storage.quantized import records as libraries
from lema.storage.quantized import torchao as ofao
from lema.storage.quantized.records import QuantizedRecord, fold

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("model") / "published", torch.bfloat16)


@pytest.fixture(scope="module")
def quantized(source: Path) -> Any:
    return cache(lambda kind: prepared(source, kind))


def library_config(kind: str) -> Any:
    """What a user would give `from_pretrained` for the same."""
    if kind == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return TorchAoConfig(
        Int8WeightOnlyConfig(version=2) if kind == "int8" else Float8WeightOnlyConfig(version=2)
    )


def records_of(directory: Path) -> dict[str, Any]:
    return match_names(meta_model(read_config(directory)), GlobalBinaryIndex(directory))


# The format


@pytest.mark.slow
@kinds
def test_transformers_loads_what_it_would_have_quantised_itself(
    source: Path, quantized: Any, kind: str
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=library_config(kind)
    )
    found, report = AutoModelForCausalLM.from_pretrained(
        quantized(kind).path, output_loading_info=True
    )
    assert {what: names for what, names in report.items() if names} == {}
    assert found.dtype == expected.dtype == torch.bfloat16
    weights = dict(expanded_by_the_library(found))
    theirs = dict(expanded_by_the_library(expected))
    assert weights.keys() == theirs.keys()
    assert len(weights) == LINEARS * NUM_LAYERS
    for name, weight in theirs.items():
        assert type(found.get_submodule(name).weight) is type(expected.get_submodule(name).weight)
        assert weights[name].dtype == weight.dtype == torch.bfloat16
        assert torch.equal(weights[name], weight), name
    plain = {
        name: p for name, p in expected.named_parameters() if name.rpartition(".")[0] not in weights
    }
    for name, parameter in plain.items():
        assert torch.equal(found.get_parameter(name), parameter), name


@pytest.mark.slow
@kinds
def test_weights_expand_here_to_what_the_library_expands_them_to(quantized: Any, kind: str) -> None:
    whole = AutoModelForCausalLM.from_pretrained(quantized(kind).path)
    records = records_of(quantized(kind).path)
    expanded = dict(expanded_by_the_library(whole))
    assert {name for name, record in records.items() if isinstance(record, QuantizedRecord)} == {
        f"{name}.weight" for name in expanded
    }
    for name, weight in expanded.items():
        assert torch.equal(read_tensor(records[f"{name}.weight"], torch.bfloat16), weight), name


@pytest.mark.covered
@pytest.mark.sampled(9)
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 128), (300, 192), (65, 4160)])
def test_pieces_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: Any, dtype: torch.dtype
) -> None:
    library = formats.LIBRARIES[formats.KINDS[kind]]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, about = library.quantize(kind, weight)
    at_once = torch.empty_like(weight)
    formats.expand(formats.KINDS[kind], whole, about, at_once)
    monkeypatch.setattr(libraries, "PIECE_ON_HOST", 640)
    parts, said = library.quantize(kind, weight)
    in_pieces = torch.empty_like(weight)
    formats.expand(formats.KINDS[kind], parts, said, in_pieces)
    assert said == about
    for part, tensor in whole.items():
        assert bytes(rewrite.bytes_of(parts[part])) == bytes(rewrite.bytes_of(tensor)), part
        assert (tensor.dtype, tuple(tensor.shape)) == library.specs(kind, shape, dtype)[0][part]
    assert torch.equal(in_pieces, at_once)
    assert 0 < float((at_once - weight).float().norm() / weight.float().norm()) < 0.15


@kinds
def test_tensors_of_a_layer_lie_together_in_visit_order_and_where_they_can_be_used(
    quantized: Any, kind: str
) -> None:
    index = GlobalBinaryIndex(quantized(kind).path)
    names = list(index)
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    sizes = {"F32": 4, "BF16": 2}
    assert all(record.offset % sizes.get(record.dtype, 1) == 0 for record in index.values())


@kinds
def test_norms_biases_embeddings_and_head_stay_as_they_are(
    source: Path, quantized: Any, kind: str
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    found = load_file(quantized(kind).weights)
    plain = [name for name in expected if "proj.weight" not in name]
    assert len(plain) == 3 + NUM_LAYERS * (2 + 4)  # norms, and the biases of attention
    for name in plain:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.slow
@kinds
def test_a_dtype_is_what_weights_expand_to(source: Path, tmp_path: Path, kind: str) -> None:
    out = prepare(source, tmp_path / "out", "float32", quantize=kind).path
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    expected = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=library_config(kind)
    )
    found = dict(expanded_by_the_library(AutoModelForCausalLM.from_pretrained(out)))
    for name, weight in expanded_by_the_library(expected):
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight), name


@pytest.mark.slow
@kinds
def test_a_model_in_memory_is_quantised_as_its_directory_is(
    source: Path, quantized: Any, tmp_path: Path, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    out = prepare(model, tmp_path / "out", quantize=kind)
    assert but_for_origin(out.weights) == but_for_origin(quantized(kind).weights)
    assert out.precision == quantized(kind).precision
    assert AutoModelForCausalLM.from_pretrained(out.path).dtype == torch.bfloat16


@kinds
def test_what_transformers_itself_saved_quantised_is_read(
    source: Path, tmp_path: Path, kind: str
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(source, quantization_config=library_config(kind))
    whole.save_pretrained(tmp_path)
    records = records_of(tmp_path)
    for name, weight in expanded_by_the_library(whole):
        assert torch.equal(read_tensor(records[f"{name}.weight"], torch.bfloat16), weight), name


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_either_sort_are_read_with_and_without_nested_scales(
    source: Path, tmp_path: Path, kind: str, nested: bool
) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
    )
    whole = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    whole.save_pretrained(tmp_path)
    records = records_of(tmp_path)
    for name, weight in expanded_by_the_library(whole):
        assert torch.equal(read_tensor(records[f"{name}.weight"], torch.bfloat16), weight), name


@pytest.mark.slow
def test_a_row_of_zeros_stays_zeros(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] = 0
    for kind in KINDS:
        out = prepare(model, tmp_path / kind, quantize=kind).path
        weight = read_tensor(records_of(out)["model.layers.1.mlp.up_proj.weight"], torch.bfloat16)
        assert not weight[3].any()
        assert weight.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_are_quantised_too_and_transformers_loads_them(tmp_path: Path, kind: str) -> None:
    out = prepare(write_checkpoint("mixtral", tmp_path).published, tmp_path / "out", quantize=kind)
    found, report = AutoModelForCausalLM.from_pretrained(out.path, output_loading_info=True)
    assert {what: names for what, names in report.items() if names} == {}
    records = records_of(out.path)
    for layer in range(NUM_LAYERS):
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            expanded = found.get_parameter(name).dequantize()
            assert expanded.ndim == 3
            assert torch.equal(read_tensor(records[name], torch.float32), expanded), name
    assert "mlp.experts.gate_up_proj" in {row.module for row in out.precision}
    # which picks experts
    assert not isinstance(records["model.layers.0.mlp.gate.weight"], QuantizedRecord)


def test_experts_in_four_bits_are_those_of_the_library_one_by_one(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    out = prepare(tmp_path / "model", tmp_path / "out", quantize="nf4")
    assert not out.refused
    skeleton = meta_model(read_config(out.path), torch.bfloat16)
    records = match_names(skeleton, GlobalBinaryIndex(out.path))
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().items()
    ):
        if tensor.ndim == 3:
            found = read_tensor(records[name], torch.bfloat16)
            once = [functional.quantize_4bit(one, blocksize=64, quant_type="nf4") for one in tensor]
            for expert, (packed, state) in zip(found, once, strict=True):
                # its scales are not quantised themselves
                exact = functional.dequantize_4bit(packed, state)
                assert (expert - exact).norm() < 0.01 * exact.norm()


# What it costs


@kinds
def test_the_loss_of_precision_is_told_by_kind_of_module(
    source: Path, quantized: Any, kind: str
) -> None:
    original = AutoModelForCausalLM.from_pretrained(source)
    loaded = dict(
        expanded_by_the_library(AutoModelForCausalLM.from_pretrained(quantized(kind).path))
    )
    found = {row.module: row for row in quantized(kind).precision}
    assert len(found) == LINEARS
    for module, row in found.items():
        errors = [
            relative_error(
                loaded[f"model.layers.{layer}.{module}"],
                original.get_submodule(f"model.layers.{layer}.{module}").weight,
            )
            for layer in range(NUM_LAYERS)
        ]
        assert row.sampled == 8
        assert min(errors) <= row.weights_median <= row.weights_worst <= max(errors) * (1 + 1e-5)
        assert 0.5 * row.weights_median < row.outputs_median < 2 * row.weights_median
        assert row.outputs_median <= row.outputs_worst


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.detach().double()).norm() / exact.detach().double().norm())


@pytest.mark.slow
@kinds
def test_at_most_two_layers_are_in_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 64}
    source = published(tmp_path / "published", **sizes)
    layer = sum(
        record.nbytes for name, record in GlobalBinaryIndex(source).items() if "layers.0." in name
    )
    # tables that libraries make once are not the layers'
    prepare(source, tmp_path / "warm", quantize=kind)
    monkeypatch.setattr(libraries, "PIECE_ON_HOST", 1 << 13)
    with LiveBytes(tmp_path) as live:  # where a directory is made that appears whole
        prepare(source, tmp_path / "out", quantize=kind)
    assert 0 < live.peak < 2 * layer


# What the command line says


def test_the_command_prints_a_table_and_notes(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["prepare", str(source), str(tmp_path / "out"), "--quantize", "nf4"]) == 0
    printed = capfd.readouterr().out
    assert all(
        name in printed
        for name in ("self_attn.q_proj", "mlp.down_proj", "worst", "median", "%", "wrote")
    )


def test_shapes_that_do_not_fit_are_left_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = published(tmp_path / "published", intermediate_size=96)
    assert run(app, ["prepare", str(source), str(tmp_path / "out"), "--quantize", "nf4"]) == 0
    told = (
        f"{NUM_LAYERS} tensors not quantised, because of their shape: model.layers.*.mlp.down_proj"
    )
    assert told in capfd.readouterr().out
    # which leaves the same modules as they are
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(
        found.model.layers[2].mlp.down_proj.weight, expected.model.layers[2].mlp.down_proj.weight
    )
    assert len(dict(expanded_by_the_library(found))) == (LINEARS - 1) * NUM_LAYERS


# What is refused


def test_a_kind_that_does_not_exist_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be quantised to 'int4'") as caught:
        prepare(source, tmp_path / "out", quantize="int4")
    assert "int8, fp8, nf4" in caught.value.how
    assert not (tmp_path / "out").exists()


def test_a_file_alone_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        prepare(source, tmp_path / "out.safetensors", quantize="int8")
    assert not (tmp_path / "out.safetensors").exists()


@kinds
def test_what_is_quantised_is_written_as_what_it_expands_to(
    quantized: Any, tmp_path: Path, kind: str
) -> None:
    source = quantized(kind).path
    out = prepare(source, tmp_path / "out").path
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    plain = load_file(out / SINGLE_NAME)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    for name, weight in expanded_by_the_library(loaded):
        assert torch.equal(plain[f"{name}.weight"], weight.to(plain[f"{name}.weight"].dtype))
    again = prepare(source, tmp_path / "again", quantize="int8").path
    twice = prepare(out, tmp_path / "twice", quantize="int8").path
    assert but_for_origin(again / SINGLE_NAME) == but_for_origin(twice / SINGLE_NAME)


def test_a_model_without_linear_modules_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint("gpt2", tmp_path).published
    with pytest.raises(
        ModelError, match="nothing to quantise: no decoder layer has a linear module"
    ):
        prepare(source, tmp_path / "out", quantize="int8")


def test_a_model_none_of_whose_shapes_fits_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint("llama", tmp_path).published
    with pytest.raises(ModelError, match="none of their shapes fits nf4"):
        prepare(source, tmp_path / "out", quantize="nf4")


@kinds
def test_without_the_library_it_is_said_how_to_get_it(
    source: Path, quantized: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = records_of(quantized(kind).path)["model.layers.0.mlp.up_proj.weight"]
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("torchao", "bitsandbytes")
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        prepare(source, tmp_path / "out", quantize=kind)
    assert caught.value.how == 'pip install "lema-lora[quantize]"'
    with pytest.raises(ConfigError, match="cannot be imported"):
        read_tensor(record, torch.bfloat16)


def test_quantised_by_another_method_is_refused_by_its_name(source: Path, tmp_path: Path) -> None:
    out = prepare(source, tmp_path / "out").path
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "aqlm"}})
    )
    with pytest.raises(ModelError, match="'aqlm'"):
        map_names(meta_model(read_config(out)), GlobalBinaryIndex(out))


@pytest.mark.slow
@kinds
def test_a_failing_disk_leaves_nothing(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lema.storage.directio.BlockFile.finish", full)
    with pytest.raises(DiskError, match="the disk is full"):
        prepare(source, tmp_path / "out", quantize=kind)
    assert not (tmp_path / "out").exists()


# What is not to be trusted


def damage(directory: Path, out: Path, change: Any) -> GlobalBinaryIndex:
    """Copy the weights of a quantised directory, changed."""
    index = GlobalBinaryIndex(directory)
    (metadata,) = index.metadata.values()
    tensors = load_file(directory / SINGLE_NAME)
    changed = dict(metadata)
    change(tensors, changed)
    save_file(tensors, out / SINGLE_NAME, changed)
    return GlobalBinaryIndex(out)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("int8", f"{UP}._weight_scale"),
        ("fp8", f"{UP}._weight_qdata"),
        ("nf4", f"{UP}.weight.absmax"),
        ("nf4", f"{UP}.weight.nested_quant_map"),
        ("nf4", f"{UP}.weight"),
    ],
)
def test_a_part_that_is_missing_is_named(
    quantized: Any, tmp_path: Path, kind: str, part: str
) -> None:
    index = damage(quantized(kind).path, tmp_path, lambda tensors, _: tensors.pop(part))
    with pytest.raises(WeightsError, match=f"{UP}.weight' lacks {part}"):
        fold(index)


@pytest.mark.parametrize(
    "part", ["", ".absmax", ".nested_absmax", ".nested_quant_map", ".quant_map"]
)
def test_a_part_that_is_too_short_is_not_read_past_its_end(
    quantized: Any, tmp_path: Path, part: str
) -> None:
    def shorten(tensors: dict[str, Tensor], _: Any) -> None:
        tensors[f"{UP}.weight{part}"] = tensors[f"{UP}.weight{part}"][:-1].clone()

    with pytest.raises(WeightsError, match="does not define how to expand it"):
        fold(damage(quantized("nf4").path, tmp_path, shorten))


@pytest.mark.parametrize(
    "change",
    [
        {"blocksize": 0},
        {"blocksize": "64"},
        {"blocksize": 100},
        {"nested_blocksize": 1},
        {"shape": [1 << 20, 1 << 20]},
        {"shape": "192"},
        {"shape": [-192, -64]},
        {"quant_type": "fp4"},
        {"nested_dtype": "load"},
        {"nested_offset": "much"},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(
    quantized: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    def rewrite_state(tensors: dict[str, Tensor], _: Any) -> None:
        name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | change
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    with pytest.raises(WeightsError, match="does not define how to expand it"):
        fold(damage(quantized("nf4").path, tmp_path, rewrite_state))


@pytest.mark.parametrize("text", ["[1]", "{", '{"_type": "Int8Tensor", "_tensor_data_names": 3}'])
def test_metadata_that_makes_no_sense_is_refused(quantized: Any, tmp_path: Path, text: str) -> None:
    marked = text if "_tensor_data_names" in text else f'{text} "_tensor_data_names"'
    index = damage(
        quantized("int8").path,
        tmp_path,
        lambda _, metadata: metadata.update({f"{UP}.weight": marked}),
    )
    with pytest.raises(WeightsError, match="does not define how to expand it"):
        fold(index)


@pytest.mark.parametrize(
    "change", [{"_type": "Int4Tensor"}, {"_data": {"act_quant_kwargs": {"_type": "x"}}}]
)
def test_forms_of_torchao_that_are_more_than_weights_alone_are_refused(
    quantized: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    def say(_: Any, metadata: dict[str, str]) -> None:
        metadata[f"{UP}.weight"] = json.dumps(json.loads(metadata[f"{UP}.weight"]) | change)

    with pytest.raises(ModelError, match="quantised as torchao's"):
        fold(damage(quantized("int8").path, tmp_path, say))


def test_no_library_is_asked_for_a_model_that_is_not_quantised(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers` itself imports torchao where it is installed, so what is imported would
    prove nothing.
    """

    def refuse(module: str) -> Any:
        raise AssertionError(f"{module} was asked for")

    for module in (ofao, ofbits):
        monkeypatch.setattr(module, "quiet_import", refuse)
    model = LemaModel(LemaConfig(str(prepare(source, tmp_path / "out").path), device="cpu"))
    with model.memory.lease(0):
        pass
    model.close()
    with pytest.raises(AssertionError, match="torchao"):
        prepare(source, tmp_path / "small", quantize="int8")
