"""What attention is given: no mask where none is needed, so that fast kernels run, and where one
is, one of flags.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import streamed_model, streamed_step
from tiny import Checkpoint, micro_batches
from torch import Tensor
from torch.nn import functional

from lema import LemaModel
from lema.errors import ModelError
from lema.model.capture import tensors_in
from lema.model.split import Prelude

CheckpointOf = Callable[..., Checkpoint]
SHORT = (4, 4)  # within every window


def prelude(model: LemaModel, batch: dict[str, Tensor]) -> Prelude:
    with model.memory.lease(0) as first:
        return model.split.prelude(batch, first.weights)


def masks(found: Prelude) -> list[Tensor]:
    return [
        one for call in found.calls for one in tensors_in(call.captured_values) if one.dim() >= 4
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", [False, True], ids=["no mask", "a mask of ones"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_rows_of_one_length_are_attended_to_without_a_mask(
    checkpoint_of: CheckpointOf, name: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    attend = functional.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    batch = micro_batches(1, lengths=SHORT)[0]
    if given:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with streamed_model(
        checkpoint_of(name), attn_implementation="sdpa", gradient_checkpointing=True
    ) as model:
        labels = batch.pop("labels")
        assert not masks(prelude(model, batch))
        monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
        streamed_step(model, [{**batch, "labels": labels}])
    assert len(seen) > 2 * 11  # forward and recomputation
    assert set(seen) == {(None, True)}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_padded_rows_have_one_mask_of_flags_for_all_layers(
    checkpoint_of: CheckpointOf, name: str
) -> None:
    batch = micro_batches(1, padding=True)[0]
    rows, length = batch["input_ids"].shape
    del batch["labels"]
    with streamed_model(checkpoint_of(name), attn_implementation="sdpa") as model:
        found = masks(prelude(model, batch))
    assert len(found) == 12
    assert all(mask is found[0] for mask in found)
    assert (found[0].dtype, found[0].shape) == (torch.bool, (rows, 1, length, length))
    assert found[0].untyped_storage().nbytes() == rows * length**2


def test_an_attention_whose_package_is_missing_is_refused_in_one_error(
    checkpoint_of: CheckpointOf,
) -> None:
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        pytest.skip("the package is here")
    wanted = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(ModelError) as caught, streamed_model(checkpoint_of("llama"), **wanted):
        pass
    assert "package for FlashAttention2 doesn't seem to be installed" in caught.value.what
    assert caught.value.how.startswith(
        "attn_implementation is 'flash_attention_2': install its packages"
    )
