"""Models and adapters go to llama.cpp's converters as they are to be converted, and nothing is left
where one fails. The programs here stand for llama.cpp's; tests/peers_gguf has those themselves.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from clirun import lema
from imageprocessors import publish_with_processor
from imagerows import TOWERLESS
from peft import LoraConfig
from safetensors.torch import load_file
from smallrun import opened, settings, write_model
from test_export import products, trained

from lema import LemaModel, streamed
from lema.convert import merge_adapter
from lema.convert.gguf.export import MODEL_FILE, QUANTIZED, export_gguf
from lema.convert.gguf.llamacpp import (
    CONVERTER,
    LORA_CONVERTER,
    QUANTIZER,
    VARIABLE,
    locate,
    run_program,
)
from lema.errors import ConfigError, DiskFull, ModelError

# What stands for a converter writes what it was called with, and the files of the directory.
COPIES = """
import base64, json, os, pathlib, sys
arguments = sys.argv[1:]
folder = pathlib.Path(arguments[-1])
out = pathlib.Path(arguments[arguments.index("--outfile") + 1])
files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in folder.iterdir()}
print("converting", flush=True)
out.write_text(json.dumps({"arguments": arguments, "files": files, "offline": os.environ["HF_HUB_OFFLINE"]}))
"""
QUANTIZES = """#!{python}
import pathlib, sys
pathlib.Path(sys.argv[2]).write_text(sys.argv[3] + "\\n" + pathlib.Path(sys.argv[1]).read_text())
"""
pytestmark = pytest.mark.filterwarnings("ignore:.*not written by a run of yours")


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what stands for llama.cpp's programs."""
    monkeypatch.delenv(VARIABLE, raising=False)
    directory = tmp_path / "llama.cpp"
    (directory / "build/bin").mkdir(parents=True)
    for name in (CONVERTER, LORA_CONVERTER):
        (directory / name).write_text(COPIES)
    quantizer = directory / "build/bin" / QUANTIZER
    quantizer.write_text(QUANTIZES.format(python=sys.executable))
    quantizer.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter beside its base."""
    return saved(tmp_path_factory.mktemp("saved"))


def saved(directory: Path) -> Path:
    write_model(directory / "base")
    chosen = settings(directory / "base", directory, system_prompt="You are a miller.")
    with opened(chosen) as model:
        model.save_pretrained(directory / "adapter")
    return directory / "adapter"


def converted(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def files_of(values: dict[str, Any], folder: Path) -> Path:
    import base64

    folder.mkdir()
    for name, content in values["files"].items():
        (folder / name).write_bytes(base64.b64decode(content))
    return folder


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_adapter_is_merged_and_converted(adapter: Path, llama_cpp: Path, tmp_path: Path) -> None:
    shown = list[str]()
    exported = export_gguf(
        adapter, tmp_path / "out", quantize="Q8_0", llama_cpp=llama_cpp, show=shown.append
    )
    assert left_in(tmp_path / "out") == ["Modelfile", MODEL_FILE]
    assert shown == ["converting\n"]
    values = converted(exported.file)
    assert values["arguments"][:2] == ["--outtype", "q8_0"] and values["offline"] == "1"
    model = files_of(values, tmp_path / "model")
    merge_adapter(adapter, tmp_path / "merged")
    assert left_in(model) == left_in(tmp_path / "merged")
    for name in left_in(model):
        assert (model / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()
    text = (tmp_path / "out/Modelfile").read_text()
    assert "FROM ./model.gguf\n" in text
    assert 'SYSTEM "You are a miller."\n' in text
    assert '"[user]"' in text and 'PARAMETER stop "<eos>"\n' in text
    assert exported.lines[0] == f"llama-server -m {tmp_path}/out/model.gguf"


def test_other_types_are_made_by_the_quantizer(
    adapter: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    exported = export_gguf(adapter, tmp_path / "out", quantize="q4_k_m", llama_cpp=llama_cpp)
    first, _, values = exported.file.read_text().partition("\n")
    assert first == "Q4_K_M"
    assert json.loads(values)["arguments"][:2] == ["--outtype", "auto"]
    assert left_in(tmp_path / "out") == ["Modelfile", MODEL_FILE]


def test_model_is_taken_as_it_lies(llama_cpp: Path, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    exported = export_gguf(base, tmp_path / "out", llama_cpp=llama_cpp)
    values = converted(exported.file)
    assert values["arguments"][-1] == str(base)
    assert left_in(base) == sorted(values["files"])


def test_adapter_alone_has_its_products(adapter: Path, llama_cpp: Path, tmp_path: Path) -> None:
    exported = export_gguf(adapter, tmp_path / "out", adapter_alone=True, llama_cpp=llama_cpp)
    values = converted(exported.file)
    assert values["arguments"][:2] == ["--outtype", "f32"]
    assert values["arguments"][4:6] == ["--base", str(adapter.parent / "base")]
    assert left_in(tmp_path / "out") == ["Modelfile", "adapter.gguf"]
    written = products(files_of(values, tmp_path / "lora"))
    expected = trained(adapter)
    assert written.keys() == expected.keys()
    for name, product in written.items():
        torch.testing.assert_close(product, expected[name], rtol=1e-6, atol=0)
    text = (tmp_path / "out/Modelfile").read_text()
    assert "FROM ./base.gguf\nADAPTER ./adapter.gguf\n" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_use_rslora": True},
        {"lora_alpha_pattern": {"v_proj": 3}, "lora_rank_pattern": {"v_proj": 2}},
        {"lora_use_rslora": True, "lora_rank_pattern": {"q_proj": 3}, "lora_alpha_pattern": {"q_proj": 5}},
    ],
    ids=["rslora", "patterns", "all"],
)  # fmt: skip
def test_scales_by_module_are_in_the_factors(
    changes: dict[str, Any], llama_cpp: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "base")
    with opened(settings(tmp_path / "base", tmp_path, **changes)) as model:
        model.save_pretrained(tmp_path / "adapter")
    exported = export_gguf(
        tmp_path / "adapter", tmp_path / "out", adapter_alone=True, llama_cpp=llama_cpp
    )
    lora = files_of(converted(exported.file), tmp_path / "lora")
    alpha = json.loads((lora / "adapter_config.json").read_text())["lora_alpha"]
    tensors = load_file(lora / "adapter_model.safetensors")
    expected = trained(tmp_path / "adapter")
    for name, product in expected.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        # as llama.cpp computes it: one alpha, and the rank of the factors
        torch.testing.assert_close(b @ a * (alpha / a.shape[0]), product, rtol=1e-5, atol=1e-7)


def test_what_an_adapter_in_gguf_cannot_have_is_named(llama_cpp: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    with opened(settings(tmp_path / "base", tmp_path, lora_use_dora=True)) as model:
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="DoRA") as refused:
        export_gguf(tmp_path / "adapter", tmp_path / "out", adapter_alone=True, llama_cpp=llama_cpp)
    assert "merged model" in refused.value.how
    assert not (tmp_path / "out").exists()


FAILURES: dict[str, tuple[str, type[Exception], str]] = {
    "fails": ("print('first'); sys.exit('the model is odd')", ModelError, "last lines above"),
    "tokenizer": (
        "raise NotImplementedError('BPE pre-tokenizer was not recognized - update get_vocab_base_pre()')",
        ModelError,
        "list of the tokenizers",
    ),
    "architecture": ("sys.exit('Model Foo is not supported')", ModelError, "models of this type"),
    "module": ("import gguf_missing_nowhere as gguf", ModelError, "last lines above"),
    "full": ("raise OSError(28, 'No space left on device')", DiskFull, "free space"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_is_left_where_a_converter_fails(
    failure: str, adapter: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    program, kind, how = FAILURES[failure]
    (llama_cpp / CONVERTER).write_text(
        "import sys, pathlib\n"
        'pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text("half")\n' + program
    )
    before = left_in(tmp_path)
    with pytest.raises(kind) as failed:
        export_gguf(adapter, tmp_path / "out", llama_cpp=llama_cpp)
    assert how in failed.value.how  # type: ignore[attr-defined]
    assert f"{CONVERTER} failed with exit code 1" in str(failed.value)
    assert left_in(tmp_path) == before


def test_missing_library_of_a_converter_is_named_with_its_install(tmp_path: Path) -> None:
    script = tmp_path / CONVERTER
    script.write_text("raise ModuleNotFoundError(\"No module named 'sentencepiece'\")")
    with pytest.raises(ModelError) as failed:
        run_program(script, [])
    assert failed.value.how == "pip install gguf sentencepiece protobuf"


def test_last_lines_are_in_the_error_and_commands_to_terminals_are_not(tmp_path: Path) -> None:
    script = tmp_path / CONVERTER
    script.write_text(
        "import sys\nfor n in range(50): print('line', n)\nprint('\\x1b[31mred')\nsys.exit(3)"
    )
    shown = list[str]()
    with pytest.raises(ModelError, match="exit code 3") as failed:
        run_program(script, [], shown.append)
    assert "line 49\n  \\x1b[31mred" in failed.value.what
    assert "line 38" not in failed.value.what
    assert len(shown) == 51


def test_progress_of_a_program_is_shown_as_it_comes(tmp_path: Path) -> None:
    script = tmp_path / CONVERTER
    script.write_text("import sys\nsys.stderr.write('10%\\r90%\\rdone\\nlast')")
    shown = list[str]()
    run_program(script, [], shown.append)
    assert shown == ["10%\r", "90%\r", "done\n", "last\n"]


def test_program_ends_with_an_interrupt(tmp_path: Path) -> None:
    script = tmp_path / CONVERTER
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    numbers = list[int]()

    def interrupt(line: str) -> None:
        numbers.append(int(line))
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_program(script, [], interrupt)
    assert not psutil.pid_exists(numbers[0])
    assert time.monotonic() - began < 50


def in_option(directory: Path, _: pytest.MonkeyPatch) -> Path | None:
    return directory


def in_variable(directory: Path, patch: pytest.MonkeyPatch) -> Path | None:
    patch.setenv(VARIABLE, str(directory))
    return None


def on_path(directory: Path, patch: pytest.MonkeyPatch) -> Path | None:
    folders = [str(directory), str(directory / "build/bin"), os.environ["PATH"]]
    patch.setenv("PATH", os.pathsep.join(folders))
    return None


def in_sdist(directory: Path, _: pytest.MonkeyPatch) -> Path | None:
    sdist = directory.with_name("llama_cpp_python")
    (sdist / "vendor").mkdir(parents=True)
    directory.rename(sdist / "vendor/llama.cpp")
    return sdist


@pytest.mark.parametrize("placed", [in_option, in_variable, on_path, in_sdist])
def test_programs_are_taken_from_where_the_user_has_them(
    placed: Callable[[Path, pytest.MonkeyPatch], Path | None],
    llama_cpp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = placed(llama_cpp, monkeypatch)
    for name in (CONVERTER, LORA_CONVERTER, QUANTIZER):
        assert locate(name, named).name == name
        assert locate(name, named).is_file()


@pytest.mark.parametrize(
    ("options", "how"),
    [((), "git clone"), (("--adapter",), "pip download"), (("--quantize", "q4_k_m"), "git clone")],
)
def test_missing_llama_cpp_is_said_before_anything_is_done(
    options: tuple[str, ...],
    how: str,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    code = lema("export", str(adapter), str(tmp_path / "out"), "--for", "gguf", *options)
    assert code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert how in printed and VARIABLE in printed
    assert not (tmp_path / "out").exists()


def test_missing_quantizer_says_how_it_is_built(
    adapter: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (llama_cpp / "build/bin" / QUANTIZER).unlink()
    with pytest.raises(ConfigError, match=QUANTIZER) as missing:
        export_gguf(adapter, tmp_path / "out", quantize="q4_k_m", llama_cpp=llama_cpp)
    assert "cmake --build" in missing.value.how and "q8_0" in missing.value.how


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "q9"},
        {"quantize": QUANTIZED[0], "adapter_alone": True},
        {"llama_cpp": "nowhere"},
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], adapter: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        export_gguf(adapter, tmp_path / "out", **{"llama_cpp": llama_cpp} | options)
    assert not (tmp_path / "out").exists()


def with_code(directory: Path) -> Path:
    """Let a tokenizer's files name code of its own."""
    file = directory / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values["auto_map"] = {"AutoTokenizer": [None, "somebody/thing--odd.OddTokenizer"]}
    file.write_text(json.dumps(values))
    return directory


def test_code_that_a_model_names_is_not_run_by_the_converters(
    llama_cpp: Path, tmp_path: Path
) -> None:
    adapter = saved(tmp_path)
    base = with_code(tmp_path / "base")
    with pytest.raises(ModelError, match="may run the code"):
        export_gguf(base, tmp_path / "out", llama_cpp=llama_cpp)
    with pytest.raises(ModelError, match="may run the code"):
        export_gguf(adapter, tmp_path / "out", adapter_alone=True, llama_cpp=llama_cpp)
    exported = export_gguf(adapter, tmp_path / "out", llama_cpp=llama_cpp)
    model = files_of(converted(exported.file), tmp_path / "model")
    assert "auto_map" not in json.loads((model / "tokenizer_config.json").read_text())


def test_command_line_prints_what_serves_it(
    adapter: Path, llama_cpp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = lema("export", str(adapter), str(out), "--for", "gguf", "--llama-cpp", str(llama_cpp))
    assert code == 0
    printed = capsys.readouterr()
    assert f"next: llama-server -m {out}/model.gguf" in printed.out
    assert f"next: ollama create out -f {out}/Modelfile" in printed.out
    assert "converting" in printed.err


@pytest.mark.parametrize(
    ("option", "layout"),
    [(("--quantize", "f16"), "vllm"), (("--adapter",), "peft"), (("--llama-cpp", "."), "sglang")],
)
def test_options_of_gguf_are_refused_for_other_layouts(
    option: tuple[str, ...],
    layout: str,
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lema("export", str(adapter), str(tmp_path / "out"), "--for", layout, *option) == 2
    assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_lines_can_be_pasted_where_a_path_has_blanks(
    adapter: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    out = tmp_path / "two words"
    for alone in (False, True):
        exported = export_gguf(
            adapter, out / f"alone {alone}", adapter_alone=alone, llama_cpp=llama_cpp
        )
        server, ollama = map(shlex.split, exported.lines)
        assert server[-1] == str(exported.file)
        assert ollama[2:] == [exported.directory.name, "-f", str(exported.directory / "Modelfile")]


def test_adapter_still_opens_after_the_export(
    adapter: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    before = {file.name: file.read_bytes() for file in adapter.iterdir() if file.is_file()}
    export_gguf(adapter, tmp_path / "out", adapter_alone=True, llama_cpp=llama_cpp)
    assert before == {file.name: file.read_bytes() for file in adapter.iterdir() if file.is_file()}
    with closing(LemaModel.from_pretrained(adapter, device="cpu")) as model:
        assert list(model.get_trainable_parameters())


def test_towers_are_not_in_the_file_and_adapters_of_them_are_refused(
    llama_cpp: Path, tmp_path: Path
) -> None:
    directory = publish_with_processor("llava", tmp_path / "model")
    for targets, adapter in ((TOWERLESS, "text"), ("all-linear", "towers")):
        config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        with closing(streamed(directory, config, modalities="all", device="cpu")) as model:
            model.save_pretrained(str(tmp_path / adapter))
    written = export_gguf(tmp_path / "text", tmp_path / "gguf", llama_cpp=llama_cpp)
    assert any("--mmproj" in note and "vision_tower" in note for note in written.notes)
    for alone in (False, True):
        with pytest.raises(ConfigError, match="the adapter adapts towers"):
            export_gguf(
                tmp_path / "towers", tmp_path / "out", llama_cpp=llama_cpp, adapter_alone=alone
            )
    assert not (tmp_path / "out").exists()
