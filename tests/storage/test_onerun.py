"""A run's directory is cleared of what a run killed in its last save has left there."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from lema.backend import Alone
from lema.storage.locks import LOCK, one_run

LEFT = (
    ".adapter-59vp9z3f/adapter_model.safetensors",
    ".lema_config.json.17.part",
    ".metrics.jsonl.17.part",
)
OURS = (
    "adapter_model.safetensors",
    ".adapter.txt",
    ".lema_config.json",
    "notes/.adapter-mine/file",
    "checkpoint-1/a",
)


def test_what_a_killed_run_left_beside_its_checkpoints_goes(tmp_path: Path) -> None:
    for name in (*LEFT, *OURS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with one_run(Alone(), tmp_path):
        pass
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert kept - {LOCK} == set(OURS)


def test_without_a_lock_nothing_is_taken_from_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema.storage.locks.run_lock", lambda directory: nullcontext(False))
    (tmp_path / ".adapter-59vp9z3f").mkdir()
    with one_run(Alone(), tmp_path):
        pass
    assert (tmp_path / ".adapter-59vp9z3f").is_dir()
