"""A file of LEMA itself is told to be one, and no trainer's file is taken for it."""

from pathlib import Path

import pytest

from lema.errors import ConfigError
from lema_tools.importing.command import translated

OWN = {
    "adapter": "model_name_or_path: m\ntrain_data: rows.jsonl\nlora_rank: 8\n",
    "weights": "model_name_or_path: m\ntrain_data: rows.jsonl\ntrains: full\n",
    "phases": "model_name_or_path: m\nphases:\n- {name: a, trains: full, tokens: 1000}\n",
    "misspelt": "model_name_or_path: m\ntrain_data: rows.jsonl\nlora_ranks: 8\n",
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("tool", [None, "trl", "axolotl", "llamafactory", "torchtune"])
def test_a_file_of_lema_is_no_run_of_another_trainer(
    name: str, tool: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(OWN[name], encoding="utf-8")
    with pytest.raises(ConfigError, match="settings of LEMA") as caught:
        translated([str(file)], tool=tool)
    assert f"lema train {file}" in str(caught.value.how)


def test_every_file_of_the_repository_is_one_of_lema() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert files
    for file in files:
        with pytest.raises(ConfigError, match="settings of LEMA"):
            translated([str(file)])
