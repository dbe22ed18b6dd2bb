"""Reference models have weights at addresses of torch's allocator, though a file has them
elsewhere.
"""

from pathlib import Path

import torch
from aligned import ALIGNMENT, aligned
from asloaded import llama, store, tensors, write_model
from transformers import AutoModelForCausalLM


def test_weights_that_a_file_has_at_odd_addresses_are_moved_and_stay_what_they_were(
    tmp_path: Path,
) -> None:
    model = write_model(llama(tie_word_embeddings=True), tmp_path / "model")
    # so that not all begin at multiples of 64 bytes
    store(model, tensors(model) | {"other": torch.zeros(1)})
    loaded = AutoModelForCausalLM.from_pretrained(model)
    values = {name: one.clone() for name, one in loaded.state_dict().items()}
    addresses = {name: one.data_ptr() for name, one in loaded.state_dict().items()}
    assert any(address % ALIGNMENT for address in addresses.values())
    assert aligned(loaded) is loaded
    found = loaded.state_dict(keep_vars=True)
    assert found.keys() == values.keys()
    assert all(
        torch.equal(found[name], one) and found[name].data_ptr() % ALIGNMENT == 0
        for name, one in values.items()
    )
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
