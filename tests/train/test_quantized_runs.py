"""Every way to begin a run honours `quantize_base`: verbs, phases, resumed runs, other trainers."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import draw_b
from peft import LoraConfig, PeftModel
from phaseruns import FULL, LORA, SOURCES, STEP, plan_of
from quantized import published
from smallrun import SENTENCES, write_model
from tiny import micro_batches
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import lema
from lema import LemaConfig, LemaModel
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.convert.conversion import Conversion
from lema.train.phases.paths import PhasePaths
from lema.train.phases.report import phase_report
from lema.train.phases.run import run_phases


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "rows.txt").write_text("\n".join(SENTENCES))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
model_name_or_path: {tmp_path / "model"}
train_data: {tmp_path / "rows.txt"}
output_dir: {tmp_path / "out"}
device: cpu
batch_size: 4
max_steps: 4
save_steps: 2
quantize_base: int8
"""
    )
    return file


def told(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    code = run(app, [str(word) for word in words])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out + output.err


def test_verbs_of_a_run(
    settings_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "fits" in told(["plan", settings_file], capsys)
    assert not (tmp_path / "model-lema-int8").exists()
    said = told(["train", settings_file], capsys)
    assert "quantize_base: int8: converting" in said
    assert "(int8, made of" in said
    monkeypatch.setattr(Conversion, "write", lambda *_: pytest.fail("it is converted already"))
    told(["train", settings_file, "--resume", "--set", "max_steps=6"], capsys)
    out = tmp_path / "out"
    about = json.loads((out / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "model")
    for source in (settings_file, out):
        rows = ["--set", f"eval_data={tmp_path / 'rows.txt'}"]
        assert "eval_loss" in told(["eval", source, *rows], capsys)
        told(["generate", source, "--prompt", "the miller", "--max-new-tokens", "2"], capsys)
    assert "those of int8" in told(["merge", out, tmp_path / "merged"], capsys)


def test_a_resumed_run_keeps_the_base_that_it_began_with(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(["train", settings_file, "--set", "max_steps=2"], capsys)
    words = ["train", settings_file, "--resume", "--set", "quantize_base=fp8"]
    assert run(app, [str(word) for word in words]) == 2
    assert "quantize_base" in capsys.readouterr().err


@pytest.fixture
def phase_config(tmp_path: Path) -> Callable[..., LemaConfig]:
    source = published(tmp_path / "model", num_hidden_layers=2)

    def config(**settings: Any) -> LemaConfig:
        options: dict[str, Any] = {"device": "cpu", "save_steps": 0, "data_cache": False}
        out = str(tmp_path / "out")
        options |= {"output_dir": out, "quantize_base": "nf4", **settings}
        return LemaConfig(str(source), **options)

    return config


def test_phases_quantise_what_adapters_are_trained_on_and_no_weights_that_train(
    phase_config: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    config = phase_config()
    plan = plan_of({**FULL, "tokens": 2 * STEP}, {**LORA, "tokens": 2 * STEP})
    planned = phase_report(config, plan)
    plain = phase_report(phase_config(quantize_base=None), plan)
    assert planned.phases[0].moved == plain.phases[0].moved
    assert planned.phases[1].moved.read < plain.phases[1].moved.read
    assert not (tmp_path / "model-lema-nf4").exists()
    run_phases(config, plan, SOURCES)
    assert not (tmp_path / "model-lema-nf4").exists()  # its weights have trained
    left = PhasePaths(tmp_path / "out", plan).model_of(0)
    assert left.with_name(f"{left.name}-lema-nf4").is_dir()
    with closing(LemaModel.from_pretrained(tmp_path / "out", device="cpu")) as model:
        assert model.files.quantized is not None
        assert model.config.model_name_or_path == str(left)


def test_a_phase_of_adapters_alone_quantises_the_model_itself(
    phase_config: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    run_phases(phase_config(), plan_of({**LORA, "tokens": 2 * STEP}), SOURCES)
    assert (tmp_path / "model-lema-nf4").is_dir()


def test_a_model_for_other_trainers_has_the_numbers_of_peft_on_bitsandbytes(
    tmp_path: Path,
) -> None:
    source = published(tmp_path / "model", num_hidden_layers=2)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = lema.streamed(source, adapter, device="cpu", quantize_base="nf4", seed=1)
    draw_b(model)
    model.save_pretrained(str(tmp_path / "adapter"))
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(source)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    base = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    # In evaluation bitsandbytes would round to bf16, on processors that have it.
    whole = PeftModel.from_pretrained(base, tmp_path / "adapter").train()
    (batch,) = micro_batches(1)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, whole(**batch).loss)
    model.close()
