"""What an offloading context promises, one property after the other; the numbers are those of
the table in the docs.
"""

import gc
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hoststores import settle
from offloadmodels import (
    HIDDEN,
    NUM_LAYERS,
    assert_same,
    checkpointed,
    ids,
    loss_of,
    step,
    tiny_model,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lema.activations import NoOpManager, OffloadActivations, get_lora_act_offloading_ctx_manager
from lema.activations.policy import WeightStorages, everything
from lema.activations.protocols import StayReason
from lema.errors import ConfigError, LemaError

STATE = 2 * 24 * HIDDEN * 4  # bytes of a hidden state


@pytest.fixture
def offloading() -> Iterator[Callable[..., OffloadActivations]]:
    """Build contexts that are closed at the end."""
    with ExitStack() as made:

        def build(model: nn.Module | None = None, **options: Any) -> OffloadActivations:
            options = {"min_offload_size": 1, **options} if model is None else options
            context = OffloadActivations(model=model, **options)
            made.callback(context.close)
            return context

        yield build


def big(*shape: int) -> Tensor:
    return torch.randn(*(shape or (64, 64)), requires_grad=True)


# A1 to A5: contexts, stash, streams


def test_a1_the_entry_point_has_the_signature_users_know() -> None:
    known = {
        "use_pin_memory": True, "use_streams": True, "min_offload_size": 1024, "max_fwd_stash_size": 5,
        "warn_if_no_head": True,
    }  # fmt: skip
    parameters = list(inspect.signature(get_lora_act_offloading_ctx_manager).parameters.values())[
        1:6
    ]
    assert {one.name: one.default for one in parameters} == known
    own = list(inspect.signature(OffloadActivations).parameters.values())[:4]
    assert [one.name for one in own] == list(known)[:4]


@pytest.mark.parametrize("inside", [True, False])
def test_a1_it_is_entered_once_per_step_with_the_backward_inside_or_after(inside: bool) -> None:
    model = tiny_model()
    expected = step(model)
    context = get_lora_act_offloading_ctx_manager(model)
    assert isinstance(context, OffloadActivations)
    for number in range(3):
        model.zero_grad()
        with context:
            loss = loss_of(model)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same((loss.detach(), found), expected)
        assert context.counters.moved == context.counters.restored > number
        assert context.live_bytes == 0
    context.close()


def test_a1_off_is_a_context_too() -> None:
    model = tiny_model()
    context = get_lora_act_offloading_ctx_manager(model, mode=False)
    assert isinstance(context, NoOpManager)
    assert_same(step(model, context), step(model))


def test_a3_a_stash_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_fwd_stash_size"):
        OffloadActivations(max_fwd_stash_size=0)


@pytest.mark.parametrize("stash", [1, 3])
def test_a3_no_more_than_the_stash_stays_on_the_device(
    stash: int, offloading: Callable[..., OffloadActivations]
) -> None:
    storages = []
    with offloading(max_fwd_stash_size=stash):
        state = big()
        for _ in range(9):
            state = (state * 1.5).sin()  # saves what it is given
            storages.append(StorageWeakRef(state.untyped_storage()))
    held = sum(not one.expired() for one in storages[:-1])
    assert held == 0, "after the context nothing is held"
    with offloading(max_fwd_stash_size=stash):
        storages = []
        state = big()
        for _ in range(9):
            state = (state * 1.5).sin()
            storages.append(StorageWeakRef(state.untyped_storage()))
        products = stash  # of each pair, the product is saved
        assert sum(not one.expired() for one in storages[:-1]) <= products


def test_a4_the_synchronous_mode_gives_the_same_gradients(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    context = offloading(model, mode="legacy")
    assert_same(step(model, context), step(model))
    assert context.counters.bytes_out > 0


def test_a5_what_is_still_in_the_stash_comes_back_without_a_copy(
    offloading: Callable[..., OffloadActivations],
) -> None:
    with offloading(max_fwd_stash_size=5) as context:
        value = big()
        value.sin().exp().sum().backward()
    assert context.counters.restored == context.counters.early == 2
    assert context.counters.copies_out == 2 and context.counters.copies_back == 0


# A6 to A10: what stays


def test_a6_host_tensors_small_ones_and_special_classes_stay(
    offloading: Callable[..., OffloadActivations],
) -> None:
    class Quantized(Tensor):
        """A class that nobody here knows."""

    with offloading(min_offload_size=1024) as context:
        (big(4, 4).sin() + 0).sum().backward()
        assert context.counters.kept == {StayReason.SMALL: 1}
        special = torch.randn(64, 64).as_subclass(Quantized)
        (big() * special).sum().backward()
        assert context.counters.kept[StayReason.QUANTIZED] == 1
        (torch.randn(64, 64, dtype=torch.complex64).conj() * big()).abs().sum()
        assert context.counters.kept[StayReason.LAYOUT] == 1
        parameter = nn.Parameter(torch.randn(64, 64))
        buffer = nn.Buffer(torch.randn(64, 64))
        (big() * parameter * buffer).sum()
        assert context.counters.kept[StayReason.WEIGHT] == 2
    elsewhere = everything(WeightStorages(), {"meta"})
    assert elsewhere(big()) is StayReason.ELSEWHERE


def moved_by(context: OffloadActivations, action: Callable[[], Any]) -> list[Tensor]:
    """Return every tensor whose memory was moved while `action` ran in the context."""
    found: list[Tensor] = []
    pack = context.offload.pack
    context.offload.pack = lambda tensor, order=None: _noting(found, tensor, pack(tensor, order))  # type: ignore[method-assign]
    try:
        with context:
            action()
    finally:
        context.offload.pack = pack  # type: ignore[method-assign]
    return found


def _noting(found: list[Tensor], tensor: Tensor, packed: Any) -> Any:
    if type(packed).__name__ == "OffloadedTensor":
        found.append(tensor.detach().clone())
    return packed


def weight_bytes(model: nn.Module, moved: list[Tensor]) -> int:
    """Return the bytes of those that have a weight's values, as they are, transposed or cast to
    their type.
    """
    total = 0
    for tensor in moved:
        for weight in model.parameters():
            if (
                weight.dim() != tensor.dim()
                or weight.numel() != tensor.numel()
                or weight.numel() < 2
            ):
                continue
            for form in (weight, weight.t()) if weight.dim() == 2 else (weight,):
                if form.shape == tensor.shape and torch.equal(
                    form.detach().to(tensor.dtype), tensor
                ):
                    total += tensor.nbytes
    return total


@pytest.mark.covered
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a7_no_byte_of_a_weight_is_moved(
    kind: str, lora: bool, autocast: bool, offloading: Callable[..., OffloadActivations]
) -> None:
    model = tiny_model(kind, lora=lora)
    context = offloading(model, min_offload_size=1)

    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model)
        loss.backward()

    for _ in range(2):
        moved = moved_by(context, train)
        assert moved and weight_bytes(model, moved) == 0
    assert context.counters.kept[StayReason.WEIGHT] > NUM_LAYERS
    assert bool(context.counters.kept[StayReason.CAST]) == autocast


def test_a7_weights_that_are_swapped_in_for_the_forward_are_not_moved(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model("llama", lora=False)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    embedded = big(2, 24, HIDDEN)

    def train() -> None:
        output = torch.func.functional_call(
            model, weights, (), {"inputs_embeds": embedded, "labels": ids(), "use_cache": False}
        )
        output.loss.backward()

    moved = moved_by(offloading(model, min_offload_size=1), train)
    assert moved and weight_bytes(model, moved) == 0


def test_b1_a_view_of_a_weight_pins_nothing_and_is_found_again(
    offloading: Callable[..., OffloadActivations],
) -> None:
    linear = nn.Linear(64, 64)
    kept = linear.weight.detach().clone()
    given = big()
    expected = torch.autograd.grad(linear(given).sum(), given)[0]
    with offloading(linear, warn_if_no_head=False):
        output = linear(given).sum()
        memory = StorageWeakRef(linear.weight.untyped_storage())
        linear.weight.data = torch.empty(0)  # as whoever streams layers does
        gc.collect()
        assert memory.expired(), "the graph holds the weight's memory"
        with pytest.raises(RuntimeError, match="in the forward"):
            torch.autograd.grad(output, given, retain_graph=True)
        linear.weight.data = kept
        assert torch.equal(torch.autograd.grad(output, given)[0], expected)


def test_a7_a_weight_written_into_before_its_backward_is_still_an_error(
    offloading: Callable[..., OffloadActivations],
) -> None:
    linear = nn.Linear(64, 64)
    given = big()
    with offloading(linear, warn_if_no_head=False):
        output = linear(given).sum()
        with torch.no_grad():
            linear.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()


def test_a8_the_head_and_the_loss_stay(offloading: Callable[..., OffloadActivations]) -> None:
    model = tiny_model()
    context = offloading(model)
    moved = moved_by(context, lambda: loss_of(model).backward())
    assert moved and not [
        one for one in moved if one.shape[-1] == 96 and one.numel() == 2 * 24 * 96 and one.dim() < 3
    ]
    assert context.counters.kept[StayReason.LOSS] > 0


def test_a9_excluded_modules_and_regions_opted_out_of_nest(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    whole = offloading(model)
    step(model, whole)
    without = offloading(model, exclude_modules=["mlp"])
    assert_same(step(model, without), step(model))
    assert 0 < without.counters.moved < whole.counters.moved
    assert without.counters.kept[StayReason.EXCLUDED] > 0
    with offloading() as context:
        value = big()
        with NoOpManager(), NoOpManager():
            value = value.sin()
        assert context.counters.moved == 0
        value.exp().sum().backward()
        assert context.counters.moved == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a10_under_a_checkpoint_only_its_inputs_move(
    reentrant: bool, offloading: Callable[..., OffloadActivations]
) -> None:
    model = checkpointed(tiny_model(), reentrant)
    context = offloading(model)
    moved = moved_by(context, lambda: loss_of(model).backward())
    states = [one for one in moved if one.nbytes == STATE]
    assert len(states) >= NUM_LAYERS and len(moved) <= 2 * NUM_LAYERS + 4
    assert_same(step(model, context), step(model))


# A11 to A14: exactness


def padded(rows: int, columns: int, width: int) -> Tensor:
    return torch.randn(rows, width)[:, :columns]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(8, 40, 64),
    "transposed": lambda: torch.randn(64, 40).t(),
    "an offset": lambda: torch.randn(3, 40, 64)[1],
    "a small part of a large storage": lambda: torch.randn(100, 40, 64)[77, 3:9],
    "broadcast": lambda: torch.randn(8, 1, 64).expand(8, 512, 64),
    "padded rows": lambda: padded(40, 60, 64),
    "channels last": lambda: torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last),
    "every second": lambda: torch.randn(4000)[::2],
    "overlapping": lambda: torch.randn(4000).unfold(0, 100, 3),
    "bytes": lambda: torch.randint(0, 200, (70, 70), dtype=torch.uint8)[1:, 3:],
    "half": lambda: torch.randn(99, 99).bfloat16()[5:],
    "one element": lambda: torch.randn(1),
    "a scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a11_shape_strides_and_values_come_back(
    layout: str, offloading: Callable[..., OffloadActivations]
) -> None:
    tensor = LAYOUTS[layout]()
    context = offloading(min_offload_size=1, max_fwd_stash_size=1)
    offload = context.offload
    packed = offload.pack(tensor)
    other = offload.pack(torch.randn(64))
    offload.let_go()
    back = packed.unpack()
    assert back.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(back, tensor)
    assert back.data_ptr() % 64 == tensor.data_ptr() % 64
    assert context.counters.bytes_out < 2 * max(64, tensor.untyped_storage().nbytes()) + 256
    del packed, other
    assert context.live_bytes == 0


def test_a11_a_part_of_a_large_storage_moves_alone(
    offloading: Callable[..., OffloadActivations],
) -> None:
    context = offloading()
    packed = context.offload.pack(torch.randn(100, 64)[70:72])
    assert context.counters.bytes_out <= 2 * 64 * 4 + 64
    del packed


def test_a12_what_is_saved_thrice_is_copied_once_and_frees_the_device(
    offloading: Callable[..., OffloadActivations],
) -> None:
    weights = [nn.Linear(64, 64) for _ in range(3)]
    first = big()
    plain = first.sin()
    expected = torch.autograd.grad(sum(one(plain) for one in weights).sum(), first)[0]  # type: ignore[union-attr]
    with offloading(nn.ModuleList(weights), warn_if_no_head=False) as context:
        state = first.sin()
        memory = StorageWeakRef(state.untyped_storage())
        total = sum(one(state) for one in weights).sum()  # type: ignore[union-attr]
        del state
    assert memory.expired(), "its memory on the device is not free"
    assert context.counters.copies_out == 2  # and what the sine saved
    assert torch.equal(torch.autograd.grad(total, first)[0], expected)
    assert context.counters.copies_back == 2 and context.counters.restored == 4
    del total
    assert context.live_bytes == 0


def test_a12_memory_that_was_used_again_for_another_tensor_is_another_piece(
    offloading: Callable[..., OffloadActivations],
) -> None:
    offload = offloading(max_fwd_stash_size=1).offload
    packed = []
    expected = []
    for value in range(30):  # the allocator gives out the same addresses again and again
        tensor = torch.full((64, 64), float(value))
        packed.append(offload.pack(tensor))
        expected.append(tensor.clone())
        del tensor
        offload.let_go()
    assert all(
        torch.equal(one.unpack(), other) for one, other in zip(packed, expected, strict=True)
    )


class _SavesAView(torch.autograd.Function):
    """Hands on as its gradient a view of what it saved, as some nodes do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value * 2)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        view: Tensor = saved.view_as(saved)
        return view


def test_a13_a_gradient_may_be_a_view_of_what_came_back(
    offloading: Callable[..., OffloadActivations],
) -> None:
    def run() -> Tensor:
        value = torch.linspace(0, 1, 4096).requires_grad_()
        state = value
        for _ in range(6):
            state = _SavesAView.apply(state * 1.5)
        state.sum().backward()
        assert value.grad is not None
        return value.grad

    expected = run()
    with offloading(max_fwd_stash_size=1):
        found = run()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a13_a_view_saved_while_a_checkpoint_computes_again_is_safe(
    reentrant: bool, offloading: Callable[..., OffloadActivations]
) -> None:
    def block(state: Tensor) -> Tensor:
        return (state.view(64, 64).t() * state.t()).sin().t()

    def run() -> Tensor:
        value = torch.linspace(0, 1, 4096).view(64, 64).requires_grad_()
        state = value
        for _ in range(6):
            state = torch.utils.checkpoint.checkpoint(block, state, use_reentrant=reentrant)
        state.sum().backward()
        assert value.grad is not None
        return value.grad

    expected = run()
    with offloading(max_fwd_stash_size=1) as context:
        assert torch.equal(run(), expected)
    assert context.counters.copies_out == 6 and context.live_bytes == 0


# A15 to A20: nothing lost, nothing silent


def test_a15_an_unused_branch_an_exception_and_a_backward_that_fails_leave_nothing(
    offloading: Callable[..., OffloadActivations],
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("in the backward")

    context = offloading(max_fwd_stash_size=1)
    with context:
        value = big()
        used = value.sin().exp()
        unused = value.cos().exp().sin()
        used.sum().backward()
        assert context.live_bytes > 0
        del unused, used
    assert context.live_bytes == 0
    with pytest.raises(ValueError, match="in the forward"), context:
        kept = [big().sin().exp()]
        raise ValueError("in the forward")
    del kept
    with pytest.raises(ValueError, match="in the backward"), context:
        failing = Fails.apply(big().sin().exp()).sin().exp()
        failing.sum().backward()
    del failing
    gc.collect()
    assert context.live_bytes == 0
    with context:
        big().sin().sum().backward()
    assert context.live_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "disk"},
        {"mode": "disk", "model": True},
        {"host_memory": 20_000, "offload_dir": True},
        {"mode": "legacy"},
    ],
    ids=str,
)
def test_a14_a_backward_may_come_when_nobody_holds_the_context(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """As TRL and torchtune write it; the pieces keep their file open, and it is closed with the
    last of them.
    """
    model = tiny_model()
    options = {**options, "offload_dir": tmp_path} if "offload_dir" in options else options
    expected = step(model)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with OffloadActivations(
        min_offload_size=1, **{**options, "model": model if options.get("model") else None}
    ):
        torch.manual_seed(7)
        loss = loss_of(model)
    gc.collect()
    model.zero_grad()
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same(expected, (loss.detach(), found))
    del loss
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    hooked = [one for one in model.modules() if one._forward_pre_hooks or one._forward_hooks]
    assert not hooked


def test_a15_an_operation_that_keeps_what_it_made_does_not_hold_itself(
    offloading: Callable[..., OffloadActivations],
) -> None:
    for least in (1, 1 << 30):  # moved, and left
        with offloading(min_offload_size=least, max_fwd_stash_size=1):
            made = big().exp()
            memory = StorageWeakRef(made.untyped_storage())
            del made
        gc.collect()
        assert memory.expired()


@pytest.mark.parametrize("mode", [True, "legacy", "hidden_states", "disk"])
def test_a16_every_mode_has_its_place_and_leaves_nothing(
    mode: Any, tmp_path: Path, offloading: Callable[..., OffloadActivations]
) -> None:
    model = tiny_model()
    context = offloading(model, mode=mode, offload_dir=tmp_path if mode == "disk" else None)
    with context:
        loss = loss_of(model)
        assert context.live_bytes > 0
        if mode == "disk":
            settle(context.offload._space.store)
            assert context.offload._space.store.bytes_written >= context.live_bytes  # type: ignore[attr-defined]
            assert list(tmp_path.iterdir()) == [], "a file that a kill would leave behind"
        loss.backward()
    del loss
    assert context.live_bytes == 0
    context.close()
    assert list(tmp_path.iterdir()) == []


def test_a16_hidden_states_moves_inputs_of_layers_and_nothing_else(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model(lora=False)
    context = offloading(model, mode="hidden_states")
    moved = moved_by(context, lambda: loss_of(model).backward())
    assert {tuple(one.shape) for one in moved} == {(2, 24, HIDDEN)}
    assert context.counters.copies_out == NUM_LAYERS
    assert context.counters.kept[StayReason.UNCHOSEN] > 0


def test_a17_buffers_are_used_again_and_a_limit_holds(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    context = offloading(model)
    step(model, context)
    pool = context.offload._space.store.pool  # type: ignore[attr-defined]
    allocated = pool.counters.allocated
    assert allocated > 0
    step(model, context)
    assert pool.counters.allocated == allocated and pool.counters.reused > 0
    limited = offloading(model, host_memory=100_000)
    with pytest.warns(UserWarning, match="no space for"):
        found = step(model, limited)
    assert_same(found, step(model))
    assert limited.offload._space.store.pool.counters.peak_bytes <= 100_000  # type: ignore[attr-defined]
    assert limited.counters.kept[StayReason.FULL] > 0 and limited.counters.moved > 0


def test_a18_the_host_is_the_reference_device(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    context = offloading(model, certify=True)
    assert_same(step(model, context), step(model))
    assert context.counters.bytes_out >= context.counters.bytes_back > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "everything"}, "no mode"),
        ({"mode": "hidden_states"}, "no model"),
        ({"max_fwd_stash_size": 0}, "max_fwd_stash_size"),
    ],
)
def test_a19_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadActivations(**options)


def test_a20_everything_seen_is_counted_once(offloading: Callable[..., OffloadActivations]) -> None:
    linear = nn.Linear(64, 64)
    given = big()
    context = offloading(linear, warn_if_no_head=False, max_fwd_stash_size=1)
    with context:
        state = given.sin()  # saves `given`
        # state, weight; the product; a small one
        (linear(state).exp() * torch.randn(3, 1, 1)[0]).sum().backward()
    counters = context.counters
    assert counters.to_dict() == {
        "seen": 5, "moved": 3, "restored": 3, "copies_out": 3, "copies_back": 2, "bytes_out": 3 * 64 * 64 * 4,
        "bytes_back": 2 * 64 * 64 * 4, "early": 1, "kept": {StayReason.WEIGHT.value: 1, StayReason.SMALL.value: 1},
    }  # fmt: skip
    assert counters.seen == counters.moved + sum(counters.kept.values())


# B3, B4, B7, B9


def test_b3_nothing_of_tokens_times_vocabulary_is_moved(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    context = offloading(model)

    def train() -> None:  # a loss of one's own, outside of the model
        logits = model(input_ids=ids(), use_cache=False).logits
        nn.functional.cross_entropy(logits.view(-1, 96).float(), ids().view(-1)).backward()

    moved = moved_by(context, train)
    assert moved and not [
        one
        for one in moved
        if one.numel() == 48 * 96 and one.shape[-1] == 96 and one.shape[0] == 48
    ]


def test_b4_a_graph_may_be_differentiated_twice(
    offloading: Callable[..., OffloadActivations],
) -> None:
    value = big()
    expected = torch.autograd.grad(value.sin().exp().sum(), value)[0]
    with offloading(max_fwd_stash_size=1) as context:
        total = value.sin().exp().sum()
        context.offload.let_go()
        first = torch.autograd.grad(total, value, retain_graph=True)[0]
        on_device = [
            piece for pieces in context.offload._pieces.values() for piece in pieces if piece.here
        ]
        assert not on_device, "what a kept graph needs again waits elsewhere meanwhile"
        second = torch.autograd.grad(total, value)[0]
    assert torch.equal(first, expected) and torch.equal(second, expected)


def test_b4_second_derivatives(offloading: Callable[..., OffloadActivations]) -> None:
    def second(value: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(value.sin().exp().sum(), value, create_graph=True)
        return torch.autograd.grad(first.square().sum(), value)[0]

    value = big()
    expected = second(value)
    with offloading(max_fwd_stash_size=1) as context:
        assert torch.equal(second(value), expected)
    assert context.counters.moved > 0


def test_b4_two_forwards_before_their_backwards(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    tokens = [ids(1), ids(2)]
    model.zero_grad()
    for one in reversed(tokens):
        loss_of(model, one).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    context = offloading(model, max_fwd_stash_size=1)
    with context:
        one = loss_of(model, tokens[0])
    with context:
        two = loss_of(model, tokens[1])
        two.backward()
        one.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    del one, two
    assert context.live_bytes == 0


def test_b4_forwards_without_a_graph_move_nothing(
    offloading: Callable[..., OffloadActivations],
) -> None:
    model = tiny_model()
    context = offloading(model)
    with context, torch.no_grad():
        loss_of(model)
    assert context.counters.seen == 0
    assert_same(step(model, context), step(model))


def test_b7_what_finds_no_room_in_host_memory_goes_to_disk(
    tmp_path: Path, offloading: Callable[..., OffloadActivations]
) -> None:
    model = tiny_model()
    context = offloading(model, offload_dir=tmp_path, host_memory=100_000)
    assert_same(step(model, context), step(model))
    assert context.counters.kept[StayReason.FULL] == 0
    assert context.offload._space.store.beyond.bytes_written > 0  # type: ignore[attr-defined]


def test_b9_a_byte_that_comes_back_wrong_is_found(
    offloading: Callable[..., OffloadActivations],
) -> None:
    with offloading(max_fwd_stash_size=1, certify=True) as context:
        total = big().sin().exp().sum()
        context.offload.let_go()
        (piece,) = next(iter(context.offload._pieces.values()))
        piece._waiting_piece.memory()[5] += 1
        with pytest.raises(LemaError, match="changed while they were moved"):
            total.backward()


def test_every_row_has_a_test_named_after_it() -> None:
    here = Path(__file__).parent
    names = [
        name
        for file in here.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    ]
    rows = {found[1] for name in names if (found := re.match(r"test_(a\d+)_", name))}
    assert rows == {f"a{number}" for number in range(1, 21)}
