"""Several processes train as one does: the same steps on the same batches, each reading and
computing its share.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked import run_program
from processes import run_processes, started_processes
from ruamel.yaml import YAML
from safetensors.torch import load_file
from smallrun import opened, settings, token_rows, write_model

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.data import collate
from lema.engine.head.loss import split_batch
from lema.train.metrics import read_metrics

Launch = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of different lengths to train on, others to evaluate on."""
    directory = tmp_path_factory.mktemp("replicas")
    write_model(directory / "model")
    for name, rows in (("train", token_rows(26)), ("eval", token_rows(9, seed=5))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def written(place: Path, name: str, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "model_name_or_path": str(place / "model"),
        "device": "cpu",
        "output_dir": str(place / name),
        "train_data": str(place / "train.jsonl"),
        "eval_data": str(place / "eval.jsonl"),
        "lora_rank": 4,
        "learning_rate": 1e-2,
        # a small one makes the sign of every gradient a step: roundings of those near zero grow
        "adam_epsilon": 1e-2,
        "max_grad_norm": 0.5,
        "gradient_checkpointing": True,
        # the last batch of an epoch has two rows: with four processes, two have none
        "batch_size": 8,
        "micro_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 4,
    }
    file = place / f"{name}.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(settings | changes, out)
    return file


def train(
    place: Path, name: str, count: int, *arguments: str, started: bool = False, **changes: Any
) -> Path:
    """Train with `count` processes, which torchrun has `started` or not; return the output
    directory.
    """
    config = written(place, name, **changes)
    if count == 1:
        assert run(app, ["train", str(config), *arguments]) == 0
    else:
        command = ["-m", "lema", "train", str(config), *arguments]
        done = run_processes(command, count) if started else run_program(command, count, place)
        assert done.returncode == 0, done.stderr[-4000:]
    return place / name


def adapter(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def assert_alike(one: Path, other: Path) -> None:
    """Adapters and every measured loss are the same, but for the order of additions."""
    left = adapter(one)
    right = adapter(other)
    assert left.keys() == right.keys()
    for name in left:
        assert float((left[name] - right[name]).norm()) <= 1e-5 * float(left[name].norm()), name
    rows = [read_metrics(directory / "metrics.jsonl") for directory in (one, other)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for mine, theirs in zip(*rows, strict=True):
        for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "train_loss"):
            assert (key in mine) == (key in theirs)
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (
                    f"{key} of step {mine['step']}"
                )


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    return train(place, "one", 1)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("count", "changes"),
    [(2, {}), (4, {"strategy": "resident"}), (4, {"shard_weights": True})],
    ids=["2", "4-host-memory-shared", "4-weights-sharded"],
)
def test_several_processes_train_as_one_does(
    place: Path, alone: Path, count: int, changes: dict[str, Any]
) -> None:
    name = f"with-{count}{len(changes)}{'shard_weights' in changes}"
    together = train(place, name, count, started=not changes, **changes)
    assert_alike(alone, together)
    assert sorted(path.name for path in together.iterdir()) == sorted(
        path.name for path in alone.iterdir()
    )


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(place: Path, alone: Path) -> None:
    """Four steps with two processes, the others with one: a step depends on its batch, not on
    who shares it.
    """
    train(place, "moved", 2, max_steps=4, lr_scheduler_type="constant")
    whole = train(place, "unmoved", 1, lr_scheduler_type="constant")
    moved = train(place, "moved", 1, "--resume", lr_scheduler_type="constant")
    left = adapter(whole)
    right = adapter(moved)
    assert all(
        float((left[name] - right[name]).norm()) <= 1e-5 * float(left[name].norm()) for name in left
    )


STEP = """
import sys
from pathlib import Path

import torch
from smallrun import draw_b, settings, token_rows

from lema import LemaModel
from lema.data import Batches
from lema.errors import ConfigError, DataError, DiskError
from lema.engine.head.loss import split_batch
from lema.backend.group import check_alike, first_alone
from lema_cpu import CpuBackend

place, out = map(Path, sys.argv[1:])
model = LemaModel(settings(place / "model", out), backend=CpuBackend(poison=True))
replicas = model.backend.replicas
rank, size = replicas.rank, replicas.size
model.initialize_lora()
draw_b(model.skeleton)
trainer = model.get_trainer()
found = {}


def note(event):
    for name, parameter in model.skeleton.named_parameters():
        if parameter.requires_grad and event == "on_pre_optimizer_step":
            found[name] = parameter.grad.clone()


data = token_rows(11)
batches = Batches(data, 11, shuffle=False, rank=rank, size=size, micro_batch_size=2)
result = trainer.accumulate(batches.micro_batches([0]), on_event=note)
rows = replicas.exchange([row for group in batches.groups([0]) for row in group])
alike = replicas.exchange({name: gradient.numpy().tobytes() for name, gradient in found.items()})
assert all(one == alike[0] for one in alike), "the processes have other gradients"
after = replicas.exchange([parameter.detach().numpy().tobytes() for parameter in model.get_trainable_parameters()])
assert all(one == after[0] for one in after), "the processes have other adapters"

# A parameter that one process alone has a gradient of, and one that none has a gradient of.
mine, nobody, both = model.get_trainable_parameters()[:3]
mine.grad = torch.ones_like(mine) if rank == size - 1 else None
nobody.grad = None
both.grad = torch.full_like(both, rank + 1.0)
from lema.backend.group import sum_gradients

sum_gradients(replicas, [mine, nobody, both])
assert torch.equal(mine.grad, torch.ones_like(mine)), mine.grad
assert nobody.grad is None
assert torch.equal(both.grad, torch.full_like(both, size * (size + 1) / 2))
for parameter in (mine, both):
    parameter.grad = None

# What goes wrong in one process goes wrong in all.
def refused(kind, work, words):
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")

def fail():
    raise DiskError("the disk is full", where="there", how="free some space")

refused(DiskError, lambda: first_alone(replicas, fail), "free some space")
about = {"seed": rank // (size - 1), "device": "cpu"}
refused(ConfigError, lambda: check_alike(replicas, about), f"seed differ\\n  where: rank {size - 1}")
check_alike(replicas, {"seed": 1})
untrained = {name: torch.full((1, 6), -100 if name == "labels" else 3) for name in ("input_ids", "labels")}
refused(DataError, lambda: trainer.accumulate([untrained]), "this step trains on no token")
assert trainer.global_step == 1
spoilt = {name: torch.full((1, 6), 3) for name in ("input_ids", "labels")}
if rank == 0:
    with torch.no_grad():
        model.get_trainable_parameters()[-1].fill_(float("nan"))
from lema.errors import NonFiniteError

words = "which trains, has become NaN or infinite" if rank == 0 else "it comes from another process"
refused(NonFiniteError, lambda: trainer.accumulate([spoilt]), words)
assert trainer.global_step == 1

if rank == 0:
    torch.save({"loss": result.loss, "norm": result.grad_norm, "rows": rows, "tokens": result.tokens, **found}, out)
model.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_one_step_of_several_processes_is_that_of_one(
    place: Path, tmp_path: Path, count: int
) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = run_program([str(script), str(place), str(tmp_path / "found")], count, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = torch.load(tmp_path / "found")
    rows = found.pop("rows")
    # each row is read by one process
    assert sorted(row for share in rows for row in share) == list(range(11))
    assert all(rows)
    with opened(settings(place / "model", tmp_path / "alone")) as model:
        expected: dict[str, Any] = {}

        def note(event: str) -> None:
            if event == "on_pre_optimizer_step":
                named = model.skeleton.named_parameters()
                expected.update(
                    {name: one.grad.clone() for name, one in named if one.grad is not None}
                )

        batch = collate(token_rows(11))
        result = model.get_trainer().accumulate(split_batch(batch, 2), on_event=note)
    assert found.pop("loss") == pytest.approx(result.loss, rel=1e-6)
    assert found.pop("norm") == pytest.approx(result.grad_norm, rel=1e-6)
    assert found.pop("tokens") == result.tokens
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        assert float((found[name] - gradient).norm()) <= 2e-6 * float(gradient.norm()), name


@pytest.mark.exhaustive  # a session has this of forked processes (test_stop_processes)
def test_a_signal_to_one_process_stops_all_of_them_after_one_step_and_the_run_goes_on(
    place: Path,
) -> None:
    """The adapter is bitwise that of two processes that were never stopped."""
    length = {
        "num_train_epochs": 5,
        "save_steps": 0,
        "lr_scheduler_type": "constant",
        "lora_dropout": 0.2,
    }
    whole = train(place, "never-stopped", 2, **length)
    config = written(place, "stopped", **length)
    out = place / "stopped"
    with started_processes(["-m", "lema", "train", str(config)], 2) as started:
        while not (out / "metrics.jsonl").exists() or len(read_metrics(out / "metrics.jsonl")) < 3:
            assert started.poll() is None, started.communicate()
            time.sleep(0.05)
        workers = psutil.Process(started.pid).children(recursive=True)
        ranks = {worker.environ().get("RANK"): worker for worker in workers}
        ranks["1"].send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=120)
    assert started.returncode != 0
    assert errors.count("stopped by SIGTERM after step") == 2, errors[-4000:]
    (checkpoint,) = out.glob("checkpoint-*")
    assert 3 <= int(checkpoint.name.removeprefix("checkpoint-")) < 20
    train(place, "stopped", 2, "--resume", **length)
    left = adapter(whole)
    right = adapter(out)
    assert all(torch.equal(left[name], right[name]) for name in left)
