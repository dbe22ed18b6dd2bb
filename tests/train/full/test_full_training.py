"""A model whose own weights train while they stream is, step after step, the model that trains
in memory.
"""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fulltraining import (
    assert_same,
    attention_of_the_last_four,
    config_of,
    everything,
    one_in_the_middle,
    streamed,
    whole,
)
from latedevice import LateDevice
from quantized import prepared, published
from tiny import Checkpoint, micro_batches
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.backend import Backend
from lema.errors import AdapterError, ConfigError, NonFiniteError
from lema.model import meta_model
from lema.train.full.checkpoint import save_trained
from lema.train.full.training import FullTraining
from lema.train.phases.phase import Phase
from lema.train.phases.stage import chosen_by, tied_note
from lema_cpu import CpuBackend


@pytest.mark.covered
@pytest.mark.slow
@pytest.mark.parametrize("clipped", [None, 0.5])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_ten_steps_are_bitwise_those_in_memory(
    tied: bool, count: int, clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", tied)
    config = config_of(checkpoint, max_grad_norm=clipped, gradient_checkpointing=True)
    expected = whole(checkpoint, config, everything, count)
    assert expected[0][-1] < expected[0][0]
    assert_same(streamed(config, everything, count), expected)


@pytest.mark.covered
@pytest.mark.sampled(1)
@pytest.mark.parametrize("selection", [attention_of_the_last_four, one_in_the_middle])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("clipped", [None, 0.5])
def test_any_subset_may_train(
    name: str,
    selection: Callable[[str], bool],
    clipped: float | None,
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    checkpoint = checkpoint_of(name)
    config = config_of(checkpoint, max_grad_norm=clipped)
    assert_same(
        streamed(config, selection, 2, steps=4), whole(checkpoint, config, selection, 2, steps=4)
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ends", [["head"], ["embeddings"]])
def test_a_head_that_is_selected_trains_what_is_tied_to_it(
    tied: bool, ends: list[str], checkpoint_of: Callable[..., Checkpoint]
) -> None:
    """As in a plain loop over the whole model, of which the same module was told to train."""
    checkpoint = checkpoint_of("llama", tied)
    config = config_of(checkpoint, max_grad_norm=0.5)
    phase = Phase(
        layers=["last:2", *ends], tokens=1, mixture=[{"name": "x", "rate": 1.0}], learning_rate=1e-3
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published).requires_grad_(False)
    for part in model.model.layers[-2:], *([model.lm_head, model.model.norm] * (ends == ["head"])):
        part.requires_grad_(True)
    if ends == ["embeddings"]:
        model.model.embed_tokens.requires_grad_(True)
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ("model.embed_tokens.weight" in chosen) == (tied or ends == ["embeddings"])
    skeleton = meta_model(model.config)
    named = {name for name, _ in skeleton.named_parameters() if chosen_by(phase, skeleton)(name)}
    assert named == chosen
    assert bool(tied_note(phase, skeleton)) == tied
    found = streamed(config, named.__contains__, 2, steps=4)
    assert_same(found, whole(checkpoint, config, chosen.__contains__, 2, steps=4))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [CpuBackend, lambda: LateDevice(None), lambda: LateDevice(3)])
def test_what_was_written_is_what_the_next_lease_has_on_every_device(
    backend: Callable[[], Backend], checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama")
    for clipped in (None, 0.5):
        config = config_of(
            checkpoint, max_grad_norm=clipped, gradient_checkpointing=True, prefetch_depth=4
        )
        expected = whole(checkpoint, config, everything, 2, steps=4)
        assert_same(streamed(config, everything, 2, backend(), steps=4), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clipped", [None, 0.5])
def test_a_run_that_was_resumed_is_the_run_that_was_not(
    clipped: float | None, dtype: str, tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.1, dtype)
    config = config_of(
        checkpoint, max_grad_norm=clipped, gradient_checkpointing=True, learning_rate=1e-3
    )

    def opened() -> tuple[LemaModel, FullTraining]:
        model = LemaModel(config, backend=CpuBackend(poison=True))
        model.skeleton.train()
        return model, FullTraining(model.adapter, config)

    model, training = opened()
    torch.manual_seed(5)
    for _ in range(2):
        training.accumulate(micro_batches(2))
    training.save_checkpoint(tmp_path / "there", {"phase": 1})
    expected = [training.accumulate(micro_batches(2)).loss for _ in range(2)]
    model.close()
    again, resumed = opened()
    assert resumed.restore(tmp_path / "there") == {"phase": 1}
    assert resumed.global_step == 2
    found = [resumed.accumulate(micro_batches(2)).loss for _ in range(2)]
    assert found == expected
    assert all(
        torch.equal(resumed.masters[name], master) for name, master in training.masters.items()
    )
    again.close()


def test_checkpoints_of_something_else_are_refused(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    config = config_of(checkpoint_of("llama"))
    model = LemaModel(config)
    FullTraining(model.adapter, config, one_in_the_middle).save_checkpoint(tmp_path / "part")
    training = FullTraining(model.adapter, config)
    with pytest.raises(AdapterError, match="other weights"):
        training.restore(tmp_path / "part")
    state = json.loads((tmp_path / "part" / "state.json").read_text())
    (tmp_path / "part" / "state.json").write_text(json.dumps({**state, "kind": "adapters"}))
    with pytest.raises(AdapterError, match="checkpoint of adapters"):
        training.restore(tmp_path / "part")
    model.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_the_model_that_was_trained(
    name: str, tied: bool, tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of(name, tied)
    config = config_of(checkpoint)
    model = LemaModel(config)
    training = FullTraining(model.adapter, config, one_in_the_middle if tied else everything)
    for _ in range(2):
        training.accumulate(micro_batches(2))
    out = save_trained(model, training.master_store, tmp_path / "out", max_shard_size=200_000)
    with pytest.raises(ConfigError, match="the directory is not empty"):
        save_trained(model, training.master_store, out)
    model.close()
    assert len(list(out.glob("*.safetensors"))) > 1 and not list(tmp_path.glob(".*"))
    saved, base = (
        AutoModelForCausalLM.from_pretrained(place).state_dict()
        for place in (out, checkpoint.published)
    )
    assert saved.keys() == base.keys()
    for key, weight in saved.items():
        expected = training.masters[key].detach() if key in training.masters else base[key]
        if not (tied and key == "lm_head.weight"):
            assert torch.equal(weight, expected), key
    changed = {key for key in saved if not torch.equal(saved[key], base[key])}
    assert changed == set(training.masters) & set(saved) and changed


@pytest.mark.parametrize("clipped", [None, 0.5])
def test_a_loss_that_is_not_finite_steps_nothing(
    clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    config = config_of(checkpoint_of("llama"), max_grad_norm=clipped)
    model = LemaModel(config)
    training = FullTraining(model.adapter, config)
    with torch.no_grad():
        training.masters["model.layers.3.mlp.up_proj.weight"].fill_(float("inf"))
    before = {name: master.detach().clone() for name, master in training.masters.items()}
    with pytest.raises(NonFiniteError, match="loss is nan") as raised:
        training.accumulate(micro_batches(2))
    assert "no weight was updated" in raised.value.where
    assert all(torch.equal(master, before[name]) for name, master in training.masters.items())
    model.close()


def test_quantised_weights_do_not_train(tmp_path: Path) -> None:
    made = prepared(published(tmp_path / "model"), "int8")
    model = LemaModel(LemaConfig(str(made.path), device="cpu", strategy="resident", save_steps=0))
    with pytest.raises(ConfigError, match="quantised"):
        FullTraining(model.adapter, model.config)
    model.close()


def test_layers_that_are_read_from_disk_do_not_train(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    config = config_of(checkpoint_of("llama"), strategy="streaming")
    model = LemaModel(config)
    with pytest.raises(ConfigError, match="not kept in host memory"):
        FullTraining(model.adapter, config)
    with pytest.raises(ConfigError, match="no weight"):
        FullTraining(model.adapter, config, lambda name: False)
    model.close()


def test_layers_that_processes_hold_together_do_not_train(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    with closing(LemaModel(config_of(checkpoint_of("llama")))) as model:
        model.adapter.backend._parallel = SimpleNamespace(size=2)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="hold together"):
            FullTraining(model.adapter, model.config)
