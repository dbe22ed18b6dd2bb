"""The best evaluation of a run: its checkpoint stays, its adapter is kept, and a run ends when
nothing gets better.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smallrun import adapter_of, logged, opened, run_fit, same, settings, token_rows
from transformers import EarlyStoppingCallback, TrainerCallback

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.train.checkpoint.card import model_card
from lema.train.stage import Stage

LOSSES = [5.0, 4.0, 4.5, 3.995, 4.2, 4.1, 4.3, 4.4]  # after each step; the best is the fourth


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have evaluations tell the losses above: whether they fall by themselves is the data's
    business.
    """

    def evaluate(stage: Stage) -> dict[str, float]:
        loss = LOSSES[max(stage.progress.done, 1) - 1]
        return {"eval_loss": loss, "eval_perplexity": 100 - loss, "eval_tokens": 7}

    monkeypatch.setattr(Stage, "evaluate", evaluate)


def config_of(llama: Path, out: Path, **changes: Any) -> LemaConfig:
    given = {
        "batch_size": 2,
        "max_steps": 8,
        "eval_steps": 1,
        "lora_dropout": 0.1,
        "lr_scheduler_type": "constant",
    }
    return settings(llama, out, **given | changes)


def checkpoints(config: LemaConfig) -> list[int]:
    return sorted(
        int(one.name.partition("-")[2]) for one in Path(config.output_dir).glob("checkpoint-*")
    )


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "adapter_model.safetensors"))


ROWS = token_rows(16)
HELD_OUT = token_rows(2, seed=2)


@pytest.mark.usefixtures("told")
def test_the_best_adapter_is_left_and_its_checkpoint_is_not_rotated_away(
    llama: Path, tmp_path: Path
) -> None:
    config = config_of(
        llama, tmp_path, save_steps=2, save_total_limit=2, load_best_model_at_end=True
    )
    lines = list[str]()
    result, adapter = run_fit(config, ROWS, HELD_OUT, say=lines.append)
    assert checkpoints(config) == [4, 6, 8]
    assert (result["best_step"], result["best_eval_loss"]) == (4, 3.995)
    assert any("the adapter of step 4 is kept" in line for line in lines)
    assert same(saved(tmp_path), saved(tmp_path / "checkpoint-4"))
    assert not same(saved(tmp_path), saved(tmp_path / "checkpoint-8"))
    assert all(
        torch.equal(
            adapter[name.replace(".weight", ".default.weight").removeprefix("base_model.model.")],
            value,
        )
        for name, value in saved(tmp_path).items()
    )
    assert "best_eval_loss | 3.995" in (tmp_path / "README.md").read_text()


@pytest.mark.usefixtures("told")
def test_the_best_is_saved_where_no_interval_asks_for_it(llama: Path, tmp_path: Path) -> None:
    config = config_of(llama, tmp_path, load_best_model_at_end=True, save_steps=0)
    run_fit(config, ROWS, HELD_OUT)
    assert checkpoints(config) == [1, 2, 4]
    assert same(saved(tmp_path), saved(tmp_path / "checkpoint-4"))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("more", "best"), [(None, 1), (True, 4), (False, 1)])
def test_another_metric_says_what_is_best(
    llama: Path, tmp_path: Path, more: bool | None, best: int
) -> None:
    config = config_of(
        llama, tmp_path, metric_for_best_model="perplexity", greater_is_better=more, max_steps=5
    )
    assert run_fit(config, ROWS, HELD_OUT)[0]["best_step"] == best


@pytest.mark.usefixtures("told")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("patience", "threshold", "last"), [(1, 0.0, 3), (2, 0.0, 6), (2, 0.01, 4), (4, 0.0, 8)]
)
def test_a_run_ends_after_evaluations_that_were_no_better(
    llama: Path, tmp_path: Path, patience: int, threshold: float, last: int
) -> None:
    config = config_of(
        llama,
        tmp_path / "ours",
        early_stopping_patience=patience,
        early_stopping_threshold=threshold,
    )
    run_fit(config, ROWS, HELD_OUT)
    assert max(logged(config)) == last
    theirs = config_of(llama, tmp_path / "theirs")
    run_fit(theirs, ROWS, HELD_OUT, [EarlyStoppingCallback(patience, threshold)])
    assert logged(theirs, "eval_loss") == logged(config, "eval_loss")


class Crash(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.covered(1)
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("step", [3, 5])
def test_a_resumed_run_goes_on_counting_and_knows_the_best(
    llama: Path, tmp_path: Path, step: int
) -> None:
    changes = {
        "early_stopping_patience": 2,
        "load_best_model_at_end": True,
        "save_steps": 1,
        "save_total_limit": 2,
    }
    straight, broken = (
        config_of(llama, tmp_path / name, **changes) for name in ("straight", "broken")
    )
    _, expected = run_fit(straight, ROWS, HELD_OUT)
    with pytest.raises(KeyboardInterrupt):
        run_fit(broken, ROWS, HELD_OUT, [Crash(step)])
    result, found = run_fit(broken, ROWS, HELD_OUT, resume=True)
    assert max(logged(broken)) == max(logged(straight)) == 6
    assert result["best_step"] == 4
    assert same(found, expected)
    assert checkpoints(broken) == checkpoints(straight) == [4, 5, 6]

    # A run that has ended early stays so, and its card keeps its results.
    def card() -> list[str]:
        lines = (tmp_path / "broken" / "README.md").read_text().splitlines()
        return [line for line in lines if not any(f"{name} |" in line for name in times)]

    times = {"train_runtime", "train_tokens_per_second"}
    before = card()
    again, adapter = run_fit(broken, ROWS, HELD_OUT, resume=True)
    assert all(again[name] == number for name, number in result.items() if name not in times)
    assert max(logged(broken)) == 6
    assert same(adapter, expected)
    assert card() == before
    # With more patience it goes on.
    patient = broken.model_copy(update={"early_stopping_patience": 4})
    run_fit(patient, ROWS, HELD_OUT, resume=True)
    assert max(logged(patient)) == 8


@pytest.mark.usefixtures("told")
def test_a_best_adapter_that_is_damaged_is_said_and_the_last_is_left(
    llama: Path, tmp_path: Path
) -> None:
    class Damage(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 7:
                file = tmp_path / "checkpoint-4" / "adapter_model.safetensors"
                file.write_bytes(file.read_bytes()[:-1] + b"x")

    config = config_of(llama, tmp_path, load_best_model_at_end=True, save_steps=8)
    lines = list[str]()
    run_fit(config, ROWS, HELD_OUT, [Damage()], say=lines.append)
    assert any("the best adapter, of step 4, cannot be kept" in line for line in lines)
    assert same(saved(tmp_path), saved(tmp_path / "checkpoint-8"))


@pytest.mark.usefixtures("told")
def test_an_evaluation_on_start_is_none_of_the_best(llama: Path, tmp_path: Path) -> None:
    config = config_of(llama, tmp_path, eval_on_start=True, save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        run_fit(config, ROWS, HELD_OUT, [Crash(1)])
    assert logged(config, "eval_loss") == {0: LOSSES[0], 1: LOSSES[0]}
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 1
    run_fit(config, ROWS, HELD_OUT, resume=True)
    assert [
        row["step"]
        for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "eval_loss" in row
    ] == [0, *range(1, 9)]


@pytest.mark.parametrize(
    "change",
    [
        {"early_stopping_patience": 1},
        {"load_best_model_at_end": True},
        {"eval_on_start": True},
        {"eval_prompts": ["a"]},
    ],
)
def test_settings_of_evaluations_are_refused_without_any(
    llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="nothing to evaluate on") as caught:
        run_fit(settings(llama, tmp_path, **change), ROWS)
    assert caught.value.where == next(iter(change))


def test_a_metric_that_is_not_measured_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_accuracy is not measured of tokens"):
        settings(llama, tmp_path, metric_for_best_model="accuracy")
    pairs = [{"prompt": "the", "chosen": " miller", "rejected": " river"}] * 4
    config = settings(
        llama, tmp_path, objective="dpo", metric_for_best_model="nothing", max_steps=1, eval_steps=1
    )
    with pytest.raises(ConfigError, match="eval_nothing was not measured") as caught:
        run_fit(config, pairs, pairs)
    assert "eval_rewards/margins" in caught.value.how


def test_fit_leaves_the_adapter_with_its_card_and_tokenizer(llama: Path, tmp_path: Path) -> None:
    config = settings(llama, tmp_path, max_steps=1, max_train_samples=3, max_eval_samples=1)
    rows = [{"text": f"the miller of mill {number}"} for number in range(6)]
    with opened(config) as model:
        result = model.get_trainer().fit(rows, rows)
        trained = adapter_of(model.skeleton)
    card = (tmp_path / "README.md").read_text()
    assert "library_name: peft" in card and "More Information" not in card
    # The code runs here, so it has the model's path; nothing else has it, and nothing published.
    before, code, after = re.split(r"```(?:python)?\n", card)
    assert f'"{llama}"' in code
    assert str(llama.parent) not in before + after
    published = config.model_copy(update={"push_to_hub": True})
    assert str(llama.parent) not in model_card(published, str(llama), {}, {})
    assert (
        f"`{llama.name}`" in card
        and "| training | 3 rows, " in card
        and "| evaluation | 1 rows, " in card
    )
    assert f"| eval_loss | {result['eval_loss']:.6g} |" in card and "| lora_rank | 4 |" in card
    assert (tmp_path / "chat_template.jinja").is_file() and (tmp_path / "tokenizer.json").is_file()
    reopened = LemaModel.from_pretrained(tmp_path)
    assert same(adapter_of(reopened.skeleton), trained)
    reopened.save_pretrained(tmp_path)
    reopened.close()
    assert (tmp_path / "README.md").read_text() == card
