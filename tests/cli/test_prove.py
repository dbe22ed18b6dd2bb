"""`lema prove` certifies what is so, and fails where the numbers differ."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lema.backend.hostmemory
import lema_tools.proof.arms
import lema_tools.prove
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.errors import ConfigError
from lema_tools.proof.arms import ARMS, Case, Outcome, streamed, whole_model
from lema_tools.proof.certificate import certify, compared, markdown, tolerance
from lema_tools.prove import write_model

WRONG = 1e-6  # added to one number of the adapter


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Three steps of a model with eight layers."""
    scratch = tmp_path_factory.mktemp("proof")
    model = write_model(scratch / "model", layers=8, hidden=64)
    return Case(str(model), str(scratch), steps=3, micro_batches=2, tokens=12, rank=2)


@pytest.fixture(scope="module")
def by_streaming(case: Case) -> Outcome:
    return streamed(case)


def change_one_number(scratch: str) -> Callable[[], None]:
    """Change the adapter that the whole model begins with; return what changes it back."""
    file = Path(scratch) / "adapter" / "adapter_model.safetensors"
    before = file.read_bytes()
    weights = load_file(file)
    name = sorted(weights)[len(weights) // 2]
    weights[name].view(-1)[0] += WRONG
    save_file(weights, file, {"format": "pt"})
    return lambda: file.write_bytes(before) and None


def test_a_small_model_is_certified_bitwise(case: Case, by_streaming: Outcome) -> None:
    certificate = certify(case, by_streaming, whole_model(case), "lema prove")
    assert certificate["holds"] and certificate["bitwise"] and certificate["tolerance"] == 0
    assert [row["difference"] for row in certificate["losses"]] == [0.0] * case.steps
    matrices = 8 * 7 * 2  # A and B of seven linears in eight layers
    for compared_ones in ("gradients_of_first_step", "adapter_after_last_step"):
        assert (
            certificate[compared_ones]["count"] == certificate[compared_ones]["bitwise"] == matrices
        )
    # equal zeros would prove nothing
    assert all(gradient.any() for gradient in by_streaming.gradients.values())
    assert 0 < certificate["bytes_read_per_step"] <= 2 * certificate["model"]["layer_bytes"]
    assert certificate["model"]["slots"] < certificate["model"]["layers"] == 8
    assert {"torch", "transformers", "peft", "lema"} <= certificate["versions"].keys()
    text = "\n".join(markdown(json.loads(json.dumps(certificate))))
    assert f"bitwise the same: every loss, all {matrices} gradients" in text
    for row in certificate["losses"]:
        assert f"{row['streamed']:.9g}" in text


def test_chunks_are_certified_within_rounding_and_the_certificate_says_so(
    case: Case, tmp_path: Path
) -> None:
    """With rotary parameters of a longer model, too."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    cut = replace(case, scratch=str(tmp_path), steps=1, sequence_chunk=5, rope_parameters=yarn)
    in_chunks = streamed(cut)
    certificate = certify(cut, in_chunks, whole_model(cut), "lema prove")
    assert certificate["tolerance"] == 1e-5
    assert certificate["holds"]
    text = "\n".join(markdown(json.loads(json.dumps(certificate))))
    assert "in chunks of 5 tokens" in text
    assert '"rope_type": "yarn"' in text
    of_model = whole_model(replace(cut, rope_parameters=None))
    assert not certify(cut, in_chunks, of_model, "lema prove")["holds"]


def test_rows_within_a_chunk_are_to_be_bitwise_the_same(case: Case) -> None:
    assert not replace(case, sequence_chunk=case.tokens).is_cut
    assert tolerance("cpu", "float32", cut=False) == 0


def test_settings_of_a_file_are_proven_and_others_refused(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = list[Case]()

    def seen(arm: str, given: Case) -> Outcome:
        runs.append(given)
        raise ConfigError("enough was seen")

    monkeypatch.setattr(lema_tools.proof.arms, "run_in_subprocess", seen)
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {case.model}\nsequence_chunk: 32\n")
    output = ["--output", str(tmp_path / "proof")]
    assert run(app, ["prove", str(file), *output]) == 2
    assert run(app, ["prove", str(file), "--set", "sequence_chunk=16", *output]) == 2
    assert [(given.model, given.sequence_chunk) for given in runs] == [
        (case.model, 32),
        (case.model, 16),
    ]
    assert run(app, ["prove", case.model, "--set", "lora_rank=4", *output]) == 2
    assert "a proof has no setting lora_rank" in capsys.readouterr().err
    assert run(app, ["prove", case.model, "--set", "sequence_chunk=auto", *output]) == 2
    assert "--set sequence_chunk=16" in capsys.readouterr().err


def test_one_wrong_number_of_the_adapter_makes_it_fail(case: Case, by_streaming: Outcome) -> None:
    back = change_one_number(case.scratch)
    try:
        certificate = certify(case, by_streaming, whole_model(case), "lema prove")
    finally:
        back()
    assert not certificate["holds"] and not certificate["bitwise"]
    assert certificate["adapter_after_last_step"]["largest"] > 0
    assert "does not hold" in "\n".join(markdown(certificate))


@pytest.mark.slow
def test_the_command_ends_with_7_where_the_numbers_differ_and_with_0_where_not(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are made in this process, in place of two of their own."""
    wrong = False

    def run_here(arm: str, given: Case) -> Outcome:
        if arm == "whole" and wrong:
            change_one_number(given.scratch)
        return ARMS[arm](given)

    monkeypatch.setattr(lema_tools.proof.arms, "run_in_subprocess", run_here)
    command = [
        "prove",
        case.model,
        "--steps",
        "1",
        "--tokens",
        "8",
        "--output",
        str(tmp_path / "proof"),
    ]
    assert run(app, command) == 0
    assert json.loads((tmp_path / "proof/certificate.json").read_text())["holds"]
    assert "bitwise the same" in (tmp_path / "proof/certificate.md").read_text()
    wrong = True
    assert run(app, command) == 7
    assert not json.loads((tmp_path / "proof/certificate.json").read_text())["holds"]
    assert "report it" in capsys.readouterr().err


def test_a_model_that_does_not_fit_whole_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lema.backend.hostmemory, "memory_available", lambda: 1000)
    assert run(app, ["prove", case.model]) == 4
    assert "needs the whole model in memory" in capsys.readouterr().err
    assert run(app, ["prove", case.model, "--dtype", "int8"]) == 2


@pytest.mark.parametrize("device", ["nowhere", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_told_before_a_model_is_made(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(lema_tools.prove, "write_model", made.append)
    assert run(app, ["prove", "--device", device, "--output", str(tmp_path / "proof")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and device in err.lower()
    assert "\n  fix: " in err
    assert made == [] and not (tmp_path / "proof").exists()


def test_what_is_missing_or_not_a_number_is_no_equality() -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    assert compared(one, one).same
    assert not compared(one, {"a": torch.ones(2)}).same
    assert not compared({}, {}).same
    assert not compared(one, {**one, "b": torch.ones(3)}).same
    nan = {**one, "b": torch.tensor([1.0, float("nan")])}
    assert not compared(nan, nan).same and not compared(nan, one).relative <= 1.0


def test_bitwise_is_asked_for_on_the_processor_in_fp32_alone(
    case: Case, by_streaming: Outcome
) -> None:
    assert tolerance("cpu", "float32") == 0
    assert tolerance("other:0", "float32") == 1e-5
    assert tolerance("cpu", "bfloat16") == 2.0**-8
    near = {name: one * (1 + 1e-6) for name, one in by_streaming.adapter.items()}
    there = replace(by_streaming, details={**by_streaming.details, "device": "other:0"})
    certificate = certify(case, there, replace(by_streaming, adapter=near), "lema prove")
    assert certificate["holds"] and not certificate["bitwise"]
    assert not certify(case, by_streaming, replace(by_streaming, adapter=near), "lema prove")[
        "holds"
    ]
