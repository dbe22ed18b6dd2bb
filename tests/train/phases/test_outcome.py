"""What a phase has left is opened, shown and measured by the verbs that take the settings of a
run.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from clirun import assert_refused, lema
from ruamel.yaml import YAML
from test_phase_file import PHASES, STAGES, written

from lema.train import LemaModel
from lema.train.phases.file import read_phase_file
from lema_tools.loading import Outcome

__all__ = ["written"]


def shown(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    capfd.readouterr()
    assert lema(*words) == 0, capfd.readouterr().err
    return capfd.readouterr().out


@pytest.mark.parametrize("text", [PHASES, STAGES])
def test_all_settings_of_phases_are_shown_as_a_file_that_is_the_same_run(
    text: str, written: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(text)
    whole = tmp_path / "whole.yaml"
    whole.write_text(shown(capfd, "config", "show", file, "--set", "save_total_limit=3"))
    mine = read_phase_file(whole)
    theirs = read_phase_file(file, save_total_limit=3)
    assert (
        mine.plan == theirs.plan
        and mine.train_data == theirs.train_data
        and mine.eval_data == theirs.eval_data
    )
    of_plan = {
        name: getattr(theirs.plan, name)
        for name in ("batch_size", "micro_batch_size", "max_length", "seed")
    }
    of_plan |= {} if theirs.eval_data else {"eval_steps": None}
    assert mine.config.to_dict() == theirs.config.to_dict() | of_plan


def test_the_settings_of_one_phase_are_shown_by_its_name_or_number(
    written: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(
        PHASES, ("learning_rate: 1e-2", "learning_rate: 1e-2, weight_decay: 0.1, lora_rank: 4")
    )
    named = YAML(typ="safe").load(shown(capfd, "config", "show", file, "--phase", "adapters"))
    assert named == YAML(typ="safe").load(shown(capfd, "config", "show", file, "--phase", "2"))
    assert (named["learning_rate"], named["weight_decay"], named["lora_rank"], named["device"]) == (
        0.01,
        0.1,
        4,
        "cpu",
    )
    first = YAML(typ="safe").load(shown(capfd, "config", "show", file, "--phase", "whole"))
    assert (first["learning_rate"], first["weight_decay"], first["trains"]) == (0.001, 0.0, "full")
    assert "lora_rank" not in first
    assert_refused(
        capfd,
        2,
        ["no phase 'adaptors'", "did you mean adapters?"],
        "config",
        "show",
        file,
        "--phase=adaptors",
    )
    assert_refused(capfd, 2, ["no phase '3'", "whole, adapters"], "eval", file, "--phase", "3")


def test_eval_and_generate_take_what_the_last_phase_left_or_the_one_that_is_named(
    written: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(PHASES)
    begun = shown(capfd, "eval", file, "--phase", "whole")
    assert_refused(capfd, 2, ["phase adapters has not begun", "phase whole"], "eval", file)
    assert lema("train", file) == 0
    lines = dict(line.split() for line in shown(capfd, "eval", file).splitlines())
    with closing(LemaModel.from_pretrained(tmp_path / "out")) as model:
        rows = Outcome(read_phase_file(file), 1).eval_sources(model)
        assert rows.keys() == {"rows"}
        expected = model.get_trainer().evaluate(rows["rows"])
    assert lines == {name: f"{value:.6g}" for name, value in expected.items()}
    first = shown(capfd, "eval", file, "--phase", "1")
    names = [line.split()[0] for line in first.splitlines()]
    assert names[0] == "eval_packed_loss" and "eval_rows_perplexity" in names and len(names) == 6
    assert first != begun and [line.split()[0] for line in begun.splitlines()] == names
    given = ["eval", "--data", tmp_path / "rows.jsonl"]
    assert dict(line.split() for line in shown(capfd, *given, file).splitlines()) == lines
    assert (
        shown(capfd, *given, file, "--phase", "whole").splitlines()[0]
        != f"eval_loss {lines['eval_loss']}"
    )
