"""`quantize_base`: the base is quantised once, and has the numbers of what the library quantises."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from peft import PeftModel
from quantized import ARCHITECTURE, KINDS, NUM_LAYERS, checkpoint, published
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lema import LemaConfig, LemaModel
from lema.convert import basefolder, merge_adapter
from lema.convert import quantized_base as bases
from lema.convert.conversion import Conversion
from lema.errors import AdapterError, ConfigError, DiskFull
from lema.plan import make_plan
from lema.plan.machine import profile
from lema.storage import GlobalBinaryIndex, diskspace
from lema.storage.hub import own_weights
from lema.storage.quantized.formats import KINDS as FORMS

PAGE = 4096
FILES = NUM_LAYERS + 2  # what is before the layers, each layer, what is after them


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("base") / "published")


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A base of one's own, that may be changed."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def opened(source: Path, kind: str | None = "nf4", **settings: Any) -> LemaModel:
    options: dict[str, Any] = {"device": "cpu", "device_memory": None, "save_steps": 0}
    return LemaModel(LemaConfig(str(source), quantize_base=kind, **options | settings))


def cache_of(source: Path, kind: str = "nf4") -> Path:
    return source.with_name(f"{source.name}-lema-{kind}")


def converted_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files as they are converted from now on."""
    names: list[str] = []
    write = Conversion.write

    def noted(self: Conversion, file: Path, *arguments: Any) -> None:
        names.append(file.name)
        write(self, file, *arguments)

    monkeypatch.setattr(Conversion, "write", noted)
    return names


# The numbers


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_librarys_weights(source: Path, kind: str) -> None:
    whole = whole_model(checkpoint(source, kind))
    draw_b(whole)
    batches = micro_batches(2, padding=True)
    expected = whole_step(whole, batches)
    streamed = Checkpoint(ARCHITECTURE, source, source)
    with streamed_model(streamed, quantize_base=kind) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), expected)


def test_loss_and_gradients_are_those_of_peft_on_the_model_that_transformers_quantises(
    source: Path,
) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    compared = Checkpoint(ARCHITECTURE, source, source)
    whole = whole_model(compared, quantization_config=config)
    draw_b(whole)
    batches = micro_batches(2, padding=True)
    expected = whole_step(whole, batches)
    with streamed_model(compared, quantize_base="nf4") as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), expected)


def test_what_is_kept_is_a_checkpoint_that_transformers_loads(source: Path) -> None:
    for kind in ("nf4", "int8"):
        opened(source, kind).close()
        model, report = AutoModelForCausalLM.from_pretrained(
            cache_of(source, kind), output_loading_info=True
        )
        assert {what: names for what, names in report.items() if names} == {}
        assert model.config.quantization_config is not None


def test_settings_name_the_forms_that_there_are() -> None:
    for kind in FORMS:
        assert LemaConfig("model", quantize_base=kind).quantize_base == kind
    with pytest.raises(ConfigError, match="quantize_base"):
        LemaConfig("model", quantize_base="int4")


# Once


def test_the_base_is_converted_once_and_used_by_later_starts(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = converted_files(monkeypatch)
    with closing(opened(source)) as model:
        assert len(model.gbi.files) == FILES
        assert {file.parent for file in model.gbi.files} == {cache_of(source)}
    assert len(names) == FILES
    said = capsys.readouterr().err
    assert "quantize_base: nf4: converting" in said
    assert "to write, about" in said
    opened(source).close()
    assert len(names) == FILES
    assert capsys.readouterr().err == ""
    assert not list(source.parent.glob(".*converting"))


def test_a_base_that_changed_is_converted_again_and_a_line_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(source).close()
    torch.manual_seed(2)
    shutil.rmtree(source)
    published(source, attention_bias=False)
    names = converted_files(monkeypatch)
    capsys.readouterr()
    with closing(opened(source)) as model:
        assert "model.layers.0.self_attn.q_proj.bias" not in model.gbi
    assert len(names) == FILES
    assert "the base has changed since" in capsys.readouterr().err


def test_a_config_that_says_other_numbers_is_another_base(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(source).close()
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    names = converted_files(monkeypatch)
    opened(source).close()
    assert len(names) == FILES
    assert json.loads((cache_of(source) / "config.json").read_text())["rms_norm_eps"] == 1e-3


def test_a_file_that_is_gone_is_made_again_alone(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(source).close()
    gone = sorted(cache_of(source).glob("*.safetensors"))[3]
    content = gone.read_bytes()
    gone.unlink()
    names = converted_files(monkeypatch)
    capsys.readouterr()
    opened(source).close()
    assert names == [gone.name]
    assert gone.read_bytes() == content
    assert "missing or damaged" in capsys.readouterr().err


def test_a_file_that_changed_before_the_conversion_ended_is_made_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bases, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(source)
    (part,) = source.parent.glob(".*converting")
    damaged = sorted(part.glob("*.safetensors"))[4]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    names = converted_files(monkeypatch)
    opened(source).close()
    assert names == [damaged.name]


@pytest.mark.parametrize("after", [1, 5])
def test_a_conversion_that_was_killed_goes_on_behind_its_complete_files(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after: int,
) -> None:
    code = f"""
import os, signal
from lema import LemaConfig, LemaModel
from lema.convert.conversion import Conversion
write = Conversion.write
count = 0
def killed(self, file, sections, progress=None):
    global count
    if count == {after}:  # in the middle of a file
        progress = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    write(self, file, sections, progress)
Conversion.write = killed
LemaModel(LemaConfig({str(source)!r}, device="cpu", quantize_base="nf4"))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert not cache_of(source).exists()
    (part,) = source.parent.glob(".*converting")
    kept = {file.name: file.stat().st_mtime_ns for file in part.glob("*.safetensors")}
    assert len(kept) == after
    names = converted_files(monkeypatch)
    opened(source).close()
    assert len(names) == FILES - after
    assert not kept.keys() & set(names)
    folder = cache_of(source)
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept
    assert f"{after} of {FILES} files are complete and are kept" in capsys.readouterr().err
    once = source.with_name("once")
    opened(source, quantize_base_cache=str(once)).close()
    (other,) = [path for path in once.iterdir() if path.is_dir()]
    for file in sorted(other.glob("*.safetensors")):
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


def test_of_several_processes_one_converts_and_the_others_wait(source: Path) -> None:
    code = f"""
import time
from lema import LemaConfig, LemaModel
from lema.convert.conversion import Conversion
write = Conversion.write
def noted(self, file, *arguments):
    print(file.name, flush=True)
    time.sleep(0.1)
    write(self, file, *arguments)
Conversion.write = noted
model = LemaModel(LemaConfig({str(source)!r}, device="cpu", quantize_base="nf4"))
print("opened", len(model.gbi), flush=True)
"""
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    lines = [line for output, _ in outputs for line in output.splitlines()]
    assert len([line for line in lines if line.endswith(".safetensors")]) == FILES
    assert len([line for line in lines if line.startswith("opened")]) == 2


def test_what_another_run_uses_is_not_replaced_under_it(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = opened(source)
    shutil.rmtree(source)
    published(source, attention_bias=False)
    with pytest.raises(ConfigError, match="still uses what was made of it before"):
        opened(source)
    # as if another process had it
    monkeypatch.setattr(bases, "is_locked_here", lambda _: False)
    monkeypatch.setattr(time, "sleep", lambda _: model.close())
    opened(source).close()
    assert "waiting for another process" in capsys.readouterr().err


# Where


def test_a_model_of_the_hub_is_kept_in_the_users_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    before = sorted(path for path in (tmp_path / "hub").rglob("*"))
    with closing(opened(snapshot)) as model:
        (folder,) = {file.parent for file in model.gbi.files}
    assert folder == tmp_path / "cache" / "lema" / "quantized" / "org--name-01234567-lema-nf4"
    assert sorted(path for path in (tmp_path / "hub").rglob("*")) == before


def test_a_folder_that_cannot_be_written_to_is_not_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    access = os.access

    def readonly(path: Any, mode: int) -> bool:
        return Path(path) != source.parent and access(path, mode)

    monkeypatch.setattr(basefolder.os, "access", readonly)
    opened(source).close()
    assert not cache_of(source).exists()
    assert len(list((tmp_path / "cache/lema/quantized").glob("model-*-lema-nf4"))) == 1


def test_a_folder_with_other_files_is_not_written_over(source: Path) -> None:
    cache_of(source).mkdir()
    (cache_of(source) / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has other files") as error:
        opened(source)
    assert "quantize_base_cache" in error.value.how
    assert [file.name for file in cache_of(source).iterdir()] == ["notes.txt"]


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskspace, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFull, match="the base in nf4") as error:
        opened(source)
    assert error.value.exit_code == 6
    assert "quantize_base_cache" in error.value.how
    assert not cache_of(source).exists()
    assert not list(source.parent.glob(".*converting"))


def test_a_model_that_is_quantised_already(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(source).close()
    names = converted_files(monkeypatch)
    with closing(opened(cache_of(source))) as model:
        assert {file.parent for file in model.gbi.files} == {cache_of(source)}
    assert names == []
    with pytest.raises(ConfigError, match="are quantised already, by the method 'bitsandbytes'"):
        opened(cache_of(source), "int8")


def test_weights_elsewhere_cannot_be_quantised(source: Path) -> None:
    with pytest.raises(ConfigError, match="gbi_path"):
        LemaConfig(str(source), gbi_path=str(source), quantize_base="nf4")


# The adapter


@pytest.fixture
def adapter(source: Path, tmp_path: Path) -> Path:
    with closing(opened(source, lora_rank=2)) as model:
        model.initialize_lora()
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def loss_of(model: LemaModel) -> torch.Tensor:
    with closing(model), torch.no_grad():
        (batch,) = micro_batches(1)
        return model.adapter.evaluate([batch])[0]


def test_an_adapter_names_the_users_base_and_knows_how_it_was_quantised(
    source: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = json.loads((adapter / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(source)
    monkeypatch.setattr(bases, "_convert", lambda *_: pytest.fail("it is converted already"))
    trained = loss_of(LemaModel.from_pretrained(adapter, device="cpu"))
    with pytest.warns(UserWarning, match="trained on the base in nf4"):
        plain = loss_of(LemaModel.from_pretrained(adapter, device="cpu", quantize_base=None))
    assert not torch.equal(trained, plain)
    base = AutoModelForCausalLM.from_pretrained(source)
    (batch,) = micro_batches(1)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, adapter)(**batch).loss
    assert torch.equal(plain, expected)


def test_an_adapter_is_not_that_of_a_base_that_changed(source: Path, adapter: Path) -> None:
    weights = sorted(source.glob("*.safetensors"))[1]
    doubled = {name: 2 * tensor for name, tensor in load_file(weights).items()}
    save_file(doubled, weights, {"format": "pt"})
    with pytest.raises(AdapterError, match="changed since the adapter was trained"):
        LemaModel.from_pretrained(adapter, device="cpu")


def test_an_adapter_goes_with_the_same_base_that_is_quantised_again(
    source: Path, adapter: Path
) -> None:
    before = loss_of(LemaModel.from_pretrained(adapter, device="cpu"))
    shutil.rmtree(cache_of(source))
    assert torch.equal(loss_of(LemaModel.from_pretrained(adapter, device="cpu")), before)


def test_merging_takes_the_weights_that_the_adapter_was_trained_on(
    source: Path, adapter: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    out = merge_adapter(adapter, tmp_path / "merged", note=notes.append)
    assert "nf4" in notes[0]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    whole = AutoModelForCausalLM.from_pretrained(checkpoint(source, "nf4").published)
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name
    plain = merge_adapter(adapter, tmp_path / "plain", base_dir=source)
    base = AutoModelForCausalLM.from_pretrained(source)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name


# The plan


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_has_the_quantised_sizes_and_converts_nothing(source: Path, kind: str) -> None:
    settings: dict[str, Any] = {"device": "cpu", "max_length": 32}
    config = LemaConfig(str(source), quantize_base=kind, **settings)
    plan, _ = make_plan(config, profile("cpu"))
    assert not cache_of(source, kind).exists()
    with closing(opened(source, kind, **settings)) as model:
        real = GlobalBinaryIndex(own_weights(cache_of(source, kind), cache_of(source, kind)))
        again, planner = make_plan(config, profile("cpu"))
        by_hand, _ = make_plan(LemaConfig(str(cache_of(source, kind)), **settings), profile("cpu"))
        layers = [layer.nbytes for layer in model.memory.layers]
    assert [layer.nbytes for layer in planner.blueprint.layers] == layers
    assert plan.memory.disk == again.memory.disk
    assert plan.memory.device == again.memory.device
    for part, nbytes in by_hand.memory.device.items():  # in files of its own, of whole pages
        assert abs(plan.memory.device[part] - nbytes) <= 4 * PAGE, part
    assert plan.memory.disk["model"] == GlobalBinaryIndex(source).nbytes + real.nbytes


def test_a_plan_measures_this_machine(source: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan, _ = make_plan(
            LemaConfig(str(source), device="cpu", max_length=32, quantize_base="nf4")
        )
    assert plan.measured


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_command_quantises_at_its_first_start(kind: str, source: Path, tmp_path: Path) -> None:
    """In a process of its own, because a command hides the libraries that quantise while it
    imports others.
    """
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n' * 4)
    settings = {
        "model_name_or_path": str(source),
        "train_data": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "quantize_base": kind,
        "device": "cpu",
        "max_steps": 1,
        "batch_size": 2,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "lema", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert cache_of(source, kind).is_dir()
