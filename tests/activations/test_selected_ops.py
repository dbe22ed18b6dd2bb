"""Chosen operators under a checkpoint: their outputs are moved and come back, everything else is
computed again.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tiny import ARCHITECTURES, micro_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from lema.activations import OffloadActivations
from lema.activations.hooks import Scope, current, entered
from lema.activations.hoststore import HostPool, HostStore
from lema.activations.layers import only_layer_inputs
from lema.activations.offload import Offload
from lema.activations.protocols import StayReason
from lema.activations.selected import DEFAULT_ATTENTION_OPS, offloaded_ops
from lema.backend.torchstreams import TorchCarrier
from lema.errors import ConfigError, LemaError

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MM = "aten::mm"
DROPOUT = "aten::native_dropout"


def everything(tensor: Tensor) -> StayReason | None:
    """The choice that keeps nothing but what is saved in a backward."""
    return StayReason.BACKWARD if torch._C._current_graph_task_id() != -1 else None


def nothing(tensor: Tensor) -> StayReason:
    return StayReason.FULL


def offload(choice: Any = None, *, stash: int = 1) -> Offload:
    pool = HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    return Offload(
        choice or everything, HostStore(pool), partial(TorchCarrier, at_once=True), stash=stash
    )


class Ran(TorchDispatchMode):
    """Counts the operators that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention between two linears, with dropout after it where asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 5, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(2, 5, 16)
        )
        return x + F.dropout(torch.tanh(self.out(attended)), self.dropout)


def start() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()


def run(
    *functions: Callable[[Tensor], Tensor],
    context_fn: Callable[[], Any] | None = None,
    x: Tensor | None = None,
) -> Tensor:
    """One region after the other; `context_fn` None: no checkpoint at all."""
    torch.manual_seed(7)
    x = start() if x is None else x
    for function in functions:
        x = (
            function(x)
            if context_fn is None
            else checkpoint(function, x, use_reentrant=False, context_fn=context_fn)
        )
    return x


def gradients(loss: Tensor, model: nn.Module, *, retain_graph: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain_graph))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("choice", [everything, nothing])
def test_attention_is_computed_once_and_the_rest_again(choice: Any, dropout: float) -> None:
    blocks = nn.ModuleList(Block(dropout) for _ in range(3))
    expected = gradients(run(*blocks).sum(), blocks)
    away = offload(choice)
    loss = run(*blocks, context_fn=offloaded_ops(away)).sum()
    away.let_go()
    # the output and its log-sum-exp
    assert away.counters.copies_out == (0 if choice is nothing else 6)
    with Ran() as ran:
        found = gradients(loss, blocks)
    assert same(found, expected)
    assert ran.counts[ATTENTION] == 0 and ran.counts[torch.ops.aten.tanh.default] == 3
    assert away.counters.copies_back == away.counters.copies_out
    del loss
    gc.collect()
    assert away.live_bytes == 0 and away.counters.early == 0


def test_names_packets_and_overloads_are_taken_alike() -> None:
    block = Block()
    for op in ("aten::mm", torch.ops.aten.mm, torch.ops.aten.mm.default):
        away = offload()
        product = run(
            lambda x: torch.mm(x[0], x[1].T) + block(x).sum(), context_fn=offloaded_ops(away, [op])
        )
        assert away.counters.copies_out == 1
        away.let_go()
        product.sum().backward()
        assert away.counters.copies_back == 1


def test_two_regions_are_alive_at_once_and_go_backward_in_any_order() -> None:
    blocks = nn.ModuleList([Block(0.5), Block(0.5)])
    expected = [gradients(run(block).sum(), block) for block in blocks]
    context_fn = offloaded_ops(offload())
    losses = [run(block, context_fn=context_fn).sum() for block in blocks]
    for loss, block, one in zip(losses, blocks, expected, strict=True):
        assert same(gradients(loss, block), one)
    losses = [run(block, context_fn=context_fn).sum() for block in blocks]
    for loss, block, one in reversed(list(zip(losses, blocks, expected, strict=True))):
        assert same(gradients(loss, block), one)


@pytest.mark.parametrize("choice", [everything, nothing])
@pytest.mark.parametrize("stash", [1, 9])
def test_a_graph_that_is_kept_is_recomputed_as_often_as_asked(stash: int, choice: Any) -> None:
    blocks = nn.ModuleList(Block(0.5) for _ in range(3))
    expected = gradients(run(*blocks).sum(), blocks)
    loss = run(*blocks, context_fn=offloaded_ops(offload(choice, stash=stash))).sum()
    for retain_graph in (True, True, False):
        assert same(gradients(loss, blocks, retain_graph=retain_graph), expected)


def test_gradients_of_gradients_are_the_same() -> None:
    def cubed(x: Tensor) -> Tensor:
        return torch.tanh(x[0] @ x[1].T) ** 3

    def twice(loss: Tensor, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return second

    x = start()
    expected = twice(run(cubed, x=x), x)
    assert torch.equal(
        twice(run(cubed, x=x, context_fn=offloaded_ops(offload(), [MM])), x), expected
    )


def test_a_region_inside_a_region_is_right() -> None:
    block = Block(0.5)
    away = offload()
    context_fn = offloaded_ops(away)

    def outer(x: Tensor) -> Tensor:
        return block(checkpoint(block, x, use_reentrant=False, context_fn=context_fn))

    expected = gradients(run(block, block).sum(), block)
    for outer_fn in (context_fn, offloaded_ops(away, [MM])):
        assert same(gradients(run(outer, context_fn=outer_fn).sum(), block), expected)


@pytest.mark.parametrize("preserve", [True, False])
def test_an_operator_that_draws_leaves_the_draws_after_it_as_they_were(preserve: bool) -> None:
    def noisy(x: Tensor) -> Tensor:
        kept, _ = torch.native_dropout(torch.tanh(x), 0.5, True)
        return torch.sin(F.dropout(torch.exp(kept), 0.5))

    x = start()
    if preserve:
        (expected,) = torch.autograd.grad(run(noisy, x=x).sum(), x)
        (found,) = torch.autograd.grad(
            run(noisy, x=x, context_fn=offloaded_ops(offload(), [DROPOUT])).sum(), x
        )
        assert torch.equal(found, expected)
        return
    torch.manual_seed(7)
    loss = checkpoint(
        noisy,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=offloaded_ops(offload(), [DROPOUT]),
    ).sum()
    # Who gives up the same draws is not given those of the forward for what comes after the step.
    torch.manual_seed(8)
    torch.autograd.grad(loss, x)
    found = torch.get_rng_state()
    torch.manual_seed(8)
    F.dropout(x, 0.5)
    assert torch.equal(found, torch.get_rng_state())


def test_every_tensor_of_a_tuple_is_packed() -> None:
    x = start()
    away = offload()

    def normed(x: Tensor) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(torch.exp(x), [16], None, None, 1e-5)
        return (out * mean.detach() * rstd.detach()).sum()

    (expected,) = torch.autograd.grad(run(normed, x=x), x)
    loss = run(normed, x=x, context_fn=offloaded_ops(away, ["aten::native_layer_norm"]))
    assert away.counters.copies_out == 3
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten::view", "aten.view.*it returns a view of its input"),
        ("aten::split", "aten.split.*it returns a view of its input"),
        ("aten::relu_", "aten.relu_.*it writes into its input"),
        ("aten::linear", "aten.linear.*consists of other operators"),
        ("aten::scaled_dot_product_attention", "consists of other operators"),
        ("aten::rand", "aten.rand.*no tensor as input"),
        ("aten::atention", "no operator 'aten::atention'"),
        ("attention", "no operator 'attention'"),
    ],
)
def test_operators_that_cannot_be_kept_are_refused_by_name(op: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        offloaded_ops(offload(), [*DEFAULT_ATTENTION_OPS[3:4], op])


def test_attention_of_other_builds_of_torch_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ("aten::_attention_of_tomorrow", *DEFAULT_ATTENTION_OPS)
    monkeypatch.setattr("lema.activations.selected.DEFAULT_ATTENTION_OPS", ops)
    offloaded_ops(offload(), ops)


def test_a_write_into_what_was_kept_is_refused() -> None:
    def writes(x: Tensor) -> Tensor:
        return torch.mm(x[0], x[1].T)[1:].mul_(2)

    with pytest.raises(ConfigError, match=r"output of aten.mm.* is kept .* and aten.mul_"):
        run(writes, context_fn=offloaded_ops(offload(), [MM]))

    def fills(x: Tensor) -> Tensor:
        product = torch.mm(x[0], x[1].T)
        with torch.no_grad():
            torch.mul(product, 2, out=product.detach())
        return product

    with pytest.raises(ConfigError, match=r"output of aten.mm.* is kept .* and aten.mul.out"):
        run(fills, context_fn=offloaded_ops(offload(), [MM]))


@pytest.mark.parametrize("choice", [everything, nothing])
def test_a_write_after_the_region_into_what_is_still_there_raises(choice: Any) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(x[0], x[1].T)
        return product, torch.sin(product)

    product, sine = checkpoint(
        both, start(), use_reentrant=False, context_fn=offloaded_ops(offload(choice), [MM])
    )
    product.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sine.sum().backward()


def test_a_function_that_does_otherwise_the_second_time_is_an_error() -> None:
    times = iter(range(9))

    def fickle(x: Tensor) -> Tensor:
        y = torch.mm(x[0], x[1].T) if next(times) == 0 else torch.addmm(x[0][:, :5], x[0], x[1].T)
        return torch.sin(y)

    loss = run(fickle, context_fn=offloaded_ops(offload(), [MM, "aten::addmm"])).sum()
    with pytest.raises(LemaError, match=r"came to aten.addmm.* where its forward had aten.mm"):
        loss.backward()


class Token:
    pass


class Tokened(torch.autograd.Function):
    """Gives each node of a graph something that dies with it."""

    made: ClassVar[list[weakref.ref[Token]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Tokened.made.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("choice", [everything, nothing])
def test_what_was_kept_goes_with_the_graph_and_keeps_no_recomputation(choice: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.sin(torch.tanh(torch.mm(Tokened.apply(x)[0], x[1].T)))

    away = offload(choice)
    Tokened.made.clear()
    loss = run(function, context_fn=offloaded_ops(away, [MM])).sum()
    away.let_go()
    for _ in range(2):
        loss.backward(retain_graph=True)
    gc.collect()
    assert [token() is None for token in Tokened.made] == [False, True, True]
    assert (away.live_bytes > 0) is (choice is everything)
    del loss
    gc.collect()
    assert away.live_bytes == 0 and all(token() is None for token in Tokened.made)


def test_without_gradients_nothing_is_kept() -> None:
    away = offload()
    with torch.no_grad():
        run(Block(), context_fn=offloaded_ops(away))
    assert away.counters.seen == 0


def test_where_only_layer_inputs_are_chosen_a_chosen_operator_is_chosen_too() -> None:
    block = Block()
    scope = Scope()
    away = offload(only_layer_inputs)
    expected = gradients(run(block).sum(), block)
    with entered(scope):
        loss = run(block, context_fn=offloaded_ops(away)).sum()
    assert away.counters.moved == 2 and scope.layer_inputs == {} and current() is None
    assert same(gradients(loss, block), expected)


@pytest.mark.parametrize("mode", [True, "hidden_states"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_trains_the_same(name: str, mode: Any) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        ARCHITECTURES[name].config(), attn_implementation="sdpa"
    ).train()
    model.config.use_cache = False
    (batch,) = micro_batches(1)

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        return gradients(model(**batch).loss, model)

    expected = step()
    context = OffloadActivations(model=model, mode=mode, min_offload_size=0)
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False, "context_fn": offloaded_ops(context)})
    with context, Ran() as ran:
        assert same(step(), expected)
    num_layers = len(model.get_submodule(ARCHITECTURES[name].layers))
    on_attention = ran.counts[ATTENTION]
    # with dropout attention is consists of other operators here
    assert on_attention in (
        0,
        num_layers,
    )
    assert on_attention == 0 or context.counters.moved >= 2 * num_layers
    context.close()
