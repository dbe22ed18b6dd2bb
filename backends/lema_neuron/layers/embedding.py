"""An embedding cut along its vocabulary, or along its features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lema.backend.layout import Layout, embedding
from lema.errors import ConfigError
from lema_neuron.comm import Comm, comm_of
from lema_neuron.layers.partition import Initial, partitioned, refuse
from lema_neuron.mappings import gather_from_group, reduce_from_group, reduce_scatter_sequence
from lema_neuron.shares import Part, sharded_part

__all__ = ["ParallelEmbedding", "embed_local"]


class ParallelEmbedding(nn.Module):
    """Token ids `[batch, sequence]` to vectors `[batch, sequence, embedding_dim]`; each rank has
    some of the ids.

    Args:
        num_embeddings: the number of ids.
        embedding_dim: features of a vector.
        padding_idx: the id whose vector gets no gradient.
        max_norm: refused.
        norm_type: the norm for `max_norm`.
        scale_grad_by_freq: refused.
        sparse: refused.
        device: the weight's device.
        dtype: the weight's dtype.
        shard_across_embedding: each rank has some features of all ids instead.
        pad: ids that do not divide evenly are padded with zeros; else they are refused.
        tensor_model_parallel_group: a `Comm` or a process group; None: all processes.
        init_method: fills the whole weight.
        sequence_parallel_enabled: each rank keeps its tokens.
        sequence_dimension: the output is `[batch, sequence, ...]` if 1, `[sequence, batch, ...]` if
            None or 0.

    Raises:
        ConfigError: sizes that cannot be cut, or arguments that are not supported.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        init_method: Initial | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse(name, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        if shard_across_embedding and sequence_parallel_enabled:
            raise ConfigError(
                "sequence_parallel_enabled and shard_across_embedding exclude each other",
                where=name,
            )
        self.comm = comm_of(tensor_model_parallel_group)
        self.tensor_parallel_group = tensor_model_parallel_group
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.dtype = dtype
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        if not shard_across_embedding and not pad and num_embeddings % self.comm.size:
            raise ConfigError(
                f"{num_embeddings} ids cannot be cut for {self.comm.size} ranks",
                where=name,
                how="set pad=True",
            )
        self.layout = vocabulary(num_embeddings, shard_across_embedding, self.comm)
        shape = (num_embeddings, embedding_dim)
        initial = init_method or nn.init.normal_
        self.weight = partitioned(
            shape, self.layout, self.comm, initial, dtype=dtype, device=device
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors, `[batch, sequence, embedding_dim]`, or under sequence parallelism
        this rank's tokens.
        """
        if self.shard_across_embedding:
            output = functional.embedding(input, self.weight, self.padding_idx)
            return gather_from_group(output, self.comm)
        partial = embed_local(input, self.weight, self.comm, self.padding_idx)
        return joined(partial, self.comm, self.sequence_parallel_enabled, self.sequence_dimension)

    def parts(self) -> dict[str, Part]:
        """Return how its weight is divided."""
        return {
            "weight": sharded_part(
                self.layout, (self.num_embeddings, self.embedding_dim)[self.layout.dim], self.comm
            )
        }

    def extra_repr(self) -> str:
        """Return the sizes, for torch's description of the module."""
        return f"{self.num_embeddings}, {self.embedding_dim}, over {self.comm.size}"


def vocabulary(num_embeddings: int, shard_across_embedding: bool, comm: Comm) -> Layout:
    """Return the layout of an embedding's weight, `[num_embeddings, embedding_dim]`."""
    return (
        Layout("column", comm.size, 1)
        if shard_across_embedding
        else embedding(comm.size, num_embeddings)
    )


def embed_local(
    input: Tensor, weight: Tensor, comm: Comm, padding_idx: int | None = None
) -> Tensor:
    """Return this rank's vectors of token ids; zeros where another rank has them.

    Args:
        input: token ids, of any shape.
        weight: `[ids of this rank, features]`.
        comm: the group.
        padding_idx: the id whose vector gets no gradient.
    """
    if comm.size == 1:
        return functional.embedding(input, weight, padding_idx)
    count = weight.shape[0]
    here = input - comm.rank * count
    mine = (here >= 0) & (here < count)
    vectors = functional.embedding(here.clamp(0, count - 1), weight)
    if padding_idx is not None:
        vectors = torch.where((input == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
    return vectors * mine.unsqueeze(-1)


def joined(
    partial: Tensor, comm: Comm, sequence_parallel: bool, sequence_dimension: int | None
) -> Tensor:
    """Sum the vectors of `embed_local` over the ranks; under sequence parallelism each rank
    keeps its tokens.
    """
    if not sequence_parallel:
        return reduce_from_group(partial, comm)
    if not sequence_dimension:
        return reduce_scatter_sequence(partial.transpose(0, 1).contiguous(), comm, 0)
    return reduce_scatter_sequence(partial, comm, sequence_dimension)
