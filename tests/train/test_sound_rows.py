"""Rows with sounds in LEMA's own trainer: the numbers are those of the whole published class with
PEFT, on what its processor makes of the same rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mediasteps import compare_dpo, compare_sft, settings
from packedways import compare_ways
from soundprocessors import HEARING, publish_hearing, sound_examples, sound_rows

KIND = "qwen2_audio"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of models that hear, by their type."""
    root = tmp_path_factory.mktemp("published")
    return {kind: publish_hearing(kind, root / kind) for kind in HEARING}


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("kind", HEARING)
def test_loss_and_gradients_are_those_of_the_whole_model(
    kind: str, towers: str, published: dict[str, Path], tmp_path: Path
) -> None:
    # the processor of GLM-ASR takes as many sounds as texts
    rows = sound_rows(tmp_path, sounds=(1,) if kind == "glmasr" else (1, 2, 0))
    compare_sft(settings(published[kind], tmp_path, rows, towers=towers), rows)


def test_dpo_is_that_of_the_whole_model(published: dict[str, Path], tmp_path: Path) -> None:
    rows = sound_examples(tmp_path)
    compare_dpo(settings(published[KIND], tmp_path, rows, objective="dpo"), rows)


def test_chunks_and_packs_have_the_gradients_of_whole_rows(
    published: dict[str, Path], tmp_path: Path
) -> None:
    compare_ways(published[KIND], tmp_path, sound_rows(tmp_path))
