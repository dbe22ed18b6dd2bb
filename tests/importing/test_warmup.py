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
