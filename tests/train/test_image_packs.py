"""Rows with images in chunks of their sequence, and in packs, as the published processors make them:
loss and gradients are, to rounding, those of the same rows whole and alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from imageprocessors import PROCESSORS, image_rows, publish_with_processor
from packedways import compare_ways
from writtenonce import Directories, written_once


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    return written_once(tmp_path_factory.mktemp("published"), publish_with_processor)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_chunks_and_packs_have_the_gradients_of_whole_rows(
    model_type: str, attention: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path)
    compare_ways(published(model_type), tmp_path, rows, attn_implementation=attention)
