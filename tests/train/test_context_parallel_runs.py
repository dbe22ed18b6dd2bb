"""Runs in which processes divide the sequence of each row: they train as one process does, stop and
go on, and end together.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from smallrun import opened, settings, token_rows, write_model
from test_replicas import adapter, assert_alike, train, written

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.data import collate


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of different lengths to train on, others to evaluate on."""
    directory = tmp_path_factory.mktemp("divided")
    write_model(directory / "model")
    for name, rows in (("train", token_rows(26)), ("eval", token_rows(9, seed=5))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    return train(place, "one", 1)


@pytest.fixture(scope="module")
def divided(place: Path) -> Path:
    return train(place, "divided", 2, context_parallel_size=2)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {"started": True}),
        (4, {"packing": True, "max_length": 32}),
        (2, {"shard_weights": True, "sequence_chunk": 3, "boundary_activations": "host"}),
        (4, {"context_parallel_size": 2}),
    ],
    ids=["2-by-torchrun", "4-packed", "2-sharded-chunks", "2-by-2"],
)
def test_processes_that_divide_rows_train_as_one_does(
    place: Path, alone: Path, count: int, changes: dict[str, Any]
) -> None:
    name = f"with-{count}-{len(changes)}"
    packs = {key: value for key, value in changes.items() if key in ("packing", "max_length")}
    expected = train(place, "packed", 1, **packs) if packs else alone
    together = train(place, name, count, **{"context_parallel_size": count} | changes)
    assert_alike(expected, together)
    if not packs:  # of which one process draws no picture here
        assert sorted(path.name for path in together.iterdir()) == sorted(
            path.name for path in expected.iterdir()
        )


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(
    place: Path, alone: Path, divided: Path
) -> None:
    """Rows may be divided in a part of a run: its steps are those of one process."""
    constant = {"lr_scheduler_type": "constant"}
    train(place, "moved", 2, context_parallel_size=2, max_steps=4, **constant)
    whole = train(place, "unmoved", 1, **constant)
    moved = train(place, "moved", 1, "--resume", **constant)
    left, right = adapter(whole), adapter(moved)
    for name in left:
        assert float((left[name] - right[name]).norm()) <= 1e-5 * float(left[name].norm()), name


KILLED = """
import os
import signal
import sys

from lema.backend.contextgroup import ContextGroup
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.train.trainer import LemaTrainer

accumulate = LemaTrainer.accumulate
gather = ContextGroup.gather
left = [0]


def accumulates(self, *arguments, **options):
    left[0] = 5 if self.global_step == 5 and os.environ["RANK"] == "1" else 0
    return accumulate(self, *arguments, **options)


def gathers(self, *arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return gather(self, *arguments)


LemaTrainer.accumulate = accumulates
ContextGroup.gather = gathers
sys.exit(run(app, ["train", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_layer_ends_the_others_and_the_run_goes_on(
    place: Path, divided: Path, tmp_path: Path
) -> None:
    """The adapter is bitwise that of two processes of which none was killed."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    config = written(place, "killed", context_parallel_size=2)
    done = run_program([str(script), str(config)], 2, tmp_path)
    # of the first process, which was not killed
    assert done.returncode == 1, done.stderr[-4000:]
    assert "another process of this run has ended" in done.stderr
    assert (place / "killed" / "checkpoint-4").is_dir()
    resumed = train(place, "killed", 2, "--resume", context_parallel_size=2)
    left, right = adapter(divided), adapter(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


STEP = """
import sys
from pathlib import Path

import torch
from smallrun import draw_b, settings, token_rows

from lema import LemaModel
from lema.data import collate
from lema.engine.head.loss import split_batch
from lema.errors import ConfigError, NonFiniteError
from lema_cpu import CpuBackend

place, out = map(Path, sys.argv[1:])
config = settings(place / "model", out, context_parallel_size=2)
model = LemaModel(config, backend=CpuBackend(poison=True))
replicas = model.backend.replicas
model.initialize_lora()
draw_b(model.skeleton)
trainer = model.get_trainer()
batch = collate(token_rows(5))
logits, value = trainer.train_step(batch)
assert not logits.numel(), "a process has a part of the logits"
after = replicas.exchange([parameter.detach().numpy().tobytes() for parameter in model.get_trainable_parameters()])
assert after[0] == after[1], "the processes have other adapters"
batches = split_batch(batch, 2)
hidden = [state.shape for state in list(model.adapter.hidden_states(batches))[-1]]
lengths = [part["input_ids"].shape for part in batches]
shares = [sum(sizes) for sizes in zip(*(([shape[1] for shape in of]) for of in replicas.exchange(hidden)))]
assert shares == [length for _, length in lengths], "a process has more than its part of a row"
assert all(2 * shape[1] <= length + 2 for shape, (_, length) in zip(hidden, lengths))
if replicas.rank == 0:
    torch.save(value, out / "value.pt")

model.adapter.division.group.sent.clear()
with torch.no_grad():
    if replicas.rank == 0:
        model.get_trainable_parameters()[-1].fill_(float("nan"))
try:
    trainer.accumulate(batches)
except NonFiniteError as error:
    assert "has become NaN" in str(error) or "first non-finite output" in str(error), error
else:
    raise AssertionError("no NonFiniteError")
model.close()
"""


@pytest.mark.slow
def test_each_process_has_its_part_of_every_row(place: Path, tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = run_program([str(script), str(place), str(tmp_path)], 2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    with opened(settings(place / "model", tmp_path / "alone")) as model:
        _, expected = model.get_trainer().train_step(collate(token_rows(5)))
    assert torch.load(tmp_path / "value.pt") == pytest.approx(expected, rel=1e-6)


def test_one_process_divides_no_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(place, "refused", context_parallel_size=2)
    assert run(app, ["train", str(config)]) == 2
    said = capsys.readouterr().err
    assert "1 process cannot divide rows in groups of 2" in said
    assert "torchrun --nproc-per-node 2" in said
