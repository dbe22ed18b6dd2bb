"""Runs whose sequences go through layers in chunks: stopped in the middle and resumed, they end bit
for bit where they would have.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_same_adapter, config_writer, lema
from smallrun import logged, run_fit, same, settings, token_rows

from lema import LemaConfig
from lema.engine.layers.chunked import ChunkedLayer

pytestmark = pytest.mark.usefixtures("fast_disk")

CHUNK = 4
RUN: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 1,
    "lora_dropout": 0.1,
    "micro_batch_size": 2,
    "lr_scheduler_type": "cosine",
}
EVALUATED = {"eval_split": 2, "eval_steps": 2}
MEASURED = ("loss", "eval_loss", "grad_norm", "learning_rate")


Counting = Callable[..., list[int]]


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def die() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Return what notes, from then on, which layers have gone backward in chunks; in the one of a
    number something happens."""
    backward = ChunkedLayer.backward

    def count(happens: Callable[[], None] = ask_to_stop, at: int | None = None) -> list[int]:
        seen = list[int]()

        def counted(layer: ChunkedLayer, *args: Any, **options: Any) -> Any:
            seen.append(layer.number)
            if len(seen) == at:
                happens()
            return backward(layer, *args, **options)

        monkeypatch.setattr(ChunkedLayer, "backward", counted)
        return seen

    return count


def measured(directory: Path) -> list[dict[int, float]]:
    config = settings(directory, directory)
    return [logged(config, key) for key in MEASURED]


@pytest.mark.parametrize("place", ["config", "command"])
def test_a_run_that_is_told_to_stop_within_a_backward_resumes_bitwise(
    place: str,
    llama: Path,
    backwards: Counting,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes = RUN | EVALUATED
    if place == "config":
        changes["sequence_chunk"] = CHUNK
    words = [] if place == "config" else ["--set", f"sequence_chunk={CHUNK}"]
    write = config_writer(llama, tmp_path)
    straight = tmp_path / "straight"
    seen = backwards()
    assert lema("train", write(**changes, output_dir=str(straight)), *words) == 0
    assert seen
    assert len(seen) % RUN["max_steps"] == 0
    out = tmp_path / "out"
    config = write(**changes, output_dir=str(out))
    cut = backwards(ask_to_stop, at=len(seen) * 5 // 8)  # in the middle of the third step
    capfd.readouterr()
    assert lema("train", config, *words) == 75
    assert "--resume" in "".join(capfd.readouterr())
    assert len(cut) < len(seen)
    assert [path.name for path in sorted(out.glob("checkpoint-*"))] == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert lema("train", config, *words, "--resume") == 0
    assert_same_adapter(out, straight)
    assert measured(out) == measured(straight)


def test_a_run_that_is_killed_between_checkpoints_resumes_bitwise(
    llama: Path, backwards: Counting, tmp_path: Path
) -> None:
    """It dies within the backward of the fourth step, and the last checkpoint is of the second."""

    def config(name: str) -> LemaConfig:
        changes = {"save_steps": 2, "sequence_chunk": CHUNK}
        return settings(llama, tmp_path / name, **RUN | changes)

    rows = token_rows(16)
    seen = backwards()
    _, straight = run_fit(config("straight"), rows)
    backwards(die, at=len(seen) * 7 // 8)
    with pytest.raises(KeyboardInterrupt):
        run_fit(config("broken"), rows)
    assert [path.name for path in (tmp_path / "broken").glob("checkpoint-*")] == ["checkpoint-2"]
    backwards()
    _, resumed = run_fit(config("broken"), rows, resume=True)
    assert same(resumed, straight)
    assert logged(config("broken"), "loss") == logged(config("straight"), "loss")


def test_another_chunk_may_be_chosen_when_a_run_is_resumed(llama: Path, tmp_path: Path) -> None:
    """The numbers are those of whole sequences to rounding, which is said as of a setting."""
    config = settings(llama, tmp_path, max_steps=1, save_steps=1, sequence_chunk=CHUNK)
    rows = token_rows(8)
    run_fit(config, rows)
    said = list[str]()
    later = config.model_copy(update={"max_steps": 2, "sequence_chunk": None})
    run_fit(later, rows, resume=True, say=said.append)
    assert any("sequence_chunk: 4 -> None" in line for line in said)
