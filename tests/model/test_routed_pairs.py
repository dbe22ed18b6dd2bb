"""The pairs of a token and an expert of each group, as many as the group runs at once."""

import pytest
import torch

from lema.model import experts
from lema.model.experts import Routed, most_pairs
from lema.stream.schedule import ExpertGroup

TOKENS = 50
TOP_K = 3
COUNT = 8
GROUPS = [ExpertGroup(9, 0, 3), ExpertGroup(10, 3, 6), ExpertGroup(11, 6, 8)]


def routed(*, alike: bool) -> Routed:
    """Return a micro-batch whose tokens have experts by chance, or all the first three."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(TOKENS, COUNT, generator=generator)
    first = torch.arange(TOP_K).repeat(TOKENS, 1)
    chosen = first if alike else scores.topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    hidden = torch.randn(TOKENS, 4, generator=generator)
    return Routed.of((None, (hidden, chosen, weights)), GROUPS)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("part", [0.1, 0.4, 5.0])
def test_every_pair_is_run_once_and_added_in_one_order(
    alike: bool, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added up does not depend on how many are run at once, to the bit."""
    monkeypatch.setattr(experts, "LEAST_PAIRS", 1)
    monkeypatch.setattr(experts, "PAIRS_AT_ONCE", part)
    routing = routed(alike=alike)
    together = routing.sums()
    for number, group in enumerate(GROUPS):
        most = most_pairs(TOKENS, TOP_K, group.end - group.first, COUNT)
        runs = list(routing.of_group(number))
        assert all(0 < len(run.pairs) <= most for run in runs)
        assert torch.equal(
            torch.cat([run.pairs for run in runs]) if runs else routing.pairs[number][:0],
            routing.pairs[number],
        )
        for run in runs:
            assert sum(run.counts) == len(run.pairs)
            for tokens in run.tokens.split(list(run.counts)):
                assert len(tokens.unique()) == len(tokens)
            hidden, chosen, weights = routing.arguments(run)
            assert bool(((chosen >= group.first) & (chosen < group.end)).all())
            routing.add(together, run, hidden * weights)
    monkeypatch.setattr(experts, "PAIRS_AT_ONCE", 100.0)
    whole = routed(alike=alike)
    at_once = whole.sums()
    for number in range(len(GROUPS)):
        for run in whole.of_group(number):
            hidden, _, weights = whole.arguments(run)
            whole.add(at_once, run, hidden * weights)
    assert torch.equal(together, at_once)


def test_a_group_never_runs_more_pairs_than_there_are() -> None:
    assert most_pairs(tokens=10, top_k=3, experts=2, count=8) == 20
    assert most_pairs(tokens=1024, top_k=8, experts=32, count=256) == 1280
    assert most_pairs(tokens=1024, top_k=8, experts=256, count=256) == 8192
    assert most_pairs(tokens=100, top_k=2, experts=1, count=64) == 100
