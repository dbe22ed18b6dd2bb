"""Each verb imports what it needs, and no more: the modules of a process are counted after it, and
never its time.

A verb that builds no model imports no model of transformers and no PEFT, and one that only reads
settings or records no torch. None finds the libraries that quantise, data sets of the hub or a
compiler on its own. transformers' models import a part of torch's compiler themselves, and so does
torch where it computes without values.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.support.smallrun import token_rows, write_model

ROOT = Path(__file__).parents[2]
# None of these is needed to train a plain model, or to look at one.
NEVER = {
    "bitsandbytes",
    "datasets",
    "liger_kernel",
    "lm_eval",
    "matplotlib",
    "tensorboard",
    "torchao",
    "trl",
}
GENERATES_CODE = "torch._inductor.compile_fx"
COMPILER = {"torch._dynamo", "torch._inductor"}
MODELS = COMPILER | {"peft", "transformers.modeling_utils"}
LIBRARIES = {
    "accelerate",
    "huggingface_hub",
    "numpy",
    "pyarrow",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
}

RUN = """
import json, sys
from lema.cli import main
try:
    main()
except SystemExit as end:
    print("\\n" + json.dumps([end.code, list(sys.modules)]))
"""


def modules_after(*words: str | Path) -> set[str]:
    """Return the names of the modules that a process has after `lema WORDS`."""
    arguments = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    assert done.stdout, done.stderr
    code, modules = json.loads(done.stdout.splitlines()[-1])
    # which ends with 2 where a machine has a problem
    assert code == 0 or words[0] == "doctor", done.stderr
    return {name for name in modules if name != "kernels"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a small run: a model, settings, rows, and the directory of a run that is
    recorded.
    """
    place = tmp_path_factory.mktemp("run")
    settings: dict[str, Any] = {
        "model_name_or_path": str(write_model(place / "model")),
        "train_data": "rows.jsonl",
    }
    settings |= {"device": "cpu", "lora_rank": 2, "max_steps": 2, "save_steps": 0, "max_length": 16}
    rows = place / "rows.jsonl"
    config = place / "run.yaml"
    output = place / "output"
    rows.write_text("".join(json.dumps(row) + "\n" for row in token_rows(4)), encoding="utf-8")
    settings |= {"train_data": str(rows), "output_dir": str(output)}
    config.write_text(
        "\n".join(f"{name}: {value}" for name, value in settings.items()), encoding="utf-8"
    )
    output.mkdir()
    lines = [{"step": step, "loss": 2.0, "time": 1.7e9 + step} for step in (1, 2)]
    (output / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return {
        "MODEL": place / "model",
        "CONFIG": config,
        "ROWS": rows,
        "OUTPUT": output,
        "NEW": place / "new",
    }


@pytest.mark.parametrize(
    "words",
    ["config show CONFIG", "config schema", "report OUTPUT --output NEW", "watch OUTPUT --once"],
)
def test_a_verb_that_reads_settings_or_records_imports_no_library(
    words: str, run: dict[str, Path]
) -> None:
    modules = modules_after(*(run.get(word, word) for word in words.split()))
    assert sorted(modules & (NEVER | LIBRARIES | MODELS)) == []


@pytest.mark.parametrize(
    "words", ["data CONFIG --rows 1", "models MODEL", "report OUTPUT --output OTHER"]
)
def test_a_verb_imports_no_other_verb(words: str, run: dict[str, Path]) -> None:
    named = run | {"OTHER": run["NEW"].with_suffix(".html")}
    modules = modules_after(*(named.get(word, word) for word in words.split()))
    verbs = {
        point.value.partition(":")[0]: point.name for point in entry_points(group="lema.verbs")
    }
    assert {verbs[module] for module in modules & set(verbs)} == {words.split()[0]}


def test_a_doctor_imports_torch_and_not_what_trains(run: dict[str, Path]) -> None:
    modules = modules_after("doctor", "--quick", "--directory", run["MODEL"])
    assert "torch" in modules
    assert sorted(modules & (NEVER | MODELS | {"accelerate", "sympy", "transformers"})) == []


def test_a_look_at_data_imports_no_model_and_no_peft(run: dict[str, Path]) -> None:
    modules = modules_after("data", run["CONFIG"], "--rows", "1")
    assert "transformers" in modules
    assert sorted(modules & (NEVER | MODELS)) == []


@pytest.mark.parametrize(
    "words",
    ["models MODEL", "plan CONFIG", "init MODEL --device-memory 1GB --data ROWS --output NEW.yaml"],
)
def test_a_verb_that_builds_a_model_imports_no_library_that_quantises_and_no_generator_of_code(
    words: str, run: dict[str, Path]
) -> None:
    named = run | {"NEW.yaml": run["NEW"].with_suffix(".yaml")}
    modules = modules_after(*(named.get(word, word) for word in words.split()))
    assert "transformers.modeling_utils" in modules
    assert sorted(modules & (NEVER | {GENERATES_CODE})) == []
