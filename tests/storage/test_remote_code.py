"""Code that comes with a model runs only where the user said so, and only code that cannot
change meanwhile.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from hubcache import COMMIT, files_of, write_cache
from ownmodel import (
    AUTO_MAP,
    Imports,
    imports_seen,
    without_code,
    write_own_model,
    write_own_tokenizer,
)
from peft import LoraConfig, get_peft_model
from smallrun import batch, draw_b, settings, token_rows, tokenizer, write_model
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.convert.prepare import prepare
from lema.errors import ConfigError, DataError, ModelError, WeightsError
from lema_cpu import CpuBackend

CODE = {"configuration_mill", "modeling_mill"}


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imports]:
    with imports_seen(tmp_path, monkeypatch) as seen:
        yield seen


@pytest.fixture
def model(tmp_path: Path, imports: Imports) -> Path:
    directory = write_own_model(tmp_path / "mill")
    imports.forget()
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no way to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def gradients_of_the_whole(directory: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    torch.manual_seed(42)
    whole = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["grind", "sift"]))
    draw_b(whole)
    inputs = batch(1)
    whole(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss.backward()
    return {
        name: parameter.grad
        for name, parameter in whole.named_parameters()
        if parameter.grad is not None
    }


def gradients_streamed(config: LemaConfig) -> dict[str, torch.Tensor]:
    streamed = LemaModel(config, backend=CpuBackend(poison=True), trust_remote_code=True)
    streamed.initialize_lora()
    draw_b(streamed.lora_manager)
    inputs = batch(1)
    streamed.adapter.loss([{name: inputs[name] for name in ("input_ids", "labels")}]).backward()
    streamed.close()
    return {
        n: parameter.grad
        for n, parameter in streamed.lora_manager.named_parameters()
        if parameter.requires_grad
    }


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert len(expected) == 24 and found.keys() == expected.keys()
    assert all(
        gradient.any() and torch.equal(found[name], gradient) for name, gradient in expected.items()
    )


def test_without_a_word_nothing_of_it_is_imported(
    model: Path, imports: Imports, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="its own code") as refused:
        LemaModel(settings(model, tmp_path / "out"))
    assert "mill" in refused.value.what
    assert refused.value.where.startswith(str(model / "config.json"))
    assert "configuration_mill.py, modeling_mill.py" in refused.value.where
    assert (
        "--trust-remote-code" in refused.value.how and "trust_remote_code=True" in refused.value.how
    )
    assert imports.modules == set()


def test_with_it_the_model_streams_as_the_whole_one(
    model: Path, imports: Imports, tmp_path: Path
) -> None:
    found = gradients_streamed(settings(model, tmp_path / "out"))
    assert imports.modules == CODE
    assert_same_gradients(found, gradients_of_the_whole(model))


def test_from_the_cache_it_streams_by_its_commit(
    model: Path, cache: Path, imports: Imports, tmp_path: Path
) -> None:
    write_cache(cache, files_of(model))
    config = settings(Path("org/tiny"), tmp_path / "out", revision=COMMIT)
    with pytest.raises(ModelError, match="its own code"):
        LemaModel(config)
    assert imports.modules == set()
    assert_same_gradients(gradients_streamed(config), gradients_of_the_whole(model))


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:7], COMMIT[:-1] + "G", f"{COMMIT}0"])
def test_code_of_the_hub_must_be_pinned_by_a_commit(
    model: Path, cache: Path, imports: Imports, tmp_path: Path, revision: str | None
) -> None:
    write_cache(cache, files_of(model))
    config = settings(Path("org/tiny"), tmp_path / "out", revision=revision)
    with pytest.raises(ConfigError, match="only from a commit") as refused:
        LemaModel(config, trust_remote_code=True)
    assert "40" in refused.value.how
    assert imports.modules == set()


def test_code_of_another_repository_is_refused(
    model: Path, imports: Imports, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {name: f"other/mill--{place}" for name, place in AUTO_MAP.items()}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="another repository, other/mill"):
        LemaModel(settings(model, tmp_path / "out"), trust_remote_code=True)
    assert imports.modules == set()


def test_code_of_a_tokenizer_in_another_repository_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": [None, "a/b--c.D"]}})
    )
    with pytest.raises(WeightsError, match="another repository, a/b"):
        LemaModel(settings(model, tmp_path / "out"), trust_remote_code=True)


def test_code_that_is_not_there_is_named(model: Path, imports: Imports, tmp_path: Path) -> None:
    bare = without_code(model, tmp_path / "bare")
    with pytest.raises(WeightsError, match=r"not there: configuration_mill\.py"):
        LemaModel(settings(bare, tmp_path / "out"), trust_remote_code=True)
    assert imports.modules == set()


def test_a_model_the_library_knows_needs_no_code_of_its_own(
    tmp_path: Path, imports: Imports, model: Path
) -> None:
    known = write_model(tmp_path / "known")
    config = json.loads((known / "config.json").read_text()) | {"auto_map": AUTO_MAP}
    (known / "config.json").write_text(json.dumps(config))
    for file in model.glob("*.py"):
        (known / file.name).write_bytes(file.read_bytes())
    opened = LemaModel(settings(known, tmp_path / "out"))
    assert opened.tokenizer("the mill")["input_ids"]
    opened.close()
    assert imports.modules == set()


def test_a_tokenizer_of_its_own_is_trusted_with_the_model(tmp_path: Path, imports: Imports) -> None:
    directory = write_model(tmp_path / "known")
    write_own_tokenizer(directory)
    with closing(LemaModel(settings(directory, tmp_path / "out"))) as opened:
        with pytest.raises(DataError, match="no tokenizer that can be loaded") as refused:
            opened.tokenizer  # noqa: B018
        assert "--trust-remote-code" in refused.value.how
    assert imports.modules == set()
    with closing(
        LemaModel(settings(directory, tmp_path / "out"), trust_remote_code=True)
    ) as opened:
        assert opened.tokenizer("the mill")["input_ids"] == tokenizer()("the mill")["input_ids"]
        assert type(opened.tokenizer).__name__ == "MillTokenizer"
    assert imports.modules == {"tokenization_mill"}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "change", [{"attn_implementation": "a/b"}, {"text_config": {"experts_implementation": "a/b@c"}}]
)
def test_a_kernel_that_a_config_asks_for_is_refused(
    change: dict[str, Any], trusted: bool, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "known")
    config = json.loads((directory / "config.json").read_text()) | change
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a kernel of the hub, 'a/b") as refused:
        LemaModel(settings(directory, tmp_path / "out"), trust_remote_code=trusted)
    assert "_implementation" in refused.value.where


@pytest.mark.parametrize("place", ["yaml", "lema_config.json", "--set"])
def test_no_file_and_no_setting_can_say_it(
    place: str, model: Path, imports: Imports, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"model_name_or_path": str(model), "device": "cpu", "output_dir": str(tmp_path / "out")}
    file = tmp_path / "run.yaml"
    words = ["train", tmp_path / "run.yaml"]
    if place == "lema_config.json":
        file = tmp_path / "lema_config.json"
        words = ["generate", tmp_path, "-p", "the mill"]
    file.write_text(json.dumps(given if place == "--set" else given | {"trust_remote_code": True}))
    if place == "--set":
        words += ["--set", "trust_remote_code=true"]
    assert_refused(capfd, 2, ["unknown setting 'trust_remote_code'", "--trust-remote-code"], *words)
    assert imports.modules == set()


def test_every_verb_takes_the_flag_and_refuses_without_it(
    model: Path, imports: Imports, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps(row) for row in token_rows(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    given = {
        "model_name_or_path": str(model),
        "device": "cpu",
        "train_data": str(tmp_path / "data.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "batch_size": 2,
        "max_steps": 2,
        "save_steps": 0,
        "max_length": 32,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    out = tmp_path / "out"
    for words in (
        ["train", tmp_path / "run.yaml"],
        ["eval", out, "--data", tmp_path / "data.jsonl"],
        ["generate", out, "-p", "the mill", "--max-new-tokens", 2],
        ["prepare", model, tmp_path / "prepared"],
        ["merge", out, tmp_path / "merged"],
        ["models", model],
    ):
        imports.forget()
        assert_refused(capfd, 2, ["its own code", "--trust-remote-code"], *words)
        assert imports.modules == set()
        assert lema(*words, "--trust-remote-code") == 0, capfd.readouterr().err
        assert imports.modules == CODE
    assert "mill)\tas stored\tgrind sift\t" in capfd.readouterr().out
    assert "trust" not in (out / "lema_config.json").read_text()
    for made in (tmp_path / "prepared", tmp_path / "merged"):
        assert {file.stem for file in made.glob("*.py")} == CODE
        assert (
            AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True).num_parameters() > 0
        )


def test_a_prepared_copy_streams_as_the_whole_one(model: Path, tmp_path: Path) -> None:
    prepared = prepare(model, tmp_path / "prepared", trust_remote_code=True).path
    assert_same_gradients(
        gradients_streamed(settings(prepared, tmp_path / "out")), gradients_of_the_whole(model)
    )
