"""Tensors of a model are where its weights are: no buffer, and none in another attribute, is
left in host memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lema.model.outer_weights import buffer_bytes, move_tensors, tensors_elsewhere

META = torch.device("meta")  # what is moved there has no values afterwards
OTHER = torch.device("lazy")  # a device that holds nothing of what these tests make


class Pair(NamedTuple):
    first: Tensor
    second: int


class Rotary(nn.Module):
    """A module with tensors in every place that a model's code keeps them in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.original_inv_freq = self.inv_freq
        self.weight = nn.Parameter(torch.zeros(3))
        self.leased = nn.Parameter(torch.empty(3, device="meta"))
        self.slopes = torch.ones(2)
        self.tables = [torch.zeros(1), (torch.zeros(2), "cos")]
        self.by_name = {"sin": torch.zeros(5), "pair": Pair(torch.zeros(1), 7)}
        self.absent: Tensor | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Rotary()
        self.same = self.inner.slopes


NAMES = {
    "inner.inv_freq",
    "inner.original_inv_freq",
    "inner.weight",
    "inner.slopes",
    "inner.tables[0]",
    "inner.tables[1]",
    "inner.by_name[0]",
    "inner.by_name[1]",
    "same",
}


def test_all_that_has_values_is_named() -> None:
    assert tensors_elsewhere(Model(), OTHER).keys() == NAMES
    assert not tensors_elsewhere(Model(), torch.device("cpu"))


def test_all_of_it_moves_and_what_is_one_stays_one() -> None:
    model = Model()
    tables = model.inner.tables
    move_tensors(model, META)
    inner = model.inner
    held = [
        inner.inv_freq,
        inner.weight,
        inner.slopes,
        tables[0],
        tables[1][0],
        inner.by_name["sin"],
    ]
    assert all(one.is_meta for one in [*held, inner.by_name["pair"].first])
    assert inner.original_inv_freq is inner.inv_freq and model.same is inner.slopes
    assert (tables[1][1], inner.by_name["pair"].second) == ("cos", 7) and inner.tables is tables
    assert isinstance(inner.by_name["pair"], Pair) and isinstance(inner.weight, nn.Parameter)


def test_what_is_there_is_the_same_object() -> None:
    model = Model()
    before = {name: id(one) for name, one in tensors_elsewhere(model, OTHER).items()}
    move_tensors(model, torch.device("cpu"))
    assert {name: id(one) for name, one in tensors_elsewhere(model, OTHER).items()} == before


def test_the_bytes_of_a_plan_are_those_of_buffers_and_attributes() -> None:
    # inv_freq once, slopes once, and what is in lists and dicts
    nbytes = 4 * (4 + 2 + 1 + 2 + 5 + 1)
    assert buffer_bytes(Model()) == nbytes
