"""PEFT's files become shards, and shards PEFT's files again, and no number is lost either way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from foreignadapter import ATTENTION, EMBEDDING, HEAD_DIM, MLP, Shape, write_foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shardedadapters import (
    GOLDEN,
    HEADS,
    HIDDEN,
    LAYERS,
    O_PROJ,
    RANK,
    TARGETS,
    VOCABULARY,
    adapters,
    assert_same,
    change,
    config_of,
    golden,
    logits,
    model_config,
    rank_file,
    with_one_a,
    write_adapter,
    write_foreign_of,
    write_model,
)
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from lema.backend.layout import consolidate, shard
from lema.config.lemaconfig import CONFIG_NAME
from lema.errors import AdapterError, ConfigError, ModelError
from lema.lora.base import BASE_NAME
from lema.lora.shards import layout_of_tensor, module_of
from lema.model import meta_model
from lema.model.partition import layout_at, layouts_of
from lema_neuron.shards.own import LAYOUTS
from lema_tools.shards.convert import SHARDS, consolidate_adapter, shard_adapter


@pytest.fixture(scope="module")
def adapter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    return adapters(tmp_path_factory)


@golden
@pytest.mark.parametrize("kv_layout", ["tile", "interleave"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_adapter_of_a_real_run_survives_being_cut_up(
    tp: int, kv_layout: str, tmp_path: Path
) -> None:
    whole = GOLDEN / "consolidated"
    shard_adapter(
        whole, tmp_path / "shards", tp, kv_layout=kv_layout, model=str(GOLDEN / "base_model")
    )
    consolidate_adapter(tmp_path / "shards", tmp_path / "out")
    assert_same(tmp_path / "out", load_file(whole / "adapter_model.safetensors"))
    assert config_of(tmp_path / "out") == config_of(whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_layout", ["tile", "interleave"])
@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 8), (2, 4), (2, 8), (4, 2), (8, 8)])
def test_shards_become_the_adapter_again_with_an_a_for_every_projection(
    kv_heads: int,
    tp: int,
    kv_layout: str,
    adapter_of: Callable[[int], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    _, adapter = adapter_of(kv_heads)
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = ATTENTION.format(0)
    assert not torch.equal(
        tensors[f"{first}.q_proj.lora_A.weight"], tensors[f"{first}.k_proj.lora_A.weight"]
    )
    shard_adapter(adapter, tmp_path / "shards", tp, kv_layout=kv_layout)
    files = sorted(file.name for file in (tmp_path / "shards" / SHARDS).iterdir())
    assert files == sorted([LAYOUTS, *(f"tp_{rank:02}.safetensors" for rank in range(tp))])
    consolidate_adapter(tmp_path / "shards", tmp_path / "out")
    assert_same(tmp_path / "out", tensors)
    assert config_of(tmp_path / "out") == config_of(adapter)


@pytest.mark.slow
def test_our_shards_hold_what_the_documented_rules_say(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The same numbers on the same ranks as in shards written without the code under test."""
    _, adapter = adapter_of(2)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    for where in ("tile", "interleave"):
        shape = Shape(4, HEADS, 2, 2, where=where)
        given = write_foreign(tmp_path / where, tensors, config_of(adapter), shape)
        shard_adapter(adapter, tmp_path / f"{where}-shards", 4, kv_layout=where)
        for rank in range(4):
            ours = load_file(tmp_path / f"{where}-shards" / SHARDS / f"tp_{rank:02}.safetensors")
            theirs = torch.load(rank_file(given, rank), weights_only=True)
            for layer in range(LAYERS):
                attention = ATTENTION.format(layer)
                for name in "qkv":
                    expected = theirs[f"{attention}.qkv_proj.lora_B.weight_{name}"]
                    assert torch.equal(ours[f"{attention}.{name}_proj.lora_B.weight"], expected)
                for name in (
                    f"{attention}.o_proj.lora_A.weight",
                    f"{MLP.format(layer)}.down_proj.lora_A.weight",
                ):
                    assert torch.equal(ours[name], theirs[name])


def test_an_adapter_saved_at_one_degree_goes_on_at_another(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, adapter = adapter_of(2)
    shard_adapter(adapter, tmp_path / "eight", 8)
    consolidate_adapter(tmp_path / "eight", tmp_path / "whole")
    for name, source in (("direct", adapter), ("by way of eight", tmp_path / "whole")):
        shard_adapter(source, tmp_path / name, 2, kv_layout="interleave")
    for file in (tmp_path / "direct" / SHARDS).iterdir():
        assert file.read_bytes() == (tmp_path / "by way of eight" / SHARDS / file.name).read_bytes()
    assert torch.equal(logits(model, tmp_path / "whole"), logits(model, adapter))


def test_everything_that_trains_beside_the_matrices_is_kept(tmp_path: Path) -> None:
    """Biases, magnitudes, whole modules, embeddings; a vocabulary that does not divide evenly;
    half precision.
    """
    config = model_config(2)
    config.attention_bias = True
    model = write_model(config, tmp_path / "model")
    adapter = write_adapter(
        model,
        tmp_path / "adapter",
        targets=[*TARGETS, "embed_tokens"],
        bias="lora_only",
        lora_bias=False,
        use_dora=False,
        modules_to_save=["lm_head"],
    )
    for name in (CONFIG_NAME, BASE_NAME):
        (adapter / name).write_text("{}\n")
    tensors = {
        name: tensor.bfloat16() if "o_proj" in name else tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    for layer in range(LAYERS):
        tensors[f"{ATTENTION.format(layer)}.q_proj.lora_magnitude_vector"] = torch.randn(
            HEADS * HEAD_DIM
        )
        tensors[f"{ATTENTION.format(layer)}.o_proj.lora_magnitude_vector"] = torch.randn(HIDDEN)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "base_model.model.lm_head.weight" in tensors
    assert f"{EMBEDDING}.lora_embedding_A" in tensors
    assert any(name.endswith("bias") for name in tensors)
    assert VOCABULARY % 4
    shard_adapter(adapter, tmp_path / "shards", 4)
    held = load_file(tmp_path / "shards" / SHARDS / "tp_03.safetensors")
    assert held["base_model.model.lm_head.weight"].shape == (13, HIDDEN)
    assert held[f"{ATTENTION.format(0)}.q_proj.lora_magnitude_vector"].shape == (
        HEADS * HEAD_DIM // 4,
    )
    consolidate_adapter(tmp_path / "shards", tmp_path / "out")
    assert_same(tmp_path / "out", tensors)
    assert [(tmp_path / "out" / name).read_text() for name in (CONFIG_NAME, BASE_NAME)] == [
        "{}\n",
        "{}\n",
    ]


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([(h, k) for h in (4, 6, 8, 12, 16) for k in range(1, h + 1) if h % k == 0]),
    st.integers(1, 16),
    st.sampled_from(["tile", "interleave"]),
)
def test_a_model_that_can_be_divided_is_and_one_that_cannot_says_what_would_do(
    heads: tuple[int, int], tp: int, kv_layout: str
) -> None:
    queries, keys = heads
    config = LlamaConfig(
        vocab_size=21,
        hidden_size=48,
        intermediate_size=240 * 7,
        num_hidden_layers=1,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=2,
    )
    # Replicated as often as it takes: then every rank has whole heads, and queries for each of
    # them.
    copies = next(m for m in range(1, tp + 1) if tp % m == 0 and keys * m % tp == 0)
    if (queries // keys) % copies or 240 * 7 % tp:
        with pytest.raises(ConfigError, match=r"layers\.0\.") as caught:
            layouts_of(meta_model(config), tp, kv_layout)  # type: ignore[arg-type]
        assert f" {tp}," not in f"{caught.value.how},"
        return
    plan = layouts_of(meta_model(config), tp, kv_layout)  # type: ignore[arg-type]
    widths = {
        "q_proj": (queries * 2, 48),
        "k_proj": (keys * 2, 48),
        "v_proj": (keys * 2, 48),
        "o_proj": (48, queries * 2),
    }
    widths |= {"gate_proj": (1680, 48), "up_proj": (1680, 48), "down_proj": (48, 1680)}
    for name, (outputs, inputs) in widths.items():
        owner = ATTENTION if name[0] in "qkvo" else MLP
        after = name in ("o_proj", "down_proj")
        for leaf, full in (
            ("lora_A.weight", torch.randn(RANK, inputs)),
            ("lora_B.weight", torch.randn(outputs, RANK)),
        ):
            module, found = module_of(f"{owner.format(0)}.{name}.{leaf}")
            assert found == leaf
            layout = layout_of_tensor(leaf, layout_at(module, plan), 2)
            pieces = [shard(full, layout, rank) for rank in range(tp)]
            assert torch.equal(consolidate(pieces, layout), full)
            times = (
                tp
                if (leaf == "lora_A.weight") != after
                else copies
                if name in ("k_proj", "v_proj")
                else 1
            )
            assert sum(piece.numel() for piece in pieces) == full.numel() * times


OWN_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank is missing": (
        lambda d: (d / "tp_01.safetensors").unlink(),
        "tp_01.safetensors is missing",
    ),
    "cut short": (
        lambda d: (d / "tp_00.safetensors").write_bytes(
            (d / "tp_00.safetensors").read_bytes()[:-1]
        ),
        "not the file that was saved",
    ),
    "two ranks are exchanged": (
        lambda d: (d / "tp_00.safetensors").write_bytes((d / "tp_01.safetensors").read_bytes()),
        "not the file that was saved",
    ),
    "no JSON": (lambda d: (d / LAYOUTS).write_text("["), "cannot be read"),
    "another JSON": (lambda d: (d / LAYOUTS).write_text("[]"), "does not describe shards"),
    "newer": (lambda d: edit_layouts(d, lambda c: c.update(version=2)), "version 2"),
    "fewer ranks": (
        lambda d: edit_layouts(d, lambda c: c.update(tp=1)),
        "does not describe 1 ranks",
    ),
    "a tensor less": (
        lambda d: edit_layouts(d, lambda c: c["tensors"].popitem()),
        "other tensors than layout.json",
    ),
    "another shape": (
        lambda d: edit_layouts(d, lambda c: next(iter(c["tensors"].values())).update(shape=[1])),
        "and was [1]",
    ),
    "another layout": (
        lambda d: edit_layouts(d, lambda c: next(iter(c["tensors"].values())).update(kind="heap")),
        "no layout of a tensor",
    ),
}


def edit_layouts(directory: Path, edit: Callable[[Any], Any]) -> None:
    content = json.loads((directory / LAYOUTS).read_text())
    edit(content)
    (directory / LAYOUTS).write_text(json.dumps(content))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", OWN_DAMAGE)
def test_damaged_shards_are_refused_in_words(
    damage: str, adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    break_it, said = OWN_DAMAGE[damage]
    shard_adapter(adapter_of(4)[1], tmp_path / "shards", 2)
    break_it(tmp_path / "shards" / SHARDS)
    with pytest.raises(AdapterError) as caught:
        consolidate_adapter(tmp_path / "shards", tmp_path / "out")
    assert said in caught.value.what
    assert not (tmp_path / "out").exists()


@golden
def test_the_older_file_of_peft_is_cut_up_as_the_newer(tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(GOLDEN / "consolidated", older)
    tensors = load_file(older / "adapter_model.safetensors")
    (older / "adapter_model.safetensors").unlink()
    torch.save(tensors, older / "adapter_model.bin")
    shard_adapter(older, tmp_path / "shards", 2, model=str(GOLDEN / "base_model"))
    consolidate_adapter(tmp_path / "shards", tmp_path / "out")
    assert_same(tmp_path / "out", tensors)


def test_what_no_plan_covers_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4}
    sparse = write_model(
        MixtralConfig(**sizes, num_key_value_heads=2, intermediate_size=32, num_local_experts=2),
        tmp_path / "sparse",
    )
    adapter = write_adapter(sparse, tmp_path / "covered", targets=["q_proj", "o_proj"])
    shard_adapter(adapter, tmp_path / "shards", 2)
    experts = write_adapter(
        sparse, tmp_path / "experts", targets=["q_proj"], modules_to_save=["gate"]
    )
    with pytest.raises(
        ModelError, match=r"does not define how model\.layers\.0\.mlp\.gate lies"
    ) as caught:
        shard_adapter(experts, tmp_path / "out", 2)
    assert "tensor base_model.model.model.layers.0.mlp.gate" in caught.value.where
    plain = write_model(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=8, n_head=4), tmp_path / "plain"
    )
    without = write_adapter(plain, tmp_path / "without", targets=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(ModelError, match="no tensor-parallel plan"):
        shard_adapter(without, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def test_the_verbs(
    adapter_of: Callable[[int], tuple[Path, Path]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, adapter = adapter_of(2)
    foreign = write_foreign_of(adapter, tmp_path)
    assert lema("shard", adapter, tmp_path / "shards", "--tp", 4, "--model", model) == 0
    assert lema("consolidate", tmp_path / "shards", tmp_path / "whole") == 0
    assert f"wrote {tmp_path / 'whole'}: 112 tensors, of 4 ranks" in capfd.readouterr().out
    assert_same(tmp_path / "whole", load_file(adapter / "adapter_model.safetensors"))
    change(foreign, 2, f"{O_PROJ}.lora_B.weight", torch.ones(HIDDEN, RANK))
    assert_refused(
        capfd,
        3,
        ["rank 2 differs from rank 0", O_PROJ, "--take-first"],
        "consolidate",
        foreign,
        tmp_path / "out",
    )
    assert lema("consolidate", foreign, tmp_path / "out", "--take-first") == 0
    assert (
        f"replicas differ in {O_PROJ}.lora_B.weight: rank 2 differs from rank 0"
        in capfd.readouterr().err
    )
    (tmp_path / "config").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config")
    assert (
        lema("shard", adapter, tmp_path / "by config", "--tp", 2, "--model", tmp_path / "config")
        == 0
    )
    refusals: list[tuple[int, list[str], tuple[Any, ...]]] = [
        (2, ["the directory is not empty"], ("consolidate", foreign, tmp_path / "whole")),
        (3, ["this adapter is already whole"], ("consolidate", adapter, tmp_path / "new")),
        (3, ["no shards of an adapter"], ("consolidate", model, tmp_path / "new")),
        (2, ["use a tp of 1, 2, 4, 8", "q_proj"], ("shard", adapter, tmp_path / "new", "--tp", 3)),
        (
            3,
            ["no config of the base model", "--model"],
            ("shard", adapter, tmp_path / "new", "--tp", 2, "--model", "no/such"),
        ),
        (
            2,
            ["is not an order of replicas"],
            ("shard", adapter, tmp_path / "new", "--tp", 2, "--kv-layout", "pile"),
        ),
        (
            2,
            ["these shards record their layout"],
            ("consolidate", tmp_path / "shards", tmp_path / "new", "--kv-layout", "tile"),
        ),
        (3, ["adapter_config.json"], ("shard", model, tmp_path / "new", "--tp", 2)),
    ]
    for code, words, arguments in refusals:
        assert_refused(capfd, code, words, *arguments)
    two = tmp_path / "two"
    for name in ("adapter_default", "adapter_other"):
        shutil.copytree(foreign, two / name)
    assert_refused(
        capfd,
        3,
        ["2 adapters", "adapter_default, adapter_other"],
        "consolidate",
        two,
        tmp_path / "new",
    )
    assert not (tmp_path / "new").exists()
