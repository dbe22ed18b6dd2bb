"""The files in configs/models are what the plan chooses for the checkpoints' configs, and the
page lists them.
"""

from pathlib import Path

import pytest
from modelconfigs import CONFIGS, MODELS, PAGE, SIZES, files_of, page
from publishedforms import write_published
from tinyconfig import tiny_config
from transformers import AutoConfig

from lema.config import LemaConfig
from lema.storage import GlobalBinaryIndex
from lema_tools.models.checkpoints import Checkpoint, named
from lema_tools.models.published import SETTINGS, layout_of, write_headers

pytestmark = pytest.mark.filterwarnings("ignore")

FORMS = {  # a type that is published in each form
    "bf16": "qwen3_moe",
    "bf16, experts fused": "qwen3_5_moe",
    "fp8 in blocks": "deepseek_v3",
    "fp8 per tensor": "ministral3",
    "mxfp4": "gpt_oss",
    "int4 experts": "deepseek_v3",
}


def written(checkpoint: Checkpoint) -> dict[int, str]:
    """The files that are there, by their size."""
    return {
        size: file.read_text(encoding="utf-8")
        for size in SIZES
        if (file := CONFIGS / checkpoint.name / f"{size}GB.yaml").is_file()
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpoint", MODELS, ids=lambda one: one.name)
def test_the_files_of_a_checkpoint_are_what_its_plan_chooses(checkpoint: Checkpoint) -> None:
    """Where the plan says that nothing fits, there is no file."""
    assert written(checkpoint) == files_of(checkpoint)


def test_thirty_checkpoints_have_files_and_the_page_is_made_of_them() -> None:
    found = {one.name: written(one) for one in MODELS}
    assert sum(bool(files) for files in found.values()) >= 30
    assert {folder.name for folder in CONFIGS.iterdir()} == {
        name for name, files in found.items() if files
    }
    assert PAGE.read_text(encoding="utf-8").splitlines() == "\n".join(page()).rstrip().splitlines()


@pytest.mark.parametrize("checkpoint", MODELS, ids=lambda one: one.name)
def test_every_file_is_one_of_settings(checkpoint: Checkpoint) -> None:
    for size in written(checkpoint):
        config = LemaConfig.from_yaml(CONFIGS / checkpoint.name / f"{size}GB.yaml")
        assert (
            config.device_memory == f"{size}GB" and config.model_name_or_path == checkpoint.hub_id
        )
        assert named(checkpoint.hub_id) == checkpoint


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_headers_without_weights_are_those_of_the_published_form(form: str, tmp_path: Path) -> None:
    """The name, type and shape of every tensor of a tiny model that is written whole."""
    directory = write_published(tiny_config(FORMS[form]), form, tmp_path / "whole")
    config = AutoConfig.from_pretrained(directory)
    settings = getattr(config, "quantization_config", None)
    assert (settings is None) == (SETTINGS[form] is None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    write_headers(hollow / "model.safetensors", layout_of(config, form))
    kinds = [
        {
            name: (record.dtype, tuple(record.shape))
            for name, record in GlobalBinaryIndex(one).items()
        }
        for one in (directory, hollow)
    ]
    assert kinds[1] == kinds[0]
