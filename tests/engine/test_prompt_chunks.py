"""A long prompt goes through the layers in chunks: each layer is leased once for it, and the tokens
that follow are those of a prompt at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from parity import draw_b, relative_difference
from peft import LoraConfig
from smallrun import NUM_LAYERS, settings
from smallrun import opened as opened_small
from smallrun import write_model as write_small
from test_expert_groups import CONFIGS
from tinyconfig import tiny_config
from torch import Tensor
from transformers import DynamicCache

import lema
from lema.compat import cache_argument
from lema.engine.generation import encoded

CHUNK = 5
NEW = 6
PROMPTS = [
    "the river grinds the mill by the river of corn and the miller of the mill",
    "corn and the river",
    "the miller grinds corn by the river of the mill and the corn of the miller",
]


@contextmanager
def streamed(directory: Path, chunk: int | None, **changes: Any) -> Iterator[Any]:
    targets = r".*\.(q_proj|in_proj|in_proj_qkvz)"
    config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    options = {"seed": 1, "lora_target_parameters": [], **changes}
    model = lema.streamed(directory, config, device="cpu", sequence_chunk=chunk, **options)
    try:
        draw_b(model)
        yield model
    finally:
        model.close()


def prompt(padding: tuple[int, ...] = (0, 0)) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, number in enumerate(padding):
        mask[row, :number] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def kept(cache: DynamicCache) -> list[Tensor]:
    """Return all that a cache holds, but for padding."""
    tensors = list[Tensor]()
    layers: list[Any] = cache.layers
    for layer in layers:
        if getattr(layer, "keys", None) is not None:
            tensors += [layer.keys, layer.values]
        for states in ("conv_states", "recurrent_states"):
            tensors += [one for one in getattr(layer, states, {}).values() if one is not None]
    return tensors


def watch(model: Any, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note how many tokens each call of a layer is given."""
    call_layer = model.split.call_layer

    def counted(index: int, weights: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(hidden.shape[1])
        return call_layer(index, weights, args, kwargs)

    monkeypatch.setattr(model.split, "call_layer", counted)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_tokens_are_those_of_prompts_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts of different lengths, with keys and values on the device and in host memory."""
    directory = write_small(tmp_path / "model", name)
    texts = []
    for chunk in (None, CHUNK):
        with opened_small(settings(directory, tmp_path, sequence_chunk=chunk)) as model:
            seen = list[int]()
            watch(model, seen, monkeypatch)
            texts.append(model.generate(PROMPTS, max_new_tokens=NEW))
            before = model.memory.counters.leases
            seen.clear()
            texts.append(model.generate(PROMPTS, max_new_tokens=NEW, keys_values="host"))
            assert model.memory.counters.leases - before == NEW * NUM_LAYERS
            longest = max(len(ids) for ids in encoded(model.tokenizer, PROMPTS))
            # a layer is tried on 12 tokens when it first takes some in chunks
            assert max(seen) == (longest if chunk is None else 12) < 2 + longest
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert all(texts[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (4, 9)])
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen3_next", "mamba2", "lfm2", "falcon_h1"]
)
def test_the_cache_has_what_it_has_of_a_prompt_at_once(
    model_type: str, padding: tuple[int, ...], tmp_path: Path
) -> None:
    directory = write_model(tiny_config(model_type), tmp_path)
    results = []
    for chunk in (None, CHUNK):
        with streamed(directory, chunk) as model, torch.no_grad():
            outputs = model(**prompt(padding), use_cache=True)
            cache = outputs[cache_argument(model.get_base_model())]
            made = model.generate(**prompt(padding), max_new_tokens=NEW, do_sample=False)
            results.append((outputs.logits[:, -1], kept(cache), made))
    (logits, states, made), (other_logits, other_states, other_made) = results
    assert relative_difference(other_logits, logits) < 1e-5
    assert torch.equal(made, other_made)
    assert len(states) == len(other_states) > 0
    for state, other in zip(states, other_states, strict=True):
        assert state.shape == other.shape
        if not any(padding):
            assert relative_difference(other, state) < 1e-5


def test_each_group_of_experts_is_leased_once_for_a_prompt(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    made = []
    leases = []
    for chunk in (None, CHUNK):
        with streamed(directory, chunk, experts_per_slot=3) as model:
            model.generate(**prompt(), max_new_tokens=1, do_sample=False)
            before = model.opened.memory.counters.leases
            made.append(model.generate(**prompt(), max_new_tokens=NEW, do_sample=False))
            leases.append(model.opened.memory.counters.leases - before)
    assert torch.equal(made[0], made[1])
    assert leases[0] == leases[1] == NEW * (8 + 8 * 3)


def test_a_head_in_pieces_comes_after_the_layers(tmp_path: Path) -> None:
    directory = write_small(tmp_path / "model")
    texts = []
    leases = []
    for chunk in (None, CHUNK):
        with opened_small(
            settings(directory, tmp_path, sequence_chunk=chunk, head="stream")
        ) as model:
            texts.append(model.generate(PROMPTS, max_new_tokens=NEW))
            leases.append(model.memory.counters.leases)
    assert texts[0] == texts[1]
    assert leases[1] == leases[0] + 1  # to learn what a layer returns


def test_a_cache_that_has_tokens_already_goes_on_at_once(tmp_path: Path) -> None:
    directory = write_model(tiny_config("llama"), tmp_path)
    logits = []
    for chunk in (None, CHUNK):
        with streamed(directory, chunk) as model, torch.no_grad():
            cache = DynamicCache(config=model.config)
            name = cache_argument(model.get_base_model())
            ids = prompt()["input_ids"]
            for part in (ids[:, :8], ids[:, 8:]):
                outputs = model(input_ids=part, use_cache=True, **{name: cache})
            logits.append(outputs.logits[:, -1])
            assert cache.get_seq_length() == 17
    assert relative_difference(logits[1], logits[0]) < 1e-5
