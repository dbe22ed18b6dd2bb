"""The parallel library's shards of an adapter become PEFT's files, however they were saved; no
code in them is run.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreignadapter import ATTENTION, EMBEDDING, MLP, Shape, write_foreign
from safetensors.torch import load_file
from shardedadapters import (
    GOLDEN,
    HEADS,
    HIDDEN,
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
    rank_file,
    with_one_a,
    write_foreign_of,
)

from lema.errors import AdapterError, ConfigError, WeightsError
from lema_tools.shards.convert import consolidate_adapter


@pytest.fixture(scope="module")
def adapter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    return adapters(tmp_path_factory)


@golden
@pytest.mark.parametrize("inside", ["", "adapter_default", "adapter_default/adapter_shards"])
def test_the_adapter_of_a_real_run_is_what_its_own_library_makes_of_it(
    inside: str, tmp_path: Path
) -> None:
    made = consolidate_adapter(GOLDEN / inside, tmp_path / "out")
    assert (made.tp, made.num_tensors, made.differing) == (2, 28, {})
    assert_same(tmp_path / "out", load_file(GOLDEN / "consolidated/adapter_model.safetensors"))
    assert config_of(tmp_path / "out") == config_of(GOLDEN / "consolidated")


SHAPES = [
    Shape(1, HEADS, 2),
    Shape(2, HEADS, 1, 2),
    Shape(4, HEADS, 2, 2),
    Shape(4, HEADS, 1, 4),
    Shape(8, HEADS, 4, 2),
    Shape(8, HEADS, 2, 4),
    Shape(4, HEADS, 4, 1),
    Shape(4, HEADS, 4, 2),  # replicated more often than need be: two heads of keys on a rank
    Shape(8, HEADS, 1, 8),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fuse_qkv", [False, True])
def test_foreign_shards_become_the_adapter_they_were_cut_from(
    shape: Shape, fuse_qkv: bool, adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, adapter = adapter_of(shape.kv_heads)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    shape = Shape(shape.tp, shape.heads, shape.kv_heads, shape.copies, fuse_qkv=fuse_qkv)
    given = write_foreign(tmp_path, tensors, config_of(adapter), shape, stages=2 if fuse_qkv else 1)
    made = consolidate_adapter(given, tmp_path / "out")
    assert (made.tp, made.base) == (shape.tp, str(model))  # whose shapes they are
    assert_same(tmp_path / "out", tensors)
    assert config_of(tmp_path / "out") == config_of(adapter)
    if shape.tp == 8:
        assert torch.equal(logits(model, tmp_path / "out"), logits(model, adapter))


def test_tensors_in_files_of_their_own_are_found(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = adapter_of(2)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    generator = torch.Generator().manual_seed(1)
    tensors[f"{EMBEDDING}.lora_embedding_A"] = torch.randn(RANK, VOCABULARY, generator=generator)
    tensors[f"{EMBEDDING}.lora_embedding_B"] = torch.randn(HIDDEN, RANK, generator=generator)
    given = write_foreign(
        tmp_path, tensors, config_of(adapter), Shape(4, HEADS, 2, 2), stages=4, references=True
    )
    consolidate_adapter(given, tmp_path / "out")
    assert_same(tmp_path / "out", tensors)
    part = next(given.glob("adapter_shards/model/*.tensors/tensor_3.pt"))
    part.unlink()
    with pytest.raises(AdapterError, match=r"tensor_3\.pt is missing"):
        consolidate_adapter(given, tmp_path / "other")


def test_the_other_order_of_replicas_is_read_if_it_is_said(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = adapter_of(2)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    given = write_foreign(
        tmp_path, tensors, config_of(adapter), Shape(4, HEADS, 2, 2, where="interleave")
    )
    with pytest.raises(AdapterError, match="rank 2 differs from rank 0") as caught:
        consolidate_adapter(given, tmp_path / "out")
    assert "--kv-layout" in caught.value.how
    consolidate_adapter(given, tmp_path / "out", kv_layout="interleave")
    assert_same(tmp_path / "out", tensors)
    metadata = given / "adapter_shards/mp_metadata_pp_rank_0.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "kv_layout": "interleave"}))
    consolidate_adapter(given, tmp_path / "again")
    assert_same(tmp_path / "again", tensors)
    with pytest.raises(ConfigError, match="is not an order of replicas"):
        consolidate_adapter(given, tmp_path / "other", kv_layout="pile")


def test_a_config_that_names_fused_modules_is_made_to_name_projections(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = adapter_of(2)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    config = {
        **config_of(adapter),
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    }
    given = write_foreign(tmp_path, tensors, config, Shape(4, HEADS, 2, 2))
    consolidate_adapter(given, tmp_path / "out")
    assert config_of(tmp_path / "out")["target_modules"] == sorted(TARGETS)
    (given / "adapter_config.json").write_text(
        json.dumps({**config, "alpha_pattern": {"qkv_proj": 3}})
    )
    with pytest.raises(AdapterError, match="alpha_pattern names qkv_proj"):
        consolidate_adapter(given, tmp_path / "other")


@pytest.fixture
def foreign(adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path) -> Path:
    return write_foreign_of(adapter_of(2)[1], tmp_path)


def test_modules_that_train_whole_are_put_together_as_they_are_partitioned(
    foreign: Path, tmp_path: Path
) -> None:
    without_base(foreign)
    head = "base_model.model.lm_head.weight"
    packed = f"{MLP.format(0)}.packed.weight"
    full = torch.randn(16, 3, generator=torch.Generator().manual_seed(8))
    for rank in range(4):
        change(foreign, rank, head, full[rank * 4 : rank * 4 + 4])
        change(
            foreign,
            rank,
            packed,
            torch.cat([full[rank * 2 : rank * 2 + 2], full[8 + rank * 2 : 10 + rank * 2]]),
        )
    cut = {"tensor_model_parallel": True, "partition_dim": 0, "num_partitions": 4}

    def describe(content: Any) -> None:
        of_head = "base_model.model.lm_head.modules_to_save.default.weight"
        content["parameters"][of_head] = {**cut, "partition_stride": 1}
        content["parameters"][packed] = {**cut, "partition_stride": 2}

    edit_metadata(foreign, describe)
    consolidate_adapter(foreign, tmp_path / "out")
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    assert torch.equal(found[head], full)
    assert torch.equal(found[packed], full)


@pytest.mark.parametrize(
    ("name", "rank", "first"),
    [
        (f"{ATTENTION.format(3)}.qkv_proj.lora_A.weight", 2, 0),
        (f"{ATTENTION.format(3)}.qkv_proj.lora_B.weight_v", 3, 1),
        (f"{MLP.format(7)}.down_proj.lora_B.weight", 1, 0),
    ],
)
def test_replicas_that_drifted_are_refused_unless_the_first_are_asked_for(
    name: str, rank: int, first: int, foreign: Path, tmp_path: Path
) -> None:
    consolidate_adapter(foreign, tmp_path / "sound")
    held = torch.load(rank_file(foreign, rank), weights_only=True)[name]
    held[1, 1] += 0.25
    change(foreign, rank, name, held)
    with pytest.raises(
        AdapterError, match=f"rank {rank} differs from rank {first} by up to 0.25"
    ) as caught:
        consolidate_adapter(foreign, tmp_path / "out")
    assert caught.value.where == name
    assert not (tmp_path / "out").exists()
    made = consolidate_adapter(foreign, tmp_path / "out", check=False)
    ((which, (difference,)),) = made.differing.items()
    assert (which, difference.first, difference.second, difference.largest) == (
        name,
        first,
        rank,
        0.25,
    )
    assert_same(tmp_path / "out", load_file(tmp_path / "sound/adapter_model.safetensors"))


def test_an_adapter_of_the_head_and_a_weight_that_two_stages_share_are_put_together(
    adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter = Path(shutil.copytree(adapter_of(2)[1], tmp_path / "adapter"))
    tensors = with_one_a(adapter)
    head = "base_model.model.lm_head"
    given = write_foreign(tmp_path, tensors, config_of(adapter), Shape(2, HEADS, 2), stages=2)
    made = torch.Generator().manual_seed(4)
    sizes = {f"{head}.lora_A.weight": (RANK, HIDDEN), f"{head}.lora_B.weight": (VOCABULARY, RANK)}
    new = {name: torch.randn(size, generator=made) for name, size in sizes.items()}
    # trained whole, and in both
    new["base_model.model.model.norm.weight"] = torch.randn(HIDDEN, generator=made)
    for stage in range(2):
        described = given / f"adapter_shards/mp_metadata_pp_rank_{stage}.json"
        content = json.loads(described.read_text())
        for name, tensor in new.items():
            cut = name.endswith("lora_B.weight")
            if stage == 0 and ".lora_" in name:
                continue
            spelt = name.replace(".weight", ".default.weight") if ".lora_" in name else name
            how = {"partition_dim": 0, "partition_stride": 1, "num_partitions": 2} if cut else {}
            content["parameters"][spelt] = {"tensor_model_parallel": cut, **how}
            for rank in range(2):
                file = (
                    given
                    / f"adapter_shards/model/dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt"
                )
                held = torch.load(file, weights_only=True)
                held[name] = tensor.chunk(2)[rank].clone() if cut else tensor.clone()
                torch.save(held, file)
        described.write_text(json.dumps(content))
    consolidate_adapter(given, tmp_path / "out")
    assert_same(tmp_path / "out", {**tensors, **new})
    torch.save({**held, "base_model.model.model.norm.weight": torch.zeros(HIDDEN)}, file)
    with pytest.raises(AdapterError, match="differs from rank 0"):
        consolidate_adapter(given, tmp_path / "other")
    for rank in range(2):
        file = given / f"adapter_shards/model/dp_rank_00_tp_rank_{rank:02}_pp_rank_01.pt"
        torch.save(
            {
                **torch.load(file, weights_only=True),
                "base_model.model.model.norm.weight": torch.ones(1),
            },
            file,
        )
    with pytest.raises(AdapterError, match="occurs twice"):
        consolidate_adapter(given, tmp_path / "other")


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "fewer heads of keys": (
        lambda c: c.update(num_key_value_heads=1),
        r"it is \[8, 3\], and in .* it would be \[4, 3\]",
    ),
    "another width": (
        lambda c: c.update(intermediate_size=32),
        r"would be \[3, 32\]|would be \[32, 3\]",
    ),
    "fewer layers": (lambda c: c.update(num_hidden_layers=4), "has no module for this tensor"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_its_base_model_is_refused(
    misfit: str, foreign: Path, adapter_of: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    change_it, said = MISFITS[misfit]
    config = json.loads((adapter_of(2)[0] / "config.json").read_text())
    change_it(config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=said):
        consolidate_adapter(foreign, tmp_path / "out", model=str(tmp_path / "model"))
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_is_not_here_is_said_and_one_that_is_named_must_be(
    foreign: Path, tmp_path: Path
) -> None:
    without_base(foreign)
    assert consolidate_adapter(foreign, tmp_path / "out").base is None
    with pytest.raises(WeightsError, match="no config of the base model"):
        consolidate_adapter(foreign, tmp_path / "other", model="nobody/nothing")


class Touch:
    """A pickle of this makes a file when it is loaded by one who trusts it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["shard", "reference", "legacy"])
def test_code_in_a_shard_is_refused_and_not_run(place: str, foreign: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    file = rank_file(foreign, 1)
    if place == "legacy":
        file.write_bytes(pickle.dumps({"a": Touch(trap)}))
    else:
        torch.save({"a": Touch(trap)}, file)
    if place == "reference":
        file.with_name(f"{file.name}.tensors").mkdir()
    with pytest.raises(
        AdapterError, match="is damaged" if place == "legacy" else "and only tensors are loaded"
    ):
        consolidate_adapter(foreign, tmp_path / "out")
    assert not trap.exists()
    assert not (tmp_path / "out").exists()


def without_base(foreign: Path) -> None:
    """Let the adapter name a base model that is not here."""
    file = foreign / "adapter_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "nobody/nothing"})
    )


def edit_metadata(foreign: Path, edit: Callable[[Any], None]) -> None:
    file = foreign / "adapter_shards/mp_metadata_pp_rank_0.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def spec(content: Any, which: int) -> Any:
    """The first attention's (0) or MLP's (1)."""
    return content["model_weight_transformation_specs"][which]["specs"][0]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank is missing": (
        lambda d: rank_file(d, 1).unlink(),
        "dp_rank_00_tp_rank_01_pp_rank_00.pt is missing",
    ),
    "the last rank is missing": (
        lambda d: rank_file(d, 3).unlink(),
        "lay over 4 ranks, and there are shards of 3",
    ),
    "a rank of a hundred million": (
        lambda d: shutil.copy(
            rank_file(d, 0), rank_file(d, 0).with_name("dp_rank_00_tp_rank_99999999_pp_rank_00.pt")
        ),
        "dp_rank_00_tp_rank_04_pp_rank_00.pt is missing",
    ),
    "all are missing": (lambda d: shutil.rmtree(d / "adapter_shards/model"), "no shards here"),
    "cut short": (
        lambda d: rank_file(d, 2).write_bytes(rank_file(d, 2).read_bytes()[:2000]),
        "is damaged",
    ),
    "no tensors": (lambda d: torch.save([1], rank_file(d, 0)), "not a table of tensors"),
    "a number": (lambda d: torch.save({"a": 1}, rank_file(d, 0)), "'a' is not a tensor but int"),
    "a tensor less": (
        lambda d: change(d, 3, f"{O_PROJ}.lora_A.weight", None),
        "rank 0 and rank 3 hold different",
    ),
    "another size": (
        lambda d: change(d, 3, f"{O_PROJ}.lora_A.weight", torch.ones(RANK, 3)),
        "tensors of different shapes or types",
    ),
    "not to its end": (
        lambda d: (d / "adapter_shards/done").unlink(),
        "this checkpoint is incomplete: there is no file",
    ),
    "no config": (
        lambda d: (d / "adapter_config.json").unlink(),
        "there is no adapter_config.json",
    ),
    "another adapter": (
        lambda d: (d / "adapter_config.json").write_text('{"peft_type": "IA3"}'),
        "not the config of a LoRA adapter",
    ),
    "metadata that is none": (
        lambda d: (d / "adapter_shards/mp_metadata_pp_rank_0.json").write_text("{"),
        "does not describe the shards",
    ),
    "no word of a tensor": (
        lambda d: edit_metadata(
            d, lambda c: c["parameters"].pop(f"{O_PROJ}.lora_B.default.weight")
        ),
        f"does not say how {O_PROJ}.lora_B.weight is divided",
    ),
    "an unknown fusion": (
        lambda d: edit_metadata(d, lambda c: spec(c, 0).__setitem__(0, "Knot")),
        "transformed in an unknown way, Knot",
    ),
    "fused along inputs": (
        lambda d: edit_metadata(d, lambda c: spec(c, 1)[1].update(fuse_axis=1)),
        "fused along its inputs",
    ),
    "heads that do not fit": (
        lambda d: edit_metadata(d, lambda c: spec(c, 0)[1].update(kv_size_multiplier=3)),
        "cannot be divided among 4 ranks",
    ),
    "an absurd number of heads": (
        lambda d: edit_metadata(
            d, lambda c: spec(c, 0)[1].update(num_attention_heads=2**39, num_key_value_heads=2)
        ),
        "does not consist of",
    ),
    "a key is missing": (
        lambda d: edit_metadata(d, lambda c: spec(c, 0)[1].pop("tp_size")),
        "does not describe the shards",
    ),
    "cut in another number": (
        lambda d: edit_metadata(
            d,
            lambda c: c["parameters"][f"{MLP.format(0)}.down_proj.lora_A.default.weight"].update(
                num_partitions=2
            ),
        ),
        "for 4 ranks",
    ),
    "an unknown order": (
        lambda d: edit_metadata(d, lambda c: c.update(kv_layout="pile")),
        "replicated in an unknown order",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_foreign_shards_are_refused_in_words(
    damage: str, foreign: Path, tmp_path: Path
) -> None:
    break_it, said = DAMAGE[damage]
    break_it(foreign)
    with pytest.raises(AdapterError) as caught:
        consolidate_adapter(foreign, tmp_path / "out")
    assert said in caught.value.what
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
