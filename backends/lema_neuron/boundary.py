"""The begin and the end of a decoder layer's blocks over ranks; a block is attention, or the
network after it.

The hidden state is gathered, or its gradient summed, once for all column layers of a block. A
gather inside each of them would be wrong, because attention takes the shape of its heads from its
input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lema.model.state.hooks import part_of_model
from lema_neuron.comm import Comm
from lema_neuron.mappings import copy_to_group, gather_sequence, scatter_to_group

__all__ = ["SEQUENCE", "enter", "gather_at_end", "scatter_at_start", "wrap_block"]

# of hidden states, [batch, sequence, hidden], or [tokens, hidden] inside a mixture of experts
SEQUENCE = -2


def enter(hidden: Tensor, comm: Comm, sequence_parallel: bool) -> Tensor:
    """Return the block's input, all tokens; the gradient that comes back is partial, and this
    function sums it.
    """
    return (
        gather_sequence(hidden, comm, SEQUENCE)
        if sequence_parallel
        else copy_to_group(hidden, comm)
    )


def wrap_block(block: nn.Module, comm: Comm, sequence_parallel: bool) -> None:
    """Make a block call `enter` on its input: the argument `hidden_states`, or else the first
    one.
    """

    @part_of_model
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter(args[0], comm, sequence_parallel), *args[1:]), kwargs
        return args, {
            **kwargs,
            "hidden_states": enter(kwargs["hidden_states"], comm, sequence_parallel),
        }

    block.register_forward_pre_hook(before, with_kwargs=True)


def scatter_at_start(layer: nn.Module, comm: Comm) -> None:
    """Make the first layer keep only this rank's tokens of its input."""

    @part_of_model
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (scatter_to_group(args[0], comm, SEQUENCE), *args[1:]), kwargs
        return args, {
            **kwargs,
            "hidden_states": scatter_to_group(kwargs["hidden_states"], comm, SEQUENCE),
        }

    layer.register_forward_pre_hook(before, with_kwargs=True)


def gather_at_end(layer: nn.Module, comm: Comm) -> None:
    """Make the last layer return the hidden state of all tokens; the code after it is the same
    on every rank.
    """

    @part_of_model
    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG001 - a hook
        if isinstance(output, tuple):
            return (gather_sequence(output[0], comm, SEQUENCE, partial=False), *output[1:])
        return gather_sequence(output, comm, SEQUENCE, partial=False)

    layer.register_forward_hook(after)
