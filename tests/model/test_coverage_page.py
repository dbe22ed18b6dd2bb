"""docs/coverage.md is what its command prints, and names at least 50 checkpoints, nearly all of
which stream.
"""

from pathlib import Path

import pytest
import torch
from coveragepage import (
    CHECKPOINTS,
    DIFFERENCES,
    Checkpoint,
    differences,
    page,
    parameters_of,
    try_checkpoint,
)
from libraryversions import made_with
from publishedforms import FORMS

from lema.model import meta_model
from lema_tools.models.checkpoints import NEAR, PARAMETERS, config_of

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_names_the_checkpoints_of_the_list() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if "| `" in line]
    named = [(name.removeprefix("| "), kind.strip("`"), form) for name, kind, form, *_ in rows]
    assert named == [(one.name, one.model_type, one.form) for one in CHECKPOINTS]
    assert len(named) >= 50
    assert {one.form for one in CHECKPOINTS} <= FORMS.keys()


def test_the_page_says_each_difference() -> None:
    lines = PAGE.read_text().splitlines()
    assert lines[lines.index(DIFFERENCES.splitlines()[0]) :] == list(differences())


def test_every_published_count_is_of_a_checkpoint_with_sizes() -> None:
    assert {one.name for one in CHECKPOINTS if one.sizes is not None} >= PARAMETERS.keys()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "checkpoint", [one for one in CHECKPOINTS if one.name in PARAMETERS], ids=lambda one: one.name
)
def test_the_sizes_of_a_checkpoint_give_its_published_number_of_parameters(
    checkpoint: Checkpoint,
) -> None:
    counted = parameters_of(meta_model(config_of(checkpoint), torch.bfloat16))
    assert counted == pytest.approx(PARAMETERS[checkpoint.name], rel=NEAR)


def test_heads_are_as_wide_as_config_json_says_where_the_class_does_not_declare_it() -> None:
    """Qwen3-30B-A3B has heads of 128 with a hidden size of 2,048 and 32 heads."""
    (checkpoint,) = (one for one in CHECKPOINTS if one.name == "Qwen3-30B-A3B")
    model = meta_model(config_of(checkpoint), torch.bfloat16)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 2048)


@pytest.mark.exhaustive  # it opens every type of the page
@made_with("transformers", "peft")
def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text().splitlines() == list(page())
    refused = [checkpoint.name for checkpoint in CHECKPOINTS if try_checkpoint(checkpoint).refused]
    assert refused == ["Kimi-K3"]
