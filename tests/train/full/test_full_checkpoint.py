"""Checkpoints of weights that train themselves: taken up by another selection, from files, and
damaged.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fulltraining import attention_of_the_last_four, one_in_the_middle, opened
from tiny import Checkpoint, micro_batches

from lema.errors import AdapterError, NonFiniteError


def test_moments_are_carried_to_another_selection_by_name(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", False)
    with opened(checkpoint, attention_of_the_last_four) as (_, training):
        for _ in range(2):
            training.accumulate(micro_batches(2))
        training.save_checkpoint(tmp_path / "there", {"phase": 1})
        before = {
            name: training.optimizer.state[master] for name, master in training.masters.items()
        }

    def wider(name: str) -> bool:
        return "norm" in name or (".11." in name and "proj" in name)

    with opened(checkpoint, wider) as (_, training):
        masters = {name: master.detach().clone() for name, master in training.masters.items()}
        assert training.carry_moments(tmp_path / "there") == {"phase": 1}
        both = masters.keys() & before.keys()
        assert 0 < len(both) < len(masters) and len(both) < len(before)
        for name, master in training.masters.items():
            assert torch.equal(master, masters[name]), "masters are what the phase began with"
            state = training.optimizer.state[master]
            for key, tensor in state.items():
                assert torch.equal(
                    tensor, before[name][key] if name in both else torch.zeros_like(tensor)
                ), key
            assert (float(state["step"]), bool(state["exp_avg"].any())) == (
                (2.0, True) if name in both else (0.0, False)
            )
        assert training.global_step == 0
        training.accumulate(micro_batches(2))
        assert {
            float(training.optimizer.state[one]["step"]) for one in training.masters.values()
        } == {1.0, 3.0}


def test_moments_of_a_shape_that_is_another_are_not_carried(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama")
    with opened(checkpoint, one_in_the_middle) as (_, training):
        name, master = next(iter(training.masters.items()))
        training.masters[name] = torch.nn.Parameter(torch.zeros(3))
        training.optimizer.state[training.masters[name]] = training.optimizer.state[master]
        training.save_checkpoint(tmp_path / "there")
    with opened(checkpoint) as (_, training), pytest.raises(AdapterError, match=r"is \[3\] there"):
        training.carry_moments(tmp_path / "there")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_masters_in_a_file_goes_on_from_one_without(
    dtype: str, tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, dtype)
    with opened(checkpoint) as (model, training):
        training.accumulate(micro_batches(2))
        training.save_checkpoint(tmp_path / "there")
        expected = training.accumulate(micro_batches(2)).loss
        anyway, _ = training.master_store._limits(model.config)
        masters = training.masters
    with opened(checkpoint, host_memory=anyway, offload_dir=str(tmp_path)) as (_, resumed):
        taken = resumed.master_store.memory.host_bytes, resumed.master_store.memory.mapped_bytes
        places = [
            one.data_ptr() for state in resumed.optimizer.state.values() for one in state.values()
        ]
        resumed.restore(tmp_path / "there")
        assert places == [
            one.data_ptr() for state in resumed.optimizer.state.values() for one in state.values()
        ]
        assert resumed.master_store.memory.mapped and taken == (
            resumed.master_store.memory.host_bytes,
            resumed.master_store.memory.mapped_bytes,
        )
        assert resumed.accumulate(micro_batches(2)).loss == expected
        assert all(torch.equal(resumed.masters[name], master) for name, master in masters.items())


def test_settings_of_the_optimizer_come_back(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    with opened(checkpoint_of("llama"), one_in_the_middle) as (_, training):
        training.optimizer.param_groups[0]["lr"] = 0.125
        training.save_checkpoint(tmp_path / "there")
        training.optimizer.param_groups[0]["lr"] = 0.5
        groups = training.optimizer.param_groups
        training.restore(tmp_path / "there")
        assert training.optimizer.param_groups is groups, (
            "a schedule that holds them would set nothing any more"
        )
        assert groups[0]["lr"] == 0.125


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    with opened(checkpoint_of("llama")) as (_, training):
        training.save_checkpoint(tmp_path / "there")
        files = sorted((tmp_path / "there").glob("full-*.safetensors"))
        assert len(files) == 1 + len(
            {name.split(".")[2] for name in training.masters if ".layers." in name}
        )
        whole = files[0].read_bytes()
        files[0].write_bytes(whole[: len(whole) // 2])
        for read in (training.restore, training.carry_moments):
            with pytest.raises(AdapterError, match="cannot be read"):
                read(tmp_path / "there")
        files[0].unlink()
        with pytest.raises(AdapterError, match="other weights"):
            training.restore(tmp_path / "there")


def test_states_of_generators_that_are_none_are_refused(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    with opened(checkpoint_of("llama")) as (_, training):
        training.save_checkpoint(tmp_path / "there")
        file = tmp_path / "there" / "state.json"
        state = json.loads(file.read_text())
        state["generators"]["numpy"]["state"]["key"][1] = [1, 2]
        file.write_text(json.dumps(state))
        with pytest.raises(AdapterError, match="state is damaged"):
            training.restore(tmp_path / "there")


@pytest.mark.parametrize("key", ["master", "exp_avg", "exp_avg_sq"])
def test_weights_that_are_not_finite_are_never_saved(
    key: str, tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    with opened(checkpoint_of("llama"), one_in_the_middle) as (_, training):
        training.save_checkpoint(tmp_path / "there")
        before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
        name, master = next(iter(training.masters.items()))
        spoilt = master.detach() if key == "master" else training.optimizer.state[master][key]
        spoilt.view(-1)[1] = float("inf")
        with pytest.raises(NonFiniteError, match=f"{key}.{name} is not saved: 1 of its"):
            training.save_checkpoint(tmp_path / "there")
        assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
