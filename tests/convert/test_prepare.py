"""A prepared file holds bit for bit what `from_pretrained` gives, in visit order, without ever
holding the model.
"""

import errno
import json
import os
import re
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import AssembledBytes, LiveBytes
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

import lema.utils.model_utils
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.convert import hubformat, prepare_monolithic_safetensors
from lema.convert import tensors as rewrite
from lema.convert.prepare import prepare
from lema.convert.published import visit_order
from lema.errors import ConfigError, DiskError, ModelError, ReadError, WeightsError
from lema.model import meta_model, read_config
from lema.model.outer_weights import read_stored
from lema.model.weight_names import match_names
from lema.storage import GlobalBinaryIndex, tensorfile
from lema.storage import directio as blockfile
from lema.storage.header import TensorRecord
from lema.storage.index import INDEX_NAME, SINGLE_NAME
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader

SIZES = {"vocab_size": 48, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


def llama(tied: bool = False, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(
        **SIZES, num_key_value_heads=1, num_hidden_layers=layers, tie_word_embeddings=tied
    )


def gpt2() -> GPT2Config:
    return GPT2Config(
        vocab_size=48, n_embd=8, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )


def mixtral(layers: int = 3, **changes: object) -> MixtralConfig:
    settings: dict[str, Any] = SIZES | {
        "num_key_value_heads": 1,
        "num_local_experts": 3,
        "num_hidden_layers": layers,
    }
    return MixtralConfig(**(settings | changes))


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "mixtral tied": lambda: mixtral(tie_word_embeddings=True),
}


def saved(
    config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory, **options)
    return directory


def assert_equal(file: Path, expected: dict[str, torch.Tensor]) -> None:
    stored = load_file(file)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype, name
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("shard", ["4KB", "1GB"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prepared_file_is_what_from_pretrained_gives(
    tmp_path: Path, kind: str, shard: str
) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model", max_shard_size=shard)
    assert (source / INDEX_NAME).exists() == (shard == "4KB")
    file = prepare_monolithic_safetensors(source, tmp_path / "out" / "one.safetensors")
    assert file == tmp_path / "out" / "one.safetensors"
    assert_equal(file, AutoModelForCausalLM.from_pretrained(source).state_dict())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, "bfloat16", "torch.float32"]
)
@pytest.mark.parametrize("kind", ["llama tied", "mixtral"])
def test_a_dtype_asked_for_is_that_of_from_pretrained(
    tmp_path: Path, kind: str, dtype: torch.dtype | str
) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model", dtype=torch.bfloat16)
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    file = prepare_monolithic_safetensors(str(source), tmp_path / "one.safetensors", dtype=dtype)
    assert_equal(file, AutoModelForCausalLM.from_pretrained(source, dtype=wanted).state_dict())


def test_the_dtype_the_config_names_wins_over_the_one_stored(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    file = prepare_monolithic_safetensors(source, tmp_path / "one.safetensors")
    assert_equal(file, AutoModelForCausalLM.from_pretrained(source).state_dict())
    assert {record.dtype for record in GlobalBinaryIndex(file).values()} == {"BF16"}


def test_a_checkpoint_without_the_base_prefix_is_given_it(tmp_path: Path) -> None:
    source = saved(gpt2(), tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    plain = {
        name.removeprefix("transformer."): value
        for name, value in load_file(source / SINGLE_NAME).items()
    }
    save_file(plain, source / SINGLE_NAME, metadata={"format": "pt"})
    assert "h.0.attn.c_attn.weight" in GlobalBinaryIndex(source)
    assert_equal(prepare_monolithic_safetensors(source, tmp_path / "one.safetensors"), expected)


def content(file: Path) -> tuple[Any, bytes]:
    """Return what a file says of its tensors, and their bytes, without the metadata that tells
    where it comes from.
    """
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    whole = file.read_bytes()
    about = json.loads(whole[8:size])
    return {name: one for name, one in about.items() if name != "__metadata__"}, whole[size:]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_in_memory_gives_the_same_file_as_its_directory(tmp_path: Path, kind: str) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source)
    for dtype in (None, torch.bfloat16):
        first = prepare_monolithic_safetensors(source, tmp_path / "a.safetensors", dtype=dtype)
        second = prepare_monolithic_safetensors(model, tmp_path / "b.safetensors", "cpu", dtype)
        assert content(first) == content(second)
        assert (
            GlobalBinaryIndex(first).origin == (str(source), None)
            and GlobalBinaryIndex(second).origin is None
        )
    assert model.dtype == torch.float32


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_are_contiguous_and_in_visit_order(tmp_path: Path, kind: str) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model", max_shard_size="4KB")
    index = GlobalBinaryIndex(prepare_monolithic_safetensors(source, tmp_path / "one.safetensors"))
    names = list(index)
    assert names == visit_order(meta_model(read_config(source)))
    places = [
        part
        for name in names
        for part in [next((p for p in name.split(".") if p.isdigit()), "outside")]
    ]
    runs = [place for i, place in enumerate(places) if i == 0 or places[i - 1] != place]
    assert runs == ["outside", "0", "1", "2", "outside"]
    assert (
        names[0].endswith(("embed_tokens.weight", "wte.weight")) and names[-1] == "lm_head.weight"
    )
    ends = [record.offset + record.nbytes for record in index.values()]
    assert [record.offset for record in index.values()][1:] == ends[:-1]


@pytest.mark.parametrize("kind", CONFIGS)
def test_preparing_twice_changes_nothing(tmp_path: Path, kind: str) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model", max_shard_size="4KB")
    once = prepare(source, tmp_path / "once").path
    twice = prepare(once, tmp_path / "twice").path
    assert GlobalBinaryIndex(once).keys() == GlobalBinaryIndex(source).keys()
    assert (once / SINGLE_NAME).read_bytes() == (twice / SINGLE_NAME).read_bytes()


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell transformers of a published form which a second conversion corrupts, and whose tied
    weight is fused.
    """
    get_checkpoint_conversion_mapping("legacy")  # fills the table
    rules = [
        # square: nothing shows it was done
        WeightConverter("o_proj.weight", "o_proj.weight", [Transpose()]),
        WeightConverter(
            ["embed_tokens.first.weight", "embed_tokens.second.weight"],
            "embed_tokens.weight",
            [Concatenate(dim=0)],
        ),
    ]
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "LlamaForCausalLM", rules)


def as_read(file: Path) -> dict[str, torch.Tensor]:
    """What a model is given of a file beside its config."""
    index = GlobalBinaryIndex(file)
    model = meta_model(read_config(file.parent), torch.float32)
    return {
        name: read_stored(record, torch.float32)
        for name, record in match_names(model, index).items()
    }


@pytest.mark.usefixtures("converted")
def test_what_is_put_together_is_read_as_it_is_and_what_would_be_converted_again_stays_published(
    tmp_path: Path,
) -> None:
    source = saved(llama(tied=True), tmp_path / "model")
    published = load_file(source / SINGLE_NAME)
    assert "model.embed_tokens.second.weight" in published
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    once = prepare(source, source / "once.safetensors").path
    # under its own name, transposed
    turned = {name for name in expected if name.endswith("o_proj.weight")}
    assert_equal(once, expected | {name: published[name] for name in turned})
    twice = prepare(once, source / "twice.safetensors").path
    old = source / "old.safetensors"
    save_file(
        {name: one.clone() for name, one in expected.items()}, old, {"lema.in_memory_names": "true"}
    )
    again = prepare(old, source / "new.safetensors").path
    for file in (once, twice, old, again):
        found = as_read(file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items()), file.name
    assert_equal(again, load_file(once))
    # A directory is as it was published, whatever it is made of.
    for number, made_of in enumerate((source / SINGLE_NAME, once, old)):
        assert_equal(prepare(made_of, tmp_path / f"again{number}").weights, published)


def test_a_buffer_the_checkpoint_need_not_store_gets_the_value_the_model_gives_it(
    tmp_path: Path,
) -> None:
    shape: dict[str, Any] = {
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
    }
    heads = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    layers = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "topk_group": 1,
        "num_key_value_heads": 2,
    }
    source = saved(
        AutoConfig.for_model("axk1", **SIZES, **shape, **heads, **layers), tmp_path / "model"
    )
    tensors = load_file(source / SINGLE_NAME)
    without = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("e_score_correction_bias")
    }
    assert len(without) == len(tensors) - 2
    save_file(without, source / SINGLE_NAME, metadata={"format": "pt"})
    prepared = prepare(source, tmp_path / "one.safetensors", dtype="bfloat16")
    assert_equal(
        prepared.path, AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16").state_dict()
    )
    assert prepared.notes()[-1].startswith(
        "2 tensors not stored, so written with the model's own values: model.layers.*."
    )


def assembled_by_prepare(
    monkeypatch: pytest.MonkeyPatch, source: Path, out: Path
) -> tuple[int, int]:
    """The most memory that tensors were put together in at once, and the bytes of one layer."""
    with monkeypatch.context() as patch:
        taken = AssembledBytes(patch)
        file = prepare_monolithic_safetensors(source, out)
    assert taken.now == 0
    return taken.peak, sum(
        r.nbytes for name, r in GlobalBinaryIndex(file).items() if ".layers.0." in name
    )


# Large enough for all that a conversion needs to lie in memory that is counted.
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_local_experts": 8}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converting_takes_less_than_a_layer_however_deep_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for layers in (2, 6):
        source = saved(mixtral(layers, **LARGE), tmp_path / f"{layers}", dtype)
        peak, layer = assembled_by_prepare(monkeypatch, source, tmp_path / f"{layers}.safetensors")
        assert 0 < peak < layer


def test_casting_what_is_converted_takes_less_than_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(mixtral(3, **LARGE), tmp_path / "model")
    with monkeypatch.context() as patch:
        taken = AssembledBytes(patch)
        file = prepare_monolithic_safetensors(
            source, tmp_path / "one.safetensors", dtype="bfloat16"
        )
    assert (
        0
        < taken.peak
        < sum(r.nbytes for name, r in GlobalBinaryIndex(file).items() if ".layers.0." in name)
    )
    assert_equal(file, AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16").state_dict())


@pytest.mark.usefixtures("turned_over")
def test_turning_experts_over_takes_less_than_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(mixtral(3, **LARGE), tmp_path / "model")
    assert GlobalBinaryIndex(source)["model.layers.0.mlp.experts.gate_up_projs"].shape == (
        8,
        256,
        2048,
    )
    peak, layer = assembled_by_prepare(monkeypatch, source, tmp_path / "one.safetensors")
    assert 0 < peak < layer
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert_equal(tmp_path / "one.safetensors", expected)


@pytest.fixture
def turned_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell transformers of a published form in which the experts of a layer are one tensor,
    turned over.
    """
    get_checkpoint_conversion_mapping("legacy")  # fills the table
    rules = [
        WeightConverter(f"mlp.experts.{name}s", f"mlp.experts.{name}", [Transpose(1, 2)])
        for name in ("gate_up_proj", "down_proj")
    ]
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "mixtral", rules)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copying_and_casting_hold_pieces_and_not_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    config = llama(layers=1)
    config.vocab_size = 2_000_000
    source = saved(config, tmp_path / "model")
    pages = blockfile._pages
    mapped = list[int]()
    monkeypatch.setattr(
        blockfile, "_pages", lambda nbytes: (mapped.append(nbytes), pages(nbytes))[1]
    )
    tracemalloc.start()  # sees the buffers read into
    with LiveBytes(tmp_path) as live:  # sees what they are cast to
        prepare_monolithic_safetensors(source, tmp_path / "one.safetensors", dtype=dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    embedding = 2_000_000 * 8 * 4
    assert (live.peak > 0) == (dtype == torch.bfloat16)
    assert peak + live.peak < 4 * tensorfile.PIECE_BYTES
    assert (
        sum(mapped)
        <= blockfile.NUM_CHUNKS * blockfile.CHUNK_BYTES + 4 * blockfile.BLOCK
        < 0.6 * embedding
    )


def test_the_source_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(mixtral(tie_word_embeddings=False), tmp_path / "model", max_shard_size="4KB")
    real = tensorfile.read_into
    read = dict[str, int]()

    def counted(record: TensorRecord, buffer: memoryview, start: int = 0) -> None:
        read[record.name] = read.get(record.name, 0) + len(buffer)
        real(record, buffer, start)

    real_reader = LayerReader.submit
    assembled = list[int]()

    def noted(reader: LayerReader, layer: LayerBytes, *arguments: Any, **options: Any) -> Any:
        assembled.append(layer.read_bytes)
        return real_reader(reader, layer, *arguments, **options)

    monkeypatch.setattr(tensorfile, "read_into", counted)
    monkeypatch.setattr(rewrite, "read_into", counted)
    monkeypatch.setattr(LayerReader, "submit", noted)
    prepare(source, tmp_path / "one.safetensors")
    index = GlobalBinaryIndex(source)
    assert read == {
        name: record.nbytes for name, record in index.items() if ".experts." not in name
    }
    assert sum(assembled) == sum(
        record.nbytes for name, record in index.items() if ".experts." in name
    )


def test_a_source_that_fails_under_way_leaves_nothing(tmp_path: Path) -> None:
    source = saved(mixtral(), tmp_path / "model")
    record = GlobalBinaryIndex(source)["model.layers.1.block_sparse_moe.experts.1.w2.weight"]
    before = set(threading.enumerate())  # other tests may have left theirs to the garbage collector
    meta_model = hubformat.meta_model

    def cut_short(*arguments: Any, **options: Any) -> Any:
        os.truncate(record.file, record.offset)  # after the header was read
        return meta_model(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReadError):
        patch.setattr(hubformat, "meta_model", cut_short)
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("lema-")]


def test_progress_is_of_the_bytes_of_the_file(tmp_path: Path) -> None:
    source = saved(mixtral(), tmp_path / "model")
    seen: list[tuple[int, int]] = []
    prepared = prepare(
        source, tmp_path / "out", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen) and {total for _, total in seen} == {prepared.nbytes}
    assert seen[-1] == (prepared.nbytes, prepared.nbytes)
    assert prepared.path == tmp_path / "out" and prepared.weights == tmp_path / "out" / SINGLE_NAME


def test_what_was_left_out_or_added_is_said_in_a_line_each(tmp_path: Path) -> None:
    source = saved(gpt2(), tmp_path / "model")
    tensors = load_file(source / SINGLE_NAME)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(3)}
    save_file(
        tensors | masks | {"score.weight": torch.ones(2)},
        source / SINGLE_NAME,
        metadata={"format": "pt"},
    )
    assert prepare(source, tmp_path / "one.safetensors").notes() == [
        (
            "3 tensors left out, because transformers does not load them into this type: "
            "transformer.h.*.attn.bias (3)"
        ),
        "1 tensors left out, because the model does not have them: score.weight",
    ]
    assert prepare(AutoModelForCausalLM.from_pretrained(source), tmp_path / "more").notes() == []
    whole = prepare(source, tmp_path / "out")
    assert whole.notes() == ["1 tensors left out, because no class reads them: score.weight"]
    assert_equal(whole.weights, tensors | masks)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(mixtral(), tmp_path / "model")
    capsys.readouterr()
    assert run(app, ["prepare", str(source), str(tmp_path / "out.safetensors")]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("6 tensors rearranged: model.layers.*.mlp.experts.gate_up_proj (3), ")
    assert re.fullmatch(
        rf"wrote {tmp_path / 'out.safetensors'}: [\d.]+ kB in \d+\.\d s, [\d.]+ .?B/s", last
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prepared_directory_loads_with_from_pretrained(tmp_path: Path, kind: str) -> None:
    source = saved(CONFIGS[kind](), tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "code.py").write_text("raise SystemExit")
    out = prepare(source, tmp_path / "out", dtype="bfloat16").path
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        SINGLE_NAME,
    }
    assert {path.name for path in out.iterdir()} == names
    assert (out / "tokenizer.json").read_bytes() == b"{}"


def test_a_model_in_memory_becomes_a_directory(tmp_path: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(gpt2())
    out = prepare(model, tmp_path / "out").path
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_a_single_file_may_be_given(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "model")
    (source / SINGLE_NAME).rename(source / "other.safetensors")
    save_file({"t": torch.ones(1)}, source / "noise.safetensors")
    file = prepare_monolithic_safetensors(
        source / "other.safetensors", tmp_path / "one.safetensors"
    )
    assert "model.norm.weight" in GlobalBinaryIndex(file)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(mixtral(), tmp_path / "model")
    real = os.pwrite
    calls = iter(range(100))

    def full_after_one(*arguments: Any) -> int:
        if next(calls) >= 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(blockfile.os, "pwrite", full_after_one)
    with pytest.raises(DiskError, match="disk is full"):
        prepare(source, tmp_path / "new" / "out")
    assert next(calls) > 1
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "model")
    tensors = load_file(source / SINGLE_NAME)
    save_file(
        {name: value for name, value in tensors.items() if "up_proj" not in name},
        source / SINGLE_NAME,
    )
    with pytest.raises(WeightsError, match="3 missing"):
        prepare_monolithic_safetensors(source, tmp_path / "out" / "one.safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_file": "one.bin"}, "not the name of a .safetensors file"),
        ({"dtype": "float23"}, "no dtype 'float23'"),
        ({"dtype": "int8"}, "'int8' is not a dtype of weights"),
        ({"dtype": torch.int64}, "not a dtype of weights"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments = {"out_file": "one.safetensors"} | options
    with pytest.raises(ConfigError, match=message):
        prepare_monolithic_safetensors(tmp_path, tmp_path / arguments.pop("out_file"), **arguments)


def test_a_model_is_not_prepared_over_itself(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "model")
    with pytest.raises(ConfigError, match="would write over what it reads"):
        prepare(source, source)


def test_a_model_without_weights_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="have no weights"):
        prepare_monolithic_safetensors(meta_model(llama()), tmp_path / "one.safetensors")


def test_a_small_file_that_links_out_of_the_model_is_not_copied(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "model")
    (tmp_path / "secret.json").write_text("secret")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(WeightsError, match="leaves its directory"):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_old_place_of_the_function_still_gives_it() -> None:
    assert lema.utils.model_utils.prepare_monolithic_safetensors is prepare_monolithic_safetensors
