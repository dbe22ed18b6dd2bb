"""What a recomputation leaves out: products that reach nothing the backward needs, and never one that does."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lema.engine.recompute import Graph
from lema.model.skip_matmuls import Needless, Product, Reach
from lema.stream import Lease

WIDTH = 6


class Counted(nn.Linear):
    """A frozen matrix that counts its products."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.runs = 0

    def forward(self, given: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(given)


class Adapted(nn.Module):
    """A frozen matrix and its adapter, called in the order in which PEFT calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Counted()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        return self.base(given) + self.b(self.a(given)) * 0.5


class Layer(nn.Module):
    """A layer that ends as `after` says.

    Args:
        after: makes the layer's output of its input, what the last adapted matrix made, and the layer.
    """

    def __init__(self, after: Callable[[Tensor, Tensor, "Layer"], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Adapted(), Adapted()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.after, self.another_way = after, False

    def forward(self, given: Tensor) -> Tensor:
        return self.after(given, self.last(torch.tanh(self.first(given))), self)


class Side(Layer):
    """A layer whose two adapted matrices are both given its input."""

    def forward(self, given: Tensor) -> Tensor:
        return given + self.first(given) + self.last(torch.tanh(given))


def lease_of(layer: nn.Module) -> Lease:
    """Move what is frozen into a slot."""
    frozen = {name: parameter for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    slot = torch.cat([parameter.data.flatten() for parameter in frozen.values()]).view(torch.uint8)
    start = 0
    for parameter in frozen.values():
        parameter.data = slot[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        start += parameter.nbytes
    return Lease(0, slot, {name: parameter.data for name, parameter in frozen.items()})


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 3 + index, WIDTH, generator=generator) for index in range(count)]


def gradients(layer: nn.Module, given: Tensor, differentiate: Callable[[Tensor], Any]) -> list[Tensor | None]:
    leaf = given.clone().requires_grad_()
    differentiate(leaf)
    found = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return found


def recomputed(layer: nn.Module, given: Tensor, lease: Lease, needless: Needless) -> list[Tensor | None]:
    """Return the gradients of a layer that is recomputed."""

    def differentiate(leaf: Tensor) -> None:
        graph = Graph(lambda _: layer(leaf.detach().requires_grad_()), needless)
        with graph.built(lease):
            out = layer(leaf)
        with graph.differentiated(lease):
            torch.autograd.backward(get_gradient_edge(out), torch.ones_like(out))

    return gradients(layer, given, differentiate)


def kept(layer: nn.Module, given: Tensor) -> list[Tensor | None]:
    """Return the gradients autograd makes of a layer by itself."""

    def differentiate(leaf: Tensor) -> None:
        out = layer(leaf)
        out.backward(torch.ones_like(out))

    return gradients(layer, given, differentiate)


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def products(layer: Layer, micro_batches: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Recompute a layer for each micro-batch and compare; return how often each matrix was used for it."""
    lease, needless, counts = lease_of(layer), Needless(layer), []
    for given in micro_batches:
        expected = kept(layer, given)
        layer.first.base.runs = layer.last.base.runs = 0
        assert_same(recomputed(layer, given, lease, needless), expected)
        counts.append((layer.first.base.runs, layer.last.base.runs))
    assert not any("forward" in vars(module) for module in layer.modules())
    return counts


def added(given: Tensor, made: Tensor, _: Layer) -> Tensor:
    return given + made


def saved(_: Tensor, made: Tensor, __: Layer) -> Tensor:
    return torch.tanh(made)


def scaled(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + made * layer.scale


def branched(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.scale * (given + made if made.sum().item() > 0 else given - made)


def listed(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.scale * (given * sum(made.detach().flatten().tolist()))


def viewed_by_numpy(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.scale * (given * float(made.detach().numpy().sum()))


def chosen(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.scale * (given * (made > 0).nonzero().shape[0])


def picked(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.scale * given[made > 0].sum()


def routed(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + layer.scale[made.argmax(-1)][..., None] * given


def remembered(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    layer.seen.copy_(made.detach().sum())
    return layer.scale * given + made


def moved_by_address(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    copy = torch.empty_like(made)
    ctypes.memmove(copy.data_ptr(), made.contiguous().data_ptr(), copy.nbytes)
    return given + copy * layer.scale


def written_in_place(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    room = torch.zeros_like(given)
    room[:, 1:] += made[:, 1:]
    return given + room * layer.scale


def dropped_out(given: Tensor, made: Tensor, _: Layer) -> Tensor:
    torch.manual_seed(3)
    return given + nn.functional.dropout(made, 0.5)


# Of each matrix: a product in the forward and one in the recomputation; the first time also those of the trial.


def test_a_product_that_is_only_added_is_not_computed_again() -> None:
    assert products(Layer(added), inputs(4)) == [(3, 2), (2, 1), (2, 1), (2, 1)]


def test_dropout_after_it_draws_what_it_drew_and_needs_no_values() -> None:
    assert products(Layer(dropped_out), inputs(3)) == [(3, 2), (2, 1), (2, 1)]


def test_so_is_any_other_whose_values_are_only_added() -> None:
    assert products(Side(added), inputs(3)) == [(2, 2), (1, 1), (1, 1)]


NEEDING = (
    saved,
    scaled,
    branched,
    listed,
    viewed_by_numpy,
    chosen,
    picked,
    routed,
    remembered,
    moved_by_address,
    written_in_place,
)


@pytest.mark.parametrize("after", NEEDING, ids=lambda after: after.__name__)
def test_a_product_whose_values_matter_is_computed_again(after: Any) -> None:
    assert products(Layer(after), inputs(3)) == [(2, 2)] * 3


@pytest.mark.parametrize("after", [saved, scaled, written_in_place], ids=lambda after: after.__name__)
def test_what_is_taken_for_needless_in_error_is_found_out_by_the_trial(
    after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Product, ...]] = []

    def all_of_them(reach: Reach) -> tuple[Product, ...]:
        seen.append(tuple(reach._products))
        return seen[-1]

    monkeypatch.setattr(Reach, "needless", all_of_them)
    assert products(Layer(after), inputs(3)) == [(2, 2)] * 3  # the trial leaves out every product
    assert [len(found) for found in seen] == [2]


def test_a_matrix_that_trains_is_no_product_to_leave_out() -> None:
    layer = Layer(added)
    layer.last.base.weight.requires_grad_(True)
    assert products(layer, inputs(3)) == [(2, 2)] * 3


def test_a_bias_that_trains_gets_its_gradient_without_the_product() -> None:
    layer = Layer(added)
    layer.last.base.bias.requires_grad_(True)
    assert products(layer, inputs(3)) == [(3, 2), (2, 1), (2, 1)]


def another_end(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + (torch.tanh(made) if layer.another_way else made)


def test_a_micro_batch_that_goes_another_way_is_recomputed_in_full() -> None:
    layer = Layer(another_end)
    lease, needless = lease_of(layer), Needless(layer)
    for way, runs in ((False, 2), (True, 2), (False, 1), (True, 2)):
        layer.another_way = way
        expected, layer.last.base.runs = kept(layer, inputs(1)[0]), 0
        assert_same(recomputed(layer, inputs(1)[0], lease, needless), expected)
        assert layer.last.base.runs == runs


def same_end(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + made + layer.scale * (made if layer.another_way else given)


def test_a_product_left_out_in_error_gives_no_number_at_all() -> None:
    """Two ways that save tensors of the same kinds, by no value that was seen: nothing can tell them apart but this."""
    layer = Layer(same_end)
    lease, needless = lease_of(layer), Needless(layer)
    recomputed(layer, inputs(1)[0], lease, needless)
    layer.another_way = True
    found = recomputed(layer, inputs(1)[0], lease, needless)
    assert any(gradient is not None and bool(gradient.isnan().any()) for gradient in found)


def test_training_and_evaluation_are_learnt_apart() -> None:
    layer = Layer(lambda given, made, layer: given + (made if layer.training else torch.tanh(made)))
    lease, needless = lease_of(layer), Needless(layer)
    for training, runs in ((True, 2), (False, 2), (True, 1), (False, 2)):
        layer.train(training)
        expected, layer.last.base.runs = kept(layer, inputs(1)[0]), 0
        assert_same(recomputed(layer, inputs(1)[0], lease, needless), expected)
        assert layer.last.base.runs == runs


def test_a_module_called_twice_is_left_out_where_it_ends_the_layer() -> None:
    class Twice(Layer):
        def forward(self, given: Tensor) -> Tensor:
            return given + self.last(torch.tanh(self.last(given)))

    assert [last for _, last in products(Twice(added), inputs(3))] == [5, 3, 3]


def test_a_module_that_a_hook_looks_at_is_computed() -> None:
    layer = Layer(added)
    seen: list[Tensor] = []
    layer.last.base.register_forward_hook(lambda module, given, made: seen.append(made.detach()))
    assert products(layer, inputs(2)) == [(2, 2)] * 2
    assert not any(bool(made.isnan().any()) for made in seen)


def test_half_precision_and_autocast() -> None:
    layer = Layer(added)
    for adapted in (layer.first, layer.last):
        adapted.base.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert products(layer, inputs(3)) == [(3, 2), (2, 1), (2, 1)]
