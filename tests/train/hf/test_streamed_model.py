"""`lema.streamed` returns a PEFT model: `transformers`' Trainer, with and without the mixin, and
what is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from libraryversions import recomputation
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PeftModelForSequenceClassification,
    get_peft_model,
)
from tiny import NUM_LAYERS, VOCABULARY, Checkpoint
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import lema
from lema import LemaTrainer, StreamingMixin
from lema.errors import AdapterError, ConfigError, MemoryLimitError

CheckpointOf = Callable[..., Checkpoint]
STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:`pin_memory`|.*pin_memory.*:UserWarning")


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, VOCABULARY, (10,), generator=generator) for _ in range(24)]
    return [
        {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        for ids in drawn
    ]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", **{"task_type": "CAUSAL_LM", **options})


def whole(checkpoint: Checkpoint, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    torch.manual_seed(42)
    return get_peft_model(model, lora(**options))


@pytest.fixture
def model(checkpoint_of: CheckpointOf) -> Iterator[Any]:
    made = lema.streamed(checkpoint_of("llama").streamed, lora(), device="cpu")
    yield made
    made.close()


class Kept(Trainer):
    """Keeps the loss of every batch, unrounded."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss)
        return loss


class Streaming(StreamingMixin, Kept):
    pass


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    return TrainingArguments(str(directory), **{**defaults, **quiet, **options})


def trained(
    model: Any, directory: Path, kind: type[Kept] = Kept, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    trainer = kind(model, arguments(directory, **options), train_dataset=rows())
    trainer.train()
    found = {
        name: one.detach().clone()
        for name, one in trainer.model.named_parameters()
        if one.requires_grad
    }
    return trainer.losses, found


def assert_equal(
    found: tuple[list[Tensor], dict[str, Tensor]], expected: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(one, expected[1][name]) for name, one in found[1].items())


def test_a_trainer_that_knows_nothing_of_it_trains_it(
    checkpoint_of: CheckpointOf, model: Any, tmp_path: Path
) -> None:
    assert_equal(trained(model, tmp_path), trained(whole(checkpoint_of("llama")), tmp_path))
    assert model.opened.memory.counters.leases == 2 * NUM_LAYERS * STEPS + 1
    base = [
        one for name, one in model.named_parameters() if ".layers." in name and "lora_" not in name
    ]
    assert all(one.is_meta for one in base) and base


def test_the_mixin_takes_an_optimizer_step_through_each_layer_once(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1}
    options["per_device_train_batch_size"] = 3  # eight batches: the last step has two
    expected = trained(whole(checkpoint), tmp_path, **options)
    made: list[Any] = []

    class Named(Streaming):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, peft_config=lora(), streaming={"micro_batch_size": 3})
            made.append(self.model)

    assert_equal(trained(str(checkpoint.streamed), tmp_path, Named, **options), expected)
    assert made[0].opened.memory.counters.leases == 3 * 2 * NUM_LAYERS + 1
    made[0].close()


def test_autocast_of_a_trainer_is_followed(
    checkpoint_of: CheckpointOf, model: Any, tmp_path: Path
) -> None:
    options = {"bf16": True, recomputation(): True}
    assert_equal(
        trained(model, tmp_path, **options),
        trained(whole(checkpoint_of("llama")), tmp_path, **options),
    )


def test_evaluation_and_resumption_are_the_trainer_s_own(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    checkpoint = checkpoint_of("llama")
    found = []
    for name in ("once", "resumed"):
        model = lema.streamed(checkpoint.streamed, lora(), device="cpu")
        trainer = Kept(
            model, arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows()[:5]
        )
        trainer.train(
            resume_from_checkpoint=None if name == "once" else str(tmp_path / "checkpoint-2")
        )
        found.append((trainer.losses[-2:], trainer.evaluate()["eval_loss"]))
        model.close()
    assert found[0] == found[1]
    saved = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint.published), tmp_path / "checkpoint-4"
    )
    trainer = Trainer(saved, arguments(tmp_path), eval_dataset=rows()[:5])
    assert trainer.evaluate()["eval_loss"] == found[0][1]


def test_lema_s_trainer_drives_the_same_object(checkpoint_of: CheckpointOf, model: Any) -> None:
    batch = {name: torch.stack([row[name] for row in rows()[:4]]) for name in rows()[0]}
    expected = whole(checkpoint_of("llama")).train()(**batch).loss
    model.train()
    trainer = model.opened.get_trainer()
    assert isinstance(trainer, LemaTrainer)
    assert trainer.train_step(batch)[1] == expected.item()
    after = model(**batch).loss
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, after.detach())
    assert after < expected


def test_recomputation_is_switched_as_a_model_s_is(model: Any) -> None:
    batch = {"input_ids": rows()[0]["input_ids"][None], "labels": rows()[0]["input_ids"][None]}
    model.train()
    gradients = []
    for _ in range(2):
        for switch, kept in (("disable", True), ("enable", False)):
            getattr(model, f"{recomputation()}_{switch}")()
            assert getattr(model, f"is_{recomputation()}") is not kept
            before = model.opened.adapter.activations.arena.memory_bytes
            model(**batch).loss.backward()
            assert (model.opened.adapter.activations.arena.memory_bytes == before) is (
                kept or bool(before)
            )
            gradients.append(
                {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
            )
            model.zero_grad()
    assert not any(layer.gradient_checkpointing for layer in model.opened.split.layers)
    for other in gradients[1:]:
        assert all(torch.equal(one, gradients[0][name]) for name, one in other.items())


def test_a_model_is_one_to_everybody(
    checkpoint_of: CheckpointOf, model: Any, tmp_path: Path
) -> None:
    reference = whole(checkpoint_of("llama"))
    assert isinstance(model, PeftModel)
    assert model.num_parameters() == reference.num_parameters()
    assert model.get_nb_trainable_parameters() == reference.get_nb_trainable_parameters()
    assert not model.training
    assert [*dict(model.named_parameters())] == [*dict(reference.named_parameters())]
    assert model.to("cpu") is model.float() is model
    model.enable_input_require_grads()
    model.add_model_tags(["tried"])
    assert not any(one.is_meta for one in model.state_dict().values())
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(checkpoint_of("llama").streamed)
    assert model.load_state_dict(model.state_dict(), strict=False).unexpected_keys == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=str,
)
def test_a_second_adapter_begins_as_peft_s(
    checkpoint_of: CheckpointOf, options: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = {"input_ids": rows()[0]["input_ids"][None]}
    model = lema.streamed(checkpoint.streamed, lora(**options), device="cpu")
    found = list[Any]()
    trains = list[set[str]]()
    for one in (whole(checkpoint, **options), model):
        torch.manual_seed(5)
        one.add_adapter("ref", lora(**options))
        for name, parameter in one.named_parameters():
            if ".lora_B.ref." in name:
                torch.nn.init.normal_(
                    parameter.data, generator=torch.Generator().manual_seed(len(name))
                )
        one.eval()
        with torch.no_grad():
            first = one(**batch).logits
            one.set_adapter("ref")
            second = one(**batch).logits
            one.set_adapter("default")
            with one.disable_adapter():
                none = one(**batch).logits
        found.append((first, second, none))
        trains.append(
            {name for name, parameter in one.named_parameters() if parameter.requires_grad}
        )
        values = {name: parameter for name, parameter in one.named_parameters() if ".ref" in name}
        assert values and not any(parameter.is_meta for parameter in values.values())
    assert not torch.equal(found[0][0], found[0][1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert trains[0] == trains[1]
    model.delete_adapter("ref")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, found[0][0])
    model.close()


def test_adapters_are_loaded_as_peft_loads_them(
    checkpoint_of: CheckpointOf, model: Any, tmp_path: Path
) -> None:
    reference = whole(checkpoint_of("llama"))
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    reference.save_pretrained(tmp_path)
    batch = {"input_ids": rows()[0]["input_ids"][None]}
    outcome = model.load_adapter(tmp_path, "other")
    assert not outcome.missing_keys and not outcome.unexpected_keys
    model.set_adapter("other")
    again = lema.streamed(checkpoint_of("llama").streamed, tmp_path, device="cpu")
    with torch.no_grad():
        expected = reference.eval()(**batch).logits
        assert torch.equal(model(**batch).logits, expected)
        assert torch.equal(again(**batch).logits, expected)
    again.close()


def test_tokens_are_generated_in_wide_batches(checkpoint_of: CheckpointOf, model: Any) -> None:
    ids = torch.stack([row["input_ids"] for row in rows()[:6]])
    mask = torch.ones_like(ids)
    for row in range(3):
        ids[row, : row + 1], mask[row, : row + 1] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = whole(checkpoint_of("llama")).eval().generate(input_ids=ids, **options)
    before = model.opened.memory.counters.leases
    assert torch.equal(model.generate(input_ids=ids, **options), expected)
    assert model.opened.memory.counters.leases - before == 5 * NUM_LAYERS


@pytest.mark.parametrize(
    ("use", "refusal"),
    [
        (
            lambda model: model.to(torch.bfloat16),
            "moving from torch.float32 on cpu to torch.bfloat16",
        ),
        (lambda model: model.half(), "to torch.float16"),
        (lambda model: model.to("meta"), "on meta"),
        (lambda model: model.merge_adapter(), "merging an adapter into weights that are in files"),
        (
            lambda model: model.merge_and_unload(),
            "merging an adapter into weights that are in files",
        ),
        (lambda model: model.unload(), "removing its adapters"),
        (copy.deepcopy, "copying or pickling"),
        (lambda model: model._replicate_for_data_parallel(), "several devices at once"),
    ],
)
def test_what_cannot_work_is_refused(model: Any, use: Callable[[Any], Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"this is refused for a streamed model:.*{refusal}"):
        use(model)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_wrappers_that_divide_a_model_are_refused(
    model: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        AcceleratorState._shared_state, "distributed_type", f"DistributedType.{kind}"
    )
    with pytest.raises(ConfigError, match=f"{kind} divides weights, but its weights are in files"):
        model.train()


def test_adapters_that_do_not_stream_are_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    directory = checkpoint_of("llama").streamed
    for options in ({"init_lora_weights": "pissa"}, {"task_type": "TOKEN_CLS"}):
        with pytest.raises(ConfigError, match=next(iter(options.values()))):
            lema.streamed(directory, lora(**options), device="cpu")
    with pytest.raises(AdapterError, match="no adapter in PEFT's format"):
        lema.streamed(directory, tmp_path, device="cpu")
    with pytest.raises(ConfigError, match="micro_batch_sise"):
        lema.streamed(directory, lora(), device="cpu", micro_batch_sise=2)
    with pytest.raises(MemoryLimitError):
        lema.streamed(directory, lora(), device="cpu", device_memory="1KB")


def test_the_mixin_is_for_streamed_models(
    checkpoint_of: CheckpointOf, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="and its layers do not stream"):
        Streaming(whole(checkpoint_of("llama")), arguments(tmp_path))
    with pytest.raises(ConfigError, match=r"give them to lema\.streamed"):
        Streaming(model, arguments(tmp_path), peft_config=lora())
    with pytest.raises(TypeError, match="must stand before Trainer"):
        type("Late", (Trainer, StreamingMixin), {})


UNUSED_HEAD = pytest.mark.filterwarnings("ignore:.*tensors on disk are not used.*lm_head")


@UNUSED_HEAD
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [("llama", "all-linear"), ("gpt2", "all-linear"), ("mixtral", ["q_proj", "v_proj"])],
)
def test_a_model_that_scores_texts_is_the_whole_one(
    checkpoint_of: CheckpointOf, architecture: str, targets: Any, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(architecture)
    adapter = LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS")
    streamed = lema.streamed(
        checkpoint.streamed, adapter, device="cpu", num_labels=3, device_memory="1GB"
    )
    state = torch.get_rng_state()
    torch.manual_seed(42)
    base = AutoModelForSequenceClassification.from_pretrained(checkpoint.published, num_labels=3)
    models = [get_peft_model(base, copy.deepcopy(adapter)), streamed]
    torch.set_rng_state(state)
    given = [{**row, "labels": torch.tensor(number % 3)} for number, row in enumerate(rows())]
    found = []
    for model in models:
        model.config.pad_token_id = 0
        trainer = Kept(model, arguments(tmp_path), train_dataset=given)
        trainer.train()
        found.append(
            (
                trainer.losses,
                {name: one for name, one in model.named_parameters() if one.requires_grad},
            )
        )
    assert_equal(found[1], found[0])
    assert any("score" in name for name in found[0][1])
    streamed.save_pretrained(tmp_path)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows()[:5]])}
    again = lema.streamed(checkpoint.streamed, tmp_path, device="cpu", num_labels=3)
    again.config.pad_token_id = 0
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, models[0].eval()(**batch).logits)
    again.close()
    streamed.close()


def test_adapted_routers_are_themselves_again_after_a_step_was_measured(
    checkpoint_of: CheckpointOf,
) -> None:
    """PEFT parametrizes a router in each forward, and under a limit a step is measured before
    there is one.
    """
    checkpoint = checkpoint_of("mixtral")
    batch = {"input_ids": rows()[0]["input_ids"][None]}
    found = []
    for limit in (None, "1GB"):
        model = lema.streamed(checkpoint.streamed, lora(), device="cpu", device_memory=limit)
        with torch.no_grad():
            found.append(model(**batch).logits)
        model.close()
    assert torch.equal(*found)


@UNUSED_HEAD
def test_what_scores_texts_is_no_language_model(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    model = lema.streamed(checkpoint.streamed, lora(task_type="SEQ_CLS"), device="cpu")
    assert model.config.num_labels == 1
    assert isinstance(model, PeftModelForSequenceClassification)
    with torch.no_grad():
        assert model(input_ids=rows()[0]["input_ids"][None]).logits.shape == (1, 1)
    # no vocabulary for a plan to count
    assert model.opened.split.head(torch.zeros(1, 2, 32)).shape == (
        1,
        2,
        1,
    )
    with pytest.raises(
        ConfigError, match="the model scores texts, but LemaTrainer has only losses of tokens"
    ):
        model.opened.get_trainer()
    model.save_pretrained(tmp_path)
    model.close()
    with pytest.raises(AdapterError, match="task_type SEQ_CLS, which is not that of a causal"):
        lema.LemaModel.from_pretrained(
            tmp_path, model_name_or_path=str(checkpoint.streamed), device="cpu"
        )
    with pytest.raises(ConfigError, match="a causal language model has no labels for scores"):
        lema.streamed(checkpoint.streamed, lora(), device="cpu", num_labels=2)


def test_an_adapter_of_another_kind_is_refused_by_name(checkpoint_of: CheckpointOf) -> None:
    adapter = AdaLoraConfig(total_step=1, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="the adapter is of type AdaLora"):
        lema.streamed(checkpoint_of("llama").streamed, adapter, device="cpu")


class RewardTrainer(Kept):
    """Has the name of TRL's."""


class Rewards(StreamingMixin, RewardTrainer):
    pass


@pytest.mark.filterwarnings("ignore:.*lm_head", "ignore:.*score")
def test_a_trainer_of_rewards_gets_a_model_that_scores(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """TRL's opens such a model by its name, whatever the config says."""
    name = str(checkpoint_of("llama").streamed)
    given = LoraConfig(r=4, target_modules="all-linear")
    trainer = Rewards(name, arguments(tmp_path), train_dataset=rows(), peft_config=given)
    assert isinstance(trainer.model, PeftModelForSequenceClassification)
    assert given.task_type is None
    model = lema.streamed(name, given, device="cpu")
    with pytest.raises(
        ConfigError, match=r"(?s)needs a model that scores texts.*task_type=\"SEQ_CLS\""
    ):
        Rewards(model, arguments(tmp_path), train_dataset=rows())


def test_a_call_without_tokens_gets_the_sentence_of_transformers(model: Any) -> None:
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(attention_mask=torch.ones(1, 4))
