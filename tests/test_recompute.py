"""What is computed a second time: what the backward needs, and nothing after it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from tiny import NUM_LAYERS, micro_batches, write_checkpoint


@pytest.mark.parametrize(
    ("targets", "runs_of_the_last"), [(["q_proj", "v_proj"], 1), (["q_proj", "down_proj"], 2)], ids=["plain", "adapted"]
)
def test_the_last_product_of_a_layer_is_recomputed_only_for_its_own_adapter(
    tmp_path: Path, targets: list[str], runs_of_the_last: int
) -> None:
    checkpoint, batches = write_checkpoint("llama", tmp_path), micro_batches(3)
    whole = whole_model(checkpoint, targets=targets)
    draw_b(whole)
    runs: Counter[str] = Counter()
    with streamed_model(checkpoint, lora_target_modules=targets, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        streamed_step(model, batches)  # what a model is, is learnt in its first step

        def count(name: str) -> Any:
            return lambda *_: runs.update([name])

        for layer in model.split.layers[:-1]:
            for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
                module = layer.get_submodule(name)
                getattr(module, "base_layer", module).register_forward_hook(count(name))
        assert_same(streamed_step(model, batches), whole_step(whole, batches))
    visits = (NUM_LAYERS - 1) * len(batches)
    assert runs == {
        "self_attn.q_proj": 2 * visits,
        "mlp.up_proj": 2 * visits,
        "mlp.down_proj": runs_of_the_last * visits,
    }


def test_a_layer_that_runs_another_way_the_second_time_is_noticed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("llama", tmp_path)
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        loss = model.adapter.loss(micro_batches(1))
        model.split.layers[3].mlp.act_fn = torch.nn.Identity()
        with pytest.raises(AssertionError, match="the layer ran another way"):
            loss.backward()
