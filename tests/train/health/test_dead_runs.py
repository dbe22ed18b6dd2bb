"""A run that learns nothing: told at once, recorded, shown, ended with exit code 5, and never
praised.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import config_writer, lema
from forked import run_forked
from smallrun import adapter_of, opened, run_fit, settings, token_rows, write_model
from transformers import TrainerCallback

from lema import LemaModel
from lema.errors import DeadRun, NonFiniteError
from lema.train.metrics import read_metrics

ROWS = token_rows(8)
LONG: dict[str, Any] = {"num_train_epochs": 20.0, "logging_steps": 1, "warmup_steps": 0}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


class From(TrainerCallback):
    """Has gradients be 0 from a step on, counted from 1, up to another."""

    def __init__(self, first: int, last: int = 10**6) -> None:
        self.first = first
        self.last = last

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        dead = self.first <= state.global_step + 1 <= self.last
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or ".lora_A." in name:
                with torch.no_grad():
                    parameter.copy_(
                        torch.zeros_like(parameter) if dead else torch.full_like(parameter, 0.01)
                    )


def events(output: Path) -> list[tuple[int, str, int]]:
    rows = [row for row in read_metrics(output / "metrics.jsonl") if row.get("event") == "dead"]
    return [(row["step"], row["sign"], row["dead_steps"]) for row in rows]


def test_a_run_without_gradients_ends_with_the_checkpoint_of_before(
    llama: Path, tmp_path: Path
) -> None:
    config = settings(llama, tmp_path, save_steps=1, save_total_limit=2, **LONG)
    with (
        pytest.warns(
            UserWarning, match="may learn nothing: step 6: the norm of the gradients is exactly 0"
        ) as told,
        pytest.raises(DeadRun, match="nothing was learnt in the last 20 steps") as caught,
    ):
        run_fit(config, ROWS, callbacks=[From(6)])
    assert len(told) == 1
    assert caught.value.exit_code == 5
    assert caught.value.where == f"step 25; the checkpoint of before is {tmp_path / 'checkpoint-5'}"
    assert "stop_when_dead: false" in caught.value.how
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        "checkpoint-5",
        "checkpoint-23",
        "checkpoint-24",
    }
    assert events(tmp_path) == [(6, "gradient", 1), (25, "gradient", 20)]
    assert not (tmp_path / "adapter_model.safetensors").exists()
    counted = [
        row.get("dead_steps", 0)
        for row in read_metrics(tmp_path / "metrics.jsonl")
        if "loss" in row
    ]
    assert counted == [0] * 5 + list(range(1, 21))


@pytest.mark.slow
def test_a_resumed_run_counts_on_and_keeps_the_checkpoint_of_before(
    llama: Path, tmp_path: Path
) -> None:
    config = settings(llama, tmp_path, save_steps=5, save_total_limit=2, max_steps=15, **LONG)
    with pytest.warns(UserWarning, match="may learn nothing: step 6"):
        result, _ = run_fit(config, ROWS, callbacks=[From(6)])
    assert result["dead"] == "the norm of the gradients is exactly 0, so nothing is learnt"
    longer = settings(llama, tmp_path, save_steps=5, save_total_limit=2, max_steps=40, **LONG)
    with (
        pytest.warns(UserWarning, match="may learn nothing: step 16"),
        pytest.raises(DeadRun) as caught,
    ):
        run_fit(longer, ROWS, callbacks=[From(6)], resume=True, say=lambda _: None)
    assert caught.value.where.startswith("step 25; ")
    # as of a run that nobody stopped
    assert events(tmp_path) == [
        (6, "gradient", 1),
        (25, "gradient", 20),
    ]


@pytest.mark.slow
def test_a_run_that_recovers_goes_on(llama: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="may learn nothing: step 3") as told:
        result, _ = run_fit(
            settings(llama, tmp_path, max_steps=30, **LONG), ROWS, callbacks=[From(3, 21)]
        )
    assert "dead" not in result and len(told) == 1 and events(tmp_path) == [(3, "gradient", 1)]


def test_a_run_may_go_on_but_is_not_praised(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write = config_writer(llama, tmp_path)
    dead = {"learning_rate": 0.0, "max_steps": 24, "num_train_epochs": 20.0}
    with pytest.warns(
        UserWarning, match="may learn nothing: step 0: the learning rate is 0"
    ) as told:
        assert lema("train", write(**dead)) == 5
        assert "error: nothing was learnt in the last 20 steps" in capfd.readouterr().err
        assert lema("train", write(stop_when_dead=False, overwrite_output_dir=True, **dead)) == 0
    assert len(told) == 2  # one of each run
    lines = capfd.readouterr().out.splitlines()
    why = "the learning rate is 0, so nothing changes"
    assert lines[-3] == f"ended at step 24, but this run may have learnt nothing: {why}"
    assert not any("mean loss" in line or "lema generate" in line for line in lines)
    out = tmp_path / "out"
    assert f"| dead | {why} |" in (out / "README.md").read_text()
    assert lema("watch", out, "--once") == 0
    assert f"this run may learn nothing, since 24 steps: {why}" in " ".join(
        capfd.readouterr().out.split()
    )
    assert lema("report", out) == 0
    page = (out / "report.html").read_text()
    assert "This run may have learnt nothing" in page and f"<td>{why}</td>" in page
    assert "The last 24 steps were so." in page


def test_watch_and_report_say_nothing_of_a_healthy_run(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", config_writer(llama, tmp_path)()) == 0
    assert lema("watch", tmp_path / "out", "--once") == 0
    assert lema("report", tmp_path / "out") == 0
    assert "may learn" not in capfd.readouterr().out
    assert "learnt nothing" not in (tmp_path / "out" / "report.html").read_text()


def test_a_rate_that_ruins_the_weights_is_told_by_what_comes_of_it(
    llama: Path, tmp_path: Path
) -> None:
    """What overflows first depends on the processor: the run ends because it is dead, or because a
    gradient is not finite, and in any case two signs were told before."""
    with (
        pytest.warns(UserWarning, match="may learn nothing") as told,
        pytest.raises((DeadRun, NonFiniteError)),
    ):
        run_fit(settings(llama, tmp_path, learning_rate=1e3, **LONG), ROWS)
    signs = [sign for _, sign, _ in events(tmp_path)]
    assert signs[0] == "rate" and {"gradient", "vocabulary", "rising"} & set(signs)
    assert len(told) == len(set(signs))


def test_a_number_that_trains_and_no_batch_meets_ends_the_run_at_once(
    llama: Path, tmp_path: Path
) -> None:
    unused = next(
        token for token in range(1, 300) if all(token not in row["input_ids"] for row in ROWS)
    )

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            (delta,) = (
                one for name, one in model.named_parameters() if "trainable_tokens_delta" in name
            )
            if state.global_step == 2:
                delta.grad.fill_(torch.nan)

    config = settings(llama, tmp_path, lora_trainable_token_indices=[unused])
    with pytest.raises(
        NonFiniteError, match=r"trainable_tokens_delta.*, which trains, has become NaN"
    ) as caught:
        run_fit(config, ROWS * 3, callbacks=[Spoil()])
    assert caught.value.where.startswith("step 4")


def dead_together(place: Path) -> None:
    """All processes end at once, the last of which has nothing of the last batch."""
    model = LemaModel(settings(place / "model", place / "out", learning_rate=0.0, **LONG))
    model.initialize_lora()
    with pytest.raises(DeadRun, match="in the last 20 steps"):
        model.get_trainer().fit(token_rows(5), say=lambda _: None)
    model.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this run may learn nothing")
def test_processes_end_together(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    run_forked(dead_together, [tmp_path], 2, tmp_path, 120)
    assert [
        row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in row
    ][-1] == 20


def test_nothing_of_a_step_that_was_looked_at_is_another(llama: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        with opened(settings(llama, tmp_path / name, stop_when_dead=name == "one")) as model:
            model.get_trainer().fit(ROWS, say=lambda _: None)
            found.append(adapter_of(model.skeleton))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
