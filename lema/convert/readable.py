"""Which names in memory `transformers` reads in files as they are."""

from collections.abc import Callable, Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from lema.model.weight_names import NameRules

__all__ = ["read_as_they_are"]


def read_as_they_are(
    model: PreTrainedModel, readers: Iterable[tuple[PreTrainedModel, Callable[[str], str]]]
) -> set[str]:
    """Return the tensors of a model that each of some classes reads from a file where they have the
    names and shapes that they have in memory. `readers`: models of these classes on `meta`, and
    from names in the model to those in them; what a class does not have it need not read."""
    readable = dict(model.state_dict())
    for reader, rename in readers:
        rules = NameRules(reader, get_model_conversion_mapping(reader))
        state = reader.state_dict()
        for name, tensor in list(readable.items()):
            reader_name = rename(name)
            if reader_name in state and not rules.keeps(name, reader_name, tuple(tensor.shape)):
                del readable[name]
    return set(readable)
