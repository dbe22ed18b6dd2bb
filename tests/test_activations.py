"""Boundary activations lie in one allocation, each in a place of its own."""

import pytest
import torch

from lema.activations import BoundaryArena

LAYERS = range(2, 5)


def test_every_boundary_has_its_own_place_in_one_allocation() -> None:
    hidden = [torch.randn(2, 5, 8), torch.randn(1, 3, 8)]
    arena = BoundaryArena(hidden, LAYERS)
    kept = {}
    for layer in LAYERS:
        for index, state in enumerate(hidden):
            kept[layer, index] = (arena.keep(layer, index, state + layer), state + layer)
    assert all(torch.equal(place, value) for place, value in kept.values())
    assert len({place.untyped_storage().data_ptr() for place, _ in kept.values()}) == 1
    elements = sum(state.numel() for state in hidden) * len(LAYERS)
    assert kept[2, 0][0].untyped_storage().nbytes() == 4 * elements


def test_what_is_kept_does_not_change_with_its_source() -> None:
    state = torch.ones(1, 4, 8, requires_grad=True)
    place = BoundaryArena([state], LAYERS).keep(3, 0, state)
    with torch.no_grad():
        state.zero_()
    assert bool((place == 1).all())
    assert not place.requires_grad


@pytest.mark.parametrize("other", [torch.randn(1, 4, 9), torch.randn(1, 4, 8).bfloat16()])
def test_a_state_of_another_kind_is_kept_as_it_is(other: torch.Tensor) -> None:
    arena = BoundaryArena([torch.randn(1, 4, 8)], LAYERS)
    assert arena.keep(2, 0, other).data_ptr() == other.data_ptr()
