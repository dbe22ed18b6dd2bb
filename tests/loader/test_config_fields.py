"""Fields of a published `config.json` that change how a model runs do to it what they do under
`from_pretrained`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asloaded import (
    edit_config,
    farthest_from_whole,
    llama,
    opened,
    rows,
    step,
    tensors,
    whole,
    whole_step,
    write_model,
)
from everytype import farthest
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.monkey_patching import (
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
)

from lema import LemaConfig, LemaModel
from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare
from lema.errors import ModelError, WeightsError
from lema.model.skeleton import auto_class
from lema.plan.blueprint import draw_up
from lema.plan.work.workload import MicroBatch, measure
from lema.storage import GlobalBinaryIndex
from lema.storage.modelfiles import load_generation_config

CONFIGS = {
    "llama": llama,
    "gpt2": partial(tiny_config, "gpt2"),
    "gemma3": partial(tiny_config, "gemma3"),
}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"gradient_checkpointing": False}], ids=str
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpointing_that_a_config_asks_for_changes_no_number(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(CONFIGS[kind](), tmp_path / "model")
    edit_config(model, gradient_checkpointing=True)
    if inner := json.loads((model / "config.json").read_text()).get("text_config"):
        edit_config(model, text_config=inner | {"gradient_checkpointing": True})
    assert farthest_from_whole(model, rows(12, 9), rows(7), **settings) == 0


@pytest.mark.parametrize(
    "field", [{"return_dict": False}, {"output_hidden_states": True}, {"output_attentions": True}]
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_forms_of_output_that_a_config_asks_for_change_no_number(
    kind: str, field: dict[str, Any], tmp_path: Path
) -> None:
    plain, asking = (write_model(CONFIGS[kind](), tmp_path / name) for name in ("plain", "asking"))
    edit_config(asking, **field)
    if inner := json.loads((asking / "config.json").read_text()).get("text_config"):
        edit_config(asking, text_config=inner | field)
    with (
        opened(plain) as one,
        pytest.warns(UserWarning, match=f"config.json sets {next(iter(field))}, which changes no"),
    ):
        expected = whole(plain, one)
        with opened(asking) as other:
            found = step(other, rows(12, 9))
    assert farthest(found, whole_step(expected, rows(12, 9))) == 0


def test_weights_are_in_the_file_that_a_config_names(tmp_path: Path) -> None:
    model = write_model(llama(), tmp_path / "model")
    (model / "model.safetensors").rename(model / "named.safetensors")
    beside = {name: one + 1 for name, one in load_file(model / "named.safetensors").items()}
    save_file(beside, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, transformers_weights="named.safetensors")
    assert farthest_from_whole(model, rows(12)) == 0
    with opened(model) as streamed:
        streamed.save_pretrained(str(tmp_path / "adapter"))
        expected = whole(model, streamed).merge_and_unload().state_dict()
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    prepared = prepare(model, tmp_path / "prepared").path
    assert not any(
        "transformers_weights" in (one / "config.json").read_text() for one in (merged, prepared)
    )
    loaded = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in loaded.items())
    assert farthest_from_whole(prepared, rows(12)) == 0


@pytest.mark.parametrize("named", ["../model.safetensors", "other.safetensors", "config.json", 3])
def test_a_file_of_weights_that_is_none_is_refused(named: object, tmp_path: Path) -> None:
    model = write_model(llama(), tmp_path / "model")
    edit_config(model, transformers_weights=named)
    with pytest.raises(
        WeightsError,
        match=r"config.json says that the weights are in .*no safetensors file next to it",
    ):
        GlobalBinaryIndex(model)


def test_a_plan_knows_a_model_whose_config_asks_for_checkpointing(tmp_path: Path) -> None:
    plain = write_model(llama(), tmp_path / "model")
    expected = draw_up(LemaConfig(str(plain), device="cpu"))
    work = measure(expected.model, expected.layers, MicroBatch(2, 16), 16)
    edit_config(plain, gradient_checkpointing=True)
    asking = draw_up(LemaConfig(str(plain), device="cpu"))
    assert measure(asking.model, asking.layers, MicroBatch(2, 16), 16) == work


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    """`from_pretrained` attaches it, so the model without it is another one."""
    model = write_model(llama(), tmp_path / "model")
    with opened(model) as streamed:
        streamed.save_pretrained(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_config.json").rename(model / "adapter_config.json")
    for read in (
        lambda: LemaModel(LemaConfig(str(model), device="cpu")),
        lambda: prepare(model, tmp_path / "out"),
    ):
        with pytest.raises(ModelError, match="there is an adapter beside the model"):
            read()


@pytest.mark.parametrize("kind", CONFIGS)
def test_settings_of_generation_in_a_config_are_followed(kind: str, tmp_path: Path) -> None:
    model = write_model(CONFIGS[kind](), tmp_path / "model")
    (model / "generation_config.json").unlink(missing_ok=True)
    edit_config(model, repetition_penalty=1.9)
    found = load_generation_config(model)
    assert found is not None
    loaded = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(model)
    assert found.repetition_penalty == loaded.generation_config.repetition_penalty == 1.9
    assert found.to_dict() == loaded.generation_config.to_dict()


def test_a_tower_that_a_config_fuses_changes_no_number(tmp_path: Path) -> None:
    """Not in a process, either, in which `from_pretrained` has fused it before."""
    model = write_model(tiny_config("qwen3_vl"), tmp_path / "model")
    edit_config(model, fusion_config={"patch_embeddings": True})
    before = get_patch_mapping(), get_checkpoint_conversion_mapping("qwen3_vl")
    try:
        assert farthest_from_whole(model, rows(12, 9)) == 0
        fused = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(model)
        assert any("linear_proj" in name for name in fused.state_dict())
        assert farthest_from_whole(model, rows(12, 9)) == 0
        with opened(model) as streamed:
            streamed.save_pretrained(str(tmp_path / "adapter"))
        assert (
            tensors(merge_adapter(tmp_path / "adapter", tmp_path / "merged")).keys()
            == tensors(model).keys()
        )
    finally:
        clear_patch_mapping()
        register_patch_mapping(before[0])
        register_checkpoint_conversion_mapping("qwen3_vl", before[1] or [], overwrite=True)


@pytest.mark.parametrize("fusions", [{"nothing": True}, {"patch_embeddings": "yes"}], ids=str)
def test_fusions_that_transformers_refuses_are_refused(
    fusions: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(llama(), tmp_path / "model")
    edit_config(model, fusion_config=fusions)
    with pytest.raises(ValueError, match="fusion") as theirs:
        AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ModelError, match="fusion") as mine:
        LemaModel(LemaConfig(str(model), device="cpu"))
    assert str(theirs.value) in str(mine.value)
