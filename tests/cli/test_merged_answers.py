"""`--merged DIR` runs the merge of the adapter as it is now, and no other model."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import lema
from safetensors.torch import load_file, save_file

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
