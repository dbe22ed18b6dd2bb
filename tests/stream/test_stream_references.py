"""A weight as data: any view of it is referred to by its place, and found again in a later lease
of the same layer.
"""

import gc
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_fakes import Stored, write_layers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lema.stream import LayerStream, Lease
from lema.stream.placement import PAGE
from lema_cpu import CpuBackend

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return write_layers(tmp_path_factory.mktemp("layers"), NUM_LAYERS)


def row(tensor: Tensor, number: int) -> Tensor:
    return tensor[number % len(tensor)] if tensor.dim() else tensor


def part(tensor: Tensor, number: int) -> Tensor:
    return tensor[number % len(tensor) :: 1 + number % 3] if tensor.dim() else tensor


def columns(tensor: Tensor, number: int) -> Tensor:
    return tensor.narrow(-1, number % tensor.shape[-1], 1) if tensor.dim() else tensor


VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "itself": lambda tensor, _: tensor,
    "transpose": lambda tensor, _: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "row": row,
    "part": part,
    "columns": columns,
    "unsqueeze": lambda tensor, _: tensor.unsqueeze(0),
    "expand": lambda tensor, number: tensor.unsqueeze(0).expand(1 + number % 3, *tensor.shape),
    "as bytes": lambda tensor, _: (
        tensor.view(torch.uint8) if tensor.dim() and tensor.stride(-1) == 1 else tensor
    ),
    "detach": lambda tensor, _: tensor.detach(),
}
CHAINS = st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 30)), max_size=5)


def follow(tensor: Tensor, chain: list[tuple[str, int]]) -> Tensor:
    for name, number in chain:
        tensor = VIEWS[name](tensor, number)
    return tensor


@given(
    chain=CHAINS,
    layer=st.integers(0, NUM_LAYERS - 1),
    name=st.sampled_from(["weight", "bias"]),
    poison=st.booleans(),
    resident=st.booleans(),
)
def test_a_view_comes_back_in_a_later_lease(
    stored: Stored,
    chain: list[tuple[str, int]],
    layer: int,
    name: str,
    poison: bool,
    resident: bool,
) -> None:
    stream = LayerStream(
        stored.layers,
        CpuBackend(poison=poison),
        prefetch_depth=1,
        residents={layer} if resident else (),
    )
    with stream.lease(layer) as lease:
        view = follow(lease.weights[name], chain)
        reference = lease.refer(view)
        shape = view.shape
        stride = view.stride()
        dtype = view.dtype
        assert reference is not None
        assert torch.equal(lease.resolve(reference), view)
    with stream.lease((layer + 1) % NUM_LAYERS):  # something else comes in between
        pass
    with stream.lease(layer) as later:
        found = later.resolve(reference)
        assert (found.shape, found.stride(), found.dtype) == (shape, stride, dtype)
        assert torch.equal(found, follow(stored.contents[layer][name], chain))
        # no byte was moved
        assert found.untyped_storage().data_ptr() == later.slot.untyped_storage().data_ptr()
        assert later.refer(found) == reference
    stream.close()


def test_what_is_not_in_the_slot_has_no_reference(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=1)
    with stream.lease(0) as lease, stream.lease(1) as other:
        weight = lease.weights["weight"]
        for elsewhere in (
            weight.clone(),
            weight * 2,
            torch.zeros(3),
            other.weights["weight"],
            weight[:0],
        ):
            assert lease.refer(elsewhere) is None
    stream.close()


def test_slots_that_share_one_storage_are_told_apart() -> None:
    ring = CpuBackend().host_buffer(3 * PAGE)
    slots = [ring[number * PAGE : (number + 1) * PAGE] for number in range(3)]
    leases = [
        Lease(number, slot, {"w": slot[:16].view(torch.float32)})
        for number, slot in enumerate(slots)
    ]
    for lease in leases:
        for other in leases:
            reference = lease.refer(other.weights["w"])
            if other is lease:
                assert reference is not None and reference.offset == 0
                assert lease.resolve(reference).data_ptr() == lease.slot.data_ptr()
            else:
                assert reference is None


def test_a_reference_is_resolved_against_its_own_layer_only(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=1)
    with stream.lease(0) as lease:
        reference = lease.refer(lease.weights["weight"])
    assert reference is not None
    with stream.lease(1) as other, pytest.raises(AssertionError, match="another layer"):
        other.resolve(reference)
    stream.close()


def test_a_reference_pins_nothing(tmp_path: Path) -> None:
    stream = LayerStream(
        write_layers(tmp_path, 2).layers, CpuBackend(poison=True), prefetch_depth=1
    )
    with stream.lease(0) as lease:
        reference = lease.refer(lease.weights["weight"].t())
        slot = StorageWeakRef(lease.slot.untyped_storage())
    assert reference is not None and not any(
        isinstance(field, Tensor) for field in astuple(reference)
    )
    assert not slot.expired()
    del lease
    stream.close()
    del stream
    gc.collect()
    assert slot.expired()
    assert reference.layer == 0
