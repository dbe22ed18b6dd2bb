"""An imported file says its warm-up, because LEMA's default is not every trainer's; and it says it
once, because files of phases refuse two of it.
"""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lema_tools.importing.command import translated

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": (
        "model_name_or_path: m\ndataset_name: a/b\nuse_peft: true\n",
        {"objective": "sft"},
    ),
    "axolotl": (
        "base_model: m\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nmicro_batch_size: 1\n"
        "learning_rate: 1e-4\ndatasets:\n- {path: a/b, type: completion}\n",
        {},
    ),
    "llamafactory": (
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: ONLINE\n"
        "dataset_dir: ONLINE\ntemplate: qwen\n",
        {},
    ),
}
SHORT = {
    "trl": "warmup_steps: 100\nmax_steps: 5\nlearning_rate: 1e-4\n",
    "axolotl": "warmup_steps: 100\nmax_steps: 5\n",
    "llamafactory": "warmup_steps: 100\nmax_steps: 5\nlearning_rate: 1e-4\n",
    "torchtune": "max_steps_per_epoch: 5\n",
}
"""Lines by which a run of each trainer ends within its warm-up of 100 steps to 1e-4."""
TORCHTUNE = """\
output_dir: out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: m/tokenizer.model}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj]}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m}
optimizer: {_component_: torch.optim.AdamW, lr: 1e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup,
  num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: fp32
"""
EXPECTED = {"trl": 0, "axolotl": "auto", "llamafactory": 0}


@pytest.mark.parametrize("tool", FILES)
def test_a_file_says_its_warm_up_once(tool: str, tmp_path: Path) -> None:
    text, options = FILES[tool]
    file = tmp_path / "their.yaml"
    file.write_text(text, encoding="utf-8")
    written, _ = translated([str(file)], tool=tool, **options)
    values = YAML(typ="safe", pure=True).load(written)
    warmups = [values[name] for name in ("warmup_steps", "warmup_ratio") if name in values]
    assert warmups == [EXPECTED[tool]]


@pytest.mark.parametrize("tool", SHORT)
def test_a_run_that_ends_within_its_warm_up_has_the_rates_of_its_steps(
    tool: str, tmp_path: Path
) -> None:
    text, options = FILES.get(tool, (TORCHTUNE, {}))
    file = tmp_path / "their.yaml"
    file.write_text(text + SHORT[tool], encoding="utf-8")
    written, translation = translated([str(file)], tool=tool, **options)
    values = YAML(typ="safe", pure=True).load(written)
    assert (values["warmup_steps"], values["max_steps"]) == (5, 5)
    rate = values["learning_rate"]
    for step in range(5):
        assert rate * step / 5 == pytest.approx(1e-4 * step / 100, rel=1e-12)
    assert not {"warmup_steps", "lr_scheduler.num_warmup_steps"} & {
        note.key for note in translation.changes
    }
