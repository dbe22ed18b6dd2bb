"""A full fine-tune of another trainer is a file that LEMA reads, with every weight training."""

import json
from pathlib import Path
from typing import Any

import pytest

from lema.train.phases.file import read_phase_file
from lema_tools.importing.command import translated

TORCHTUNE = """\
output_dir: out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: m/tokenizer.model}
dataset: {_component_: torchtune.datasets.text_completion_dataset, source: json, data_files: ROWS,
  column: text}
seed: 7
shuffle: true
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m,
  checkpoint_files: [model.safetensors], output_dir: out, model_type: LLAMA3_2}
batch_size: 2
epochs: 1
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2.0e-05}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
gradient_accumulation_steps: 1
clip_grad_norm: null
dtype: fp32
"""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": (
        "model_name_or_path: m\ndataset_name: FOLDER\nneftune_noise_alpha: 5\n",
        {"objective": "sft"},
    ),
    "axolotl": (
        "base_model: m\nmicro_batch_size: 1\nlearning_rate: 1e-5\noptimizer: adamw_torch_fused\n"
        "neftune_noise_alpha: 5\ndatasets:\n- {path: ROWS, type: completion, ds_type: json}\n",
        {},
    ),
    "llamafactory": (
        "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: mine\n"
        "dataset_dir: FOLDER\ntemplate: qwen\nneftune_noise_alpha: 5\nbf16: false\n"
        "do_train: true\noutput_dir: out\npush_to_hub: true\n",
        {},
    ),
    "torchtune": (TORCHTUNE, {}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"text": "corn", "answer": "flour"}) + "\n", encoding="utf-8"
    )
    columns = {"prompt": "text", "response": "answer"}
    about = {"mine": {"file_name": "rows.jsonl", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(about), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("tool", FILES)
def test_lema_reads_the_file_and_trains_every_weight(tool: str, folder: Path) -> None:
    text, options = FILES[tool]
    file = folder / "their.yaml"
    text = text.replace("ROWS", str(folder / "rows.jsonl")).replace("FOLDER", str(folder))
    file.write_text(text, encoding="utf-8")
    written, translation = translated([str(file)], tool=tool, **options)
    ours = folder / "my.yaml"
    ours.write_text(written, encoding="utf-8")
    read = read_phase_file(ours)
    (phase,) = read.plan.phases
    assert phase.trains == "full"
    assert read.config.optim == "adamw_torch"
    keys = [*translation.same, *(note.key for note in (*translation.differs, *translation.lost))]
    assert len(keys) == len(set(keys))
    if "neftune_noise_alpha" in text:
        assert read.config.neftune_noise_alpha == 5
        assert "neftune_noise_alpha" in translation.same
