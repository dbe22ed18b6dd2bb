"""Ctrl-C ends a command at every stage, with exit code 130; a run that is trained stops with a
checkpoint.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import CHATS, config_writer, write_rows
from faults.words import TEMPLATE
from forked import run_program
from smallrun import write_model

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.train.checkpoint.format import checkpoints

PROGRAM = str(Path(__file__).parents[1] / "support" / "interrupted.py")
Interrupted = Callable[..., tuple[int, str]]

STAGES = {
    "checking": (["data", "CONFIG"], "lema.model.files:ModelFiles.__init__"),
    "rendering": (["data", "CHATS"], "lema.data.chat.process:_Process.exchange"),
    "tokenising": (["data", "CONFIG"], "lema.data.read:tokenize_rows"),
    "planning": (["plan", "CONFIG"], "lema.plan.planner:Planner.__init__"),
    "reading": (["eval", "CONFIG", "--set", "eval_data=DATA"], "lema.stream.reader:_File.read"),
    "evaluating": (
        ["eval", "CONFIG", "--set", "eval_data=DATA"],
        "lema.engine.layers.whole:WholeLayer.run",
    ),
    "reading for training": (
        ["train", "CONFIG", "--set", "output_dir=OUT"],
        "lema.train.run:load_data",
    ),
    "generating": (
        ["generate", "ADAPTER", "--prompt", "the river", "--max-new-tokens", "8"],
        "lema.engine.generation.stopping:StopCriteria.__call__",
    ),
    "merging": (["merge", "ADAPTER", "OUT"], "lema.convert.merge:MergedTensors.value"),
    "preparing": (["prepare", "MODEL", "OUT"], "lema.convert.prepare:write_weights"),
    "proving": (["prove", "MODEL"], "subprocess:Popen.communicate"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data, two configs and an adapter."""
    place = tmp_path_factory.mktemp("interrupted")
    write = config_writer(write_model(place / "model"), place)
    (place / "own.jinja").write_text(TEMPLATE)
    write_rows(place / "chats.jsonl", CHATS)
    shared = {"max_steps": 2, "save_steps": 1, "data_cache": str(place / "kept")}
    write(**shared, output_dir=str(place / "adapter")).rename(place / "config.yaml")
    chats = {"train_data": str(place / "chats.jsonl"), "chat_template": str(place / "own.jinja")}
    write(**shared, **chats).rename(place / "chats.yaml")
    assert run(app, ["train", str(place / "config.yaml")]) == 0
    return place


def ended(process: int) -> bool:
    """Wait until a process has ended, a worker that is nobody's child any more, too."""
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(process)) as descriptor:
        return bool(select.select([descriptor], [], [], 60)[0])
    return True


@pytest.fixture
def interrupted(place: Path, tmp_path: Path) -> Interrupted:
    """Run a command that is sent a signal where it comes to a function; return its exit code and
    what it printed.
    """
    named = {
        "CONFIG": place / "config.yaml",
        "CHATS": place / "chats.yaml",
        "ADAPTER": place / "adapter",
    }
    named |= {
        "MODEL": place / "model",
        "DATA": place / "data.jsonl",
        "OUT": tmp_path / "out",
        "RUN": tmp_path / "run",
    }

    def begin(
        words: list[str], function: str, number: str = "SIGINT", *, stuck: bool = False, **env: str
    ):  # type: ignore[no-untyped-def]
        for name, path in named.items():
            words = [word.replace(name, str(path)) for word in words]
        done = run_program(
            [PROGRAM, number, function, str(int(stuck)), "lema", *words], 1, tmp_path, env=env
        )
        came = [line for line in done.stdout.splitlines() if line.startswith(f"came to {function}")]
        assert came, done.stdout + done.stderr
        *_, process, began = came[0].split()
        seconds = time.time() - float(began)
        assert ended(int(process))
        sys.stdout.write(f"{function} {number}: ended after {seconds:.2f} s\n")  # for `pytest -s`
        return done.returncode, done.stdout + done.stderr

    return begin


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_a_command_at_any_stage(
    stage: str, interrupted: Interrupted, tmp_path: Path
) -> None:
    code, said = interrupted(*STAGES[stage])
    assert code == 130
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_workers_end_with_the_command_that_tokenises(number: str, interrupted: Interrupted) -> None:
    code, _ = interrupted(["data", "CHATS"], "lema.data.cache:_gathered", number, WORKERS="1")
    assert code == (130 if number == "SIGINT" else -signal.SIGTERM)


def test_a_command_that_is_within_a_library_ends_too(interrupted: Interrupted) -> None:
    """The exception of Python comes only when the library returns, which this one never does."""
    code, _ = interrupted(*STAGES["evaluating"], stuck=True)
    assert code == 130


@pytest.mark.parametrize(
    "function", ["lema.engine.layers.whole:WholeLayer.forward", "lema.train.trainer:save_adapter"]
)
def test_a_run_that_is_trained_stops_with_a_whole_checkpoint(
    function: str, interrupted: Interrupted, place: Path, tmp_path: Path
) -> None:
    """Within a step, and within a save."""
    code, said = interrupted(["train", "CONFIG", "--set", "output_dir=RUN"], function)
    assert code == 75, said
    assert checkpoints(tmp_path / "run")
    assert (
        run(
            app,
            [
                "train",
                str(place / "config.yaml"),
                "--resume",
                "--set",
                f"output_dir={tmp_path / 'run'}",
            ],
        )
        == 0
    )


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("again", ["0.02", "0.3"])
def test_a_run_that_is_told_twice_within_a_second_stops_as_if_told_once(
    again: str, number: str, interrupted: Interrupted, tmp_path: Path
) -> None:
    """The run is so small that it has stopped when the second one comes."""
    code, said = interrupted(
        ["train", "CONFIG", "--set", "output_dir=RUN"],
        "lema.engine.layers.whole:WholeLayer.forward",
        number,
        AGAIN=again,
    )
    assert code == 75, said
    assert "--resume" in said and "Traceback" not in said
    assert checkpoints(tmp_path / "run")


@pytest.mark.parametrize("stage", ["tokenising", "merging"])
@pytest.mark.parametrize("again", ["0.02", "0.3"])
def test_a_second_ctrl_c_ends_a_command_as_the_first(
    again: str, stage: str, interrupted: Interrupted
) -> None:
    code, said = interrupted(*STAGES[stage], AGAIN=again)
    assert code == 130
    assert "Traceback" not in said and "Exception" not in said


IMPORTING = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r} and self in sys.meta_path:
            sys.meta_path.remove(self)
            print("importing", flush=True)

sys.meta_path.insert(0, Finder())
sys.argv = ["lema", "plan", {config!r}]
from lema_tools.command import main
main()
"""


@pytest.mark.parametrize("module", ["lema.cli", "typer", "torch"])
def test_ctrl_c_ends_a_command_that_imports(module: str, place: Path) -> None:
    code = IMPORTING.format(module=module, config=str(place / "config.yaml"))
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **streams) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "importing\n"
        began = time.time()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
        assert child.stderr.read() == ""
        sys.stdout.write(f"importing: ended after {time.time() - began:.2f} s\n")
