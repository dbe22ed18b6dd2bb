"""Whether the tensors of an adapter fit the modules of its base model, by their shapes: before anyone loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lema.errors import AdapterError
from lema.loralayout import module_of

__all__ = ["check_shapes"]


def check_shapes(tensors: Mapping[str, Tensor], model: nn.Module, base: str) -> None:
    """Refuse an adapter that is not of this model.

    Args:
        tensors: by PEFT's names.
        model: its parameters may be on `meta`.
        base: what to call the model.

    Raises:
        AdapterError: a tensor is of a module that the model does not have, or has another shape than one of that
            module would; it is named.
    """
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        path, leaf = module_of(name)
        module = modules.get(path)
        if not leaf or module is None:
            raise AdapterError(
                f"{base} has no module that this tensor could be of",
                where=name,
                how="name the model it was trained on: --model",
            )
        wanted = _shape(module, leaf, _rank(tensors, name, leaf))
        if wanted is not None and list(tensor.shape) != list(wanted):
            raise AdapterError(
                f"it is {list(tensor.shape)}, and in {base} it would be {list(wanted)}",
                where=name,
                how="the shards are not all there, were padded, or are of another model: --model names it",
            )


def _rank(tensors: Mapping[str, Tensor], name: str, leaf: str) -> int | None:
    """The rank that the other of a module's two factors has."""
    other = leaf.translate(str.maketrans("AB", "BA"))
    factor = tensors.get(name.removesuffix(leaf) + other)
    return None if factor is None or factor.dim() != 2 else factor.shape[1 if "B" in other else 0]


def _shape(module: nn.Module, leaf: str, rank: int | None) -> Sequence[int] | None:
    """The shape that a tensor of an adapted module has; None: it is not known."""
    if not leaf.startswith("lora_"):
        whole = getattr(module, leaf.removeprefix("base_layer."), None)
        return whole.shape if isinstance(whole, Tensor) else None
    if isinstance(module, nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    elif isinstance(module, nn.Embedding):
        inputs, outputs = module.num_embeddings, module.embedding_dim
    else:
        return None
    if leaf == "lora_B.bias":
        return (outputs,)
    if rank is None or leaf.startswith("lora_magnitude"):
        return None
    return (rank, inputs) if "_A" in leaf else (outputs, rank)
