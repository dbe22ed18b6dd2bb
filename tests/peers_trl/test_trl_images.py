"""TRL's trainers with a processor train a streamed model on rows with images to the same bits as
the whole one with PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from aligned import aligned
from datasets import Dataset
from imageprocessors import PROCESSORS, picture, words
from imagerows import publish_with_images
from peft import LoraConfig, get_peft_model
from PIL import Image
from publishedclass import published_class
from transformers import AutoConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trlruns import Recorded, adapters, recomputing

import lema

STEPS = 10
SEED = 42
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endfor %}"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


def images_of(number: int) -> list[Image.Image]:
    return [picture(3 * number + place) for place in range((1, 2, 1, 0)[number % 4])]


def sft_rows() -> Dataset:
    rows = []
    for number in range(24):
        images = images_of(number)
        asked = [{"type": "image", "text": None}] * len(images)
        asked.append({"type": "text", "text": words(number, 3)})
        answer = [{"type": "text", "text": words(number + 1, 6 + number % 5)}]
        turns = (("user", asked), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"messages": messages, "images": images})
    return Dataset.from_list(rows)


def dpo_rows() -> Dataset:
    rows = []
    for number in range(24):
        images = [picture(number)]
        asked = [{"type": "image", "text": None}, {"type": "text", "text": words(number, 3)}]
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": asked}], "images": images}
        for name, start in (("chosen", number + 1), ("rejected", number + 4)):
            answer = [{"type": "text", "text": words(start, 5 + number % 3)}]
            row[name] = [{"role": "assistant", "content": answer}]
        rows.append(row)
    return Dataset.from_list(rows)


class RecordedSFT(Recorded, SFTTrainer):
    pass


class RecordedDPO(Recorded, DPOTrainer):
    pass


KINDS: dict[str, tuple[Any, Any, Callable[[], Dataset]]] = {
    "sft": (RecordedSFT, SFTConfig, sft_rows),
    "dpo": (RecordedDPO, DPOConfig, dpo_rows),
}


def whole_model(directory: Path, peft_config: LoraConfig) -> Any:
    kind = published_class(AutoConfig.from_pretrained(directory))
    base = aligned(kind.from_pretrained(directory, dtype=torch.float32))
    torch.manual_seed(SEED)
    return get_peft_model(base, peft_config)


def lora() -> LoraConfig:
    language = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|down_proj)"
    return LoraConfig(r=4, target_modules=language, task_type="CAUSAL_LM")


def options(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        **recomputing(True),
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "max_length": None,
        **changes,
    }


def logs(trainer: Any) -> list[dict[str, float]]:
    """Return what was logged, without what a clock says."""
    return [
        {name: value for name, value in entry.items() if not name.startswith("train_")}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_ten_steps_on_images_are_those_of_the_whole_model(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    trainer_class, arguments, rows = KINDS[kind]
    directory = publish_with_images(model_type, tmp_path / model_type)
    outcomes = []
    model = lema.streamed(directory, lora(), device="cpu", seed=SEED, modalities="all")
    for trained in (whole_model(directory, model.peft_config["default"]), model):
        trainer = trainer_class(
            model=trained,
            args=arguments(**options(tmp_path / "out")),
            train_dataset=rows(),
            processing_class=PROCESSORS[model_type](TEMPLATE),
        )
        trainer.train()
        outcomes.append((trainer.losses, logs(trainer), adapters(trainer.model)))
    model.close()
    (losses, logged, weights), (found_losses, found_logged, found) = outcomes
    assert found_losses == losses
    assert found_logged == logged
    assert len(set(losses)) == STEPS
    assert all(torch.equal(one, weights[name]) for name, one in found.items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = publish_with_images("llava", tmp_path / "llava")
    PROCESSORS["llava"](TEMPLATE).save_pretrained(directory)
    page = Path(__file__).parents[2] / "docs" / "images.md"
    (text,) = re.findall(
        r"<!-- images example -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    changes = {"use_cpu": True, "max_steps": 1, "bf16": False}
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **changes))
    exec(text.replace("Qwen/Qwen3-VL-32B-Instruct", str(directory)), {"rows": sft_rows()})
    assert [*Path("output").glob("checkpoint-*/adapter_model.safetensors")]
