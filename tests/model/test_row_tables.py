"""Embeddings that are not loaded: bitwise the same steps, with the rows of the tokens that are
there.
"""

import json
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import compare
from everytype import opened as opened_type
from everytype import write_model as write_type
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from safetensors.torch import load_file, save_file
from smallrun import batch, opened, settings, write_model
from tiny import ARCHITECTURES, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.qwen4_exp import Qwen4ExpTextConfig

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError, NonFiniteError
from lema.model import row_tables
from lema.model.layers.compiled import CompiledLayers
from lema.plan.blueprint import draw_up

CheckpointOf = Callable[..., Checkpoint]


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables of any size looked up row by row, though the settings do not ask for it."""
    monkeypatch.setattr(row_tables, "LEAST_BYTES", 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize(("poison", "place"), [(True, "host"), (False, "disk")])
def test_a_step_is_that_of_the_whole_model(
    checkpoint_of: CheckpointOf, name: str, poison: bool, place: str
) -> None:
    checkpoint = checkpoint_of(name)
    batches = micro_batches(3, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    settings = {"embeddings": place, "gradient_checkpointing": True}
    with streamed_model(checkpoint, poison=poison, **settings) as model:
        draw_b(model.lora_manager)
        embeddings = model.skeleton.get_input_embeddings().weight
        for _ in range(2):
            assert_same(streamed_step(model, batches), whole_step(whole, batches))
            assert embeddings.is_meta  # and nothing was put in its place
            assert model.skeleton.get_input_embeddings().weight is embeddings
        found = model.adapter.evaluate(batches)[0]
    with streamed_model(checkpoint, poison=poison, embeddings="device") as model:
        draw_b(model.lora_manager)
        assert torch.equal(model.adapter.evaluate(batches)[0], found)


def test_a_step_of_a_small_model_is_that_of_the_whole_one(
    tmp_path: Path, of_any_size: None
) -> None:
    found = compare("llama", tmp_path)
    assert found.worst == 0


@pytest.mark.parametrize("kind", ["gemma4_text", "llama4_text", "inkling_text", "opt"])
def test_tables_of_other_kinds_are_looked_up_too(
    tmp_path: Path, of_any_size: None, kind: str
) -> None:
    """Rows that are scaled or normed, a table for all layers, one to whose device ids are sent;
    positions are whole.
    """
    config = tiny_config(kind)
    config.tie_word_embeddings = kind == "gemma4_text"  # then only the other table is looked up
    assert compare(config, tmp_path).worst == 0
    with opened_type(tmp_path / "published") as model:
        names = model.split.tables.names
    if kind == "gemma4_text":
        assert names == {"model.embed_tokens_per_layer.weight"}
    else:
        assert len(names) == 1
        assert next(iter(names)).endswith("embed_tokens.weight")


def ngrams() -> PreTrainedConfig:
    """Two layers have a table of n-grams of their own, each published in four shards."""
    small = tiny_config("qwen4_exp_text").to_dict()
    table = {
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "split_ngram_parts": 4,
    }
    return Qwen4ExpTextConfig(
        **{
            **small,
            **table,
            "ple_embed_dim": 32,
            "make_ngram_vocab_size_divisible_by": 8,
            "eos_token_id": 2,
        }
    )


def test_tables_in_layers_and_in_shards_are_no_part_of_their_layers(
    tmp_path: Path, of_any_size: None
) -> None:
    assert compare(ngrams(), tmp_path).worst == 0
    tables = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight" for layer in (0, 2)]
    with opened_type(tmp_path / "published") as model:
        assert model.split.tables.names == {"model.embed_tokens.weight", *tables}
        held = [{tensor.name for tensor in layer.tensors} for layer in model.memory.layers]
        assert not any("ngram_embedding" in name for names in held for name in names)
        ids = torch.arange(300, 200, -1).view(10, 10)
        module = model.skeleton.get_submodule(tables[1].removesuffix(".weight"))
        found = module(ids)
    config = LemaConfig(str(tmp_path / "published"), device="cpu", embeddings="device")
    with closing(LemaModel(config)) as whole:
        weights = whole.read_stored(tables)
        assert torch.equal(found, weights[tables[1]][ids])
        spared = (
            sum(one.nbytes for one in weights.values())
            + whole.skeleton.get_input_embeddings().weight.nbytes
        )
    blueprint = draw_up(config.model_copy(update={"embeddings": "auto"}))
    assert blueprint.tables.nbytes == spared
    assert any("rows from disk" in note for note in blueprint.tables.notes)


def test_a_layer_with_such_a_table_is_not_compiled(tmp_path: Path, of_any_size: None) -> None:
    with opened_type(write_type(ngrams(), tmp_path / "model")) as model:
        layers = CompiledLayers(list(model.split.layers), model.split.layers_name, model.backend)
        with pytest.warns(
            UserWarning,
            match="layers.2 is not compiled: the rows of an embedding in it are read one",
        ):
            assert not layers.compiles(2)
        assert layers.compiles(1)


def test_only_the_rows_that_are_there_are_read(tmp_path: Path, of_any_size: None) -> None:
    directory = write_model(tmp_path / "model")
    with opened(settings(directory, tmp_path)) as model:
        embeddings = model.skeleton.get_input_embeddings()
        before = model.memory.counters.bytes_read
        ids = torch.tensor([[7, 5, 7, 299], [6, 0, 0, 5]])
        found = embeddings(ids)
        assert model.memory.counters.bytes_read - before == 5 * 32 * 4
        assert torch.equal(found, whole_table(directory)[ids])
        with pytest.raises(IndexError, match="index out of range"):
            embeddings(torch.tensor([[300]]))
        assert torch.equal(embeddings(torch.arange(300).flip(0)), whole_table(directory).flip(0))
        assert embeddings(torch.empty(1, 0, dtype=torch.long)).shape == (1, 0, 32)


def whole_table(directory: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(directory).get_input_embeddings().weight.detach()


def test_a_large_table_takes_no_memory(tmp_path: Path) -> None:
    """Half a GiB, in a file that has no blocks on disk: nothing of that size is made when the
    model is used.
    """
    config = tiny_config("gemma4_text")
    directory = write_type(config, tmp_path / "model")
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.embed_tokens_per_layer.weight"
    width = tensors.pop(name).shape[1]
    rows = (512 << 20) // (4 * width)
    save_file(tensors, file, metadata={"format": "pt"})
    about = {name: {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}
    header = json.dumps(about).encode().ljust(256)
    with (directory / "table.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + rows * width * 4)
    file.rename(directory / "rest.safetensors")
    files = dict.fromkeys(tensors, "rest.safetensors") | {name: "table.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    changed = json.loads((directory / "config.json").read_text()) | {
        "vocab_size_per_layer_input": rows
    }
    (directory / "config.json").write_text(json.dumps(changed))
    batches = [dict.fromkeys(("input_ids", "labels"), one["input_ids"]) for one in micro_batches(2)]
    with Largest() as made, opened_type(directory) as model:
        model.adapter.loss(batches).backward()
        read = model.memory.counters.bytes_read
    assert made.nbytes < 16 << 20
    assert read < 16 << 20


class Largest(TorchDispatchMode):
    """Sees the largest tensor that is made, but for those without values."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if (
                isinstance(one, torch.Tensor)
                and one.device.type == "cpu"
                and not isinstance(one, FakeTensor)
            ):
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("checked", [True, False])
def test_a_row_that_is_not_finite_is_refused_when_it_is_read(
    tmp_path: Path, of_any_size: None, checked: bool
) -> None:
    directory = write_model(tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        if "model.embed_tokens.weight" in (tensors := load_file(file)):
            tensors["model.embed_tokens.weight"][17, 3] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    with opened(settings(directory, tmp_path, check_base_weights=checked)) as model:
        embeddings = model.skeleton.get_input_embeddings()
        assert bool(embeddings(torch.tensor([[16, 18]])).isfinite().all())
        if not checked:
            assert not bool(embeddings(torch.tensor([[16, 17]])).isfinite().all())
            return
        with pytest.raises(NonFiniteError, match=r"model\.embed_tokens\.weight") as caught:
            embeddings(torch.tensor([[16, 17]]))
        assert "element [17, 3]" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_target_modules": ["embed_tokens", "q_proj"]},
        {"lora_modules_to_save": ["embed_tokens"]},
        {"lora_trainable_token_indices": [1, 2]},
    ],
    ids=str,
)
def test_what_trains_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    directory = write_model(tmp_path / "model")
    tokens = batch(1)
    found = []
    for least in (1 << 30, 0):
        monkeypatch.setattr(row_tables, "LEAST_BYTES", least)
        config = settings(directory, tmp_path, **changes)
        with opened(config) as model:
            assert not model.split.tables.names
            model.adapter.loss([tokens]).backward()
            found.append(
                {
                    name: one.grad
                    for name, one in model.lora_manager.named_parameters()
                    if one.requires_grad
                }
            )
            # a page, of another allocation
            assert abs(draw_up(config).outside_bytes - model.outer.nbytes) <= 4096
            assert model.generate("the miller", max_new_tokens=2)
    assert found[0].keys() == found[1].keys()
    assert all(
        torch.equal(one, found[1][name]) for name, one in found[0].items() if one is not None
    )


def test_weights_that_train_themselves_are_whole(tmp_path: Path, of_any_size: None) -> None:
    directory = write_model(tmp_path / "model")
    config = settings(directory, tmp_path)
    with opened(config, adapter=False) as model:
        model.keep_whole(lambda name: "layers" not in name)
        embeddings = model.skeleton.get_input_embeddings()
        assert torch.equal(embeddings.weight, whole_table(directory))
        assert torch.equal(
            embeddings(torch.tensor([[3, 1]])), whole_table(directory)[torch.tensor([[3, 1]])]
        )
        planned = draw_up(config, chosen=lambda _: lambda name: "layers" not in name)
        assert abs(planned.outside_bytes - model.outer.nbytes) <= 4096


def test_tied_to_the_head_it_is_whole_and_the_plan_says_why(
    tmp_path: Path, of_any_size: None
) -> None:
    blueprint = draw_up(
        settings(write_model(tmp_path / "model", tie_word_embeddings=True), tmp_path)
    )
    assert not blueprint.tables.names
    assert any("also the head's weight" in note for note in blueprint.tables.notes)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_device_holds_that_much_less_and_the_plan_says_so(tmp_path: Path, place: str) -> None:
    model = write_model(tmp_path / "model")
    sizes = {}
    for where in (place, "device"):
        config = settings(model, tmp_path, embeddings=where)
        opened = LemaModel(config)
        sizes[where] = opened.outer.nbytes
        assert draw_up(config).outside_bytes == opened.outer.nbytes
        if where == place:
            opened.initialize_lora()
            weight = opened.split.tables.nbytes
            assert opened.generate("the miller", max_new_tokens=4)
        opened.close()
    assert 0 <= sizes["device"] - sizes[place] - weight < 4096
    assert weight == 300 * 32 * 4


@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_host_asks_no_device_for_tokens(tmp_path: Path, place: str) -> None:
    """What a micro-batch's tokens are is known on the host; those that only fill a place are not
    looked up at all.
    """
    looked_up: list[int] = []
    with opened(settings(write_model(tmp_path / "model"), tmp_path, embeddings=place)) as model:
        (table,) = model.split.tables._tables.values()
        batch = {name: torch.arange(2, 14).reshape(2, 6) for name in ("input_ids", "labels")}
        model.adapter.loss([batch]).backward()  # the first step learns how the model is made
        fetch = table.fetch

        def watched(ids: torch.Tensor) -> torch.Tensor:
            looked_up.append(len(ids))
            return fetch(ids)

        table.fetch = watched
        model.adapter.loss([batch, batch]).backward()
    assert looked_up == [12, 12]


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ({"tie_word_embeddings": True}, {}, "they are also the head's weight"),
        ({}, {"lora_target_modules": ["embed_tokens", "q_proj"]}, "they train or have an adapter"),
        ({}, {"lora_modules_to_save": ["embed_tokens"]}, "they train or have an adapter"),
        ({}, {"lora_trainable_token_indices": [1, 2]}, "trains rows of the embeddings"),
    ],
    ids=str,
)
def test_where_they_cannot_it_is_said(
    tmp_path: Path, model: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    directory = write_model(tmp_path / "model", **model)
    with pytest.raises(ConfigError, match=why) as caught:
        LemaModel(settings(directory, tmp_path, embeddings="host", **changes)).initialize_lora()
    assert "embeddings" in str(caught.value)
