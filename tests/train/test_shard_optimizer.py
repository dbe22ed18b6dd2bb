"""Processes that divide the optimizer's state (ZeRO-1) train as those do that have all of it, to
the last bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from ruamel.yaml import YAML
from safetensors.torch import load_file
from smallrun import opened, settings, token_rows, write_model

from lema import LemaConfig, LemaTrainer
from lema.backend.group import Alone
from lema.config.problems import SettingsError
from lema.engine.optim import divided, step_share
from lema.errors import ConfigError
from lema.train.metrics import read_metrics


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("divided")
    write_model(directory / "model")
    rows = token_rows(18)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def train(place: Path, name: str, count: int, *arguments: str, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "model_name_or_path": str(place / "model"),
        "device": "cpu",
        "output_dir": str(place / name),
        "train_data": str(place / "train.jsonl"),
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lora_bias": "lora_only",
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_train_epochs": 1,
        "save_steps": 2,
        "lr_scheduler_type": "constant",
    }
    file = place / f"{name}.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(given | changes, out)
    done = run_program(["-m", "lema", "train", str(file), *arguments], count, place)
    assert done.returncode == 0, done.stderr[-4000:]
    return place / name


def losses(directory: Path) -> list[Any]:
    return [
        (row.get("loss"), row.get("grad_norm")) for row in read_metrics(directory / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"loraplus_lr_ratio": 4.0, "lora_bias": "none", "weight_decay": 0.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["biases", "loraplus"],
)
def test_losses_adapters_and_checkpoints_are_those_of_undivided_state(
    place: Path, changes: dict[str, Any]
) -> None:
    name = "-".join(["run", *changes])
    one = train(place, f"{name}-whole", 2, **changes)
    other = train(place, f"{name}-parts", 2, shard_optimizer=True, **changes)
    assert losses(one) == losses(other) and len(losses(one)) > 3
    for file in (
        "adapter_model.safetensors",
        "checkpoint-2/adapter_model.safetensors",
        "checkpoint-4/optimizer.safetensors",
    ):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    states = [
        json.loads(next((path / "checkpoint-4").glob("*state*.json")).read_text())
        for path in (one, other)
    ]
    assert states[0].keys() == states[1].keys()


@pytest.mark.slow
def test_two_copies_that_two_processes_hold_each_divide_their_parts(place: Path) -> None:
    options: dict[str, Any] = {
        "neuron_runtime": "emulated",
        "tensor_parallel_size": 2,
        "lora_bias": "none",
    }
    options["device"] = "neuron"
    one = train(place, "grid-whole", 4, **options)
    other = train(place, "grid-parts", 4, shard_optimizer=True, **options)
    assert losses(one) == losses(other)
    for file in ("adapter_model.safetensors", "checkpoint-4/optimizer.safetensors"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    alone = train(place, "grid-parts", 1, "--resume", device="cpu", lora_bias="none", max_steps=6)
    assert len(losses(alone)) > len(losses(one))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "then", "parts"), [(2, 1, True), (1, 2, True), (2, 2, False), (2, 3, True)]
)
def test_a_run_goes_on_with_any_number_of_processes_divided_or_not(
    place: Path, count: int, then: int, parts: bool
) -> None:
    name = f"moved-{count}-{then}-{parts}"
    train(place, name, count, max_steps=2, shard_optimizer=count > 1)
    whole = train(place, f"{name}-whole", 1)
    moved = train(place, name, then, "--resume", shard_optimizer=parts)
    left, right = (load_file(path / "adapter_model.safetensors") for path in (whole, moved))
    assert all(
        float((left[key] - right[key]).norm()) <= 1e-5 * float(left[key].norm()) for key in left
    )


STEP = """
import sys
from pathlib import Path

import torch
from smallrun import settings, token_rows

from lema import LemaModel
from lema.data import Batches
from lema_cpu import CpuBackend

place, out = map(Path, sys.argv[1:])
model = LemaModel(settings(place / "model", out, shard_optimizer=True), backend=CpuBackend(poison=True))
replicas = model.backend.replicas
model.initialize_lora()
trainer = model.get_trainer()
for step in range(2):
    batches = Batches(token_rows(8), 8, shuffle=False, rank=replicas.rank, size=replicas.size, micro_batch_size=2)
    trainer.accumulate(batches.micro_batches([0]))
    if step == 0:
        trainer.save_checkpoint(out / "saved")
        trainer.load_checkpoint(out / "saved")
    state = trainer.ready().state
    held = sum(one.nbytes for entries in state.values() for one in entries.values() if one.dim())
    every = replicas.exchange(held)
    whole = 2 * sum(one.nbytes for one in model.get_trainable_parameters())
    assert sum(every) == whole and max(every) < 0.6 * whole, (every, whole)
    assert max(every) == whole - model.opened._elsewhere(), "the plan has another number"
after = replicas.exchange([one.detach().numpy().tobytes() for one in model.get_trainable_parameters()])
assert all(one == after[0] for one in after), "the processes have other adapters"
model.close()
"""


def test_each_process_holds_its_share_and_the_plan_counts_it(place: Path, tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = run_program([str(script), str(place), str(tmp_path / "out")], 2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_shares_are_whole_parameters_and_even() -> None:
    sizes = [5, 1, 9, 3, 3, 7, 2]
    shares = divided(sizes, 3)
    assert sorted(place for share in shares for place in share) == list(range(7))
    loads = [sum(sizes[place] for place in share) for share in shares]
    assert max(loads) - min(loads) <= min(sizes) + 1
    assert divided([4], 3) == [[0], [], []]


class Second(Alone):
    """The second of two processes, to whom the first sends what it has updated."""

    rank = 1
    size = 2

    def __init__(self, sent: torch.Tensor) -> None:
        self.sent = sent
        self.sums = 0

    def sum(self, tensor: torch.Tensor) -> None:
        other = self.sent if self.sums == 0 else torch.full_like(tensor, -0.0)
        self.sums += 1
        tensor.add_(other)


def test_the_others_parameters_arrive_to_the_last_bit_and_gradients_stay() -> None:
    first = torch.nn.Parameter(torch.ones(4))
    second = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([first, second], lr=0.1)
    first.grad = torch.ones(4)
    second.grad = torch.full((2,), -1.0)
    sent = torch.tensor([-0.0, 0.0, 1e-42, 3.0])
    step_share(optimizer, Second(sent), optimizer.step)
    assert first.detach().numpy().tobytes() == sent.numpy().tobytes()
    assert bool((second > 1.0).all()) and first not in optimizer.state
    assert torch.equal(first.grad, torch.ones(4))


def test_what_cannot_be_divided_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="may belong to several parameters together"):
        LemaConfig(str(place / "model"), shard_optimizer=True, optim="adafactor")
    with (
        pytest.warns(UserWarning, match="shard_optimizer does nothing in one process"),
        opened(settings(place / "model", tmp_path, shard_optimizer=True)) as model,
    ):
        optimizer = torch.optim.SGD(model.get_trainable_parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="the state of SGD may belong"):
            LemaTrainer(
                model.config, model.adapter, model.gbi, model.lora_manager, optimizer, model.memory
            )
