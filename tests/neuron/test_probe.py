"""Which runtime is taken, and what is said where there is none."""

from pathlib import Path

import pytest

from lema.config import LemaConfig
from lema.errors import BackendUnavailable, ConfigError
from lema_neuron.probe import INDEX, Found, choose_runtime, probe_machine

NATIVE = Found({"torch": "2.13.0", "torch-neuronx": "2.13.1.3.0", "torch-xla": None}, 1)
LAZY = Found({"torch": "2.9.0", "torch-neuronx": "2.9.0.2.12", "torch-xla": "2.9.0"}, 2)
NOTHING = Found({"torch": "2.13.0", "torch-neuronx": None, "torch-xla": None}, 0)


@pytest.mark.parametrize(
    ("asked", "found", "chosen"),
    [
        ("auto", NATIVE, "native"),
        ("native", NATIVE, "native"),
        ("auto", LAZY, "xla"),
        ("xla", LAZY, "xla"),
        ("emulated", NOTHING, "emulated"),
        ("emulated", NATIVE, "emulated"),
    ],
)
def test_what_is_installed_is_taken_or_what_is_asked_for(
    asked: str, found: Found, chosen: str
) -> None:
    assert choose_runtime(asked, found) == chosen


@pytest.mark.parametrize(
    ("asked", "found", "words"),
    [
        (
            "auto",
            NOTHING,
            (
                "torch-neuronx is not installed",
                INDEX,
                "torch-neuronx>=2.13",
                "torch-neuronx==2.9",
                "emulated",
            ),
        ),
        (
            "xla",
            NOTHING,
            ("torch-neuronx is not installed", INDEX, "torch-neuronx==2.9", "torch 2.13.0"),
        ),
        ("native", LAZY, ("2.9.0.2.12 is for xla", "torch-neuronx>=2.13")),
        ("xla", NATIVE, ("2.13.1.3.0 is for native", "torch-neuronx==2.9")),
        (
            "auto",
            Found({**LAZY.versions, "torch-xla": None}, 1),
            ("torch-xla is not installed", INDEX),
        ),
        ("auto", Found(NATIVE.versions, 0), ("no Neuron device", "trn2", "emulated")),
        (
            "auto",
            Found(
                {"torch": "2.13.0", "torch-neuronx": "1.0.0"},
                1,
                ("torch-neuronx 1.0.0 is a stand-in.",),
            ),
            ("stand-in", INDEX),
        ),
    ],
)
def test_what_is_missing_is_said_with_versions_and_index(
    asked: str, found: Found, words: tuple[str, ...]
) -> None:
    with pytest.raises(BackendUnavailable) as error:
        choose_runtime(asked, found)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_nothing_is_emulated_unasked() -> None:
    for found in (NATIVE, LAZY):
        assert choose_runtime("auto", found) != "emulated"


def test_devices_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron_cc", "null"):
        (tmp_path / "dev" / name).touch()
    assert probe_machine(tmp_path).devices == 2


def test_a_config_takes_it_as_any_other_setting(tmp_path: Path) -> None:
    config = LemaConfig("model", device="neuron", neuron_runtime="emulated")
    assert config.neuron_runtime == "emulated" and config.neuron_kv_layout == "auto"
    assert LemaConfig(**config.to_dict()) == config
    assert (
        LemaConfig("model").neuron_runtime == "auto" and LemaConfig("model").backend_settings == {}
    )
    config.save_pretrained(tmp_path)
    assert LemaConfig.from_pretrained(tmp_path).neuron_runtime == "emulated"
    assert LemaConfig.json_schema()["properties"]["neuron_runtime"]["enum"] == [
        "auto",
        "xla",
        "native",
        "emulated",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"neuron_runtime": "emulate"},
            ("neuron_runtime must be one of", "did you mean 'emulated'"),
        ),
        ({"neuron_runtim": "emulated"}, ("unknown setting 'neuron_runtim'", "neuron_runtime")),
        ({"neuron_runtime": 3}, ("neuron_runtime",)),
        (
            {"backend_settings": {"else": "x"}},
            ("no backend that is installed has a setting 'else'",),
        ),
    ],
)
def test_what_a_config_says_wrongly_is_refused_by_name(
    settings: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        LemaConfig("model", **settings)
    assert all(word.replace("'emulated'", "emulated") in str(error.value) for word in words), str(
        error.value
    )
