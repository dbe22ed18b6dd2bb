"""An adapter is written in the parallel library's shards as that library writes it, or refused
in words.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from foreignadapter import Shape, metadata_of, of_rank
from safetensors.torch import load_file, save_file
from shardedadapters import (
    GOLDEN,
    HEADS,
    INTERMEDIATE,
    LAYERS,
    TARGETS,
    VOCABULARY,
    adapters,
    assert_same,
    config_of,
    golden,
    model_config,
    rank_file,
    with_one_a,
    write_adapter,
    write_model,
)
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from lema.errors import AdapterError, ConfigError, ModelError
from lema_neuron.shards.describe import describe
from lema_tools.shards.convert import consolidate_adapter, shard_adapter

FORMAT = "optimum-neuron"


@pytest.fixture(scope="module")
def adapter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    return adapters(tmp_path_factory)


@pytest.fixture
def fusible(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> Callable[[int], Path]:
    """An adapter whose projections share an A where they are to be fused."""

    def make(kv_heads: int) -> Path:
        adapter = Path(shutil.copytree(adapter_of(kv_heads)[1], tmp_path / "adapter"))
        with_one_a(adapter)
        return adapter

    return make


def load(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, weights_only=True)
    return found


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(found[name], tensor), name


@golden
def test_the_shards_of_a_real_run_are_written_again_as_they_were(tmp_path: Path) -> None:
    consolidate_adapter(GOLDEN, tmp_path / "whole")
    shard_adapter(
        tmp_path / "whole", tmp_path / "out", 2, model=str(GOLDEN / "base_model"), format=FORMAT
    )
    theirs = GOLDEN / "adapter_default"
    files = sorted(file.relative_to(theirs) for file in theirs.rglob("*") if file.is_file())
    assert files == sorted(
        file.relative_to(tmp_path / "out")
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    )
    for file in files:
        if file.suffix == ".pt":
            assert_alike(load(tmp_path / "out" / file), load(theirs / file))
        else:
            assert (tmp_path / "out" / file).read_text().rstrip("\n") == (
                theirs / file
            ).read_text().rstrip("\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["tile", "interleave"])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 1), (4, 2), (8, 4), (8, 1), (4, 4), (1, 2)])
def test_every_rank_holds_what_the_documented_rules_say(
    tp: int, kv_heads: int, where: str, fusible: Callable[[int], Path], tmp_path: Path
) -> None:
    adapter = fusible(kv_heads)
    tensors = load_file(adapter / "adapter_model.safetensors")
    shape = Shape(tp, HEADS, kv_heads, max(1, tp // kv_heads), where=where)
    shard_adapter(adapter, tmp_path / "out", tp, kv_layout=where, format=FORMAT)
    for rank in range(tp):
        held = of_rank(tensors, shape, rank, range(LAYERS))
        found = load(rank_file(tmp_path / "out", rank))
        assert_alike(dict(sorted(found.items())), dict(sorted(held.items())))
    content = json.loads((tmp_path / "out/adapter_shards/mp_metadata_pp_rank_0.json").read_text())
    expected = metadata_of(held, shape, range(LAYERS), {"intermediate": INTERMEDIATE})
    assert {name: content["parameters"][name] for name in expected["parameters"]} == expected[
        "parameters"
    ]
    specs = [owner for owner in content["model_weight_transformation_specs"] if owner["specs"]]
    assert specs == expected["model_weight_transformation_specs"]
    consolidate_adapter(tmp_path / "out", tmp_path / "whole")
    assert_same(tmp_path / "whole", tensors)
    assert config_of(tmp_path / "whole") == config_of(adapter)


def test_a_vocabulary_that_does_not_divide_evenly_is_padded_and_read_without_padding(
    tmp_path: Path,
) -> None:
    model = write_model(model_config(4), tmp_path / "model")
    adapter = write_adapter(
        model, tmp_path / "adapter", targets=[*TARGETS, "lm_head", "embed_tokens"]
    )
    tensors = with_one_a(adapter)
    shard_adapter(adapter, tmp_path / "out", 4, format=FORMAT)
    held = load(rank_file(tmp_path / "out", 3))["base_model.model.lm_head.lora_B.weight"]
    assert held.shape[0] * 4 > VOCABULARY
    assert not held[VOCABULARY % 4 - 4 :].any()
    consolidate_adapter(tmp_path / "out", tmp_path / "whole")
    assert_same(tmp_path / "whole", tensors)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "part of what is fused": (
        {"targets": ["q_proj", "v_proj"]},
        AdapterError,
        "q_proj, k_proj, v_proj are one module",
    ),
    "a module that trains whole": (
        {"modules_to_save": ["lm_head"]},
        AdapterError,
        "this format cannot hold such a tensor",
    ),
    "scalings of their own": (
        {"alpha_pattern": {"k_proj": 3}},
        AdapterError,
        "alpha_pattern names modules that may be",
    ),
    "magnitudes": ({"use_dora": True}, AdapterError, "this format cannot hold such a tensor"),
    "an A of each projection's": (
        {},
        AdapterError,
        "have an A each, and in this format they share one",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_format_has_no_place_for_is_refused(
    why: str, adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    options, kind, said = REFUSED[why]
    adapter = write_adapter(adapter_of(2)[0], tmp_path / "adapter", **options)
    with pytest.raises(kind, match=said):
        shard_adapter(adapter, tmp_path / "out", 4, format=FORMAT)
    assert not (tmp_path / "out").exists()


def test_an_adapter_or_a_model_of_another_kind_is_refused(
    fusible: Callable[[int], Path], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = MixtralConfig(
        **sizes, num_key_value_heads=2, intermediate_size=32, num_local_experts=2
    )
    sparse = write_adapter(
        write_model(config, tmp_path / "sparse"), tmp_path / "experts", targets=["q_proj"]
    )
    with pytest.raises(ModelError, match="is no module of the models that this format is for"):
        shard_adapter(sparse, tmp_path / "out", 2, format=FORMAT)
    uneven = AutoModelForCausalLM.from_config(tiny_config("dots3_note_text"))
    with pytest.raises(
        ModelError, match="layers have settings of their own: kv_lora_rank, num_attention_heads"
    ):
        describe({}, {}, uneven, 2, "tile")
    adapter = fusible(2)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors |= {
        name.replace("layers.0.", "layers.99."): tensor.clone() for name, tensor in tensors.items()
    }
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="has no module for this tensor"):
        shard_adapter(adapter, tmp_path / "out", 2, format=FORMAT)
    with pytest.raises(ConfigError, match="there is no format of shards called 'pile'"):
        shard_adapter(adapter, tmp_path / "out", 2, format="pile")
    assert not (tmp_path / "out").exists()


def test_the_verb_writes_the_format_that_it_is_given(
    fusible: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = fusible(4)
    assert lema("shard", adapter, tmp_path / "out", "--tp", 4, "--format", FORMAT) == 0
    assert rank_file(tmp_path / "out", 3).is_file()
    assert_refused(
        capfd,
        2,
        ["pile", FORMAT],
        "shard",
        adapter,
        tmp_path / "new",
        "--tp",
        4,
        "--format",
        "pile",
    )
