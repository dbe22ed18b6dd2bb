"""Rotary parameters of other trainers' runs are LEMA's `rope_parameters` where they compute the
same.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lema_tools.importing.checking import checked
from lema_tools.importing.recognition import peer_named
from lema_tools.importing.translation import ForeignRun, Translation

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def model_in(tmp_path: Path) -> str:
    config = {"model_type": "llama", "max_position_embeddings": 8192, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def of_llamafactory(tmp_path: Path, **values: Any) -> Translation:
    keys = {"model_name_or_path": model_in(tmp_path), "stage": "sft", "do_train": True}
    keys |= {"finetuning_type": "lora", "output_dir": "out", "template": "llama3", "bf16": True}
    info = {"rows": {"file_name": "rows.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    keys |= {"dataset": "rows", "dataset_dir": str(tmp_path), **values}
    return checked(peer_named("llamafactory").translate(ForeignRun(keys)))


LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("yarn", YARN), ("llama3", LLAMA3), ("linear", {"rope_type": "linear", "factor": 4.0})],
)
def test_llamafactory_makes_the_factor_of_the_rows(
    kind: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    translation = of_llamafactory(tmp_path, rope_scaling=kind, cutoff_len=30000)
    assert translation.settings["rope_parameters"] == parameters
    assert translation.settings["max_length"] == 30000
    assert "rope_scaling" in translation.same


def test_llamafactory_sets_none_for_short_rows(tmp_path: Path) -> None:
    translation = of_llamafactory(tmp_path, rope_scaling="yarn", cutoff_len=4096)
    assert "rope_parameters" not in translation.settings
    assert "rope_scaling" in translation.same


def test_llamafactorys_dynamic_ones_are_said_to_be_lost(tmp_path: Path) -> None:
    translation = of_llamafactory(tmp_path, rope_scaling="dynamic", cutoff_len=30000)
    assert "rope_parameters" not in translation.settings
    assert "rope_scaling" in {note.key for note in translation.lost}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_trl_gives_them_to_from_pretrained(name: str, tmp_path: Path) -> None:
    keys = {"model_name_or_path": model_in(tmp_path), "dataset_name": "org/data"}
    keys |= {"output_dir": "out", "use_peft": True, "max_length": 30000}  # type: ignore[dict-item]
    keys |= {"model_init_kwargs": {name: YARN}}  # type: ignore[dict-item]
    translation = checked(peer_named("trl").translate(ForeignRun(keys, objective="sft")))
    assert translation.settings["rope_parameters"] == YARN
    assert translation.settings["max_length"] == 30000
    assert {"model_init_kwargs", "max_length"} <= translation.same.keys()


def test_axolotl_overrides_values_of_the_config(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"base_model": model_in(tmp_path), "adapter": "lora", "lora_r": 8}
    keys |= {"datasets": [{"path": "org/data", "type": "alpaca"}], "output_dir": "out"}
    keys |= {"lora_target_linear": True, "bf16": True, "sequence_len": 30000}
    peer = peer_named("axolotl")
    overrides = {"overrides_of_model_config": {"rope_scaling": YARN}}
    translation = checked(peer.translate(ForeignRun({**keys, **overrides})))
    assert translation.settings["rope_parameters"] == YARN
    assert "overrides_of_model_config" in translation.same
    overrides["overrides_of_model_config"]["hidden_act"] = "gelu"  # type: ignore[assignment]
    translation = checked(peer.translate(ForeignRun({**keys, **overrides})))
    assert translation.settings["rope_parameters"] == YARN
    assert "overrides_of_model_config" in {note.key for note in translation.lost}
