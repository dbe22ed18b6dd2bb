"""What else TRL's trainers, and transformers' own, do with a model, done with a streamed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trlruns import (
    NUM_LAYERS,
    RecordedSFT,
    adapters,
    lora,
    outcome,
    recomputing,
    save,
    streamed_model,
    text,
    tokenizer,
    trainer_of,
    whole_model,
)

import lema
from lema import StreamingMixin
from lema.errors import ConfigError

# TRL calls what transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(directory: Path) -> Any:
    made = streamed_model(directory)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_a_run_is_resumed_from_the_trainers_own_checkpoint(
    kind: str, directory: Path, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = streamed_model(directory)
    losses, weights = outcome(trainer_of(kind, whole, tmp_path / "whole", **saving))
    whole.close()
    again = streamed_model(directory)
    with torch.no_grad():
        for one in adapters(again).values():
            one.zero_()
    trainer = trainer_of(kind, again, tmp_path / "whole", **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert trainer.losses == losses[4:]
    assert all(torch.equal(one, weights[name]) for name, one in adapters(again).items())
    again.close()


def test_the_best_checkpoint_is_loaded_and_evaluations_are_the_whole_models(
    directory: Path, tmp_path: Path
) -> None:
    found = []
    for model in (whole_model(directory), streamed_model(directory)):
        arguments = {
            "max_steps": 6,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        }
        place = tmp_path / type(model).__name__
        trainer = trainer_of("sft", model, place, evaluated=6, **arguments)
        trainer.train()
        evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        found.append((evaluated, adapters(model), Path(trainer.state.best_model_checkpoint).name))
    (losses, weights, best), (other_losses, others, other_best) = found
    assert (other_losses, other_best) == (losses, best)
    assert best == "checkpoint-2"  # the worst, so that what is loaded is not what there is
    assert all(torch.equal(one, weights[name]) for name, one in others.items())


def test_reference_log_probabilities_are_computed_beforehand(
    directory: Path, tmp_path: Path
) -> None:
    arguments = {"precompute_ref_log_probs": True, "max_steps": 4}
    losses, _ = outcome(trainer_of("dpo", whole_model(directory), tmp_path, **arguments))
    model = streamed_model(directory)
    assert outcome(trainer_of("dpo", model, tmp_path, **arguments))[0] == losses
    model.close()


def test_models_with_other_layers_do_not_share_them(
    directory: Path, model: Any, tmp_path: Path
) -> None:
    from trl.trainer.utils import hash_module

    changed = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    changed.save_pretrained(tmp_path)
    other = streamed_model(tmp_path)
    assert hash_module(other) != hash_module(model)
    other.close()
    same = streamed_model(directory)
    assert hash_module(same) == hash_module(model)
    same.close()


def test_what_a_trainer_saves_is_peft_s(directory: Path, model: Any, tmp_path: Path) -> None:
    trainer = trainer_of("sft", model, tmp_path, max_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(directory)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(directory), tmp_path / "saved"
    )
    assert all(torch.equal(one, adapters(model)[name]) for name, one in adapters(loaded).items())
    again = lema.streamed(directory, tmp_path / "saved", device="cpu")
    assert all(torch.equal(one, adapters(model)[name]) for name, one in adapters(again).items())
    again.close()
    assert "trl" in model.get_base_model().model_tags


def test_accumulation_warns_once_and_is_right(directory: Path, model: Any, tmp_path: Path) -> None:
    accumulated = {"gradient_accumulation_steps": 2, "max_steps": 4}
    losses, weights = outcome(trainer_of("sft", whole_model(directory), tmp_path, **accumulated))
    with pytest.warns(
        UserWarning, match=r"each batch streams [\d.]+ kB of weights once more"
    ) as warned:
        found_losses, found = outcome(trainer_of("sft", model, tmp_path, **accumulated))
    assert len([one for one in warned if "streams" in str(one.message)]) == 1
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        ("sft", {"packing": True, "max_length": 32}, {}),
        ("sft", {"loss_type": "dft"}, {}),
        ("sft", recomputing(False), {"lora_dropout": 0.1}),
        ("sft", {"bf16": True}, {}),
        ("sft", {"neftune_noise_alpha": 5.0}, {}),
        ("dpo", {"loss_type": ["ipo"], "padding_free": True}, {}),
        ("dpo", {"max_grad_norm": 0.1}, {"modules_to_save": ["norm"]}),
        ("kto", {"loss_type": "apo_zero_unpaired"}, {"target_modules": "all-linear"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_ways_to_train_are_the_whole_models(
    kind: str, arguments: dict[str, Any], options: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    arguments = {"max_steps": 3, **arguments}
    losses, weights = outcome(
        trainer_of(kind, whole_model(directory, **options), tmp_path, **arguments)
    )
    model = streamed_model(directory, **options)
    found_losses, found = outcome(trainer_of(kind, model, tmp_path, **arguments))
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    model.close()


def test_a_wide_batch_streams_as_often_as_a_narrow_one(directory: Path, tmp_path: Path) -> None:
    read = []
    for rows, at_once in ((2, None), (16, 2)):
        model = streamed_model(directory, {"micro_batch_size": at_once})
        trainer_of("sft", model, tmp_path, max_steps=3, per_device_train_batch_size=rows).train()
        counters = model.opened.memory.counters
        read.append((counters.bytes_uploaded, counters.bytes_read, counters.leases))
        model.close()
    assert read[0] == read[1]


class StreamingSFT(StreamingMixin, RecordedSFT):
    pass


def test_the_mixin_opens_a_model_by_its_name(directory: Path, model: Any, tmp_path: Path) -> None:
    accumulated = {"gradient_accumulation_steps": 3, "max_steps": 2}
    losses, weights = outcome(trainer_of("sft", whole_model(directory), tmp_path, **accumulated))

    def trainer(model: str, **options: Any) -> StreamingSFT:
        return StreamingSFT(model, peft_config=lora(), streaming={"seed": 42}, **options)

    made = trainer_of("sft", str(directory), tmp_path, trainer=trainer, **accumulated)
    found_losses, found = outcome(made)
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    made.model.close()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_loss_of_routers_is_the_whole_models(kind: str, tmp_path: Path) -> None:
    """TRL asks mixtures of experts for it unless it is told not to."""
    directory = save("qwen3_moe", tmp_path / "model")
    options = {"router_aux_loss_coef": 0.5}
    losses, weights = outcome(trainer_of(kind, whole_model(directory), tmp_path, **options))
    without, _ = outcome(trainer_of(kind, whole_model(directory), tmp_path))
    assert losses != without
    model = streamed_model(directory)
    found_losses, found = outcome(trainer_of(kind, model, tmp_path, **options))
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    model.close()


def test_the_loss_of_routers_of_a_wide_batch_is_that_of_its_rows_and_joined_batches_have_none(
    tmp_path: Path,
) -> None:
    directory = save("qwen3_moe", tmp_path / "model")
    options = {"router_aux_loss_coef": 0.5}
    losses, weights = outcome(trainer_of("sft", whole_model(directory), tmp_path, **options))
    model = streamed_model(directory, {"micro_batch_size": 1})
    found_losses, found = outcome(trainer_of("sft", model, tmp_path, **options))
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(one, weights[name], atol=1e-4) for name, one in found.items())
    model.close()
    model = streamed_model(directory)
    with pytest.raises(
        ConfigError,
        match=r"does not support the loss of routers(.|\n)*router_aux_loss_coef to 0\.0",
    ):
        trainer_of(
            "sft", model, tmp_path, trainer=StreamingSFT, gradient_accumulation_steps=2, **options
        ).train()
    model.close()


def test_generation_in_a_trainer_reads_each_layer_once_per_token(
    directory: Path, model: Any
) -> None:
    prompts = tokenizer()(
        [text(number, 4 + number % 3) for number in range(5)],
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    prompts.pop("token_type_ids", None)
    whole = whole_model(directory).eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = whole.generate(**prompts, **options)
    leases = model.opened.memory.counters.leases
    assert torch.equal(model.generate(**prompts, **options), expected)
    assert model.opened.memory.counters.leases == leases + 6 * NUM_LAYERS
