"""The file that `lema config import` writes, run by `lema train`, against TRL's own script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smallrun import write_model
from test_trl_imports import COMMON, DATA, own_loss
from trlimports import Steps, run_by_trl, write_file, write_rows

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.train.metrics import read_metrics

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("FutureWarning", "UserWarning", "DeprecationWarning")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("files")
    write_model(directory / "model", num_hidden_layers=2)
    for name in ("texts", "answers"):
        write_rows(directory / name, DATA[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(directory / "cache"))
        patch.chdir(directory)
        yield directory


def both(place: Path, out: Path, values: dict[str, Any]) -> tuple[Steps, Steps]:
    """Return the steps of TRL, with the loss of `transformers`, and of the imported file."""
    values = COMMON | {"model_name_or_path": str(place / "model")} | values
    file = write_file(out / "trl.yaml", values | {"output_dir": str(out / "trl")})
    theirs = run_by_trl(file, "sft", loss=own_loss)
    write_file(file, values | {"output_dir": str(out / "lema")})
    command = ["config", "import", str(file), "--from", "trl", "--objective", "sft"]
    assert run(app, [*command, "--output", str(out / "my.yaml")]) == 0
    assert run(app, ["train", str(out / "my.yaml"), "--set", "device=cpu"]) == 0
    (metrics,) = (out / "lema").rglob("metrics.jsonl")
    rows = [row for row in read_metrics(metrics) if "loss" in row]
    return theirs, Steps([row["loss"] for row in rows], [row["grad_norm"] for row in rows])


def test_the_file_of_an_adapter(place: Path, tmp_path: Path) -> None:
    theirs, ours = both(place, tmp_path, {"dataset_name": str(place / "answers")})
    assert ours == theirs


def test_slices_of_data_sets_one_after_the_other(place: Path, tmp_path: Path) -> None:
    sets = [
        {"path": str(place / "texts"), "split": "train[:60%]"},
        {"path": str(place / "texts"), "split": "train[8:]"},
    ]
    theirs, ours = both(place, tmp_path, {"datasets": sets})
    assert len(theirs.losses) == 6 and ours == theirs


WEIGHTS = {"use_peft": False, "learning_rate": 1e-3}


def test_every_weight(place: Path, tmp_path: Path) -> None:
    values = WEIGHTS | {"optim": "adamw_torch", "weight_decay": 0.1, "warmup_steps": 2}
    theirs, ours = both(place, tmp_path, {"dataset_name": str(place / "texts"), **values})
    assert ours == theirs


def test_every_weight_by_default(place: Path, tmp_path: Path) -> None:
    """TRL's default is torch's fused AdamW, whose update rounds otherwise."""
    theirs, ours = both(place, tmp_path, {"dataset_name": str(place / "texts"), **WEIGHTS})
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)
