"""Several processes go through phases as one does, and a run goes on with another number of
them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_program
from phaseruns import BLOCK, ROWS, STEP, logged, rows, weights
from tiny import Checkpoint

from lema.cli.app import app
from lema.cli.exitcodes import run

FILE = """
model_name_or_path: {model}
device: cpu
output_dir: {place}/{name}
gradient_checkpointing: true
max_grad_norm: 0.5
adam_epsilon: 1.0e-2  # a small one makes the sign of every gradient a step: roundings of those near zero grow
save_steps: 1
eval_steps: 2
train_data: {{one: {place}/one.jsonl}}
eval_data: {{one: {place}/held.jsonl}}
eval_rows: 5
batch_size: {rows}
max_length: {block}
micro_batch_size: 1
phases:
  - {{name: whole, trains: full, tokens: {tokens}, learning_rate: 1e-2, mixture: [{{name: one, rate: 1.0}}]}}
  - {{name: adapters, trains: lora, tokens: {tokens}, learning_rate: 1e-1, mixture: [{{name: one, rate: 1.0}}]}}
"""


@pytest.fixture
def train(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Callable[..., Path]:
    """Train with so many processes; return the output directory."""
    for name, seed in (("one", 1), ("held", 2)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(seed))
        )

    def start(name: str, count: int, *arguments: str) -> Path:
        file = tmp_path / f"{name}.yaml"
        sizes = {"rows": ROWS, "block": BLOCK, "tokens": 2 * STEP}
        file.write_text(
            FILE.format(model=checkpoint_of("llama").streamed, place=tmp_path, name=name, **sizes)
        )
        if count == 1:
            assert run(app, ["train", str(file), *arguments]) == 0
        else:
            done = run_program(["-m", "lema", "train", str(file), *arguments], count, tmp_path)
            assert done.returncode == 0, done.stderr[-4000:]
            # one of them speaks: it begins, ends, and goes on
            assert done.stdout.count("phase whole") <= 3
        return tmp_path / name

    return start


@pytest.mark.slow
@pytest.mark.picture  # which the processes draw
def test_processes_go_through_phases_as_one_does_and_one_goes_on_alone(
    train: Callable[..., Path],
) -> None:
    alone = train("alone", 1)
    together = train("together", 2)
    moved = train("moved", 1, "--from", str(together / "whole" / "checkpoint-1"))
    expected = weights(alone / "adapters" / "checkpoint-2")
    for place in (together, moved):
        found = weights(place / "adapters" / "checkpoint-2")
        assert found.keys() == expected.keys()
        for name in expected:
            assert (
                float((found[name] - expected[name]).norm())
                <= 1e-4 * float(expected[name].norm()) + 1e-6
            ), name
    # the same samples, or the losses were others
    for key in (
        "loss",
        "grad_norm",
        "eval_loss",
        "tokens",
    ):
        assert logged(together, key) == pytest.approx(logged(alone, key), rel=1e-4), key
        assert len(logged(together, key)) == (2 if key == "eval_loss" else len(logged(alone, key)))
    assert sorted(path.name for path in together.iterdir()) == sorted(
        path.name for path in alone.iterdir()
    )
