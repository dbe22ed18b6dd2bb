"""The loops of the Tinker cookbook, unchanged but for the server they talk to.

There is no network: what the loops take from the hub, they find in the folder where they run,
because a name such as `Qwen/Qwen3-32B` is looked up there first. So the model with its tokenizer,
and a data set of the columns of each loop's own, are folders of those names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learnerprocess import LearnerProcess
from smallrun import tokenizer
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL = "Qwen/Qwen3-32B"
TALK = [
    {"role": "user", "content": "Who grinds corn?"},
    {"role": "assistant", "content": "The miller of mill 3 grinds corn by the river."},
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# texts of a random model have answers at all, because each of these is one token
ANSWERS = [f"\\boxed{{{number}{' ' * spaces}}}" for number in (1, 2) for spaces in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the loops run."""
    folder = tmp_path_factory.mktemp("cookbook")
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    words.add_tokens(ANSWERS)
    words.save_pretrained(folder / MODEL)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / MODEL)
    write_rows(folder / "HuggingFaceH4/no_robots", [{"messages": TALK}] * 12)
    problems = [
        {"question": f"How many are {number} mills?", "answer": f"Well.\n#### {number}"}
        for number in (1, 2, 1, 2)
    ]
    write_rows(folder / "openai/gsm8k", problems)
    return folder


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Write a data set as the hub has it, with one split and the configuration `main`."""
    directory.mkdir(parents=True)
    files = "data_files: [{split: train, path: train.jsonl}]"
    card = f"---\nconfigs: [{{config_name: main, {files}}}]\n---\n"
    (directory / "README.md").write_text(card)
    (directory / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[LearnerProcess]:
    arguments = ["--name", MODEL, "--max-length", "1024", "--max-rank", "32"]
    process = LearnerProcess(folder / MODEL, folder / "kept", arguments)
    process.start()
    yield process
    process.stop()


def run(
    loop: str, process: LearnerProcess, folder: Path, log: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a loop as docs/learner.md does."""
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{loop}", f"model_name={MODEL}"]
    return subprocess.run(
        [*command, f"log_path={log}", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
            "TINKER_API_KEY": process.secret,
            "TINKER_BASE_URL": process.url,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def logged(loop: str, process: LearnerProcess, folder: Path, *arguments: str) -> list[Any]:
    """Run a loop to its end; return what it has logged of each step."""
    log = folder / "-".join([loop, *arguments[-1:]])
    done = run(loop, process, folder, log, *arguments)
    assert done.returncode == 0, done.stdout
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["name"] == "final"
    assert "sampler_path" in saved[-1]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def whole_loss(folder: Path) -> float:
    """Return the loss of the supervised loop's row under the whole model."""
    model = Qwen3ForCausalLM.from_pretrained(folder / MODEL)
    renderer = get_renderer("qwen3", AutoTokenizer.from_pretrained(folder / MODEL))
    datum: Any = conversation_to_datum(TALK, renderer, 1024, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    ids = torch.tensor([datum.model_input.to_ints()])
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].tolist())
    weights = torch.tensor(datum.loss_fn_inputs["weights"].tolist())
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    of_targets = logprobs.gather(-1, targets[:, None])[:, 0]
    return float(-(of_targets * weights).sum() / weights.sum())


def test_the_supervised_loop_learns(process: LearnerProcess, folder: Path) -> None:
    steps = logged("sl_loop", process, folder, "batch_size=4", "save_every=1", "learning_rate=1e-2")
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(whole_loss(folder), rel=1e-5)
    assert losses[0] > losses[1] > losses[2]


SIZES = ("batch_size=2", "group_size=16", "max_tokens=8", "save_every=1")


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_the_loop_of_reinforcement_learning_samples_and_steps(
    process: LearnerProcess, folder: Path, loss: str
) -> None:
    steps = logged("rl_loop", process, folder, *SIZES, f"loss_fn={loss}")
    assert [step["progress/batch"] for step in steps] == [0, 1]
    assert all(0 < step["reward/total"] < 1 for step in steps)
    assert all(step["grad_norm:mean"] > 0 for step in steps)


def test_a_loss_that_the_server_does_not_have_ends_the_loop_in_a_sentence(
    process: LearnerProcess, folder: Path
) -> None:
    done = run("rl_loop", process, folder, folder / "default", *SIZES)
    assert done.returncode != 0
    assert "there is no loss 'stable_reinforce'. take one of cross_entropy, imp" in done.stdout
