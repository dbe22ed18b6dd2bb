"""Every type of causal or image-text model of `transformers`: streamed, its numbers are those of
the whole model.

Logits, loss and the gradient of every adapter of every linear are bitwise equal, in fp32 and under
autocast of bf16. What cannot be streamed is refused with one sentence, and listed here with it.
"""

import re
from pathlib import Path

import pytest
import torch
from everytype import (
    CLOSE,
    MODEL_TYPES,
    NOT_BUILT,
    REFUSED,
    STREAMED,
    UNTAKEN,
    compare,
    compare_ways,
)
from huggingface_hub.errors import StrictDataclassError

from lema.errors import ModelError, WeightsError
from lema_tools.survey.attempt import survey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of 272 types, some of which are announced as old
]


@pytest.mark.covered(24)
@pytest.mark.parametrize("model_type", STREAMED)
def test_a_step_in_every_way_is_that_of_the_whole_model_given_the_labels(
    model_type: str, tmp_path: Path
) -> None:
    """In fp32: rows as they are, padded, several packed into one, and two micro-batches of
    different lengths.
    """
    found = compare_ways(model_type, tmp_path, torch.float32)
    assert "two micro-batches" in found
    assert_equal(model_type, found)


@pytest.mark.covered(8)
@pytest.mark.parametrize("model_type", STREAMED)
def test_under_autocast_of_bf16_as_well(model_type: str, tmp_path: Path) -> None:
    assert_equal(model_type, compare_ways(model_type, tmp_path, torch.bfloat16))


def assert_equal(model_type: str, found: dict[str, float]) -> None:
    least = {"float": 1e-6, "two": 1e-6, "bfloa": 2e-2} if model_type in CLOSE else {}
    assert not {
        way: apart for way, apart in found.items() if apart > least.get(way.split()[0][:5], 0)
    }
    assert len(found) == ("two micro-batches" in found) + 3 - len(UNTAKEN.get(model_type, ()))


def test_the_list_of_what_is_not_equal_is_short() -> None:
    assert len(CLOSE.keys() | UNTAKEN.keys()) <= 3


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_streamed_is_refused_with_a_sentence(
    model_type: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=re.escape(REFUSED[model_type])):
        compare(model_type, tmp_path)


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_what_transformers_cannot_build_is_known(model_type: str, tmp_path: Path) -> None:
    with pytest.raises((ImportError, StrictDataclassError, *NO_MODEL), match=NOT_BUILT[model_type]):
        compare(model_type, tmp_path)


NO_MODEL = (AttributeError, TypeError, ValueError, NotImplementedError, WeightsError)

# Types whose weights cannot be drawn here, so that no step of theirs is compared.
UNTRIED = {
    "inkling_mm_model",  # that takes scipy
    "shieldgemma2",  # nor read again as transformers writes them
}


@pytest.mark.covered(6)
@pytest.mark.parametrize("model_type", [kind for kind in MODEL_TYPES if kind not in STREAMED])
def test_the_table_of_models_does_not_claim_what_does_not_stream(model_type: str) -> None:
    assert not survey(model_type).streams or model_type in UNTRIED


@pytest.mark.covered(8)
@pytest.mark.parametrize("model_type", STREAMED)
def test_the_table_of_models_refuses_nothing_that_streams(model_type: str) -> None:
    assert survey(model_type).streams in (True, None)


def test_more_than_200_types_stream() -> None:
    assert len(STREAMED) >= 200
    assert not (REFUSED.keys() | NOT_BUILT.keys() | CLOSE.keys()) - set(MODEL_TYPES)
