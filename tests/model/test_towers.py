"""Of a model that sees images only what text reaches is read, kept and adapted."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from aligned import aligned
from everytype import micro_batches, write_model
from parity import DRAWS, draw_b, trained
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from transformers import AutoModelForImageTextToText

from lema import LemaConfig, LemaModel
from lema.convert.prepare import prepare
from lema.model import meta_model, read_config
from lema.model.skeleton import auto_class, find_towers, is_in
from lema.model.weight_names import match_names
from lema.plan.blueprint import draw_up
from lema.storage import GlobalBinaryIndex
from lema.train.phases.phase import Phase
from lema.train.phases.stage import chosen_by
from lema_cpu import CpuBackend

TYPE = "qwen3_vl"
TOWER = "model.visual"
PAGE = 4096  # every tensor begins at one


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_config(TYPE), tmp_path_factory.mktemp("towers") / "published")


OWN = {"device_memory": None, "lora_rank": 2, "lora_alpha": 4, "seed": 1, "save_steps": 0}


def settings(directory: Path, **changes: object) -> LemaConfig:
    return LemaConfig(str(directory), device="cpu", **OWN | changes)


def test_a_causal_class_goes_before_one_of_images() -> None:
    assert auto_class(tiny_config("gemma3")).__name__ == "AutoModelForCausalLM"
    assert auto_class(tiny_config(TYPE)) is AutoModelForImageTextToText


@pytest.mark.parametrize("model_type", ["llama", "opt", "bart", "gpt2"])
def test_a_model_of_text_has_no_tower(model_type: str) -> None:
    assert find_towers(meta_model(tiny_config(model_type), torch.float32)) == []


def test_what_images_reach_is_neither_read_nor_planned_for(published: Path) -> None:
    model = LemaModel(settings(published), backend=CpuBackend(poison=True))
    tower = (
        sum(parameter.numel() for parameter in model.skeleton.get_submodule(TOWER).parameters()) * 4
    )
    outside = [
        (name, one)
        for name, one in model.skeleton.named_parameters()
        if "language_model.layers" not in name
    ]
    assert find_towers(model.skeleton) == [TOWER]
    assert all(
        one.is_meta or one.stride() == (0,) * one.ndim
        for name, one in outside
        if is_in(name, [TOWER])
    )
    assert not any(one.is_meta for name, one in outside if not is_in(name, [TOWER]))
    whole = sum(record.nbytes for record in model.records.values())
    layers = sum(
        record.nbytes for name, record in model.records.items() if "language_model.layers" in name
    )
    assert model.outer.nbytes <= whole - layers - tower + 3 * PAGE
    assert draw_up(settings(published)).outside_bytes == model.outer.nbytes
    model.close()


def test_a_checkpoint_without_towers_is_complete(published: Path, tmp_path: Path) -> None:
    weights = {
        name: one
        for name, one in load_file(published / "model.safetensors").items()
        if TOWER not in name
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = match_names(meta_model(read_config(tmp_path)), GlobalBinaryIndex(tmp_path))
    assert records.keys() >= {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    LemaModel(settings(tmp_path), backend=CpuBackend()).close()


@pytest.mark.parametrize(
    ("targets", "excluded"),
    [(["q_proj", "qkv"], None), ("all-linear", ["v_proj"]), (r".*(qkv|q_proj)", r".*\.0\..*")],
)
def test_named_targets_are_those_of_the_text(
    published: Path, tmp_path: Path, targets: list[str] | str, excluded: list[str] | str | None
) -> None:
    """PEFT would adapt linears of those names in the tower too; what is saved says that it must
    not.
    """
    config = settings(published, lora_target_modules=targets, lora_exclude_modules=excluded)
    model = LemaModel(config, backend=CpuBackend(poison=True))
    model.initialize_lora()
    names = trained(model.lora_manager)
    assert names
    assert not any(TOWER in name for name in names)
    draw_b(model.lora_manager)
    torch.manual_seed(DRAWS)
    loss = model.adapter.loss(micro_batches()[:1])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in names.items()}
    model.save_pretrained(tmp_path / "adapter")
    model.close()
    assert (
        "visual"
        in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["exclude_modules"]
    )
    LemaModel.from_pretrained(tmp_path / "adapter", backend=CpuBackend()).close()

    base = aligned(AutoModelForImageTextToText.from_pretrained(published, dtype=torch.float32))
    whole = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    whole.train()
    batch = micro_batches()[0]
    targets_of = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    logits = whole(input_ids=batch["input_ids"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_of.flatten())
    expected.backward()
    assert torch.equal(loss.detach(), expected.detach())
    assert trained(whole).keys() == gradients.keys()
    assert all(torch.equal(gradients[name], one.grad) for name, one in trained(whole).items())


def test_a_prepared_copy_keeps_the_towers_and_trains_alike(published: Path, tmp_path: Path) -> None:
    prepared = prepare(published, tmp_path / "prepared").path
    skeleton = meta_model(read_config(prepared))
    assert any(is_in(name, [TOWER]) for name in match_names(skeleton, GlobalBinaryIndex(prepared)))
    losses = []
    for directory in (published, prepared):
        model = LemaModel(settings(directory), backend=CpuBackend(poison=True))
        model.initialize_lora()
        losses.append(model.adapter.loss(micro_batches()).detach())
        model.close()
    assert torch.equal(*losses)


def test_all_weights_train_but_those_that_text_does_not_reach(published: Path) -> None:
    skeleton = meta_model(read_config(published))
    chosen = chosen_by(
        Phase(trains="full", tokens=1, mixture={"text": 1.0}, learning_rate=1e-3), skeleton
    )
    assert {name for name, _ in skeleton.named_parameters() if not chosen(name)} == {
        name for name, _ in skeleton.named_parameters() if is_in(name, [TOWER])
    }
