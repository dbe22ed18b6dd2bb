"""PEFT's LoRA over parallel layers, with the names of optimum-neuron's: `get_peft_model` and the
classes of its models.

Each adapter is the same as on the whole model: initial values are drawn in full and then cut, and
files are PEFT's own.
"""

from lema_neuron.peft.embedding import ParallelEmbedding
from lema_neuron.peft.layer import NeuronLoraLayer, ParallelLinear
from lema_neuron.peft.lora import NeuronLoraModel
from lema_neuron.peft.model import NeuronPeftModel, NeuronPeftModelForCausalLM, get_peft_model
from lema_neuron.peft.qkv import GQAQKVColumnParallelLinear

__all__ = [
    "GQAQKVColumnParallelLinear",
    "NeuronLoraLayer",
    "NeuronLoraModel",
    "NeuronPeftModel",
    "NeuronPeftModelForCausalLM",
    "ParallelEmbedding",
    "ParallelLinear",
    "get_peft_model",
]
