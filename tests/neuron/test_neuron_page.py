"""What docs/neuron.md names is there: files, settings, verbs, commands."""

import re
from pathlib import Path

from typer.main import get_command

from lema.cli.app import app
from lema.config import LemaConfig
from lema.config.backendsettings import backend_settings
from lema_neuron.environment import COMPILER, UNSET
from lema_neuron.probe import INSTALL
from lema_neuron.settings import KV_LAYOUT, RUNTIME
from lema_neuron.watch import PATIENCE_AT_START, PATIENCE_LATER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "neuron.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_files_and_links_are_there() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    files = [one for one in CODE if re.fullmatch(r"[\w/]+\.(py|yaml)", one)]
    assert any(links) and files
    assert [link for link in links if link and not (ROOT / "docs" / link).exists()] == []
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_settings_and_verbs_are_ours() -> None:
    known = {*LemaConfig.model_fields, *backend_settings()}
    given = [re.match(r"(\w+)(: .+)?$", one) for one in CODE]
    named = {
        one.group(1)
        for one in given
        if one and (one.group(2) or "_" in one.group(1)) and one.group(1).islower()
    }
    assert {
        "tensor_parallel_size",
        "sequence_parallel",
        "pad_to_multiple_of",
        "neuron_runtime",
    } <= named
    assert named - {"torch_xla", "tokens_per_second"} <= known
    assert {*RUNTIME.choices, *KV_LAYOUT.choices} <= {word for one in CODE for word in one.split()}
    verbs = set(
        re.findall(
            r"\blema ([a-z]+)\b", " ".join(CODE + re.findall(r"^lema .*", PAGE, re.MULTILINE))
        )
    )
    assert {"train", "doctor", "shard", "consolidate"} <= verbs
    assert verbs <= set(get_command(app).commands)  # type: ignore[attr-defined] # a group has commands


def test_commands_variables_and_limits_are_those_of_the_code() -> None:
    for command in re.findall(r"torchrun .*?(configs/neuron_\w+\.yaml)", PAGE):
        assert (ROOT / command).is_file()
    for command in INSTALL.values():
        of_clone = command.partition(": ")[2].replace('"lema-lora[', '-e ".[')
        assert of_clone in PAGE
    for name in {
        *(flag for flags in COMPILER.values() for flag in flags),
        *(one for each in UNSET.values() for one in each),
    }:
        assert f"`{name}`" in PAGE, name
    for patience in (PATIENCE_AT_START, PATIENCE_LATER):
        assert str(int(patience.total_seconds())) in PAGE
