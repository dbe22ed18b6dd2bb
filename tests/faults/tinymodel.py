"""A model of two tiny layers with all its small files, an adapter of it, and the settings of a
run of one step.
"""

import atexit
import contextlib
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from faults import forked

__all__ = ["TinyModel", "tiny_model"]

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class TinyModel:
    """What cases make their files of.

    Attributes:
        place: the directory of the model, the adapter and the rows.
        numbers: of the directories of cases.
    """

    place: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self) -> Path:
        """Make an empty directory for a case."""
        place = self.place / "cases" / str(next(self.numbers))
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def model(self, place: Path) -> Path:
        """Copy the model for a case."""
        return Path(shutil.copytree(self.place / "model", place / "model"))

    def adapter(self, place: Path) -> Path:
        """Copy the adapter for a case."""
        return Path(shutil.copytree(self.place / "out", place / "adapter"))

    def config(self, place: Path, **settings: object) -> Path:
        """Write the settings of a run of one step for a case; its model is the case's, where it
        has one.
        """
        model = place / "model"
        given = {
            "model_name_or_path": str(model if model.is_dir() else self.place / "model"),
            "train_data": str(self.place / "rows.jsonl"),
            "output_dir": str(place / "out"),
            "device": "cpu",
            "max_steps": 1,
            "max_length": 48,  # a chat of two messages has 30
            "batch_size": 2,
            "lora_rank": 2,
            "save_steps": 0,
            "data_cache": False,
            **settings,
        }
        file = place / "run.yaml"
        lines = [
            f"{key}: {json.dumps(value)}\n" for key, value in given.items() if value is not None
        ]
        file.write_text("".join(lines), encoding="utf-8")
        return file


@cache
def tiny_model() -> TinyModel:
    """Make them, and import what commands need, once in this process.

    Raises:
        RuntimeError: a command fails on what is not harmed.
    """
    import smallrun  # noqa: F401 - what a child would import, and this process after it
    import torch

    import lema.train.phases.run
    import lema.train.run  # noqa: F401

    torch.set_num_threads(1)
    made = TinyModel(Path(tempfile.mkdtemp(prefix="lema-bombs-")))
    atexit.register(shutil.rmtree, made.place, ignore_errors=True)
    ended = forked.warm(lambda: _make(made), made.place / "log")
    if ended.code:
        raise RuntimeError(f"the model could not be made ({ended.code}): {ended.said}")
    return made


def _make(made: TinyModel) -> int:
    from safetensors import safe_open
    from smallrun import SENTENCES, write_model

    from lema.cli.app import app
    from lema.cli.exitcodes import run

    write_model(made.place / "model", **SIZES)
    names = safe_open(made.place / "model" / "model.safetensors", "pt").keys()
    small = {
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(names, "model.safetensors")},
        "special_tokens_map.json": {
            "eos_token": "<eos>",
            "pad_token": {"content": "<eos>", "lstrip": False},
        },
    }
    for name, content in small.items():
        (made.place / "model" / name).write_text(json.dumps(content), encoding="utf-8")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in SENTENCES[:4])
    (made.place / "rows.jsonl").write_text(rows, encoding="utf-8")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (made.place / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n", encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        return run(
            app, ["train", str(made.config(made.fresh(), output_dir=str(made.place / "out")))]
        )
