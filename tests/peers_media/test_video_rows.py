"""Rows with videos in LEMA's own trainer: the numbers are those of the whole published class with
PEFT, on what its processor makes of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mediasteps import compare_dpo, compare_sft, settings
from videoprocessors import SEEING, publish_seeing, video_examples, video_rows

Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    root = tmp_path_factory.mktemp("published")

    def directory(model_type: str) -> Path:
        path = root / model_type
        return path if path.exists() else publish_seeing(model_type, path)

    return directory


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("kind", SEEING)
def test_loss_and_gradients_are_those_of_the_whole_model(
    kind: str, towers: str, published: Directories, tmp_path: Path
) -> None:
    rows = video_rows(tmp_path)
    compare_sft(settings(published(kind), tmp_path, rows, towers=towers), rows)


@pytest.mark.parametrize("kind", SEEING)
def test_dpo_is_that_of_the_whole_model(kind: str, published: Directories, tmp_path: Path) -> None:
    rows = video_examples(tmp_path)
    compare_dpo(settings(published(kind), tmp_path, rows, objective="dpo"), rows)
