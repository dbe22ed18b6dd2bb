"""Rows with videos in LEMA's own trainer: the numbers are those of the whole published class with
PEFT, on what its processor makes of the same rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mediasteps import compare_dpo, compare_sft, settings
from videoprocessors import SEEING, publish_seeing, video_examples, video_rows
from writtenonce import Directories, written_once


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    return written_once(tmp_path_factory.mktemp("published"), publish_seeing)


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
