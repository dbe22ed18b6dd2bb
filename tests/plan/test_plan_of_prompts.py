"""What a plan says that a long prompt takes which goes through the layers in chunks, beside what it
does take.
"""

from pathlib import Path

import pytest
import torch
from everytype import write_model
from smallrun import opened, settings, tokenizer
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from lema.engine import complete
from lema.plan.inference.keyvalues import text_bytes
from lema.plan.work.meter import Tally
from lema.train.inference.texts import _prefill_of

PROMPT = 2048
CHUNK = 128
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=100)],
    ids=["full", "windows"],
)
def test_a_prompt_in_chunks_takes_no_more_than_planned(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    directory = write_model(config, tmp_path / "model")
    tokenizer().save_pretrained(directory)
    planned = {}
    taken = {}
    prompt = torch.randint(3, 300, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    for chunk in (None, CHUNK):
        with opened(settings(directory, tmp_path, sequence_chunk=chunk)) as model:
            blueprint = model.planner.blueprint
            sized = text_bytes(blueprint.model, blueprint.layers, PROMPT, 1, None, chunk)
            planned[chunk] = sized.of(1).peak
            prefill = _prefill_of(model, "device")
            arguments = (model.split, model.memory, None, model.tokenizer, [prompt], 1, {})
            complete(*arguments, prefill=prefill)  # which takes memory for weights
            with Tally() as tally:
                tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
                complete(*arguments, prefill=prefill)
                taken[chunk] = tally.peak
    assert taken[CHUNK] <= 1.05 * planned[CHUNK]
    assert taken[CHUNK] > 0.4 * planned[CHUNK]
    assert taken[CHUNK] < 0.5 * taken[None]
    assert planned[CHUNK] < 0.5 * planned[None]
