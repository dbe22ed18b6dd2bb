"""A two-phase trainer under the names such trainers have: it goes through its stages, over the
boundary, and back.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import NUM_LAYERS, VOCABULARY, Checkpoint, micro_batches
from transformers import AutoModelForCausalLM

from lema import (
    LemaConfig,
    LemaModel,
    LoRAConfig,
    LoRATrainer,
    LoRATrainerConfig,
    LoRATrainState,
    Phase,
    PhasePlan,
    Sampling,
    transition_to_lora,
)
from lema.errors import AdapterError, ConfigError, ModelError, Stopped
from lema.storage.manifest import write_manifest
from lema.train.phases.run import run_phases

BLOCK = 12
ROWS = 4
STEP = BLOCK * ROWS
PRE = 3
POST = 4  # steps
HALF = [Sampling("one", 0.5), Sampling("two", 0.5)]
TARGETS = ["q_proj", "down_proj"]


def rows(seed: int, count: int = 12) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        torch.randint(3, VOCABULARY, (BLOCK,), generator=generator).tolist() for _ in range(count)
    ]
    return [{"input_ids": row, "labels": row} for row in tokens]


SOURCES = {"one": rows(1), "two": rows(2)}


ONLY_ADAPTERS: dict[str, Any] = {"pre_lora_tokens": [], "pre_lora_datasets": []}


def stages(**changes: Any) -> LoRATrainerConfig:
    settings: dict[str, Any] = {
        "batch_size": ROWS,
        "block_size": BLOCK,
        "per_device_batch_size": 2,
        "lr": 1e-3,
        "pre_lora_tokens": [PRE * STEP],
        "pre_lora_datasets": [HALF],
        "post_lora_tokens": [POST * STEP],
        "post_lora_datasets": [HALF],
        "lora": LoRAConfig(rank=3, alpha=6.0, target_modules=TARGETS),
    }
    return LoRATrainerConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Callable[..., Checkpoint]
) -> Path:
    """What the run ends with that was never stopped, and not begun by a trainer either."""
    place = str(tmp_path_factory.mktemp("straight"))
    model = str(checkpoint_of("llama").streamed)
    settings = LemaConfig(model, device="cpu", save_steps=0, max_grad_norm=1.0, output_dir=place)
    return run_phases(settings, stages().plan(), SOURCES)


@pytest.fixture
def trainer_of(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> Callable[..., LoRATrainer]:
    def make(
        name: str = "run", config: Any = None, model: dict[str, Any] | None = None, **given: Any
    ) -> LoRATrainer:
        fixed = {
            "device": "cpu",
            "save_steps": 1,
            "save_total_limit": None,
            "logging_steps": 1,
            "max_grad_norm": 1.0,
            "output_dir": str(tmp_path / name),
        }
        settings = {
            "model_name_or_path": str(checkpoint_of("llama").streamed),
            **fixed,
            **(model or {}),
        }
        return LoRATrainer(config or stages(), LemaConfig(**settings), SOURCES, **given)

    return make


def stop_after(count: int) -> Callable[[], str | None]:
    """Return what stops a run after so many steps."""
    left = iter(range(count, -1, -1))
    return lambda: None if next(left) > 1 else "a test"


def stopped_at(trainer_of: Callable[..., LoRATrainer], name: str, step: int) -> LoRATrainer:
    trainer = trainer_of(name, stop=stop_after(step))
    with pytest.raises(Stopped):
        trainer.train()
    return trainer


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {file.name: load_file(file) for file in sorted(directory.glob("*.safetensors"))}
    assert found
    return {
        f"{file}/{name}": tensor
        for file, tensors in found.items()
        for name, tensor in tensors.items()
    }


def assert_same(one: Path, other: Path) -> None:
    mine = weights(one)
    theirs = weights(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.slow
def test_it_goes_through_all_stages_and_says_where_it_is(
    trainer_of: Callable[..., LoRATrainer], tmp_path: Path, straight: Path
) -> None:
    seen: list[dict[str, Any]] = []
    trainer = trainer_of(on_step=seen.append)
    model = AutoModelForCausalLM.from_pretrained(trainer.model.model_name_or_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    first = LoRATrainState("full", "pre-lora-1", 0, 0, 0, None, None, None, whole, whole)
    assert trainer.state == first
    end = trainer.train()
    assert end == tmp_path / "run" / "post-lora-1" / f"checkpoint-{POST}"
    shapes = [
        model.get_submodule(f"model.layers.0.{name}").weight.shape
        for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    adapters = NUM_LAYERS * 3 * sum(sum(shape) for shape in shapes)
    steps = PRE + POST
    assert trainer.state == LoRATrainState(
        "lora", "post-lora-1", 1, steps, steps * STEP, end, 3, 6.0, adapters, whole
    )
    assert [row["step"] for row in seen if "loss" in row and "learning_rate" in row] == list(
        range(1, steps + 1)
    )
    assert adapters == sum(
        tensor.numel() for tensor in load_file(end / "adapter_model.safetensors").values()
    )
    assert_same(end, straight)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_where_the_run_is(
    trainer_of: Callable[..., LoRATrainer],
) -> None:
    end = trainer_of().train()
    file = end / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    state = trainer_of().state
    assert (state.checkpoint, state.step) == (
        end.with_name(f"checkpoint-{POST - 1}"),
        PRE + POST - 1,
    )


@pytest.mark.slow
def test_over_the_boundary_by_hand_is_over_the_boundary(
    trainer_of: Callable[..., LoRATrainer], tmp_path: Path, straight: Path
) -> None:
    trainer = trainer_of("by-hand")
    with pytest.raises(ConfigError, match="3 steps of the 3 before the adapters are left"):
        trainer.transition_to_lora()
    boundary = trainer.train(until="lora")
    assert boundary == tmp_path / "by-hand" / "pre-lora-1" / f"checkpoint-{PRE}"
    before = trainer.state
    assert (before.kind, before.step, before.checkpoint) == ("full", PRE, boundary)
    after = trainer.transition_to_lora()
    assert after == trainer.state and transition_to_lora(trainer) == after
    assert (after.kind, after.phase, after.step, after.tokens) == (
        "lora",
        "post-lora-1",
        PRE,
        PRE * STEP,
    )
    assert (after.lora_rank, after.lora_alpha, after.checkpoint) == (3, 6.0, boundary)
    assert after.num_trainable < before.num_trainable == before.num_parameters
    end = trainer.train()
    assert_same(end, straight)
    with pytest.raises(ConfigError, match="the run is already past it: it is at step"):
        trainer.transition_to_lora()


def test_before_the_boundary_it_says_how_many_steps_are_left(
    trainer_of: Callable[..., LoRATrainer],
) -> None:
    trainer = stopped_at(trainer_of, "early", 2)
    assert (trainer.state.kind, trainer.state.step) == ("full", 2)
    with pytest.raises(ConfigError, match="1 step of the 3 before the adapters are left"):
        trainer.transition_to_lora()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, PRE, PRE + 1, PRE + 2])
def test_restored_from_anywhere_it_ends_as_if_it_had_not_been(
    step: int, trainer_of: Callable[..., LoRATrainer], tmp_path: Path, straight: Path
) -> None:
    stopped = stopped_at(trainer_of, "stopped", step)
    checkpoint = stopped.state.checkpoint
    assert checkpoint is not None
    kept = tmp_path / "kept" / checkpoint.parent.name
    shutil.copytree(checkpoint, kept / checkpoint.name)
    if (model := tmp_path / "stopped" / "pre-lora-1" / "model").is_dir():
        shutil.copytree(model, tmp_path / "kept" / "pre-lora-1" / "model")
    elsewhere = trainer_of("elsewhere")
    state = elsewhere.restore_from_path(kept / checkpoint.name)
    assert state == elsewhere.state
    assert (state.step, state.kind) == (step, "full" if step <= PRE else "lora")
    if step == PRE:
        assert elsewhere.transition_to_lora().kind == "lora"
    assert_same(elsewhere.train(), straight)
    # Where it was stopped, by its path, and without one.
    here = trainer_of("stopped")
    assert here.restore_from_path(checkpoint).step == step
    assert_same(here.train(), straight)


@pytest.mark.slow
def test_a_model_is_what_the_first_adapters_begin_with(
    trainer_of: Callable[..., LoRATrainer], checkpoint_of: Callable[..., Checkpoint]
) -> None:
    base = checkpoint_of("llama", True).streamed
    trainer = trainer_of()
    state = trainer.restore_from_path(base)
    assert (state.kind, state.phase, state.step, state.checkpoint) == (
        "lora",
        "post-lora-1",
        PRE,
        None,
    )
    end = trainer.train()
    assert not (Path(trainer.model.output_dir) / "pre-lora-1" / f"checkpoint-{PRE}").exists()
    only = trainer_of("only", stages(**ONLY_ADAPTERS))
    assert only.transition_to_lora().step == 0
    found = only.restore_from_path(base)
    assert (found.kind, found.step, only.model.model_name_or_path) == ("lora", 0, str(base))
    begun = only.train()
    assert (
        load_file(end / "adapter_model.safetensors").keys()
        == load_file(begun / "adapter_model.safetensors").keys()
    )
    with pytest.raises(ConfigError, match="no stage comes before"):
        only.train(until="lora")


@pytest.mark.slow
def test_what_it_cannot_go_on_from_is_refused_with_what_it_is(
    trainer_of: Callable[..., LoRATrainer], tmp_path: Path
) -> None:
    trainer = trainer_of()
    end = trainer.train()
    earlier = end.with_name("checkpoint-1")
    with pytest.raises(
        ConfigError, match="the run in that directory has continued since this checkpoint"
    ):
        trainer.restore_from_path(earlier)
    with pytest.raises(ConfigError, match="adapter without the state of a run"):
        trainer.restore_from_path(trainer.model.output_dir)
    with pytest.raises(ConfigError, match="neither"):
        trainer.restore_from_path(tmp_path)
    other = trainer_of("other", stages(lr=2e-3))
    with pytest.raises(ConfigError, match="another plan"):
        other.restore_from_path(end)
    liar = tmp_path / "liar"
    shutil.copytree(earlier, liar)
    state = json.loads((liar / "state.json").read_text())
    (liar / "state.json").write_text(json.dumps(state | {"kind": "full"}))
    write_manifest(liar)
    (tmp_path / "pre-lora-1").mkdir()
    shutil.copytree(
        Path(trainer.model.output_dir) / "pre-lora-1" / "model", tmp_path / "pre-lora-1" / "model"
    )
    nested = tmp_path / "post-lora-1" / "checkpoint-1"
    shutil.copytree(liar, nested)
    with pytest.raises(AdapterError, match="of kind full, and phase post-lora-1 of kind lora"):
        trainer_of("third").restore_from_path(nested)
    delta = tmp_path / "delta"
    delta.mkdir()
    (delta / "lema_delta.json").write_text("{}")
    with pytest.raises(ConfigError, match="delta"):
        trainer.restore_from_path(delta)


def test_targets_that_match_nothing_are_said_before_anything_trains(
    trainer_of: Callable[..., LoRATrainer],
) -> None:
    trainer = trainer_of(
        config=stages(**ONLY_ADAPTERS, lora=LoRAConfig(target_modules=["no_such"]))
    )
    with pytest.raises(ModelError, match="does not fit") as raised:
        assert trainer.state
    assert "q_proj" in raised.value.how


def test_any_plan_of_phases_may_be_given(trainer_of: Callable[..., LoRATrainer]) -> None:
    phases = [
        Phase(trains="selection", layers=["last:1"], tokens=STEP, mixture=HALF, learning_rate=1e-3)
    ]
    trainer = trainer_of(config=PhasePlan(phases=phases, batch_size=ROWS, max_length=BLOCK))
    state = trainer.state
    assert state.kind == "full" and state.phase == "phase-1"
    assert 0 < state.num_trainable < state.num_parameters / NUM_LAYERS
    with pytest.raises(ConfigError, match="no stage trains adapters"):
        trainer.transition_to_lora()


@pytest.mark.slow
def test_the_adapter_at_every_boundary_is_one_of_pefts(
    trainer_of: Callable[..., LoRATrainer], tmp_path: Path
) -> None:
    full = {"trains": "full", "tokens": STEP, "mixture": HALF, "learning_rate": 1e-3}
    lora = {"trains": "lora", "tokens": 2 * STEP, "mixture": HALF, "learning_rate": 1e-2}
    phases = [
        Phase(**full),
        Phase(**lora),
        Phase(**lora, merge=True),
        Phase(**lora, optimizer="carry"),
    ]
    trainer = trainer_of(config=PhasePlan(phases=phases, batch_size=ROWS, max_length=BLOCK))
    trainer.train()
    ids = micro_batches(1)[0]["input_ids"]
    seen = []
    for number, base in ((2, 1), (3, 2), (4, 2)):
        end = tmp_path / "run" / f"phase-{number}" / "checkpoint-2"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"phase-{base}" / "model")
        peft = PeftModel.from_pretrained(model, end).eval()
        with torch.no_grad():
            expected = peft(input_ids=ids, use_cache=False).logits
        with closing(LemaModel.from_pretrained(end)) as opened:
            assert opened.lora_manager is not None
            opened.lora_manager.eval()
            logits: list[torch.Tensor] = []
            opened.adapter.loss([{"input_ids": ids, "labels": ids}], logits=logits)
        assert torch.equal(logits[0], expected)
        seen.append(expected)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.slow
def test_files_may_be_named_in_place_of_rows(
    trainer_of: Callable[..., LoRATrainer], tmp_path: Path
) -> None:
    for name, found in SOURCES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    given = trainer_of("rows", stages(**ONLY_ADAPTERS))
    files = {"one": str(tmp_path / "one.jsonl"), "two": [tmp_path / "two.jsonl"]}
    named = LoRATrainer(given.config, given.model, files)
    expected = run_phases(
        LemaConfig(**{**given.model.to_dict(), "output_dir": str(tmp_path / "x")}),
        given.plan,
        SOURCES,
    )
    assert_same(named.train(), expected)


@pytest.mark.slow
def test_intervals_and_evaluations_are_those_of_the_config(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    often = {
        "report_interval": 2,
        "checkpoint_interval": 3,
        "validation_interval": 2,
        "validation_steps": 5,
    }
    config = stages(**often, evaluations=["exam"])
    model = LemaConfig(
        str(checkpoint_of("llama").streamed), device="cpu", output_dir=str(tmp_path / "run")
    )
    held = {"one": rows(3), "two": rows(4), "exam": rows(5, 7)}
    seen: list[dict[str, Any]] = []
    trainer = LoRATrainer(config, model, SOURCES, eval_data=held, on_step=seen.append)
    assert (trainer.model.logging_steps, trainer.model.save_steps, trainer.model.eval_steps) == (
        2,
        3,
        2,
    )
    end = trainer.train()
    names = {
        f"{place.parent.name}-{place.name}" for place in (tmp_path / "run").glob("*/checkpoint-*")
    }
    assert {
        "pre-lora-1-checkpoint-3",
        "post-lora-1-checkpoint-3",
        f"post-lora-1-checkpoint-{POST}",
    } <= names
    # neither the best, nor at a third step of the run
    assert "post-lora-1-checkpoint-2" not in names
    assert [row["step"] for row in seen if "eval_loss" in row] == [2, 3, 4, 6, 7]
    with closing(LemaModel.from_pretrained(end)) as opened:
        expected = opened.get_trainer().evaluate(held["exam"])
    assert trainer.evaluated == {"exam": expected}
    assert json.loads((tmp_path / "run" / "evaluations.json").read_text()) == {"exam": expected}


def test_what_is_validated_and_reported_is_what_the_config_says(
    trainer_of: Callable[..., LoRATrainer],
) -> None:
    held = {"one": rows(3), "two": rows(4)}
    for validate in (True, False):
        trainer = trainer_of(config=stages(validate=validate, validation_steps=9), eval_data=held)
        assert (trainer._rows.validation is not None) is validate and trainer._options[
            "eval_rows"
        ] == 9
    reports = trainer_of(
        config=stages(wandb=True), model={"report_to": "tensorboard"}
    ).model.report_to
    assert reports == ["tensorboard", "wandb"]
    assert trainer_of(config=stages()).model.report_to == []
    with pytest.raises(
        ConfigError, match="checkpoint_interval is 7, and save_steps, which is the same, is 1"
    ):
        trainer_of(config=stages(checkpoint_interval=7))
    with pytest.raises(ConfigError, match="no data set 'exam' to evaluate on"):
        trainer_of(config=stages(evaluations=["exam"]), eval_data=held)
    quiet = trainer_of(config=stages(evaluate=False), eval_data=held)
    assert quiet._rows.evaluated == {}


def test_the_names_cost_nothing_until_they_are_used() -> None:
    names = [
        "LoRATrainer",
        "LoRATrainerConfig",
        "LoRATrainState",
        "LoRAConfig",
        "PhasePlan",
        "Phase",
        "Sampling",
    ]
    code = (
        "import sys, lema, lema.cli\n"
        f"assert not set({names!r}) - set(dir(lema))\n"
        "heavy = {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
