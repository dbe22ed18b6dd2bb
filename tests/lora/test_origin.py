"""An adapter that was trained on a prepared directory names what that was made of, which others
can load.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import lema
from hubcache import COMMIT, files_of, write_cache
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from smallrun import settings, token_rows, write_model
from transformers import AutoModelForCausalLM

from lema import LemaModel
from lema.convert.prepare import prepare
from lema.errors import AdapterError
from lema.lora.base import base_of, check_base
from lema.storage import GlobalBinaryIndex
from lema.storage.verify import base_fingerprint

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # rows as long as blocks of four bits


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model `org/tiny` into the hub's cache; return its snapshot."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return write_cache(cache, files_of(write_model(tmp_path / "model", **WIDE)))


def named(directory: Path) -> dict[str, Any]:
    """Return what an adapter says its base is: to PEFT, and to LEMA."""
    peft, own = (
        json.loads((directory / f"{name}_config.json").read_text()) for name in ("adapter", "lema")
    )
    return {
        "peft": (peft["base_model_name_or_path"], peft["revision"]),
        "own": own["model_name_or_path"],
    }


@pytest.mark.parametrize("kind", ["nf4", None])
def test_an_adapter_names_the_model_that_its_base_was_prepared_from(
    kind: str | None, hub: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    out = tmp_path / "out"
    assert lema("prepare", "org/tiny", base, *(["--quantize", kind] if kind else [])) == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in token_rows(8)))
    file = tmp_path / "run.yaml"
    config = settings(base, out, save_steps=2, max_steps=4, eval_split=2)
    written = config.model_dump(exclude_unset=True, mode="json") | {"train_data": str(rows)}
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in written.items()))
    assert lema("train", file, "--set", "max_steps=2") == 0 and lema("train", file, "--resume") == 0

    expected = {"peft": ("org/tiny", COMMIT), "own": str(base)}
    assert named(out) == expected and named(out / "checkpoint-2") == expected
    assert "base_model: org/tiny" in (out / "README.md").read_text()
    whole = AutoModelForCausalLM.from_pretrained("org/tiny", cache_dir=tmp_path / "cache")
    adapted = PeftModel.from_pretrained(whole, out)
    ids = torch.tensor([token_rows(1)[0]["input_ids"]])
    with adapted.disable_adapter():
        plain = adapted(ids).logits
    assert not torch.equal(adapted(ids).logits, plain)

    capfd.readouterr()
    assert lema("merge", out, tmp_path / "merged") == 0
    assert lema("eval", out, "--data", rows) == 0
    assert lema("generate", out, "--prompt", "the miller", "--max-new-tokens", "2") == 0
    name = "model.layers.0.mlp.up_proj.weight"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    onto_origin = adapted.merge_and_unload().state_dict()
    # that is, onto what it was trained on
    assert torch.allclose(merged[name], onto_origin[name]) is (kind is None)
    assert GlobalBinaryIndex(tmp_path / "merged").origin is None


def test_what_is_prepared_twice_has_the_origin_of_the_first_and_a_path_is_named_while_it_is_there(
    hub: Path, tmp_path: Path
) -> None:
    prepare("org/tiny", tmp_path / "once")
    prepare(tmp_path / "once", tmp_path / "twice", quantize="nf4")
    assert GlobalBinaryIndex(tmp_path / "twice").origin == ("org/tiny", COMMIT)
    # the same, by the path of its place in the cache
    prepare(hub, tmp_path / "snapshot.safetensors")
    assert GlobalBinaryIndex(tmp_path / "snapshot.safetensors").origin == ("org/tiny", COMMIT)

    prepare(tmp_path / "model", tmp_path / "local")
    index = GlobalBinaryIndex(tmp_path / "local")
    assert index.origin == (str(tmp_path / "model"), None)
    config = settings(tmp_path / "local", tmp_path / "out")
    assert base_of(config, index)[:2] == (str(tmp_path / "model"), None)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert base_of(config, index)[:2] == (str(tmp_path / "local"), None)
    assert base_of(config, index).fingerprint == base_fingerprint(index)


def test_an_adapter_of_the_origin_is_one_to_begin_with_on_what_was_prepared_from_it(
    hub: Path, tmp_path: Path
) -> None:
    prepare("org/tiny", tmp_path / "base", quantize="nf4")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(hub),
        LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    for name in ("org/tiny", "org/other"):
        model.peft_config["default"].base_model_name_or_path = name
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    with closing(LemaModel(settings(tmp_path / "base", tmp_path / "out"))) as opened:
        with pytest.raises(AdapterError, match="the adapter belongs to the model org/other"):
            opened.begin_with_adapter(tmp_path / "org/other")
        opened.begin_with_adapter(tmp_path / "org/tiny")


def change(model: Path) -> None:
    """Write a model's weights again with other numbers, and with what the headers say of them."""
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        tensors = load_file(file)
        save_file(
            {name: one + 1 if one.is_floating_point() else one for name, one in tensors.items()},
            file,
            about,
        )


def adapter_on(model: Path, directory: Path, begun: Path | None = None) -> Path:
    """Save an adapter of a model: a new one, or one that begins with another."""
    with closing(LemaModel(settings(model, directory / "run"))) as opened:
        if begun is None:
            opened.initialize_lora()
        else:
            opened.begin_with_adapter(begun)
        opened.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_goes_from_a_model_to_what_was_prepared_from_it_and_back(
    kind: str, tmp_path: Path
) -> None:
    source, once, twice = (tmp_path / name for name in ("source", "once", "twice"))
    write_model(source, **WIDE)
    prepare(source, once / "model.safetensors")
    (once / "config.json").write_text((source / "config.json").read_text())
    prepare(once, twice, quantize=kind)
    prints = [base_fingerprint(GlobalBinaryIndex(place)) for place in (source, once)]
    assert GlobalBinaryIndex(once).sources == (prints[0],) and GlobalBinaryIndex(
        twice
    ).sources == tuple(dict.fromkeys(prints))
    mine = {
        place: adapter_on(place, tmp_path / "adapters" / place.name)
        for place in (source, once, twice)
    }
    for place in mine:
        for adapter in mine.values():
            again = adapter_on(place, tmp_path / "again" / place.name / adapter.name, begun=adapter)
            tensors, expected = (
                load_file(one / "adapter_model.safetensors") for one in (again, adapter)
            )
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    index = GlobalBinaryIndex(twice)
    # a run goes on with the same numbers
    with pytest.raises(AdapterError, match="the model has changed"):
        check_base(mine[source], index, exact=True)
    change(twice)
    with pytest.raises(AdapterError, match="the model has changed"):
        adapter_on(twice, tmp_path / "changed", begun=mine[twice])
    change(source)
    prepare(source, tmp_path / "new", quantize=kind)
    for place in (source, tmp_path / "new"):
        with pytest.raises(AdapterError, match="the model has changed"):
            adapter_on(place, tmp_path / "changed", begun=mine[source])
        with pytest.raises(AdapterError, match="the model has changed"):
            adapter_on(place, tmp_path / "changed", begun=mine[twice])
