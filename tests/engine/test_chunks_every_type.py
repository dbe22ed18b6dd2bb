"""Every type that streams goes through its layers in chunks with the numbers of whole sequences,
or is refused with a sentence: plain rows, padded ones and packs.
"""

from pathlib import Path

import pytest
import torch
from everytype import DRAWS, STREAMED, micro_batches, opened, write_model
from parity import draw_b, relative_difference, trained
from tinyconfig import tiny_config
from torch import Tensor

from lema.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")

CHUNK = 5
ROUNDING = 1e-5  # of all gradients together
# Types that round more, because a product of theirs amplifies what differs.
CLOSE = {"muse_spark": 1e-4}

INDEXER = "DynamicIndexedLayer"
HANDS_ON = "its layers hand on more than the hidden state"
ANOTHER = "makes something else of a sequence in chunks than at once"
STATE = "does not go on from the state that a chunk has left"
NOTHING = "keeps nothing of its own in a cache"
NO_ATTENTION = "the current Cache seem to only contain LinearAttention layers"

# Refused: a part of the sentence.
REFUSED = {
    "axk2": INDEXER,
    "bamba": NO_ATTENTION,  # the tiny one has no layer with attention
    "cpmant": HANDS_ON,
    "deepseek_v32": INDEXER,
    "deepseek_v4": "DeepseekV4HCACache",
    "dots3_note": INDEXER,
    "dots3_note_text": INDEXER,
    "falcon_mamba": STATE,
    "gemma3n_text": HANDS_ON,
    "gemma4": HANDS_ON,
    "gemma4_text": HANDS_ON,
    "gemma4_unified": HANDS_ON,
    "gemma4_unified_text": HANDS_ON,
    "glm5_next": INDEXER,
    "glm_moe_dsa": INDEXER,
    "granitemoehybrid": NO_ATTENTION,  # the same
    "hy_v4": INDEXER,
    "hy_v4_vl": INDEXER,
    "inkling2": HANDS_ON,
    "inkling2_text": HANDS_ON,
    "jamba": STATE,
    "longcat_flash": "reads the cache of layer 1",
    "mamba": STATE,
    "minimax": "MiniMax uses cache of its own",
    "mistral_large4": INDEXER,
    "moshi": ANOTHER,
    "openai-gpt": NOTHING,
    "paligemma": ANOTHER,
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": NOTHING,
    "rwkv": HANDS_ON,
    "unlimited_ocr": "UnlimitedOcrDynamicReferenceSlidingWindowLayer",
    "xlnet": HANDS_ON,
    "xlstm": "no attribute 'rnn_state'",
    "zamba": STATE,
    "zaya": HANDS_ON,
}

# Refused only with rows of a kind.
PARTLY = {
    ("git", "padded"): ANOTHER,
    ("kosmos-2.5", "packed"): "the model does not run on a chunk",
    ("qwen2_5_omni_thinker", "padded"): "does not run on a chunk",
    ("qwen3_omni_moe_thinker", "padded"): "does not run on a chunk",
}


def batches_of(layout: str) -> list[dict[str, Tensor]]:
    plain = micro_batches()
    if layout == "plain":
        return plain
    if layout == "packed":
        rows = [[*range(7), *range(5)], [*range(4), *range(8)]]
        return [{**plain[0], "position_ids": torch.tensor(rows)}]
    padded = []
    for batch in plain:
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -3:] = 0
        mask[1, :2] = 0
        labels = batch["labels"].masked_fill(mask == 0, -100)
        padded.append({**batch, "attention_mask": mask, "labels": labels})
    return padded


def step(directory: Path, batches: list[dict[str, Tensor]], chunk: int | None) -> Tensor:
    """Return the loss, and every gradient, in one vector."""
    with opened(directory, sequence_chunk=chunk) as model:
        draw_b(model.lora_manager)
        torch.manual_seed(DRAWS)
        loss = model.adapter.loss(batches)
        loss.backward()
        parameters = trained(model.lora_manager).values()
        formed = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in formed)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["plain", "padded", "packed"])
@pytest.mark.parametrize("model_type", STREAMED)
def test_a_step_in_chunks_is_that_of_whole_sequences_or_refused(
    model_type: str, layout: str, tmp_path: Path
) -> None:
    directory = write_model(tiny_config(model_type), tmp_path)
    batches = batches_of(layout)
    try:
        expected = step(directory, batches, None)
    except (TypeError, ValueError):
        pytest.skip("the type does not take such rows")
    why = REFUSED.get(model_type) or PARTLY.get((model_type, layout))
    if why is None:
        found = step(directory, batches, CHUNK)
        assert relative_difference(found, expected) < CLOSE.get(model_type, ROUNDING)
        return
    with pytest.raises(ConfigError, match="cannot go through this model's layers") as refused:
        step(directory, batches, CHUNK)
    if layout == "plain":
        assert why in str(refused.value)
