"""SECURITY.md says of every key of a file that comes with a model or an adapter what it may do.

A new setting of LEMA, or a key of a new version of PEFT or transformers, is in no row until
somebody has decided.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import GenerationConfig, PretrainedConfig

from lema import LemaConfig
from lema.config.acting import ACTING, SILENT
from lema.config.peft import CARRIED, REFUSED, SETTING_OF
from lema.storage.modelfiles import MACHINERY

PAGE = Path(__file__).parents[2] / "SECURITY.md"
INNER = {"_post_init_done"}  # is set by transformers, and taken from no file
KEYS: dict[str, Callable[[], Iterable[str]]] = {
    "lema_config.json": lambda: LemaConfig.model_fields,
    "adapter_config.json": lambda: [field.name for field in fields(LoraConfig)],
    "config.json": lambda: (
        {*vars(PretrainedConfig()), "auto_map", "quantization_config", "configuration_files"}
        - INNER
    ),
    "generation_config.json": lambda: vars(GenerationConfig()),
}


def rows_of(file: str) -> dict[str, str]:
    """Every key in the table of a file, with the row after its keys."""
    (section,) = re.findall(
        rf"^### `{re.escape(file)}`\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    found: dict[str, str] = {}
    for row in (line for line in section.splitlines() if line.startswith("|")):
        keys, rest = row.strip("|").split("|", 1)
        for key in re.findall(r"`([^`]+)`", keys):
            assert key not in found, f"{key} is in two rows of {file}"
            found[key] = rest
    return found


@pytest.mark.parametrize("file", KEYS)
def test_every_key_is_in_one_row_of_its_file(file: str) -> None:
    assert sorted({*KEYS[file]()} - rows_of(file).keys()) == []


def test_the_settings_that_act_are_ignored_and_the_others_used() -> None:
    rows = rows_of("lema_config.json")
    assert {key for key, row in rows.items() if "ignored" in row} == ACTING.keys()
    assert {
        key for key, row in rows.items() if "ignored" in row and "with a line" not in row
    } == SILENT


def test_the_options_of_peft_are_used_refused_or_without_use() -> None:
    rows = rows_of("adapter_config.json")
    assert {key for key, row in rows.items() if "refused" in row} == REFUSED.keys()
    assert {key for key, row in rows.items() if "not used" in row} <= CARRIED
    assert {key for key, row in rows.items() if "| used" in row} >= SETTING_OF.keys()


def test_the_machinery_of_generation_is_ignored() -> None:
    rows = rows_of("generation_config.json")
    assert {key for key, row in rows.items() if "ignored" in row} == {*MACHINERY}
