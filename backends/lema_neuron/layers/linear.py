"""Linear layers cut along their output (columns) or input (rows), with neuronx-distributed's
names and attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lema.backend.layout import Layout, column, fused, row, shard
from lema.errors import ConfigError
from lema_neuron.comm import Comm, comm_of
from lema_neuron.layers.partition import Initial, as_linear, partitioned, refuse, sequence_dim
from lema_neuron.mappings import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from lema_neuron.shares import (
    Part,
    along,
    in_order,
    is_plain,
    local_size,
    replicated_part,
    sharded_part,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def blocks(size: int, stride: int, comm: Comm, dim: int) -> Layout:
    """Return the layout of an axis of `stride` blocks of one length, each cut evenly; raises
    `ConfigError`.
    """
    block_layout = column(comm.size) if dim == 0 else row(comm.size)
    return block_layout if stride == 1 else fused([(size // stride, block_layout)] * stride)


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b`, each rank with some rows of W, `[output_size / ranks, input_size]`.

    A frozen weight forms no gradient, and its input is not kept.

    Args:
        input_size: features of the input.
        output_size: features of the output, over all ranks.
        bias: whether it has one.
        gather_output: every rank gets all of the output, in the order of the whole.
        dtype: of the weight.
        device: of the weight.
        stride: the number of blocks of the output; each block is cut separately.
        init_method: fills the whole weight; None: as `nn.Linear` does.
        sequence_parallel_enabled: the input is this rank's tokens, and is gathered.
        sequence_dimension: of the input; None: the first.
        keep_master_weight: refused.
        skip_bias_add: return output and bias.
        pad: refused.
        tensor_model_parallel_group: a `Comm` or a process group; None: all processes.
        reduce_dtype: kept as an attribute; the input's gradient is summed in its own dtype.
        rank_ordering: refused.
        layout: the layout of the output, if it is not cut evenly.
        boundary: the input came through `lema_neuron.boundary.enter`, which sums its gradient for
            all layers after it.

    Raises:
        ConfigError: sizes that cannot be cut, or arguments that exclude each other.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: Initial | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        rank_ordering: Any = None,
        *,
        layout: Layout | None = None,
        boundary: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse(name, keep_master_weight=keep_master_weight, pad=pad, rank_ordering=rank_ordering)
        if gather_output and sequence_parallel_enabled:
            raise ConfigError(
                "sequence_parallel_enabled and gather_output exclude each other", where=name
            )
        self.comm = comm_of(tensor_model_parallel_group)
        self.tensor_parallel_group = tensor_model_parallel_group
        self.input_size = input_size
        self.output_size = output_size
        self.stride = stride
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.boundary = boundary
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.reduce_dtype = reduce_dtype
        self.dtype = dtype
        self.layout = layout or blocks(output_size, stride, self.comm, 0)
        self.output_size_per_partition = local_size(self.layout, output_size)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        initial = init_method or as_linear
        shape = (output_size, input_size)
        self.weight = partitioned(shape, self.layout, self.comm, initial, **kind)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = partitioned((output_size,), self.layout, self.comm, nn.init.zeros_, **kind)

    def forward(self, input: Tensor) -> Any:
        """Return this rank's part of the output, `[..., output_size / ranks]`, or all of it."""
        if self.sequence_parallel_enabled:
            input = gather_sequence(input, self.comm, sequence_dim(self.sequence_dimension))
        elif not self.boundary:
            input = copy_to_group(input, self.comm)
        output = linear(input, self.weight, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.comm.size > 1:
            output = gather_from_group(output, self.comm)
            if not is_plain(self.layout, self.output_size):
                order = torch.tensor(in_order(self.layout, self.output_size), device=output.device)
                output = output.index_select(-1, order)
        return (output, self.bias) if self.skip_bias_add else output

    def parts(self) -> dict[str, Part]:
        """Return how its parameters are divided; ranks that hold copies of a share sum their
        gradients.
        """
        part = sharded_part(self.layout, self.output_size, self.comm)
        return {name: part for name, _ in self.named_parameters(recurse=False)}

    def extra_repr(self) -> str:
        """Say the sizes."""
        return (
            f"{self.input_size}, {self.output_size} / {self.comm.size}, "
            f"bias={self.bias is not None}"
        )


class RowParallelLinear(nn.Module):
    """`y = x W^T + b`, each rank with some columns of W, `[output_size, input_size / ranks]`, and
    summed.

    The bias is whole on every rank, and added after the sum.

    Args:
        input_size: features of the input, over all ranks.
        output_size: features of the output.
        bias: whether it has one.
        input_is_parallel: the input is cut already.
        dtype: of the weight.
        device: of the weight.
        stride: the number of blocks of the input; each block is cut separately.
        init_method: fills the whole weight; None: as `nn.Linear` does.
        sequence_parallel_enabled: each rank keeps its tokens of the output.
        sequence_dimension: of the output; None: the first.
        keep_master_weight: refused.
        skip_bias_add: return output and bias.
        pad: refused.
        reduce_output: False: the output stays partial.
        reduce_dtype: the sum has at least this precision.
        tensor_model_parallel_group: a `Comm` or a process group; None: all processes.
        layout: the layout of the input, if it is not cut evenly.

    Raises:
        ConfigError: sizes that cannot be cut, or arguments that exclude each other.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: Initial | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse(name, keep_master_weight=keep_master_weight, pad=pad)
        if sequence_parallel_enabled and not reduce_output:
            raise ConfigError(
                "sequence_parallel_enabled needs an output that is reduced", where=name
            )
        self.comm = comm_of(tensor_model_parallel_group)
        self.tensor_parallel_group = tensor_model_parallel_group
        self.input_size = input_size
        self.output_size = output_size
        self.stride = stride
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.reduce_output = reduce_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.reduce_dtype = reduce_dtype
        self.dtype = dtype
        self.layout = layout or blocks(input_size, stride, self.comm, 1)
        self.input_size_per_partition = local_size(self.layout, input_size)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        shape = (output_size, input_size)
        self.weight = partitioned(shape, self.layout, self.comm, init_method or as_linear, **kind)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, dtype=dtype, device=device))

    def forward(self, input: Tensor) -> Any:
        """Return the output, `[..., output_size]`: all of it, or this rank's tokens."""
        if not self.input_is_parallel:
            input = self._cut(input)
        output = linear(input, self.weight)
        if self.reduce_output and self.comm.size > 1:
            dtype = output.dtype
            output = self._reduce(output.to(torch.promote_types(dtype, self.reduce_dtype))).to(
                dtype
            )
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def _cut(self, input: Tensor) -> Tensor:
        if is_plain(self.layout, self.input_size):
            return scatter_to_group(input, self.comm)
        # shares that are no equal runs: a share's gradient is in its positions, with zeros
        # elsewhere; all are summed
        return shard(
            copy_to_group(input, self.comm), along(self.layout, input.dim() - 1), self.comm.rank
        )

    def _reduce(self, output: Tensor) -> Tensor:
        if self.sequence_parallel_enabled:
            return reduce_scatter_sequence(output, self.comm, sequence_dim(self.sequence_dimension))
        return reduce_from_group(output, self.comm)

    def parts(self) -> dict[str, Part]:
        """Return how its parameters are divided; under sequence parallelism the bias is for this
        rank's tokens only.
        """
        part_by_name = {"weight": sharded_part(self.layout, self.input_size, self.comm)}
        if self.bias is not None:
            part_by_name["bias"] = replicated_part(
                self.comm, partial=self.sequence_parallel_enabled
            )
        return part_by_name

    def extra_repr(self) -> str:
        """Say the sizes."""
        return (
            f"{self.input_size} / {self.comm.size}, {self.output_size}, "
            f"bias={self.bias is not None}"
        )
