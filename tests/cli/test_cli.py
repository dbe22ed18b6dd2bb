"""The command line: what it prints, the code it ends with, and that it never shows a traceback
unasked.
"""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import lema
from lema import errors
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config import LemaConfig
from lema.config.backendsettings import backend_settings
from lema.train.phases.schema import DRAFT, TITLE

VERBS = [
    "demo",
    "train",
    "eval",
    "prepare",
    "generate",
    "merge",
    "consolidate",
    "shard",
    "models",
    "backends",
    "doctor",
    "config",
]
HEAVY = {"torch", "transformers", "peft", "datasets", "ruamel", "huggingface_hub", "numpy"}


def config_file(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text)
    return path


def failing(error: BaseException) -> typer.Typer:
    """A command line of one verb, which fails."""
    commands = typer.Typer(pretty_exceptions_enable=False)

    @commands.command()
    def fail() -> None:
        raise error

    return commands


def test_help_names_every_verb_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--help"]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in text
    assert "75 stopped" in " ".join(text.split())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [verb, "--help"]) == 0
    assert "Usage: lema " + verb in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["models", "--help"],
        ["--version"],
        ["train", "missing.yaml"],
    ],
)
def test_nothing_heavy_is_imported_to_answer(arguments: list[str]) -> None:
    code = (
        "import json, sys\nfrom lema.cli.app import app\nfrom lema.cli.exitcodes import run\n"
        f"code = run(app, {arguments!r})\n"
        "print('\\n' + json.dumps([code, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _, modules = json.loads(done.stdout.splitlines()[-1])
    checked = HEAVY - {"ruamel"} if arguments[-1].endswith(".yaml") else HEAVY
    assert sorted(checked & set(modules)) == []


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lema", "config", "show", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot read the config file")
    assert "Traceback" not in done.stderr


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"]) == 0
    assert capsys.readouterr().out == f"lema {lema.__version__}\n"


# How errors end


def every_error() -> list[type[errors.LemaError]]:
    return [one for name in errors.__all__ if isinstance(one := getattr(errors, name), type)]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_of_ours_is_a_message_and_its_exit_code(
    kind: type[errors.LemaError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing(kind("it broke", where="layer 3 [q]", how="mend it")), []) == kind.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    if kind is errors.Stopped:  # no error: somebody asked for it, and everything is saved
        assert err == "it broke\n  where: layer 3 [q]\n  next:  mend it\n"
    else:
        assert err == "error: it broke\n  where: layer 3 [q]\n  fix:   mend it\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/out/x"), 6, "/out/x"),
        (OSError(errno.EROFS, "Read-only file system", "/out/x"), 6, "Read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "/out/x"), 2, "Permission denied"),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("boom"), 1, "RuntimeError: boom"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_other_errors_have_exit_codes_too(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing(error), []) == code
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "arguments", [["--debug", "config", "show"], ["config", "show", "--debug"]]
)
def test_debug_lets_the_traceback_through(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError):
        run(app, [*arguments, str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "--no-such", "x"],
        ["generate", "x"],
        ["generate", "x", "-p", "a", "--top-p", "2"],
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


# Settings


@pytest.mark.parametrize("verb", [["train"], ["config", "show"], ["generate", "-p", "x"], ["eval"]])
def test_a_misspelt_setting_is_refused_by_every_verb_that_reads_a_config(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, "model_name_or_path: m\nlora_rnak: 8\n")
    assert run(app, [*verb, str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: unknown setting 'lora_rnak'\n  where: {path}:2\n  fix:   did you mean lora_rank?\n"
    )


def test_phases_are_asked_for_of_a_file_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, "model_name_or_path: m\n")
    assert run(app, ["config", "show", str(path), "--phase", "1"]) == 2
    assert "only a file of phases has any" in capsys.readouterr().err


def test_show_prints_every_setting_as_yaml_that_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(
        tmp_path, "model_name_or_path: m\nlora_target_modules: [q_proj]\nlearning_rate: 3e-5\n"
    )
    arguments = [
        "config",
        "show",
        str(path),
        "--set",
        "lora_rank=4",
        "--set",
        "device_memory=0.5",
        "--set",
        "run_name=a=b",
    ]
    assert run(app, arguments) == 0
    shown = config_file(tmp_path, capsys.readouterr().out)
    expected = LemaConfig(
        "m",
        lora_target_modules=["q_proj"],
        learning_rate=3e-5,
        lora_rank=4,
        device_memory=0.5,
        run_name="a=b",
    )
    assert LemaConfig.from_yaml(shown).to_dict() == expected.to_dict()
    assert [
        line.split(":")[0] for line in shown.read_text().splitlines() if line[0] != "-"
    ] == list(LemaConfig.model_fields)


def test_schema_is_json_and_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["config", "schema"]) == 0
    schema: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {*LemaConfig.model_fields, *backend_settings(), "phases"}
    assert (schema["$schema"], schema["title"]) == (DRAFT, TITLE)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lora_rnak=8", "did you mean lora_rank?"),
        ("lora_rank=eight", "whole number"),
        ("lora_rank=", "lora_rank is empty"),
        ("lora_rank", "KEY=VALUE"),
        ("=8", "KEY=VALUE"),
        ("lora_target_modules=[q_proj", "not YAML"),
        ("lora_rank_pattern.q_proj=8", "give all of lora_rank_pattern"),
        ("phases.0.learning_rate=1", "give all of phases"),
        ("phases[0].learning_rate=1", "give all of phases"),
    ],
)
def test_a_wrong_set_option_is_named(
    setting: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, "model_name_or_path: m\nlora_rank: 4\n")
    assert run(app, ["config", "show", str(path), "--set", setting]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "--set " + setting.partition("=")[0] in message
    assert str(path) not in message


def test_merge_refuses_a_size_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(app, ["merge", str(tmp_path), str(tmp_path / "out"), "--max-shard-size", "huge"]) == 2
    )
    assert "not an amount of memory" in capsys.readouterr().err


def test_prepare_refuses_an_unknown_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["prepare", "m", str(tmp_path / "out"), "--dtype", "bf16"]) == 2
    assert "did you mean bfloat16?" in capsys.readouterr().err


# The package


def test_the_package_offers_its_names_lazily() -> None:
    code = (
        "import json, sys, lema\nbefore = sorted(sys.modules)\n"
        "assert lema.LemaConfig('m').strategy is lema.MemoryStrategy.STREAMING\n"
        "print(json.dumps([before, sorted(sys.modules), dir(lema)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, names = json.loads(done.stdout)
    assert "lema.config" not in before
    assert "torch" not in after
    assert set(lema.__all__) <= set(names)


def test_a_name_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LemaModle'"):
        lema.LemaModle  # noqa: B018


@pytest.mark.parametrize(
    "words",
    [
        ("init", "~nosuchuser/x", "--device-memory", "1GB", "--data", "."),
        ("models", "~nosuchuser/x"),
        ("prepare", "~nosuchuser/x", "out"),
        ("generate", "~nosuchuser/x", "--prompt", "a"),
    ],
)
def test_a_home_of_nobody_is_a_name_like_any_other(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(app, words) in (2, 3)
    err = capfd.readouterr().err
    assert "~nosuchuser/x" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [(), ("config",), ("demo", "a"), ("backends",), ("config", "schema"), ("plan", "a", "--price")],
)
def test_a_word_of_a_million_characters_is_not_repeated_whole(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [*words, "x" * 10**6]) == 2
    assert len(capfd.readouterr().err) < 2000
