"""A merged model is bit for bit what PEFT's `merge_and_unload` gives, written without ever
holding the model.
"""

import errno
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import Checkpoint, write_checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from lema import LemaConfig, LemaModel
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert import merge_adapter
from lema.convert.mergemark import MERGE_NAME
from lema.errors import AdapterError, ConfigError, DiskError
from lema.lora.files import OLD_WEIGHTS, WEIGHTS
from lema.storage import GlobalBinaryIndex
from lema.storage.index import INDEX_NAME, SINGLE_NAME


def trained_adapter(model: Path, directory: Path, **settings: Any) -> Path:
    """Save an adapter of `model` whose every number differs from its first value."""
    opened = LemaModel(LemaConfig(str(model), device="cpu", lora_rank=3, lora_alpha=5, **settings))
    opened.initialize_lora()
    disturb(opened.get_trainable_parameters())
    opened.save_pretrained(directory)
    opened.close()
    return directory


def move_base(adapter: Path, model: Path) -> None:
    """Make an adapter name another base model."""
    settings = json.loads((adapter / CONFIG_NAME).read_text()) | {"model_name_or_path": str(model)}
    (adapter / CONFIG_NAME).write_text(json.dumps(settings))


def disturb(parameters: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def merged_by_peft(model: Path, adapter: Path, dtype: str | None = None) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    merged: dict[str, torch.Tensor] = (
        PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    )
    return merged


def assert_loads_as(out: Path, expected: dict[str, torch.Tensor]) -> None:
    """Loading leaves nothing over and nothing out, and every number is the one expected."""
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: found for kind, found in report.items() if found} == {}
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    directory = tmp_path_factory.mktemp("llama")
    checkpoint = write_checkpoint("llama", directory)
    return checkpoint, trained_adapter(checkpoint.streamed, directory / "adapter")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "tied", "dtype"),
    [
        ("llama", False, None),
        ("llama", True, None),
        ("llama", False, "bfloat16"),
        ("gpt2", True, None),
        ("gpt2", False, "bfloat16"),
        ("mixtral", False, None),
        ("mixtral", True, "float16"),
    ],
)
def test_the_merged_model_is_the_one_peft_merges(
    tmp_path: Path, name: str, tied: bool, dtype: str | None
) -> None:
    checkpoint = write_checkpoint(name, tmp_path, tied=tied)
    adapter = trained_adapter(checkpoint.streamed, tmp_path / "adapter", dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published, dtype=dtype).state_dict()
    expected = merged_by_peft(checkpoint.published, adapter, dtype)
    assert any(not torch.equal(base[key], expected[key]) for key in expected)
    assert_loads_as(merge_adapter(adapter, tmp_path / "merged", 50_000), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_a_dtype_in_the_config_the_checkpoint_keeps_its_own(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoint = write_checkpoint("llama", tmp_path, dtype=dtype)
    adapter = trained_adapter(checkpoint.streamed, tmp_path / "adapter")
    out = merge_adapter(adapter, tmp_path / "merged")
    assert_loads_as(out, merged_by_peft(checkpoint.published, adapter))
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype


def test_an_adapter_of_peft_alone_merges_with_its_scalings_and_patterns(
    llama: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    published = llama[0].published
    config = LoraConfig(
        r=4,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.3.self_attn.q_proj": 2},
        alpha_pattern={"down_proj": 9},
        layers_to_transform=[1, 3, 5],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(published), config)
    disturb(parameter for parameter in model.parameters() if parameter.requires_grad)
    model.save_pretrained(tmp_path / "adapter")
    out = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert_loads_as(out, merged_by_peft(published, tmp_path / "adapter"))


def test_an_adapter_of_the_older_format_merges(
    llama: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    checkpoint, adapter = llama
    old = tmp_path / "old"
    old.mkdir()
    (old / CONFIG_NAME).write_bytes((adapter / CONFIG_NAME).read_bytes())
    prefix = "base_model.model.model.layers."
    tensors = {}
    for name, tensor in load_file(adapter / WEIGHTS).items():
        layer, _, rest = name.removeprefix(prefix).removesuffix(".weight").partition(".")
        tensors[f"{int(layer) + 1}.{rest}"] = tensor
    torch.save(tensors, old / OLD_WEIGHTS)
    out = merge_adapter(old, tmp_path / "merged")
    assert_loads_as(out, merged_by_peft(checkpoint.published, adapter))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 20_000, 300_000])
def test_no_file_is_larger_than_asked_but_for_a_larger_tensor(
    llama: tuple[Checkpoint, Path], tmp_path: Path, limit: int
) -> None:
    checkpoint, adapter = llama
    out = merge_adapter(adapter, tmp_path / "merged", limit)
    index = json.loads((out / INDEX_NAME).read_text())
    stored = GlobalBinaryIndex(out)
    assert {name: record.file.name for name, record in stored.items()} == index["weight_map"]
    assert (
        index["metadata"]["total_size"]
        == stored.nbytes
        == GlobalBinaryIndex(checkpoint.published).nbytes
    )
    held = [
        [record.nbytes for record in stored.values() if record.file == file]
        for file in stored.files
    ]
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in held)
    # Files are filled: no two neighbours would fit into one.
    assert all(sum(left) + right[0] > limit for left, right in pairwise(held))
    assert [file.name for file in stored.files] == [
        f"model-{number:05}-of-{len(held):05}.safetensors" for number in range(1, len(held) + 1)
    ]


def test_a_model_within_the_limit_is_one_file_and_its_companions_come_along(
    llama: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    checkpoint, adapter = llama
    companions = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "notes.py": "raise SystemExit",
    }
    for name, text in companions.items():
        (checkpoint.streamed / name).write_text(text)
    out = merge_adapter(adapter, tmp_path / "new" / "place" / "merged")
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        MERGE_NAME,
        SINGLE_NAME,
    }
    assert {path.name for path in out.iterdir()} == names
    assert (out / "tokenizer.json").read_text() == "{}"
    for name in companions:
        (checkpoint.streamed / name).unlink()


def test_the_merged_model_has_the_names_and_shapes_of_the_published_one(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("mixtral", tmp_path)
    adapter = trained_adapter(checkpoint.streamed, tmp_path / "adapter")
    out = merge_adapter(adapter, tmp_path / "merged", 50_000)
    shapes = [
        {
            name: (record.dtype, record.shape)
            for name, record in GlobalBinaryIndex(directory).items()
        }
        for directory in (out, checkpoint.published)
    ]
    assert shapes[0] == shapes[1]
    assert any("block_sparse_moe.experts.1.w2" in name for name in shapes[0])


def peak_of_a_merge(tmp_path: Path, layers: int) -> int:
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_hidden_layers=layers,
    )
    model = tmp_path / f"model{layers}"
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    adapter = trained_adapter(model, tmp_path / f"adapter{layers}")
    with LiveBytes(tmp_path) as live:
        merge_adapter(adapter, tmp_path / f"merged{layers}")
    return live.peak


@pytest.mark.slow
def test_merging_holds_one_module_however_deep_the_model(tmp_path: Path) -> None:
    module = 64 * 128 * 4
    embeddings = 4000 * 64 * 4
    shallow = peak_of_a_merge(tmp_path, 2)
    deep = peak_of_a_merge(tmp_path, 8)
    assert module < shallow <= 4 * module < embeddings  # its weights, and PEFT's terms of the sum
    assert deep == shallow


def test_a_directory_in_use_is_refused_and_left_alone(
    llama: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    checkpoint, adapter = llama
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (taken, file, adapter, checkpoint.streamed):
        before = (
            sorted(path.name for path in place.iterdir()) if place.is_dir() else place.read_text()
        )
        with pytest.raises(ConfigError, match="the directory is not empty"):
            merge_adapter(adapter, place)
        assert (
            sorted(path.name for path in place.iterdir()) if place.is_dir() else place.read_text()
        ) == before


def test_an_empty_directory_is_filled(llama: tuple[Checkpoint, Path], tmp_path: Path) -> None:
    checkpoint, adapter = llama
    (tmp_path / "empty").mkdir()
    out = merge_adapter(adapter, tmp_path / "empty")
    assert_loads_as(out, merged_by_peft(checkpoint.published, adapter))


def test_a_full_disk_leaves_nothing_behind(
    llama: tuple[Checkpoint, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    calls = iter(range(1000))

    def full_after_ten(*arguments: Any) -> int:
        if next(calls) >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full_after_ten)
    with pytest.raises(DiskError, match="disk is full"):
        merge_adapter(llama[1], tmp_path / "merged", 50_000)
    assert next(calls) > 10
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_named_and_nothing_is_written(
    llama: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    checkpoint, adapter = llama
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(ConfigError, match="cannot hold 0 bytes"):
        merge_adapter(adapter, place / "merged", 0)
    with pytest.raises(AdapterError, match="neither lema_config"):
        merge_adapter(tmp_path, place / "merged")
    other = write_checkpoint("gpt2", tmp_path / "other")
    stranger = trained_adapter(other.streamed, tmp_path / "stranger")
    move_base(stranger, checkpoint.streamed)
    with pytest.raises(ConfigError, match="does not fit this model"):
        merge_adapter(stranger, place / "merged")
    assert not list(place.iterdir())


def test_a_model_of_experts_stored_one_by_one_merges_as_it_is(tmp_path: Path) -> None:
    published = write_checkpoint("mixtral", tmp_path).published
    adapter = trained_adapter(published, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    assert_loads_as(tmp_path / "merged", merged_by_peft(published, adapter))


def test_the_command_merges(
    llama: tuple[Checkpoint, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, adapter = llama
    out = tmp_path / "merged"
    assert run(app, ["merge", str(adapter), str(out), "--max-shard-size", "50KB"]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert_loads_as(out, merged_by_peft(checkpoint.published, adapter))
    assert run(app, ["merge", str(adapter), str(out)]) == ConfigError.exit_code
    assert "the directory is not empty" in capsys.readouterr().err
