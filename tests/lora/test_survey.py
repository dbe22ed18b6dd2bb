"""The table of models says what trying says, for every type the library has, and the page of the
docs is that table.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from clirun import assert_refused, lema
from hubcache import files_of, write_cache
from libraryversions import made_with
from rich.console import Console
from smallrun import write_model
from tiny import write_checkpoint
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lema.model import meta_model
from lema.model.skeleton import EmptyOnMeta
from lema_tools.survey.attempt import Row, model_types, survey, survey_model, try_model
from lema_tools.survey.table import markdown, show_models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# A small one, a hybrid of several kinds of layers, experts, one that does not stream, one with no
# default config.
SAMPLE = ("gpt2", "jamba", "mixtral", "mllama", "dbrx")


def rows_of(page: str) -> dict[str, str]:
    """The rows of the table, by type."""
    return {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}


@pytest.fixture(scope="module")
def sampled() -> dict[str, Row]:
    return {name: survey(name) for name in SAMPLE}


# What it says


def test_every_type_with_a_language_model_is_in_the_table() -> None:
    both = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert model_types() == sorted(both)
    assert len(both) > 240


@pytest.mark.slow
def test_a_type_that_streams_is_told_with_what_its_adapter_trains(sampled: dict[str, Row]) -> None:
    assert sampled["gpt2"] == Row("gpt2", True, ("c_attn", "c_fc", "c_proj"))
    assert sampled["mixtral"].streams and {"q_proj", "o_proj"} <= set(sampled["mixtral"].targets)
    assert sampled["jamba"].streams


def test_a_type_that_does_not_stream_is_told_with_the_reason(sampled: dict[str, Row]) -> None:
    row = sampled["mllama"]
    assert row.streams is False and row.targets == ()
    assert "layers" in row.reason and "\n" not in row.reason


def test_where_there_is_no_default_config_nothing_is_claimed(sampled: dict[str, Row]) -> None:
    row = sampled["dbrx"]
    assert row.streams is None and row.reason.startswith("unknown until given a config: ")


def test_trying_takes_no_memory_and_no_values() -> None:
    """A model of two terabytes, on whatever machine this is."""
    config = CONFIG_MAPPING["llama"](
        hidden_size=1 << 15,
        intermediate_size=1 << 17,
        num_hidden_layers=40,
        num_attention_heads=256,
        vocab_size=1 << 19,
    )
    model = meta_model(config, torch.float32)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 2 << 40
    assert try_model(model, "llama").streams


def test_weights_that_begin_as_zeros_take_no_memory_either() -> None:
    before = psutil.Process().memory_info().rss
    with EmptyOnMeta():
        zeros = torch.zeros(1 << 15, 1 << 15, dtype=torch.bfloat16)  # 2 GiB
        small = torch.zeros(2, 3)
    zeros[-1, -2:] = 1
    assert zeros[-1, -3:].tolist() == [0, 1, 1] and zeros[0, 0] == 0 and not zeros.is_meta
    assert torch.equal(small, torch.zeros(2, 3))
    assert psutil.Process().memory_info().rss - before < 1 << 28


def test_what_a_model_lost_to_another_library_is_told_apart_from_what_we_lost() -> None:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=4)
    model = meta_model(config, torch.float32)
    model.model.norm.forward = lambda hidden: hidden + hidden.no_such_thing
    row = try_model(model, "llama")
    assert row.streams is None
    assert (
        row.reason.startswith("unknown until given a config: AttributeError")
        and "no_such_thing" in row.reason
    )


def test_layers_that_speak_to_each_other_are_found_out() -> None:
    """What is found is found by running: the same config with one thing changed no longer
    streams.
    """
    model = meta_model(CONFIG_MAPPING["llama"](num_hidden_layers=4), torch.float32)

    def forward(input_ids: torch.Tensor, **_: object) -> object:
        hidden = model.model.embed_tokens(input_ids)
        for layer in model.model.layers:
            hidden = layer(
                Doubled.apply(hidden),
                position_embeddings=model.model.rotary_emb(hidden, torch.arange(8)[None]),
            )
        return type("Output", (), {"logits": model.lm_head(hidden)})()

    model.forward = forward
    row = try_model(model, "llama")
    assert row.streams is False and "between its layers" in row.reason


class Doubled(torch.autograd.Function):
    """An operation whose gradient is its own."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 3 * gradients[0]


def test_an_adapter_that_fits_nothing_is_told_of_a_model_that_streams() -> None:
    model = meta_model(CONFIG_MAPPING["llama"](num_hidden_layers=4), torch.float32)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Plain(child))
    row = try_model(model, "llama")
    assert row.streams is True and row.targets == ()
    assert row.reason.startswith("no adapter by default: ")


class Plain(nn.Module):
    """A linear map that is no `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given @ self.weight.T


# Models on disk


def test_a_directory_is_tried_with_its_own_config_and_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    row = survey_model(str(directory))
    assert (row.model_type, row.streams, row.prepare, row.source) == (
        "llama",
        True,
        False,
        str(directory),
    )
    assert row.targets == survey("llama").targets


def test_weights_that_must_be_converted_are_told(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("mixtral", tmp_path)
    assert survey_model(str(checkpoint.published)).prepare is True
    # a directory has the published names again
    assert survey_model(str(checkpoint.streamed)).prepare is True


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 9}
    (directory / "config.json").write_text(json.dumps(config))
    row = survey_model(str(directory))
    assert row.streams is False and "does not fit" in row.reason


def test_a_model_in_the_cache_is_tried_and_none_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", no_network)
    assert_refused(capfd, 3, ["nor in the hub cache", "hf download org/tiny"], "models", "org/tiny")
    write_cache(tmp_path / "cache", files_of(write_model(tmp_path / "model")))
    assert lema("models", "org/tiny") == 0
    assert "org/tiny (llama)\tas stored\t" in capfd.readouterr().out


def no_network(*_: object) -> None:
    raise AssertionError("the network was asked")


# How it is shown


def test_away_from_a_terminal_there_are_columns_and_a_row_comes_when_it_is_known(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shown: list[str] = []

    def rows() -> Iterator[Row]:
        yield Row("one", True, ("q", "v"))
        shown.append(capfd.readouterr().out)
        yield Row("two", None, (), "unknown until [then]")

    show_models(rows(), Console())
    assert shown == ["type\tstreams\tadapters\twhy not\none\tyes\tq v\t\n"]
    assert capfd.readouterr().out == "two\tunknown\t\tunknown until [then]\n"


def test_on_a_terminal_there_is_a_table_and_a_sum(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("one", True, ("q",)),
        Row("two", False, (), "its [layers] meet"),
        Row("six", None, (), "why"),
    ]
    show_models(rows, Console(force_terminal=True, width=100, no_color=True))
    out = capfd.readouterr().out
    assert "its [layers] meet" in out and "\t" not in out
    assert "3 in all: 1 stream, 1 do not, 1 unknown." in out


def test_the_command_prints_the_same_as_json(
    sampled: dict[str, Row], capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("models", "gpt2", "mllama", "--json") == 0
    found = [
        Row(**row | {"targets": tuple(row["targets"])})
        for row in json.loads(capfd.readouterr().out)
    ]
    assert found == [sampled["gpt2"], sampled["mllama"]]


@pytest.mark.parametrize("name", ["lama", "gpt-2"])
def test_a_misspelt_type_is_told_before_anything_is_tried(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        capfd,
        2,
        ["neither a type of model nor a directory", "did you mean"],
        "models",
        "gpt2",
        name,
    )
    assert capfd.readouterr().out == ""


def test_trying_leaves_the_process_as_it_was(sampled: dict[str, Row]) -> None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    generator = torch.get_rng_state()
    row = survey("mllama")
    assert row == sampled["mllama"]
    assert logging.get_verbosity() == level
    assert torch.equal(torch.get_rng_state(), generator)


# The page of the docs


@made_with("transformers")
def test_the_page_has_every_type_once() -> None:
    text = PAGE.read_text()
    assert sorted(rows_of(text)) == model_types()
    assert text.count("\n| `") == len(model_types())


@made_with("transformers", "peft")
def test_the_page_says_what_the_command_says(sampled: dict[str, Row]) -> None:
    assert rows_of(markdown(sampled.values())) == {
        name: rows_of(PAGE.read_text())[name] for name in SAMPLE
    }


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@made_with("transformers", "peft")
def test_the_whole_page_is_what_the_command_prints(capfd: pytest.CaptureFixture[str]) -> None:
    made_with = PAGE.read_text().splitlines()[2]
    for package in ("transformers", "peft"):
        assert f"{package} {version(package)}" in made_with, (
            "make the page again: lema models --markdown > docs/models.md"
        )
    assert lema("models", "--markdown") == 0
    assert capfd.readouterr().out.splitlines()[3:] == PAGE.read_text().splitlines()[3:]
