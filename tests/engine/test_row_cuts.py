"""The arguments of a call are cut by rows, with what belongs to a row in each way that can be told."""

from __future__ import annotations

import pytest
import torch

from lema.engine.layers.row_cuts import Cut, RowCuts
from lema.errors import ConfigError

CUTS = (Cut([2], 5, 5), Cut([0, 1], 4, 5))
HIDDEN = 5  # as wide as the rows are long, which is no reason to cut it


def marked(*counts: int) -> torch.Tensor:
    return torch.stack([torch.arange(5) < count for count in counts])


def test_features_of_tokens_go_with_the_rows_that_have_these_tokens() -> None:
    features = torch.arange(6 * HIDDEN, dtype=torch.float).view(6, HIDDEN)
    embeds = torch.randn(3, 5, HIDDEN)
    arguments = {"inputs_embeds": embeds, "marks": marked(2, 1, 3), "deep": [features, features]}
    cuts = RowCuts(arguments, CUTS)
    assert not cuts.ambiguous
    first, second = map(cuts.of, CUTS)
    assert torch.equal(first["deep"][0], features[3:])
    assert torch.equal(second["deep"][1], features[:3])
    assert torch.equal(first["inputs_embeds"], embeds[2:])
    assert torch.equal(second["inputs_embeds"], embeds[:2, :4])
    assert torch.equal(second["marks"], marked(2, 1)[:, :4])


def test_positions_and_masks_keep_what_comes_before_the_rows() -> None:
    positions = torch.arange(3 * 3 * 5).view(3, 3, 5)
    mask = torch.randn(3, 1, 5, 5)
    part = RowCuts({"position_ids": positions}, CUTS).of(CUTS[1])
    assert torch.equal(part["position_ids"], positions[:, :2, :4])
    whole = (Cut([2], 5, 5), Cut([0, 1], 5, 5))
    part = RowCuts({"attention_mask": {"full": mask}}, whole).of(whole[1])
    assert torch.equal(part["attention_mask"]["full"], mask[:2])


@pytest.mark.parametrize(
    "arguments",
    [
        {"marks": marked(1, 1, 1), "deep": torch.randn(3, HIDDEN)},
        {"marks": marked(2, 1, 3), "others": marked(1, 2, 3), "deep": torch.randn(6, HIDDEN)},
    ],
    ids=["as many tokens as rows", "as many tokens of two kinds"],
)
def test_what_may_belong_to_rows_in_two_ways_is_ambiguous(
    arguments: dict[str, torch.Tensor],
) -> None:
    assert RowCuts(arguments, CUTS).ambiguous
    assert not RowCuts(arguments, (Cut([0, 1, 2], 5, 5),)).ambiguous


def test_images_in_the_module_of_the_layers_are_refused_where_they_may_be_of_any_row() -> None:
    arguments = {"input_ids": torch.ones(3, 5, dtype=torch.long), "pixels": torch.randn(3, 3, 8, 8)}
    assert RowCuts(arguments, CUTS).of(CUTS[0])["pixels"].shape[0] == 1
    with pytest.raises(ConfigError, match="belong to which row"):
        RowCuts(arguments, CUTS, images_inside=True).of(CUTS[0])
    with pytest.raises(ConfigError, match="has no row for each of the 3"):
        RowCuts(arguments | {"pixels": torch.randn(4, 8)}, CUTS).of(CUTS[0])
