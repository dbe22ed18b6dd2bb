"""`--merged DIR` runs the merge of the adapter as it is now, and no other model; `--base` shows the
base model's text beside the adapter's.
"""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import lema, write_rows
from safetensors.torch import load_file, save_file
from smallrun import SENTENCES

from lema import LemaConfig, LemaModel
from lema.convert import merge_adapter
from lema.convert.mergemark import MERGE_NAME, adapter_fingerprint

Ask = Callable[..., tuple[str, str]]


@pytest.fixture
def ask(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Chat over a pipe; return what came on standard output and on standard error."""

    def run(*arguments: Any, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("who grinds corn?\n"))
        capfd.readouterr()
        assert lema("chat", *arguments, "--max-new-tokens", 8) == code
        captured = capfd.readouterr()
        return captured.out, captured.err

    return run


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    """An adapter whose answers are not those of its base."""
    directory = tmp_path / "adapter"
    model = LemaModel(LemaConfig(str(llama), device="cpu", lora_rank=2))
    model.initialize_lora()
    model.save_pretrained(directory)
    model.close()
    disturb(directory, 1)
    return directory


def disturb(directory: Path, seed: int) -> None:
    """Give the adapter's weights other values, as training does."""
    file = directory / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def test_the_merge_is_written_once_and_used_again(adapter: Path, tmp_path: Path, ask: Ask) -> None:
    out = tmp_path / "merged"
    plain, _ = ask(adapter)
    first, said = ask(adapter, "--merged", out)
    assert "merging" in said and first == plain
    again, said = ask(adapter, "--merged", out)
    assert "merging" not in said and again == plain
    shutil.rmtree(out)
    assert lema("merge", adapter, out) == 0
    assert ask(adapter, "--merged", out)[0] == plain


def test_a_model_that_is_not_the_merge_of_this_adapter_is_refused(
    llama: Path, adapter: Path, tmp_path: Path, ask: Ask
) -> None:
    said = ask(adapter, "--merged", llama, code=2)[1]
    assert "does not say of which adapter it is the merge" in said and MERGE_NAME in said
    out = merge_adapter(adapter, tmp_path / "merged")
    disturb(adapter, 2)
    said = ask(adapter, "--merged", out, code=2)[1]
    assert "another adapter" in said and "trained further" in said and "delete this one" in said
    shutil.rmtree(out)
    assert "merging" in ask(adapter, "--merged", out)[1]


def test_a_base_that_is_a_merge_hands_its_mark_to_no_other_model(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    merged = merge_adapter(adapter, tmp_path / "merged")
    mark = json.loads((merged / MERGE_NAME).read_text())
    assert mark == {"adapter": adapter_fingerprint(adapter)}
    assert str(tmp_path) not in (merged / MERGE_NAME).read_text()
    assert lema("prepare", merged, tmp_path / "prepared") == 0
    assert (tmp_path / "prepared" / "config.json").is_file()
    assert not (tmp_path / "prepared" / MERGE_NAME).exists()


def test_the_place_of_the_base_is_not_in_the_fingerprint_and_alpha_is(adapter: Path) -> None:
    before = adapter_fingerprint(adapter)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    assert adapter_fingerprint(adapter) == before
    file.write_text(json.dumps(config | {"lora_alpha": 99}))
    assert adapter_fingerprint(adapter) != before


def generated(out: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Run `lema generate` on a file of prompts, and return what it wrote."""
    prompts = write_rows(out.parent / "prompts.txt", [{"text": text} for text in SENTENCES[:5]])
    line = [
        "--prompts",
        prompts,
        "--output",
        out,
        "--max-new-tokens",
        4,
        "--batch-size",
        2,
        "--raw",
    ]
    assert lema("generate", *arguments, *line) == 0
    return [json.loads(text) for text in out.read_text().splitlines()]


def texts(results: list[dict[str, Any]], key: str = "completion") -> list[str]:
    return [result[key] for result in results]


@pytest.mark.parametrize("sampling", [[], ["--temperature", 0.9, "--seed", 5]])
def test_texts_of_the_base_model_stand_beside_those_of_the_adapter(
    sampling: list[Any], llama: Path, adapter: Path, tmp_path: Path, capfd: Any
) -> None:
    of_base = generated(tmp_path / "base.jsonl", llama, *sampling)
    of_adapter = generated(tmp_path / "adapter.jsonl", adapter, *sampling)
    assert texts(of_base) != texts(of_adapter)
    both = tmp_path / "both.jsonl"
    results = generated(both, adapter, "--base", *sampling)
    assert texts(results) == texts(of_adapter)
    assert texts(results, "base_completion") == texts(of_base)
    assert texts(results, "base_finish_reason") == texts(of_base, "finish_reason")
    whole = both.read_bytes()
    both.write_bytes(b"".join(whole.splitlines(keepends=True)[3:]))
    assert texts(generated(both, adapter, "--base", "--resume", *sampling)) == texts(of_adapter)
    assert both.read_bytes() == whole
    line = ["--prompts", tmp_path / "prompts.txt", "--output", both, "--resume"]
    assert lema("generate", adapter, *line) == 2
    assert "the output has results with the base model's" in capfd.readouterr().err


def test_two_texts_are_printed_with_their_names(adapter: Path, llama: Path, capfd: Any) -> None:
    line = ["-p", "corn", "--raw", "--max-new-tokens", 4]
    plain = []
    for model in (llama, adapter):
        assert lema("generate", model, *line) == 0
        plain.append(capfd.readouterr().out)
    assert lema("generate", adapter, *line, "--base") == 0
    assert capfd.readouterr().out == f"base model: {plain[0]}adapter: {plain[1]}"
    assert lema("generate", llama, *line, "--base") == 2
    assert "there is no adapter to compare" in capfd.readouterr().err
    assert lema("generate", adapter, *line, "--base", "--merged", "m") == 2
    assert "a merged model has no adapter" in capfd.readouterr().err


def test_texts_of_the_merge_are_those_of_the_adapter(
    llama: Path, adapter: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "merged"
    of_adapter = generated(tmp_path / "adapter.jsonl", adapter)
    assert texts(generated(tmp_path / "first.jsonl", adapter, "--merged", out)) == texts(of_adapter)
    assert "merging" in capfd.readouterr().err
    assert texts(generated(tmp_path / "next.jsonl", adapter, "--merged", out)) == texts(of_adapter)
    assert "merging" not in capfd.readouterr().err
    assert lema("generate", adapter, "-p", "corn", "--merged", llama) == 2
    assert "does not say of which adapter it is the merge" in capfd.readouterr().err
