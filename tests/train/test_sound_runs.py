"""Runs on rows with sounds: a YAML is enough, a run that was stopped ends bitwise where the other
does, and texts are those that the whole model makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from clirun import lema
from mediasteps import LANGUAGE, RATE, heard
from peft import PeftModel
from publishedclass import published_class
from ruamel.yaml import YAML
from safetensors.torch import load_file
from soundprocessors import publish_hearing, sound_rows
from transformers import AutoConfig

from lema.storage.modelfiles import load_processor

NEW = 6
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_hearing("qwen2_audio", tmp_path_factory.mktemp("models") / "qwen2_audio")


def written(folder: Path, model: Path, **changes: Any) -> str:
    """Write rows and settings; return the file of settings."""
    rows = sound_rows(folder, 6)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "model_name_or_path": str(model),
        "train_data": str(folder / "rows.jsonl"),
        "output_dir": str(folder / "out"),
        "device": "cpu",
        "modalities": "all",
        "lora_target_modules": LANGUAGE,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "batch_size": 3,
        "micro_batch_size": 2,
        "max_length": 64,
        "max_steps": 4,
        "save_steps": 2,
    }
    file = folder / "run.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(about | changes, out)
    return str(file)


def adapter_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(directory / "adapter_model.safetensors")
    return tensors


def test_a_yaml_is_enough_and_a_stopped_run_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lema("data", written(tmp_path, model), "--rows", "2") == 0
    shown = capsys.readouterr().out
    assert "6 sounds with" in shown
    assert "the longest has 0.81 seconds" in shown
    assert "<audios, audio 1: 0_0.wav, 0.25 seconds, 2 tokens>" in shown
    assert lema("train", written(tmp_path, model, eval_split=1)) == 0, capsys.readouterr().err
    expected = adapter_of(tmp_path / "out")
    logged = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "eval_loss" in logged
    changes = {"eval_split": 1, "output_dir": str(tmp_path / "stopped")}
    assert lema("train", written(tmp_path, model, max_steps=2, **changes)) == 0
    assert lema("train", written(tmp_path, model, **changes), "--resume") == 0
    adapter = adapter_of(tmp_path / "stopped")
    assert adapter.keys() == expected.keys()
    assert any(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name)
    for name, tensor in adapter.items():
        assert torch.equal(tensor, expected[name]), name
    # and the words that follow a sound are those of the whole model
    prompt = ["--audio", str(tmp_path / "0_0.wav"), "--prompt", "w5 w6"]
    capsys.readouterr()
    more = ["--max-new-tokens", str(NEW), "--set", "device=cpu"]
    assert lema("generate", str(tmp_path / "out"), *prompt, *more) == 0
    assert capsys.readouterr().out.strip() == answered(model, tmp_path)


def answered(model: Path, folder: Path) -> str:
    """Return what `transformers` makes of the prompt."""
    processor: Any = load_processor(model, trusted=False)
    asked = [{"type": "audio"}, {"type": "text", "text": "w5 w6"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(
        text=[text],
        audio=[heard(folder / "0_0.wav")],
        sampling_rate=RATE,
        add_special_tokens=False,
        return_tensors="pt",
    )
    kind = published_class(AutoConfig.from_pretrained(model))
    base = aligned(kind.from_pretrained(model, dtype=torch.float32))
    whole: Any = PeftModel.from_pretrained(base, str(folder / "out")).eval()
    tokens = whole.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return str(
        processor.tokenizer.decode(
            tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    ).strip()


@pytest.mark.parametrize("changes", [{"packing": "wrapped", "overlong": "truncate"}])
def test_what_does_not_go_with_sounds_is_refused_with_the_reason(
    changes: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", written(tmp_path, model, **changes)) == 2
    assert "the rows have images" in capsys.readouterr().err


def test_the_rows_of_the_page_train_with_its_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "sounds-and-videos.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- sounds rows -->\n```yaml\n(.*?)```", page, re.DOTALL)
    config = (ROOT / "configs" / "lora_audio.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    rows = sound_rows(Path("data"), 8)
    Path("data/calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, settings in (("page.yaml", text), ("config.yaml", config)):
        small = settings.replace("Qwen/Qwen2-Audio-7B-Instruct", str(model))
        Path(name).write_text(small.replace("4096", "64").replace("0.02", "0.25"))
        options = ["--set", "device=cpu", "--set", f"output_dir=out-{name}"]
        assert lema("train", name, *options) == 0, capsys.readouterr().err
        assert (Path(f"out-{name}") / "adapter_model.safetensors").is_file()
