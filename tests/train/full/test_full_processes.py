"""Several processes train the weights of one model as one does: masters are alike in all, to the
last bit.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_program
from fulltraining import config_of, everything, one_in_the_middle, opened
from tiny import Checkpoint, micro_batches

SCRIPT = """
import json
import sys
from pathlib import Path

import torch
from tiny import micro_batches

from lema import LemaConfig, LemaModel
from lema.errors import NonFiniteError
from lema.train.full.training import FullTraining
from lema_cpu import CpuBackend

settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
batches = micro_batches(4)
backend = CpuBackend(poison=True)
replicas = backend.replicas
rank, size = replicas.rank, replicas.size


def alike(training):
    told = replicas.exchange([master.detach().numpy().tobytes() for master in training.masters.values()])
    assert all(one == told[0] for one in told), "the processes have other masters"


def train(model, selection):
    config = model.config
    model.skeleton.train()
    training = FullTraining(model.adapter, config, lambda name: selection == "everything" or ".5." in name)
    (out / selection).mkdir(exist_ok=True)
    losses, norms = [], []
    for mine in (batches[rank::size], batches[3:] if rank else batches[:3]):
        losses.append(training.accumulate(mine).loss)
        norms.append(training.grad_norm)
        alike(training)
    # A step of which the last process has no rows.
    losses.append(training.accumulate([] if rank else batches).loss)
    norms.append(training.grad_norm)
    alike(training)
    training.save_checkpoint(out / selection / "checkpoint", {"size": size})
    found = {name: master.detach().clone() for name, master in training.masters.items()}
    assert training.restore(out / selection / "checkpoint") == {"size": size}
    assert all(torch.equal(master, found[name]) for name, master in training.masters.items())

    # What is not finite in one process is refused in all.
    trained = model.adapter.engine.trained
    done = trained._done

    def spoilt(layer, gradients):
        if rank == 0 and layer == 5:
            next(iter(gradients.values()))[0] = float("nan")
        done(layer, gradients)

    trained._done = spoilt
    try:
        training.accumulate(batches[rank::size])
    except NonFiniteError as error:
        assert "layers.5" in str(error), error
    else:
        raise AssertionError("a gradient was NaN")
    trained._done = done
    training.restore(out / selection / "checkpoint")
    losses.append(training.accumulate(batches[rank::size]).loss)
    alike(training)
    if rank == 0:
        after = {name: master.detach().clone() for name, master in training.masters.items()}
        torch.save({"losses": losses, "norms": norms, "masters": after}, out / selection / "found")


for selection, clipped in (("everything", None), ("one_in_the_middle", 0.5)):
    model = LemaModel(LemaConfig(**settings, max_grad_norm=clipped), backend=backend)
    train(model, selection)
    model.memory.close()
model.close()
"""


@pytest.mark.slow
def test_two_processes_train_as_one_does(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", False)
    # A small epsilon makes a step of the sign of every gradient: roundings of those near zero grow.
    config = config_of(
        checkpoint, output_dir=str(tmp_path), adam_epsilon=1e-2, gradient_checkpointing=True
    )
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = {key: value for key, value in config.to_dict().items() if key != "max_grad_norm"}
    done = run_program([str(script), json.dumps(settings), str(tmp_path)], 2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-9000:]
    for chosen, clipped in ((everything, None), (one_in_the_middle, 0.5)):
        there = tmp_path / chosen.__name__
        found = torch.load(there / "found")
        losses = []
        norms = []
        with opened(checkpoint, chosen, max_grad_norm=clipped, adam_epsilon=1e-2) as (_, training):
            for _ in range(4):
                losses.append(training.accumulate(micro_batches(4)).loss)
                norms.append(training.grad_norm)
            assert found["losses"] == pytest.approx(losses, rel=1e-5)
            assert found["norms"] == pytest.approx(norms[:3], rel=1e-4)
            assert found["masters"].keys() == training.masters.keys()
            for name, master in training.masters.items():
                expected = master.detach()
                assert float((found["masters"][name] - expected).norm()) <= 1e-5 * float(
                    expected.norm()
                ), name
        assert {path.name for path in (there / "checkpoint").iterdir()} >= {
            "state.json",
            "optimizer.safetensors",
        }
        assert not [path for path in there.iterdir() if path.name.endswith((".part", ".old"))]
