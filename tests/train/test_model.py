"""The model a user holds: the README's example as written, adapters on every layer, and what is
refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import (
    LINEAR,
    NUM_LAYERS,
    VOCABULARY,
    adapter_of,
    opened,
    settings,
    streamed_logits,
    tokenizer,
    whole_logits,
    whole_model,
    write_model,
)

from lema import LemaConfig, LemaModel, LemaTrainer, MemoryStrategy, prepare_monolithic_safetensors
from lema.errors import ConfigError, DataError, MemoryLimitError, ModelError
from lema.plan import make_plan
from lema.plan.machine import profile

LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(9))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [MemoryStrategy.STREAMING, "RESIDENT"])
def test_the_example_runs_as_written(
    base: Path, name: str, strategy: MemoryStrategy | str, ids: torch.Tensor, tmp_path: Path
) -> None:
    single = tmp_path / "model.safetensors"
    prepare_monolithic_safetensors(str(base), str(single), device="auto")
    config = LemaConfig(
        model_name_or_path=str(base),
        model_type=name,
        gbi_path=str(single),
        device="cpu",
        strategy=strategy,
        save_steps=2,
        output_dir=str(tmp_path / "output"),
        lora_rank=4,
        lora_alpha=8,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        lora_target_modules=LINEAR[name],
    )
    model = LemaModel(config)
    model.initialize_lora()
    optimizer = torch.optim.AdamW(model.get_trainable_parameters(), lr=config.learning_rate)
    trainer = model.get_trainer(optimizer)
    assert isinstance(trainer, LemaTrainer)
    losses = []
    for _ in range(4):
        logits, loss = trainer.train_step(ids, labels=ids)
        assert logits.shape == (*ids.shape, VOCABULARY)
        assert isinstance(loss, float)
        losses.append(loss)
    assert losses == sorted(losses, reverse=True)
    assert trainer.global_step == 4
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    trainer.save_checkpoint(tmp_path / "chosen")
    model.save_pretrained(tmp_path / "adapter")
    trained = adapter_of(model.skeleton)
    model.close()

    again = LemaModel.from_pretrained(tmp_path / "adapter")
    for one in (again, LemaModel.from_pretrained(tmp_path / "chosen")):
        found = adapter_of(one.skeleton)
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[key], trained[key]) for key in trained)
    assert again.config == config
    assert again.get_trainer().train_step(ids)[1] < losses[-1]


def test_the_trainer_can_be_put_together_by_hand(
    llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path)) as model:
        optimizer = torch.optim.SGD(model.get_trainable_parameters(), lr=0.1)
        trainer = LemaTrainer(
            model.config, model.adapter, model.gbi, model.lora_manager, optimizer, model.memory
        )
        before = adapter_of(model.skeleton)
        trainer.train_step(ids, ids)
        after = adapter_of(model.skeleton)
    assert not any(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.slow
def test_the_weights_named_by_gbi_path_are_the_ones_streamed(
    llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    single = prepare_monolithic_safetensors(llama, tmp_path / "weights" / "one.safetensors")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((llama / "config.json").read_bytes())
    with opened(settings(bare, tmp_path, gbi_path=single), adapter=False) as model:
        assert model.gbi.files == (single,)
        assert torch.equal(streamed_logits(model, ids), whole_logits(whole_model(llama), ids))


def test_opening_reads_only_what_lies_outside_the_layers(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        outside = [record.nbytes for key, record in model.gbi.items() if ".layers." not in key]
        assert len(outside) == 3  # embedding, norm, head
        assert model.memory.counters.bytes_read == sum(outside) < model.gbi.nbytes / 2
        assert model.memory.counters.layers_read == 0


@pytest.mark.slow
def test_a_step_gives_the_logits_and_the_loss_of_the_whole_model(
    base: Path, name: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with opened(settings(base, tmp_path, micro_batch_size=3)) as model:
        model.save_pretrained(tmp_path / "adapter")
        logits, loss = model.get_trainer().train_step({"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        expected = whole_model(base, tmp_path / "adapter")(
            input_ids=ids, attention_mask=mask, labels=labels
        )
    assert torch.equal(logits, expected.logits)
    assert loss == float(expected.loss)


def test_every_layer_has_its_own_fp32_adapter(base: Path, name: str, tmp_path: Path) -> None:
    with opened(
        settings(base, tmp_path, dtype="bfloat16", lora_target_modules=LINEAR[name])
    ) as model:
        parameters = model.get_trainable_parameters()
        assert {parameter.dtype for parameter in parameters} == {torch.float32}
        assert (
            len(parameters)
            == len({id(parameter) for parameter in parameters})
            == 2 * NUM_LAYERS * len(LINEAR[name])
        )
        for layer in range(NUM_LAYERS):
            for module in LINEAR[name]:
                found = [
                    key for key in adapter_of(model.skeleton) if f"{LAYERS[name]}.{layer}." in key
                ]
                assert sum(f".{module}." in key for key in found) == 2


def test_what_needs_an_adapter_says_so_before_there_is_one(
    llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path), adapter=False) as model:
        for call in (
            model.get_trainable_parameters,
            lambda: model.save_pretrained(tmp_path / "no"),
        ):
            with pytest.raises(ConfigError, match="no adapter yet") as caught:
                call()
            assert "initialize_lora" in caught.value.how
        with pytest.raises(ConfigError, match="no adapter to train"):
            model.get_trainer().train_step(ids)
        assert not (tmp_path / "no").exists()
        assert (
            model.get_trainer().evaluate([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])[
                "eval_tokens"
            ]
            == 2
        )
        model.initialize_lora()
        with pytest.raises(ConfigError, match="has an adapter already"):
            model.initialize_lora()
        # what was made without an adapter is made anew
        assert model.get_trainer().train_step(ids)[1] > 0


def test_a_model_of_another_type_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model is of type 'llama', not 'gpt2'") as caught:
        LemaModel(settings(llama, tmp_path, model_type="gpt2"))
    assert caught.value.where == str(llama / "config.json")


@pytest.mark.parametrize("targets", [["c_attn"], "no_such_.*", "q_proj"])
def test_targets_that_match_nothing_are_refused_with_those_there_are(
    llama: Path, targets: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, lora_target_modules=targets), adapter=False) as model:
        with pytest.raises(ModelError, match="not found") as caught:
            model.initialize_lora()
        assert "k_proj" in caught.value.how
        assert ("a list has endings of names" in caught.value.how) is isinstance(targets, str)
        model.config.lora_target_modules = ["q_proj"]
        model.initialize_lora()
        assert len(model.get_trainable_parameters()) == 2 * NUM_LAYERS


def test_an_adapter_that_peft_gives_up_half_way_leaves_the_model_as_it_was(
    llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    # the last is nothing PEFT adapts
    targets = [
        "q_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
    ]
    with opened(settings(llama, tmp_path, lora_target_modules=targets), adapter=False) as model:
        names = list(model.skeleton.state_dict())
        with pytest.raises(ModelError, match="not supported") as caught:
            model.initialize_lora()
        assert "q_proj" in caught.value.how
        assert list(model.skeleton.state_dict()) == names
        assert torch.equal(streamed_logits(model, ids), whole_logits(whole_model(llama), ids))
        model.config.lora_target_modules = ["q_proj"]
        model.initialize_lora()
        assert len(model.get_trainable_parameters()) == 2 * NUM_LAYERS


@pytest.mark.parametrize("layers", [NUM_LAYERS, [0, NUM_LAYERS + 1]])
def test_layers_that_are_not_there_are_refused(
    llama: Path, layers: int | list[int], tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, lora_layers_to_transform=layers), adapter=False) as model:
        with pytest.raises(
            ConfigError, match=r"there is no layer \d+: model.layers has 8"
        ) as caught:
            model.initialize_lora()
        assert caught.value.where == "lora_layers_to_transform"
        model.config.lora_layers_to_transform = 7
        model.initialize_lora()
        assert model.adapter.lowest_trained == 7


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (
            "lora_target_modules",
            ["q_proj", "v_porj"],
            r"no module is named v_porj; did you mean v_proj\?$",
        ),
        ("lora_exclude_modules", ["k_proj", "v_porj"], "no module is named v_porj"),
        ("lora_exclude_modules", r".*v_porj", r"no module is named \.\*v_porj"),
        ("lora_rank_pattern", {"q_proj": 2, "v_porj": 3}, "no module is named v_porj"),
        ("lora_alpha_pattern", {r"layers\.9\..*": 2}, r"no module is named layers\\.9"),
        (
            "lora_target_parameters",
            ["experts.down_proj"],
            "no parameter is named experts.down_proj",
        ),
    ],
)
def test_a_name_that_nothing_bears_is_warned_of_by_its_setting(
    llama: Path, setting: str, value: Any, words: str, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, **{setting: value}), adapter=False) as model:
        with pytest.warns(UserWarning, match=f"{setting}: {words}") as caught:
            model.initialize_lora()
        assert len(caught) == 1
        notes = [
            note for note in make_plan(model.config, profile("cpu"))[0].notes if setting in note
        ]
        assert notes == [str(one.message) for one in caught]  # a plan says the same


def test_targets_may_be_a_regular_expression(llama: Path, tmp_path: Path) -> None:
    with opened(
        settings(llama, tmp_path, lora_target_modules=r".*layers\.[67]\.mlp\.up_proj")
    ) as model:
        assert len(model.get_trainable_parameters()) == 4


def test_a_model_without_a_tokenizer_says_so_when_one_is_needed(
    llama: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in llama.iterdir():
        if not file.name.startswith("token"):
            (bare / file.name).write_bytes(file.read_bytes())
    with opened(settings(bare, tmp_path)) as model:
        with pytest.raises(DataError, match="no tokenizer that can be loaded"):
            model.generate("the miller")
        tokenizer().save_pretrained(bare)
        assert len(model.generate("the miller", max_new_tokens=1)) == 1


def test_too_little_host_memory_is_refused(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, host_memory="1KB")) as model:
        with pytest.raises(MemoryLimitError, match="of host memory are needed") as caught:
            model.get_trainer()
        assert caught.value.where == "host_memory"


def test_what_memory_is_spent_on_is_made_again_whole(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        split = model.split
        outer = model.outer
        before = (model.planner, model.memory, model.adapter)
        assert before == (model.planner, model.memory, model.adapter)
        assert model.adapter.stream is model.memory
        model.respend()
        after = (model.planner, model.memory, model.adapter)
        assert all(new is not old for new, old in zip(after, before, strict=True))
        fewer = replace(model.allocation, slots=2)
        model.spend(fewer)
        assert model.allocation == fewer and model.planner is after[0]
        assert model.memory is not after[1] and model.memory.num_slots == 2
        assert (model.split, model.outer) == (split, outer)
