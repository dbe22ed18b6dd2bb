"""What a recomputation skips: the product that a layer ends with and only adds, never one that
the backward needs.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lema.engine.recompute import Graph
from lema.engine.skip_matmuls import AdaptedLinears
from lema.stream import Lease

WIDTH = 6


def adapted(**options: Any) -> Linear:
    """Return a frozen matrix and its adapter, as PEFT makes them."""
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return Linear(
        base, "default", LoraConfig(init_lora_weights=False, **options), r=2, lora_alpha=1
    )


class Products(TorchDispatchMode):
    """Counts the products of frozen matrices that are computed in forwards, by the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            matrix = args[-1]  # transposed in a forward, and as it is in a backward
            self.runs[matrix.data_ptr()] += matrix.stride() == (1, WIDTH)
        return func(*args, **(kwargs or {}))

    def of(self, linear: Linear) -> int:
        return self.runs[linear.base_layer.weight.data_ptr()]


class Layer(nn.Module):
    """A layer that ends as `after` says.

    Args:
        after: makes the layer's output of its input, what the last adapted matrix made, and the
            layer.
        options: of the adapters.
    """

    def __init__(self, after: Callable[[Tensor, Tensor, "Layer"], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = adapted(**options)
        self.last = adapted(**options)
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.after = after
        self.another_way = False

    def forward(self, given: Tensor) -> Tensor:
        return self.after(given, self.last(torch.tanh(self.first(given))), self)


class Side(Layer):
    """A layer whose two adapted matrices are both given its input."""

    def forward(self, given: Tensor) -> Tensor:
        return given + self.first(given) + self.last(torch.tanh(given))


def lease_of(layer: nn.Module) -> Lease:
    """Move what is frozen into a slot."""
    frozen = {
        name: parameter
        for name, parameter in layer.named_parameters()
        if not parameter.requires_grad
    }
    slot = torch.cat([parameter.data.flatten() for parameter in frozen.values()]).view(torch.uint8)
    start = 0
    for parameter in frozen.values():
        parameter.data = (
            slot[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        )
        start += parameter.nbytes
    return Lease(0, slot, {name: parameter.data for name, parameter in frozen.items()})


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 3 + index, WIDTH, generator=generator) for index in range(count)]


def gradients(
    layer: nn.Module, given: Tensor, differentiate: Callable[[Tensor], Any]
) -> list[Tensor | None]:
    leaf = given.clone().requires_grad_()
    differentiate(leaf)
    found = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return found


def recomputed(layer: nn.Module, given: Tensor, lease: Lease) -> list[Tensor | None]:
    """Return the gradients of a layer that is recomputed."""
    state = torch.get_rng_state()

    def again(leaf: Tensor) -> list[Tensor]:
        torch.set_rng_state(state)
        return [layer(leaf)]

    def differentiate(leaf: Tensor) -> None:
        graph = Graph(lambda _: again(leaf), AdaptedLinears(layer))
        with graph.built(lease):
            out = layer(leaf)
        graph.backward(lease, [], [torch.ones_like(out)])

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
    """Recompute a layer for each micro-batch and compare; return how often each matrix was used
    for it.
    """
    lease = lease_of(layer)
    counts = []
    for given in micro_batches:
        torch.manual_seed(3)
        expected = kept(layer, given)
        torch.manual_seed(3)
        with Products() as counted:
            found = recomputed(layer, given, lease)
        assert_same(found, expected)
        counts.append((counted.of(layer.first), counted.of(layer.last)))
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


def dropped_out(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + layer.dropout(made)


def dropped_out_by_function(given: Tensor, made: Tensor, _: Layer) -> Tensor:
    return given + nn.functional.dropout(made, 0.5)


def another_dropped_out(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return layer.dropout(given + made)


# Of each matrix: a product in the forward and one in the recomputation.


def test_a_product_that_is_only_added_is_not_computed_again() -> None:
    assert products(Layer(added), inputs(4)) == [(2, 1)] * 4


@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.5}, {"lora_bias": True}, {"use_rslora": True}], ids=str
)
def test_with_adapters_that_only_add_to_it_as_well(options: dict[str, Any]) -> None:
    assert products(Layer(added, **options), inputs(3)) == [(2, 1)] * 3


def test_dropout_after_it_draws_what_it_drew_and_needs_no_values() -> None:
    assert products(Layer(dropped_out), inputs(3)) == [(2, 1)] * 3


def test_the_last_of_two_given_one_input() -> None:
    assert products(Side(added), inputs(3)) == [(2, 1)] * 3


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
    dropped_out_by_function,
    another_dropped_out,
)


@pytest.mark.parametrize("after", NEEDING, ids=lambda after: after.__name__)
def test_a_product_whose_values_matter_is_computed_again(after: Any) -> None:
    assert products(Layer(after), inputs(3)) == [(2, 2)] * 3


def test_a_matrix_that_trains_is_no_product_to_leave_out() -> None:
    layer = Layer(added)
    layer.last.base_layer.weight.requires_grad_(True)
    assert products(layer, inputs(3)) == [(2, 2)] * 3


def test_a_bias_that_trains_gets_its_gradient_without_the_product() -> None:
    layer = Layer(added)
    layer.last.base_layer.bias.requires_grad_(True)
    assert products(layer, inputs(3)) == [(2, 1)] * 3


def another_end(given: Tensor, made: Tensor, layer: Layer) -> Tensor:
    return given + (torch.tanh(made) if layer.another_way else made)


def test_each_micro_batch_skips_by_the_way_it_goes() -> None:
    layer = Layer(another_end)
    for way, runs in ((False, 1), (True, 2), (False, 1), (True, 2)):
        layer.another_way = way
        assert products(layer, inputs(1)) == [(2, runs)]


def test_a_value_that_is_read_after_all_gives_no_number_at_all() -> None:
    """What a layer does in its recomputation and did not do in its forward, nothing can foresee."""
    layer = Layer(dropped_out)
    seen: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor]) -> None:
        seen.append(given[0].detach())

    lease = lease_of(layer)
    given = inputs(1)[0]

    def differentiate(leaf: Tensor) -> None:
        graph = Graph(lambda _: [layer(leaf)], AdaptedLinears(layer))
        with graph.built(lease):
            out = layer(leaf)
        layer.dropout.register_forward_pre_hook(look)
        graph.backward(lease, [], [torch.ones_like(out)])

    gradients(layer, given, differentiate)
    assert bool(seen[0].isnan().all())


def test_training_and_evaluation_go_their_own_ways() -> None:
    layer = Layer(lambda given, made, layer: given + (made if layer.training else torch.tanh(made)))
    for training, runs in ((True, 1), (False, 2), (True, 1), (False, 2)):
        layer.train(training)
        assert products(layer, inputs(1)) == [(2, runs)]


def test_a_module_called_twice_is_left_out_where_it_ends_the_layer() -> None:
    class Twice(Layer):
        def forward(self, given: Tensor) -> Tensor:
            return given + self.last(torch.tanh(self.last(given)))

    assert [last for _, last in products(Twice(added), inputs(3))] == [3, 3, 3]


def test_a_module_that_a_hook_looks_at_is_computed() -> None:
    layer = Layer(added)
    seen: list[Tensor] = []
    layer.last.base_layer.register_forward_hook(
        lambda module, given, made: seen.append(made.detach())
    )
    assert products(layer, inputs(2)) == [(2, 2)] * 2
    assert not any(bool(made.isnan().any()) for made in seen)


def test_half_precision_and_autocast() -> None:
    layer = Layer(added)
    for linear in (layer.first, layer.last):
        linear.base_layer.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert products(layer, inputs(3)) == [(2, 1)] * 3
