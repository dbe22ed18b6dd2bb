"""Cases for several ranks: each parallel layer, with an adapter, against the whole layer in one
process.
"""

from collections.abc import Callable
from typing import Any

import neurondoubles
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from lema_neuron.comm import Comm
from lema_neuron.gradients import mark, part_of, reduce_gradients
from lema_neuron.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from lema_neuron.layers.qkv import PROJECTIONS, grouped_layouts
from lema_neuron.peft.base import kind_of
from lema_neuron.peft.lora import NEURON_LORA_MODULES
from lema_neuron.shares import Part

BATCH = 2
SEQUENCE = 8
HIDDEN = 16
WIDTH = 24
RANK = 3
ALPHA = 12  # the adapter's rank divides by no number of processes
IDS = 30

Case = Callable[[Comm], dict[str, float]]


def numbers(name: str, *shape: int) -> Tensor:
    """The same on every rank, whatever was drawn before."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + sum(shape))
    return torch.randn(shape, generator=generator)


def far(mine: Tensor, whole: Tensor) -> float:
    """Relative to the largest number."""
    assert mine.shape == whole.shape, (mine.shape, whole.shape)
    return float((mine - whole).abs().max() / whole.abs().max())


def adapted(layer: nn.Module, comm: Comm, r: int = RANK, *, base_too: bool = True) -> nn.Module:
    """The layer with an adapter of which both factors are given; the base layer trains too, if
    it is ours.
    """
    config = LoraConfig(r=r, lora_alpha=ALPHA, init_lora_weights=False)
    wrapped: Any = NEURON_LORA_MODULES[kind_of(layer)](
        layer, "default", r=r, lora_alpha=ALPHA, config=config
    )
    mark(wrapped, comm)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if base_too or not name.startswith("base_layer"):
                parameter.copy_(
                    part_of(parameter).shard(whole_of(name, parameter, comm), comm.rank)
                )
    wrapped.requires_grad_(base_too)
    return wrapped


def whole_of(name: str, parameter: nn.Parameter, comm: Comm) -> Tensor:
    """What the whole parameter holds."""
    return numbers(name, *part_of(parameter).consolidate(torch.zeros_like(parameter), comm).shape)


def compared(wrapped: nn.Module, comm: Comm, wanted: dict[str, Tensor]) -> dict[str, float]:
    """How far each parameter's reduced gradient is from that of one process; copies are compared
    bit for bit.
    """
    reduce_gradients(wrapped.parameters())
    found = merged(wrapped)
    for name, parameter in wrapped.named_parameters():
        found[name] = far(part_of(parameter).consolidate(parameter.grad, comm), wanted.pop(name))
    assert not wanted, wanted.keys()
    return found


def merged(wrapped: Any) -> dict[str, float]:
    """Merging moves each rank's weights, and unmerging brings them back."""
    base = wrapped.get_base_layer()
    before = {name: one.detach().clone() for name, one in base.named_parameters()}
    wrapped.merge(safe_merge=True)
    moved = max(far(one.detach(), before[name]) for name, one in base.named_parameters())
    assert moved > 0.1
    wrapped.unmerge()
    return {
        "unmerged": max(far(one.detach(), before[name]) for name, one in base.named_parameters())
    }


def after_merging(wrapped: Any, x: Tensor, output: Any) -> dict[str, float]:
    """A merged layer returns what the layer and its adapter did."""
    wrapped.merge()
    again = wrapped(x)
    wrapped.unmerge()
    pairs = zip(again, output, strict=True) if isinstance(output, tuple) else [(again, output)]
    return {"merged": max(far(one.detach(), other.detach()) for one, other in pairs)}


def tokens(full: Tensor, comm: Comm, sequence: bool, dim: int) -> Tensor:
    return (full.chunk(comm.size, dim)[comm.rank] if sequence else full).clone().requires_grad_()


def gathered(mine: Tensor, comm: Comm, cut: bool, dim: int) -> Tensor:
    return comm.all_gather(mine, dim) if cut else mine.detach()


def leaf(name: str, *shape: int) -> Tensor:
    return numbers(name, *shape).requires_grad_()


def column(
    comm: Comm, sequence: bool, gather: bool, stride: int, boundary: bool = False
) -> dict[str, float]:
    dim = 1 if stride == 1 else 0  # of the sequence; the first where nothing is said
    layer = ColumnParallelLinear(
        HIDDEN,
        WIDTH,
        gather_output=gather,
        stride=stride,
        sequence_parallel_enabled=sequence,
        sequence_dimension=dim or None,
        tensor_model_parallel_group=comm,
        boundary=boundary,
    )
    wrapped: Any = adapted(layer, comm)
    full = numbers("x", SEQUENCE, SEQUENCE, HIDDEN).requires_grad_()
    x = tokens(full.detach(), comm, sequence, dim)
    output = wrapped(x)
    same = after_merging(wrapped, x, output)
    weight = leaf("base_layer.weight", WIDTH, HIDDEN)
    bias = leaf("base_layer.bias", WIDTH)
    first = leaf("lora_A.default.weight", RANK, HIDDEN)
    second = leaf("lora_B.default.weight", WIDTH, RANK)
    wanted = linear(full, weight, bias) + linear(linear(full, first), second) * (ALPHA / RANK)
    toward = numbers("toward", *wanted.shape)
    wanted.backward(toward)
    layout = wrapped.parts() and Part(layer.layout)
    output.backward(
        toward if gather else layout.shard(toward.movedim(-1, 0), comm.rank).movedim(0, -1)
    )
    found = {"output": far(output.detach(), wanted.detach())} if gather else {}
    if not gather:
        mine = layout.shard(wanted.detach().movedim(-1, 0), comm.rank).movedim(0, -1)
        found["output"] = far(output.detach(), mine)
    dx = comm.all_reduce(x.grad) if boundary else gathered(x.grad, comm, sequence, dim)
    found["input"] = far(dx, full.grad)
    gradients = {"weight": weight, "bias": bias}
    expected = {f"base_layer.{name}": one.grad for name, one in gradients.items()}
    expected |= {"lora_A.default.weight": first.grad, "lora_B.default.weight": second.grad}
    return found | same | compared(wrapped, comm, expected)


def row(comm: Comm, sequence: bool, parallel: bool, stride: int = 1) -> dict[str, float]:
    layer = RowParallelLinear(
        WIDTH,
        HIDDEN,
        input_is_parallel=parallel,
        stride=stride,
        sequence_parallel_enabled=sequence,
        sequence_dimension=1,
        tensor_model_parallel_group=comm,
    )
    wrapped: Any = adapted(layer, comm)
    full = numbers("x", BATCH, SEQUENCE, WIDTH).requires_grad_()
    # [sequence, width, batch]
    cut = Part(layer.layout).shard(full.detach().transpose(0, 2).transpose(0, 1), comm.rank)
    x = (
        (cut.transpose(0, 1).transpose(0, 2) if parallel else full.detach())
        .clone()
        .requires_grad_()
    )
    output = wrapped(x)
    same = after_merging(wrapped, x, output)
    weight = leaf("base_layer.weight", HIDDEN, WIDTH)
    bias = leaf("base_layer.bias", HIDDEN)
    first = leaf("lora_A.default.weight", RANK, WIDTH)
    second = leaf("lora_B.default.weight", HIDDEN, RANK)
    wanted = linear(full, weight, bias) + linear(linear(full, first), second) * (ALPHA / RANK)
    toward = numbers("toward", *wanted.shape)
    wanted.backward(toward)
    output.backward(toward.chunk(comm.size, 1)[comm.rank] if sequence else toward)
    found = {"output": far(gathered(output, comm, sequence, 1).detach(), wanted.detach())}
    mine = full.grad.transpose(0, 2).transpose(0, 1)
    mine = (
        Part(layer.layout).shard(mine, comm.rank).transpose(0, 1).transpose(0, 2)
        if parallel
        else full.grad
    )
    found["input"] = far(x.grad, mine)
    expected = {"base_layer.weight": weight.grad, "base_layer.bias": bias.grad}
    expected |= {"lora_A.default.weight": first.grad, "lora_B.default.weight": second.grad}
    return found | same | compared(wrapped, comm, expected)


def vectors(comm: Comm, sequence: bool, across: bool, dim: int | None) -> dict[str, float]:
    layer = ParallelEmbedding(
        IDS,
        HIDDEN,
        padding_idx=2,
        shard_across_embedding=across,
        pad=True,  # 30 ids do not divide by 4
        sequence_parallel_enabled=sequence,
        sequence_dimension=dim,
        tensor_model_parallel_group=comm,
    )
    wrapped: Any = adapted(layer, comm)
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) * 7 % IDS
    output = wrapped(ids)
    same = after_merging(wrapped, ids, output)
    weight = leaf("base_layer.weight", IDS, HIDDEN)
    first = leaf("lora_embedding_A.default", RANK, IDS)
    second = leaf("lora_embedding_B.default", HIDDEN, RANK)
    wanted = embedding(ids, weight, 2) + embedding(ids, first.T, 2) @ second.T * (ALPHA / RANK)
    wanted = wanted if dim or not sequence else wanted.transpose(0, 1)
    toward = numbers("toward", *wanted.shape)
    wanted.backward(toward)
    output.backward(toward.chunk(comm.size, dim or 0)[comm.rank] if sequence else toward)
    found = {"output": far(gathered(output, comm, sequence, dim or 0).detach(), wanted.detach())}
    expected = {"base_layer.weight": weight.grad}
    expected |= {"lora_embedding_A.default": first.grad, "lora_embedding_B.default": second.grad}
    return found | same | compared(wrapped, comm, expected)


def grouped(
    comm: Comm, sequence: bool, copies: int, kv_layout: str, gather: bool = False
) -> dict[str, float]:
    """Query, key and value: a rank's share of keys is used by its queries only, so the loss is
    theirs in the whole.
    """
    sizes = [WIDTH, WIDTH // 2]
    layer = GQAQKVColumnParallelLinear(
        HIDDEN,
        sizes,
        gather_output=gather,
        sequence_parallel_enabled=sequence,
        sequence_dimension=1,
        kv_size_multiplier=copies,
        tensor_model_parallel_group=comm,
        kv_layout=kv_layout,
    )
    wrapped: Any = adapted(layer, comm)
    full = numbers("x", BATCH, SEQUENCE, HIDDEN).requires_grad_()
    x = tokens(full.detach(), comm, sequence, 1)
    output = wrapped(x)
    same = after_merging(wrapped, x, output)
    leaves = {}
    wanted = []
    for number, one in enumerate(PROJECTIONS):
        size = sizes[min(number, 1)]
        shapes = {
            f"base_layer.weight_{one}": (size, HIDDEN),
            f"base_layer.bias_{one}": (size,),
            f"lora_A.default.{one}.weight": (RANK, HIDDEN),
            f"lora_B.default.{one}.weight": (size, RANK),
        }
        made = [leaf(name, *shape) for name, shape in shapes.items()]
        leaves |= dict(zip(shapes, made, strict=True))
        weight, bias, first, second = made
        wanted.append(
            linear(full, weight, bias) + linear(linear(full, first), second) * (ALPHA / RANK)
        )
    layouts = grouped_layouts(comm, copies, kv_layout)
    found = {}
    if gather:
        toward = [
            numbers(one, *whole.shape) for one, whole in zip(PROJECTIONS, wanted, strict=True)
        ]
        torch.autograd.backward(wanted, toward)
        torch.autograd.backward(output, toward)
        for one, mine, whole in zip(PROJECTIONS, output, wanted, strict=True):
            found[one] = far(mine.detach(), whole.detach())
    else:
        shares = [
            [
                Part(layout).shard(whole.movedim(-1, 0), rank).movedim(0, -1)
                for layout, whole in zip(layouts, wanted, strict=True)
            ]
            for rank in range(comm.size)
        ]
        for one, mine, whole in zip(PROJECTIONS, output, shares[comm.rank], strict=True):
            found[one] = far(mine.detach(), whole.detach())
        sum(scores(*share) for share in shares).backward()
        scores(*output).backward()
    found["input"] = far(gathered(x.grad, comm, sequence, 1), full.grad)
    return found | same | compared(wrapped, comm, {name: one.grad for name, one in leaves.items()})


def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something in which every query of a rank meets the rank's keys and values."""
    return (q.sum(-1) * k.sum(-1) * v.square().sum(-1)).sum()


def foreign(comm: Comm) -> dict[str, float]:
    """Layers that are not ours, known by their names and attributes: what they return with an
    adapter, and merged.
    """
    copies = min(comm.size, 2)
    x = numbers("x", BATCH, SEQUENCE, WIDTH)
    ids = torch.arange(12).view(2, 6) * 5 % 32
    rank = comm.rank
    square = numbers("square", WIDTH, WIDTH)
    table = numbers("table", 32, HIDDEN)
    kv = numbers("kv", WIDTH // 2, WIDTH)
    bases: dict[str, nn.Module] = {
        "column": neurondoubles.ColumnParallelLinear(square, comm),
        "row": neurondoubles.RowParallelLinear(square, comm),
        "embedding": neurondoubles.ParallelEmbedding(table, comm),
        "grouped": neurondoubles.GQAQKVColumnParallelLinear([square, kv, kv], comm, copies=copies),
        "fused": neurondoubles.GQAQKVColumnParallelLinear(
            [square, kv, kv], comm, copies=copies, fused=True
        ),
    }
    found: dict[str, float] = {}
    for kind, base in bases.items():
        base.kv_layout = "tile"  # type: ignore[assignment]
        wrapped: Any = adapted(base, comm, base_too=False)
        given = ids if kind == "embedding" else x.chunk(comm.size, -1)[rank] if kind == "row" else x
        output = wrapped(given)
        found |= {
            f"{kind} {name}": far for name, far in after_merging(wrapped, given, output).items()
        }
        factors = {
            name: whole_of(name, one, comm)
            for name, one in wrapped.named_parameters()
            if not name.startswith("base")
        }
        scale = ALPHA / RANK
        if kind == "embedding":
            first, second = factors.values()
            found[kind] = far(output.detach(), table[ids] + first.T[ids] @ second.T * scale)
        elif kind in ("column", "row"):
            first, second = factors.values()
            wanted = linear(x, square) + linear(linear(x, first), second) * scale
            found[kind] = far(
                output.detach(), wanted if kind == "row" else wanted.chunk(comm.size, -1)[rank]
            )
        else:
            layouts = grouped_layouts(comm, copies, "tile")
            for one, layout, weight, mine in zip(
                PROJECTIONS, layouts, (square, kv, kv), output, strict=True
            ):
                first = factors[f"lora_A.default.{one}.weight"]
                second = factors[f"lora_B.default.{one}.weight"]
                added = linear(linear(x, first), Part(layout).shard(second, rank)) * scale
                held = (
                    weight.chunk(comm.size)[rank]
                    if one == "q"
                    else weight.repeat(copies, 1).chunk(comm.size)[rank]
                )
                found[f"{kind} {one}"] = far(mine.detach(), linear(x, held) + added)
    return found


def layer_cases(ranks: int) -> dict[str, Case]:
    """The cases, by name."""
    cases: dict[str, Case] = {"foreign": foreign}
    for sequence in (False, True):
        sp = "sequence" if sequence else "tokens"
        for stride in (1, 2):
            cases[f"column-{sp}-stride{stride}"] = lambda comm, s=sequence, t=stride: column(
                comm, s, False, t
            )
        for parallel in (True, False):
            name = f"row-{sp}-{'cut' if parallel else 'whole'}"
            cases[name] = lambda comm, s=sequence, p=parallel: row(comm, s, p)
        cases[f"embedding-{sp}"] = lambda comm, s=sequence: vectors(comm, s, False, 1)
        for copies in (one for one in (1, 2, 4) if ranks % one == 0):
            for kv_layout in ("tile", "interleave")[: 2 if 1 < copies < ranks else 1]:
                name = f"grouped-{sp}-{copies}-{kv_layout}"
                cases[name] = lambda comm, s=sequence, c=copies, k=kv_layout: grouped(comm, s, c, k)
    cases["column-gathered"] = lambda comm: column(comm, False, True, 1)
    cases["column-gathered-stride2"] = lambda comm: column(comm, False, True, 2)
    cases["column-boundary"] = lambda comm: column(comm, False, False, 1, boundary=True)
    cases["row-whole-stride2"] = lambda comm: row(comm, False, False, 2)
    cases["row-cut-stride2"] = lambda comm: row(comm, True, True, 2)
    cases["embedding-first-dimension"] = lambda comm: vectors(comm, True, False, None)
    cases["embedding-features"] = lambda comm: vectors(comm, False, True, None)
    cases["grouped-gathered"] = lambda comm: grouped(comm, False, 2, "tile", gather=True)
    return cases
