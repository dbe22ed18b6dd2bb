"""Runs that go on end bit for bit where the uninterrupted run does; those that cannot are
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from asloaded import ROPES
from recorder import Recorder
from smallrun import (
    adapter_of,
    logged,
    opened,
    run_fit,
    same,
    settings,
    token_rows,
    write_model,
)
from tiny import write_checkpoint
from transformers import (
    TrainerCallback,
)

from lema import LemaConfig
from lema.data import prepare_data
from lema.errors import AdapterError, ConfigError
from lema.train import train
from lema.train.checkpoint.resume import as_begun


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("gpt2"), "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1
    )


class Crash(TrainerCallback):
    """Ends the process, as far as a test can, at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    gpt2: Path, recompute: bool, tmp_path: Path
) -> None:
    rows = token_rows(22)
    eval_rows = token_rows(3, seed=2)

    def config(name: str) -> LemaConfig:
        return settings(
            gpt2,
            tmp_path / name,
            gradient_checkpointing=recompute,
            lora_dropout=0.1,
            gradient_accumulation_steps=2,
            num_train_epochs=2.0,  # six batches an epoch, the last of two rows: six steps
            save_steps=2,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
        )

    _, straight = run_fit(config("straight"), rows, eval_rows)
    with pytest.raises(KeyboardInterrupt):
        run_fit(config("broken"), rows, eval_rows, [Crash(5)])
    assert max(logged(config("broken"))) == 5
    recorder = Recorder()
    _, resumed = run_fit(config("broken"), rows, eval_rows, [recorder], resume=True)
    assert recorder.events[:4] == [
        ("on_init_end", 4, pytest.approx(8 / 6), ""),
        ("on_train_begin", 4, pytest.approx(8 / 6), ""),
        ("on_epoch_begin", 4, pytest.approx(8 / 6), ""),
        ("on_step_begin", 4, pytest.approx(8 / 6), ""),
    ]
    assert same(resumed, straight)
    for key in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        assert logged(config("broken"), key) == logged(config("straight"), key)
    state = json.loads((tmp_path / "broken" / "checkpoint-6" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_checkpoint_loaded_by_hand_is_gone_on_from(gpt2: Path, tmp_path: Path) -> None:
    rows = token_rows(16)
    config = settings(
        gpt2, tmp_path / "out", lora_dropout=0.1, save_steps=1, lr_scheduler_type="cosine"
    )
    _, straight = run_fit(config, rows)
    with opened(config.model_copy(update={"output_dir": str(tmp_path / "other")})) as model:
        trainer = model.get_trainer()
        trainer.load_checkpoint(tmp_path / "out" / "checkpoint-2")
        trainer.fit(rows)
        assert same(adapter_of(model.skeleton), straight)
        with pytest.raises(
            ConfigError, match="nothing is left to train: this trainer is at step 4 of 4"
        ):
            trainer.fit(rows)


@pytest.mark.slow
def test_a_new_run_does_not_begin_over_old_checkpoints(llama: Path, tmp_path: Path) -> None:
    config = settings(llama, tmp_path / "out", save_steps=1)
    run_fit(config, token_rows(4))
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(ConfigError, match="checkpoints of an earlier run") as caught:
        run_fit(config, token_rows(4))
    assert "resume" in caught.value.how
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")) == before


def test_a_run_cannot_be_resumed_without_a_checkpoint(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no checkpoint to resume from"):
        run_fit(settings(llama, tmp_path / "out"), token_rows(4), resume=True)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.iterdir()
        if path.is_file()
    }


@pytest.mark.parametrize("held", ["an adapter", "the metrics of another run"])
def test_a_new_run_replaces_nothing_of_one_that_has_ended_unless_it_may(
    llama: Path, tmp_path: Path, held: str
) -> None:
    out = tmp_path / "out"
    config = settings(llama, out, max_steps=1, save_steps=0)
    run_fit(config, token_rows(4))
    if held != "an adapter":  # which somebody has moved to another place
        for file in out.glob("adapter_*"):
            file.unlink()
    before = contents(out)
    with pytest.raises(ConfigError, match=f"holds {held}, which this run would replace") as caught:
        run_fit(config, token_rows(4))
    assert caught.value.exit_code == 2 and caught.value.where == str(out)
    assert (
        "another output_dir" in caught.value.how
        and "overwrite_output_dir: true" in caught.value.how
    )
    assert contents(out) == before
    run_fit(config.model_copy(update={"overwrite_output_dir": True, "max_steps": 2}), token_rows(8))
    assert list(logged(config)) == [1, 2] and (out / "adapter_model.safetensors").is_file()


def test_a_directory_of_another_run_is_refused_before_data_are_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(llama, tmp_path / "out", max_steps=1, save_steps=0)
    run_fit(config, token_rows(4))
    monkeypatch.setattr("lema.train.run.load_data", lambda _: pytest.fail("data were read"))
    with pytest.raises(ConfigError, match="holds an adapter, which this run would replace"):
        train(config)


def test_a_run_that_may_replace_an_adapter_replaces_no_checkpoints(
    llama: Path, tmp_path: Path
) -> None:
    config = settings(llama, tmp_path / "out", save_steps=1, max_steps=1, overwrite_output_dir=True)
    run_fit(config, token_rows(4))
    with pytest.raises(ConfigError, match="checkpoints of an earlier run"):
        run_fit(config, token_rows(4))


def test_files_that_no_run_replaces_are_nothing_to_say_anything_of(
    llama: Path, tmp_path: Path
) -> None:
    """Nor are the first lines of a run that was killed before it had saved anything: they are
    measured again.
    """
    out = tmp_path / "out"
    said = list[str]()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "metrics.jsonl").write_text('{"type": "train", "step": 1, "loss": 3.5}\n[1]\nnot JSON\n')
    config = settings(llama, out, max_steps=1, save_steps=0)
    run_fit(config, token_rows(4), say=said.append)
    assert said == [] and (out / "notes.txt").read_text() == "mine"
    rows = [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text().splitlines()
        if line[0] == "{"
    ]
    assert [row["type"] for row in rows] == ["train", "summary"] and rows[0]["loss"] != 3.5


@pytest.mark.slow
def test_resuming_a_finished_run_trains_nothing_and_says_so(llama: Path, tmp_path: Path) -> None:
    config = settings(llama, tmp_path / "out", save_steps=1)
    said = list[str]()
    expected, first = run_fit(config, token_rows(4))
    result, again = run_fit(config, token_rows(4), resume=True, say=said.append)
    assert result["train_loss"] == expected["train_loss"] and result.keys() == expected.keys()
    assert said[1:] == ["nothing was left to train: the run had taken its last step"]
    assert same(first, again)
    assert len(logged(config)) == 1


@pytest.fixture(scope="module")
def begun(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of one step has left its checkpoint."""
    out = tmp_path_factory.mktemp("begun")
    run_fit(
        settings(llama, out, save_steps=1, max_steps=1), prepare_data(token_rows(8), max_length=64)
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rows", "words"),
    [
        ({"batch_size": 2}, token_rows(8), ["batch_size: 4 -> 2"]),
        (
            {"gradient_accumulation_steps": 3},
            token_rows(8),
            ["gradient_accumulation_steps: 1 -> 3"],
        ),
        ({"seed": 1}, token_rows(8), ["seed: 42 -> 1"]),
        ({"shuffle": False}, token_rows(8), ["shuffle: True -> False"]),
        ({"dtype": "bfloat16"}, token_rows(8), ["dtype: None -> 'bfloat16'"]),
        (
            {"lora_rank": 8, "lora_target_modules": ["q_proj"], "seed": 1},
            token_rows(8),
            ["seed: 42 -> 1", "lora_rank: 4 -> 8", "lora_target_modules: [", "-> ['q_proj']"],
        ),
        ({}, token_rows(9), ["data rows: 8 -> 9", "data fingerprint: '"]),
        (
            {"max_length": 32},
            token_rows(8, seed=2),
            ["data fingerprint: '", "max_length: None -> 32"],
        ),
    ],
)
def test_a_run_is_not_resumed_on_other_data_or_batches(
    llama: Path, begun: Path, changes: dict[str, Any], rows: Any, words: list[str]
) -> None:
    later = settings(llama, begun, save_steps=1, **{"max_steps": 2, **changes})
    with pytest.raises(ConfigError, match="began with other settings or data") as caught:
        run_fit(later, prepare_data(rows, max_length=64), resume=True)
    assert caught.value.where == str(begun / "checkpoint-1")
    assert len(caught.value.what.splitlines()) == 1 + len([word for word in words if ":" in word])
    assert all(word in caught.value.what for word in words)


@pytest.mark.slow
def test_a_run_can_be_resumed_for_longer(llama: Path, tmp_path: Path) -> None:
    config = settings(llama, tmp_path / "out", save_steps=1, save_total_limit=2, max_steps=2)
    run_fit(config, token_rows(8))
    said: list[str] = []
    later = config.model_copy(update={"max_steps": 4, "micro_batch_size": 2})
    run_fit(later, token_rows(8), resume=True, say=said.append)
    assert list(logged(config)) == [1, 2, 3, 4]
    counted = logged(config, "num_tokens")
    epoch = sum(len(row["input_ids"]) for row in token_rows(8))
    # of the whole run, whatever process took the steps
    assert (counted[2], counted[4]) == (
        epoch,
        2 * epoch,
    )
    times = list(logged(config, "time").values())
    assert times == sorted(times) and times[0] > 1e9
    # from there as of four
    assert logged(config, "learning_rate") == {
        1: 0.01,
        2: 0.005,
        3: 0.005,
        4: 0.0025,
    }
    assert said == [
        f"resuming from {tmp_path / 'out' / 'checkpoint-2'} (step 2 of 4)",
        "settings changed from here on (then -> now): max_steps: 2 -> 4",
    ]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_other_rows_at_once_are_said_where_they_decide_a_rotary_table(
    kind: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", rope_parameters={"rope_type": kind, **ROPES[kind]})
    config = settings(model, tmp_path / "out", save_steps=1, max_steps=1, micro_batch_size=4)
    run_fit(config, token_rows(8))
    said: list[str] = []
    run_fit(config.model_copy(update={"max_steps": 2}), token_rows(8), resume=True, say=said.append)
    assert not any("micro_batch_size" in line for line in said)
    later = config.model_copy(update={"max_steps": 3, "micro_batch_size": 2})
    run_fit(later, token_rows(8), resume=True, say=said.append)
    reason = f"rotary embeddings of type {kind} go by the longest of the rows computed at once"
    line = (
        "numbers change by more than rounding where rows are long (micro_batch_size: 4 -> 2): "
        f"{reason}"
    )
    assert said.count(line) == (kind != "yarn")


def test_a_run_that_adapts_no_experts_goes_on_without_them(tmp_path: Path) -> None:
    """As one does that began before experts were adapted by default."""
    model = write_checkpoint("mixtral", tmp_path).streamed
    out = tmp_path / "out"
    rows = [
        {"input_ids": [*range(first, first + 9)], "labels": [*range(first, first + 9)]}
        for first in range(1, 9)
    ]
    begun = settings(model, out, save_steps=1, max_steps=1)
    run_fit(begun.model_copy(update={"lora_target_parameters": []}), rows)
    later = begun.model_copy(update={"max_steps": 2})
    with pytest.raises(
        ConfigError, match=r"lora_target_parameters: \[\] -> \['experts.down_proj', "
    ):
        run_fit(later, rows, resume=True)
    run_fit(as_begun(later, out / "checkpoint-1"), rows, resume=True)
    assert list(logged(later)) == [1, 2]
