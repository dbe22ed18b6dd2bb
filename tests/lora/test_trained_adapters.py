"""Adapters that train more than LoRA's matrices: on disk, in checkpoints, in the memory budget,
and what is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import ALPHA, DRAWS, RANK, SEED, trained
from peft import PeftModel
from smallrun import streamed_logits, whole_logits
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from trainedways import (
    assert_begins_as,
    attach,
    bare_model,
    disturb,
    options_of,
    streamed_model,
    unwarned,
    whole_model,
)
from transformers import AutoModelForCausalLM

from lema import LemaModel
from lema.engine.optim import training_bytes
from lema.errors import AdapterError, ConfigError, ModelError, NonFiniteError
from lema.model.outer_weights import StoredTensors
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]

LORA_S_OWN = {"lora_rank", "lora_alpha", "seed"}
IDS = micro_batches(1)[0]["input_ids"]


def opened(directory: Path, **overrides: Any) -> LemaModel:
    with unwarned():
        return LemaModel.from_pretrained(
            directory, backend=CpuBackend(poison=True), device="cpu", **overrides
        )


def test_the_settings_say_what_the_options_of_peft_say(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("gpt2")
    settings = {
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_target_modules": ["c_attn", "lm_head"],
        "lora_modules_to_save": ["ln_1", "wpe"],
        "lora_bias": "all",
        "lora_use_dora": True,
        "lora_trainable_token_indices": [5, 3],
        "seed": SEED,
    }
    options = {
        name.removeprefix("lora_"): value
        for name, value in settings.items()
        if name not in LORA_S_OWN
    }
    with bare_model(checkpoint, settings) as model, unwarned():
        model.initialize_lora()
        assert_begins_as(model, whole_model(checkpoint, **options))


# Disk


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("gpt2", True)])
def test_what_is_saved_loads_in_peft_and_here(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, tied: bool
) -> None:
    checkpoint = checkpoint_of(name, tied=tied)
    with streamed_model(checkpoint, **options_of("everything", name, checkpoint)) as model:
        disturb(model.lora_manager)
        values = trained(model.lora_manager)
        said = streamed_logits(model, IDS)
        model.save_pretrained(tmp_path)
    with unwarned():
        base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
        whole = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    again = opened(tmp_path)
    assert torch.equal(whole_logits(whole, IDS), said)
    assert torch.equal(streamed_logits(again, IDS), said)
    for found in (trained(whole), trained(again.lora_manager)):
        assert list(found) == list(values)
        assert all(torch.equal(parameter, values[key]) for key, parameter in found.items())
    again.close()


RESUMED = {
    "everything": False,
    "rows of the embeddings": True,
    "lora on both": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "tied"), RESUMED.items())
def test_a_run_that_is_resumed_ends_as_one_that_was_not(
    checkpoint_of: CheckpointOf, tmp_path: Path, way: str, tied: bool
) -> None:
    checkpoint = checkpoint_of("llama", tied=tied)
    batches = micro_batches(4)
    options = options_of(way, "llama", checkpoint)
    settings = {"learning_rate": 1e-2, "output_dir": tmp_path, "weight_decay": 0.1}

    def train(model: LemaModel, resume: bool, first: int, last: int) -> dict[str, torch.Tensor]:
        trainer = model.get_trainer()
        if resume:
            trainer.load_checkpoint(tmp_path / "checkpoint")
        else:
            torch.manual_seed(DRAWS)
        for batch in batches[first:last]:
            trainer.accumulate([batch])
        assert trainer.global_step == last
        trainer.save_checkpoint(tmp_path / ("checkpoint" if last < 4 else "end"))
        return trained(model.lora_manager)

    with streamed_model(checkpoint, settings, **options) as model:
        begun = {name: parameter.clone() for name, parameter in trained(model.lora_manager).items()}
        expected = train(model, False, 0, 4)
        assert not any(torch.equal(parameter, begun[name]) for name, parameter in expected.items())
    with streamed_model(checkpoint, settings, **options) as model:
        train(model, False, 0, 2)
    with streamed_model(checkpoint, settings, **options) as model:
        disturb(model.lora_manager)
        found = train(model, True, 2, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())


def test_a_file_that_lacks_a_saved_module_is_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    with streamed_model(checkpoint) as model:
        model.save_pretrained(tmp_path)
    settings = tmp_path / "adapter_config.json"
    settings.write_text(
        settings.read_text().replace('"modules_to_save": null', '"modules_to_save": ["lm_head"]')
    )
    with pytest.raises(AdapterError, match="lm_head"):
        opened(tmp_path)


# Reading and memory


def test_magnitudes_cost_one_read_of_each_adapted_weight(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer after layer, never two of them at once."""
    checkpoint = checkpoint_of("llama")
    reads = []
    read = StoredTensors.read

    def note(stored: StoredTensors, names: Any) -> Any:
        reads.append(sorted(names))
        return read(stored, names)

    monkeypatch.setattr(StoredTensors, "read", note)
    with streamed_model(
        checkpoint, use_dora=True, target_modules=["q_proj", "down_proj", "lm_head"]
    ):
        pass
    assert [names for names in reads if names] == [
        [
            f"model.layers.{layer}.mlp.down_proj.weight",
            f"model.layers.{layer}.self_attn.q_proj.weight",
        ]
        for layer in range(NUM_LAYERS)
    ]


def test_what_trains_outside_the_layers_is_in_the_budget(checkpoint_of: CheckpointOf) -> None:
    """Value, gradient, two moments, and one gradient on its way, of the largest."""
    checkpoint = checkpoint_of("llama")
    options = {"modules_to_save": ["embed_tokens", "lm_head"]}
    with streamed_model(checkpoint, **options) as model:
        parameters = model.get_trainable_parameters()
        largest = model.skeleton.get_output_embeddings().weight.nbytes
        needed = 4 * sum(parameter.nbytes for parameter in parameters) + largest
        assert training_bytes(model.skeleton, model.split.layers_name) == needed


# What is refused


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules_to_save": ["layers"]}, "model.layers contains whole decoder layers"),
        ({"modules_to_save": ["layers.3"]}, "model.layers.3 contains whole decoder layers"),
        ({"modules_to_save": ["model"]}, "model contains whole decoder layers"),
        ({"modules_to_save": ["lp"]}, "mlp trains whole, but a part of it is adapted"),
        (
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            "cannot be tied to each other",
        ),
        ({"trainable_token_indices": [1, 10**6]}, "token 1000000 is to train, and there are"),
        (
            {"trainable_token_indices": {"embed_tokens": [10**6]}},
            "token 1000000 is to train, and there are",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_and_the_model_left_as_it_was(
    checkpoint_of: CheckpointOf, options: dict[str, Any], words: str
) -> None:
    checkpoint = checkpoint_of("llama", tied="ensure_weight_tying" in options)
    batches = micro_batches(1)
    with streamed_model(checkpoint) as model:
        expected = model.adapter.loss(batches)
        names = [name for name, _ in model.skeleton.named_parameters()]
    with pytest.raises(ModelError, match=words) as caught, streamed_model(checkpoint, **options):
        pass
    assert caught.value.how
    with bare_model(checkpoint) as model:
        with pytest.raises(ModelError, match=words):
            attach(model, checkpoint, **options)
        attach(model, checkpoint)
        assert [name for name, _ in model.skeleton.named_parameters()] == names
        assert torch.equal(model.adapter.loss(batches), expected)


def test_float16_weights_that_train_are_refused(checkpoint_of: CheckpointOf) -> None:
    """A gradient scaler cannot unscale gradients in float16."""
    with streamed_model(
        checkpoint_of("llama"), {"dtype": "float16"}, modules_to_save=["lm_head"]
    ) as model:
        trainer = model.get_trainer()
        with pytest.raises(ConfigError, match="float16") as caught:
            trainer.accumulate(micro_batches(1))
        assert caught.value.where == "dtype: float16"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["lm_head", "model.embed_tokens"])
def test_a_gradient_that_is_not_finite_is_named_where_it_is(
    checkpoint_of: CheckpointOf, tmp_path: Path, place: str
) -> None:
    options = {"modules_to_save": ["embed_tokens", "lm_head"]}
    with streamed_model(checkpoint_of("llama"), {"output_dir": tmp_path}, **options) as model:
        saved = model.skeleton.get_submodule(place).modules_to_save["default"]
        saved.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        with pytest.raises(NonFiniteError) as caught:
            model.get_trainer().accumulate(micro_batches(2))
        name = f"{place}.modules_to_save.default.weight"
        assert caught.value.where == f"step 1; first non-finite gradient: {name}"
