"""The experts that a real vLLM chose, in half precision, are replayed by a learner: its
log-probabilities are nearer to the server's than with its own choices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllmchoices
from peft import LoraConfig
from publishedclass import publish
from servedmodels import EXPERTS, SETTINGS, measured
from smallrun import token_rows, tokenizer
from torch import Tensor
from transformers import CONFIG_MAPPING

import lema
from lema.train.hf.peftmodel import StreamedPeftModel

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

MANY = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4}
LENGTH = 100


def of_vllm(model: Path, rows: list[list[int]], place: Path) -> tuple[Tensor, Tensor]:
    """vLLM's log-probabilities, `[rows, tokens - 1]`, and its choices, `[rows, tokens, layers,
    experts of each token]`."""
    here = str(Path(vllmchoices.__file__).parent)
    environment = os.environ | {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, vllmchoices.__file__, str(model), str(place)],
        input=json.dumps(rows),
        text=True,
        check=True,
        env=environment,
    )
    found = json.loads(place.read_text())
    return torch.tensor(found["logprobs"]), torch.tensor(found["choices"])


def log_probabilities(model: StreamedPeftModel, rows: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=rows, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_replayed_choices_bring_a_learner_nearer_to_the_server(
    model_type: str, tmp_path: Path
) -> None:
    settings = {**SETTINGS[model_type], **EXPERTS, **MANY, "num_hidden_layers": 8}
    directory = publish(model_type, tmp_path / "model", CONFIG_MAPPING[model_type](**settings))
    tokenizer().save_pretrained(directory)
    rows = [row["input_ids"][:LENGTH] for row in token_rows(8, length=LENGTH + 8)]
    expected, choices = of_vllm(directory, rows, tmp_path / "numbers.json")
    model = lema.streamed(directory, LoraConfig(target_modules="all-linear"), device="cpu")
    ids = torch.tensor(rows)
    free = (log_probabilities(model, ids) - expected).abs()
    with model.replaying(choices):
        told = (log_probabilities(model, ids) - expected).abs()
    measured(f"{model_type}, experts chosen freely", float(free.mean()), 1.0)
    measured(f"{model_type}, the server's experts", float(told.mean()), float(free.mean()))
    model.close()
