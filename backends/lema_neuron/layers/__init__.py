"""The layers of a tensor-parallel model, with the names and attributes that
neuronx-distributed's have.
"""

from lema_neuron.layers.embedding import ParallelEmbedding
from lema_neuron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lema_neuron.layers.qkv import GQAQKVColumnParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "GQAQKVColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
]
