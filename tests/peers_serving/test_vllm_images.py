"""A real vLLM on the CPU serves a model that sees images, which `lema merge` wrote: the
log-probabilities of a prompt with an image are those of PEFT's model with the adapter.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from imageprocessors import PROCESSORS, SIZE, picture, words
from imagerows import IMAGE_TOKEN, TOWERLESS
from parity import draw_b
from peft import LoraConfig, PeftModel
from PIL import Image
from publishedclass import publish, published_class
from servedmodels import COMMON, VISION, measured
from transformers import CONFIG_MAPPING, AutoConfig
from vllmserver import vllm_server

import lema
from lema.convert import merge_adapter
from lema.storage.modelfiles import load_processor

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
# For most other types vLLM imports torchvision, which this environment has not.
TYPE = "idefics3"
SIDE = 56  # of an image: 16 patches, of which four make one token


def publish_model(directory: Path) -> Path:
    """Write a random model and its processor, as its publisher would."""
    text = COMMON | {"model_type": "llama", "vocab_size": SIZE, "bos_token_id": 1}
    config = CONFIG_MAPPING[TYPE](
        text_config=text | {"eos_token_id": 2},
        vision_config=VISION | {"image_size": SIDE},
        image_token_id=IMAGE_TOKEN,
        pad_token_id=0,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    publish(TYPE, directory, config)
    processor = PROCESSORS[TYPE]()
    side = {"longest_edge": SIDE}
    processor.image_processor.size = side
    processor.image_processor.max_image_size = side
    processor.save_pretrained(directory)
    return directory


def expected(
    model: Path, adapter: Path | None, turns: list[dict[str, Any]], image: Image.Image
) -> tuple[list[int], list[float]]:
    """The tokens of a chat with an image, and what `transformers` makes of all but the first."""
    processor: Any = load_processor(model, trusted=False)
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[image]], add_special_tokens=False, return_tensors="pt")
    kind = published_class(AutoConfig.from_pretrained(model))
    opened = kind.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        opened = PeftModel.from_pretrained(opened, str(adapter))
    with torch.no_grad():
        logits = opened.eval()(**inputs, use_cache=False).logits[0, :-1]
    ids = inputs["input_ids"][0]
    return ids.tolist(), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()


def test_a_merged_model_sees_an_image_as_peft_s_does(tmp_path: Path) -> None:
    model = publish_model(tmp_path / "model")
    lora = LoraConfig(r=4, target_modules=TOWERLESS, task_type="CAUSAL_LM")
    streamed = lema.streamed(model, lora, modalities="all", device="cpu", seed=1)
    draw_b(streamed)
    streamed.save_pretrained(str(tmp_path / "adapter"))
    streamed.close()
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    image = picture(3).resize((SIDE, SIDE))
    parts = [{"type": "image"}, {"type": "text", "text": words(1, 6)}]
    turns = [{"role": "user", "content": parts}]
    ids, values = expected(model, tmp_path / "adapter", turns, image)
    _, without = expected(model, None, turns, image)
    _, other = expected(model, tmp_path / "adapter", turns, picture(5).resize((SIDE, SIDE)))
    for numbers in (without, other):  # adapter and image both matter
        assert max(abs(a - b) for a, b in zip(numbers, values, strict=True)) > 1e-3
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    shown = [{"type": "image_url", "image_url": {"url": url}}, parts[1]]
    arguments = [f"--model={merged}", '--limit-mm-per-prompt={"image": 1}']
    with vllm_server(arguments, tmp_path / "log") as server:
        answer = server.ask(
            "/v1/chat/completions",
            model=str(merged),
            messages=[{"role": "user", "content": shown}],
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
        )
    said = answer["prompt_logprobs"][1:]
    assert len(said) == len(ids) - 1
    served = [one[str(token)]["logprob"] for token, one in zip(ids[1:], said, strict=True)]
    worst = max(abs(a - b) for a, b in zip(served, values, strict=True))
    measured(f"{TYPE} with an image, merged", worst)
