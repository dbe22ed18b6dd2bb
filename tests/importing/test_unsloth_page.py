"""The pages on Unsloth: their scripts and LEMA's files have the same values, and the files run."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from defaultspage import TABLES
from ruamel.yaml import YAML

import lema.train
from lema import LemaConfig
from lema_tools.demo import run_demo

DOCS = Path(__file__).parents[2] / "docs"
DEFAULTS = json.loads(TABLES["Unsloth"].read_text(encoding="utf-8"))["defaults"]["all"]
PAGES = ("coming-from-unsloth.md", "coming-from-unsloth-more.md")
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
FILES = ("chat.yaml", "dpo.yaml", "text.yaml")
SAME = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "lora_use_rslora",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "warmup_steps": "warmup_steps",
    "warmup_ratio": "warmup_ratio",
    "max_steps": "max_steps",
    "num_train_epochs": "num_train_epochs",
    "learning_rate": "learning_rate",
    "optim": "optim",
    "weight_decay": "weight_decay",
    "lr_scheduler_type": "lr_scheduler_type",
    "seed": "seed",
    "beta": "beta",
    "max_grad_norm": "max_grad_norm",
    "max_seq_length": "max_length",
    "output_dir": "output_dir",
}
ROWS = {
    "talks": {
        "conversations": [
            {"from": "human", "value": "What does the miller bring?"},
            {"from": "gpt", "value": "Flour."},
        ]
    },
    "pairs": {"prompt": "The mill is", "chosen": " old.", "rejected": " new."},
    "books": {"text": "The mill stands by the river, and the miller brings flour."},
}


def blocks(kind: str) -> list[str]:
    """The blocks of a kind, in the order of the page."""
    return re.findall(rf"<!-- unsloth {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


def settings() -> list[dict[str, Any]]:
    """The settings of the three files."""
    return [YAML(typ="safe").load(text) for text in blocks("yaml")]


class Noted:
    """Stands for whatever a script makes, and notes the arguments of every call."""

    arguments: dict[str, Any] = {}  # noqa: RUF012 # of all calls of a script

    def __getattr__(self, name: str) -> "Noted":
        return Noted()

    def __call__(self, *words: object, **arguments: Any) -> "Noted":
        Noted.arguments |= arguments
        return Noted()

    def __iter__(self) -> Any:
        return iter((Noted(), Noted()))


def arguments_of(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All arguments that a script gives by name."""
    for name in ("datasets", "trl", "unsloth", "unsloth.chat_templates"):
        module = ModuleType(name)
        module.__getattr__ = lambda _: Noted()  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    Noted.arguments = {}
    exec(compile(script, "unsloth", "exec"), {})  # a script of the page
    return Noted.arguments


@pytest.mark.parametrize("number", range(3), ids=FILES)
def test_a_script_and_its_file_have_the_same_values(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(blocks("script")[number], monkeypatch)
    file = settings()[number]
    # Where a script is silent, Unsloth's defaults stand.
    values = DEFAULTS | arguments
    names = [name for name in SAME if name in values]
    if "max_steps" in arguments:
        names.remove("num_train_epochs")
    if "warmup_ratio" in arguments:
        names.remove("warmup_steps")
    run = LemaConfig(**file)
    assert {SAME[name]: values[name] for name in names} == {
        SAME[name]: getattr(run, SAME[name]) for name in names
    }
    assert run.quantize_base == ("nf4" if values["load_in_4bit"] else None)
    assert arguments["data_files"] == file["train_data"]
    assert ("instruction_part" in arguments) == (number == 0)
    others = {"objective", "train_data", "model_name_or_path", "max_grad_norm", "quantize_base"}
    assert others >= file.keys() - {SAME[name] for name in SAME if name in arguments}


def test_the_python_of_the_pages_asks_for_the_runs_of_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[LemaConfig]()
    monkeypatch.setattr(lema.train, "train", asked.append)
    for example in blocks("python"):
        exec(compile(example, "page", "exec"), {})  # a block of the page
    assert [config.to_dict() for config in asked] == [
        LemaConfig(**values).to_dict() for values in settings()
    ]


@pytest.mark.slow
def test_the_files_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_demo(Path("lema-demo"), max_steps=2)
    Path("data").mkdir()
    for name, row in ROWS.items():
        lines = [json.dumps(row)] * 40
        Path("data", f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, values in zip(FILES, settings(), strict=True):
        here = {"model_name_or_path": "lema-demo/model", "output_dir": f"output/{name}"}
        here |= {"device": "cpu", "optim": "adamw_torch", "max_steps": 2, "warmup_steps": 1}
        here |= {"max_length": 64, "warmup_ratio": 0.0}
        lema.train.train(LemaConfig(**{**values, **here}))
        assert Path("output", name, "adapter_model.safetensors").is_file()
