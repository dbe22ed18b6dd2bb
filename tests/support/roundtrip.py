"""A model of any config, published as `transformers` saves it, prepared, and compared with what
it loads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter

from lema.convert.prepare import Prepared, prepare
from lema.convert.published import visit_order
from lema.convert.tensors import records_of
from lema.model import meta_model, read_config
from lema.model.conversions import Conversion
from lema.model.outer_weights import read_stored
from lema.model.weight_names import map_names, match_names
from lema.storage import GlobalBinaryIndex
from lema.storage.quantized.records import Stored

__all__ = ["Roundtrip", "assert_same", "draw_weights", "published", "roundtrip"]


@dataclass(frozen=True)
class Roundtrip:
    """What a round trip left, for further checks.

    Attributes:
        published: the directory as `save_pretrained` wrote it.
        prepared: what `prepare` made of it.
        expected: the state dict `from_pretrained` gives of what was published.
        operations: the kinds of operations that were needed to get from the one to the other.
    """

    published: Path
    prepared: Prepared
    expected: dict[str, Tensor]
    operations: frozenset[str]


def roundtrip(
    config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32
) -> Roundtrip:
    """Publish a random model of `config` below `directory`, prepare it, and assert that nothing
    differs.

    No tensor is equal to another, norms and biases included, so one in the wrong place shows.
    """
    source = published(config, directory / "published", dtype)
    expected = from_pretrained(source).state_dict()
    index = GlobalBinaryIndex(source)
    skeleton = meta_model(read_config(source), dtype)
    converters: list[WeightConverter] = []
    with patch.object(Conversion, "records", autospec=True, side_effect=_noting(converters)):
        names = map_names(skeleton, index)
    consumed = {one.name for record in names.stored.values() for one in records_of(record)}
    assert consumed | {record.name for record in (*names.ignored, *names.unused)} == set(index)
    operations = {
        type(operation).__name__ for converter in converters for operation in converter.operations
    }
    prepared = prepare(source, directory / "one.safetensors")
    assert_same(load_file(prepared.path), expected)
    assert list(GlobalBinaryIndex(prepared.path)) == visit_order(skeleton)
    whole = prepare(source, directory / "prepared")
    stored = GlobalBinaryIndex(whole.path)
    assert stored.keys() == index.keys()
    for name, tensor in load_file(whole.weights).items():
        assert torch.equal(tensor, read_stored(index[name], tensor.dtype)), name
    assert set(match_names(skeleton, stored)) == set(expected)  # it streams as it is
    return Roundtrip(source, prepared, expected, frozenset(operations))


def _noting(converters: list[WeightConverter]) -> Callable[..., dict[str, Stored]]:
    records = Conversion.records

    def noted(conversion: Conversion, *arguments: Any) -> dict[str, Stored]:
        converters.append(conversion.converter)
        return records(conversion, *arguments)

    return noted


def published(
    config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random model as `save_pretrained` does, with the names and shapes of the hub."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw_weights(model)
    model.save_pretrained(directory)
    return directory


def draw_weights(model: PreTrainedModel) -> None:
    """Draw every tensor of the state dict anew, but for integers; tied weights stay tied.

    The row of the padding token is zero, as it stays in training: some models zero it again when
    they are loaded.
    """
    state: dict[str, Tensor] = model.state_dict()
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.normal_()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0


def from_pretrained(directory: Path) -> PreTrainedModel:
    """Load a model and see that nothing of it was left to chance."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    assert isinstance(model, PreTrainedModel)
    return model


def assert_same(stored: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that names, dtypes, shapes and bits agree."""
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype, name
        assert torch.equal(stored[name], tensor), name
