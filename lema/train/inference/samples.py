# ruff: noqa: ARG002, T201 - a callback's parameters are given by transformers, used or not.
"""Texts that a model makes of the same prompts after each evaluation of a run, to be read by people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from lema.data.chat.prompts import fitting, prompt_ids, read_prompts, written
from lema.data.files import Row
from lema.storage.atomic import replace_file
from lema.train.inference.texts import MOST_AT_ONCE, completions, plan_of

if TYPE_CHECKING:
    from lema.train.model import LemaModel

__all__ = ["SAMPLES", "Samples"]

SAMPLES = "samples.jsonl"


class Samples(TrainerCallback):
    """Continues `eval_prompts`, always by the likeliest token, so that no random number of the run is drawn.

    Raises:
        DataError: a prompt cannot be read, or is too long for the model.
    """

    def __init__(self, model: LemaModel) -> None:
        given, self._new = model.config.eval_prompts, model.config.eval_prompts_max_new_tokens
        texts = [Row({"prompt": text}, "eval_prompts", number) for number, text in enumerate(given or (), 1)]
        self._rows = read_prompts(Path(given)) if isinstance(given, str) else texts
        self._ids = [prompt_ids(row, model.tokenizer, chat=False) for row in self._rows]
        fitting(self._rows, self._ids, self._new, getattr(model.skeleton.config, "max_position_embeddings", None))
        self._model, self._file = model, Path(model.config.output_dir) / SAMPLES

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make sure that there is room for the texts, and forget those of steps that are taken again."""
        plan_of(self._model, self._ids, self._new, min(len(self._ids), MOST_AT_ONCE))
        if state.is_world_process_zero and self._file.exists():
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= state.global_step]
            replace_file(self._file, "".join(kept).encode())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the texts; print them, and write them with their step."""
        size, options = min(len(self._ids), MOST_AT_ONCE), {"do_sample": False}
        made = [one for batch in completions(self._model, self._ids, self._new, size, options) for one in batch]
        if not state.is_world_process_zero:
            return
        with self._file.open("a", encoding="utf-8") as file:
            for one in sorted(made, key=lambda one: one.index):
                row = {"step": state.global_step, **written(self._rows[one.index]), "completion": one.text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(f"sample {one.index + 1} at step {state.global_step}: {one.text!r}")
