"""How gradients are summed when layers are divided over several ranks.

Each parameter carries a `Part`, which says it. Partial gradients are summed over the ranks that
hold the parameter. Then the norm of all gradients is computed, and copies count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lema.errors import ModelError
from lema_neuron.comm import Comm
from lema_neuron.shares import Part, replicated_part

__all__ = ["carry", "global_norm", "is_marked", "mark", "part_of", "parts", "reduce_gradients"]


def parts(model: nn.Module, comm: Comm) -> dict[str, Part | None]:
    """Return how each parameter is divided, by its name in the model.

    A module's method `parts` gives this for its own and its children's parameters. A parameter that
    no module lists has the `whole_part` of the nearest module above it (None: it is unknown whether
    its gradient is partial). Without that, it is whole and its gradient is complete.
    """
    part_by_name: dict[str, Part | None] = {}
    for prefix, module in model.named_modules():
        list_parts = getattr(module, "parts", None)
        for name, part in (list_parts() if callable(list_parts) else {}).items():
            part_by_name.setdefault(f"{prefix}.{name}" if prefix else name, part)
    complete = replicated_part(comm, partial=False)
    return {
        name: part_by_name[name] if name in part_by_name else _inherited(model, name, complete)
        for name, _ in model.named_parameters()
    }


def _inherited(model: nn.Module, name: str, part: Part | None) -> Part | None:
    module = model
    for step in name.split(".")[:-1]:
        module = getattr(module, step)
        part = getattr(module, "whole_part", part)
    return part


def mark(model: nn.Module, comm: Comm) -> None:
    """Store its part on every parameter; call this again whenever parameters were replaced.

    Raises:
        ModelError: a parameter trains, and it is unknown whether its gradient is partial; the
            message names it.
    """
    part_by_name = parts(model, comm)
    for name, parameter in model.named_parameters():
        if part_by_name[name] is None and parameter.requires_grad:
            raise ModelError(
                (
                    "this parameter, whole on every rank, cannot train inside a block that "
                    "lies over ranks"
                ),
                where=name,
                how="freeze it, or train without tensor parallelism",
            )
        if (part := part_by_name[name]) is not None:
            carry(parameter, part)


def carry(parameter: nn.Parameter, part: Part) -> None:
    """Store its part on a parameter: the layout in the attribute that the core reads, the rest
    in another.
    """
    untyped: Any = parameter
    untyped.parallel_layout = part.layout
    untyped.gradient_rule = (part.sum_over, part.counted)


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether a parameter carries its part."""
    return hasattr(parameter, "gradient_rule")


def part_of(parameter: nn.Parameter) -> Part:
    """Return the part that a parameter carries.

    Raises:
        ModelError: it carries none.
    """
    if not is_marked(parameter):
        raise ModelError(
            "a parameter does not say how it lies over the tensor-parallel ranks",
            where=f"shape {list(parameter.shape)}",
            how=(
                "call lema_neuron.gradients.mark(model, comm) after parameters were made or "
                "replaced"
            ),
        )
    untyped: Any = parameter
    return Part(untyped.parallel_layout, *untyped.gradient_rule)


def reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum partial gradients, in place, over the ranks that their parameters' parts name; all get
    the same bits.

    One collective for each group and dtype. Every rank passes its parameters in one order.
    """
    groups: dict[tuple[int, torch.dtype], tuple[Comm, list[Tensor]]] = {}
    for parameter, gradient in _with_gradients(parameters):
        over = part_of(parameter).sum_over
        if over is not None:
            groups.setdefault((id(over), gradient.dtype), (over, []))[1].append(gradient)
    for comm, gradients in groups.values():
        _all_reduce(gradients, comm)


def _all_reduce(gradients: list[Tensor], comm: Comm) -> None:
    if comm.size == 1:
        return
    total = comm.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    start = 0
    for gradient in gradients:
        gradient.copy_(total[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def global_norm(parameters: Iterable[nn.Parameter], comm: Comm) -> Tensor:
    """Return the 2-norm of all gradients of the whole model, copies counted once; the same bits
    on every rank.
    """
    squares = [
        gradient.float().square().sum() * part_of(parameter).counted
        for parameter, gradient in _with_gradients(parameters)
    ]
    return comm.all_reduce(torch.stack(squares).sum()).sqrt() if squares else torch.zeros(())


def _with_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter, parameter.grad
