"""Checkpoints of single steps: when they are written, what resumes from them bit for bit, what
is refused.
"""

import errno
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from smallrun import (
    adapter_of,
    batch,
    momentum,
    opened,
    settings,
    whole_model,
    write_model,
)
from torch import Tensor

from lema import LemaModel, LemaTrainer
from lema.engine.optim import make_schedule
from lema.errors import AdapterError, ConfigError, DiskError
from lema.storage.manifest import write_manifest
from lema.train.checkpoint.format import checkpoints

Optimizers = Callable[[list[Tensor]], torch.optim.Optimizer]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("gpt2"), "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1
    )


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Iterator[LemaModel]:
    with opened(settings(llama, tmp_path / "out")) as found:
        yield found


@pytest.mark.slow
def test_steps_save_a_checkpoint_every_save_steps(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen = {}
    with opened(settings(llama, out, save_steps=2, gradient_accumulation_steps=2)) as model:
        trainer = model.get_trainer()
        for call in range(1, 10):
            trainer.train_step(batch(call))
            seen[call] = adapter_of(model.skeleton)
            names = sorted(path.name for path in out.iterdir()) if out.exists() else []
            assert names == [f"checkpoint-{step}" for step in (2, 4) if 2 * step <= call]
    for step in (2, 4):
        found = adapter_of(whole_model(llama, out / f"checkpoint-{step}"))
        assert all(torch.equal(found[name], tensor) for name, tensor in seen[2 * step].items())
        files = [path.suffix for path in (out / f"checkpoint-{step}").iterdir()]
        assert set(files) == {".json", ".safetensors"}  # nothing is pickled


@pytest.mark.slow
def test_old_checkpoints_go_when_there_are_too_many(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path / "out", save_steps=1, save_total_limit=2)) as model:
        trainer = model.get_trainer()
        for seed in range(4):
            trainer.train_step(batch(seed))
        assert [path.name for path in checkpoints(Path(trainer.config.output_dir))] == [
            "checkpoint-3",
            "checkpoint-4",
        ]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_checkpoints_of_later_steps_are_not_counted_as_old(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-500").mkdir(parents=True)
    with opened(settings(llama, tmp_path / "out", save_steps=1, save_total_limit=2)) as model:
        trainer = model.get_trainer()
        for seed in range(3):
            trainer.train_step(batch(seed))
        assert [path.name for path in checkpoints(Path(trainer.config.output_dir))] == [
            "checkpoint-2",
            "checkpoint-3",
            "checkpoint-500",
        ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("make", [None, momentum], ids=["adamw", "momentum"])
def test_a_checkpoint_resumes_bitwise_with_dropout(
    gpt2: Path, recompute: bool, make: Optimizers | None, tmp_path: Path
) -> None:
    config = settings(
        gpt2,
        tmp_path / "out",
        lora_dropout=0.1,
        gradient_checkpointing=recompute,
        max_grad_norm=0.5,
    )

    def trainer_of(model: LemaModel) -> LemaTrainer:
        trainer = model.get_trainer(make and make(model.get_trainable_parameters()))
        trainer.follow(
            make_schedule(
                trainer.ready(), config.model_copy(update={"lr_scheduler_type": "cosine"}), 6
            )
        )
        return trainer

    with opened(config) as model:
        trainer = trainer_of(model)
        torch.manual_seed(1)
        for seed in range(3):
            trainer.train_step(batch(seed))
        trainer.save_checkpoint(tmp_path / "saved", {"mine": [1, "two"]})
        expected = [trainer.train_step(batch(seed))[1] for seed in range(3, 6)]
        straight = adapter_of(model.skeleton)
        drawn = (torch.rand(1), random.random(), np.random.random())
    with opened(config) as model:
        trainer = trainer_of(model)
        torch.manual_seed(2)
        random.seed(2)
        np.random.seed(2)
        # leaves moments, gradients and generators that must all be overwritten
        trainer.train_step(batch(99))
        assert trainer.load_checkpoint(tmp_path / "saved") == {"mine": [1, "two"]}
        assert trainer.global_step == 3
        found = [trainer.train_step(batch(seed))[1] for seed in range(3, 6)]
        resumed = adapter_of(model.skeleton)
    assert found == expected
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert (torch.rand(1), random.random(), np.random.random()) == drawn


@pytest.mark.slow
def test_loading_drops_the_batches_of_a_step_not_taken(llama: Path, tmp_path: Path) -> None:
    found = []
    for stray in (False, True):
        with opened(settings(llama, tmp_path, gradient_accumulation_steps=2)) as model:
            trainer = model.get_trainer()
            trainer.save_checkpoint(tmp_path / "saved")
            if stray:
                trainer.train_step(batch(7))
            trainer.load_checkpoint(tmp_path / "saved")
            trainer.train_step(batch(1))
            trainer.train_step(batch(2))
            found.append(adapter_of(model.skeleton))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def spoil_json(directory: Path) -> None:
    (directory / "state.json").write_text('{"global_step": 1')


def spoil_keys(directory: Path) -> None:
    (directory / "state.json").write_text('{"global_step": 1}')


def spoil_generators(directory: Path) -> None:
    text = (directory / "state.json").read_text()
    (directory / "state.json").write_text(text.replace('"torch": "', '"torch": "AAAA", "was": "'))


def cut_optimizer(directory: Path) -> None:
    file = directory / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def remove_adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_json, "state cannot be read"),
        (spoil_keys, "not the state of a checkpoint"),
        (spoil_generators, "state is damaged"),
        (cut_optimizer, "optimizer cannot be restored"),
        (remove_adapter, "there is no adapter here"),
        (shutil.rmtree, "state cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    model: LemaModel, spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    trainer = model.get_trainer()
    trainer.train_step(batch(1))
    trainer.save_checkpoint(tmp_path / "saved")
    spoil(tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"a file|manifest") as caught:
        trainer.load_checkpoint(tmp_path / "saved")
    assert str(tmp_path / "saved") in caught.value.where
    # what the manifest would have told is told all the same
    with pytest.raises(AdapterError, match=words) as caught:
        trainer.restore(tmp_path / "saved")
    assert str(tmp_path / "saved") in caught.value.where


def test_a_checkpoint_of_another_optimizer_is_refused(model: LemaModel, tmp_path: Path) -> None:
    first = model.get_trainer(momentum(model.get_trainable_parameters()))
    first.train_step(batch(1))
    first.save_checkpoint(tmp_path / "saved")
    with pytest.raises(AdapterError, match="of the optimizer SGD, not of AdamW"):
        model.get_trainer().load_checkpoint(tmp_path / "saved")


def test_a_failed_save_leaves_what_was_there(model: LemaModel, tmp_path: Path) -> None:
    trainer = model.get_trainer()
    trainer.train_step(batch(1))
    trainer.save_checkpoint(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    trainer.train_step(batch(2))

    def fail(part: Path) -> None:
        assert (part / "adapter_model.safetensors").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match="No space left on device") as caught:
        trainer.save_checkpoint(tmp_path / "saved", writers=[fail])
    assert caught.value.where == str(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    trainer.load_checkpoint(tmp_path / "saved")
    assert trainer.global_step == 1


def test_a_state_that_only_pickle_could_save_is_refused(model: LemaModel, tmp_path: Path) -> None:
    optimizer = momentum(model.get_trainable_parameters())
    trainer = model.get_trainer(optimizer)
    optimizer.state[model.get_trainable_parameters()[0]]["history"] = {1, 2}
    with pytest.raises(ConfigError, match="cannot be saved without pickling"):
        trainer.save_checkpoint(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_checkpoint_of_another_kind_of_device_resumes_with_other_draws(
    llama: Path, tmp_path: Path
) -> None:
    """Its generator's state means nothing here; everything else goes on, the host's generators
    among it.
    """
    out = tmp_path / "out"
    with opened(settings(llama, out)) as model:
        trainer = model.get_trainer()
        trainer.train_step(batch(1))
        trainer.save_checkpoint(out / "checkpoint-1")
        expected = adapter_of(model.skeleton)
        host = torch.get_rng_state()
    file = out / "checkpoint-1" / "state.json"
    state = json.loads(file.read_text())
    assert state["generators"]["kind"] == "cpu"
    state["generators"] |= {"kind": "a device of another make", "device": "AAAA"}
    file.write_text(json.dumps(state))
    write_manifest(out / "checkpoint-1")
    with opened(settings(llama, out)) as model:
        trainer = model.get_trainer()
        trainer.load_checkpoint(out / "checkpoint-1")
        assert trainer.global_step == 1
        assert torch.equal(torch.get_rng_state(), host)
        found = adapter_of(model.skeleton)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        trainer.train_step(batch(2))
